"""Do networks that have SVDs learn as well as plain ones?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from rich.console import Console
from torch import Generator

import fasth
from experiments import harness
from experiments.harness import Options, Record, Results, Run, data, tables
from experiments.study import figures, grid, methods, training
from experiments.study.grid import Grid
from experiments.study.tables import Study, study_tables
from experiments.study.tasks import Task


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=grid.NAMES, metavar="NAME", default=grid.NAMES,
                        help=f"some of: {', '.join(grid.NAMES)}")  # fmt: skip


def grid_of(options: Options) -> Grid:
    return grid.QUICK if options.quick else grid.FULL


def stages(options: Options, results: Results, console: Console) -> Iterator[Sequence[Run]]:
    data.announce(console)
    sizes = grid_of(options)
    sizes = replace(sizes, peers=[method for method in sizes.peers if methods.installed(method)])
    for task, width, compared in grid.timed(sizes):
        runs = [{"experiment": "cost", "task": task.name, "width": width, "method": method} for method in compared]
        if missing := results.missing(runs):
            console.print(f"Timing a step: {task.name}, {width} wide")
            seconds = step_times(task, width, compared, options.rounds)
            for run in missing:
                results.add(run | {"ms": round(1e3 * seconds[run["method"]], 4)})
    yield grid.runs(sizes, Study(sizes, results.records).costs, options.only)


def step_times(task: Task, width: int, compared: Sequence[str], rounds: int) -> dict[str, float]:
    calls: dict[str, Callable[[], object]] = {}
    batch = task.batch(Generator().manual_seed(0))
    for method in compared:
        run = {"method": method, "optimizer": "Adam", "lr": grid.FIXED_RATE}
        torch.manual_seed(0)
        model = training.converted(task.network(width), run, task)
        optimizer = training.optimizer_of(model, run)
        calls[method] = partial(training.step, model, task, batch, optimizer)
    return tables.step_times(calls, rounds)


def label(record: Record) -> str:
    return f"{record['task']}, {record['method']}, {record['optimizer']} at {record['lr']:g}"


def report(options: Options, results: Results, console: Console) -> None:
    study, folder = Study(grid_of(options), results.records), results.path.parent
    tables.write(folder / "report.md", list(study_tables(study).values()), "", console)
    figures.draw(study, folder)


def conditions() -> Record:
    """The images, and the multiples of ``param_groups``: results with another rule cannot be compared."""
    layer = fasth.LinearSVD(64, 256)
    kinds = {name: kind for name, (kind, *_) in methods.OPTIMIZERS.items()}
    groups = {name: fasth.param_groups(layer, lr=1.0, optimizer=kind) for name, kind in kinds.items()}
    rates = {name: {group["name"]: round(group["lr"], 4) for group in found} for name, found in groups.items()}
    return {"images": data.images().name, "rates": rates}


EXPERIMENT = harness.Experiment(
    name="study",
    about=__doc__,
    found=training.FOUND,
    add_options=add_options,
    stages=stages,
    train=training.train,
    label=label,
    report=report,
    conditions=conditions,
    rounds=60,
)

if __name__ == "__main__":
    sys.exit(harness.main(EXPERIMENT))
