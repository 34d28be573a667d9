"""Puts what was measured into the pages of docs/, between two lines each, such as <!-- bench:start --> and
<!-- bench:end -->. The tables of ``make bench`` and of ``fasth reproduce`` go into benchmarks.md, those of ``make
study`` into training.md, and those that other commands left in files of Markdown beside this one where FILES says.

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

from fasth import _files
from fasth.tools.reproduce.tables import counts, headlines, markdown

sys.path.append(str(Path(__file__).parents[1]))
from experiments.harness.results import FILE, read
from experiments.study.grid import FULL
from experiments.study.tables import Study, study_tables

HERE = Path(__file__).parent
SHOWN = ["figure-3a", "figure-4"]  # of the figures
RATES = ("choosing", "low", "best", "thrice", "growth", "longer", "kin", "time")
# Maps each page and place to the Markdown file that a command wrote for it.
FILES = {
    "training.md": {f"rates {name}": f"rates/{name}.md" for name in RATES},
    "convolutions.md": {
        "conv speed": "conv/speed.md",
        "conv rule": "conv/rule.md",
        "conv exactness": "conv/exactness.md",
        "lipschitz": "lipschitz/tables.md",
    },
    "flows.md": {"flow": "flow/tables.md", "flow kxk": "flow-kxk/tables.md", "conv inverse": "conv/inverse.md"},
    "recurrent.md": {"recurrent tables": "recurrent/tables.md", "recurrent speed": "recurrent/speed.md"},
    "gpu.md": {"gpu resources": "gpu/resources.md", "gpu executed": "gpu/executed.md"},
    "spectra.md": {"spectra norms": "spectra/norms.md"},
    "adapters.md": {
        "adapters": "adapters/table.md",
        "adapter rates": "adapters/rates/table.md",
        "adapter steps": "adapters/steps/table.md",
        "finetune": "finetune/tables.md",
        **{f"adapter {name}": f"adapters/{name}.md" for name in ("half", "frames", "restarts", "oft", "rotations")},
    },
    "reliability.md": {"reliability fuzz": "reliability/fuzz.md", "reliability training": "reliability/training.md"},
}


class NoPlace(ValueError):
    """The page lacks the lines that say where something goes."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    parser.add_argument("--measured", type=Path, default=HERE, help="the folder of what the commands wrote")
    parser.add_argument("--docs", type=Path, default=HERE.parent / "docs", help="the folder of the pages")
    options = parser.parse_args()
    pages = {page: written(options.measured, places) for page, places in FILES.items()}
    pages["benchmarks.md"] = {"bench": bench_block(json.loads((options.measured / "results.json").read_text("utf-8")))}
    if (options.measured / "reproduction" / "results.json").exists():
        found = json.loads((options.measured / "reproduction" / "results.json").read_text("utf-8"))
        pages["benchmarks.md"]["reproduce"] = reproduction_block(found, options.measured / "reproduction", options.docs)
        pages["gpu.md"]["gpu counts"] = counts_block(found)
    if (options.measured / "study" / FILE).exists():
        pages["training.md"] |= study_blocks(options.measured / "study")
    return max(update(options.docs / page, blocks, options.check) for page, blocks in pages.items() if blocks)


def written(folder: Path, places: dict[str, str]) -> dict[str, str]:
    """Maps the name of each place to the content of its file, for files that exist."""
    paths = {place: folder / path for place, path in places.items()}
    return {place: path.read_text(encoding="utf-8").strip() for place, path in paths.items() if path.exists()}


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
        _files.write(page, new)
    return 0


def filled(text: str, name: str, block: str) -> str:
    """The text with the block between its two lines."""
    start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise NoPlace(f"one line {start} and, below it, one line {end}")
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n{block}\n{end}{after}"


def bench_block(measured: dict[str, Any]) -> str:
    return "\n\n".join([*map(markdown, tables(measured)), f"Measured by `make bench` on: {machine(measured)}."])


def study_blocks(folder: Path) -> dict[str, str]:
    """The tables of the study, and the machine, by place."""
    environment, records = read(folder / FILE)
    found = study_tables(Study(FULL, records))
    where = machine({"environment": environment, "settings": {"dtype": "float32"}})
    made = f"Made by `make study` on: {where}; images: {environment['images']}."
    return {f"study {name}": markdown(table) for name, table in found.items()} | {"study machine": made}


def counts_block(found: dict[str, Any]) -> str:
    table = counts(found)
    return f"{markdown(table)}\n\n{table.note}"


def reproduction_block(found: dict[str, Any], folder: Path, docs: Path) -> str:
    """The headline numbers, two figures, and where the rest is."""
    table = headlines(found)
    where = Path(os.path.relpath(folder, docs)).as_posix()
    pictures = [f"![{name}]({where}/{name}.png)" for name in SHOWN if (folder / f"{name}.png").exists()]
    rest = f"Measured by `fasth reproduce` on: {machine(found)}. [All figures and tables]({where}/report.html)."
    return "\n\n".join([markdown(table), table.note, *pictures, rest])


if __name__ == "__main__":
    sys.exit(main())
