"""Layers of this library and those of ``torch.nn`` that they replace, as methods."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fasth
from fasth.nn.rnn import EPS
from fasth.reproduce.methods import Function, of_module, product, unit

BATCH = 32  # sequences at a time: a recurrent layer takes its rows as (rows / BATCH) time steps of so many


def _dense(x: Tensor, W: Tensor, bias: Tensor) -> Tensor:
    return x @ W.mT + bias


def _svd(x: Tensor, reflectors: Tensor, sigma: Tensor) -> Tensor:
    """x Wᵀ with W held as ``LinearSVD`` holds it, by the definition."""
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


class _Sequences(nn.Module):
    """A recurrent layer on rows, and without its last state."""

    def __init__(self, layer: nn.Module, d: int) -> None:
        super().__init__()
        self.layer, self.d = layer, d

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x.view(-1, BATCH, self.d))[0]
        return output.view(-1, self.d)


def _elman(x: Tensor, W_ih: Tensor, W_hh: Tensor, b_ih: Tensor, b_hh: Tensor) -> Tensor:
    steps = x.view(-1, BATCH, x.shape[-1])
    h, states = torch.zeros_like(steps[0]), []
    for step in steps:
        h = torch.tanh(_dense(step, W_ih, b_ih) + _dense(h, W_hh, b_hh))
        states.append(h)
    return torch.cat(states)


def _rnn(d: int, N: Tensor) -> tuple[nn.Module, Function]:
    return _Sequences(nn.RNN(d, d), d).eval(), _elman


def _rnn_svd(d: int, N: Tensor) -> tuple[nn.Module, Function]:
    layer = fasth.RNNSVD(d, d, nonlinearity="tanh").eval()
    names, spectrum = [name for name, _ in layer.named_parameters()], fasth.spectrum.around(1, EPS)

    def obvious(x: Tensor, *parameters: Tensor) -> Tensor:
        of = dict(zip(names, parameters, strict=True))
        I = torch.eye(d, dtype=x.dtype)
        W_hh = _svd(I, of["reflectors_l0"], spectrum(of["sigma_l0"])).mT
        return _elman(x, of["weight_ih_l0"], W_hh, of["bias_ih_l0"], of["bias_hh_l0"])

    return _Sequences(layer, d).eval(), obvious


# Rounding errors pass through all time steps, and so do those of the gradients back through them.
RECURRENT_SLACK = 10.0

NN_LINEAR = of_module("nn.Linear", _linear)
LINEAR_SVD = of_module("LinearSVD", _linear_svd)
LINEAR_ORTHOGONAL = of_module("LinearOrthogonal", _linear_orthogonal)
NN_RNN = of_module("nn.RNN", _rnn, slack=RECURRENT_SLACK)
RNN_SVD = of_module("RNNSVD", _rnn_svd, slack=RECURRENT_SLACK)
