"""Depth, work and placement, seen by tracing the operations on the meta device."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fasth import householder
from fasth.reflections.planner import Where, forming_pays

PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm}


class Depth(TorchDispatchMode):
    """The length of the longest chain of matrix products, and the devices of all tensors made."""

    def __init__(self) -> None:
        super().__init__()
        self.by_storage: dict[int, int] = {}
        self.alive: list[torch.Tensor] = []
        self.devices: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        flat = torch.utils._pytree.tree_leaves
        inputs = [t for t in flat((args, kwargs)) if isinstance(t, torch.Tensor)]
        depth = max((self.by_storage.get(self._key(t), 0) for t in inputs), default=0)
        depth += func.overloadpacket in PRODUCTS
        for t in flat(out):
            if isinstance(t, torch.Tensor):
                self.alive.append(t)
                self.devices.add(t.device.type)
                self.by_storage[self._key(t)] = max(depth, self.by_storage.get(self._key(t), 0))
        return out

    def length(self, t: torch.Tensor) -> int:
        return self.by_storage[self._key(t)]

    @staticmethod
    def _key(t: torch.Tensor) -> int:
        return t.untyped_storage()._cdata


@pytest.mark.parametrize(
    ("d", "k"),
    [(64, 8), (256, 32), (384, 96), (1000, 250), (1024, 32), (4096, 64), (16384, 128), (16384, 256)],
)
@pytest.mark.parametrize("triangular", [False, True], ids=["full", "triangular"])
@pytest.mark.parametrize("rows", [32, 100_000])
def test_depth_is_r_over_k_plus_log_k(d, k, triangular, rows):
    x = torch.empty(rows, d, device="meta", requires_grad=True)
    V = torch.empty(d, d, device="meta", requires_grad=True)
    blocks, halvings = d // k, math.ceil(math.log2(k))
    with Depth() as depth:
        out = householder(x, V, triangular=triangular, block_size=k)
        forward = depth.length(out)
        of_x, of_V = torch.autograd.grad(out, (x, V), torch.empty_like(out))
        step = max(depth.length(of_x), depth.length(of_V))
    # T: one Gram product and two products per halving. Then three products per block, of which the first block's
    # first does not wait for T.
    # Where Q is formed, which takes the same, it is then multiplied by: one product more.
    by_Q = forming_pays(rows, d, d, triangular, Where("meta", x.dtype))
    assert forward == 3 * blocks + 2 * halvings + by_Q
    # The way back is as deep. Its last block still has to turn its state into a gradient, by four products.
    assert step <= forward + 3 * blocks + 4 + by_Q
    paper = d // k + k
    if k >= 64:
        assert forward < 3 * d // k + paper / 2
    assert depth.devices == {"meta"}, "a tensor was made elsewhere"


@pytest.mark.parametrize("transpose", [False, True])
def test_triangular_does_half_the_work(transpose):
    def operations(triangular: bool) -> int:
        x = torch.empty(32, 2048, device="meta", requires_grad=True)
        V = torch.empty(2048, 2048, device="meta", requires_grad=True)
        with FlopCounterMode(display=False) as flops:
            householder(x, V, triangular=triangular, transpose=transpose, block_size=32).sum().backward()
        return flops.get_total_flops()

    assert operations(True) < 0.53 * operations(False)


def test_no_value_is_read_back_from_the_device(dtype):
    """Fake tensors have no values: anything that asked for one would raise."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        for device in ("cpu", "meta"):
            x = torch.empty(8, 3, 20, dtype=dtype, device=device, requires_grad=True)
            V = torch.empty(8, 20, 20, dtype=dtype, device=device, requires_grad=True)
            for triangular in (False, True):
                out = householder(x, V, triangular=triangular, block_size=6)
                out.sum().backward()
                assert out.device.type == V.grad.device.type == device
