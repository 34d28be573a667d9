"""The dense weight of every layer, straight from the definition, and what the tests of layers share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fasth import spectrum
from fasth.reflections import definition

FORMS = ["compact", "full"]
SPECTRA = [
    spectrum.free(),
    spectrum.positive(),
    spectrum.between(0.5, 2.0),
    spectrum.around(1.0, 0.1),
    spectrum.normalized(),
]


def definition_weight(layer: Any) -> Tensor:
    """The layer's weight as a matrix, one reflection at a time, differentiable."""
    if not hasattr(layer, "spectrum"):
        Q = _orthogonal(layer.reflectors, layer.form, layer.signs)[:, : len(layer.signs)]
        return Q.mT if layer.out_features < layer.in_features else Q
    sigma = layer.spectrum(layer.sigma)
    if hasattr(layer, "eig"):
        U = _orthogonal(layer.reflectors, layer.form)
        return U @ torch.diag(sigma) @ U.mT
    if hasattr(layer, "reflectors"):
        U, V = layer.reflectors.mT, layer.reflectors
    else:
        U, V = (layer.reflectors_U, layer.reflectors_V) if hasattr(layer, "reflectors_U") else (layer.U, layer.V)
    U, V = (_orthogonal(V, layer.form, signs)[:, : len(sigma)] for V, signs in zip((U, V), layer.signs, strict=True))
    return U @ torch.diag(sigma) @ V.mT


def _orthogonal(V: Tensor, form: str, signs: Tensor | None = None) -> Tensor:
    """H₁⋯H_r diag(signs): (d, d)."""
    d = V.shape[1]
    if form == "compact":
        V = V[:d].triu(1) + torch.eye(min(V.shape), d).to(V)
    signs = V.new_ones(0) if signs is None else signs
    columns = torch.diag(torch.cat((signs, V.new_ones(d - len(signs)))))
    return definition.householder(columns.mT, V).mT


def perturbed(layer: nn.Module, size: float = 0.3) -> Any:
    """The layer with Gaussian numbers added to its parameters: a point such as training would reach."""
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(size * torch.randn_like(p))
    return layer


def orthogonality(Q: Tensor) -> float:
    """‖QᵀQ − I‖₁ / (d·eps), LAPACK's measure, whose tests ask for less than 30."""
    Q, eps = Q.detach().double(), torch.finfo(Q.dtype).eps
    error = Q.mT @ Q - torch.eye(Q.shape[1]).to(Q)
    return (error.abs().sum(0).max() / (len(Q) * eps)).item()


def holds(sigma: Tensor, s: spectrum.Spectrum) -> bool:
    """Whether the singular values keep the promise of their spectrum, to the last digit."""
    sigma = sigma.detach().double()
    if s == spectrum.positive():
        return bool(((sigma > 0) & sigma.isfinite()).all())
    if s == spectrum.normalized():
        return sigma.abs().max().item() == 1
    low, high = {SPECTRA[2]: (0.5, 2.0), SPECTRA[3]: (0.9, 1.1)}.get(s, (-torch.inf, torch.inf))
    return bool(((low <= sigma) & (sigma <= high)).all())
