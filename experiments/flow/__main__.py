"""Normalizing flows whose channels are mixed by one linear map or another: which learns best, and at what price?

There is a flow like Glow on images, and one on a table of 64 columns. Every mixer gets the same sweep of rates and of
matrices to start from. The setting that is best on validation data is run with more seeds, and judged on test data.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace

from rich.console import Console

from experiments import harness
from experiments.flow import report, training
from experiments.flow.grid import FULL, QUICK, Grid, finals, sweep, written
from experiments.flow.models import IMAGE_MIXERS, STARTS, installed
from experiments.flow.training import DATA
from experiments.harness import Options, Record, Results, Run, data


def add_options(parser: argparse.ArgumentParser) -> None:
    known = installed()
    parser.add_argument("--tasks", nargs="+", choices=DATA, default=list(DATA), metavar="TASK", help="images, table")
    mixers = [*known, *IMAGE_MIXERS]
    about = f"{', '.join(known)}; and for images alone {', '.join(IMAGE_MIXERS)}"
    parser.add_argument("--mixers", nargs="+", choices=mixers, default=known, metavar="MIXER", help=about)
    parser.add_argument("--starts", nargs="+", choices=STARTS, metavar="START", help=", ".join(STARTS))
    parser.add_argument("--rates", type=float, nargs="+", help="in place of the rates of the sweep")
    parser.add_argument("--seeds", type=int, help="besides seed 0 of the sweep; default 3, with --quick none")
    parser.add_argument("--steps", type=int, help="steps of training")


def grid_of(options: Options) -> Grid:
    grid = QUICK if options.quick else FULL
    if options.rates:
        grid = replace(grid, rates=dict.fromkeys(DATA, options.rates))
    if options.starts:
        grid = replace(grid, starts=dict.fromkeys(DATA, options.starts))
    if options.steps:
        grid = replace(grid, steps=dict.fromkeys(DATA, options.steps))
    return grid if options.seeds is None else replace(grid, seeds=options.seeds)


def stages(options: Options, results: Results, console: Console) -> Iterator[list[Run]]:
    if "images" in options.tasks:
        data.announce(console)
    grid = grid_of(options)
    swept = sweep(grid, options.tasks, options.mixers)
    yield swept
    yield finals(swept, results, grid)


def write_report(options: Options, results: Results, console: Console) -> None:
    grid = grid_of(options)
    swept = sweep(grid, options.tasks, options.mixers)
    records = results.finished([*swept, *finals(swept, results, grid)])
    report.write(records, grid, options, results.path.parent, console)


def label(record: Record) -> str:
    return f"{training.name_of(record)}: {written(record['validation'])}"


EXPERIMENT = harness.Experiment(
    name="flow",
    about=__doc__,
    found=("validation", "test", "curve", "inverse"),
    add_options=add_options,
    stages=stages,
    train=training.train,
    label=label,
    report=write_report,
)

if __name__ == "__main__":
    sys.exit(harness.main(EXPERIMENT))
