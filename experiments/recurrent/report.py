"""The results of the recurrent nets: tables, learning curves, and gradients through time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch import Generator, Tensor, nn

import fasth
from experiments.harness import Record, figures, tables
from experiments.harness.tables import Table
from experiments.recurrent.models import METHODS, OURS, groups
from experiments.recurrent.tasks import RECALLED, TASKS, Task
from experiments.recurrent.training import new_net, training_step

Runs = dict[str, dict[str, list[Record]]]  # by task and method
Costs = dict[str, dict[str, float]]  # seconds of a step, by task and method

YARDSTICK = "RNNSVD"  # the column of equal time gives every method the time of this one
SEEN = ("nn.RNN", "nn.LSTM", "RNNSVD")  # in the picture of gradients
STEPS_BEFORE_LOOKING = 300


def write(records: Sequence[Record], folder: Path, rounds: int, console: Console) -> None:
    runs: Runs = {task: {} for task in TASKS if any(record["task"] == task for record in records)}
    for task, methods in runs.items():
        for method in METHODS:
            if found := [record for record in records if (record["task"], record["method"]) == (task, method)]:
                methods[method] = found
    costs = {task: step_times(TASKS[task], list(methods), rounds, console) for task, methods in runs.items()}
    made = [table_of(task, methods, costs[task]) for task, methods in runs.items()]
    images = records[0]["data"] if records else "none"
    times = "A step's time is the median of single calls, taken in turns."
    tables.write(folder / "tables.md", made, f"{tables.machine()}; images: {images}. {times}", console)
    if runs:
        figures.save(folder, "curves-steps", partial(draw_curves, runs))
        figures.save(folder, "curves-seconds", partial(draw_curves, runs, costs))
    console.print(f"Training for the picture of gradients: {', '.join(SEEN)}")
    figures.save(folder, "gradients", draw_gradients)


def step_times(task: Task, methods: Sequence[str], rounds: int, console: Console) -> dict[str, float]:
    console.print(f"Timing {task.name}")
    calls: dict[str, Callable[[], object]] = {}
    batch = task.batch(Generator().manual_seed(0))
    for method in methods:
        net = new_net(method, task)
        calls[method] = partial(training_step, net, task, batch, torch.optim.Adam(groups(net, 1e-6)))
    return tables.step_times(calls, rounds, time_limit=20)


def table_of(task: str, runs: dict[str, list[Record]], costs: dict[str, float]) -> Table:
    rows, steps, unit = [], TASKS[task].steps, TASKS[task].unit
    for method, records in runs.items():
        cells = [f"**{method}**" if method in OURS else method, score([r["score"] for r in records], unit)]
        cells += [f"{records[0]['lr']:g}", f"{1e3 * costs[method]:.1f}"]
        if YARDSTICK in runs:
            budget = steps * costs[YARDSTICK] / costs[method]
            cells.append(score([score_after(record, budget) for record in records], unit))
        rows.append(cells)
    columns = ["net", f"test, {unit}", "rate", "step, ms"]
    columns += [f"after as long as {YARDSTICK} took, {unit}"] if YARDSTICK in runs else []
    return Table(f"{task}: {steps} steps of {TASKS[task].batch_size}", columns, rows)


def score(values: Sequence[float | None], unit: str) -> str:
    found = tables.score(values)
    return found.text(1 if unit.startswith("%") else 4) if found else "–"


def score_after(record: Record, steps: float) -> float | None:
    """The score of the training batches around this step, or at the end of training if that comes before it."""
    scores: list[float | None] = record["scores"]
    return scores[min(len(scores) - 1, int(steps / record["steps"] * len(scores)))]


def draw_curves(runs: Runs, costs: Costs | None = None) -> Figure:
    """The score of training batches, the mean over seeds, against steps, or, with costs, against seconds."""
    figure, panels = figures.panels(list(runs), min(4, len(runs)), width=4.2, height=3.4)
    for panel, (task, methods) in zip(panels, runs.items(), strict=False):
        for method, records in methods.items():
            length = TASKS[task].steps * (costs[task][method] if costs else 1)
            style = figures.line_style(list(METHODS).index(method), method in OURS)
            figures.curve(panel, [record["scores"] for record in records], length, method, **style)
        panel.set(xlabel="seconds" if costs else "step", ylabel=TASKS[task].unit, xscale="log" if costs else "linear")
    figures.legend(figure, panels)
    return figure


def draw_gradients() -> Figure:
    """‖∂L/∂h_t‖ before and after some training, with L the loss of the symbols that have to be recalled."""
    task = TASKS["copy, 100"]
    figure = Figure(figsize=(11, 4), layout="constrained")
    before, after = figure.subplots(1, 2, sharey=True)
    x, y = task.batch(Generator().manual_seed(0))

    def recall_loss(net: nn.Module) -> Tensor:
        return task.loss(net(x)[-RECALLED:], y[-RECALLED:])

    for method in SEEN:
        net, generator = new_net(method, task), Generator().manual_seed(1)
        optimizer = torch.optim.Adam(groups(net, 1e-3))
        for panel in (before, after):
            fasth.hidden_gradients(net, partial(recall_loss, net)).plot(panel, label=method)
            for _ in range(STEPS_BEFORE_LOOKING if panel is before else 0):
                training_step(net, task, task.batch(generator), optimizer)
    before.set_title(f"{task.name}: at the start")
    before.set_ylim(bottom=1e-12)
    after.set_title(f"after {STEPS_BEFORE_LOOKING} steps")
    after.set_ylabel("")
    return figure
