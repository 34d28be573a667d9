"""Which versions of Python and torch the tests passed with: the records of ``make test-torch``, and the table of
docs/versions.md that is made from them.

Run: make versions, or python benchmarks/tested_versions.py --help
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from readme import filled

from fasth import _files
from fasth.tools import environment

HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, metavar="XML", help="pytest's --junitxml, of this Python and torch")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    parser.add_argument("--records", type=Path, default=HERE / "versions", help="the folder of the records")
    parser.add_argument("--page", type=Path, default=HERE.parent / "docs" / "versions.md")
    options = parser.parse_args()
    if options.record:
        path = write(record(options.record), options.records)
        print(f"wrote {path}; `make versions` puts it into the table")
        return 0
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(options.records.glob("*.json"))]
    return update(options.page, table(records), options.check)


def update(page: Path, block: str, check: bool) -> int:
    """0 if the page now shows the table, or did so before; 1 if it should have."""
    old = page.read_text(encoding="utf-8")
    new = filled(old, "versions", block)
    if check and new != old:
        print(f"{page} lacks a record of `make test-torch`; `make versions` puts that right", file=sys.stderr)
        return 1
    if new != old:
        _files.write(page, new)
    return 0


def record(report: Path) -> dict[str, Any]:
    """The record of a test run: pytest's counts, and this process's versions, which should be the tests'."""
    here = environment.describe()
    names = ("versions", "core", "openmp", "levels", "threads", "instructions", "system")
    counts = count(ElementTree.parse(report).getroot())
    return {"date": date.today().isoformat(), "revision": revision(), **{name: here[name] for name in names}, **counts}


def count(report: ElementTree.Element) -> dict[str, int]:
    """Counts of passed, failed and skipped tests. An error in a fixture is a failure, an expected failure a skip."""
    cases = list(report.iter("testcase"))
    failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"passed": len(cases) - failed - skipped, "failed": failed, "skipped": skipped}


def revision() -> str | None:
    """The commit, with "-dirty" if files differ from it; None where there is no repository."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write(found: dict[str, Any], folder: Path) -> Path:
    python, torch = versions(found)
    path = folder / f"python{python[0]}.{python[1]}-torch{'.'.join(map(str, torch))}.json"
    _files.write(path, json.dumps(found, indent=2) + "\n")
    return path


def versions(found: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The versions of Python and torch as numbers, without the suffix of torch's build."""
    python, torch = (found["versions"][name].partition("+")[0] for name in ("python", "torch"))
    return tuple(map(int, python.split("."))), tuple(map(int, torch.split(".")))


def table(records: list[dict[str, Any]]) -> str:
    """A row for each record, the newest Python and torch first."""
    columns = ["Python", "torch", "fasth", "compiled core", "passed", "failed", "skipped", "system", "date"]
    lines = [columns, ["---"] * 4 + ["---:"] * 3 + ["---"] * 2]
    for found in sorted(records, key=versions, reverse=True):
        about = found["versions"]
        counts = [f"{found[name]:,}" for name in ("passed", "failed", "skipped")]
        system = system_of(found["system"])
        lines.append([about["python"], about["torch"], about["fasth"], found["core"], *counts, system, found["date"]])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def system_of(platform: str) -> str:
    """The first word of ``platform.platform()`` and the architecture: "Linux-6.1-x86_64-with-glibc2.36"."""
    name, *rest = platform.split("-")
    return " ".join([name, *(part for part in rest if part in ("x86_64", "aarch64", "arm64", "AMD64"))])


if __name__ == "__main__":
    sys.exit(main())
