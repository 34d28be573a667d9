"""examples/recurrent.py: its tasks are what they say, its nets start alike, and its command can be stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fasth.reproduce.study import data

for package in ("matplotlib", "rich", "sklearn"):
    pytest.importorskip(package, reason=f"{package} is not installed; it comes with fasth[dev,reproduce]")


@pytest.fixture(scope="module")
def recurrent():
    """examples/recurrent.py, with its modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent.parent / "examples")
        import recurrent
        import recurrent_models
        import recurrent_report
        import recurrent_tasks
        import recurrent_training

        recurrent.models, recurrent.tasks, recurrent.reports = recurrent_models, recurrent_tasks, recurrent_report
        recurrent.training = recurrent_training
        yield recurrent


@pytest.fixture
def small_images(recurrent, monkeypatch):
    """The images are scikit-learn's digits, whatever is installed."""
    monkeypatch.setattr(data, "FOLDERS", {})
    for function in (caches := (data.pixels, data.images, recurrent.tasks.order)):
        function.cache_clear()
    yield
    for function in caches:
        function.cache_clear()


def batch_of(task, seed=0):
    return task.batch(torch.Generator().manual_seed(seed))


def test_copy_memory(recurrent):
    task = recurrent.tasks.copy_memory(30, steps=1, size=7)
    x, y = batch_of(task)
    symbols = x.argmax(-1)
    assert x.shape == (50, 7, 10) and y.shape == (50, 7)
    assert torch.equal(symbols[:10], y[-10:]) and ((1 <= y[-10:]) & (y[-10:] <= 8)).all()
    assert (y[:-10] == 0).all() and (symbols[39] == 9).all()  # the mark after which they are wanted
    assert (symbols[10:39] == 0).all() and (symbols[40:] == 0).all()
    # Whoever says blank until then, and guesses evenly afterwards, has a loss of 1.
    forgetful = torch.full((50, 7, 9), -torch.inf)
    forgetful[:-10, :, 0], forgetful[-10:, :, 1:] = 0, 0
    assert task.loss(forgetful, y).item() == pytest.approx(1)
    perfect = 50 * torch.nn.functional.one_hot(y, 9).float()
    assert task.loss(perfect, y) < 1e-6 and task.score(perfect, y) == 100


def test_adding(recurrent):
    task = recurrent.tasks.adding(20, steps=1, size=5000)
    x, y = batch_of(task)
    numbers, marks = x.unbind(-1)
    assert (marks[:10].sum(0) == 1).all() and (marks[10:].sum(0) == 1).all()
    torch.testing.assert_close((numbers * marks).sum(0), y)
    assert task.loss(torch.ones(20, 5000, 1), y).item() == pytest.approx(1 / 6, rel=0.05)


def test_pixels(recurrent, small_images):
    plain, permuted = (recurrent.tasks.pixel_by_pixel(permuted, steps=1, size=9) for permuted in (False, True))
    (x, y), (shuffled, same) = batch_of(plain), batch_of(permuted)
    assert x.shape == (64, 9, 1) and torch.equal(y, same) and not torch.equal(x, shuffled)
    assert torch.equal(x.sort(0).values, shuffled.sort(0).values)
    images, classes = data.images().training
    of_first = (images.flatten(1) == x[:, 0, 0]).all(1).nonzero().flatten()
    assert len(of_first) and classes[of_first[0]] == y[0]
    assert sum(len(labels) for _, labels in plain.test()) == len(data.images().test.classes)


def test_the_nets_of_others_start_as_ours_do(recurrent):
    task = recurrent.TASKS["copy, 100"]
    for method in recurrent.installed():
        net = recurrent.training.new_net(method, task)
        x, _ = batch_of(task)
        assert net(x[:5]).shape == (5, 32, 9)
        if "orthogonal" in method:
            W = net.rnn.hidden.weight.detach()
            torch.testing.assert_close(W.mT @ W, torch.eye(128), rtol=0, atol=1e-4)
            torch.testing.assert_close(
                W, torch.block_diag(*[W[i : i + 2, i : i + 2] for i in range(0, 128, 2)]), rtol=0, atol=1e-5
            )


def test_the_orthogonal_weights_of_others_have_a_tenth_of_the_rate(recurrent):
    for method in recurrent.installed():
        net = recurrent.models.Net(method, 3, 8, 2)
        groups = recurrent.models.groups(net, 1.0)
        assert sorted(map(id, net.parameters())) == sorted(id(p) for group in groups for p in group["params"])
        if "orthogonal" in method:
            slow = {id(p) for group in groups if group["lr"] == 0.1 for p in group["params"]}
            assert slow == {id(p) for name, p in net.named_parameters() if "parametrizations" in name}


ARGUMENTS = ("--quick", "--methods", "nn.RNN", "RNNSVD", "--rounds", "1", "--workers", "1")


def test_the_command_writes_tables_and_pictures_and_goes_on(recurrent, tmp_path, capsys, monkeypatch):
    tasks = recurrent.tasks
    small = {task.name: task for task in (tasks.copy_memory(5, 6, 3), tasks.adding(10, 6, 3))}
    monkeypatch.setitem(tasks.TASKS, "copy, 100", small["copy, 5"])
    monkeypatch.setattr(recurrent.reports, "STEPS_BEFORE_LOOKING", 1)
    monkeypatch.setattr(
        recurrent, "in_parallel", lambda function, calls, *_: ((call, function(*call)) for call in calls)
    )
    arguments = [*ARGUMENTS, "--out", str(tmp_path)]
    assert recurrent.main(arguments) == 0
    assert "after as long as RNNSVD took" in " ".join(capsys.readouterr().out.split())
    for name in ("tables.md", "curves-steps.png", "curves-seconds.png", "gradients.png"):
        assert (tmp_path / name).stat().st_size > 100
    file = tmp_path / "results.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    assert {json.loads(line)["method"] for line in lines} == {"nn.RNN", "RNNSVD"} and len(lines) == 2
    file.write_text("".join(lines)[:-10])  # cut off in the middle of the last record
    assert recurrent.main(arguments) == 0
    again = file.read_text().splitlines(keepends=True)
    assert again[0] == lines[0] and json.loads(again[1]) == json.loads(lines[1])


def test_one_seed_chooses_the_rate_and_others_judge_it(recurrent):
    def record(lr, last):
        return {"task": "copy, 100", "method": "nn.GRU", "seed": 0, "lr": lr, "curve": [0.0, last]}

    records = [record(0.1, 3.0), record(0.2, 2.0), record(0.3, None)]
    assert recurrent.best_rate(records, "copy, 100", "nn.GRU") == 0.2
    grid = recurrent.Grid(("copy, 100",), (0.1, 0.2, 0.3), seeds=2)
    assert [(run.lr, run.seed) for run in recurrent.finals(grid, ["nn.GRU"], records)] == [(0.2, 1), (0.2, 2)]
    assert [run.lr for run in recurrent.sweep(grid, ["nn.GRU"])] == [0.1, 0.2, 0.3]
    alone = recurrent.Grid(("copy, 100",), (0.1, 0.2, 0.3), seeds=0)
    assert [(run.lr, run.seed) for run in recurrent.finals(alone, ["nn.GRU"], records)] == [(0.2, 0)]


def test_equal_time(recurrent):
    record = {"steps": 40, "scores": [float(i) for i in range(10)]}
    assert recurrent.reports.score_after(record, 0.5) == 0 and recurrent.reports.score_after(record, 21) == 5
    assert recurrent.reports.score_after(record, 40) == recurrent.reports.score_after(record, 1000) == 9
    assert (
        recurrent.reports.spread([1.0, 3.0], "% ↑") == "2.0 ± 1.4"
        and recurrent.reports.spread([1.0, None], "") == "diverged"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--seeds", "-1"], "--seeds should be at least 0; got -1"), (["--methods", "QZ"], "invalid choice: 'QZ'")],
)
def test_wrong_arguments(recurrent, arguments, message, capsys):
    with pytest.raises(SystemExit):
        recurrent.main(arguments)
    assert message in capsys.readouterr().err
