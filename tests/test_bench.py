"""The benchmark command: its tables, its file, its exit code, and the README made from it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fasth import _files
from fasth.tools.cli import main
from fasth.tools.reproduce.methods import LINEAR

pytest.importorskip("rich", reason="rich is not installed; it comes with fasth[reproduce]")

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def commands(monkeypatch):
    """benchmarks/bench.py and readme.py, imported."""
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(BENCHMARKS)
    import bench
    import readme

    yield bench, readme
    torch.set_num_threads(threads)


def run(command, monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
    return command.main()


def test_prints_tables_and_writes_every_reading(commands, monkeypatch, tmp_path, capsys):
    bench, _ = commands
    out = tmp_path / "new" / "results.json"
    assert run(bench, monkeypatch, "--quick", "--sizes", 4, 6, "--threads", 1, "--out", out) == 0
    printed = capsys.readouterr().out
    tables = (
        "LinearSVD",
        "torch.inverse",
        "Forward without gradients",
        "8·d rows",
        "geometric mean",
        "FastH++",
    )
    for words in tables:
        assert words in printed
    found = json.loads(out.read_text())
    assert found["environment"]["threads"] == 1
    for record in found["records"]:
        assert record["status"] == ("ok" if record["readings"] else "not installed")
        assert len(record["readings"]) in (0, 5)


def test_a_wrong_answer_has_no_figures_and_fails(commands, monkeypatch, tmp_path, capsys):
    bench, _ = commands
    wrong = replace(
        bench.FULL,
        build=lambda *a: replace(LINEAR.build(*a), name=bench.FULL.name, function=lambda x, W: x @ W),
    )
    layer = replace(bench.BENCHES[0], methods=[LINEAR, bench.TRIANGULAR, wrong], sizes=[4, 6], rounds=2)
    monkeypatch.setattr(bench, "BENCHES", [layer])
    out = tmp_path / "results.json"
    assert run(bench, monkeypatch, "--out", out) == 1
    captured = capsys.readouterr()
    assert "fasth, full: the output is off by" in " ".join(captured.err.split())
    wrong_records = [record for record in json.loads(out.read_text())["records"] if record["name"] == bench.FULL.name]
    assert all((r["status"], r["median"], r["readings"]) == ("wrong", None, []) for r in wrong_records)
    rows = [line for line in captured.out.splitlines() if "ms" in line]
    assert rows and all("–" in line for line in rows)


def test_a_part_of_the_benchmark_does_not_replace_the_whole(commands, monkeypatch):
    bench, _ = commands
    for arguments, out in (((), bench.OUT), (("--quick",), None), (("--only", "peers"), None), (("--sizes", 4), None)):
        monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, arguments)])
        assert bench.parsed().out == out


def test_growth_is_shown_and_its_size_is_in_no_mean(commands):
    bench, _ = commands
    medians = {64: (1.0, 2.0, 4.0), 1024: (1.0, 8.0, 1.0), 4096: (2.0, 8.0, 3.0)}
    records = [
        {"experiment": "layer", "what": "step", "status": "ok", "d": d, "name": method.name, "median": median}
        for d, values in medians.items()
        for method, median in zip((bench.LINEAR, bench.TRIANGULAR, bench.FULL), values, strict=True)
    ]
    (table,) = bench.tables({"records": records})
    assert table.rows[-2] == ["geometric mean to 1024", "", "4.00", "2.00"]
    assert table.rows[-1] == ["4096 relative to 1024", "", "0.50", "1.50"]


def test_a_page_is_filled_from_the_file_and_checked(commands, monkeypatch, tmp_path, capsys):
    bench, readme = commands
    page = tmp_path / "benchmarks.md"
    run(bench, monkeypatch, "--quick", "--only", "layer", "--sizes", 4, "--out", tmp_path / "results.json")
    page.write_text("above\n<!-- bench:start -->\nformer\n<!-- bench:end -->\nbelow\n")
    where = ["--measured", tmp_path, "--docs", tmp_path]
    assert run(readme, monkeypatch, "--check", *where) == 1
    assert "former" in page.read_text()
    assert run(readme, monkeypatch, *where) == 0
    text = page.read_text()
    assert text.startswith("above\n<!-- bench:start -->\n**Training step")
    assert text.endswith("<!-- bench:end -->\nbelow\n")
    columns = "| d | F.linear | fasth, compact | fasth, triangular | fasth, full |"
    assert f"{columns}\n| --- | ---: | ---: | ---: | ---: |\n| 4 | " in text
    assert f"torch {torch.__version__}" in text and "former" not in text
    assert run(readme, monkeypatch, "--check", *where) == 0
    page.write_text("no place for tables\n")
    assert run(readme, monkeypatch, *where) == 2
    assert "should have one line <!-- bench:start -->" in capsys.readouterr().err


def test_the_pages_show_what_was_measured(commands, monkeypatch):
    assert run(commands[1], monkeypatch, "--check") == 0


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    _files.write(path, "old")
    with pytest.raises(UnicodeEncodeError):
        _files.write(path, "new" + "\ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_library_does_not_import_the_experiments():
    code = "import fasth, sys; sys.exit(any(name.startswith('fasth.tools.reproduce') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_reproduction_is_shown(commands, monkeypatch, tmp_path):
    bench, readme = commands
    docs, measured = tmp_path / "docs", tmp_path / "measured"
    docs.mkdir()
    measured.mkdir()
    run(bench, monkeypatch, "--quick", "--only", "layer", "--sizes", 4, "--out", measured / "results.json")
    grid = ["--only", "step", "--sizes", "4", "--repetitions", "1", "--threads", "1"]
    assert main(["reproduce", *grid, "--out", str(measured / "reproduction")]) == 0
    for page, names in {"benchmarks.md": ("bench", "reproduce"), "gpu.md": ("gpu counts",)}.items():
        marks = [f"<!-- {name}:{end} -->" for name in names for end in ("start", "end")]
        (docs / page).write_text("\n".join(marks))
    assert run(readme, monkeypatch, "--measured", measured, "--docs", docs) == 0
    text = (docs / "benchmarks.md").read_text()
    assert "| faster than the sequential algorithm, at most | 27.1 | " in text
    assert "![figure-3a](../measured/reproduction/figure-3a.png)" in text and "figure-4" not in text
    assert "(../measured/reproduction/report.html)" in text
