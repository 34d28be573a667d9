"""The harness of the experiments: results files, worker processes, scores, data; and the results that are committed."""

from __future__ import annotations

import gzip
import operator
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Generator

pytest.importorskip("experiments")

from rich.console import Console

from experiments import harness
from experiments.flow import __main__ as flow
from experiments.flow.models import MIXERS
from experiments.harness import data, tables
from experiments.harness.pool import in_parallel
from experiments.harness.results import OtherExperiment, Results, read
from experiments.recurrent import __main__ as recurrent
from experiments.recurrent.models import METHODS
from experiments.study import __main__ as study
from experiments.study import grid
from experiments.study.tables import Study

MEASURED = Path(__file__).parent.parent / "benchmarks"
FOUND = ("score",)


def results_in(folder, header=None, compared=("versions",)):
    return Results(folder / "results.jsonl", FOUND, header or {"versions": "1"}, compared)


def test_finished_runs_are_found_by_their_settings(tmp_path):
    results = results_in(tmp_path)
    results.add({"experiment": "a", "lr": 0.1, "seed": 0, "score": 1.0})
    results.add({"experiment": "a", "lr": 0.1, "seed": 0, "rank": 3, "score": 2.0})
    for again in (results, results_in(tmp_path)):
        assert [record["score"] for record in again.finished([{"seed": 0, "lr": 0.1}, {"seed": 1, "lr": 0.1}])] == [1.0]
        new = {"lr": 0.2, "seed": 0}
        assert again.missing([{"lr": 0.1, "seed": 0}, new, {**new, "experiment": "b"}]) == [new]
        assert again.settings(again.records[1]) == {"experiment": "a", "lr": 0.1, "seed": 0, "rank": 3}


def test_a_line_that_was_cut_off_is_dropped(tmp_path):
    results = results_in(tmp_path)
    for lr in (0.1, 0.2):
        results.add({"lr": lr, "score": None})
    lines = results.path.read_text().splitlines(keepends=True)
    results.path.write_text("".join(lines)[:-5])
    results = results_in(tmp_path)
    assert [record["lr"] for record in results.records] == [0.1]
    results.add({"lr": 0.2, "score": None})
    assert results.path.read_text() == "".join(lines)


def test_conditions_are_compared(tmp_path):
    results_in(tmp_path).add({"lr": 0.1, "score": 1.0})
    with pytest.raises(OtherExperiment, match="was made otherwise: versions was 1, now 2"):
        results_in(tmp_path, {"versions": "2"})
    assert results_in(tmp_path, {"versions": "2"}, compared=()).header == {"versions": "1"}  # to report only


def test_a_file_without_a_header_stays_without_one(tmp_path):
    (tmp_path / "results.jsonl").write_text('{"lr": 0.1, "score": 1.0}\n')
    results = results_in(tmp_path)
    results.add({"lr": 0.2, "score": 2.0})
    assert read(results.path) == ({}, [{"lr": 0.1, "score": 1.0}, {"lr": 0.2, "score": 2.0}])


@pytest.mark.parametrize("content", ["nonsense\n", "3\n"])
def test_another_file_is_an_error(tmp_path, content):
    (tmp_path / "results.jsonl").write_text(content)
    with pytest.raises(OtherExperiment, match="should hold the results of an experiment"):
        results_in(tmp_path)


def test_the_best_of_the_first_seed_and_other_seeds():
    def record(lr, seed, value):
        return {"lr": lr, "seed": seed, "value": value}

    records = [record(0.1, 0, 3.0), record(0.2, 0, 2.0), record(0.3, 0, None), record(0.4, 1, 1.0)]
    best = harness.best_of_first_seed(records, lambda record: record["value"])
    assert best == records[1]
    assert harness.best_of_first_seed(records[2:3], lambda record: record["value"]) == records[2]
    assert harness.best_of_first_seed([], lambda record: record["value"]) is None
    assert harness.other_seeds({"lr": 0.1, "seed": 0}, 2) == [{"lr": 0.1, "seed": 1}, {"lr": 0.1, "seed": 2}]


def test_scores_and_curves():
    assert tables.score([]) is None
    assert tables.score([80.0, 82.0]).text(2) == "81.00 ± 1.41"
    assert tables.score([80.0, 82.0]).text(1, ".2g") == "81.0 ± 1.4"
    assert tables.score([9.0]).text(3) == "9.000"
    assert tables.score([9.0, None]).text(3) == "diverged"
    assert harness.means([1.0, 3.0, 5.0, float("nan")], 2, 4) == [2.0, None]
    assert harness.finite(float("inf")) is None and harness.finite(1.23456, 2) == 1.23


def test_worker_processes():
    calls = [(2, 3), (4, 5)]
    found = dict(in_parallel(operator.mul, calls, 1, Console(quiet=True), lambda call, result: ""))
    assert found == {(2, 3): 6, (4, 5): 20}
    with pytest.raises(ZeroDivisionError):
        list(in_parallel(operator.truediv, [(1, 0)], 0, Console(quiet=True), lambda call, result: ""))


def test_an_interrupted_command_resumes(tmp_path):
    trained = []

    def train(run, folder):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(run["lr"])
        return {"score": run["lr"]}

    def stages(options, results, console):
        yield [{"lr": 0.1, "seed": 0}, {"lr": 0.2, "seed": 0}]
        best = harness.best_of_first_seed(results.records, lambda record: record["score"])
        yield harness.other_seeds(results.settings(best), 1)

    reported = []
    experiment = harness.Experiment(
        name="none", about="", found=FOUND, add_options=lambda parser: None, stages=stages, train=train,
        label=str, report=lambda options, results, console: reported.extend(results.records),
    )  # fmt: skip
    arguments = ["--workers", "0", "--out", str(tmp_path)]
    assert harness.main(experiment, arguments) == 130
    assert trained == [0.1, 0.2] and not reported
    trained.clear()
    assert harness.main(experiment, arguments) == 0
    assert trained == [0.1] and reported[-1] == {"lr": 0.1, "seed": 1, "score": 0.1}
    assert harness.main(experiment, [*arguments, "--report"]) == 0 and trained == [0.1]
    with pytest.raises(SystemExit):  # which would delete what it should report
        harness.main(experiment, [*arguments, "--again", "--report"])
    trained.append(None)  # the next run is interrupted
    assert harness.main(experiment, [*arguments, "--again"]) == 130
    assert not (tmp_path / "results.jsonl").exists()


@pytest.mark.parametrize(
    ("experiment", "arguments", "message"),
    [
        (flow, ["--steps", "0"], "--steps should be at least 1; got 0"),
        (flow, ["--mixers", "QZ"], "invalid choice: 'QZ'"),
        (recurrent, ["--seeds", "-1"], "--seeds should be at least 0; got -1"),
        (recurrent, ["--methods", "QZ"], "invalid choice: 'QZ'"),
        (study, ["--workers", "-1"], "--workers should be at least 0; got -1"),
        (study, ["--only", "QZ"], "invalid choice: 'QZ'"),
    ],
)
def test_wrong_arguments(experiment, arguments, message, capsys):
    with pytest.raises(SystemExit):
        harness.main(experiment.EXPERIMENT, arguments)
    assert message in capsys.readouterr().err


class TestCommittedResults:
    """The full grids are finished: a run whose settings changed would be trained again, and miss in the tables."""

    @pytest.fixture(autouse=True)
    def images_of_then(self, monkeypatch):
        """Only their name decides about the settings of a run."""
        digits = data.images()._replace(name="Fashion-MNIST")
        monkeypatch.setattr(data, "images", lambda: digits)
        flow_data = replace(flow.DATA["images"](), name="Fashion-MNIST")
        monkeypatch.setitem(flow.DATA, "images", lambda: flow_data)

    @pytest.mark.parametrize("experiment", [flow, recurrent])
    def test_nothing_is_missing(self, experiment):
        described, path = experiment.EXPERIMENT, MEASURED / experiment.EXPERIMENT.name / "results.jsonl"
        options = harness.command.parse(described, [])
        for name, known in (("mixers", MIXERS), ("methods", METHODS)):
            if hasattr(options, name):
                setattr(options, name, list(known))  # whatever is installed here
        results = Results(path, described.found, {})
        stages = list(described.stages(options, results, Console(quiet=True)))
        assert all(stages) and not [run for runs in stages for run in results.missing(runs)]

    def test_nothing_of_the_study_is_missing(self):
        results = Results(MEASURED / "study" / "results.jsonl", study.EXPERIMENT.found, {})
        runs = grid.runs(grid.FULL, Study(grid.FULL, results.records).costs)
        assert len(runs) > 1000 and not results.missing(runs)


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


def test_digits_where_no_images_are_installed(without_images, capsys):
    assert data.images().name == "digits"
    assert data.images().training.inputs.shape == (1437, 8, 8) and len(data.images().test.classes) == 360
    data.announce(Console())
    assert "apt-get install dataset-fashion-mnist" in capsys.readouterr().out


def test_text_and_table():
    text = data.text()
    assert len(text.training) > 5 * len(text.test) > 0
    assert 0 <= text.test.min() and text.training.max() < data.CHARACTERS
    table = data.table()
    noisy = table.noisy(table.training.repeat(20, 1), Generator().manual_seed(0))
    torch.testing.assert_close(noisy.mean(0), torch.zeros(64), rtol=0, atol=0.03)
    torch.testing.assert_close(noisy.var(0), torch.ones(64), rtol=0, atol=0.03)


def test_the_package_imports_no_experiment():
    sources = list(Path(harness.__file__).parents[2].glob("src/**/*.py"))
    assert len(sources) > 50
    for path in sources:
        assert not re.search(r"^\s*(from|import) experiments\b", path.read_text(encoding="utf-8"), re.MULTILINE), path
