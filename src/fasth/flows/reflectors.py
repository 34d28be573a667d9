"""The base of flows in which every sample has its own reflectors, made by an encoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.transforms import Transform

from fasth.functional import householder
from fasth.operators.matrix import broadcast_batches


class ReflectorTransform(Transform):
    """A transform of events with d features, given by reflectors V: (*b, r, d) and other tensors.

    Each entry of the batch b has its own map. b broadcasts against the batch of x, as parameters of distributions do.
    """

    bijective = True

    def __init__(self, tensors: dict[str, Tensor], batch: tuple[int, ...], event_dim: int, cache_size: int) -> None:
        super().__init__(cache_size=cache_size)
        _check_one_dtype(tensors)
        self.V, self.batch = tensors["V"], batch
        self.domain = self.codomain = constraints.independent(constraints.real, event_dim)

    def forward_shape(self, shape: Sequence[int]) -> torch.Size:
        """The shape of y for x of this shape. It includes the batch of the transform."""
        d, n = self.V.shape[-1], self.event_dim
        if len(shape) < n or shape[-n] != d:
            raise ValueError(
                f"`x` should have size {d} in dimension {-n} to match `V` of shape {tuple(self.V.shape)}; "
                f"got shape {tuple(shape)}"
            )
        return torch.Size((*broadcast_batches(x=tuple(shape[:-n]), V=self.batch), *shape[-n:]))

    inverse_shape = forward_shape


def reflect_each(x: Tensor, V: Tensor, transpose: bool = False) -> Tensor:
    """x Qᵀ, or x Q, of each vector with the Q of its sample.  x: (*, d), V: (*b, r, d)."""
    multiply = partial(householder, V=V, transpose=transpose)
    return by_matrix(multiply, x.unsqueeze(-2), V.ndim - 2).squeeze(-2)


def by_matrix(multiply: Callable[[Tensor], Tensor], rows: Tensor, batch_dims: int) -> Tensor:
    """Applies ``multiply`` to the rows as (*b, m, d), where the batch b of the matrices has ``batch_dims`` dimensions.

    rows: (*samples, *b, m, d). Rows with the same matrix become rows of one product: expanding the matrices to all
    samples would copy them.
    """
    extra = rows.ndim - 2 - batch_dims
    if extra <= 0:
        return multiply(rows)
    samples, m = rows.shape[:extra], rows.shape[-2]
    together = rows.flatten(0, extra - 1).movedim(0, -3).flatten(-3, -2)
    return multiply(together).unflatten(-2, (math.prod(samples), m)).movedim(-3, 0).unflatten(0, samples)


def check_reflectors(V: Tensor) -> None:
    if not isinstance(V, Tensor):
        raise TypeError(f"`V` should be a tensor; got {type(V).__name__}")
    if V.ndim < 2 or V.shape[-1] < 1:
        raise ValueError(f"`V` should have shape (r, d) or (*b, r, d), one reflector a row; got {tuple(V.shape)}")


def check_triangle(name: str, R: Tensor, largest: int) -> None:
    """Checks that R is a square matrix, or a batch of them, with 1 to ``largest`` rows."""
    if not isinstance(R, Tensor):
        raise TypeError(f"`{name}` should be a tensor; got {type(R).__name__}")
    if R.ndim < 2 or R.shape[-2] != R.shape[-1] or not 1 <= R.shape[-1] <= largest:
        raise ValueError(
            f"`{name}` should have shape (*b, m, m) with 1 ≤ m ≤ {largest}, the length of the reflectors; "
            f"got {tuple(R.shape)}"
        )


def _check_one_dtype(tensors: dict[str, Tensor]) -> None:
    V = tensors["V"]
    for name, t in tensors.items():
        if (t.dtype, t.device) != (V.dtype, V.device):
            raise TypeError(f"`{name}` should be {V.dtype} on {V.device}, as `V` is; got {t.dtype} on {t.device}")
