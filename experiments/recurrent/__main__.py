"""Recurrent nets that remember, and those that people use today: which learns what, in how many steps and what time?

Copy memory, the adding problem, and images pixel by pixel: see recurrent_tasks.py and recurrent_models.py. On each task
every method gets the same rates with one seed. That with the least loss at the end of training is judged on test data,
with seeds that did not choose it. What is done is written to a file, and the same command goes on where it was stopped.

Run: make recurrent, or python examples/recurrent.py --help
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recurrent_models import installed
from recurrent_report import report
from recurrent_tasks import TASKS
from recurrent_training import Record, Run, train
from rich.console import Console

from fasth.reproduce.pool import in_parallel
from fasth.reproduce.results import Results
from fasth.reproduce.study import data

HERE = Path(__file__).parents[1]
SHORT = ("copy, 100", "adding, 200", "pixels")  # where gated nets with SVDs are run, too


@dataclass(frozen=True)
class Grid:
    tasks: Sequence[str]
    rates: Sequence[float]
    seeds: int  # besides that of the sweep

    def pairs(self, methods: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Which method is run on which task; the cheapest tasks come first."""
        for task in sorted(self.tasks, key=lambda task: task not in SHORT):
            yield from ((task, method) for method in methods if task in SHORT or method not in ("LSTMSVD", "GRUSVD"))


FULL = Grid(tasks=tuple(TASKS), rates=(1e-3, 3e-3), seeds=2)
QUICK = Grid(tasks=("copy, 100",), rates=(1e-3,), seeds=0)


def sweep(grid: Grid, methods: Iterable[str]) -> list[Run]:
    """Every rate, with seed 0."""
    return [run_of(task, method, lr, 0) for task, method in grid.pairs(methods) for lr in grid.rates]


def finals(grid: Grid, methods: Iterable[str], records: Sequence[Record]) -> list[Run]:
    """The best rate with other seeds, or, without any, that run of the sweep itself."""
    return [
        run_of(task, method, best_rate(records, task, method), seed)
        for task, method in grid.pairs(methods)
        for seed in range(1, grid.seeds + 1) or [0]
    ]


def best_rate(records: Iterable[Record], task: str, method: str) -> float:
    found = [r for r in records if (r["task"], r["method"], r["seed"]) == (task, method, 0)]
    best = min(found, key=lambda record: float("inf") if record["curve"][-1] is None else record["curve"][-1])
    return float(best["lr"])


def run_of(task: str, method: str, lr: float, seed: int) -> Run:
    return Run(task, data.images().name, method, lr, seed, TASKS[task].steps)


def train_all(wanted: Sequence[Run], results: Results, workers: int, console: Console) -> None:
    calls = [(run,) for run in wanted if not results.of([run])]
    for (run,), found in in_parallel(train, calls, workers, console, describe_run):
        results.add(vars(run) | found)


def describe_run(call: tuple[Any, ...], found: Record) -> str:
    return f"{call[0].name()}: {found['score']} {TASKS[call[0].task].unit}"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console, grid = Console(), grid_of(options)
    if any(task.startswith("pixels") for task in grid.tasks) and data.images().name == "digits":
        console.print(data.HOW_TO_INSTALL)
    results = Results(options.out or HERE / "build" / ("recurrent-quick" if options.quick else "recurrent"))
    try:
        swept = sweep(grid, options.methods)
        train_all(swept, results, options.workers, console)
        wanted = finals(grid, options.methods, results.of(swept))
        train_all(wanted, results, options.workers, console)
        report(results.of(wanted), results.path.parent, options.rounds, console)
    except KeyboardInterrupt:
        console.print(f"\nStopped. What is done is in {results.path}; the same command goes on from there.")
        return 130
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    known = installed()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="copy memory alone, one rate and one seed: two minutes")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, metavar="TASK", help="; ".join(TASKS))
    parser.add_argument("--methods", nargs="+", choices=known, default=known, metavar="METHOD", help="; ".join(known))
    parser.add_argument("--rates", type=float, nargs="+", help="in place of those of the sweep")
    parser.add_argument("--seeds", type=int, help="besides that of the sweep; default 2, with --quick none")
    parser.add_argument("--rounds", type=int, default=10, help="of timed steps")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes, of one thread each")
    parser.add_argument("--out", type=Path, help="default build/recurrent, with --quick build/recurrent-quick")
    options = parser.parse_args(arguments)
    for name, least in (("seeds", 0), ("rounds", 1), ("workers", 1)):
        if (given := getattr(options, name)) is not None and given < least:
            parser.error(f"--{name} should be at least {least}; got {given}")
    return options


def grid_of(options: argparse.Namespace) -> Grid:
    grid = QUICK if options.quick else FULL
    given = {name: value for name in ("tasks", "rates", "seeds") if (value := getattr(options, name)) is not None}
    return replace(grid, **given)


if __name__ == "__main__":
    sys.exit(main())
