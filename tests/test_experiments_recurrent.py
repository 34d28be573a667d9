"""The recurrent nets: tasks and starts are as described, and the command chooses, reports and resumes."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("experiments")

from experiments import harness
from experiments.harness import data
from experiments.harness.results import Results
from experiments.recurrent import __main__ as command
from experiments.recurrent import models, report, tasks, training
from experiments.recurrent.__main__ import EXPERIMENT, Grid, finals, sweep


@pytest.fixture
def small_images(monkeypatch):
    """The images are scikit-learn's digits, whatever is installed."""
    monkeypatch.setattr(data, "FOLDERS", {})
    for function in (caches := (data.pixels, data.images, tasks.order)):
        function.cache_clear()
    yield
    for function in caches:
        function.cache_clear()


def batch_of(task, seed=0):
    return task.batch(torch.Generator().manual_seed(seed))


def test_copy_memory():
    task = tasks.copy_memory(30, steps=1, size=7)
    x, y = batch_of(task)
    symbols = x.argmax(-1)
    assert x.shape == (50, 7, 10) and y.shape == (50, 7)
    assert torch.equal(symbols[:10], y[-10:]) and ((1 <= y[-10:]) & (y[-10:] <= 8)).all()
    assert (y[:-10] == 0).all() and (symbols[39] == 9).all()  # the mark after which they are wanted
    assert (symbols[10:39] == 0).all() and (symbols[40:] == 0).all()
    # A net that answers blank until then, and guesses evenly afterwards, has a loss of 1.
    forgetful = torch.full((50, 7, 9), -torch.inf)
    forgetful[:-10, :, 0], forgetful[-10:, :, 1:] = 0, 0
    assert task.loss(forgetful, y).item() == pytest.approx(1)
    perfect = 50 * torch.nn.functional.one_hot(y, 9).float()
    assert task.loss(perfect, y) < 1e-6 and task.score(perfect, y) == 100


def test_adding():
    task = tasks.adding(20, steps=1, size=5000)
    x, y = batch_of(task)
    numbers, marks = x.unbind(-1)
    assert (marks[:10].sum(0) == 1).all() and (marks[10:].sum(0) == 1).all()
    torch.testing.assert_close((numbers * marks).sum(0), y)
    assert task.loss(torch.ones(20, 5000, 1), y).item() == pytest.approx(1 / 6, rel=0.05)


def test_pixels(small_images):
    plain, permuted = (tasks.pixel_by_pixel(permuted, steps=1, size=9) for permuted in (False, True))
    (x, y), (shuffled, same) = batch_of(plain), batch_of(permuted)
    assert x.shape == (64, 9, 1) and torch.equal(y, same) and not torch.equal(x, shuffled)
    assert torch.equal(x.sort(0).values, shuffled.sort(0).values)
    images, classes = data.images().training
    matches = (images.flatten(1) == x[:, 0, 0]).all(1).nonzero().flatten()
    assert len(matches) and classes[matches[0]] == y[0]
    assert sum(len(labels) for _, labels in plain.test()) == len(data.images().test.classes)


def test_the_nets_of_others_start_as_ours_do():
    task = tasks.TASKS["copy, 100"]
    for method in models.installed():
        net = training.new_net(method, task)
        x, _ = batch_of(task)
        assert net(x[:5]).shape == (5, 32, 9)
        if "orthogonal" in method:
            W = net.rnn.hidden.weight.detach()
            torch.testing.assert_close(W.mT @ W, torch.eye(128), rtol=0, atol=1e-4)
            torch.testing.assert_close(
                W, torch.block_diag(*[W[i : i + 2, i : i + 2] for i in range(0, 128, 2)]), rtol=0, atol=1e-5
            )


def test_the_orthogonal_weights_of_others_have_a_tenth_of_the_rate():
    for method in models.installed():
        net = models.Net(method, 3, 8, 2)
        groups = models.groups(net, 1.0)
        assert sorted(map(id, net.parameters())) == sorted(id(p) for group in groups for p in group["params"])
        if "orthogonal" in method:
            slow = {id(p) for group in groups if group["lr"] == 0.1 for p in group["params"]}
            assert slow == {id(p) for name, p in net.named_parameters() if "parametrizations" in name}


ARGUMENTS = ("--quick", "--methods", "nn.RNN", "RNNSVD", "--rounds", "1", "--workers", "0")


TINY = tasks.copy_memory(5, 6, 3)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a tiny experiment, and the lines of its results file."""
    folder = tmp_path_factory.mktemp("recurrent")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tasks.TASKS, "copy, 100", TINY)
        patch.setattr(report, "STEPS_BEFORE_LOOKING", 1)
        assert harness.main(EXPERIMENT, [*ARGUMENTS, "--out", str(folder)]) == 0
    return folder, (folder / "results.jsonl").read_text().splitlines(keepends=True)


def test_the_command_writes_tables_and_pictures(finished):
    folder, (_, *lines) = finished
    assert {json.loads(line)["method"] for line in lines} == {"nn.RNN", "RNNSVD"} and len(lines) == 2
    assert "after as long as RNNSVD took" in (folder / "tables.md").read_text()
    for name in ("curves-steps.png", "curves-seconds.png", "gradients.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_the_command_resumes(finished, tmp_path, monkeypatch):
    _, lines = finished
    monkeypatch.setitem(tasks.TASKS, "copy, 100", TINY)
    monkeypatch.setattr(command, "write", lambda *_: None)
    (tmp_path / "results.jsonl").write_text("".join(lines)[:-10])  # cut off in the middle of the last record
    assert harness.main(EXPERIMENT, [*ARGUMENTS, "--out", str(tmp_path)]) == 0
    *others, last = (tmp_path / "results.jsonl").read_text().splitlines(keepends=True)
    assert others == lines[:-1] and json.loads(last) == json.loads(lines[-1])


def test_one_seed_chooses_the_rate_and_others_judge_it(tmp_path):
    grid = Grid(("copy, 100",), (0.1, 0.2, 0.3), seeds=2)
    runs = sweep(grid, "copy, 100", "nn.GRU")
    assert [(run["lr"], run["seed"]) for run in runs] == [(0.1, 0), (0.2, 0), (0.3, 0)]
    results = Results(tmp_path / "results.jsonl", EXPERIMENT.found, {"versions": {}})
    assert finals(grid, ["nn.GRU"], results) == []
    for run, last in zip(runs, (3.0, 2.0, None), strict=True):
        results.add(run | {"curve": [0.0, last]})
    assert [(run["lr"], run["seed"]) for run in finals(grid, ["nn.GRU"], results)] == [(0.2, 1), (0.2, 2)]
    alone = Grid(grid.tasks, grid.rates, seeds=0)
    assert [(run["lr"], run["seed"]) for run in finals(alone, ["nn.GRU"], results)] == [(0.2, 0)]


def test_equal_time():
    record = {"steps": 40, "scores": [float(i) for i in range(10)]}
    assert report.score_after(record, 0.5) == 0 and report.score_after(record, 21) == 5
    assert report.score_after(record, 40) == report.score_after(record, 1000) == 9
    assert report.score([1.0, 3.0], "% ↑") == "2.0 ± 1.4" and report.score([1.0, None], "") == "diverged"
