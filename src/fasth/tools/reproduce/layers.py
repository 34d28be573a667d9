"""Layers of this library, and the layers of ``torch.nn`` that they replace, as methods."""

from __future__ import annotations

from torch import Tensor, nn

import fasth
from fasth.tools.reproduce.methods import Function, from_module, product, unit


def _dense(x: Tensor, W: Tensor, bias: Tensor) -> Tensor:
    return x @ W.mT + bias


def _svd(x: Tensor, reflectors: Tensor, sigma: Tensor) -> Tensor:
    """x Wᵀ by the definition, with W in the form that ``LinearSVD`` stores."""
    U, V = (unit(side) for side in (reflectors.mT, reflectors))
    return product(product(x, V, transpose=True) * (_signs(reflectors) * sigma), U)


def _signs(reflectors: Tensor) -> Tensor:
    return reflectors.detach().diagonal().sign()


def _linear(d: int, N: Tensor) -> tuple[nn.Module, Function]:
    return nn.Linear(d, d).eval(), _dense


def _linear_svd(d: int, N: Tensor) -> tuple[nn.Module, Function]:
    return fasth.LinearSVD(d, d).eval(), lambda x, reflectors, sigma, bias: _svd(x, reflectors, sigma) + bias


def _linear_orthogonal(d: int, N: Tensor) -> tuple[nn.Module, Function]:
    layer = fasth.LinearOrthogonal(d, d).eval()
    return layer, lambda x, reflectors, bias: product(x * _signs(reflectors), unit(reflectors)) + bias


NN_LINEAR = from_module("nn.Linear", _linear)
LINEAR_SVD = from_module("LinearSVD", _linear_svd)
LINEAR_ORTHOGONAL = from_module("LinearOrthogonal", _linear_orthogonal)
