"""``fasth.reflections.definition`` in NumPy with its gradient by hand: the same numbers in a tenth of the time.

Float64 only. ``tests/test_fuzz.py`` compares it with the definition, whose gradient is autograd's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasth.reflections import definition


def householder(x: Tensor, V: Tensor, *, transpose: bool = False, triangular: bool = False) -> Tensor:
    """The same as ``definition.householder``."""
    if x.dtype != torch.float64 or V.dtype != torch.float64:
        raise TypeError(f"`x` and `V` should be float64; got {x.dtype} and {V.dtype}")
    V = V.triu() if triangular else V
    if V.ndim > 2 and V.shape[-2]:
        batch = torch.broadcast_shapes(x.shape[:-2], V.shape[:-2])
        x = x.expand(*batch, *x.shape[-2:])
    return _Householder.apply(x, V, transpose)


class _Householder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, V: Tensor, transpose: bool) -> Tensor:
        rows, reflectors = (t.detach().resolve_neg().numpy() for t in (x, V))
        order = range(V.shape[-2]) if transpose else range(V.shape[-2] - 1, -1, -1)
        steps = []
        for i in order:
            v = reflectors[..., i, :, None]  # (*b, d, 1)
            largest = np.abs(v).max(-2, keepdims=True)
            v = v / np.where(largest == 0, 1, largest)  # its square is in range, and H is the same
            squared = (v * v).sum(-2, keepdims=True)
            h = 2 / np.where(squared == 0, np.inf, squared)
            xv = rows @ v  # (*b, m, 1)
            steps.append((i, v, h, rows, xv, largest))
            rows = rows - h * xv * np.swapaxes(v, -1, -2)
        ctx.steps, ctx.shape = steps, V.shape
        return torch.from_numpy(rows.copy() if not steps else rows)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """H = I − h v vᵀ with h = 2/‖v‖²: ∂v = −h (Σ (x·v) g + (g·v) x) + h² Σ (x·v)(g·v) v, over the rows x, g."""
        g = g.resolve_neg().numpy()
        V_gradient = np.zeros(ctx.shape)
        for i, v, h, x, xv, largest in reversed(ctx.steps):
            gv = g @ v
            v_gradient = -h * (np.swapaxes(g, -1, -2) @ xv + np.swapaxes(x, -1, -2) @ gv)
            v_gradient = v_gradient + h * h * (xv * gv).sum(-2, keepdims=True) * v
            V_gradient[..., i, :] = _summed(
                v_gradient[..., 0] / np.where(largest == 0, np.inf, largest)[..., 0], ctx.shape
            )
            g = g - h * gv * np.swapaxes(v, -1, -2)
        return torch.from_numpy(np.ascontiguousarray(g)), torch.from_numpy(V_gradient), None


def _summed(v_gradient: Any, V_shape: tuple[int, ...]) -> Any:
    """(*b, d) summed over the batches that V, (*c, r, d), was broadcast to."""
    target = (*V_shape[:-2], V_shape[-1])
    v_gradient = v_gradient.sum(tuple(range(v_gradient.ndim - len(target))))
    axes = tuple(a for a, (n, m) in enumerate(zip(v_gradient.shape, target, strict=True)) if n != m)
    return v_gradient.sum(axes, keepdims=True) if axes else v_gradient


def replace_the_definition() -> None:
    """Makes ``fasth.tools.problems`` and ``fasth.tools.twins`` use this file in this process."""
    definition.householder = householder
