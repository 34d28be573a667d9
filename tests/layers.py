"""Every layer and parametrization once, small, with an input: what PyTorch's own layers can, all of these can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fasth import (
    GRUSVD,
    LSTMSVD,
    RNNSVD,
    Conv1dSVD,
    Conv2dSVD,
    LinearOrthogonal,
    LinearSVD,
    LinearSymmetric,
    parametrizations,
    spectrum,
)

FORMS = ["compact", "full"]
SPECTRA = [
    spectrum.free(),
    spectrum.positive(),
    spectrum.between(0.5, 2.0),
    spectrum.around(1.0, 0.1),
    spectrum.normalized(),
]


class Case(NamedTuple):
    make: Callable[..., Any]  # takes device and dtype
    input_shape: tuple[int, ...]
    dense: Callable[..., Any]  # the layer of torch.nn in the same place

    def input(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(self.input_shape, dtype=torch.float64).to(dtype)


CASES = {
    "LinearSVD": Case(lambda **o: LinearSVD(6, 4, **o), (3, 6), lambda: nn.Linear(6, 4)),
    "LinearSVD, full": Case(
        lambda **o: LinearSVD(4, 6, reflectors="full", spectrum=spectrum.positive(), **o),
        (3, 4),
        lambda: nn.Linear(4, 6),
    ),
    "LinearSVD, thin": Case(lambda **o: LinearSVD(6, 5, rank=2, **o), (3, 6), lambda: nn.Linear(6, 5)),
    "LinearSymmetric": Case(lambda **o: LinearSymmetric(5, **o), (3, 5), lambda: nn.Linear(5, 5)),
    "LinearOrthogonal": Case(lambda **o: LinearOrthogonal(6, 4, **o), (3, 6), lambda: nn.Linear(6, 4)),
    "LinearOrthogonal, tall": Case(lambda **o: LinearOrthogonal(4, 6, **o), (3, 4), lambda: nn.Linear(4, 6)),
    "Conv1dSVD": Case(lambda **o: Conv1dSVD(3, 4, 2, **o), (3, 3, 5), lambda: nn.Conv1d(3, 4, 2)),
    "Conv2dSVD": Case(
        lambda **o: Conv2dSVD(3, 4, 2, spectrum=spectrum.between(0.5, 2), **o), (3, 3, 4, 4), lambda: nn.Conv2d(3, 4, 2)
    ),
    "Conv2dSVD, thin": Case(
        lambda **o: Conv2dSVD(3, 4, 2, rank=2, reflectors="full", **o), (3, 3, 4, 4), lambda: nn.Conv2d(3, 4, 2)
    ),
    "RNNSVD": Case(
        lambda **o: RNNSVD(3, 5, bidirectional=True, **o), (4, 3, 3), lambda: nn.RNN(3, 5, bidirectional=True)
    ),
    "RNNSVD, tanh": Case(
        lambda **o: RNNSVD(3, 5, 2, "tanh", bidirectional=True, **o),
        (4, 3, 3),
        lambda: nn.RNN(3, 5, 2, bidirectional=True),
    ),
    "RNNSVD, orthogonal": Case(lambda **o: RNNSVD(3, 5, eps=0, **o), (4, 3, 3), lambda: nn.RNN(3, 5)),
    "LSTMSVD": Case(lambda **o: LSTMSVD(3, 5, **o), (4, 3, 3), lambda: nn.LSTM(3, 5)),
    "GRUSVD": Case(lambda **o: GRUSVD(3, 5, **o), (4, 3, 3), lambda: nn.GRU(3, 5)),
}
RECURRENT = [name for name in CASES if name.startswith(("RNN", "LSTM", "GRU"))]
BY_KERNELS = ["RNNSVD, tanh", "LSTMSVD", "GRUSVD"]  # of torch, which have no rule for vmap
PARAMETRIZED = {
    "orthogonal": Case(lambda **o: parametrizations.orthogonal(nn.Linear(6, 4, **o)), (3, 6), lambda: nn.Linear(6, 4)),
    "svd": Case(lambda **o: parametrizations.svd(nn.Linear(6, 4, **o)), (3, 6), lambda: nn.Linear(6, 4)),
    "svd of a batch": Case(
        lambda **o: parametrizations.svd(nn.Conv2d(2, 3, 3, **o), spectrum=spectrum.between(0.5, 2)),
        (3, 2, 4, 4),
        lambda: nn.Conv2d(2, 3, 3),
    ),
}
ALL = CASES | PARAMETRIZED


def of_every(cases: dict[str, Case]) -> Any:
    return pytest.mark.parametrize("case", cases.values(), ids=cases.keys())


def trained(layer: nn.Module) -> list[nn.Parameter]:
    """The parameters that have gradients: all but the signs of full reflectors."""
    return [p for p in layer.parameters() if p.requires_grad]


def output(layer: nn.Module, x: Tensor) -> Tensor:
    """The layer's output for x; for an RNN, the hidden states at all times."""
    out = layer(x)
    return out if isinstance(out, Tensor) else out[0]


def holds(sigma: Tensor, s: spectrum.Spectrum) -> bool:
    """True if the singular values are within the bounds of their spectrum, to the last digit."""
    sigma = sigma.detach().double()
    if s == spectrum.positive():
        return bool(((sigma > 0) & sigma.isfinite()).all())
    if s == spectrum.normalized():
        return sigma.abs().max().item() == 1
    low, high = {SPECTRA[2]: (0.5, 2.0), SPECTRA[3]: (0.9, 1.1)}.get(s, (-torch.inf, torch.inf))
    return bool(((low <= sigma) & (sigma <= high)).all())
