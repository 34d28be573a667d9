"""The study of learning: its data and methods, that a run is what it says, and that the command goes on and reports."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from fasth.reproduce.study import command, data, experiments, methods, runner, tables, training
from fasth.reproduce.study.methods import ONE_RATE, ORTHOGONAL, PLAIN, SVD
from fasth.reproduce.study.tasks import FIVE, FLOW_WHOLE, MLP, TASKS
from torch import Generator, nn

TINY = replace(
    experiments.QUICK,
    shortened=0.01,
    seeds=1,
    tasks=(MLP,),
    starts=(MLP,),
    widths=(8, 16),
    rates=(1e-3,),
    factors=(1.0,),
    ranks=(2,),
    peers=("fasth", "torch, cayley"),
)


def a_run(**settings) -> training.Run:
    return {
        "experiment": "sweep", "task": "MLP", "method": SVD, "optimizer": "Adam", "lr": 1e-3, "seed": 0, "width": 16,
        "steps": 20, **settings,
    }  # fmt: skip


def forget_images():
    data.pixels.cache_clear()
    data.images.cache_clear()


@pytest.fixture
def without_images(monkeypatch):
    monkeypatch.setattr(data, "FOLDERS", {})
    forget_images()
    yield
    forget_images()


def test_images_of_the_mnist_format(tmp_path, monkeypatch):
    pixels, classes = np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5), np.array([1, 0, 2], np.uint8)
    for part in ("train", "t10k"):
        for name, array in (("images-idx3", pixels), ("labels-idx1", classes)):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
            content, path = header + array.tobytes(), tmp_path / f"{part}-{name}-ubyte"
            if part == "train":
                path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(content))
            else:
                path.write_bytes(content)
    monkeypatch.setattr(data, "FOLDERS", {"these": tmp_path})
    forget_images()
    found = data.images()
    forget_images()
    assert found.name == "these" and found.test.classes.tolist() == [1, 0, 2]
    expected = torch.from_numpy(pixels).float()
    torch.testing.assert_close(found.training.inputs, (expected - expected.mean()) / expected.std())
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(b"not such a file")
    with pytest.raises(ValueError, match="should be a file of bytes in the MNIST format"):
        data.images()


def test_digits_where_no_images_are_installed(without_images, tmp_path, capsys):
    assert data.images().name == "digits"
    assert data.images().training.inputs.shape == (1437, 8, 8) and len(data.images().test.classes) == 360
    assert command.main(["--report", "--out", str(tmp_path)]) == 0
    assert "apt-get install dataset-fashion-mnist" in " ".join(capsys.readouterr().err.split())


def test_text_and_table():
    text = data.text()
    assert len(text.training) > 5 * len(text.test) > 0
    assert 0 <= text.test.min() and text.training.max() < data.CHARACTERS
    table = data.table()
    noisy = table.noisy(table.training.repeat(20, 1), Generator().manual_seed(0))
    torch.testing.assert_close(noisy.mean(0), torch.zeros(64), rtol=0, atol=0.03)
    torch.testing.assert_close(noisy.var(0), torch.ones(64), rtol=0, atol=0.03)


@pytest.mark.parametrize("task", (*FIVE, FLOW_WHOLE), ids=lambda task: task.name)
@pytest.mark.parametrize("method", [PLAIN, SVD, ONE_RATE, ORTHOGONAL])
def test_every_method_learns_every_task(task, method):
    """``train`` itself checks that the network starts as the plain one and ends with the singular values it holds."""
    run = a_run(task=task.name, method=method, lr=3e-3)
    found = training.train(run)
    assert found["score"] is not None and sum(found["curve"][-5:]) < sum(found["curve"][:5])
    assert found == {**training.train(run), "seconds": found["seconds"]}, "the seed decides all"


@pytest.mark.parametrize("method", [ORTHOGONAL, *methods.PEERS])
def test_orthogonal_networks_are_orthogonal(method):
    if not methods.installed(method):
        pytest.skip(f"{method} is not installed; `make study` installs it")
    torch.manual_seed(0)
    model = training.converted(MLP.network(16), a_run(method=method), MLP)
    for layer in (model[3], model[5]):
        torch.testing.assert_close(layer.weight @ layer.weight.mT, torch.eye(16), rtol=0, atol=1e-5)


def test_a_network_that_starts_as_another_is_found_out(monkeypatch):
    monkeypatch.setitem(methods.CONVERSIONS, SVD, lambda model: methods.to_svd(methods.plain_orthogonal_start(model)))
    with pytest.raises(training.WrongAnswer, match="the converted network should have the loss"):
        training.train(a_run())


def test_weights_with_other_singular_values_are_found_out(monkeypatch):
    monkeypatch.setattr(methods, "weights", lambda model: iter([(torch.eye(3), torch.tensor([1.0, 2.0, 1.0]))]))
    with pytest.raises(training.WrongAnswer, match="has other singular values than its layer holds"):
        training.check_weights(nn.Identity())


def test_a_run_that_diverges_has_no_score():
    found = training.train(a_run(method=PLAIN, optimizer="SGD", lr=1e6))
    assert found["score"] is None and found["curve"][-1] is None
    json.dumps(found, allow_nan=False)


def test_factors_and_one_rate_reach_the_optimizer():
    model = methods.to_svd(MLP.network(16))
    rates = {g["name"]: g["lr"] for g in training.optimizer_of(model, a_run(sigma=2.0, reflectors=0.5)).param_groups}
    assert rates["reflectors"] == 0.5e-3 and rates["vectors"] == 1e-3
    (group,) = training.optimizer_of(model, a_run(method=ONE_RATE)).param_groups
    assert group["lr"] == 1e-3


def test_cut_networks_have_the_size_that_was_asked_for():
    found = training.train(a_run(penalty=1e-3, width=64))
    dense = sum(parameter.numel() for parameter in MLP.network(64).parameters())
    for part, cut in found["cut"].items():
        assert cut["parameters"] <= float(part) * dense or part == "0.05"  # the biases and the last layer stay
        assert cut["trained on"] > 0


def test_all_methods_have_the_same_sweep():
    costs = {(task.name, method): 2.0 for task in FIVE for method in (PLAIN, SVD, ORTHOGONAL)}
    for grid in (experiments.FULL, experiments.QUICK):
        for name in experiments.NAMES:
            of = {}
            for run in experiments.runs(grid, costs, [name]):
                assert run["task"] in TASKS
                method = run["method"], run.get("rank"), run.get("penalty"), run.get("sigma"), run.get("reflectors")
                sweeps = of.setdefault((run["task"], run["width"], run["optimizer"]), {})
                sweeps.setdefault(method, set()).add((run["lr"], run["seed"]))
            for sweeps in of.values():
                assert len({frozenset(sweep) for sweep in sweeps.values()}) == 1, name


def test_equal_time_has_a_step_at_least():
    """On a busy machine a step may be measured to cost more than all of a tiny run's."""
    costs = {(task.name, SVD): 1e3 for task in TINY.tasks}
    found = experiments.runs(TINY, costs, ["equal time"])
    assert found and all(run["steps"] == 1 for run in found)


def test_the_command_reports_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(experiments, "QUICK", TINY)
    monkeypatch.setattr(runner, "ROUNDS", 3)
    arguments = ["--quick", "--out", str(tmp_path), "--workers", "1"]
    assert command.main([*arguments, "--only", "sweep"]) == 0
    lines = (tmp_path / runner.FILE).read_text().splitlines()
    assert command.main([*arguments, "--only", "sweep"]) == 0
    assert (tmp_path / runner.FILE).read_text().splitlines() == lines, "nothing was left to do"
    (tmp_path / runner.FILE).write_text("\n".join(lines[:-2]) + "\n" + lines[-2][:20])  # as if interrupted
    assert command.main([*arguments]) == 0
    records = [json.loads(line) for line in (tmp_path / runner.FILE).read_text().splitlines()[1:]]
    assert len(records) == len({runner.key(record) for record in records}) > len(lines)
    report = (tmp_path / "report.md").read_text()
    for words in ("Adam at 0.001", "Best of the sweep, AdamW", "MLP of different widths", "thin from the start"):
        assert words in report
    for name in ("sweep", "curves", "widths", "factors", "starts", "low-rank", "peers"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert b"<svg" in (tmp_path / f"{name}.svg").read_bytes()
    (tmp_path / runner.FILE).write_text(lines[0].replace(torch.__version__, "1.0") + "\n")
    assert command.main(arguments) == 2
    assert "was made otherwise: versions was" in capsys.readouterr().err
    (tmp_path / runner.FILE).write_text("nonsense\n")
    assert command.main(arguments) == 2
    assert "should hold the results of a study" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["--workers", "0"])


def test_means_and_spreads():
    records = [{**a_run(seed=seed, lr=lr), "score": score} for lr, seed, score in (
        (1e-3, 0, 80.0), (1e-3, 1, 82.0), (1e-2, 0, 90.0), (1e-2, 1, None),
    )]  # fmt: skip
    assert str(tables.score(records[:2])) == "81.00 ± 1.41"
    assert str(tables.by_rate(records)[1e-2]) == "diverged", "one of them did"
    assert tables.score([]) is None
    assert tables.best(MLP, records) == (1e-3, (81.0, pytest.approx(2**0.5)))
    assert tables.best(FLOW_WHOLE, [records[0], {**records[2], "score": 79.0}])[0] == 1e-2, "lower is better"
