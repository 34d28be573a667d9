"""The kernels' PTX, executed: ``make test-ptx``. README.md says how, and what that shows.

Each check compares values and gradients with the definition in float64, and every access to memory is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from fasth import LinearSVD, LinearSymmetric
from fasth.functional import first_rows_of, reflect, svd_linear
from fasth.nn.recurrence import Times, recurrence
from fasth.reflections import definition
from fasth.reflections.autograd import diagonal_signs
from fasth.reflections.triton import launching
from fasth.tools.twins import perturbed

from . import toys
from .gpu import Gpu, emulated, tf32
from .machine import Code
from .program import parsed

ARCHITECTURES = (75, 80, 90)
HALF = {torch.bfloat16: 2**-7, torch.float16: 2**-9}


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).clamp(-1, 1).to(dtype).requires_grad_()


def exact(t: Tensor | None) -> Any:
    return None if t is None else t.detach().double().requires_grad_(t.requires_grad)


def reflectors(V: Tensor, form: str) -> Tensor:
    if form == "full":
        return V
    return V.triu() if form == "triangular" else V.triu(1) + torch.eye(*V.shape[-2:], dtype=V.dtype)


def product(x: Tensor, V: Tensor, form: str, transpose: bool = False) -> Tensor:
    """Computes the product by the definition, one matrix of a batch after another."""
    if V.ndim == 3:
        return torch.stack([product(*pair, form, transpose) for pair in zip(x, V, strict=True)])
    return definition.householder(x, reflectors(V, form), transpose=transpose)


def weight_times(x: Tensor, U: Tensor, sigma: Tensor, V: Tensor | None, bias: Tensor, form: str) -> Tensor:
    signs = torch.ones_like(sigma)
    for t in (U, V) if form == "compact" and V is not U else ():
        if t is not None:
            found = diagonal_signs(t, len(sigma))
            signs = torch.cat((signs[: len(found)] * found, signs[len(found) :]))
    U_side, V_side = (U.mT, U) if V is None else (U, V)
    inner = product(x, V_side, form, True)[..., : len(sigma)] * sigma * signs
    inner = torch.nn.functional.pad(inner, (0, U_side.shape[1] - len(sigma)))
    return product(inner, U_side, form) + bias


def compare(
    architecture: int,
    ours: Callable[..., Tensor],
    expected: Callable[..., Tensor],
    tensors: list[Tensor | None],
    tolerance: float = 3e-6,
    diagonal_of: int | None = None,
) -> Gpu:
    """Values and gradients of all tensors; ``diagonal_of``: the one whose diagonal only keeps its sign."""
    trained = [t for t in tensors if t is not None and t.requires_grad]
    with emulated(architecture) as gpu:
        out = ours(*tensors)
        g = torch.randn(out.shape).to(out.dtype)
        found = torch.autograd.grad(out, trained, g)
    inputs = [exact(t) for t in tensors]
    value = expected(*inputs)
    wanted = torch.autograd.grad(value, [t for t in inputs if t is not None and t.requires_grad], g.double())
    assert not gpu.problems
    for i, (actual, right) in enumerate(zip((out, *found), (value, *wanted), strict=True)):
        difference = actual.double() - right
        if diagonal_of is not None and i == diagonal_of + 1:
            difference.diagonal(dim1=-2, dim2=-1).zero_()
        assert difference.abs().max() <= tolerance * right.abs().max().clamp_min(1e-3), i
    return gpu


# The emulator itself.


UNFUSED = {"enable_fp_fusion": False}  # Triton 3.9 warns where this is not said


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_that_are_right(architecture: int) -> None:
    x, a = torch.randn(5, 100), torch.randn(32, 32)
    out, squares = torch.empty(5, 100), [torch.empty(32, 32), torch.empty(32, 32)]
    with emulated(architecture) as gpu:
        toys.softmax[(5,)](x, out, 100, BLOCK=128, **UNFUSED)
        for precision, square in zip(("ieee", "tf32"), squares, strict=True):
            toys.square[(1,)](a, square, N=32, PRECISION=precision, **UNFUSED)
    assert not gpu.problems
    torch.testing.assert_close(out, x.softmax(1))
    torch.testing.assert_close(squares[0], a @ a, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(squares[1], a @ a, rtol=1e-2, atol=5e-2)


def test_kernels_that_are_wrong() -> None:
    x = torch.randn(256)
    with emulated(80) as gpu:
        new = torch.empty(100)
        toys.double[(1,)](x, torch.empty(100), 100, MASKED=False, BLOCK=128, **UNFUSED)
        toys.double[(1,)](new, torch.empty(100), 100, MASKED=True, BLOCK=128, **UNFUSED)
        toys.all_write_one[(4,)](x, torch.empty(100), **UNFUSED)
        toys.neighbours[(1,)](x, torch.empty(512), BLOCK=256, **UNFUSED)
    found = [{what for what, _ in one.found} - {"race within a warp"} for one in gpu.launches]
    assert found == [
        {"outside of every tensor"},
        {"read before it is written"},
        {"race of two CTAs"},
        {"race of two warps"},
    ]


# x Qᵀ and x Q.

SHAPES = {  # rows, r, d, form, x Q instead of x Qᵀ, dtype
    "full": (3, 40, 40, "full", False, torch.float32),
    "compact in bfloat16": (3, 23, 40, "compact", True, torch.bfloat16),
    "triangular, four warps": (3, 37, 200, "triangular", False, torch.float32),
    "compact in float16": (2, 20, 33, "compact", False, torch.float16),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_product_of_reflections(architecture: int, name: str) -> None:
    rows, r, d, form, transpose, dtype = SHAPES[name]
    if architecture == 75 and dtype == torch.bfloat16:
        dtype = torch.float16  # sm_75 has no bfloat16 of its own
    compare(
        architecture,
        lambda x, V: reflect(x, V, form, transpose=transpose),
        lambda x, V: product(x, V, form, transpose),
        [leaf(rows, d, dtype=dtype), leaf(r, d, dtype=dtype)],
        HALF.get(dtype, 3e-6),
        diagonal_of=1 if form == "compact" else None,
    )


def test_a_batch_of_triangular_reflectors() -> None:
    tensors: list[Any] = [leaf(3, 2, 40), leaf(3, 24, 40)]
    compare(80, lambda x, V: reflect(x, V, "triangular"), lambda x, V: product(x, V, "triangular"), tensors)


def test_a_zero_reflector_and_extreme_scales() -> None:
    V = leaf(24, 40).detach()
    V[::3] = 0
    V[1::3] *= 1e30
    x, V = leaf(3, 40), V.requires_grad_()
    with emulated(80) as gpu:
        found = torch.autograd.grad(reflect(x, V, "full"), (x, V), torch.ones(3, 40))
    wanted = torch.autograd.grad(product(exact(x), W := exact(V), "full"), W, torch.ones(3, 40).double())
    assert not gpu.problems
    length = V.detach().double().norm(dim=1, keepdim=True)
    assert ((found[1].double() - wanted[0]) * length).abs().max() < 1e-4
    assert not found[1][::3].any()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("form", ["full", "compact"])
def test_forming_q(architecture: int, form: str) -> None:
    """The sweep of the identity, OF_IDENTITY, whose rows skip the reflections that leave them alone."""
    gpu = compare(
        architecture,
        lambda V: first_rows_of(V, 40, form),
        lambda V: product(torch.eye(40, dtype=torch.float64), V, form),
        [leaf(40, 40)],
        diagonal_of=0 if form == "compact" else None,
    )
    assert gpu.launches[1].constants["OF_IDENTITY"]


# x (U Σ Vᵀ)ᵀ + b.

WEIGHTS = {  # out, in, rows, k, whether one matrix holds both sides, form, dtype
    "compact": (40, 23, 3, 23, True, "compact", torch.float32),
    "compact in float16": (24, 40, 5, 24, True, "compact", torch.float16),
    "full, thin": (40, 24, 3, 16, False, "full", torch.float32),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_weight(architecture: int, name: str) -> None:
    n, m, rows, k, one_matrix, form, dtype = WEIGHTS[name]
    U = leaf(n, m, dtype=dtype) if one_matrix else leaf(k, n, dtype=dtype)
    V = None if one_matrix else leaf(k, m, dtype=dtype)
    tensors = [leaf(rows, m, dtype=dtype), U, leaf(k, dtype=dtype), V, leaf(n, dtype=dtype)]
    compare(
        architecture,
        lambda *tensors: svd_linear(*tensors, form=form),
        lambda *tensors: weight_times(*tensors, form),
        tensors,
        HALF.get(dtype, 5e-6),
        diagonal_of=1 if form == "compact" else None,
    )


@pytest.mark.parametrize("make", [lambda: LinearSymmetric(24), lambda: LinearSVD(24, 17, reflectors="full")])
def test_a_layer(make: Callable[[], Any]) -> None:
    """Symmetric ones, whose U and V are one tensor; and full reflectors, whose signs are read by the kernels."""
    layer, x = perturbed(make()), leaf(5, 24)
    trained = [p for p in layer.parameters() if p.requires_grad]
    with emulated(80) as gpu:
        out = layer(x)
        found = torch.autograd.grad(out, (x, *trained), g := torch.randn_like(out))
    reference, X = layer.double(), exact(x)
    value = reference(X)
    wanted = torch.autograd.grad(value, (X, *(p for p in reference.parameters() if p.requires_grad)), g.double())
    assert not gpu.problems and len(gpu.launches) <= 9
    for actual, right in zip((out, *found), (value, *wanted), strict=True):
        assert (actual.double() - right).abs().max() <= 1e-5 * right.abs().max().clamp_min(1e-3)


@pytest.mark.parametrize("architecture", [80, 90])
def test_the_gradient_in_tf32(architecture: int) -> None:
    with tf32(True):
        compare(
            architecture,
            lambda x, V: reflect(x, V, "full"),
            lambda x, V: product(x, V, "full"),
            [leaf(20, 40), leaf(33, 40)],
            2**-8,
        )


# Memory.


@pytest.mark.parametrize("form", ["full", "triangular", "compact"])
def test_nine_tenths_of_every_sector_are_used(form: str) -> None:
    """Loads of four numbers. Before, compact reflectors used a quarter of what they asked for."""
    x, V = leaf(4, 128), leaf(128, 128)
    with emulated(80) as gpu:
        reflect(x, V, form).sum().backward()
    assert [one.kernel for one in gpu.launches] == ["factors", "sweep", "sweep", "gradient"]
    for one in gpu.launches:
        assert one.used >= 0.9 * 32 * one.sectors, one.kernel


def test_fused_multiply_adds_would_not_give_the_same_bits() -> None:
    """Copies of a sum would differ in the last bit, and the result would depend on the order of stores."""
    x, V = leaf(2, 256), leaf(64, 256)
    with emulated(80) as gpu, patch.object(launching, "FUSE", True):
        reflect(x, V, "compact", transpose=True).sum().backward()
    assert {what for one in gpu.launches for what, _ in one.found} & {"lanes of one store differ", "race of two warps"}


# Barriers.


def without(ptx: str, opcode: str, number: int) -> str:
    """Removes the instruction with this number among those of its kind from the PTX."""
    lines = ptx.split("\n")
    del lines[[i for i, line in enumerate(lines) if line.strip().startswith(opcode)][number]]
    return "\n".join(lines)


def test_every_barrier_is_missed_when_it_is_left_out() -> None:
    """All but one or two of a kernel, which guard what a longer loop would overwrite."""
    x, V = leaf(2, 100), leaf(24, 100)
    seen: dict[tuple[str, bool], list[bool]] = {}
    with emulated(80) as gpu:
        reflect(x, V, "compact", transpose=True).sum().backward()
        for one in list(gpu.launches):
            code, ptx = gpu.codes[one.hash], gpu.ptx[one.hash]
            for opcode in ("bar.sync", "bar.warp.sync", "cp.async.wait_group"):
                for number in range(ptx.count(f"\t{opcode}")):
                    gpu.codes[one.hash] = Code(parsed(without(ptx, opcode, number)))
                    gpu.launches = []
                    one.again()
                    kernel = one.kernel, one.constants.get("RECORD", False)
                    seen.setdefault(kernel, []).append(bool(gpu.problems))
            gpu.codes[one.hash] = code
    assert {kernel: found.count(False) for kernel, found in seen.items() if found.count(False) > 2} == {}
    assert sum(map(len, seen.values())) >= 20


# h_t = f(x_t + W h_{t−1}).

STATES = {  # sequences, h, f, in reverse, dtype
    "tanh": (3, 20, "tanh", False, torch.float32),
    "modReLU in reverse": (17, 40, "modrelu", True, torch.float32),
    "ReLU in float16": (3, 33, "relu", False, torch.float16),
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_recurrence(architecture: int, name: str) -> None:
    batch, h, f, reverse, dtype = STATES[name]
    run_recurrence(architecture, 3, batch, h, f, reverse, dtype)


def test_the_largest_state() -> None:
    run_recurrence(80, 2, 2, 256, "modrelu", False, torch.float32)


def run_recurrence(
    architecture: int, steps: int, batch: int, h: int, f: str, reverse: bool, dtype: torch.dtype
) -> None:
    W = (torch.randn(h, h) / h**0.5).to(dtype).requires_grad_()
    tensors = [leaf(steps, batch, h, dtype=dtype), W, leaf(batch, h, dtype=dtype)]
    tensors += [leaf(h, dtype=dtype)] if f == "modrelu" else []
    times = Times(None, reverse)

    def ours(x: Tensor, W: Tensor, h0: Tensor, bias: Tensor | None = None) -> Tensor:
        return recurrence(x, W, h0, bias, f, times)

    def expected(x: Tensor, W: Tensor, h: Tensor, bias: Tensor | float = 0.0) -> Tensor:
        states = []
        for z in reversed(x) if reverse else x:
            z = z + h @ W.mT
            h = z.tanh() if f == "tanh" else z.sign() * (z.abs() + bias).relu() if f == "modrelu" else z.relu()
            states.append(h)
        return torch.stack(states[::-1] if reverse else states)

    gpu = compare(architecture, ours, expected, tensors, HALF.get(dtype, 3e-6) * 2)
    assert [one.kernel for one in gpu.launches] == ["recurrence", "recurrence_backward"]
