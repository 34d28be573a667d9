"""Classifiers of images with a Lipschitz constant of 1: which layers certify most images, and at what price?

One small network on Fashion-MNIST and on MNIST, made of orthogonal convolutions, of AOC, of reshaped kernels, of layers
with ``spectral_norm``, and of plain ones. Every method gets the same rates with one seed. The rate that is best on
validation data, by the mean of clean accuracy and of that certified at 36/255, is judged on test data, other seeds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console

from experiments import harness
from experiments.harness import Options, Record, Results, Run, best_of_first_seed, data
from experiments.lipschitz import report, training
from experiments.lipschitz.networks import installed


@dataclass(frozen=True)
class Grid:
    rates: Sequence[float]
    seeds: int  # besides seed 0, which the sweep has
    steps: int


FULL = Grid(rates=(0.001, 0.004, 0.016), seeds=3, steps=200)
QUICK = Grid(rates=(0.004,), seeds=0, steps=100)


def add_options(parser: argparse.ArgumentParser) -> None:
    known, images = installed(), data.installed() or ["digits"]
    parser.add_argument("--images", nargs="+", choices=images, default=images, metavar="SET", help=", ".join(images))
    parser.add_argument("--methods", nargs="+", choices=known, default=known, metavar="METHOD", help="; ".join(known))
    parser.add_argument("--rates", type=float, nargs="+", help="in place of the rates of the sweep")
    parser.add_argument("--seeds", type=int, help="besides seed 0 of the sweep; default 3, with --quick none")
    parser.add_argument("--steps", type=int, help="steps of training")


def grid_of(options: Options) -> Grid:
    return harness.with_options(QUICK if options.quick else FULL, options)


def sweep(grid: Grid, images: str, method: str) -> list[Run]:
    """Runs of every rate with seed 0, which are evaluated on test data only if there are no other seeds."""
    fixed = {"data": images, "method": method, "seed": 0, "steps": grid.steps, "judged": not grid.seeds}
    return [{**fixed, "lr": rate} for rate in grid.rates]


def finals(options: Options, images: str, results: Results) -> list[Run]:
    """The best rate of each method with other seeds, or, if there are none, the run of the sweep itself."""
    grid, runs = grid_of(options), []
    for method in options.methods:
        if best := best_of_first_seed(results.finished(sweep(grid, images, method)), worth):
            chosen = results.settings(best)
            runs += harness.other_seeds(chosen, grid.seeds) or [chosen]
    return runs


def worth(record: Record) -> float | None:
    return None if record["validation"] is None else -record["validation"]


def stages(options: Options, results: Results, console: Console) -> Iterator[list[Run]]:
    data.announce(console)
    grid = grid_of(options)
    for images in options.images:
        yield [run for method in options.methods for run in sweep(grid, images, method)]
        yield finals(options, images, results)


def write_report(options: Options, results: Results, console: Console) -> None:
    records = results.finished([run for images in options.images for run in finals(options, images, results)])
    report.write(records, grid_of(options).steps, options.rounds, results.path.parent, console)


def label(record: Record) -> str:
    return f"{record['data']}, {record['method']}, {record['lr']:g}, seed {record['seed']}: {record['validation']}"


EXPERIMENT = harness.Experiment(
    name="lipschitz",
    about=__doc__,
    found=("curve", "constant", "validation", "clean", "certified", "attacked", "grid"),
    add_options=add_options,
    stages=stages,
    train=training.train,
    label=label,
    report=write_report,
)

if __name__ == "__main__":
    sys.exit(harness.main(EXPERIMENT))
