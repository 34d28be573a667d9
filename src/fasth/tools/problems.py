"""The table of problems that all tests of ``householder`` and ``fasth check`` share, and the comparison of results."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fasth.reflections import definition


@dataclass(frozen=True)
class Problem:
    name: str
    x_shape: tuple[int, ...]
    V_shape: tuple[int, ...]
    block_size: int | None = None
    # Applied to Gaussian x and V.
    change_x: Callable[[Tensor], Tensor] = field(default=lambda x: x)
    change_V: Callable[[Tensor], Tensor] = field(default=lambda V: V)

    def draw(self, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
        """Draws x and V in float64 and rounds them to the dtype. Both require gradients."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        x, V = (
            torch.randn(shape, dtype=torch.float64, generator=generator).to(device, dtype)
            for shape in (self.x_shape, self.V_shape)
        )
        return self.change_x(x).detach().requires_grad_(), self.change_V(V).detach().requires_grad_()


def zero_rows(V: Tensor) -> Tensor:
    V = V.clone()
    V[..., ::3, :] = 0
    return V


def nearly_parallel(V: Tensor) -> Tensor:
    return V[..., :1, :] + torch.finfo(V.dtype).eps ** 0.5 * V


def every_other_column(t: Tensor) -> Tensor:
    return t.repeat_interleave(2, -1)[..., ::2]


PROBLEMS = [
    Problem("square", (5, 8), (8, 8)),
    Problem("d = 1", (3, 1), (1, 1)),
    Problem("d = 1, r = 3", (3, 1), (3, 1)),
    Problem("r = 0", (4, 5), (0, 5)),
    Problem("r = 1", (4, 5), (1, 5)),
    Problem("r < d", (4, 12), (5, 12), 2),
    Problem("r > d", (4, 5), (12, 5), 3),
    Problem("ragged last block", (6, 11), (11, 11), 4),
    Problem("blocks of one", (6, 7), (7, 7), 1),
    Problem("one block", (6, 9), (9, 9), 9),
    Problem("block size above r", (6, 9), (5, 9), 64),
    Problem("no rows", (0, 6), (6, 6), 4),
    Problem("one row", (1, 10), (10, 10), 4),
    Problem("many rows", (300, 9), (9, 9), 4),
    Problem("several default blocks", (7, 70), (70, 70)),
    Problem("more rows than d", (200, 70), (70, 70)),
    Problem("vector", (6,), (6, 6), 4),
    Problem("rows in a batch, one V", (2, 3, 6), (5, 6), 2),
    Problem("rows in a grid", (2, 3, 4, 6), (5, 6), 2),
    Problem("batch of both", (3, 4, 6), (3, 7, 6), 3),
    Problem("batch of V", (4, 6), (3, 5, 6), 3),
    Problem("batch of V, vector", (6,), (2, 3, 5, 6), 3),
    Problem("batches that broadcast", (2, 1, 4, 6), (3, 5, 6), 2),
    Problem("empty batch", (0, 4, 6), (0, 5, 6), 2),
    Problem("empty batch of more rows", (0, 40, 23), (0, 12, 23)),
    Problem("zero reflectors", (5, 8), (8, 8), 3, change_V=zero_rows),
    Problem("all reflectors zero", (5, 8), (8, 8), 3, change_V=torch.zeros_like),
    Problem("repeated reflectors", (5, 8), (8, 8), 4, change_V=lambda V: V[:1].expand(8, 8).clone()),
    Problem("nearly parallel reflectors", (5, 24), (24, 24), 8, change_V=nearly_parallel),
    Problem("strided columns", (5, 8), (8, 8), 3, change_x=every_other_column, change_V=every_other_column),
    Problem("transposed", (5, 8), (8, 8), 3, change_x=lambda x: x.mT.clone().mT, change_V=lambda V: V.mT.clone().mT),
    Problem("expanded", (1, 8), (8, 8), 3, change_x=lambda x: x.expand(5, 8), change_V=lambda V: V[:, :1].expand(8, 8)),
    Problem("wide", (33, 96), (40, 96), 16),
]

DIRECTIONS = [
    dict(transpose=transpose, triangular=triangular) for triangular in (False, True) for transpose in (False, True)
]


def from_definition(x: Tensor, V: Tensor, **direction: bool) -> Tensor:
    """Computes the definition in float64. As in ``householder``, x may be a vector while V is a batch."""
    if x.ndim == 1:
        return from_definition(x.unsqueeze(0), V, **direction).squeeze(-2)
    out = definition.householder(x.double(), V.double(), **direction)
    return out.expand(torch.broadcast_shapes(out.shape, (*V.shape[:-2], 1, 1)))  # r = 0 leaves x as it is


def gradient_of(out: Tensor) -> Tensor:
    return torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def with_gradients(function: Callable[..., Tensor], x: Tensor, V: Tensor, **options: object) -> tuple[Tensor, ...]:
    """Returns the value and the gradients of x and V for a fixed random gradient of the output."""
    out = function(x, V, **options)
    g = gradient_of(out).to(x.dtype).to(out)
    gradients = torch.autograd.grad(out, (x, V), g, allow_unused=True)
    zeros = (torch.zeros_like(x), torch.zeros_like(V))
    return out, *(zero if t is None else t for t, zero in zip(gradients, zeros, strict=True))


class Comparison(NamedTuple):
    """The largest error relative to the scale of the numbers, and the tolerance for rounding."""

    error: float
    tolerance: float
    close: bool

    def __str__(self) -> str:
        return f"error {self.error:.2e}, tolerance {self.tolerance:.2e}"


def assert_close(actual: Tensor, expected: Tensor, scale: Tensor | float, r: int) -> None:
    """Asserts an error of at most 8 r eps after r reflections, relative to ``scale``; eps of both dtypes, added.

    If ``scale`` is beyond the range of the dtype, infinity is accepted too.
    """
    comparison = compare(actual, expected, scale, r)
    assert comparison.close, str(comparison)


def assert_all_close(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], V: Tensor) -> None:
    """Asserts that the value and the gradients agree within rounding, each relative to its own scale.

    Reflections preserve lengths, so the scale of the value and of the gradient of x is the length of the longest row. A
    reflector's gradient is a sum of products of the two, divided by the reflector's length: it may cancel, but not
    below the rounding of these products.
    """
    for what, comparison in compare_all(actual, expected, V).items():
        assert comparison.close, f"{what}: {comparison}"


def compare(actual: Tensor, expected: Tensor, scale: Tensor | float, r: int) -> Comparison:
    """Compares as ``assert_close`` does, and returns the error and the tolerance."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    beyond = actual.isinf() & (torch.as_tensor(scale, device=actual.device) > torch.finfo(actual.dtype).max)
    expected = torch.where(beyond, actual.to(expected.dtype), expected)
    error = torch.where(actual == expected, 0, (actual.double() - expected.double()).abs())  # inf is equal to inf
    tolerance = 8 * (torch.finfo(actual.dtype).eps + torch.finfo(torch.float64).eps) * max(r, 1)
    relative = torch.where(error == 0, 0, error / scale)
    largest = relative.max().item() if error.numel() else 0.0
    return Comparison(largest, tolerance, bool((error <= tolerance * scale).all()))


def compare_all(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], V: Tensor) -> dict[str, Comparison]:
    """Compares as ``assert_all_close`` does: the value, and each gradient present in ``actual``."""
    r, V = V.shape[-2], V.detach().double()
    largest_row = [t.detach().double().norm(dim=-1).max().item() if t.numel() else 0.0 for t in expected[:2]]
    if expected[0].numel() > expected[1].numel() > 0:  # x was broadcast: a sum of gradients, which may cancel
        largest_row[1] = gradient_of(expected[0]).norm().item()
    length = V.norm(dim=-1, keepdim=True)
    length = torch.where(length == 0, 1, length)
    x_norm, g_norm = (t.detach().double().norm().item() for t in expected[:2])
    scales = (*largest_row, x_norm * g_norm / length)
    names = ("value", "gradient of x", "gradient of V")
    compared = zip(names, actual, expected, scales, strict=False)
    return {name: compare(t, reference, scale, r) for name, t, reference, scale in compared}
