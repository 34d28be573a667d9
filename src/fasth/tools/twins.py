"""Reference weights and outputs of every layer, from the definition: one reflection at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasth.nn.held_weight import HeldWeight, held_weights
from fasth.reflections import definition


def definition_weight(layer: Any) -> Tensor:
    """Computes the weight of a layer with one weight, or of a held weight, as a matrix, W: (n, m), differentiable."""
    U, sigma, V = _factors(layer)
    U_columns, V_columns = (_orthogonal(side)[:, : len(sigma)] for side in (U, V))
    return U_columns @ torch.diag(sigma) @ V_columns.mT


def definition_linear(layer: Any, x: Tensor) -> Tensor:
    """Computes x Wᵀ + bias, differentiable, without forming W.  x: (rows, m) → (rows, n)."""
    U, sigma, V = _factors(layer)
    inner = definition.householder(x, V, transpose=True)[:, : len(sigma)] * sigma
    out = definition.householder(F.pad(inner, (0, U.shape[1] - len(sigma))), U)
    return out if layer.bias is None else out + layer.bias


def _factors(layer: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns full reflectors U: (·, n) and V: (·, m), and sigma: (k,), with W = Q_U[:, :k] diag(sigma) Q_V[:, :k]ᵀ."""
    (held,) = (layer,) if isinstance(layer, HeldWeight) else held_weights(layer)
    full, (n, m) = held.form == "full", held.shape
    if held.spectrum is None:
        signs = signs_on_diagonal(held.U) if held.signs is None else held.signs
        Q, none = _in_full(held.U, full), held.U.new_zeros(0, len(signs))
        return (none, signs, Q) if n < m else (Q, signs, none)
    sigma = held.singular_values
    if held.V is held.U:  # symmetric: the signs of both sides cancel
        U = _in_full(held.U, full)
        return U, sigma, U
    if held.V is None:
        U, V, signs = held.U.mT, held.U, signs_on_diagonal(held.U)
    else:
        U, V = held.U, held.V
        signs = signs_on_diagonal(U) * signs_on_diagonal(V) if held.signs is None else held.signs.prod(0)
    return _in_full(U, full), sigma * signs, _in_full(V, full)


def _in_full(V: Tensor, full: bool) -> Tensor:
    """Converts compact reflectors to full ones, with ones on the diagonal."""
    d = V.shape[1]
    return V if full else V[:d].triu(1) + torch.eye(min(V.shape), d, dtype=V.dtype, device=V.device)


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
