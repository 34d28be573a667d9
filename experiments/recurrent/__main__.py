"""Recurrent nets that remember, and the usual ones: which learns what, in how many steps and in what time?

The tasks are copy memory, the adding problem, and images pixel by pixel. On each task every method gets the same rates
with one seed. The rate with the least loss at the end of training is judged on test data, with other seeds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console

from experiments import harness
from experiments.harness import Options, Record, Results, Run, best_of_first_seed, data
from experiments.recurrent import training
from experiments.recurrent.models import installed
from experiments.recurrent.report import write
from experiments.recurrent.tasks import TASKS

SHORT = ("copy, 100", "adding, 200", "pixels")  # the tasks on which gated nets with SVDs are trained, too


@dataclass(frozen=True)
class Grid:
    tasks: Sequence[str]
    rates: Sequence[float]
    seeds: int  # besides seed 0, which the sweep has

    def pairs(self, methods: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Tasks and methods, the cheapest tasks first."""
        for task in sorted(self.tasks, key=lambda task: task not in SHORT):
            yield from ((task, method) for method in methods if task in SHORT or method not in ("LSTMSVD", "GRUSVD"))


FULL = Grid(tasks=tuple(TASKS), rates=(1e-3, 3e-3), seeds=2)
QUICK = Grid(tasks=("copy, 100",), rates=(1e-3,), seeds=0)


def add_options(parser: argparse.ArgumentParser) -> None:
    known = installed()
    parser.add_argument("--tasks", nargs="+", choices=TASKS, metavar="TASK", help="; ".join(TASKS))
    parser.add_argument("--methods", nargs="+", choices=known, default=known, metavar="METHOD", help="; ".join(known))
    parser.add_argument("--rates", type=float, nargs="+", help="in place of the rates of the sweep")
    parser.add_argument("--seeds", type=int, help="besides seed 0 of the sweep; default 2, with --quick none")


def grid_of(options: Options) -> Grid:
    return harness.with_options(QUICK if options.quick else FULL, options)


def sweep(grid: Grid, task: str, method: str) -> list[Run]:
    """Every rate, with seed 0."""
    fixed = {"task": task, "data": data.images().name, "method": method, "seed": 0, "steps": TASKS[task].steps}
    return [{**fixed, "lr": rate} for rate in grid.rates]


def finals(grid: Grid, methods: Iterable[str], results: Results) -> list[Run]:
    """The best rate with other seeds, or, if there are none, the run of the sweep itself."""
    runs = []
    for task, method in grid.pairs(methods):
        if best := best_of_first_seed(results.finished(sweep(grid, task, method)), lambda record: record["curve"][-1]):
            chosen = results.settings(best)
            runs += harness.other_seeds(chosen, grid.seeds) or [chosen]
    return runs


def stages(options: Options, results: Results, console: Console) -> Iterator[list[Run]]:
    grid = grid_of(options)
    if any(task.startswith("pixels") for task in grid.tasks):
        data.announce(console)
    yield [run for task, method in grid.pairs(options.methods) for run in sweep(grid, task, method)]
    yield finals(grid, options.methods, results)


def report(options: Options, results: Results, console: Console) -> None:
    records = results.finished(finals(grid_of(options), options.methods, results))
    write(records, results.path.parent, options.rounds, console)


def label(record: Record) -> str:
    run = f"{record['task']}, {record['method']}, {record['lr']:g}, seed {record['seed']}"
    return f"{run}: {record['score']} {TASKS[record['task']].unit}"


EXPERIMENT = harness.Experiment(
    name="recurrent",
    about=__doc__,
    found=("curve", "scores", "loss", "score"),
    add_options=add_options,
    stages=stages,
    train=training.train,
    label=label,
    report=report,
    rounds=10,
)

if __name__ == "__main__":
    sys.exit(harness.main(EXPERIMENT))
