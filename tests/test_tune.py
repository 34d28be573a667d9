"""``fasth.tune`` and the file that it leaves behind."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
import torch
from processes import python, script

from fasth.cli import main
from fasth.reflections import householder, tuned, tuning
from fasth.tuner import block_sizes, tune


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A cache folder of its own for each test."""
    monkeypatch.setenv("FASTH_CACHE_DIR", str(tmp_path))
    tuned.forget()
    yield tmp_path
    tuned.forget()


def entry(**changes) -> tuned.Entry:
    name, core = tuned.machine("cpu")
    threads = torch.get_num_threads()
    made = tuned.Entry(name, core, "cpu", threads, "float32", 48, 32, block_size=5, crossover=60, crossover_full=50)
    return replace(made, **changes)


def test_what_was_found_is_used_from_then_on():
    assert tuning.default_block_size(48) == 24
    assert not tuning.materialising_pays(60, 48, 48, True)
    tuned.store(entry())
    for _ in range(2):
        assert tuning.default_block_size(48) == 5
        assert tuning.default_block_size(47) == 24
        assert [tuning.materialising_pays(rows, 48, 48, True) for rows in (48, 59, 60)] == [False, False, True]
        assert [tuning.materialising_pays(rows, 48, 48, False) for rows in (49, 50)] == [False, True]
        assert not tuning.materialising_pays(60, 40, 48, True), "found for as many reflections as dimensions"
        tuned.forget()  # and read again from the file


@pytest.mark.parametrize(
    "other",
    [{"machine": "another"}, {"core": "another"}, {"threads": 999}, {"dtype": "float64"}, {"device": "cuda"}],
    ids=lambda change: next(iter(change)),
)
def test_what_was_found_elsewhere_is_kept_and_not_used(other):
    tuned.store(entry(**other))
    tuned.forget()
    assert tuning.default_block_size(48) == 24
    tuned.store(entry())
    assert len(tuned.load()) == 2


def test_the_dtype_of_the_work_decides():
    tuned.store(entry(dtype="float64", block_size=7))
    V = torch.empty(48, 48, dtype=torch.float64)
    assert tuning.default_block_size(48, V) == 7
    assert tuning.default_block_size(48, V.float()) == 24


def test_results_stay_the_same_with_what_was_found():
    x, V = (torch.randn(n, 48, dtype=torch.float64) for n in (70, 48))
    before = householder(x, V)
    tuned.store(entry(dtype="float64"))
    tuned.store(entry())
    torch.testing.assert_close(householder(x, V), before)


def test_a_compiled_graph_does_not_depend_on_the_file():
    tuned.store(entry())

    def chosen(x):
        return x + tuning.default_block_size(48) + tuning.materialising_pays(60, 48, 48, True)

    compiled = torch.compile(chosen, fullgraph=True, backend="eager")
    assert compiled(torch.zeros(())) == 24


def test_tuning_stores_one_of_its_candidates():
    found = tune(32, 8)
    assert found.entry.block_size in block_sizes(32)
    assert found.entry.crossover > 32 and found.entry.crossover_full > 32
    assert tuning.default_block_size(32) == found.entry.block_size
    assert [e.identity for e in tuned.load()] == [found.entry.identity]
    assert found.seconds <= found.default_seconds


def test_candidates_are_even_splits_and_the_default():
    for d in (2, 3, 33, 64, 784, 2048):
        sizes = block_sizes(d)
        assert tuning.block_size_by_rule(d) in sizes
        assert all(1 <= k <= d and tuning.even_block_size(d, k) == k for k in sizes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((1,), "`d` should be an int of at least 2; got 1"), ((8, 0), "`rows` should be a positive int; got 0")],
)
def test_arguments_that_make_no_sense(arguments, words):
    with pytest.raises(ValueError, match=words):
        tune(*arguments)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"version": 1}',
        '{"version": 99, "entries": []}',
        '{"version": 1, "entries": [{"d": 48}]}',
        "block",
        b"\xff\xfe",
    ],
)
def test_a_damaged_file_is_ignored_with_a_warning_and_then_replaced(folder, content):
    if content == "block":
        good = {"version": 1, "entries": [vars(entry()) | {"block_size": 0}]}
        content = json.dumps(good)
    path = folder / "tuning.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.warns(RuntimeWarning, match=r"tuning\.json is damaged and was ignored"):
        assert tuning.default_block_size(48) == 24
    assert tuning.default_block_size(48) == 24  # once is enough
    tuned.store(entry())
    assert tuned.load() == [entry()]


def test_several_processes_leave_all_their_entries(folder):
    code = """
import sys
from fasth.reflections import tuned
for d in range(10):
    tuned.store(tuned.Entry("m", "c", "cpu", 1, "float32", 1 + d + 10 * {n}, 32, 4, 50, 50))
"""
    import subprocess
    import sys

    running = [subprocess.Popen([sys.executable, "-c", code.format(n=n)]) for n in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert sorted(e.d for e in tuned.load()) == list(range(1, 31))
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
    assert str(tuned.folder()) == expected


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
    code = "import sys; sys.modules['rich'] = None; from fasth.cli import main; sys.exit(main(['reproduce', '--full']))"
    done = python("-c", code)
    assert done.returncode == 2
    assert "pip install 'fasth[reproduce]'" in done.stderr


def test_looking_up_is_cheap():
    tuned.store(entry())
    start = time.perf_counter()
    for _ in range(1000):
        tuning.default_block_size(48)
    assert (time.perf_counter() - start) / 1000 < 50e-6, "it is called in every step"
