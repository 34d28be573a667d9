"""Runs ``fasth reproduce``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table

from fasth import _files
from fasth.tools import device
from fasth.tools.reproduce import report, runner, tables
from fasth.tools.reproduce.experiments import FULL_GRID, QUICK, experiments
from fasth.tools.reproduce.tasks import Settings
from fasth.tools.reproduce.timing import environment


def run(options: argparse.Namespace) -> int:
    """Measures, writes the results, and returns 0; 1 if an answer was wrong; 2 for invalid options."""
    console = Console(stderr=True)
    try:
        device.require(options.device)
        _check_positive(options)
    except ValueError as error:
        return _refuse(str(error))
    if options.threads:
        torch.set_num_threads(options.threads)
    grid = FULL_GRID if options.full else QUICK
    grid = grid.at(options.sizes) if options.sizes else grid
    grid = replace(grid, rounds=options.repetitions or grid.rounds, time_limit=options.time_limit or grid.time_limit)
    chosen = [e for e in experiments(grid) if not options.only or e.name in options.only]
    settings = Settings(options.dtype, options.device, grid.rounds, grid.time_limit)
    path = options.out / runner.FILE
    if options.again and path.exists():
        os.unlink(path)
    try:
        found = runner.run(chosen, settings, environment(options.device), path, console)
    except runner.OtherRun as error:
        return _refuse(f"{error}. Take another --out, or --again to replace it")
    except KeyboardInterrupt:
        console.print(f"Interrupted. What is measured is in {path}; the same command goes on from there.")
        return 130
    _files.write(path, runner.text(found))
    written = report.write(found, options.out, command(options))
    headlines = tables.headlines(found)
    if headlines.rows:
        show(headlines)
    console.print(f"Written to {options.out}: {len(written) + 1} files. Open {options.out / 'report.html'}")
    for fault in tables.faults(found):
        console.print(fault, style="red", markup=False)
    if options.device != "cpu":
        console.print(f"To send these results back, send {path}")
    return 1 if tables.any_wrong(found) else 0


def command(options: argparse.Namespace) -> str:
    """Returns the command line that repeats a run."""
    words = ["fasth", "reproduce", "--full" if options.full else "--quick"]
    words += ["--device", options.device, "--dtype", options.dtype, "--threads", str(torch.get_num_threads())]
    for name in ("only", "sizes", "repetitions", "time_limit"):
        value = getattr(options, name)
        if value:
            words += [f"--{name.replace('_', '-')}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    return shlex.join(words)


def _check_positive(options: argparse.Namespace) -> None:
    for name in ("threads", "repetitions", "time_limit", "sizes"):
        value = getattr(options, name)
        if value is not None and min(value if isinstance(value, list) else [value]) <= 0:
            raise ValueError(f"--{name.replace('_', '-')} should be positive; got {value}")


def _refuse(reason: str) -> int:
    print(f"fasth: {reason}", file=sys.stderr)
    return 2


def show(table: tables.Table) -> None:
    """Prints a table."""
    shown = Table(title=table.title, title_justify="left", caption=table.note, caption_justify="left")
    for i, column in enumerate(table.columns):
        shown.add_column(column, justify="right" if i else "left")
    for row in table.rows:
        shown.add_row(*row)
    Console().print(shown)
