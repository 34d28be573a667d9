"""A small language model that knows Python's sources is fine-tuned on licences: by LoRA, DoRA, OFT, HRA and fasth.

Every method has the same first model, about the same number of parameters, the same rates and the same batches. The
rate with the least loss at the end of training is judged with seeds that did not choose it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product

from rich.console import Console

from experiments import harness
from experiments.finetune import report, training
from experiments.finetune.methods import METHODS
from experiments.harness import Options, Record, Results, Run, best_of_first_seed, other_seeds


@dataclass(frozen=True)
class Grid:
    rates: Sequence[float]
    seeds: int  # besides seed 0, which the sweep has
    steps: int
    first_steps: int


FULL = Grid(rates=(3e-3, 1e-2, 3e-2), seeds=3, steps=200, first_steps=1500)
QUICK = Grid(rates=(1e-2,), seeds=0, steps=60, first_steps=400)


def add_options(parser: argparse.ArgumentParser) -> None:
    known = installed()
    parser.add_argument("--methods", nargs="+", choices=known, default=known, metavar="METHOD", help="; ".join(known))
    parser.add_argument("--rates", type=float, nargs="+", help="in place of the rates of the sweep")
    parser.add_argument("--seeds", type=int, help="besides seed 0 of the sweep; default 3, with --quick none")
    parser.add_argument("--steps", type=int, help="of each fine-tuning; default 200, with --quick 60")


def installed() -> list[str]:
    """The methods that can run: without PEFT, only ours and training all weights."""
    return [*METHODS] if find_spec("peft") else [name for name in METHODS if name not in report.OF_PEFT]


def first_run(grid: Grid) -> Run:
    return {"method": training.FIRST, "seed": 0, "steps": grid.first_steps}


def sweep(grid: Grid, methods: Iterable[str]) -> list[Run]:
    """Every rate, with seed 0."""
    fixed = {"seed": 0, "steps": grid.steps, "first_steps": grid.first_steps}
    return [{"method": method, "lr": lr, **fixed} for method, lr in product(methods, grid.rates)]


def chosen(grid: Grid, method: str, results: Results) -> Record | None:
    return best_of_first_seed(results.finished(sweep(grid, [method])), lambda record: record["train"])


def finals(grid: Grid, method: str, results: Results) -> list[Run]:
    best = chosen(grid, method, results)
    return other_seeds(results.settings(best), grid.seeds) if best else []


def grid_of(options: Options) -> Grid:
    return harness.with_options(QUICK if options.quick else FULL, options)


def stages(options: Options, results: Results, console: Console) -> Iterator[Sequence[Run]]:
    grid = grid_of(options)
    yield [first_run(grid)]
    yield sweep(grid, options.methods)
    yield [run for method in options.methods for run in finals(grid, method, results)]


def write_report(options: Options, results: Results, console: Console) -> None:
    grid, found = grid_of(options), {}
    for method in options.methods:
        best = chosen(grid, method, results)
        if best is not None:
            found[method] = results.finished(finals(grid, method, results)) or [best]
    report.write(results.finished([first_run(grid)]), found, grid.steps, results.path.parent, console)


def label(record: Record) -> str:
    return f"{record['method']}: {record['new']}"


EXPERIMENT = harness.Experiment(
    name="finetune",
    about=__doc__,
    found=("new", "first", "train", "curve", "tokens", "saved", "parameters", "error"),
    add_options=add_options,
    stages=stages,
    train=training.train,
    label=label,
    report=write_report,
)

if __name__ == "__main__":
    sys.exit(harness.main(EXPERIMENT))
