"""Reference weights and outputs of every layer, from the definition: one reflection at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasth.nn.held_weight import HeldWeight, held_weights
from fasth.reflections import definition


def definition_svd(U: Tensor, sigma: Tensor | None, V: Tensor | None, form: str, signs: Tensor | None = None) -> Tensor:
    """W = Q_U[:, :k] diag(sigma) Q_V[:, :k]ᵀ: (n, m), differentiable; arguments as in ``functional.svd_linear``."""
    U, sigma, V = _full_factors(U, sigma, V, form, signs)
    Q_U, Q_V = (_orthogonal(side)[:, : len(sigma)] for side in (U, V))
    return Q_U * sigma @ Q_V.mT


def definition_weight(layer: Any) -> Tensor:
    """Computes the weight of a layer with one weight, or of a held weight, as a matrix, W: (n, m), differentiable."""
    return definition_svd(*_held_factors(layer))


def definition_linear(layer: Any, x: Tensor) -> Tensor:
    """Computes x Wᵀ + bias, differentiable, without forming W.  x: (rows, m) → (rows, n)."""
    U, sigma, V = _full_factors(*_held_factors(layer))
    inner = definition.householder(x, V, transpose=True)[:, : len(sigma)] * sigma
    out = definition.householder(F.pad(inner, (0, U.shape[1] - len(sigma))), U)
    return out if layer.bias is None else out + layer.bias


def _held_factors(layer: Any) -> tuple[Tensor, Tensor | None, Tensor | None, str, Tensor | None]:
    """Returns the arguments of ``definition_svd`` for a layer with one weight, or a held weight."""
    (held,) = (layer,) if isinstance(layer, HeldWeight) else held_weights(layer)
    if held.spectrum is not None:
        return held.U, held.singular_values, held.V, held.form, None if held.V is held.U else held.signs
    n, m = held.shape
    none = held.U.new_zeros(0, min(n, m))  # no reflectors: the identity
    return (none, None, held.U, held.form, held.signs) if n < m else (held.U, None, none, held.form, held.signs)


def _full_factors(
    U: Tensor, sigma: Tensor | None, V: Tensor | None, form: str, signs: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns full reflectors U: (·, n) and V: (·, m), and sigma: (k,) times all signs."""
    signed = [] if form != "compact" else [U] if V is None else [U, V]
    U, V = (U.mT, U) if V is None else (U, V)
    k = min(U.shape[1], V.shape[1]) if sigma is None else len(sigma)
    sigma = U.new_ones(k) if sigma is None else sigma
    for side in signed:
        on_diagonal = signs_on_diagonal(side)[:k]
        sigma = sigma * F.pad(on_diagonal, (0, k - len(on_diagonal)), value=1.0)
    if signs is not None:
        sigma = sigma * signs.reshape(-1, k).prod(0)
    return _in_full(U, form), sigma, _in_full(V, form)


def _in_full(V: Tensor, form: str) -> Tensor:
    """Converts reflectors of any form to full ones: compact ones have ones on the diagonal."""
    if form != "compact":
        return V if form == "full" else V.triu()
    d = V.shape[1]
    return V[:d].triu(1) + torch.eye(min(V.shape), d, dtype=V.dtype, device=V.device)


def _orthogonal(V: Tensor) -> Tensor:
    """H₁⋯H_r: (d, d)."""
    return definition.householder(torch.eye(V.shape[1], dtype=V.dtype, device=V.device), V).mT


def signs_on_diagonal(reflectors: Tensor) -> Tensor:
    return torch.where(reflectors.detach().diagonal().signbit(), -1, 1).to(reflectors.dtype)


def perturbed(layer: nn.Module, size: float = 0.3) -> Any:
    """Adds Gaussian numbers to the layer's parameters in place: a point such as training would reach."""
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if not name.endswith("signs"):
                p.add_(size * torch.randn_like(p))
                if p.ndim >= 2:  # signs on a diagonal have a gradient close to zero
                    gates = getattr(layer, "_gates", 1) if name.startswith("reflectors") else 1
                    diagonal = p.unflatten(0, (gates, -1)).diagonal(dim1=-2, dim2=-1)
                    diagonal.copy_(diagonal.abs().clamp(min=0.25).copysign(diagonal))
    return layer


def orthogonality(Q: Tensor) -> float:
    """‖QᵀQ − I‖₁ / (d·eps), LAPACK's measure, whose tests ask for less than 30."""
    Q, eps = Q.detach().double(), torch.finfo(Q.dtype).eps
    error = Q.mT @ Q - torch.eye(Q.shape[1]).to(Q)
    return (error.abs().sum(0).max() / (len(Q) * eps)).item()
