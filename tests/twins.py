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
        signs = layer.signs if layer.form == "full" else signs_on_diagonal(layer.reflectors)
        Q = _orthogonal(layer.reflectors, layer.form, signs)[:, : len(signs)]
        return Q.mT if layer.out_features < layer.in_features else Q
    sigma = layer.spectrum(layer.sigma)
    if hasattr(layer, "eig"):
        U = _orthogonal(layer.reflectors, layer.form)
        return U @ torch.diag(sigma) @ U.mT
    k = len(sigma)
    if layer.form == "full":
        U, V, signs = layer.U, layer.V, layer.signs.prod(0)
    elif hasattr(layer, "reflectors"):
        U, V, signs = layer.reflectors.mT, layer.reflectors, signs_on_diagonal(layer.reflectors)
    else:
        U, V = layer.reflectors_U, layer.reflectors_V
        signs = signs_on_diagonal(U) * signs_on_diagonal(V)
    U, V = (_orthogonal(V, layer.form)[:, :k] for V in (U, V))
    return U @ torch.diag(sigma * signs) @ V.mT


def signs_on_diagonal(reflectors: Tensor) -> Tensor:
    return torch.where(reflectors.detach().diagonal().signbit(), -1, 1).to(reflectors.dtype)


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


def holds(sigma: Tensor, s: spectrum.Spectrum) -> bool:
    """Whether the singular values keep the promise of their spectrum, to the last digit."""
    sigma = sigma.detach().double()
    if s == spectrum.positive():
        return bool(((sigma > 0) & sigma.isfinite()).all())
    if s == spectrum.normalized():
        return sigma.abs().max().item() == 1
    low, high = {SPECTRA[2]: (0.5, 2.0), SPECTRA[3]: (0.9, 1.1)}.get(s, (-torch.inf, torch.inf))
    return bool(((low <= sigma) & (sigma <= high)).all())
