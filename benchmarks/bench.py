"""Verifies every method's answer, value and gradients, then times it beside ``F.linear``.

Run: make bench, or python benchmarks/bench.py --help
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import rich
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tables import machine, tables

from fasth.reproduce import results
from fasth.reproduce.methods import BASELINES, FULL, LINEAR, PEERS, TRIANGULAR, Method
from fasth.reproduce.timing import Timing, environment, measure

OUT = Path(__file__).parent / "results.json"
QUANTILES = (0.05, 0.25, 0.75, 0.95)


@dataclass(frozen=True)
class Experiment:
    table: str
    sizes: list[int]
    rows: Callable[[int], int]
    methods: list[Method]
    what: list[str]
    rounds: int


EXPERIMENTS = [
    Experiment(
        "layer",
        [64, 128, 256, 512, 768, 1024, 2048, 4096],
        lambda d: 32,
        [LINEAR, TRIANGULAR, FULL],
        ["step", "forward"],
        rounds=50,
    ),
    Experiment("rows", [256, 512, 1024], lambda d: 8 * d, [LINEAR, TRIANGULAR, FULL], ["step"], rounds=15),
    Experiment("peers", [512], lambda d: 32, [LINEAR, TRIANGULAR, FULL, *BASELINES, *PEERS], ["step"], rounds=15),
]
QUICK = {"layer": [64, 256, 1024], "rows": [256], "peers": [128]}


def main() -> int:
    options = parsed()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    found: dict[str, Any] = {"environment": environment(), "dtype": options.dtype, "records": []}
    console = Console(stderr=True)
    for experiment in chosen(options):
        found["records"] += run(experiment, dtype, options.time_limit, console)
    for table in tables(found):
        show(table.title, table.columns, table.rows)
    rich.print(f"[dim]{machine(found)}")
    if options.out:
        results.write(options.out, text(found))
        rich.print(f"[dim]Written to {options.out}")
    wrong = {record["note"] for record in found["records"] if record["status"] == "wrong"}
    for note in sorted(wrong):
        console.print(f"[red]Not timed, because its answer is wrong: {note}")
    return 1 if wrong else 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and readings")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="D", help="these d for every table")
    parser.add_argument("--only", nargs="+", choices=[e.table for e in EXPERIMENTS], help="these tables")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="default: %(default)s")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--time-limit", type=float, default=30.0, metavar="S", help="for each method at each size")
    parser.add_argument("--out", type=Path, help=f"default: {OUT.name} beside this file, if everything is run")
    options = parser.parse_args()
    if options.out is None and not (options.quick or options.sizes or options.only):
        options.out = OUT
    return options


def chosen(options: argparse.Namespace) -> Iterator[Experiment]:
    for experiment in EXPERIMENTS:
        if options.only and experiment.table not in options.only:
            continue
        if options.quick:
            experiment = replace(experiment, sizes=QUICK[experiment.table], rounds=5)
        yield replace(experiment, sizes=options.sizes) if options.sizes else experiment


def run(experiment: Experiment, dtype: torch.dtype, time_limit: float, console: Console) -> Iterator[dict[str, Any]]:
    """The records of one experiment: one for each method, size and way of calling it."""
    here, missing = ([m for m in experiment.methods if m.installed is installed] for installed in (True, False))
    for d in experiment.sizes:
        rows = experiment.rows(d)
        cases = [method.build(d, rows, dtype, "cpu", torch.Generator().manual_seed(d)) for method in here]
        with bar(f"{experiment.table}, d = {d}", console) as progress:
            timings = measure(
                cases, what=experiment.what, rounds=experiment.rounds, time_limit=time_limit, progress=progress
            )
        timings += [Timing(method.name, what, "not installed") for method in missing for what in experiment.what]
        for timing in timings:
            yield {"table": experiment.table, "d": d, "rows": rows, **record(timing)}


@contextmanager
def bar(title: str, console: Console) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar, drawn between readings only: rich's own thread would draw it during them."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as drawing:
        task = drawing.add_task(title)
        drawn = -math.inf

        def progress(done: int, total: int, label: str) -> None:
            nonlocal drawn
            due = time.monotonic() - drawn > 0.2
            drawn = time.monotonic() if due else drawn
            drawing.update(task, completed=done, total=total, description=f"{title}: {label}", refresh=due)

        yield progress


def record(timing: Timing) -> dict[str, Any]:
    """A timing as it stands in the file, in seconds for one call."""
    timed = bool(timing.readings)
    return {
        "name": timing.name,
        "what": timing.what,
        "status": timing.status,
        "note": timing.note,
        "calls": timing.calls,
        "median": timing.median if timed else None,
        "quantiles": {str(q): timing.quantile(q) for q in QUANTILES} if timed else None,
        "readings": [float(f"{seconds:.5g}") for seconds in timing.readings],
    }


def text(found: dict[str, Any]) -> str:
    """JSON with a line for each record."""
    head = json.dumps({**found, "records": []}, indent=1, ensure_ascii=False).removesuffix("]\n}")
    return head + "\n  " + ",\n  ".join(json.dumps(record) for record in found["records"]) + "\n ]\n}\n"


def show(title: str, columns: list[str], rows: list[list[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    rich.print(table)


if __name__ == "__main__":
    sys.exit(main())
