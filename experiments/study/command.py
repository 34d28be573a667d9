"""``python -m fasth.reproduce.study``: makes the runs that are missing, then the tables and the figures."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import fasth
from fasth import files
from fasth.reproduce.study import data, experiments, figures, methods, runner, tables
from fasth.reproduce.study.runner import FILE, OtherStudy, Results
from fasth.reproduce.study.training import WrongAnswer
from fasth.reproduce.tables import markdown
from fasth.reproduce.timing import environment

OUT = Path("build") / "study"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0; 1 if an answer was wrong; 2 for what cannot be done; 130 if it was interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m fasth.reproduce.study",
        description="Do networks that have SVDs learn as well as plain ones?",
    )
    parser.add_argument("--quick", action="store_true", help="shorter trainings, fewer of them: under five minutes")
    parser.add_argument("--only", nargs="+", choices=experiments.NAMES, metavar="NAME", default=experiments.NAMES,
                        help=f"some of: {', '.join(experiments.NAMES)}")  # fmt: skip
    parser.add_argument("--out", type=Path, help=f"where results go; default: {OUT}, with --quick {OUT}-quick")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="trainings at a time; default: %(default)s")
    parser.add_argument("--again", action="store_true", help="do not go on from what is in the folder: start anew")
    parser.add_argument("--report", action="store_true", help="train nothing: tables and figures of what is there")
    options = parser.parse_args(arguments)
    if options.workers < 1:
        parser.error(f"--workers should be at least 1; got {options.workers}")
    out: Path = options.out or (OUT.with_name("study-quick") if options.quick else OUT)
    grid = experiments.QUICK if options.quick else experiments.FULL
    console = Console(stderr=True)
    if data.images().name == "digits":
        console.print(data.HOW_TO_INSTALL, soft_wrap=True)
    if options.again:
        (out / FILE).unlink(missing_ok=True)
    try:
        results = Results(out / FILE, {**environment("cpu"), "images": data.images().name, "rates": rates()})
        if not options.report:
            runner.run(grid, options.only, results, options.workers, console)
    except OtherStudy as error:
        print(f"{error}. Take another --out, or --again to replace it", file=sys.stderr)
        return 2
    except WrongAnswer as error:
        print(f"Stopped, because an answer is wrong: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        console.print(f"Interrupted. What is done is in {out / FILE}; the same command goes on from there.")
        return 130
    written = write(tables.Study(grid, results.records), results.environment, out)
    console.print(f"Written to {out}: {', '.join(written)}", soft_wrap=True)
    return 0


def rates() -> dict[str, dict[str, float]]:
    """Those of a layer, by which results of another rule are found out."""
    layer = fasth.LinearSVD(64, 256)
    found = {name: fasth.param_groups(layer, lr=1.0, optimizer=kind) for name, (kind, *_) in methods.OPTIMIZERS.items()}
    return {name: {group["name"]: round(group["lr"], 4) for group in groups} for name, groups in found.items()}


def write(study: tables.Study, machine: dict[str, Any], out: Path) -> list[str]:
    """All tables in one file, and the figures; the names of what was written."""
    found = tables.tables(study)
    files.write(out / "report.md", "\n\n".join(markdown(table) for table in found.values()) + "\n")
    written = ["report.md"]
    for name, contents in figures.figures(study):
        for ending, content in contents.items():
            files.write(out / f"{name}.{ending}", content)
            written.append(f"{name}.{ending}")
    return written
