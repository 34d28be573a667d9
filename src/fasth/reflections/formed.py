"""W = U Σ Vᵀ of compact reflectors in one matrix, formed in as few launches as there can be: 55 for a training step.

On a GPU a launch takes about 5 µs whatever it does, and W in blocks of reflections takes 264 of them at d = 1024. Here
both sides are one batch, and all reflections of a side are one block: the first k columns of Q = H₁⋯H_k are

    A = E − Yᵀ Z,    Z = B⁻¹ Y_k,    B = striu(YYᵀ) + ½ diag(YYᵀ),

with E the first k columns of the identity, and Y_k those of Y. That takes a third more operations than blocks. With
∂A the gradient of A:

    H = B⁻ᵀ Y ∂A,   M = H Zᵀ,   ∂Y = (triu(M) + striu(M)ᵀ) Y − Z ∂Aᵀ,   ∂Y_k ← ∂Y_k − H

B is solved for, and not inverted: so one block of 2048 reflections, nearly parallel ones too, leaves Q as orthogonal as
LAPACK's tests ask for.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fasth.reflections import blocked
from fasth.reflections.autograd import _gradients_by_autograd, has_to_compose, signed_sigma, with_sign_guard
from fasth.reflections.plan import COMPACT, TORCH
from fasth.reflections.precision import ieee_products


class Formed(torch.autograd.Function):
    """R: (n, m), sigma: (min(n, m),) or None ↦ W: (n, m). About 34 d³ operations for W and both gradients.

    The products are IEEE float32. If W ``is_rounded`` to half precision before it multiplies, they are TF32 where
    torch's setting allows that. The triangular solves are IEEE always.
    """

    @staticmethod
    def forward(ctx: Any, R: Tensor, sigma: Tensor | None, is_rounded: bool = False) -> Tensor:
        ctx.products = nullcontext if is_rounded else ieee_products
        with ctx.products(R):
            W, *saved = form(R, sigma)
        ctx.save_for_backward(R, sigma, *saved)
        return W

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        R, sigma, *saved = ctx.saved_tensors
        if has_to_compose(g, TORCH):
            needs = ctx.needs_input_grad
            dR, dsigma = _gradients_by_autograd(lambda R, sigma: form(R, sigma)[0], (R, sigma), g, needs)
        else:
            with ctx.products(g):
                dR, dsigma = gradients(g, R, sigma, *saved)
        return None if dR is None else with_sign_guard(dR, R), dsigma if ctx.needs_input_grad[1] else None, None


def form(R: Tensor, sigma: Tensor | None) -> tuple[Tensor, ...]:
    """W: (n, m), and what is saved for backward: Y, scale, B, Z and A of both sides, and the signed sigma."""
    (n, m), k = R.shape, min(R.shape)
    Y, scale = _reflectors(R)
    B = (Y @ Y.mT).triu()
    B.diagonal(dim1=-2, dim2=-1).mul_(0.5)
    Z = torch.linalg.solve_triangular(B, Y[..., :k], upper=True)
    E = torch.eye(Y.shape[-1], k, dtype=Y.dtype, device=Y.device)
    A = torch.baddbmm(E, Y.mT, Z, alpha=-1)
    signed = signed_sigma(R, sigma, None, COMPACT).to(Y.dtype)
    W = (A[0, :n] * signed) @ A[1, :m].mT
    return W.to(R.dtype), Y, scale, B, Z, A, signed


def gradients(
    g: Tensor,
    R: Tensor,
    sigma: Tensor | None,
    Y: Tensor,
    scale: Tensor,
    B: Tensor,
    Z: Tensor,
    A: Tensor,
    signed: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """∂R, but for its diagonal, and ∂sigma, from g: (n, m), the gradient of W."""
    (n, m), k = R.shape, min(R.shape)
    g, U, V = g.to(Y.dtype), A[0, :n], A[1, :m]
    of_scaled = g @ V
    dsigma = None
    if sigma is not None:
        dsigma = signed_sigma(R, (of_scaled * U).sum(0).to(sigma.dtype), None, COMPACT)
    dA = _side_by_side(of_scaled * signed, g.mT @ (U * signed), -2)
    H = torch.linalg.solve_triangular(B.mT, Y @ dA, upper=False)
    M = H @ Z.mT
    dY = torch.baddbmm((M.triu() + M.triu(1).mT) @ Y, Z, dA.mT, alpha=-1)
    dY[..., :k] -= H
    dU, dV = (dY.triu(1) / scale).unbind(0)
    if n == m:
        return (dV + dU.mT).to(R.dtype), dsigma
    dR = F.pad(dV[:, :m], (0, 0, 0, n - k)) + F.pad(dU[:, :n].mT, (0, m - k))
    return dR.to(R.dtype), dsigma


def _reflectors(R: Tensor) -> tuple[Tensor, Tensor]:
    """The k reflectors of U and of V, each divided by a power of two: (2, k, max(n, m)); and the powers: (2, k, 1)."""
    k = min(R.shape)
    R = R.float() if R.dtype in (torch.bfloat16, torch.float16) else R
    V = blocked.expand_compact(_side_by_side(R.mT[:k], R[:k], -1))
    scale = blocked.scale_of(V.detach())
    return V / scale, scale


def _side_by_side(U: Tensor, V: Tensor, dim: int) -> Tensor:
    """Both as one batch, the shorter one with zeros."""
    missing = U.shape[dim] - V.shape[dim]
    U, V = _lengthened(U, -missing, dim), _lengthened(V, missing, dim)
    return torch.stack((U, V))


def _lengthened(t: Tensor, by: int, dim: int) -> Tensor:
    return F.pad(t, (0, by) if dim == -1 else (0, 0, 0, by)) if by > 0 else t
