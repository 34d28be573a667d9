"""At which rates do SVD networks train? Chosen on some tasks, judged once on others."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console

from experiments import harness
from experiments.harness import Options, Record, Results, Run, data
from experiments.rates import grid, training
from experiments.rates.report import report


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


def label(record: Record) -> str:
    return f"{record['task']}, {record['method']} at {record['lr']:g}"


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
