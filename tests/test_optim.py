"""Weight decay on sigma is weight decay on W."""

from __future__ import annotations

import pytest
import torch
from dense import assert_within
from torch import nn

from fasth import parametrizations, spectrum
from fasth.convert import to_svd
from fasth.nn import RNNSVD, Conv1dSVD, Conv2dSVD, LinearOrthogonal, LinearSVD, LinearSymmetric
from fasth.optim import param_groups

LAYERS = {
    "square": lambda: LinearSVD(6, 6),
    "wide": lambda: LinearSVD(9, 4),
    "full": lambda: LinearSVD(4, 9, reflectors="full"),
    "symmetric": lambda: LinearSymmetric(6),
    "conv": lambda: Conv2dSVD(3, 5, 2),
    "conv 1-D": lambda: Conv1dSVD(3, 5, 2),
    "rnn": lambda: RNNSVD(3, 6, 2, bidirectional=True, spectrum=spectrum.free()),
}
OPTIMIZERS = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.1),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_is_that_of_a_dense_layer(layer, optimizer):
    """Where the loss has no gradient a step takes W to (1 − lr·weight_decay)·W, exactly as for the dense W."""
    layer = LAYERS[layer]().double()
    dense = nn.Parameter(layer.weight.detach().clone())
    ours = OPTIMIZERS[optimizer](param_groups(layer, weight_decay=0.3))
    theirs = OPTIMIZERS[optimizer]([{"params": [dense], "weight_decay": 0.3}])
    first = dense.detach().clone()
    for step in range(3):
        for parameter in (*layer.parameters(), dense):
            parameter.grad = torch.zeros_like(parameter)
        ours.step()
        theirs.step()
        assert_within(layer.weight, dense.detach(), 1.0, 16)
        if step == 0:
            assert_within(layer.weight, (1 - 0.1 * 0.3) * first, 1.0, 16)


@pytest.mark.parametrize("layer", LAYERS)
def test_its_gradient_is_that_of_the_norm(layer):
    """weight_decay·sigma is the gradient of ½·weight_decay·‖W‖², which has none for the reflectors."""
    layer = LAYERS[layer]().double()
    (0.5 * layer.weight.square().sum()).backward()
    for name, parameter in layer.named_parameters():
        if name.startswith("sigma"):
            assert_within(parameter.grad, parameter.detach(), 1.0, 16)
        elif parameter.grad is not None:
            assert_within(parameter.grad, torch.zeros_like(parameter), 1.0, 16)


def test_what_decays():
    model = nn.ModuleDict(
        {
            "svd": LinearSVD(4, 4),
            "full": LinearSVD(4, 4, reflectors="full"),
            "symmetric": LinearSymmetric(4),
            "orthogonal": LinearOrthogonal(4, 4),
            "conv": Conv2dSVD(2, 3, 2),
            "rnn": RNNSVD(3, 4),
            "dense": nn.Linear(4, 4),
            "norm": nn.LayerNorm(4),
        }
    )
    model["again"] = model["svd"]
    decayed, rest = param_groups(model, weight_decay=0.1)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert {names[p] for p in decayed["params"]} == {
        "svd.sigma",
        "full.sigma",
        "symmetric.sigma",
        "conv.sigma",
        "rnn.sigma_l0",
        "rnn.weight_ih_l0",
        "dense.weight",
    }
    assert len(decayed["params"]) + len(rest["params"]) == len(names)
    torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=0.1)


def test_a_group_without_parameters_is_left_out():
    assert [group["weight_decay"] for group in param_groups(nn.LayerNorm(4), weight_decay=1)] == [0.0]
    assert [group["weight_decay"] for group in param_groups(nn.Linear(4, 4, bias=False), weight_decay=1)] == [1.0]


def test_decay_brings_sigma_to_the_center_of_its_spectrum():
    layer = LinearSVD(4, 4, spectrum=spectrum.around(1, 0.5))
    with torch.no_grad():
        layer.sigma.fill_(2)
    optimizer = torch.optim.SGD(param_groups(layer, weight_decay=1.0), lr=0.5)
    for _ in range(60):
        for parameter in layer.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert torch.equal(layer.svd.sigma, torch.ones(4))


def test_training_a_converted_model():
    model = to_svd(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(param_groups(model, weight_decay=0.01), lr=0.02)
    losses = []
    for _ in range(100):
        x = torch.randn(64, 8)
        loss = (model(x) - x[:, :1] * x[:, 1:2]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_mistake_is_explained():
    with pytest.raises(
        ValueError, match=r"`model` should have seen a first batch, which sets the size of its LazyLinear"
    ):
        param_groups(nn.LazyLinear(2), weight_decay=0.1)
    with pytest.raises(ValueError, match=r"`weight_decay` should be a number of at least 0; got -0\.1"):
        param_groups(nn.Linear(2, 2), weight_decay=-0.1)
    with pytest.raises(ValueError, match="`weight_decay` should be a number of at least 0; got '1'"):
        param_groups(nn.Linear(2, 2), weight_decay="1")
    with pytest.raises(TypeError, match=r"`model` should be a torch\.nn\.Module; got list"):
        param_groups([], weight_decay=0.1)


def test_parametrizations() -> None:
    layer = parametrizations.svd(nn.Linear(5, 4))
    other = parametrizations.orthogonal(nn.Linear(4, 3))
    decayed, rest = param_groups(nn.Sequential(layer, other), weight_decay=0.1)
    assert decayed["params"] == [layer.parametrizations.weight.original1]
    assert len(rest["params"]) == 4
