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
from experiments.rates import grid, tasks, training
from experiments.rates.__main__ import EXPERIMENT
from experiments.rates.training import ANGLES, GROUPS, PLAIN
from experiments.rates.variants import Angles

SMALL = replace(tasks.CHOOSING[0], width=8, steps=20), replace(tasks.JUDGING[0], width=8, steps=30)


def test_what_chooses_does_not_judge():
    assert not {task.name for task in tasks.CHOOSING} & {task.name for task in tasks.JUDGING}
    assert len(tasks.JUDGING) >= 6 and len(tasks.TASKS) == len(tasks.CHOOSING) + len(tasks.JUDGING)
    assert not set(_texts()[0]) & set(_texts()[1]), "the files of the texts are different ones"


def _texts() -> tuple[list[str], list[str]]:
    from experiments.rates import texts

    return ["*.py"], [*texts.PACKAGES, "pydoc_data"]


@pytest.mark.parametrize("task", tasks.JUDGING, ids=lambda task: task.name)
def test_every_judging_task_starts_as_its_plain_twin(task):
    torch.manual_seed(0)
    plain = task.network(16)
    svd, batch = training.convert(copy.deepcopy(plain)), task.batch(torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert task.loss(svd.eval(), batch).item() == pytest.approx(task.loss(plain.eval(), batch).item(), rel=1e-4)
    assert sum(isinstance(m, nn.Linear) for m in svd.modules()) == 0
    assert training.sizes(svd)[0] == pytest.approx(training.sizes(plain)[0], rel=1e-4)


@pytest.mark.parametrize("lr", [1e-3, 3e-2])
def test_the_variants_are_what_fasth_has(lr):
    """The chosen one is ``param_groups``; the one with an angle and sigma by √lr is ``fasth.optim.AdamW``."""
    ours: dict[str, Any] = {
        grid.CHOSEN: lambda m: torch.optim.AdamW(fasth.param_groups(m, lr=lr, weight_decay=0.1)),
        "angle 0.0014, σ by √lr": lambda m: fasth.optim.AdamW(m, lr=lr, weight_decay=0.1),
    }
    for name, optimizer_of in ours.items():
        torch.manual_seed(0)
        one = fasth.to_svd(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))).double()
        other = copy.deepcopy(one)
        settings = {key: value for key, value in grid.VARIANTS[name].items() if key != "method"}
        optimizers = optimizer_of(one), Angles(other, lr, 0.1, **settings)
        for _ in range(3):
            x = torch.randn(5, 6).double()
            for model, optimizer in zip((one, other), optimizers, strict=True):
                optimizer.zero_grad()
                model(x).pow(3).sum().backward()
                optimizer.step()
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-10)


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


def test_the_command_judges_and_reports(tmp_path, monkeypatch):
    for name, task in zip(("CHOOSING", "JUDGING"), SMALL, strict=True):
        monkeypatch.setattr(grid, name, (task,))
        monkeypatch.setitem(tasks.TASKS, task.name, task)
    few = {name: grid.VARIANTS[name] for name in (PLAIN, grid.CHOSEN, "angle 0.0014, σ by √lr")}
    monkeypatch.setattr(grid, "VARIANTS", few)
    arguments = ["--quick", "--workers", "0", "--out", str(tmp_path)]
    assert harness.main(EXPERIMENT, arguments) == 0
    lines = (tmp_path / "results.jsonl").read_text().splitlines()[1:]
    found = [json.loads(line) for line in lines]
    assert {r["method"] for r in found if r["part"] == "judge"} == {PLAIN, GROUPS, ANGLES}
    assert all(r["score"] > 0 and r["growth"] > 0 for r in found)
    for name in ("choosing", "low", "best", "growth"):
        assert "| " in (tmp_path / f"{name}.md").read_text()
    assert (tmp_path / "judging.png").read_bytes().startswith(b"\x89PNG")
    assert harness.main(EXPERIMENT, arguments) == 0
    assert (tmp_path / "results.jsonl").read_text().splitlines()[1:] == lines, "nothing was left to do"
