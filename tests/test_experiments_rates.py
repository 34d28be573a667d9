"""The experiment on rates: what chooses does not judge, the variants are fasth's rules, and the command reports."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("experiments")

import fasth
from experiments import harness
from experiments.rates import __main__ as command
from experiments.rates import equal_time, grid, kin, tasks, training, ways
from experiments.rates.__main__ import EXPERIMENT
from experiments.rates.training import ANGLES, GROUPS
from experiments.rates.variants import Angles
from experiments.rates.ways import PLAIN

SMALL = replace(tasks.CHOOSING[0], width=8, steps=20), replace(tasks.JUDGING[0], width=8, steps=30)


def test_what_chooses_does_not_judge():
    assert not {task.name for task in tasks.CHOOSING} & {task.name for task in tasks.JUDGING}
    assert len(tasks.JUDGING) >= 6
    assert len(tasks.TASKS) == len(tasks.CHOOSING) + len(tasks.JUDGING) + len(tasks.TIMED)
    assert not set(_texts()[0]) & set(_texts()[1]), "the files of the texts are different ones"


def _texts() -> tuple[list[str], list[str]]:
    from experiments.rates import texts

    return ["*.py"], [*texts.PACKAGES, "pydoc_data"]


@pytest.mark.parametrize("task", tasks.JUDGING, ids=lambda task: task.name)
def test_every_judging_task_starts_as_its_plain_twin(task):
    torch.manual_seed(0)
    plain = task.network(16)
    svd, batch = ways.to_svd(copy.deepcopy(plain)), task.batch(torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert task.loss(svd.eval(), batch).item() == pytest.approx(task.loss(plain.eval(), batch).item(), rel=1e-4)
    assert sum(isinstance(m, nn.Linear) for m in svd.modules()) == 0
    assert training.sizes(svd)[0] == pytest.approx(training.sizes(plain)[0], rel=1e-4)


@pytest.mark.parametrize("lr", [1e-3, 3e-2])
def test_the_chosen_variant_is_param_groups(lr):
    torch.manual_seed(0)
    one = fasth.to_svd(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))).double()
    other = copy.deepcopy(one)
    settings = {key: value for key, value in grid.VARIANTS[grid.CHOSEN].items() if key != "method"}
    ours = torch.optim.AdamW(fasth.param_groups(one, lr=lr, weight_decay=0.1))
    optimizers = ours, Angles(other, lr, 0.1, **settings)
    for _ in range(3):
        x = torch.randn(5, 6).double()
        for model, optimizer in zip((one, other), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).pow(3).sum().backward()
            optimizer.step()
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-10)


def test_a_power_of_one_half_is_the_root():
    layer = fasth.LinearSVD(6, 8)
    one, other = Angles(layer, 0.02, 0.1, root=True, sigma_root=True), Angles(layer, 0.02, 0.1, power=0.5)
    assert [group["lr"] for group in one.param_groups] == pytest.approx([group["lr"] for group in other.param_groups])


def test_an_angle_is_the_root_mean_square_of_a_step():
    layer = fasth.LinearSVD(6, 6, bias=False)
    optimizer = Angles(layer, 1e-2, 0.0, angle=0.0014)
    before = layer.reflectors.detach().clone()
    layer(torch.randn(5, 6)).square().sum().backward()
    optimizer.step()
    assert (layer.reflectors.detach() - before).square().mean().sqrt().item() == pytest.approx(0.0014, rel=1e-3)


@pytest.mark.parametrize("way", ways.CONVERSIONS)
def test_ways_train(way):
    torch.manual_seed(0)
    task = tasks.TIMED[2]
    model, x = ways.CONVERSIONS[way](task.network(16)), torch.randint(128, (2, 65))
    optimizer = training.optimizer_of(model, {"method": way, "lr": 1e-2})
    losses = [training.step(model, task, [x], optimizer) for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]


def test_scaled_rows_have_orthogonal_directions():
    plain = nn.Linear(6, 4)
    layer = ways.ScaledRows(plain)
    W = layer(torch.eye(6)).mT - layer.bias.unsqueeze(-1)
    torch.testing.assert_close(W.norm(dim=1), plain.weight.norm(dim=1))
    Q = nn.functional.normalize(W)
    torch.testing.assert_close(Q @ Q.mT, torch.eye(4), atol=1e-5, rtol=0)


def test_several_batches_are_one_step_of_their_mean_gradient():
    task, model = tasks.JUDGING[0], fasth.to_svd(tasks.JUDGING[0].network(8)).double()
    batches = [tuple(part.double() for part in task.batch(torch.Generator().manual_seed(i))) for i in range(3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    training.step(model, task, batches, optimizer)
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    training.step(model, task, [tuple(torch.cat(part) for part in zip(*batches, strict=True))], optimizer)
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    for g, h in zip(found, expected, strict=True):
        torch.testing.assert_close(g, h)


def test_lion_moves_every_number_by_the_rate():
    p = nn.Parameter(torch.randn(5))
    before = p.detach().clone()
    p.grad = torch.randn(5)
    kin.Lion([p], lr=0.1).step()
    torch.testing.assert_close(p.detach(), before - 0.1 * p.grad.sign())


def test_muon_takes_the_dense_matrices_of_the_blocks():
    model = ways.CONVERSIONS[ways.ATTENTION](tasks.TIMED[2].network(16))
    optimizer = kin.MuonBesideAdamW(model, 1e-2, 0.0)
    _, muon = optimizer.both
    assert {p.shape for group in muon.param_groups for p in group["params"]} == {(64, 16), (16, 64)}
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(everything) == len(set(everything)) and set(everything) == set(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert muon.param_groups[0]["lr"] == 0.005 and schedule.get_last_lr()[-1] == 0.005


def records(scores: dict[float, float | None], **settings: Any) -> list[harness.Record]:
    found = {"part": "judge", "task": tasks.JUDGING[0].name, "method": PLAIN, "seed": 0, **settings}
    return [{**found, "lr": lr, "score": score} for lr, score in scores.items()]


def test_other_seeds_at_three_rates():
    swept = records({1e-3: 3.0, 3e-3: 2.0, 1e-2: 1.0, 3e-2: 1.5, 1e-1: None})
    assert grid.best_rate(swept) == 1e-2 and not grid.beyond(swept, [PLAIN], False)
    runs = grid.more_seeds(swept, [PLAIN, GROUPS], False)
    assert {(run["lr"], run["seed"]) for run in runs} == {(lr, seed) for lr in (1e-3, 1e-2, 3e-2) for seed in range(3)}
    assert [run["seed"] for run in runs] == sorted(run["seed"] for run in runs)


def test_a_sweep_that_ends_at_its_best_goes_on():
    swept = records({1e-3: 3.0, 3e-2: 2.0, 1e-1: 1.0})
    (run,) = grid.beyond(swept, [PLAIN], False)
    assert run["lr"] == 3e-1 and grid.thrice(3e-1) == 1.0
    assert [run["lr"] for run in grid.outward(swept)] == [3e-1]
    assert [run["lr"] for run in grid.outward(records({1e-3: 1.0, 1e-2: 2.0}))] == [3e-4]
    assert not grid.outward(records({1e-3: 3.0, 1e-2: 1.0, 1e-1: None}))


def test_the_command_judges_and_reports(tmp_path, monkeypatch):
    for name, task in zip(("CHOOSING", "JUDGING"), SMALL, strict=True):
        monkeypatch.setattr(grid, name, (task,))
        monkeypatch.setitem(tasks.TASKS, task.name, task)
    few = {name: grid.VARIANTS[name] for name in (PLAIN, grid.CHOSEN, "angle 0.0014, σ by √lr")}
    monkeypatch.setattr(grid, "VARIANTS", few)
    timed = (replace(SMALL[1], name="small and timed"),)
    monkeypatch.setattr(equal_time, "TIMED", timed)
    monkeypatch.setattr(command, "TIMED", timed)
    monkeypatch.setattr(equal_time, "WAYS", {timed[0].name: ((PLAIN, 1), (ways.SVD, 1), (PLAIN, 2), (ways.SVD, 2))})
    monkeypatch.setattr(grid, "KIN_TASKS", (SMALL[1].name,))
    monkeypatch.setitem(tasks.TASKS, timed[0].name, timed[0])
    arguments = ["--quick", "--workers", "0", "--rounds", "2", "--out", str(tmp_path)]
    assert harness.main(EXPERIMENT, arguments) == 0
    lines = (tmp_path / "results.jsonl").read_text().splitlines()[1:]
    found = [json.loads(line) for line in lines]
    assert {r["method"] for r in found if r["part"] == "judge"} == {PLAIN, GROUPS, ANGLES}
    assert all(r["score"] > 0 and r["growth"] > 0 for r in found if r["part"] != "cost")
    for name in ("choosing", "low", "best", "growth", "longer", "kin", "time"):
        assert "| " in (tmp_path / f"{name}.md").read_text()
    assert (tmp_path / "judging.png").read_bytes().startswith(b"\x89PNG")
    assert harness.main(EXPERIMENT, arguments) == 0
    assert (tmp_path / "results.jsonl").read_text().splitlines()[1:] == lines, "nothing was left to do"
