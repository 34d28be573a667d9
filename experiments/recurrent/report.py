"""What ``recurrent.py`` shows of its runs: tables, learning curves, and gradients through time."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from recurrent_models import METHODS, OURS, groups
from recurrent_tasks import RECALLED, TASKS, Task
from recurrent_training import Record, new_net, training_step
from rich.console import Console
from torch import Generator

import fasth
from fasth import files
from fasth.environment import describe
from fasth.reproduce.results import show
from fasth.reproduce.tables import Table, markdown
from fasth.timing import compare

Runs = dict[str, dict[str, list[Record]]]  # by task and method

YARDSTICK = "RNNSVD"  # its time is what all get in the column of equal time
SEEN = ("nn.RNN", "nn.LSTM", "RNNSVD")  # in the picture of gradients
STEPS_BEFORE_LOOKING = 300


def report(records: Sequence[Record], folder: Path, rounds: int, console: Console) -> None:
    """Tables, here and as Markdown, and pictures."""
    tasks = [task for task in TASKS if any(record["task"] == task for record in records)]
    runs: Runs = {task: {} for task in tasks}
    for task, method in itertools.product(tasks, METHODS):
        if found := [record for record in records if (record["task"], record["method"]) == (task, method)]:
            runs[task][method] = found
    costs = {task: step_times(TASKS[task], list(runs[task]), rounds, console) for task in tasks}
    tables = [table_of(task, runs[task], costs[task]) for task in tasks]
    for table in tables:
        show(table, console)
    machine = describe()
    made = (
        f"{machine['cpu']}, {machine['threads']} threads, torch {torch.__version__}; images: {records[0]['data']}. "
        "A step's time is the median of single calls, taken in turns."
    )
    files.write(folder / "tables.md", "\n\n".join([*map(markdown, tables), made]) + "\n")
    for against in ("steps", "seconds"):
        draw_curves(runs, costs if against == "seconds" else None, folder / f"curves-{against}.png")
    draw_gradients(folder / "gradients.png", console)
    console.print(f"{made}\nTables and pictures: {folder}", soft_wrap=True)


def step_times(task: Task, methods: Sequence[str], rounds: int, console: Console) -> dict[str, float]:
    """Seconds of a training step of each method. What they compute is verified by the tests, and by their learning."""
    console.print(f"Timing {task.name}")
    calls: dict[str, Callable[[], object]] = {}
    batch = task.batch(Generator().manual_seed(0))
    for method in methods:
        net = new_net(method, task)
        optimizer = torch.optim.Adam(groups(net, 1e-6))
        calls[method] = lambda net=net, optimizer=optimizer: training_step(net, task, batch, optimizer)
    found = compare(calls, device=torch.device("cpu"), rounds=rounds, min_time=0, time_limit=20)
    return {timing.name: timing.median for timing in found}


def table_of(task: str, runs: dict[str, list[Record]], costs: dict[str, float]) -> Table:
    rows, steps, unit = [], TASKS[task].steps, TASKS[task].unit
    for method, records in runs.items():
        cells = [f"**{method}**" if method in OURS else method, spread([r["score"] for r in records], unit)]
        cells += [f"{records[0]['lr']:g}", f"{1e3 * costs[method]:.1f}"]
        if YARDSTICK in runs:
            budget = steps * costs[YARDSTICK]
            cells.append(spread([score_after(record, budget / costs[method]) for record in records], unit))
        rows.append(cells)
    columns = ["net", f"test, {unit}", "rate", "step, ms"]
    columns += [f"after as long as {YARDSTICK} took, {unit}"] if YARDSTICK in runs else []
    return Table(f"{task}: {steps} steps of {TASKS[task].batch_size}", columns, rows)


def score_after(record: Record, steps: float) -> float | None:
    """That of the training batches around this step, or, where that is beyond the last, at the end of training."""
    scores: list[float | None] = record["scores"]
    return scores[min(len(scores) - 1, int(steps / record["steps"] * len(scores)))]


def spread(values: Sequence[float | None], unit: str) -> str:
    """The mean and the standard deviation, if no run diverged."""
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values):
        return "diverged"
    digits = 1 if unit.startswith("%") else 4
    return f"{statistics.fmean(numbers):.{digits}f}" + (
        f" ± {statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    )


def draw_curves(runs: Runs, costs: dict[str, dict[str, float]] | None, path: Path) -> None:
    """The score of training batches, the mean over seeds, against steps, or, with their costs, against seconds."""
    columns = min(4, len(runs))
    lines = math.ceil(len(runs) / columns)
    figure = Figure(figsize=(4.2 * columns + 2.4, 3.4 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for panel, (task, of_task) in zip(panels, runs.items(), strict=False):
        for method, records in of_task.items():
            scores = torch.tensor([[math.nan if s is None else s for s in record["scores"]] for record in records])
            curve = scores.mean(0).tolist()
            ends = torch.linspace(0, TASKS[task].steps, len(curve) + 1)[1:]
            x = (ends if costs is None else ends * costs[task][method]).tolist()
            style: Any = {"linewidth": 2.2} if method in OURS else {"linewidth": 1.2, "linestyle": "--"}
            panel.plot(x, curve, label=method, color=colormaps["tab20"](list(METHODS).index(method)), **style)
        panel.set(title=task, xlabel="step" if costs is None else "seconds", ylabel=TASKS[task].unit)
        panel.set_xscale("linear" if costs is None else "log")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[len(runs) :]:
        panel.set_axis_off()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(path, dpi=110)


def draw_gradients(path: Path, console: Console) -> None:
    """‖∂L/∂h_t‖ at the start and after some training, where L is the loss of the symbols that are to be recalled."""
    task = TASKS["copy, 100"]
    console.print(f"Training for the picture of gradients: {', '.join(SEEN)}")
    figure = Figure(figsize=(11, 4), layout="constrained")
    before, after = figure.subplots(1, 2, sharey=True)
    x, y = task.batch(Generator().manual_seed(0))
    for method in SEEN:
        net, generator = new_net(method, task), Generator().manual_seed(1)
        optimizer = torch.optim.Adam(groups(net, 1e-3))
        for panel in (before, after):
            recalled = fasth.hidden_gradients(net, lambda net=net: task.loss(net(x)[-RECALLED:], y[-RECALLED:]))
            recalled.plot(panel, label=method)
            for _ in range(STEPS_BEFORE_LOOKING if panel is before else 0):
                training_step(net, task, task.batch(generator), optimizer)
    before.set_title(f"{task.name}: at the start")
    after.set_title(f"after {STEPS_BEFORE_LOOKING} steps")
    after.set_ylabel("")
    for panel in (before, after):
        panel.set_ylim(bottom=1e-12)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
