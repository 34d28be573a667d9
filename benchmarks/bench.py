"""Verifies every method's answer, value and gradients, then times it beside what it would replace.

Run: make bench, or python benchmarks/bench.py --help
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import rich
import torch
from rich.console import Console
from tables import machine, tables

from fasth import _files
from fasth.tools.reproduce import runner
from fasth.tools.reproduce.command import show
from fasth.tools.reproduce.experiments import Experiment
from fasth.tools.reproduce.layers import LINEAR_ORTHOGONAL, LINEAR_SVD, NN_LINEAR
from fasth.tools.reproduce.methods import BASELINES, COMPACT, FULL, LINEAR, PEERS, PRINTED, TRIANGULAR, Method
from fasth.tools.reproduce.operations import OPERATIONS
from fasth.tools.reproduce.tables import any_wrong, faults
from fasth.tools.reproduce.tasks import Entry, InTurns, Settings
from fasth.tools.reproduce.timing import environment

OUT = Path(__file__).parent / "results.json"


@dataclass(frozen=True)
class Bench:
    """One table's methods at all its sizes."""

    name: str
    methods: Sequence[Method]
    sizes: Sequence[int]
    quick: Sequence[int]
    rounds: int
    what: Sequence[str] = ("step",)
    rows: int = 32
    rows_per_d: int = 0  # in place of ``rows``

    def experiment(self) -> Experiment:
        tasks = []
        for d in self.sizes:
            rows = self.rows_per_d * d or self.rows
            tasks.append(InTurns(f"d = {d}", [Entry(m, d, rows) for m in self.methods], self.what, self.rounds))
        return Experiment(self.name, self.name, "", tasks)


TO_4096, TO_2048 = ([64, 128, 256, 512, 768, 1024, 2048, 4096][:n] for n in (8, 7))
OF_FASTH = [LINEAR, COMPACT, TRIANGULAR, FULL]
LAYERS = [NN_LINEAR, LINEAR_ORTHOGONAL, LINEAR_SVD]
BENCHES = [
    Bench("layer", OF_FASTH, TO_4096, [64, 256, 1024], 50, ("step", "single", "forward")),
    Bench("rows", OF_FASTH, [256, 512, 1024], [256], 15, rows_per_d=8),
    Bench("linear", LAYERS, TO_2048, [64, 256, 1024], 50, ("step", "single", "inference")),
    *(
        Bench(o.name.split()[0].lower(), [o.standard_method, o.our_method], TO_2048[:6], [64, 256], 15)
        for o in OPERATIONS
    ),
    Bench("peers", [*OF_FASTH, *BASELINES, PRINTED, *PEERS], [512], [128], 15),
]


def main() -> int:
    options = parsed()
    torch.set_num_threads(options.threads)
    settings = Settings(options.dtype, "cpu", rounds=0, time_limit=options.time_limit)
    console = Console(stderr=True)
    chosen = [bench.experiment() for bench in benches(options)]
    found = runner.run(chosen, settings, environment(), None, console)
    for table in tables(found):
        show(table)
    rich.print(f"[dim]{machine(found)}")
    if options.out:
        _files.write(options.out, runner.text(found))
        rich.print(f"[dim]Written to {options.out}")
    for fault in faults(found):
        console.print(fault, style="red", markup=False)
    return 1 if any_wrong(found) else 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and readings")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="D", help="these d for every table")
    parser.add_argument("--only", nargs="+", choices=[b.name for b in BENCHES], help="these tables")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="default: %(default)s")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--time-limit", type=float, default=30.0, metavar="S", help="for each method at each size")
    parser.add_argument("--out", type=Path, help=f"default: {OUT.name} beside this file, if everything is run")
    options = parser.parse_args()
    if options.out is None and not (options.quick or options.sizes or options.only):
        options.out = OUT
    return options


def benches(options: argparse.Namespace) -> Iterator[Bench]:
    for bench in BENCHES:
        if options.only and bench.name not in options.only:
            continue
        if options.quick:
            bench = replace(bench, sizes=bench.quick, rounds=5)
        yield replace(bench, sizes=options.sizes) if options.sizes else bench


if __name__ == "__main__":
    sys.exit(main())
