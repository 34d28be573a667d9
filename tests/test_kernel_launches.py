"""Counts the launches of the Triton kernels on the meta device; importing fasth does not import Triton."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from processes import script
from torch import Tensor

import fasth
from fasth import RNNSVD, LinearOrthogonal, LinearSVD, LinearSymmetric
from fasth.functional import FORMS, reflect
from fasth.nn.recurrence import Times, recurrence
from fasth.reflections import planner, precision
from fasth.reflections.plan import COMPACT, FULL, TORCH, TRITON
from fasth.reflections.planner import backend_for, counting_kernels
from fasth.tools.reproduce.counts import observed

SIZES = [64, 100, 768, 1024, 2048]


@pytest.fixture
def launched() -> Iterator[list[str]]:
    """The names of all kernels and of all operations of PyTorch, as a GPU would be given them."""
    pytest.importorskip("triton", reason="Triton has no build for this system")
    with counting_kernels(), observed() as names:
        yield names


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, device="meta", dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("d", SIZES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_product_is_two_launches_forward_and_two_backward(
    d: int, form: str, transpose: bool, stored: torch.dtype, launched: list[str]
) -> None:
    x, V = meta(32, d, dtype=stored), meta(d, d, dtype=stored)
    out = reflect(x, V, form, transpose=transpose)
    assert launched == ["factors", "sweep"]
    launched.clear()
    torch.autograd.grad(out, (x, V), torch.empty_like(out))
    assert launched == ["sweep", "gradient"]


def test_so_it_is_for_batches_and_any_number_of_reflectors(launched: list[str]) -> None:
    for x, V in ((meta(5, 3, 40), meta(5, 90, 40)), (meta(3, 40), meta(1000, 40)), (meta(7, 2048), meta(1, 2048))):
        out = fasth.householder(x, V)
        torch.autograd.grad(out, (x, V), torch.empty_like(out))
        assert launched == ["factors", "sweep", "sweep", "gradient"]
        launched.clear()


LAYERS: dict[str, Callable[[int], Any]] = {
    "LinearSVD": lambda d: LinearSVD(d, d, device="meta"),
    "LinearSVD, wide": lambda d: LinearSVD(d, d // 2, device="meta"),
    "LinearSVD, thin": lambda d: LinearSVD(d, d, rank=16, device="meta"),
    "LinearSymmetric": lambda d: LinearSymmetric(d, device="meta"),
    "LinearOrthogonal": lambda d: LinearOrthogonal(d, d, device="meta"),
}


@pytest.mark.parametrize("d", SIZES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_step_of_a_layer_is_at_most_ten_launches(name: str, d: int, launched: list[str]) -> None:
    layer, x = LAYERS[name](d), meta(32, d)
    launched.clear()
    out = layer(x)
    torch.autograd.grad(out, (x, *(p for p in layer.parameters() if p.requires_grad)), torch.empty_like(out))
    assert len(launched) <= 10, launched


@pytest.mark.parametrize("reflectors", ["compact", "full"])
def test_a_step_of_linear_svd_is_nine(reflectors: str, launched: list[str]) -> None:
    """Full reflectors have the signs of sigma apart: the kernels multiply by them too."""
    layer, x = LinearSVD(1024, 1024, reflectors=reflectors, device="meta"), meta(32, 1024)
    launched.clear()
    out = layer(x)
    assert launched == ["factors"] * 2 + ["sweep"] * 2
    trained = [p for p in layer.parameters() if p.requires_grad]
    torch.autograd.grad(out, (x, *trained), torch.empty_like(out))
    assert launched[4:] == ["sweep"] * 2 + ["gradient"] * 2 + ["sums_over_rows"]


@pytest.mark.parametrize("h", [64, 256])
def test_a_recurrence_is_two_launches_for_any_number_of_times(h: int, launched: list[str]) -> None:
    layer, x = RNNSVD(10, h, nonlinearity="modrelu", device="meta"), meta(784, 32, 10)
    launched.clear()
    out, _ = layer(x)
    torch.autograd.grad(out, [x, *layer.parameters()], torch.empty_like(out), materialize_grads=True)
    assert [name for name in launched if "recurrence" in name] == ["recurrence", "recurrence_backward"]
    assert len(launched) < 200  # those that form W, and a few products over all times


def test_larger_states_and_packed_sequences_take_a_loop(launched: list[str]) -> None:
    x, W, h0 = meta(3, 2, 300), meta(300, 300), meta(2, 300)
    recurrence(x, W, h0, None, "tanh", Times(None, False))
    recurrence(meta(5, 20), meta(20, 20), meta(2, 20), None, "tanh", Times([2, 2, 1], False))
    assert "recurrence" not in launched and launched


def test_a_row_longer_than_a_program_holds_takes_pytorch(launched: list[str]) -> None:
    fasth.householder(meta(3, 2049), meta(4, 2049))
    assert "sweep" not in launched and launched


def test_other_dtypes_and_devices_take_pytorch() -> None:
    assert backend_for(meta(3, 4)) == TORCH
    with counting_kernels():
        assert backend_for(meta(3, 4)) == TRITON
        assert backend_for(meta(3, 4, dtype=torch.float64)) == TORCH
        assert backend_for(meta(3, 4), meta(3, 4, dtype=torch.bfloat16)) == TORCH


def test_importing_fasth_and_using_it_does_not_import_triton() -> None:
    code = "import sys, torch, fasth; fasth.LinearSVD(3, 3)(torch.ones(2, 3)); print('triton' in sys.modules)"
    # torch itself asks whether Triton is there; fasth's part is that nothing of it is loaded.
    assert script("import sys, torch; print('triton' in sys.modules)") == "False\n"
    assert script(code) == "False\n"


def test_without_triton_everything_still_works() -> None:
    code = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else found(name, *rest)
sys.modules["triton"] = None
import torch, fasth
from fasth.reflections.planner import backend_for, kernels_setting
print(kernels_setting(), backend_for(torch.ones(1)), fasth.LinearSVD(3, 3)(torch.ones(2, 3)).shape)
"""
    assert script(code).startswith("not installed core") or not fasth.reflections.core.available_levels()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_fake_cuda_tensors_reach_the_operators(stored: torch.dtype) -> None:
    """No device is needed to trace a graph for one, and no value is read back: fake tensors have none."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    of_Q, of_W = (FULL, False, 1, 1, True, False, False), (COMPACT, False, 1, 1, True, False, False)
    with FakeTensorMode():
        x, V = (torch.empty(shape, dtype=stored, device="cuda") for shape in ((5, 40), (40, 40)))
        out, copy, T, scale = torch.ops.fasth.householder(x, V, *of_Q)
        dx, dV = torch.ops.fasth.householder_backward(out, None, V, [copy, T, scale], [True, True], *of_Q)
        sigma, bias = x.new_empty(40), x.new_empty(40)
        y, *saved = torch.ops.fasth.svd_linear(x, V, sigma, None, bias, *of_W)
        needs = [True, True, True, False, True]
        found = torch.ops.fasth.svd_linear_backward(y, None, V, sigma, None, saved, needs, *of_W)
    assert {t.device.type for t in (out, T, dx, dV, y, *saved, *found)} == {"cuda"}
    assert (out.dtype, copy.dtype, dV.dtype, y.dtype) == (stored,) * 4
    assert {t.dtype for t in (T, scale, *saved)} == {torch.float32}
    assert [tuple(t.shape) for t in found] == [(5, 40), (40, 40), (40,), (40,)]


def test_kernels_that_cannot_be_launched_leave_the_work_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton needs a C compiler at the first launch, and not every machine with a GPU has one."""
    pytest.importorskip("triton", reason="Triton has no build for this system")
    from fasth.reflections.triton import launch

    def fails(*_: Any) -> Any:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(launch, "factored", fails)
    planner._can_launch.cache_clear()
    with pytest.warns(RuntimeWarning, match="PyTorch's products are used .*Failed to find C compiler"):
        assert not planner._can_launch(torch.device("cpu"))
    assert not planner._can_launch(torch.device("cpu"))  # it warns once
    planner._can_launch.cache_clear()


def test_an_inherited_setting_stays_inherited() -> None:
    """The value inherited from ``torch.backends.fp32_precision`` is not stored as a setting of matrix products."""
    matmul, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.fp32_precision
    everywhere = torch.backends.fp32_precision
    try:
        matmul.fp32_precision, torch.backends.fp32_precision = "none", "tf32"
        with precision.ieee_products(OnAGPU()):  # type: ignore[arg-type]
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
        torch.backends.fp32_precision = "ieee"
        assert matmul.fp32_precision == "ieee"
    finally:
        torch.backends.fp32_precision, matmul.fp32_precision = everywhere, before


class OnAGPU:
    """The attributes of a tensor that ``precision`` reads."""

    is_cuda = True


@pytest.mark.parametrize("setting", ["tf32", "ieee"])
def test_products_that_make_q_are_ieee_whatever_is_allowed(setting: str) -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = setting
        with precision.ieee_products(OnAGPU()):  # type: ignore[arg-type]
            assert matmul.fp32_precision == "ieee"
            with precision.ieee_products(OnAGPU()):  # type: ignore[arg-type]  # another thread
                assert matmul.fp32_precision == "ieee"
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == setting
        with pytest.raises(KeyError), precision.ieee_products(OnAGPU()):  # type: ignore[arg-type]
            raise KeyError
        assert matmul.fp32_precision == setting
        with precision.ieee_products(torch.ones(1)):  # the setting does not matter on the CPU
            assert matmul.fp32_precision == setting
    finally:
        matmul.fp32_precision = before
