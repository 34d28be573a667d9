"""The comparison of values and gradients with float64, and what rounding may do to them.

A result of N operations that each round numbers of some size is off by at most about N·eps times that size. N is the
number of reflections and of terms in a product, as in ``fasth.tools.problems``; the size is one that the mathematics
bounds, for example ‖x‖·max|σ| for x Wᵀ, and not that of the result, which may cancel. Tolerances are eight times that.
bfloat16 and float16 only store: the operations round as float32, and what is stored rounds once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fuzz.draws import LOW, Draw

DOUBLE = torch.finfo(torch.float64).eps


def tolerance(dtype: torch.dtype, operations: float, stored: float = 1.0) -> float:
    """Relative to the size of the numbers. ``stored``: how often bfloat16 or float16 are stored on the way."""
    eps = torch.finfo(dtype).eps
    if dtype in LOW:
        return 8 * (stored * eps + operations * torch.finfo(torch.float32).eps)
    return 8 * operations * (eps + DOUBLE)


def check(what: str, actual: Tensor, expected: Tensor, size: Tensor | float, relative: float) -> None:
    """``actual`` is ``expected``, float64, within ``relative`` of numbers as large as ``size``.

    A number that large may be beyond the range of the dtype: then it may be infinite. One that is too small for the
    dtype is rounded to a subnormal number or zero.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}")
    if not actual.numel():
        return
    info = torch.finfo(actual.dtype)
    actual, expected = actual.detach().double(), expected.detach()
    error = (actual - expected).abs()
    allowed = relative * size + 64 * info.smallest_normal * info.eps
    wrong = ~(error <= allowed)  # NaN is wrong, too
    if wrong.any():
        beyond = torch.as_tensor(4 * size > info.max) & ~actual.isfinite()
        if not (wrong & ~beyond).any():
            return
        at = int(torch.where(error.isnan(), torch.inf, error / allowed).argmax())
        sizes = torch.as_tensor(allowed, dtype=torch.float64).expand(error.shape).flatten()
        raise AssertionError(
            f"{what}{list(actual.shape)}, entry {at}: {actual.flatten()[at]:.6g}, not {expected.flatten()[at]:.6g}; "
            f"the error {error.flatten()[at]:.2e} should be at most {sizes[at]:.2e}"
        )


def values_and_gradients(
    draw: Draw, function: Callable[..., Any], tensors: Sequence[Tensor], gradients: Sequence[Tensor] | None = None
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Returns outputs, the gradients of tensors that require one, and the outputs' gradients (drawn if None)."""
    out = function(*tensors)
    values = [out] if isinstance(out, Tensor) else list(out)
    differentiable = [value for value in values if value.requires_grad]
    wanted = [t for t in tensors if t.requires_grad]
    if gradients is None:
        gradients = [draw.arranged(draw.numbers(*v.shape, dtype=v.dtype)) for v in differentiable]
    else:
        gradients = [g.double() for g in gradients]
    if not differentiable or not wanted:
        return values, [torch.zeros_like(t) for t in wanted], list(gradients)
    found = torch.autograd.grad(differentiable, wanted, list(gradients), allow_unused=True)
    zeros = (torch.zeros_like(t) for t in wanted)
    return values, [z if t is None else t for t, z in zip(found, zeros, strict=True)], list(gradients)


def doubled(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same numbers in float64, wanting gradients where the tensors do."""
    return [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


def wanting(draw: Draw, *tensors: Tensor) -> list[Tensor]:
    """The tensors as leaves; nearly always all want gradients, at times some or none."""
    all_want = draw.chance(0.8)
    return [t.detach().requires_grad_(all_want or draw.chance(0.5)) for t in tensors]


def norm(t: Tensor) -> float:
    return float(torch.linalg.vector_norm(t.detach().double())) if t.numel() else 0.0


def largest_row(t: Tensor) -> float:
    return float(torch.linalg.vector_norm(t.detach().double(), dim=-1).max()) if t.numel() else 0.0


def lengths(V: Tensor) -> Tensor:
    """Lengths of reflectors, (*b, r, 1), with 1 in place of 0."""
    length = torch.linalg.vector_norm(V.detach().double(), dim=-1, keepdim=True)
    return torch.where(length == 0, 1, length)
