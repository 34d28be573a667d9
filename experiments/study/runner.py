"""Makes the runs, several at a time, and writes each down as it ends: the same command goes on where it stopped."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Generator

from fasth import files
from fasth.reproduce.pool import in_parallel
from fasth.reproduce.study import experiments, training
from fasth.reproduce.study.methods import PLAIN, installed
from fasth.reproduce.study.tasks import Task
from fasth.reproduce.study.training import Run

Record = dict[str, Any]

FILE = "results.jsonl"
ROUNDS = 60  # of timed steps
# What a run found; all else in its record is its settings.
FOUND = ("seconds", "parameters", "curve", "score", "cut", "ms")


class OtherStudy(ValueError):
    """The folder holds results that were made otherwise."""


class Results:
    """The records of a folder: one line of JSON each, after a first line about the machine."""

    def __init__(self, path: Path, environment: Record) -> None:
        self.path, self.environment = path, environment
        self.records: list[Record] = []
        if path.exists():
            self._read()
        self.done = {key(record) for record in self.records}
        self._is_new = True  # nothing is written before there is something to add

    def _read(self) -> None:
        try:
            # A line without its end was cut off, by a power failure or the like.
            lines = [line for line in self.path.read_text(encoding="utf-8").splitlines(True) if line.endswith("\n")]
            first, *self.records = map(json.loads, lines)
            different = [name for name in ("versions", "images", "rates") if first[name] != self.environment[name]]
        except (ValueError, KeyError, TypeError) as error:
            raise OtherStudy(f"{self.path} should hold the results of a study; it cannot be read: {error!r}") from None
        for name in different:
            raise OtherStudy(f"{self.path} was made otherwise: {name} was {first[name]}, now {self.environment[name]}")
        self.environment = first

    def add(self, record: Record) -> None:
        if self._is_new:
            files.write(self.path, "".join(map(_line, (self.environment, *self.records))))  # without what was cut off
            self._is_new = False
        self.records.append(record)
        self.done.add(key(record))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(record))

    def has(self, run: Run) -> bool:
        return key(run) in self.done


def _line(record: Record) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def key(run: Run) -> str:
    """Two experiments may ask for the same run; it is made once."""
    settings = {name: value for name, value in run.items() if name not in (*FOUND, "experiment")}
    return json.dumps(settings, sort_keys=True)


def run(grid: experiments.Grid, only: Sequence[str], results: Results, workers: int, console: Console) -> None:
    grid = replace(grid, peers=[method for method in grid.peers if installed(method)])
    costs = measured_costs(grid, results, console)
    runs: dict[str, Run] = {}
    for one in experiments.runs(grid, costs, only):
        if not results.has(one):
            runs.setdefault(key(one), one)
    calls = [(one,) for one in runs.values()]
    for (one,), found in in_parallel(training.train, calls, workers, console, lambda call, _: _label(*call)):
        results.add({**one, **found})


def _label(one: Run) -> str:
    return f"{one['task']}, {one['method']}, {one['optimizer']} at {one['lr']:g}"


def measured_costs(grid: experiments.Grid, results: Results, console: Console) -> experiments.Costs:
    costs: experiments.Costs = {}
    for task, width, methods in experiments.timed(grid):
        name = {"experiment": "cost", "task": task.name, "width": width}
        if not all(results.has({**name, "method": method}) for method in methods):
            console.print(f"Timing a step: {task.name}, {width} wide")
            for method, seconds in _step_times(task, width, methods).items():
                record = {**name, "method": method, "ms": round(1e3 * seconds, 4)}
                if not results.has(record):
                    results.add(record)
        times = {record["method"]: record["ms"] for record in results.records if name.items() <= record.items()}
        if width == task.width:
            costs |= {(task.name, method): times[method] / times[PLAIN] for method in methods}
    return costs


def _step_times(task: Task, width: int, methods: Sequence[str]) -> dict[str, float]:
    """Medians of single training steps, taken in turns."""
    contenders = {}
    for method in methods:
        run = {"method": method, "optimizer": "Adam", "lr": experiments.FIXED_RATE}
        torch.manual_seed(0)
        model = training.converted(task.network(width), run, task)
        contenders[method] = (model, training.optimizer_of(model, run))
    readings: dict[str, list[float]] = {method: [] for method in methods}
    generator = Generator().manual_seed(0)
    for i in range(ROUNDS + 3):
        batch = task.batch(generator)
        for method, (model, optimizer) in contenders.items():
            start = time.perf_counter()
            training.step(model, task, batch, optimizer)
            if i >= 3:  # the first steps make the optimizer's state
                readings[method].append(time.perf_counter() - start)
    return {method: statistics.median(times) for method, times in readings.items()}
