"""Runs experiments task by task, stores the results after each task, and resumes an interrupted run."""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fasth import _files
from fasth.tools.reproduce.experiments import Experiment
from fasth.tools.reproduce.tasks import Settings, Task

FILE = "results.json"
_COLUMNS = ["experiment", "name", "d", "rows", "k", "what", "status", "repetition", "seconds"]
# The settings and the environment must be equal for results to be compared in one table.
_COMPARABLE = ("versions", "core", "threads", "cpu", "cores", "device")


class OtherRun(ValueError):
    """The folder has results of another machine, or with other settings."""


def run(
    experiments: Sequence[Experiment],
    settings: Settings,
    environment: dict[str, Any],
    path: Path | None,
    console: Console,
) -> dict[str, Any]:
    """Runs experiments. The result has "environment", "settings" and "records", with the records already in the file.

    Args:
        path: the file where results are stored after each task. None keeps them in memory only.
    """
    found: dict[str, Any] = {"environment": environment, "settings": vars(settings), "records": []}
    if path is not None and path.exists():
        found = _continued(path, found)
    done = {(record["experiment"], record["task"]) for record in found["records"]}
    tasks = [(experiment, task) for experiment in experiments for task in experiment.tasks]
    left = [(experiment, task) for experiment, task in tasks if (experiment.name, task.label) not in done]
    with _bar([task for _, task in left], console) as start:
        for experiment, task in left:
            progress = start(f"{experiment.name}, {task.label}")
            before = [record for record in found["records"] if record["experiment"] == experiment.name]
            made = list(task.run(settings, before, progress))
            found["records"] += [{"experiment": experiment.name, "task": task.label, **record} for record in made]
            if path is not None:
                _files.write(path, text(found))
    order = {(experiment.name, task.label): i for i, (experiment, task) in enumerate(tasks)}
    found["records"].sort(key=lambda record: order.get((record["experiment"], record["task"]), -1))
    return found


def _continued(path: Path, new: dict[str, Any]) -> dict[str, Any]:
    """Returns the results in the file, if they have the same settings and environment as ``new``."""
    try:
        old: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        pairs = [(f"{name}", old["settings"][name], value) for name, value in new["settings"].items()]
        pairs += [(name, old["environment"][name], new["environment"][name]) for name in _COMPARABLE]
        old["records"]
    except (ValueError, KeyError, TypeError) as error:
        raise OtherRun(f"{path} should hold the results of a run; it cannot be read: {error!r}") from None
    differences = [f"{name} was {then}, now {now}" for name, then, now in pairs if then != now]
    if differences:
        raise OtherRun(f"{path} was measured otherwise: {'; '.join(differences)}")
    return old


def text(found: dict[str, Any]) -> str:
    """JSON with a line for each record."""
    head = json.dumps({**found, "records": []}, indent=1, ensure_ascii=False).removesuffix("]\n}")
    lines = ",\n  ".join(json.dumps(record, ensure_ascii=False) for record in found["records"])
    return f"{head}\n  {lines}\n ]\n}}\n"


def readings(found: dict[str, Any]) -> str:
    """CSV with a line for each repetition of each timing."""
    file = io.StringIO()
    table = csv.DictWriter(file, _COLUMNS, extrasaction="ignore", lineterminator="\n")
    table.writeheader()
    for record in found["records"]:
        for i, seconds in enumerate(record.get("readings", ())):
            table.writerow({**record, "repetition": i, "seconds": seconds})
    return file.getvalue()


@contextmanager
def _bar(tasks: Sequence[Task], console: Console) -> Iterator[Callable[[str], Callable[[int, int, str], None]]]:
    """Shows a progress bar with the time left. It is drawn between readings: rich's own thread would disturb them."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(elapsed_when_finished=False),
    )
    weights = iter([task.weight for task in tasks])
    with Progress(*columns, console=console, transient=True, auto_refresh=False, speed_estimate_period=math.inf) as bar:
        all_of_it = bar.add_task("", total=sum(task.weight for task in tasks))
        finished, weight, drawn = 0.0, 0.0, -math.inf

        def start(title: str) -> Callable[[int, int, str], None]:
            nonlocal finished, weight
            finished, weight = finished + weight, next(weights)

            def progress(turn: int, turns: int, label: str) -> None:
                nonlocal drawn
                due = time.monotonic() - drawn > 0.2
                drawn = time.monotonic() if due else drawn
                completed = finished + weight * turn / turns
                bar.update(all_of_it, completed=completed, description=f"{title}: {label}", refresh=due)

            return progress

        yield start
