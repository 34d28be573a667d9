"""At which rates do SVD networks train? Chosen on some tasks, judged once on others."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console

from experiments import harness
from experiments.harness import Options, Record, Results, Run, best_of_first_seed, data, other_seeds
from experiments.rates import equal_time, grid, training
from experiments.rates.report import report
from experiments.rates.tasks import TIMED
from experiments.rates.ways import PLAIN


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=grid.PARTS, metavar="PART", default=grid.PARTS,
                        help=f"some of: {', '.join(grid.PARTS)}")  # fmt: skip


def stages(options: Options, results: Results, console: Console) -> Iterator[Sequence[Run]]:
    data.announce(console)
    if "choose" in options.only:
        yield grid.choosing(options.quick)
    if "judge" in options.only:
        for methods in grid.JUDGED:
            sweep = grid.judging(methods, options.quick)
            yield sweep
            sweep = [*sweep, *grid.beyond(results.finished(sweep), methods, options.quick)]
            yield sweep
            yield grid.more_seeds(results.finished(sweep), methods, options.quick)
    if "longer" in options.only:
        methods = (PLAIN, training.GROUPS)
        yield grid.longer(results.finished(grid.judging(methods, options.quick)), options.quick)
    if "kin" in options.only:
        yield from swept(grid.kin(options.quick), results)
    if "time" in options.only:
        measure(options, results, console)
        yield from swept(equal_time.sweeps(equal_time.costs(results, options.quick), options.quick), results)


def swept(sweeps: Sequence[Sequence[Run]], results: Results) -> Iterator[Sequence[Run]]:
    """The sweeps, with rates beyond where the best is at an end, and then other seeds at the best rate of each."""
    made = [list(sweep) for sweep in sweeps]
    for _ in range(3):
        yield [run for sweep in made for run in sweep]
        made = [[*sweep, *map(results.settings, grid.outward(results.finished(sweep)))] for sweep in made]
    yield [
        run
        for sweep in made
        if (best := best_of_first_seed(results.finished(sweep), lambda record: record["score"]))
        for run in other_seeds(results.settings(best), grid.SEEDS - 1)
    ]


def measure(options: Options, results: Results, console: Console) -> None:
    """Times steps, before anything is trained for as long."""
    for task in TIMED:
        runs = [run for run in results.missing(equal_time.cost_runs(options.quick)) if run["task"] == task.name]
        if runs:
            console.print(f"Timing a step: {task.name}")
            ms = equal_time.measured(task, options.rounds)
            for run in runs:
                results.add(run | {"ms": round(ms[run["task"], run["method"], run["batches"]], 3)})


def label(record: Record) -> str:
    return f"{record['task']}, {record['method']}, {record.get('optimizer', 'AdamW')} at {record['lr']:g}"


def conditions() -> Record:
    return {"images": data.images().name}


EXPERIMENT = harness.Experiment(
    name="rates",
    about=__doc__,
    found=training.FOUND,
    add_options=add_options,
    stages=stages,
    train=training.train,
    label=label,
    report=report,
    conditions=conditions,
)

if __name__ == "__main__":
    sys.exit(harness.main(EXPERIMENT))
