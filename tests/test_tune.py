"""``fasth.tune`` and the file that it leaves behind."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from processes import forked, script

from fasth import LinearSVD, householder
from fasth.reflections import planner, tuning_file
from fasth.reflections.planner import Where, default_block_size, forming_pays, forming_svd_pays
from fasth.tools.cli import main
from fasth.tools.tune import block_sizes, tune


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A cache folder of its own for each test."""
    monkeypatch.setenv("FASTH_CACHE_DIR", str(tmp_path))
    planner.forget_plans()
    yield tmp_path
    planner.forget_plans()


def store(found: tuning_file.Entry) -> None:
    tuning_file.store(found)
    planner.forget_plans()


def cpu_place(dtype: torch.dtype = torch.float32) -> Where:
    return Where(dtype=dtype, threads=torch.get_num_threads())


def entry(**changes) -> tuning_file.Entry:
    name, core = tuning_file.machine("cpu")
    threads = torch.get_num_threads()
    made = tuning_file.Entry(name, core, "cpu", threads, "float32", 48, 32, block_size=5, crossover=60)
    return replace(made, **changes)


def test_what_was_found_is_used_from_then_on():
    assert default_block_size(48, cpu_place()) == 24
    assert not forming_pays(60, 48, 48, True, cpu_place())
    store(entry())
    for _ in range(2):
        assert default_block_size(48, cpu_place()) == 5
        assert default_block_size(47, cpu_place()) == 24
        assert [forming_pays(rows, 48, 48, True, cpu_place()) for rows in (48, 59, 60)] == [False, False, True]
        full = 60 * planner.crossover_by_rule(48, 48, False) / planner.crossover_by_rule(48, 48, True)
        assert [forming_pays(rows, 48, 48, False, cpu_place()) for rows in (full - 1, full)] == [False, True]
        assert not forming_pays(60, 40, 48, True, cpu_place()), "found for as many reflections as dimensions"
        planner.forget_plans()  # and read again from the file


@pytest.mark.parametrize(
    "other",
    [{"machine": "another"}, {"core": "another"}, {"threads": 999}, {"dtype": "float64"}, {"device": "cuda"}],
    ids=lambda change: next(iter(change)),
)
def test_what_was_found_elsewhere_is_kept_and_not_used(other):
    store(entry(**other))
    assert default_block_size(48, cpu_place()) == 24
    store(entry())
    assert len(tuning_file.load()) == 2


def test_the_dtype_of_the_work_decides():
    store(entry(dtype="float64", block_size=7))
    assert default_block_size(48, cpu_place(torch.float64)) == 7
    assert default_block_size(48, cpu_place()) == 24


def test_results_stay_the_same_with_what_was_found():
    x, V = (torch.randn(n, 48, dtype=torch.float64) for n in (70, 48))
    before = householder(x, V)
    store(entry(dtype="float64"))
    store(entry())
    torch.testing.assert_close(householder(x, V), before)


def test_a_compiled_graph_does_not_depend_on_the_file():
    store(entry())

    where = cpu_place()

    def chosen(x):
        return x + default_block_size(48, where) + forming_pays(60, 48, 48, True, where)

    compiled = torch.compile(chosen, fullgraph=True, backend="eager")
    assert compiled(torch.zeros(())) == 24


def test_tuning_stores_one_of_its_candidates():
    found = tune(32, 8)
    assert found.entry.block_size in block_sizes(32)
    assert found.entry.crossover > 32
    assert default_block_size(32, cpu_place()) == found.entry.block_size
    assert tuning_file.load() == [found.entry]
    assert found.seconds <= found.default_seconds


def test_candidates_are_even_splits_and_the_default():
    for d in (2, 3, 33, 64, 784, 2048):
        sizes = block_sizes(d)
        assert planner.block_size_by_rule(d) in sizes
        assert all(1 <= k <= d and planner.even_block_size(d, k) == k for k in sizes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((1,), "`d` should be an int of at least 2; got 1"), ((8, 0), "`rows` should be a positive int; got 0")],
)
def test_arguments_that_make_no_sense(arguments, words):
    with pytest.raises(ValueError, match=words):
        tune(*arguments)


DAMAGED = {
    "nothing": "",
    "half of it": "{",
    "a list": "[]",
    "a number": "1",
    "no entries": '{"version": 1}',
    "another version": '{"version": 99, "entries": []}',
    "half an entry": '{"version": 1, "entries": [{"d": 48}]}',
    "an entry that is a list": '{"version": 1, "entries": [[]]}',
    "nested": '{"version": 1, "entries": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "nested objects": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "no text": b"\xff\xfe",
    "a long number": '{"version": 1, "entries": [' + "9" * 5000 + "]}",
}
IMPOSSIBLE = {
    "block_size": [0, -1, 49, 10**9, 9223372036854775807, 10**400, 2.5, True, "5", None, float("nan")],
    "crossover": [0, -1, 10**400, 1e300, float("inf"), None],
    "d": [0, -48, 10**400, None],
    "threads": [0, "2"],
    "rows": [0],
    "dtype": [None, 32],
}
damaged = pytest.mark.parametrize(
    "content",
    [
        *DAMAGED.values(),
        *(lambda name=name, value=value: _with(name, value) for name, values in IMPOSSIBLE.items() for value in values),
    ],
    ids=[*DAMAGED, *(f"{name} {value!r:.20}" for name, values in IMPOSSIBLE.items() for value in values)],
)


def _with(name: str, value: object) -> str:
    """A file with one entry, good but for one field."""
    return json.dumps({"version": 1, "entries": [vars(entry()) | {name: value}]})


@damaged
def test_a_damaged_file_is_ignored_with_a_warning_and_then_replaced(folder, content):
    content = content() if callable(content) else content
    path = folder / "tuning.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.warns(RuntimeWarning, match=r"tuning\.json is damaged and was ignored"):
        assert default_block_size(48, cpu_place()) == 24
    assert default_block_size(48, cpu_place()) == 24  # once is enough
    assert not forming_pays(60, 48, 48, True, cpu_place())
    store(entry())
    assert tuning_file.load() == [entry()]


@pytest.mark.parametrize("block_size", [9223372036854775807, 10**9, 49])
def test_an_impossible_block_size_changes_no_result(folder, block_size, path):
    """Regression test on every backend: such a size once gave wrong numbers and a segmentation fault."""
    x, V = torch.randn(5, 48).double(), torch.randn(48, 48).double().requires_grad_()
    layer = LinearSVD(48, 48, dtype=torch.float64)

    def results():
        out = householder(x, V)
        return out, layer(x), *torch.autograd.grad(out.sin().sum() + layer(x).sin().sum(), [V, *layer.parameters()])

    expected = results()
    impossible = entry(dtype="float64", block_size=block_size)
    (folder / "tuning.json").write_text(json.dumps({"version": 1, "entries": [vars(impossible)]}))
    planner.forget_plans()
    with pytest.warns(RuntimeWarning, match="block_size"):
        actual = results()
    assert all(torch.equal(t, reference) for t, reference in zip(actual, expected, strict=True))
    # A block size that bypasses the file's check is limited to the number of reflections.
    planner.tuning()[impossible.key] = impossible
    planner._remembered_householder_plan.cache_clear()
    planner._remembered_svd_plan.cache_clear()
    torch.testing.assert_close(results(), expected)


def test_a_large_crossover_is_one_that_is_never_reached():
    store(entry(crossover=2**40))
    planner.forget_plans()
    assert not forming_pays(10**9, 48, 48, True, cpu_place()) and not forming_pays(10**9, 48, 48, False, cpu_place())
    assert not forming_svd_pays(10**9, 48, 48, 48, 48, 48, True, cpu_place())


def test_several_processes_leave_all_their_entries(folder):
    code = """
import sys
from fasth.reflections import tuning_file
for d in range(10):
    tuning_file.store(tuning_file.Entry("m", "c", "cpu", 1, "float32", 1 + d + 10 * {n}, 32, 1, 50))
"""
    import subprocess
    import sys

    running = [subprocess.Popen([sys.executable, "-c", code.format(n=n)]) for n in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert sorted(e.d for e in tuning_file.load()) == list(range(1, 31))
    assert {path.name for path in folder.iterdir()} == {"tuning.json", "tuning.lock"}


def test_importing_reads_and_writes_nothing(folder):
    (folder / "tuning.json").write_text("damaged")
    assert script("import fasth", FASTH_CACHE_DIR=str(folder)) == ""


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({"FASTH_CACHE_DIR": "/x/y"}, "/x/y"), ({"FASTH_CACHE_DIR": "", "XDG_CACHE_HOME": "/z"}, "/z/fasth")],
)
def test_the_folder(monkeypatch, environment, expected):
    monkeypatch.setattr("sys.platform", "linux")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert tuning_file.path() == Path(expected) / "tuning.json"


def test_the_command_tunes_and_info_shows_it(folder, capsys):
    assert main(["tune", "24", "--rows", "4"]) == 0
    printed = capsys.readouterr().out
    assert "  24  " in printed and str(folder) in printed
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    assert f"d = 24, float32, {torch.get_num_threads()} threads" in printed
    assert "Q formed from" in printed
    assert main(["info", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["tuning"]["entries"]
    assert found["d"] == 24


def test_the_command_says_what_is_wrong(capsys):
    assert main(["tune", "1"]) == 2
    assert "`d` should be" in capsys.readouterr().err
    assert main(["tune", "8", "--device", "nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().err


def test_reproducing_without_the_extra_says_what_to_install():
    code = "import sys; sys.modules['rich'] = None; from fasth.tools.cli import main; sys.exit(main(['reproduce']))"
    done = forked("-c", code)
    assert done.returncode == 2
    assert "pip install 'fasth[reproduce]'" in done.stderr


def test_looking_up_is_cheap():
    store(entry())
    start = time.perf_counter()
    for _ in range(1000):
        default_block_size(48, cpu_place())
    assert (time.perf_counter() - start) / 1000 < 50e-6, "it is called in every step"
