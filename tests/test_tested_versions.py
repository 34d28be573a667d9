"""The table of tested versions: what a run of pytest leaves in a record, and the page made from records."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fasth

pytest.importorskip("rich", reason="rich is not installed; it comes with fasth[reproduce]")

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
TESTS = """
import pytest

def test_passes(): pass
def test_passes_too(): pass
def test_fails(): assert False
def test_skipped(): pytest.skip("for a reason")

@pytest.mark.xfail
def test_fails_as_expected(): assert False

@pytest.fixture
def broken(): raise OSError

def test_without_its_fixture(broken): pass
"""
PAGE = "before\n<!-- versions:start -->\n<!-- versions:end -->\nafter\n"


@pytest.fixture
def command(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import tested_versions

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
        return tested_versions.main()

    return run


@pytest.fixture
def report(tmp_path) -> Path:
    """A report that pytest wrote, on tests of every outcome."""
    (tmp_path / "test_outcomes.py").write_text(TESTS)
    pytest_on = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--junitxml=tests.xml", "test_outcomes.py"]
    done = subprocess.run(pytest_on, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    return tmp_path / "tests.xml"


def test_a_record_has_the_counts_and_this_process(command, report, tmp_path):
    assert command("--record", report, "--records", tmp_path / "records") == 0
    release = torch.__version__.partition("+")[0]
    (path,) = (tmp_path / "records").iterdir()
    assert path.name == f"python{sys.version_info.major}.{sys.version_info.minor}-torch{release}.json"
    found = json.loads(path.read_text())
    assert [found[name] for name in ("passed", "failed", "skipped")] == [2, 2, 2]
    assert found["versions"] == {
        "fasth": fasth.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def record(python: str, torch_version: str, failed: int) -> dict[str, object]:
    return {
        "date": "2026-01-02",
        "versions": {"fasth": "1.2.3", "python": python, "torch": torch_version},
        "core": "avx2",
        "system": "Linux-6.1.0-x86_64-with-glibc2.36",
        "passed": 1234,
        "failed": failed,
        "skipped": 5,
    }


def test_the_table_has_a_row_for_each_record_the_newest_first(command, tmp_path, capsys):
    page, records = tmp_path / "page.md", tmp_path / "records"
    records.mkdir()
    for name, (python, torch_version, failed) in {
        "a": ("3.9.1", "2.9.0", 0),
        "b": ("3.10.2", "2.9.0+cpu", 3),
        "c": ("3.10.2", "2.10.1", 0),
    }.items():
        (records / f"{name}.json").write_text(json.dumps(record(python, torch_version, failed)))
    page.write_text(PAGE)
    where = "--records", records, "--page", page
    assert command(*where, "--check") == 1
    assert "make versions" in capsys.readouterr().err
    assert page.read_text() == PAGE
    assert command(*where) == 0
    assert command(*where, "--check") == 0
    rows = [line.split(" | ") for line in page.read_text().splitlines() if "1.2.3" in line]
    assert [row[1] for row in rows] == ["2.10.1", "2.9.0+cpu", "2.9.0"]
    assert rows[1] == ["| 3.10.2", "2.9.0+cpu", "1.2.3", "avx2", "1,234", "3", "5", "Linux x86_64", "2026-01-02 |"]


def test_the_page_shows_the_records(command):
    assert command("--check") == 0
