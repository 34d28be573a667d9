"""``fasth reproduce``: its experiments, its files, going on after an interruption, counts and memory."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace

import pytest
import torch

from fasth.tools.cli import main
from fasth.tools.reproduce import counts, memory, operations, tables
from fasth.tools.reproduce.layers import LINEAR_ORTHOGONAL, LINEAR_SVD, NN_LINEAR
from fasth.tools.reproduce.methods import COMPACT, FULL, LINEAR, METHODS
from fasth.tools.reproduce.tasks import Counting, Entry, InTurns, Settings
from fasth.tools.reproduce.timing import environment, verify

pytest.importorskip("rich", reason="rich is not installed; it comes with fasth[reproduce]")
pytest.importorskip("matplotlib", reason="matplotlib is not installed; it comes with fasth[reproduce]")

from fasth.tools.reproduce import experiments, options, runner

SEQUENTIAL = METHODS["sequential"]


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def built(method, d=7, rows=5, dtype=torch.float64, device="cpu"):
    return method.build(d, rows, dtype, device, torch.Generator().manual_seed(0))


# Methods


@pytest.mark.parametrize("size", [(1, 3), (2, 1), (7, 5), (40, 16), (64, 32)], ids="d={0[0]}, rows={0[1]}".format)
@pytest.mark.parametrize("operation", operations.OPERATIONS, ids=lambda operation: operation.name)
def test_every_way_to_compute_an_operation_gives_its_reference(operation, size, precise, device):
    for method in operations.methods(operation):
        verify(built(method, *size, precise, device))


@pytest.mark.parametrize("operation", operations.OPERATIONS, ids=lambda operation: operation.name)
def test_an_operation_by_factors_is_that_of_the_dense_matrix(operation):
    """The two columns of Table 1, on one matrix."""
    case = built(operation.our_method, d=6)
    x, sigma, *reflectors = (tensor.detach() for tensor in case.tensors)
    I = torch.eye(6).double()
    Q = [operations._definition(I, operations.unit(V), False).mT for V in reflectors]
    W = Q[0] @ sigma.diag() @ Q[-1].mT
    torch.testing.assert_close(case.function(x, sigma, *reflectors), operation.standard(x, W))
    torch.testing.assert_close(operation.standard(x, W), operation.obvious(x, W))


@pytest.mark.parametrize("method", [NN_LINEAR, LINEAR_ORTHOGONAL, LINEAR_SVD], ids=lambda method: method.name)
def test_layers_give_their_reference(method, precise, device):
    verify(built(method, 16, 96, precise, device))


# Counts


def test_counts_of_a_product():
    found = counts.count(LINEAR, 10, 4)
    assert (found.launches, found.depth, found.operations) == (3, 1, 3 * 2 * 4 * 10 * 10)
    assert found.bytes == 4 * 3 * (2 * 40 + 100)


def test_the_chain_of_each_algorithm_is_as_long_as_the_paper_says():
    """The sequential one grows with d, FastH with d/k + k, the parallel one not at all."""
    depth = {(name, d): counts.count(METHODS[name], d, 32).depth for name in METHODS_COUNTED for d in (64, 128, 256)}
    for name in METHODS_COUNTED[:3]:  # linear in d
        assert depth[name, 256] - depth[name, 128] == 2 * (depth[name, 128] - depth[name, 64])
    assert depth["sequential", 256] > 4 * 256
    assert depth["FastH", 256] - depth["FastH", 128] < 128
    assert depth["parallel", 256] == depth["parallel", 64] < 32
    assert depth[COMPACT.name, 256] < depth["FastH", 256]


METHODS_COUNTED = ["sequential", "parallel", "FastH", COMPACT.name]


@pytest.mark.parametrize("d", [8, 40, 50])
def test_counts_of_the_sequential_algorithm_are_continued_exactly(d):
    assert counts.continued(SEQUENTIAL, d, 32) == counts.count(SEQUENTIAL, d, 32)


def test_what_is_many_launches_in_truth_is_said_so():
    assert counts.count(METHODS["Cayley"], 8, 4).library
    assert not counts.count(FULL, 8, 4).library


# Memory


@pytest.mark.skipif(not memory.available("cpu"), reason="this system does not tell the peak memory of a process")
def test_peak_memory_is_at_least_that_of_the_results():
    d, rows = 512, 32
    found = memory.peaks([LINEAR.name, "FastH++"], d, rows, "float32", "cpu", 1)
    results = 4 * (d * d + 2 * rows * d)
    linear, fasthpp = (found[name].bytes for name in (LINEAR.name, "FastH++"))
    assert results <= linear < 3 * results
    assert fasthpp > 4 * linear


@pytest.mark.skipif(not memory.available("cpu"), reason="this system does not tell the peak memory of a process")
def test_peak_memory_of_what_fails():
    found = memory.peaks([LINEAR.name], -1, 4, "float32", "cpu", 1)
    assert (found[LINEAR.name].status, found[LINEAR.name].bytes) == ("failed", None)
    assert "negative dimension" in found[LINEAR.name].note


def test_peak_memory_on_a_gpu(monkeypatch):
    """Checks the calls to torch.cuda, on a machine without a GPU."""
    asked, allocated = [], iter([100, 107])
    for name in ("synchronize", "reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):

        def answer(device, name=name):
            asked.append((name, device))
            return next(allocated) if name.endswith("allocated") else None

        monkeypatch.setattr(torch.cuda, name, answer)
    build = LINEAR.build
    on_cpu = replace(LINEAR, build=lambda d, rows, dtype, device, generator: build(d, rows, dtype, "cpu", generator))
    monkeypatch.setattr(memory, "METHODS", {"right": on_cpu, "failing": METHODS["parallel"]})
    found = memory.peaks(["failing", "right"], 8, 4, "float32", "cuda:1", 1)
    assert found["right"] == memory.Peak("ok", "", 7)
    assert {device for _, device in asked} == {"cuda:1"}
    if not torch.cuda.is_available():
        assert found["failing"].status == "failed" and found["failing"].note
    assert set(memory.peaks(["right"], 8, 4, "float32", "xpu", 1).values()) == {memory.Peak("not measured")}


# The command


def reproduce(out, *arguments: object) -> int:
    grid = ["--sizes", 8, "--repetitions", 2, "--threads", 1, "--time-limit", 5]
    return main(["reproduce", *map(str, [*grid, "--out", out, *arguments])])


@pytest.fixture
def no_figures(monkeypatch):
    """Figures are drawn in the whole run alone: drawing takes longer than everything else."""
    monkeypatch.setattr("fasth.tools.reproduce.figures.drawn", lambda results: iter(()))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a whole run, on a tiny grid."""
    out = tmp_path_factory.mktemp("reproduction") / "new"
    assert reproduce(out) == 0
    return out


def records(out):
    return json.loads((out / runner.FILE).read_text())["records"]


def test_a_whole_run_has_every_experiment_verified_and_every_repetition(whole):
    found = records(whole)
    assert {record["experiment"] for record in found} == set(options.NAMES)
    for record in found:
        assert record["status"] in ("ok", "not installed", "not measured")
        if record["status"] == "ok" and "readings" in record:
            assert len(record["readings"]) == 2
    with open(whole / "readings.csv") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == sum(len(record.get("readings", ())) for record in found)


def test_a_whole_run_has_figures_and_a_page_that_stands_alone(whole):
    from fasth.tools.reproduce.figures import DRAWINGS

    for drawing in DRAWINGS:
        assert (whole / f"{drawing.name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (whole / f"{drawing.name}.svg").read_text()
    page = (whole / "report.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == len(DRAWINGS)
    for papers in ("27.1", "6.2", "2.7", "3.5", "4.1", "3.1", "counted, not measured", "fasth reproduce --quick"):
        assert papers in page
    assert not re.search(r'(src|href)="(?!data:)', page)


def test_a_whole_run_again_measures_nothing(whole, capsys, no_figures):
    before = (whole / runner.FILE).read_text()
    assert reproduce(whole) == 0
    assert (whole / runner.FILE).read_text() == before
    assert "headline numbers" in capsys.readouterr().out


def test_it_goes_on_after_an_interruption(tmp_path, monkeypatch, capsys, no_figures):
    run, done = InTurns.run, []

    def interrupted(self, *arguments):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(self.label)
        return run(self, *arguments)

    monkeypatch.setattr(InTurns, "run", interrupted)
    sizes = ("--sizes", 4, 6, 8)
    assert reproduce(tmp_path, "--only", "step", "determinant", *sizes) == 130
    assert "goes on from there" in " ".join(capsys.readouterr().err.split())
    first = records(tmp_path)
    assert {record["experiment"] for record in first} == {"step"}
    monkeypatch.setattr(InTurns, "run", run)
    assert reproduce(tmp_path, "--only", "step", "determinant", *sizes) == 0
    both = records(tmp_path)
    assert both[: len(first)] == first
    assert {record["experiment"] for record in both} == {"step", "determinant"}


def test_other_settings_do_not_mix_with_what_is_there(tmp_path, capsys, no_figures):
    assert reproduce(tmp_path, "--only", "counts") == 0
    assert reproduce(tmp_path, "--only", "counts", "--dtype", "float64") == 2
    assert "dtype was float32, now float64" in capsys.readouterr().err
    assert reproduce(tmp_path, "--only", "counts", "--dtype", "float64", "--again") == 0
    (tmp_path / runner.FILE).write_text("{}")
    assert reproduce(tmp_path, "--only", "counts") == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "nonsense"], "nonsense"),
        (["--repetitions", 0], "--repetitions should be positive; got 0"),
        (["--sizes", 4, -1], "--sizes should be positive"),
    ],
)
def test_what_cannot_be_done_is_said_without_a_traceback(tmp_path, capsys, arguments, words):
    assert reproduce(tmp_path, *arguments) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_wrong_answer_is_marked_and_fails(tmp_path, monkeypatch, capsys, no_figures):
    wrong = replace(LINEAR, build=lambda *a: replace(LINEAR.build(*a), function=torch.mm))
    only = experiments.Experiment("step", "", "", [InTurns("d = 4", [Entry(wrong, 4, 4)])])
    monkeypatch.setattr("fasth.tools.reproduce.command.experiments", lambda grid: [only])
    assert reproduce(tmp_path, "--only", "step") == 1
    assert "F.linear: the output is off by" in " ".join(capsys.readouterr().err.split())
    assert "because its answer is wrong" in (tmp_path / "report.html").read_text()
    (record,) = records(tmp_path)
    assert (record["status"], record["mean"], record["readings"]) == ("wrong", None, [])


def test_a_method_that_fails_is_noted_and_the_run_goes_on(tmp_path, monkeypatch, capsys, no_figures):
    def unbuildable(*arguments):
        raise RuntimeError("[no CUDA build]\nand more")

    def fails(x, W):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    methods = [
        replace(LINEAR, name="peer", build=unbuildable),
        LINEAR,
        replace(FULL, build=lambda *a: replace(FULL.build(*a), function=fails)),
        COMPACT,
    ]
    only = [
        experiments.Experiment(
            "step", "", "", [InTurns(f"d = {d}", [Entry(m, d, 4) for m in methods]) for d in (4, 6)]
        ),
        experiments.Experiment(
            "counts", "", "", [Counting(8, 4, [(methods[0], counts.count), (LINEAR, counts.count)])]
        ),
    ]
    monkeypatch.setattr("fasth.tools.reproduce.command.experiments", lambda grid: only)
    assert reproduce(tmp_path) == 0
    found = records(tmp_path)
    assert {(r["name"], r["status"]) for r in found if r["experiment"] == "step"} == {
        ("peer", "failed"),
        (LINEAR.name, "ok"),
        (FULL.name, "failed"),
        (COMPACT.name, "ok"),
    }
    assert [(r["status"], r["note"]) for r in found if r["experiment"] == "counts"] == [
        ("failed", "[no CUDA build]"),
        ("ok", ""),
    ]
    printed = " ".join(capsys.readouterr().err.split())
    page = (tmp_path / "report.html").read_text()
    for text in (printed, page):
        assert text.count("because it failed: peer: [no CUDA build]") == 1
        assert f"{FULL.name}: CUDA out of memory. Tried to allocate 20.00 GiB" in text
    assert page.count("<td>failed</td>") == 5  # two sizes of both, and the count


def test_an_interruption_is_not_the_failure_of_a_method(tmp_path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    only = experiments.Experiment("step", "", "", [InTurns("d = 4", [Entry(replace(LINEAR, build=interrupted), 4, 4)])])
    monkeypatch.setattr("fasth.tools.reproduce.command.experiments", lambda grid: [only])
    assert reproduce(tmp_path, "--only", "step") == 130


def test_a_run_on_a_gpu_says_which_file_to_send(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fasth.tools.reproduce.command.experiments", lambda grid: [])
    assert reproduce(tmp_path) == 0
    assert "send" not in capsys.readouterr().err
    monkeypatch.setattr("fasth.tools.device.require", lambda device: None)
    monkeypatch.setattr("fasth.tools.reproduce.command.environment", lambda device: environment() | {"device": "a GPU"})
    assert reproduce(tmp_path, "--device", "cuda", "--again") == 0
    assert f"send {tmp_path / runner.FILE}" in "".join(capsys.readouterr().err.splitlines())


def test_a_method_that_would_take_too_long_does_not_start():
    entry = Entry(LINEAR, 128, 4)
    settings = Settings("float32", "cpu", rounds=1, time_limit=1.0)
    before = [{"name": LINEAR.name, "k": None, "d": 64, "rows": 4, "status": "ok", "median": 0.2}]
    (record,) = InTurns("d = 128", [entry]).run(settings, before, lambda *_: None)
    assert (record["status"], record["readings"]) == ("too slow", [])
    before[0]["median"] = 0.1
    (record,) = InTurns("d = 128", [entry]).run(settings, before, lambda *_: None)
    assert record["status"] == "ok"


def test_the_full_run_is_the_papers_grid():
    grid = experiments.FULL_GRID
    assert list(grid.step) == [64 * i for i in range(1, 49)]
    assert grid.rounds == 100
    (block_size,) = [e for e in experiments.experiments(grid) if e.name == "block-size"]
    sizes_784 = {entry.k for entry in block_size.tasks[1].entries}
    assert sizes_784 == set(range(2, 57))


def test_headlines_are_ratios_of_means():
    means = {("sequential", 64): 8.0, ("sequential", 512): 60.0, ("FastH", 64): 4.0, ("FastH", 512): 6.0}
    means |= {(tables.OURS, 64): 1.0, (tables.OURS, 512): 2.0}
    found = [{"experiment": "step", "name": name, "d": d, "mean": mean} for (name, d), mean in means.items()]
    (row,) = tables.headlines({"records": found}).rows
    assert row[1:] == ["27.1", "10.0 (d = 512)", "30.0 (d = 512)"]
