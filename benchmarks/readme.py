"""Puts what was measured into the README, between two lines each: bench:start and bench:end, the tables of ``make
bench``; reproduce:start and reproduce:end, the figures and headline numbers of ``fasth reproduce``; study:start and
study:end, the first table of ``make study``. Its other tables go into docs/training.md, those of ``make flow`` into
docs/flows.md, those of ``make recurrent`` and of recurrent.py beside this file into docs/recurrent.md, and the counts
of ``fasth reproduce``, gpu_resources.py's and gpu_estimates.py's tables into docs/gpu.md, likewise.

Run: make readme, or python benchmarks/readme.py --help
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from tables import machine, tables

from fasth import files
from fasth.reproduce.study import experiments, runner
from fasth.reproduce.study import tables as study_tables
from fasth.reproduce.tables import counts, headlines, markdown

HERE = Path(__file__).parent
SHOWN = ["figure-3a", "figure-4"]  # of the figures


class NoPlace(ValueError):
    """The page lacks the lines that say where something goes."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    parser.add_argument("--results", type=Path, default=HERE / "results.json", help="what bench.py wrote")
    parser.add_argument("--reproduction", type=Path, default=HERE / "reproduction", help="fasth reproduce's folder")
    parser.add_argument("--study", type=Path, default=HERE / "study", help="make study's folder")
    parser.add_argument("--flow", type=Path, default=HERE / "flow", help="make flow's folder")
    parser.add_argument("--recurrent", type=Path, default=HERE / "recurrent", help="make recurrent's folder")
    parser.add_argument("--readme", type=Path, default=HERE.parent / "README.md")
    parser.add_argument("--training", type=Path, default=HERE.parent / "docs" / "training.md")
    parser.add_argument("--flows", type=Path, default=HERE.parent / "docs" / "flows.md")
    parser.add_argument("--remembering", type=Path, default=HERE.parent / "docs" / "recurrent.md")
    parser.add_argument("--gpu", type=Path, default=HERE / "gpu", help="make gpu-resources' folder")
    parser.add_argument("--devices", type=Path, default=HERE.parent / "docs" / "gpu.md")
    options = parser.parse_args()
    blocks = {"bench": of_bench(json.loads(options.results.read_text(encoding="utf-8")))}
    if (options.reproduction / "results.json").exists():
        blocks["reproduce"] = of_reproduction(options.reproduction, options.readme.parent)
    pages = {options.readme: blocks}
    if (options.study / runner.FILE).exists():
        study = of_study(options.study)
        blocks["study"] = study.get("long", "")
        pages[options.training] = {f"study {name}": block for name, block in study.items()}
    if (options.flow / "tables.md").exists():
        pages[options.flows] = {"flow": (options.flow / "tables.md").read_text(encoding="utf-8").strip()}
    pages[options.remembering] = written(options.recurrent, "recurrent", "tables", "speed")
    pages[options.devices] = written(options.gpu, "gpu", "resources", "estimates")
    if (options.reproduction / "results.json").exists():
        pages[options.devices]["gpu counts"] = of_counts(options.reproduction)
    return max(update(page, blocks, options.check) for page, blocks in pages.items())


def written(folder: Path, page: str, *names: str) -> dict[str, str]:
    """The tables that stand in files of these names, by that of their place in the page."""
    paths = {name: folder / f"{name}.md" for name in names}
    return {f"{page} {name}": path.read_text(encoding="utf-8").strip() for name, path in paths.items() if path.exists()}


def update(page: Path, blocks: dict[str, str], check: bool) -> int:
    """0 if the page now shows the blocks, or did so before; 1 if it should have; 2 if it has no place for them."""
    old = new = page.read_text(encoding="utf-8")
    try:
        for name, block in blocks.items():
            new = filled(new, name, block)
    except NoPlace as error:
        print(f"{page} should have {error}", file=sys.stderr)
        return 2
    if check and new != old:
        print(f"{page} does not show what was measured last; `make readme` puts that right", file=sys.stderr)
        return 1
    if new != old:
        files.write(page, new)
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


def of_study(folder: Path) -> dict[str, str]:
    """Its tables by name, and "machine"."""
    environment, *records = map(json.loads, (folder / runner.FILE).read_text(encoding="utf-8").splitlines())
    found = study_tables.tables(study_tables.Study(experiments.FULL, records))
    where = machine({"environment": environment, "settings": {"dtype": "float32"}})
    made = f"Made by `make study` on: {where}; images: {environment['images']}."
    return {name: markdown(table) for name, table in found.items()} | {"machine": made}


def of_counts(folder: Path) -> str:
    table = counts(json.loads((folder / "results.json").read_text(encoding="utf-8")))
    return f"{markdown(table)}\n\n{table.note}"


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


if __name__ == "__main__":
    sys.exit(main())
