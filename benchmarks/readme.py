"""Puts what was measured into the README, between two lines each: bench:start and bench:end, the tables of ``make
bench``; reproduce:start and reproduce:end, the figures and headline numbers of ``fasth reproduce``.

Run: make readme, or python benchmarks/readme.py --help
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from tables import Table, machine, tables

from fasth import files
from fasth.reproduce.tables import headlines

HERE = Path(__file__).parent
SHOWN = ["figure-3a", "figure-4"]  # of the figures


class NoPlace(ValueError):
    """The README lacks the lines that say where something goes."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the README is out of date")
    parser.add_argument("--results", type=Path, default=HERE / "results.json", help="what bench.py wrote")
    parser.add_argument("--reproduction", type=Path, default=HERE / "reproduction", help="fasth reproduce's folder")
    parser.add_argument("--readme", type=Path, default=HERE.parent / "README.md")
    options = parser.parse_args()
    old = new = options.readme.read_text(encoding="utf-8")
    try:
        new = filled(new, "bench", of_bench(json.loads(options.results.read_text(encoding="utf-8"))))
        if (options.reproduction / "results.json").exists():
            new = filled(new, "reproduce", of_reproduction(options.reproduction, options.readme.parent))
    except NoPlace as error:
        print(f"{options.readme} should have {error}", file=sys.stderr)
        return 2
    if options.check and new != old:
        print(f"{options.readme} does not show what was measured last; `make readme` puts that right", file=sys.stderr)
        return 1
    if new != old:
        files.write(options.readme, new)
    return 0


def filled(text: str, name: str, block: str) -> str:
    """The text with the block between its two lines."""
    start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise NoPlace(f"one line {start} and, below it, one line {end}")
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n{block}\n{end}{after}"


def of_bench(measured: dict[str, Any]) -> str:
    return "\n\n".join([*map(markdown, tables(measured)), f"Measured by `make bench` on: {machine(measured)}."])


def of_reproduction(folder: Path, beside: Path) -> str:
    """The headline numbers, two figures, and where the rest is."""
    found = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    table = headlines(found)
    where = Path(os.path.relpath(folder, beside)).as_posix()
    pictures = [f"![{name}]({where}/{name}.png)" for name in SHOWN if (folder / f"{name}.png").exists()]
    rest = (
        f"Measured by `fasth reproduce` on: {machine(found)}. All figures and tables: [{where}]({where}/report.html)."
    )
    return "\n\n".join([markdown(table), table.note, *pictures, rest])


def markdown(table: Table) -> str:
    alignment = ["---", *["---:"] * (len(table.columns) - 1)]
    lines = [f"| {' | '.join(cells)} |" for cells in (table.columns, alignment, *table.rows)]
    return "\n".join([f"**{table.title}**", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
