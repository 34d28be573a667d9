"""Rates at which an SVD trains as its dense twin, and weight decay on sigma, which is weight decay on W."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from dense import assert_within
from torch import Tensor, nn
from torch.nn.utils import prune

from fasth import parametrizations, spectrum
from fasth.convert import to_svd
from fasth.nn import GRUSVD, LSTMSVD, RNNSVD, Conv1dSVD, Conv2dSVD, LinearOrthogonal, LinearSVD, LinearSymmetric
from fasth.optim import LR, param_groups

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
@pytest.mark.parametrize("rates", [False, True], ids=["one rate", "rates"])
def test_a_step_is_that_of_a_dense_layer(layer, optimizer, rates):
    """Without a gradient, a step multiplies W by 1 − lr·weight_decay, exactly as for the dense W."""
    layer = LAYERS[layer]().double()
    dense = nn.Parameter(layer.weight.detach().clone())
    kind = type(OPTIMIZERS[optimizer]([torch.zeros(1)]))
    ours = OPTIMIZERS[optimizer](param_groups(layer, weight_decay=0.3, lr=0.1 if rates else None, optimizer=kind))
    theirs = OPTIMIZERS[optimizer]([{"params": [dense], "weight_decay": 0.3}])
    first = dense.detach().clone()
    for step in range(3):
        for parameter in (*layer.parameters(), dense):
            parameter.grad = torch.zeros_like(parameter)
        ours.step()
        theirs.step()
        assert_within(layer.weight, dense.detach(), 1.0, 64)
        if step == 0:
            assert_within(layer.weight, (1 - 0.1 * 0.3) * first, 1.0, 64)


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
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert set(model.parameters()) - set(names) == {model["full"].signs}
    groups = param_groups(model, weight_decay=0.1)
    found = {group["name"]: {names[p] for p in group["params"]} for group in groups}
    assert found == {
        "sigma": {"svd.sigma", "full.sigma", "symmetric.sigma", "conv.sigma", "rnn.sigma_l0"},
        "dense": {"rnn.weight_ih_l0", "dense.weight"},
        "reflectors": {
            "svd.reflectors",
            "full.U",
            "full.V",
            "symmetric.reflectors",
            "orthogonal.reflectors",
            "conv.reflectors",
            "rnn.reflectors_l0",
        },
        "vectors": {name for name in names.values() if "bias" in name} | {"norm.weight"},
    }
    assert [(group["weight_decay"], "lr" in group) for group in groups] == [
        (0.1, False), (0.1, False), (0.0, False), (0.0, False),
    ]  # fmt: skip
    assert sum(len(group["params"]) for group in groups) == len(names)
    torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=0.1)


def test_a_group_without_parameters_is_left_out():
    assert [group["weight_decay"] for group in param_groups(nn.LayerNorm(4), weight_decay=1)] == [0.0]
    assert [group["weight_decay"] for group in param_groups(nn.Linear(4, 4, bias=False), weight_decay=1)] == [1.0]


def rates(model: nn.Module, kind: str = "sigma", **options) -> set[float]:
    """Rates of the groups of this kind as multiples of lr, where the rates for Adam's kin are those of one step."""
    found = [group["lr"] for group in param_groups(model, lr=LR, **options) if group["name"] == kind]
    assert len(set(found)) == len(found), "groups of one kind and rate should be one"
    return {round(lr / LR, 4) for lr in found}


SGD = {"optimizer": torch.optim.SGD}


def test_rates_of_sigma():
    """(√n + √m)/2 of the matrix W: (n, m) that sigma belongs to."""
    for layer, n, m in (
        (LinearSVD(9, 16), 16, 9),
        (LinearSVD(9, 16, reflectors="full"), 16, 9),
        (LinearSymmetric(9), 9, 9),
        (Conv2dSVD(4, 25, 3), 25, 36),
        (Conv1dSVD(4, 25, 9), 25, 36),
        (RNNSVD(3, 16, 2, bidirectional=True, spectrum=spectrum.free()), 16, 16),
        (LSTMSVD(3, 16), 16, 16),
        (LSTMSVD(3, 16, proj_size=9), 16, 9),
        (parametrizations.svd(nn.Linear(9, 16)), 16, 9),
        (parametrizations.svd(nn.Conv2d(2, 3, (9, 16))), 9, 16),  # a batch of matrices
    ):
        assert rates(layer) == rates(layer, **SGD) == {(math.sqrt(n) + math.sqrt(m)) / 2}


def test_rates_of_reflectors_and_the_rest():
    half = round(math.sqrt(0.5), 4)
    compact = (LinearSVD(4, 6), LinearOrthogonal(4, 6), LinearSymmetric(4), Conv2dSVD(2, 3, 2))
    compact += (RNNSVD(3, 4, spectrum=spectrum.free()), LSTMSVD(3, 4), GRUSVD(3, 4, spectrum=spectrum.around(1, 0.1)))
    compact += (parametrizations.orthogonal(nn.Linear(4, 6)), parametrizations.svd(nn.Linear(4, 6)))
    for layer in compact:
        assert rates(layer, "reflectors") == {1.0}
        assert rates(layer, "reflectors", **SGD) == {0.3}
    for layer in (LinearSVD(4, 6, reflectors="full"), LinearOrthogonal(4, 6, reflectors="full")):
        assert rates(layer, "reflectors") == {half}
        assert rates(layer, "reflectors", **SGD) == {0.15}
    for layer in (RNNSVD(3, 4), RNNSVD(3, 4, spectrum=spectrum.between(0.5, 1))):
        assert rates(layer, "reflectors") == {0.025}
        assert rates(layer, "reflectors", **SGD) == {0.0075}
    assert rates(RNNSVD(3, 4, eps=0), "reflectors") == {0.05}
    assert rates(RNNSVD(3, 16, eps=0.2)) == {0.4}  # 0.01 · √16 / 0.1, which is the slope of around(1, 0.2)
    for options in ({}, SGD):
        model = nn.Sequential(nn.Linear(4, 4), LinearSVD(4, 4), nn.LayerNorm(4))
        assert rates(model, "dense", **options) == rates(model, "vectors", **options) == {1.0}


@pytest.mark.parametrize("form", ["compact", "full"])
@pytest.mark.parametrize(("n", "m"), [(64, 64), (40, 100)])
def test_a_step_of_its_rate_moves_the_weight_as_a_dense_step_does(form, n, m):
    """Random signs times the rate: the same norm from the reflectors, and from sigma, with half the spectral norm."""
    dense = nn.Linear(m, n).double()
    W = dense.weight.detach().clone()

    def moved(kind: str) -> Tensor:
        layer = LinearSVD.from_linear(dense, reflectors=form)
        with torch.no_grad():
            for group in param_groups(layer, lr=LR):
                for parameter in group["params"] if group["name"] == kind else ():
                    parameter += 1e-6 / LR * group["lr"] * torch.randn_like(parameter).sign()
        return layer.weight.detach() - W

    expected = 1e-6 * torch.randn(n, m, dtype=torch.float64).sign()
    norm, spectral = torch.linalg.matrix_norm, lambda D: torch.linalg.matrix_norm(D, 2)
    assert 0.75 < norm(moved("reflectors")) / norm(expected) < 1.35
    assert 0.8 < norm(moved("sigma")) / norm(expected) <= 1.001
    assert 0.45 < spectral(moved("sigma")) / spectral(expected) < 0.55


@pytest.mark.parametrize(
    ("map", "slope"),
    [
        (spectrum.free(), 1.0),
        (spectrum.positive(), 1 - math.exp(-1)),
        (spectrum.between(0.1, 10), 0.9 * 9 / 9.9),
        (spectrum.around(1, 0.1), 0.05),
    ],
    ids=str,
)
def test_rates_follow_the_slope_of_the_spectrum(map, slope):
    """One step of the rate moves σ as far as one of a free sigma, to first order."""
    layer = LinearSVD(16, 16, spectrum=map)
    (rate,), (sgd_rate,) = rates(layer), rates(layer, **SGD)
    assert rate == pytest.approx(4 / slope, rel=1e-4)
    assert sgd_rate == pytest.approx(4 / slope**2, rel=1e-4)
    meta = LinearSVD(16, 16, spectrum=map, device="meta")
    assert list(rates(meta)) == pytest.approx([rate], rel=1e-4)


@pytest.mark.parametrize("lr", [1e-4, 1e-3, 1e-1])
def test_rates_follow_the_root_of_lr(lr):
    """Rates of weights with trained singular values, for Adam's kin. An orthogonal weight, and a bounded RNNSVD, have
    rates that follow lr, as all other parameters have."""

    def found(layer: nn.Module, **options) -> dict[str, float]:
        return {group["name"]: group["lr"] for group in param_groups(layer, lr=lr, **options)}

    root = math.sqrt(LR * lr)
    assert found(LinearSVD(16, 16)) == pytest.approx({"sigma": 4 * root, "reflectors": root, "vectors": lr})
    assert found(LinearSVD(16, 16, bias=False), **SGD) == pytest.approx({"sigma": 4 * lr, "reflectors": 0.3 * lr})
    assert found(LinearOrthogonal(16, 16, bias=False)) == pytest.approx({"reflectors": lr})
    assert found(RNNSVD(16, 16, eps=0.2))["reflectors"] == pytest.approx(lr / 40)
    decay = {
        group["name"]: group["weight_decay"] * group["lr"]
        for group in param_groups(LinearSVD(16, 16), lr=lr, weight_decay=0.1)
    }
    assert decay == pytest.approx({"sigma": lr * 0.1, "reflectors": 0, "vectors": 0})


def test_a_rate_of_zero():
    groups = param_groups(LinearSVD(16, 16), lr=0, weight_decay=0.1)
    assert {group["lr"] for group in groups} == {0}


def test_reflectors_multiplies_their_rate():
    layer = LinearSVD(16, 16)
    for options in ({}, SGD):
        (one,), (three,) = rates(layer, "reflectors", **options), rates(layer, "reflectors", reflectors=3.0, **options)
        assert three == pytest.approx(3 * one) and rates(layer, **options) == rates(layer, reflectors=3.0, **options)


def test_rates_of_the_other_spectra():
    """Tests a normalized spectrum, also constant, a range without 1, and a very narrow one."""
    assert rates(LinearSVD(16, 16, spectrum=spectrum.normalized())) == {4.0}
    assert rates(LinearSVD(1, 1, spectrum=spectrum.normalized())) == {1.0}
    (outside,) = rates(LinearSVD(16, 16, spectrum=spectrum.between(2, 10)))
    assert 4 / 2 < outside < 4 / 0.5  # the slope in the middle is 2
    assert rates(LinearSVD(16, 16, spectrum=spectrum.around(1, 1e-6))) == {4 / 0.05}


def test_rates_of_low_rank():
    layer = LinearSVD(36, 16, rank=4)
    assert rates(layer) == {2 * 5.0} and rates(layer, "reflectors") == {2.0}
    assert rates(layer, **SGD) == {5.0} and rates(layer, "reflectors", **SGD) == {0.3}


def test_rates_do_not_depend_on_the_default_device_or_on_values():
    layer = LinearSVD(16, 16, spectrum=spectrum.positive())
    expected = rates(layer)
    with torch.device("meta"):
        assert rates(layer) == expected
    with torch.no_grad():
        layer.sigma.fill_(float("nan"))
    assert rates(layer) == expected


def test_pruned_parameters_are_what_they_were():
    layer = LinearSVD(16, 16)
    prune.l1_unstructured(layer, "sigma", amount=2)
    prune.l1_unstructured(layer, "reflectors", amount=2)
    assert rates(layer) == {4.0} and rates(layer, "reflectors") == {1.0} and rates(layer, "dense") == set()


def test_decay_is_divided_where_the_optimizer_multiplies_it_by_the_rate():
    layer = LinearSVD(16, 16, bias=False)
    decay = {
        kind: param_groups(layer, lr=LR, weight_decay=0.1, optimizer=kind)[0]["weight_decay"]
        for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
    }
    assert list(decay.values()) == pytest.approx([0.1 / 4, 0.1, 0.1 / 4])


class Lion(torch.optim.Optimizer):
    """Another optimizer that moves every number by its rate."""

    def __init__(self, params, lr=1e-3, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * p.grad.sign())


def test_an_unknown_optimizer_counts_as_one_of_adams_kin():
    layer = LinearSVD(16, 16)
    assert rates(layer, optimizer=Lion) == rates(layer) == {4.0}
    optimizer = Lion(param_groups(layer, lr=1e-3, optimizer=Lion))
    before = layer.weight.detach().clone()
    layer(torch.randn(8, 16)).square().sum().backward()
    optimizer.step()
    assert torch.linalg.matrix_norm(layer.weight.detach() - before, 2) > 0.5 * 4 * math.sqrt(LR * 1e-3)


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


def partly_ours() -> nn.Module:
    ours = (LinearSVD(16, 16, spectrum=spectrum.positive()) for _ in range(2))
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), *ours, nn.Tanh(), nn.Linear(16, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, schedule, steps: int) -> None:
    for _ in range(steps):
        x = torch.randn(16, 8)
        optimizer.zero_grad()
        (model(x) - x[:, :1]).square().mean().backward()
        optimizer.step()
        schedule.step()


SCHEDULES = {
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [group["lr"] for group in optimizer.param_groups], total_steps=10
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_scale_all_rates_alike(schedule):
    model = partly_ours()
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-2, weight_decay=0.1))
    first = [group["lr"] for group in optimizer.param_groups]
    schedule = SCHEDULES[schedule](optimizer)
    for _ in range(5):
        train(model, optimizer, schedule, 1)
        now = [group["lr"] for group in optimizer.param_groups]
        assert now == pytest.approx([now[0] / first[0] * lr for lr in first])
    assert now[0] != first[0]


def test_resuming_from_a_checkpoint(tmp_path):
    """Half of a training, and the rest of it by another model and optimizer, made anew and loaded."""

    def made(state=None):
        model = partly_ours()
        if state is not None:
            model.load_state_dict(state)
        optimizer = torch.optim.AdamW(param_groups(model, lr=1e-2, weight_decay=0.1))
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    whole = made()
    train(*whole, 10)
    torch.save([part.state_dict() for part in whole], tmp_path / "checkpoint")
    torch.manual_seed(1)
    train(*whole, 10)

    states = torch.load(tmp_path / "checkpoint")
    resumed = made(states[0])  # the optimizer is made of a model that was loaded before
    for part, state in zip(resumed[1:], states[1:], strict=True):
        part.load_state_dict(state)
    torch.manual_seed(1)
    train(*resumed, 10)
    for (name, expected), parameter in zip(whole[0].named_parameters(), resumed[0].parameters(), strict=True):
        assert torch.equal(expected, parameter), name
    assert [group["name"] for group in resumed[1].param_groups] == [group["name"] for group in whole[1].param_groups]


def test_layers_that_come_later_are_added():
    model = partly_ours()
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-2))
    new = LinearSVD(16, 16)
    for group in param_groups(new, lr=1e-2):
        optimizer.add_param_group(group)
    before = copy.deepcopy(new)
    new(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    for (name, parameter), old in zip(new.named_parameters(), before.parameters(), strict=True):
        assert not torch.equal(parameter, old), name


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
    with pytest.raises(ValueError, match="`lr` should be a number of at least 0, or None; got -1"):
        param_groups(nn.Linear(2, 2), lr=-1)
    with pytest.raises(ValueError, match="`reflectors` should be a positive number; got 0"):
        param_groups(nn.Linear(2, 2), lr=1, reflectors=0)
    with pytest.raises(TypeError, match=r"`optimizer` should be a class, such as torch\.optim\.SGD; got 'SGD'"):
        param_groups(nn.Linear(2, 2), lr=1, optimizer="SGD")
    with pytest.raises(ValueError, match="`optimizer` should be one that takes groups of parameters; got LBFGS"):
        param_groups(nn.Linear(2, 2), lr=1, optimizer=torch.optim.LBFGS)
    with pytest.raises(TypeError, match=r"`model` should be a torch\.nn\.Module; got list"):
        param_groups([], weight_decay=0.1)


def test_parametrizations() -> None:
    layer = parametrizations.svd(nn.Linear(5, 4))
    other = parametrizations.orthogonal(nn.Linear(4, 3))
    sigma, reflectors, vectors = param_groups(nn.Sequential(layer, other), weight_decay=0.1)
    assert sigma["params"] == [layer.parametrizations.weight.original1]
    assert reflectors["params"] == [layer.parametrizations.weight.original0, other.parametrizations.weight.original]
    assert (sigma["weight_decay"], reflectors["weight_decay"]) == (0.1, 0.0)
    assert len(vectors["params"]) == 2
