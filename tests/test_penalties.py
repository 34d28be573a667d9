"""The nuclear norm of a model against that of its dense weights, in value and gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layers import ALL, Case, of_every, trained
from torch import Tensor, nn

from fasth import LinearOrthogonal, LinearSVD, nuclear_norm, parametrizations, spectrum, to_svd
from fasth.tools.twins import perturbed

DOUBLE = torch.float64


def dense_norm(layer: Any) -> Tensor:
    """Σ of the singular values of the dense weights, differentiable."""
    if hasattr(layer, "svds"):
        weights = [svd.dense() for svd in layer.svds.values()]
    else:
        weights = [layer.weight if hasattr(layer, "parametrizations") else layer.weight.flatten(1)]
    return sum((torch.linalg.matrix_norm(W, "nuc").sum() for W in weights), torch.zeros((), dtype=DOUBLE))


@of_every({name: case for name, case in ALL.items() if "rthogonal" not in name})
def test_value_and_gradient_are_those_of_the_dense_weights(case: Case) -> None:
    model = nn.Sequential(nn.Linear(2, 2, dtype=DOUBLE), perturbed(case.make(dtype=DOUBLE)))
    actual, expected = nuclear_norm(model), dense_norm(model[1])
    assert actual.shape == ()
    torch.testing.assert_close(actual, expected)
    parameters = trained(model)
    found = torch.autograd.grad(actual, parameters, allow_unused=True)
    wanted = torch.autograd.grad(expected, parameters, allow_unused=True)
    for p, g, reference in zip(parameters, found, wanted, strict=True):
        zero = torch.zeros_like(p)  # for the reflectors, which it does not depend on
        g, reference = (zero if gradient is None else gradient for gradient in (g, reference))
        torch.testing.assert_close(g, reference, rtol=1e-6, atol=1e-8)


def test_a_whole_model() -> None:
    model = nn.Sequential(
        LinearSVD(4, 5, spectrum=spectrum.positive()),
        LinearOrthogonal(5, 5),
        parametrizations.svd(nn.Linear(5, 3)),
        parametrizations.orthogonal(nn.Linear(3, 3)),
    )
    expected = nuclear_norm(model[0]) + nuclear_norm(model[2])
    torch.testing.assert_close(nuclear_norm(model), expected)
    torch.testing.assert_close(nuclear_norm(LinearSVD(64, 64, dtype=torch.bfloat16)), torch.tensor(64.0))


def test_a_shared_weight_counts_once() -> None:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    model[1].weight = model[0].weight
    for tied in (to_svd(model), to_svd(model).double(), to_svd(model, rank=2), to_svd(model, reflectors="full")):
        torch.testing.assert_close(nuclear_norm(tied), nuclear_norm(tied[0]))
    twice = nn.ModuleList([tied[0], tied[0], LinearSVD(3, 3)])
    torch.testing.assert_close(nuclear_norm(twice).detach(), (nuclear_norm(tied[0]) + 3).detach())
    tied[1].U = nn.Parameter(tied[1].U.detach().clone())  # now only the singular values are shared
    torch.testing.assert_close(nuclear_norm(tied), 2 * nuclear_norm(tied[0]))


def test_as_a_penalty_it_lowers_the_rank() -> None:
    model, x = to_svd(nn.Linear(8, 8)), torch.randn(64, 8)
    target = x @ (torch.randn(8, 2) @ torch.randn(2, 8)) / 4
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(400):
        loss = (model(x) - target).square().mean() + 0.02 * nuclear_norm(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    sizes = model.svd.sigma.detach().abs().sort(descending=True).values
    assert sizes[2] < 0.05 * sizes[0]


@pytest.mark.parametrize("model", [nn.Linear(3, 3), LinearOrthogonal(3, 3), nn.ReLU()])
def test_a_model_without_such_weights(model: nn.Module) -> None:
    message = f"`model` should hold a weight as its SVD, .* to_svd .*; got a {type(model).__name__} without one"
    with pytest.raises(ValueError, match=message):
        nuclear_norm(model)


def test_what_is_no_model() -> None:
    with pytest.raises(TypeError, match=r"`model` should be a torch\.nn\.Module; got int"):
        nuclear_norm(3)  # type: ignore[arg-type]
