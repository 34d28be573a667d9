"""The results of the flows: tables, learning curves and samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch import Generator

import fasth
from experiments.flow.grid import Best, Grid, best, written
from experiments.flow.models import IMAGE_MIXERS, MIXERS, OURS
from experiments.flow.training import (
    BATCH,
    DATA,
    SAMPLES,
    images,
    inverse_error,
    new_flow,
    sample_file,
    training_step,
)
from experiments.harness import Options, Record, WrongAnswer, figures, tables
from experiments.harness.tables import Table


def label(mixer: str) -> str:
    return f"fasth {mixer}" if mixer in OURS else mixer


def write(records: list[Record], grid: Grid, options: Options, folder: Path, console: Console) -> None:
    winners = {
        task: [one for mixer in options.mixers if (one := best(records, task=task, mixer=mixer))]
        for task in options.tasks
    }
    made = [
        table_of(task, found, step_times(found, options.rounds, console), records, grid)
        for task, found in winners.items()
    ]
    note = f"{tables.machine()}. Times are medians, taken in turns."
    tables.write(folder / "tables.md", made, note, console)
    figures.save(folder, "curves", partial(draw_curves, winners))
    if "images" in winners:
        figures.save(folder, "samples", partial(draw_samples, winners["images"], folder))


def step_times(winners: Sequence[Best], rounds: int, console: Console) -> dict[str, float]:
    """Seconds of a training step and of 64 samples, from each mixer's best start; verifies the inverse first."""
    calls: dict[str, Callable[[], object]] = {}
    for winner in winners:
        task, flow = DATA[winner.chosen["task"]](), new_flow(winner.chosen)
        console.print(f"Timing {winner.chosen['task']}, {winner.mixer}")
        x = task.batch(BATCH, Generator().manual_seed(0))
        flow(x, normalize=True)
        error = inverse_error(flow, task)
        if error is None or error > 1e-3:
            raise WrongAnswer(f"{winner.mixer}: the inverse should undo the flow; it is off by {error}")
        optimizer = torch.optim.Adam(fasth.param_groups(flow, lr=1e-6))
        calls[f"{winner.mixer} step"] = partial(training_step, flow, x, optimizer)
        calls[f"{winner.mixer} samples"] = partial(flow.sample, BATCH)
    return tables.step_times(calls, rounds)


def table_of(task: str, winners: Sequence[Best], seconds: dict[str, float], records: list[Record], grid: Grid) -> Table:
    starts = grid.starts[task] if len(grid.starts[task]) > 1 else ()
    columns = ["mixer", f"test, {DATA[task]().unit}", "start", "rate", *(f"{start}, one seed" for start in starts)]
    rows = []
    for winner in winners:
        mixer, chosen = winner.mixer, winner.chosen
        cells = [f"**{label(mixer)}**" if mixer in OURS else mixer, str(winner), chosen["start"], f"{chosen['lr']:g}"]
        best_of_starts = (best(records, task=task, mixer=mixer, start=start) for start in starts)
        cells += ["–" if one is None else written(one.chosen["test"]) for one in best_of_starts]
        errors = [record["inverse"] for record in winner.finals]
        cells.append("not finite" if None in errors else f"{max(errors):.0e}")
        rows.append([*cells, *(f"{1e3 * seconds[f'{mixer} {call}']:.1f}" for call in ("step", "samples"))])
    rates = ", ".join(f"{rate:g}" for rate in grid.rates[task])
    title = f"{DATA[task]().name}, {task}: {grid.steps[task]} steps of {BATCH}; rates: {rates}"
    return Table(title, [*columns, "largest inverse error", "step, ms", f"{BATCH} samples, ms"], rows)


def draw_curves(winners: dict[str, list[Best]]) -> Figure:
    """The training loss of each mixer at its best setting, the mean over seeds."""
    figure, panels = figures.panels(list(winners), len(winners), width=6, height=5)
    for panel, (task, found) in zip(panels, winners.items(), strict=True):
        for winner in found:
            style = figures.line_style([*MIXERS, *IMAGE_MIXERS].index(winner.mixer), winner.mixer in OURS)
            curves = [record["curve"] for record in winner.finals]
            figures.curve(panel, curves, winner.chosen["steps"], label(winner.mixer), skip=4, **style)
        panel.set(xlabel="step", ylabel=f"training loss, {DATA[task]().unit}")
    figures.legend(figure, panels)
    return figure


def draw_samples(winners: Sequence[Best], folder: Path) -> Figure:
    """A row of real images, and a row of samples for each mixer at its best setting."""
    rows = {"real": images().test[:SAMPLES]}
    for winner in winners:
        file = sample_file(winner.chosen, folder)
        if file.exists():
            rows[label(winner.mixer)] = torch.load(file)
    figure = Figure(figsize=(SAMPLES * 0.7 + 1.8, len(rows) * 0.72), layout="constrained")
    panels = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    for panel, (name, found) in zip(panels, rows.items(), strict=True):
        strip = torch.cat(list(found.squeeze(1)), -1).nan_to_num(0).clamp(-0.5, 0.5)
        panel.imshow(strip.numpy(), cmap="gray", vmin=-0.5, vmax=0.5)
        panel.set(xticks=[], yticks=[])
        panel.set_ylabel(name, rotation=0, ha="right", va="center")
        panel.grid(False)
    return figure
