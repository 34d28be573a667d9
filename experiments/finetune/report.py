"""The table and the picture of the fine-tunings."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console

from experiments.finetune.methods import METHODS, OURS
from experiments.harness import Record, figures, tables
from experiments.harness.tables import Table

OF_PEFT = [name for name in METHODS if name not in OURS and name != "all weights"]


def write(
    first: Sequence[Record], found: Mapping[str, Sequence[Record]], steps: int, folder: Path, console: Console
) -> None:
    note = f"{tables.machine()}. Losses in nats a character, on test text; tokens a second while it trains."
    tables.write(folder / "tables.md", [table_of(first, found)], note, console)
    figures.save(folder, "finetune", partial(draw, first, found, steps))


def table_of(first: Sequence[Record], found: Mapping[str, Sequence[Record]]) -> Table:
    columns = [
        "adapter",
        "parameters",
        "rate",
        "new text ↓",
        "first text ↓",
        "tokens a second",
        "saved, MiB",
        "‖QᵀQ − I‖",
    ]
    before = [["before", "", "", f"{r['new']:.3f}", f"{r['first']:.3f}", "", "", ""] for r in first]
    rows = [row(method, records) for method, records in found.items()]
    return Table("A language model of Python's sources, fine-tuned on licences", columns, before + rows)


def row(method: str, records: Sequence[Record]) -> list[str]:
    losses = [tables.score(record[text] for record in records) for text in ("new", "first")]
    errors = [record["error"] for record in records if record["error"] is not None]
    return [
        f"**{method}**" if method in OURS else method,
        f"{records[0]['parameters']:,}",
        f"{records[0]['lr']:g}",
        *("–" if score is None else score.text(3) for score in losses),
        f"{statistics.median(record['tokens'] for record in records):,.0f}",
        f"{records[0]['saved']:.0f}",
        f"{max(errors):.0e}" if errors else "–",
    ]


def draw(first: Sequence[Record], found: Mapping[str, Sequence[Record]], steps: int) -> Figure:
    """The learning curves, and what each method has learned against what it has forgotten."""
    figure, axes = figures.panels(["Learning the new text", "Learned and forgotten"], 2, width=4.6, height=3.8)
    for i, (method, records) in enumerate(found.items()):
        style = figures.line_style(2 * i, method in OURS)
        figures.curve(axes[0], [record["curve"] for record in records], steps, method, skip=3, **style)
        points = [[record[text] for record in records] for text in ("first", "new")]
        marker = "o" if method in OURS else "x"
        axes[1].plot(*points, marker, color=style["color"], label=method)
    for record in first:
        axes[1].axvline(record["first"], color="0.6", linestyle=":", linewidth=1)
    axes[0].set(xlabel="step", ylabel="loss, nats a character")
    axes[1].set(xlabel="loss on the first text (dotted: before)", ylabel="loss on the new text")
    figures.legend(figure, axes)
    return figure
