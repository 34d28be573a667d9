"""Rotations of the channels with shifts of half of them between: K = A₀ S₁ A₁ S₂ ⋯ S_n A_n, an orthogonal convolution.

``reflections/README.md`` has the derivation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from fasth._private import transform_active
from fasth.functional import reflect, svd_dense
from fasth.nn.factors import one_side
from fasth.operators import Orthogonal
from fasth.operators.orthogonal import haar_compact

INITS = ("haar", "1x1", "identity")
Move: TypeAlias = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""Applies a shift: (half of the channels that stays, half that moves, dimension) → both halves after the shift."""


class Shift(NamedTuple):
    """A shift of half of the channels by one tap of the kernel."""

    dim: int  # dimension of the taps in (*taps, rows, channels), negative
    of_first_half: bool  # the first half of the channels moves, else the second


def shifts(taps: Sequence[int]) -> tuple[Shift, ...]:
    """The shifts that make a kernel of these sizes: the last axis first, then axes and halves in turns.

    Two in a row along one axis move both halves, so that without rotations an odd kernel is its middle tap.
    """
    axes = range(-1, -len(taps) - 1, -1)
    return tuple(Shift(axis - 2, i % 2 == 1) for i in range(max(taps) - 1) for axis in axes if i < taps[axis] - 1)


class Chain(NamedTuple):
    """The sizes of A₀ S₁ A₁ ⋯ S_n A_n, an orthogonal convolution, and of its reflectors, which are rows of one tensor.

    A_n: (c, r) has r ≤ c orthonormal columns. Only the first h = ⌊c/2⌋ columns of each other rotation matter: the other
    columns rotate each half of the channels in itself, which commutes with the shift. So each is h reflections.
    """

    steps: tuple[Shift, ...]  # S_n first, in the order in which they act on an image
    inner: int  # rotations besides A_n: n, or n − 1 where A₀ would be redundant
    channels: int
    rank: int

    @property
    def half(self) -> int:
        """h, the channels that count as the first half."""
        return self.channels // 2

    @property
    def rows(self) -> int:
        """The number of reflectors."""
        return self.inner * self.half + self.rank

    def split(self, reflectors: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Reflectors of A_{n−1}, …, A₀: (*b, h, c) each, and of A_n: (*b, r, c).  reflectors: (*b, rows, c)."""
        if not self.inner:
            return (), reflectors
        inner, last = reflectors.split([self.inner * self.half, self.rank], -2)
        return inner.unflatten(-2, (self.inner, self.half)).unbind(-3), last

    def multiply(self, M: Tensor, inner: Sequence[Tensor], move: Move) -> Tensor:
        """Applies S_n, A_{n−1}, S_{n−1}, … to each row of M, the product without A_n.  M: (*b, *positions, rows, c).

        About 3c² operations per row and rotation. Rotations are not formed for few rows.
        """
        for i, step in enumerate(self.steps):
            M = self._shifted(M, step, move)
            if i < len(inner):
                M = _reflected(M, inner[i])
        return M

    def multiply_transposed(self, M: Tensor, inner: Sequence[Tensor], move: Move) -> Tensor:
        """Applies …, S_{n−1}, A_{n−1}ᵀ, S_n to each row of M, the transposed product without A_nᵀ."""
        for i, step in reversed(list(enumerate(self.steps))):
            if i < len(inner):
                M = _reflected(M, inner[i], transpose=True)
            M = self._shifted(M, step, move)
        return M

    def _shifted(self, M: Tensor, step: Shift, move: Move) -> Tensor:
        if move is add_a_tap and not (is_compiling() or transform_active()):
            return AddATap.apply(M, step, self.half)
        first, second = M.split((self.half, self.channels - self.half), -1)
        if step.of_first_half:
            second, first = move(second, first, step.dim)
        else:
            first, second = move(first, second, step.dim)
        return torch.cat((first, second), -1)

    def initial(self, init: str, **options: Any) -> Tensor:
        """Compact reflectors of a new layer: (rows, c). "1x1": one tap, Haar A₀ A_n; "identity": one tap, I."""
        c, h, r = self.channels, self.half, self.rank
        if init == "haar":
            halves = [haar_compact(h, c, **options) for _ in range(self.inner)]
            return torch.cat([*halves, haar_compact(r, c, **options)])
        # Reflections of single coordinates commute with the shifts. Each inner rotation is −1 on the first half; the
        # signs of A_n's columns, stored on its diagonal, cancel these signs.
        inner, last = [-torch.eye(h, c, **options) for _ in range(self.inner)], -torch.eye(r, c, **options)
        turned = self.inner % 2
        if init == "1x1":
            rotation = haar_compact(r, c, **options)
            if not self.inner:
                return rotation
            k = min(h, r)
            inner[-1][:k], last[k:] = rotation[:k], rotation[k:]  # A₀, and the rest of the reflections
            last.diagonal()[:k] = rotation.diagonal()[:k]
        last.diagonal()[:h] *= -1 if turned else 1
        return torch.cat([*inner, last])


def orthonormal_rows(V: Tensor) -> Tensor:
    """The first k rows of Qᵀ, with their signs: (*b, k, d), from compact reflectors V: (*b, k, d)."""
    if V.ndim == 2:
        return svd_dense(*one_side(V, None, wide=True))
    k, d = V.shape[-2:]
    return Orthogonal.of_stored(V).matmul(torch.eye(d, k, dtype=V.dtype, device=V.device)).mT


def add_a_tap(stays: Tensor, moves: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Shifts a kernel, which gains one tap: the last is 0 in the half that stays, the first in the half that moves."""
    before, after = [0] * (-2 * dim), [0] * (-2 * dim)
    before[-2] = after[-1] = 1
    return F.pad(stays, after), F.pad(moves, before)


class AddATap(torch.autograd.Function):
    """``add_a_tap`` for a whole kernel in half of the operations: one buffer forward, one concatenation backward."""

    @staticmethod
    def forward(ctx: Any, M: Tensor, step: Shift, half: int) -> Tensor:
        ctx.step, ctx.half = step, half
        shape = list(M.shape)
        shape[step.dim] += 1
        out = M.new_empty(shape)
        for target, source, offset in zip(_halves(out, half), _halves(M, half), _offsets(step), strict=True):
            taps = source.shape[step.dim]
            target.narrow(step.dim, offset, taps).copy_(source)
            target.select(step.dim, 0 if offset else taps).zero_()
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        step, taps = ctx.step, g.shape[ctx.step.dim] - 1
        halves = zip(_halves(g, ctx.half), _offsets(step), strict=True)
        return torch.cat([part.narrow(step.dim, offset, taps) for part, offset in halves], -1), None, None


def _halves(M: Tensor, half: int) -> tuple[Tensor, ...]:
    return M.narrow(-1, 0, half), M.narrow(-1, half, M.shape[-1] - half)


def _offsets(step: Shift) -> tuple[int, int]:
    """Offsets of the first and of the second half along the taps."""
    return (1, 0) if step.of_first_half else (0, 1)


def move_pixels(dilation: Sequence[int]) -> Move:
    """The shift of images (*b, *pixels, 1, channels), circular: a later tap reads a later pixel."""

    def move(stays: Tensor, moves: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        return stays, moves.roll(-dilation[dim + 2], dim)

    return move


def _reflected(M: Tensor, V: Tensor, *, transpose: bool = False) -> Tensor:
    if V.ndim == 2:
        return reflect(M, V, "compact", transpose=transpose)
    return reflect(M.flatten(1, -2), V, "compact", transpose=transpose).reshape(M.shape)
