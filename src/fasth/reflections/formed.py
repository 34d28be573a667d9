"""W = U Σ Vᵀ formed in few launches, as a GPU wants it: at most 60 for a training step, at any size.

On a GPU a launch takes about 5 µs whatever it does, and W in blocks of reflections takes 264 of them at d = 1024. Here
both sides are one batch, and all reflections of a side are one block: the first k columns of Q = H₁⋯H_r are

    A = E − Yᵀ Z,    Z = B⁻¹ Y_k,    B = striu(YYᵀ) + ½ diag(YYᵀ),

with E the first k columns of the identity, and Y_k those of Y. That takes a third more operations than blocks. With
∂A the gradient of A:

    H = B⁻ᵀ Y ∂A,   M = H Zᵀ,   ∂Y = (triu(M) + striu(M)ᵀ) Y − Z ∂Aᵀ,   ∂Y_k ← ∂Y_k − H

B is solved for, and not inverted: so one block of 2048 reflections, nearly parallel ones too, leaves Q as orthogonal as
LAPACK's tests ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fasth.reflections import blocked
from fasth.reflections.autograd import _gradients_by_autograd, has_to_compose, signed_sigma, with_sign_guard
from fasth.reflections.plan import COMPACT, FULL, TORCH, TRIANGULAR
from fasth.reflections.precision import ieee_products


def svd_at_once(U: Tensor, sigma: Tensor | None, V: Tensor | None, form: int, is_rounded: bool = False) -> Tensor:
    """W: (n, m) with min(n, m) singular values. Arguments as in ``functional.svd_linear``, forms as in ``plan``."""
    dtype, sigma = U.dtype, signed_sigma(U, sigma, V, form)
    k = len(sigma)
    if V is None:
        sides = _both_sides(U, k)
    else:
        sides = [_of_one_side(t, form) for t in ([U] if V is U else [U, V])]
    columns = _columns(sides, k, form, is_rounded)
    A, B = columns[0], columns[-1]
    with _products(A, is_rounded):
        W = (A * sigma.to(A.dtype)) @ B.mT
    return W.to(dtype)


def columns_at_once(V: Tensor, k: int, form: int, is_rounded: bool = False) -> Tensor:
    """The first k columns of Q: (d, k).  V: (r, d)."""
    (A,) = _columns([_of_one_side(V, form)], k, form, is_rounded)
    return A.to(V.dtype)


class Columns(torch.autograd.Function):
    """Y: (b, r, d), k ↦ the first k columns of each Q: (b, d, k). A zero reflector is the identity.

    Y · Yᵀ should be in the range of the dtype.

    The products are IEEE float32. If W ``is_rounded`` to half precision before it multiplies, they are TF32 where
    torch's setting allows that. The triangular solves are IEEE always.
    """

    @staticmethod
    def forward(ctx: Any, Y: Tensor, k: int, is_rounded: bool = False) -> Tensor:
        ctx.k, ctx.is_rounded = k, is_rounded
        with _products(Y, is_rounded):
            A, B, Z = form_columns(Y, k)
        ctx.save_for_backward(Y, B, Z)
        return A

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        Y, B, Z = ctx.saved_tensors
        if has_to_compose(g, TORCH):
            (dY,) = _gradients_by_autograd(lambda Y: form_columns(Y, ctx.k)[0], (Y,), g, [True])
            return dY, None, None
        with _products(g, ctx.is_rounded):
            return columns_gradient(g, Y, B, Z), None, None


def _products(t: Tensor, is_rounded: bool) -> AbstractContextManager[None]:
    return nullcontext() if is_rounded else ieee_products(t)


def form_columns(Y: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """A: (b, d, k), and B and Z, which the backward pass needs."""
    B = (Y @ Y.mT).triu()
    diagonal = B.diagonal(dim1=-2, dim2=-1).mul_(0.5)
    diagonal.masked_fill_(diagonal == 0, 1)
    Z = torch.linalg.solve_triangular(B, Y[..., :k], upper=True)
    E = torch.eye(Y.shape[-1], k, dtype=Y.dtype, device=Y.device)
    return torch.baddbmm(E, Y.mT, Z, alpha=-1), B, Z


def columns_gradient(dA: Tensor, Y: Tensor, B: Tensor, Z: Tensor) -> Tensor:
    """∂Y from the gradient of A."""
    H = torch.linalg.solve_triangular(B.mT, Y @ dA, upper=False)
    M = H @ Z.mT
    dY = torch.baddbmm((M.triu() + M.triu(1).mT) @ Y, Z, dA.mT, alpha=-1)
    dY[..., : dA.shape[-1]].sub_(H)
    return dY


class _SignGuard(torch.autograd.Function):
    """The identity, whose gradient on the diagonal is the guard of the signs there."""

    @staticmethod
    def forward(ctx: Any, R: Tensor) -> Tensor:
        ctx.save_for_backward(R)
        return R.view_as(R)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (R,) = ctx.saved_tensors
        return with_sign_guard(g, R)


def _columns(sides: Sequence[Tensor], k: int, form: int, is_rounded: bool) -> list[Tensor]:
    """The first k columns of the Q of each side: (d, k). All are one batch, the smaller sides with zeros."""
    rows, columns = (max(V.shape[dim] for V in sides) for dim in (0, 1))
    padded = [_padded(V, rows, columns) for V in sides]
    Y = torch.stack(padded) if len(padded) > 1 else padded[0].unsqueeze(0)
    if form == COMPACT:
        Y = blocked.expand_compact(Y)
    elif form == TRIANGULAR:
        Y = Y.triu()
    A = Columns.apply(Y / blocked.scale_of(Y.detach()), k, is_rounded)
    return [_first(one, V.shape[1]) for one, V in zip(A.unbind(), sides, strict=True)]


def _padded(V: Tensor, rows: int, columns: int) -> Tensor:
    missing = columns - V.shape[1], rows - V.shape[0]
    return F.pad(V, (0, missing[0], 0, missing[1])) if any(missing) else V


def _both_sides(R: Tensor, k: int) -> list[Tensor]:
    """The k reflectors of U and of V, which one matrix of compact reflectors holds."""
    R = _SignGuard.apply(_computed(R))
    return [_first(R.mT, k), _first(R, k)]


def _of_one_side(V: Tensor, form: int) -> Tensor:
    V = _computed(V)
    if form == COMPACT:
        V = _SignGuard.apply(V)
    return V if form == FULL else _first(V, V.shape[1])


def _first(t: Tensor, rows: int) -> Tensor:
    """The first rows, without an operation if these are all."""
    return t if len(t) <= rows else t[:rows]


def _computed(t: Tensor) -> Tensor:
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t
