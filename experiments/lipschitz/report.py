"""The results of the 1-Lipschitz networks: a table for each set of images, and the picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.console import Console

import fasth
from experiments.harness import Record, figures, tables
from experiments.harness.tables import Table
from experiments.lipschitz.networks import METHODS, OURS
from experiments.lipschitz.training import ATTACKED, BATCH, GRID, RADII, loss_of, new_network, task, training_step

NAMES = ("36/255", "72/255", "108/255", "1")


def label(method: str) -> str:
    return f"fasth {method}" if method in OURS else method


def write(records: Sequence[Record], steps: int, rounds: int, folder: Path, console: Console) -> None:
    images = list(dict.fromkeys(record["data"] for record in records))
    made = [table_of(name, [r for r in records if r["data"] == name], steps, rounds, console) for name in images]
    note = (
        f"{tables.machine()}. Percent of test images, mean ± standard deviation over seeds; attacked: the first "
        f"{ATTACKED}. A step's time is the median of single calls, taken in turns."
    )
    tables.write(folder / "tables.md", made, note, console)
    if records:
        figures.save(folder, "certified", partial(draw, records, images))


def table_of(images: str, records: Sequence[Record], steps: int, rounds: int, console: Console) -> Table:
    methods = [method for method in METHODS if any(record["method"] == method for record in records)]
    seconds = step_times(images, methods, rounds, console)
    rows = []
    for method in methods:
        own = [record for record in records if record["method"] == method]
        constant = max(record["constant"] or float("inf") for record in own)
        row = [f"**{label(method)}**" if method in OURS else method, percent([record["clean"] for record in own])]
        row += [percent([record["certified"][i] for record in own]) for i in range(len(RADII))]
        row += [percent([record["attacked"][i] for record in own]) for i in range(len(RADII))]
        rows.append([*row, f"{constant:.3g}", f"{own[0]['lr']:g}", f"{1e3 * seconds[method]:.1f}"])
    columns = ["layers", "clean", *(f"certified, {name}" for name in NAMES), *(f"attacked, {name}" for name in NAMES)]
    title = f"{images}: {steps} steps of {BATCH}"
    return Table(title, [*columns, "bound before the last layer", "rate", "step, ms"], rows)


def percent(values: Sequence[float | None]) -> str:
    found = tables.score(None if value is None else 100 * value for value in values)
    return "–" if found is None else found.text(1)


def step_times(images: str, methods: Sequence[str], rounds: int, console: Console) -> dict[str, float]:
    console.print(f"Timing {images}")
    x, y = (part[:BATCH] for part in task(images).training)
    calls: dict[str, Callable[[], object]] = {}
    for method in methods:
        net = new_network({"data": images, "method": method, "seed": 0})
        optimizer = torch.optim.Adam(fasth.param_groups(net, lr=1e-6, optimizer=torch.optim.Adam))
        calls[method] = partial(training_step, net, loss_of(method), x, y, optimizer)
    return tables.step_times(calls, rounds, time_limit=20)


def draw(records: Sequence[Record], images: Sequence[str]) -> Figure:
    """Accuracy against the radius: certified as lines, under the attack as points; the mean over seeds."""
    figure, panels = figures.panels(list(images), len(images), width=5, height=4)
    for panel, name in zip(panels, images, strict=False):
        for i, method in enumerate(METHODS):
            own = [r for r in records if r["data"] == name and r["method"] == method and r["grid"]]
            if not own:
                continue
            style = figures.line_style(2 * i, method in OURS)
            mean = [100 * sum(values) / len(own) for values in zip(*(record["grid"] for record in own), strict=True)]
            panel.plot(GRID, mean, label=label(method), **style)
            points = [100 * sum(values) / len(own) for values in zip(*(r["attacked"] for r in own), strict=True)]
            panel.plot(RADII, points, linestyle="", marker="x", color=style["color"])
        panel.set(xlabel="radius (lines: certified, ×: attacked)", ylabel="accuracy, %", ylim=(0, 100))
    figures.legend(figure, panels)
    return figure
