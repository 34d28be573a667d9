"""The study: a run does what it says, all methods have the same runs, and the command reports and resumes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

pytest.importorskip("experiments")

from experiments import harness
from experiments.harness.results import key
from experiments.harness.tables import score
from experiments.study import figures, grid, methods, tables, training
from experiments.study.__main__ import EXPERIMENT
from experiments.study.methods import ONE_RATE, ORTHOGONAL, PLAIN, SVD
from experiments.study.tasks import FIVE, FLOW_WHOLE, MLP, TASKS

SMALL = replace(MLP, width=32)
TINY = replace(
    grid.QUICK,
    shortened=0.01,
    seeds=1,
    tasks=(SMALL,),
    starts=(SMALL,),
    widths=(8, 16),
    rates=(1e-3,),
    factors=(1.0,),
    ranks=(2,),
    peers=("fasth", "torch, cayley"),
)
QUICKLY = ("--quick", "--workers", "0", "--rounds", "1")


def a_run(**settings) -> harness.Run:
    return {
        "experiment": "sweep", "task": "MLP", "method": SVD, "optimizer": "Adam", "lr": 1e-3, "seed": 0, "width": 16,
        "steps": 20, **settings,
    }  # fmt: skip


def make_tiny(patch):
    patch.setattr(grid, "QUICK", TINY)
    patch.setattr(grid, "MLP", SMALL)
    patch.setitem(TASKS, "MLP", SMALL)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a tiny study, and the lines of its results file."""
    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        make_tiny(patch)
        assert harness.main(EXPERIMENT, [*QUICKLY, "--out", str(folder)]) == 0
    return folder, (folder / "results.jsonl").read_text().splitlines(keepends=True)


@pytest.mark.parametrize("task", (*FIVE, FLOW_WHOLE), ids=lambda task: task.name)
@pytest.mark.parametrize("method", [PLAIN, SVD, ONE_RATE, ORTHOGONAL])
def test_every_method_learns_every_task(task, method, tmp_path):
    """``train`` itself checks that the network starts as the plain one and ends with the singular values it holds."""
    run = a_run(task=task.name, method=method, lr=3e-3)
    found = training.train(run, tmp_path)
    assert found["score"] is not None and sum(found["curve"][-5:]) < sum(found["curve"][:5])
    if method == SVD:
        assert found == {**training.train(run, tmp_path), "seconds": found["seconds"]}, "the seed decides all"


@pytest.mark.parametrize("method", [ORTHOGONAL, *methods.PEERS])
def test_orthogonal_networks_are_orthogonal(method):
    if not methods.installed(method):
        pytest.skip(f"{method} is not installed; `make study` installs it")
    torch.manual_seed(0)
    model = training.converted(MLP.network(16), a_run(method=method), MLP)
    for layer in (model[3], model[5]):
        torch.testing.assert_close(layer.weight @ layer.weight.mT, torch.eye(16), rtol=0, atol=1e-5)


def test_a_network_that_starts_as_another_is_found_out(monkeypatch, tmp_path):
    monkeypatch.setitem(methods.CONVERSIONS, SVD, lambda model: methods.to_svd(methods.plain_orthogonal_start(model)))
    with pytest.raises(harness.WrongAnswer, match="the converted network should have the loss"):
        training.train(a_run(), tmp_path)


def test_weights_with_other_singular_values_are_found_out(monkeypatch):
    monkeypatch.setattr(methods, "weights", lambda model: iter([(torch.eye(3), torch.tensor([1.0, 2.0, 1.0]))]))
    with pytest.raises(harness.WrongAnswer, match="has other singular values than its layer holds"):
        training.check_weights(nn.Identity())


def test_a_run_that_diverges_has_no_score(tmp_path):
    found = training.train(a_run(method=PLAIN, optimizer="SGD", lr=1e6), tmp_path)
    assert found["score"] is None and found["curve"][-1] is None
    json.dumps(found, allow_nan=False)


def test_factors_and_one_rate_reach_the_optimizer():
    model = methods.to_svd(MLP.network(16))
    rates = {g["name"]: g["lr"] for g in training.optimizer_of(model, a_run(sigma=2.0, reflectors=0.5)).param_groups}
    assert rates["reflectors"] == pytest.approx(0.5 * (0.003 * 1e-3) ** 0.5) and rates["vectors"] == 1e-3
    (group,) = training.optimizer_of(model, a_run(method=ONE_RATE)).param_groups
    assert group["lr"] == 1e-3


def test_cut_networks_have_the_size_that_was_asked_for(tmp_path):
    found = training.train(a_run(penalty=1e-3, width=64), tmp_path)
    dense = sum(parameter.numel() for parameter in MLP.network(64).parameters())
    for part, cut in found["cut"].items():
        assert cut["parameters"] <= float(part) * dense or part == "0.05"  # the biases and the last layer stay
        assert cut["trained on"] > 0


def test_all_methods_have_the_same_sweep():
    costs = {(task.name, method): 2.0 for task in FIVE for method in (PLAIN, SVD, ORTHOGONAL)}
    for size in (grid.FULL, grid.QUICK):
        for name in grid.NAMES:
            groups = {}
            for run in grid.runs(size, costs, [name]):
                assert run["task"] in TASKS
                method = run["method"], run.get("rank"), run.get("penalty"), run.get("sigma"), run.get("reflectors")
                sweeps = groups.setdefault((run["task"], run["width"], run["optimizer"]), {})
                sweeps.setdefault(method, set()).add((run["lr"], run["seed"]))
            for sweeps in groups.values():
                assert len({frozenset(sweep) for sweep in sweeps.values()}) == 1, name


def test_equal_time_has_a_step_at_least():
    """On a busy machine a step may be measured to cost more than all of a tiny run's."""
    costs = {(task.name, SVD): 1e3 for task in TINY.tasks}
    found = grid.runs(TINY, costs, ["equal time"])
    assert found and all(run["steps"] == 1 for run in found)


def test_the_command_reports(finished):
    folder, (header, *lines) = finished
    assert {"versions", "images", "rates", "cpu"} <= set(json.loads(header))
    keys = {key(json.loads(line), training.FOUND) for line in lines}
    assert len(keys) == len(lines) > 30, "a run of two parts of the study is made once"
    report = (folder / "report.md").read_text()
    for words in ("Adam at 0.001", "Best of the sweep, AdamW", "MLP of different widths", "thin from the start"):
        assert words in report
    for name in ("sweep", "curves", "widths", "factors", "starts", "low-rank", "peers"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert b"<svg" in (folder / f"{name}.svg").read_bytes()


def test_the_command_resumes(finished, tmp_path, monkeypatch):
    _, lines = finished
    make_tiny(monkeypatch)
    monkeypatch.setattr(figures, "draw", lambda study, folder: None)
    file = tmp_path / "results.jsonl"
    file.write_text("".join(lines[:-1]) + lines[-1][:20])  # as if interrupted in the last run
    arguments = [*QUICKLY, "--out", str(tmp_path)]
    assert harness.main(EXPERIMENT, arguments) == 0
    *others, last = file.read_text().splitlines(keepends=True)
    assert others == lines[:-1]
    assert {**json.loads(last), "seconds": 0} == {**json.loads(lines[-1]), "seconds": 0}
    assert harness.main(EXPERIMENT, arguments) == 0
    assert file.read_text().splitlines(keepends=True) == [*others, last], "nothing was left to do"


@pytest.mark.parametrize("condition", ["versions", "rates"])
def test_results_under_other_conditions_are_not_added_to(finished, tmp_path, capsys, condition):
    _, (header, *_) = finished
    (tmp_path / "results.jsonl").write_text(json.dumps({**json.loads(header), condition: "others"}) + "\n")
    assert harness.main(EXPERIMENT, [*QUICKLY, "--out", str(tmp_path)]) == 2
    assert f"was made otherwise: {condition} was others" in capsys.readouterr().err


def test_means_and_spreads():
    records = [{**a_run(seed=seed, lr=lr), "score": value} for lr, seed, value in (
        (1e-3, 0, 80.0), (1e-3, 1, 82.0), (1e-2, 0, 90.0), (1e-2, 1, None),
    )]  # fmt: skip
    assert tables.by_rate(records)[1e-2].diverged, "one of them did"
    assert tables.best(MLP, records) == (1e-3, score([80.0, 82.0]))
    assert tables.best(FLOW_WHOLE, [records[0], {**records[2], "score": 79.0}])[0] == 1e-2, "lower is better"
