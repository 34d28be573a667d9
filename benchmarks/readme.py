"""Puts the tables of ``make bench`` into the README, between its lines bench:start and bench:end.

Run: make readme, or python benchmarks/readme.py --help
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tables import Table, machine, tables

from fasth.reproduce import results

HERE = Path(__file__).parent
START, END = "<!-- bench:start -->", "<!-- bench:end -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the README is out of date")
    parser.add_argument("--results", type=Path, default=HERE / "results.json", help="what bench.py wrote")
    parser.add_argument("--readme", type=Path, default=HERE.parent / "README.md")
    options = parser.parse_args()
    old = options.readme.read_text(encoding="utf-8")
    if old.count(START) != 1 or old.count(END) != 1 or old.index(START) > old.index(END):
        print(f"{options.readme} should have one line {START} and, below it, one line {END}", file=sys.stderr)
        return 2
    before, _, rest = old.partition(START)
    _, _, after = rest.partition(END)
    measured = json.loads(options.results.read_text(encoding="utf-8"))
    block = "\n\n".join([*map(markdown, tables(measured)), f"Measured by `make bench` on: {machine(measured)}."])
    new = f"{before}{START}\n{block}\n{END}{after}"
    if options.check and new != old:
        print(f"{options.readme} does not show {options.results}; `make readme` puts that right", file=sys.stderr)
        return 1
    if new != old:
        results.write(options.readme, new)
    return 0


def markdown(table: Table) -> str:
    alignment = ["---", *["---:"] * (len(table.columns) - 1)]
    lines = [f"| {' | '.join(cells)} |" for cells in (table.columns, alignment, *table.rows)]
    return "\n".join([f"**{table.title}**", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
