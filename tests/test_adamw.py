"""fasth.optim.AdamW: reflectors turn by an angle a step, and everything else moves as in torch.optim.AdamW."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fasth
from fasth import RNNSVD, LinearOrthogonal, LinearSVD, param_groups, spectrum, to_svd
from fasth.optim import AdamW
from fasth.optim.groups import ANGLE, LR

BETAS, EPS, DECAY = (0.8, 0.99), 1e-6, 0.1
LAYERS: dict[str, Any] = {
    "square": lambda: LinearSVD(6, 6),
    "wide": lambda: LinearSVD(9, 4, spectrum=spectrum.positive()),
    "full": lambda: LinearSVD(6, 9, reflectors="full"),
    "thin": lambda: LinearSVD(9, 8, rank=2),
    "orthogonal": lambda: LinearOrthogonal(6, 4),
    "remembers": lambda: nn.Sequential(nn.Unflatten(1, (1, -1)), RNNSVD(6, 4, batch_first=True), First()),
    "gates": lambda: nn.Sequential(nn.Unflatten(1, (1, -1)), fasth.LSTMSVD(6, 4, batch_first=True), First()),
    "plain": lambda: nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4)),
}


class First(nn.Module):
    def forward(self, outputs: Any) -> Tensor:
        return outputs[0].flatten(1)


def inputs(model: nn.Module) -> int:
    return next((m.in_features for m in model.modules() if hasattr(m, "in_features")), 6)


def gradients(model: nn.Module, seed: int) -> None:
    x = torch.randn(5, inputs(model), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    model.zero_grad()
    model(x).pow(3).sum().backward()


class Reference:
    """The rule from its definition, one number after the other."""

    def __init__(self, model: nn.Module, lr: float, weight_decay: float) -> None:
        self.groups = param_groups(model, lr=lr, weight_decay=weight_decay, optimizer=AdamW)
        self.moments = {p: (torch.zeros_like(p), torch.zeros_like(p)) for g in self.groups for p in g["params"]}

    @torch.no_grad()
    def step(self, t: int, schedule: float) -> None:
        for group in self.groups:
            for p in group["params"]:
                m, v = self.moments[p]
                m.mul_(BETAS[0]).add_((1 - BETAS[0]) * p.grad)
                v.mul_(BETAS[1]).add_((1 - BETAS[1]) * p.grad * p.grad)
                d = m / (1 - BETAS[0] ** t) / ((v / (1 - BETAS[1] ** t)).sqrt() + EPS)
                lr = group["lr"] * schedule
                if group.get("angle"):
                    rms = math.sqrt((d * d).sum().item() / d.numel())
                    p -= group["angle"] * schedule * d / max(rms, 0.01)
                else:
                    p -= lr * group["weight_decay"] * p + lr * d


@pytest.mark.parametrize("fused", [False, True], ids=["loop", "fused"])
@pytest.mark.parametrize("layer", LAYERS)
def test_steps_are_those_of_the_definition(layer, fused):
    """The schedule starts at 0 and rises."""
    model = LAYERS[layer]().double()
    twin = copy.deepcopy(model)
    optimizer = AdamW(model, lr=0.02, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=fused)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: t / 4)
    reference = Reference(twin, 0.02, DECAY)
    for t in range(6):
        gradients(model, t)
        gradients(twin, t)
        optimizer.step()
        reference.step(t + 1, t / 4)
        schedule.step()
        for (name, found), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=f"{name} after step {t + 1}")


def test_the_angle_does_not_follow_lr():
    moved = []
    for lr in (1e-4, 1e-1):
        torch.manual_seed(0)
        layer = LinearSVD(8, 8).double()
        before, optimizer = layer.reflectors.detach().clone(), AdamW(layer, lr=lr)
        gradients(layer, 0)
        optimizer.step()
        moved.append(layer.reflectors.detach() - before)
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-6, atol=0)
    assert moved[0].square().mean().sqrt().item() == pytest.approx(ANGLE, rel=1e-3)


def test_a_plain_model_is_trained_as_by_torch():
    model = LAYERS["plain"]().double()
    twin = copy.deepcopy(model)
    ours = AdamW(model, lr=0.02, weight_decay=DECAY)
    theirs = torch.optim.AdamW(param_groups(twin, lr=0.02, weight_decay=DECAY))
    for t in range(3):
        gradients(model, t)
        gradients(twin, t)
        ours.step()
        theirs.step()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_without_a_gradient_a_turn_fades():
    """The turn fades as the mean of gradients does: not at once, but it ends."""
    layer = LinearSVD(6, 6).double()
    optimizer = AdamW(layer, lr=1e-3)
    gradients(layer, 0)
    optimizer.step()
    start = layer.reflectors.detach().clone()
    layer.zero_grad(set_to_none=False)
    for _ in range(150):
        optimizer.step()
    reached = layer.reflectors.detach().clone()
    for _ in range(150):
        optimizer.step()
    assert torch.dist(reached, layer.reflectors) < 1e-3 * torch.dist(reached, start)


def test_parameters_without_gradients_and_zero_gradients_stay():
    layer = LinearSVD(6, 6)
    optimizer = AdamW(layer, lr=1e-3, weight_decay=0.0)
    before = copy.deepcopy(layer.state_dict())
    optimizer.step()
    for p in layer.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def groups_of(model: nn.Module, **options: Any) -> dict[str, Any]:
    return {group["name"]: group for group in AdamW(model, **options).param_groups}


def test_groups():
    """Sigma's rate follows √lr; its decay is still that of W; other numbers and nets made to remember have theirs."""
    for lr in (1e-3, 1e-2):
        found = groups_of(nn.Sequential(LinearSVD(16, 16), nn.LayerNorm(16)), lr=lr, weight_decay=DECAY)
        assert found["sigma"]["lr"] == pytest.approx(4 * math.sqrt(LR * lr))
        assert found["sigma"]["lr"] * found["sigma"]["weight_decay"] == pytest.approx(lr * DECAY)
        assert found["reflectors"]["angle"] == ANGLE and found["reflectors"]["weight_decay"] == 0
        assert found["reflectors"]["lr"] == found["reflectors"]["peak"] == found["vectors"]["lr"] == lr
    assert groups_of(LinearSVD(16, 16, reflectors="full"))["reflectors"]["angle"] == pytest.approx(ANGLE * 0.5**0.5)
    assert groups_of(LinearSVD(16, 16, rank=4))["reflectors"]["angle"] == pytest.approx(2 * ANGLE)
    assert groups_of(LinearSVD(16, 16), reflectors=3.0)["reflectors"]["angle"] == pytest.approx(3 * ANGLE)
    remembers = groups_of(RNNSVD(3, 16), lr=1e-2)
    expected = {group["name"]: group["lr"] for group in param_groups(RNNSVD(3, 16), lr=1e-2)}
    assert {name: group["lr"] for name, group in remembers.items()} == expected
    assert remembers["reflectors"]["angle"] is None


def test_groups_are_taken():
    model = LAYERS["square"]().double()
    twin = copy.deepcopy(model)
    ours = AdamW(param_groups(model, lr=0.02, weight_decay=DECAY, optimizer=AdamW))
    theirs = AdamW(twin, lr=0.02, weight_decay=DECAY)
    for optimizer, net in ((ours, model), (theirs, twin)):
        gradients(net, 0)
        optimizer.step()
    assert torch.equal(model.reflectors, twin.reflectors) and torch.equal(model.sigma, twin.sigma)
    later = LinearSVD(4, 4)
    for group in param_groups(later, lr=0.02, optimizer=AdamW):
        ours.add_param_group(group)
    assert [g["peak"] for g in ours.param_groups if g["name"] == "reflectors"] == [0.02, 0.02]


SCHEDULES: dict[str, Any] = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
    "warm-up": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: min(t / 5, 1.0)),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, [g["lr"] for g in o.param_groups], total_steps=20),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_scale_the_angle(schedule):
    layer = LinearSVD(8, 8).double()
    optimizer = AdamW(layer, lr=1e-2)
    (group,) = (g for g in optimizer.param_groups if g["name"] == "reflectors")
    schedule = SCHEDULES[schedule](optimizer)
    for t in range(12):
        before = layer.reflectors.detach().clone()
        gradients(layer, t)
        expected = ANGLE * group["lr"] / 1e-2
        optimizer.step()
        moved = (layer.reflectors.detach() - before).square().mean().sqrt().item()
        assert moved == pytest.approx(expected, rel=1e-3, abs=1e-15)
        schedule.step()


@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle", "torch.save"])
def test_resuming(way, tmp_path):
    """Resumes in the middle of a warm-up: the peak is part of the state."""

    def made() -> tuple[nn.Module, AdamW, Any]:
        torch.manual_seed(0)
        layer = LinearSVD(6, 6).double()
        optimizer = AdamW(layer, lr=1e-2)
        return layer, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(t / 8, 1.0))

    def train(layer: nn.Module, optimizer: Any, schedule: Any, steps: range) -> None:
        for t in steps:
            gradients(layer, t)
            optimizer.step()
            schedule.step()

    whole = made()
    train(*whole, range(10))
    first = made()
    train(*first, range(4))
    if way in ("state_dict", "torch.save"):
        states = [part.state_dict() for part in first]
        if way == "torch.save":
            torch.save(states, tmp_path / "checkpoint")
            states = torch.load(tmp_path / "checkpoint")
        resumed = made()
        for part, state in zip(resumed, states, strict=True):
            part.load_state_dict(state)
    else:
        both = first[:2]
        layer, optimizer = copy.deepcopy(both) if way == "deepcopy" else pickle.loads(pickle.dumps(both))
        resumed = layer, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(t / 8, 1.0), 3)
    train(*resumed, range(4, 10))
    for p, q in zip(whole[0].parameters(), resumed[0].parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_state_of_torchs_adamw_is_taken_up():
    layer = LinearSVD(6, 6).double()
    theirs = torch.optim.AdamW(param_groups(layer, lr=1e-2))
    gradients(layer, 0)
    theirs.step()
    ours = AdamW(layer, lr=1e-2)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.state[layer.reflectors]["exp_avg"], theirs.state[layer.reflectors]["exp_avg"])
    gradients(layer, 1)
    ours.step()


def test_hooks_run_once_also_beside_an_optimizer_of_torch():
    plain = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # which makes torch wrap the step of its class
    plain.step()
    layer, calls = LinearSVD(6, 6).double(), []
    optimizer = AdamW(layer)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    gradients(layer, 0)
    optimizer.step()
    assert calls == ["before", "after"]


def test_a_closure_sees_the_reflectors():
    layer = LinearSVD(6, 6).double()
    optimizer, x = AdamW(layer, lr=1e-2), torch.randn(5, 6).double()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = layer(x).square().sum()
        loss.backward()
        return loss

    expected = layer(x).square().sum().item()
    assert optimizer.step(closure).item() == pytest.approx(expected)


def test_a_step_that_fails_leaves_the_parameters():
    layer = LinearSVD(6, 6).double()
    optimizer = AdamW(layer)
    before = layer.reflectors.detach().clone()
    gradients(layer, 0)
    layer.sigma.grad = layer.sigma.grad.to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert torch.equal(layer.reflectors, before)


@pytest.mark.parametrize("fused", [False, True], ids=["loop", "fused"])
def test_a_gradient_scaler_skips_and_scales(fused):
    layer, twin = (LinearSVD(6, 6) for _ in range(2))
    twin.load_state_dict(layer.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer, expected = AdamW(layer, fused=fused), AdamW(twin, fused=fused)
    x = torch.randn(5, 6)
    scaler.scale(layer(x).square().sum()).backward()
    twin(x).square().sum().backward()
    scaler.step(optimizer)
    scaler.update()
    expected.step()
    torch.testing.assert_close(layer.reflectors, twin.reflectors)
    optimizer.zero_grad()
    scaler.scale(layer(x).square().sum() * math.inf).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(layer.reflectors, twin.reflectors)


def test_bfloat16_parameters():
    layer = LinearSVD(32, 32).bfloat16()
    optimizer, before = AdamW(layer, reflectors=50.0), layer.reflectors.detach().clone()
    layer(torch.randn(8, 32).bfloat16()).square().sum().backward()
    optimizer.step()
    moved = (layer.reflectors.detach().float() - before.float()).square().mean().sqrt().item()
    assert moved == pytest.approx(50 * ANGLE, rel=0.05)


def test_an_export_and_a_module():
    assert fasth.optim.AdamW is AdamW and fasth.optim.param_groups is fasth.param_groups
    model = to_svd(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    assert isinstance(fasth.optim.AdamW(model), torch.optim.AdamW)


def test_a_mistake_is_explained():
    layer = LinearSVD(4, 4)
    with pytest.raises(
        TypeError, match=r"`model` should be a torch\.nn\.Module, or groups .*; got a list of Parameter"
    ):
        AdamW(list(layer.parameters()))
    with pytest.raises(TypeError, match=r"`model` should be a torch\.nn\.Module, or groups .*; got generator"):
        AdamW(layer.parameters())
    with pytest.raises(ValueError, match=r"optimizer=fasth\.optim\.AdamW\); got some without angles"):
        AdamW(param_groups(layer, lr=1e-3))
    with pytest.raises(ValueError, match=r"`reflectors` should be given to fasth\.param_groups"):
        AdamW(param_groups(layer, lr=1e-3, optimizer=AdamW), reflectors=2.0)
    with pytest.raises(ValueError, match="`reflectors` should be a positive number; got 0"):
        AdamW(layer, reflectors=0)
    with pytest.raises(ValueError, match="`lr` should be a number of at least 0"):
        AdamW(layer, lr=torch.tensor(1e-3))
