"""Figures in the style of ``fasth reproduce``: panels, learning curves and a legend."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fasth import _files
from fasth.tools.reproduce.figures import RC, Style, file

__all__ = ["Style", "curve", "legend", "line_style", "panels", "save"]


def save(folder: Path, name: str, draw: Callable[[], Figure], endings: Sequence[str] = ("png",)) -> None:
    """Calls ``draw`` with the style set, and writes one file for each ending."""
    with matplotlib.rc_context(RC):
        figure = draw()
        for ending in endings:
            _files.write(folder / f"{name}.{ending}", file(figure, ending))


def panels(titles: Sequence[str], columns: int, width: float = 3.4, height: float = 3.1) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each title, and empty ones that fill the last row."""
    rows = -(-len(titles) // columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel, title in zip(axes, titles, strict=False):
        panel.set_title(title)
    for panel in axes[len(titles) :]:
        panel.set_axis_off()
    return figure, axes


def legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """One legend for all panels: in the last panel if that is empty, and else below."""
    handles, labels = axes[0].get_legend_handles_labels()
    if not axes[-1].axison:
        axes[-1].legend(handles, labels, loc="center")
    else:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4))


def line_style(i: int, ours: bool) -> dict[str, Any]:
    """The i-th of up to twenty lines: thick and solid for fasth, dashed for others."""
    style = {"linewidth": 2.2} if ours else {"linewidth": 1.2, "linestyle": "--"}
    return {"color": colormaps["tab20"](i), **style}


def curve(
    panel: Axes, curves: Sequence[Sequence[float | None]], length: float, label: str, skip: int = 0, **style: Any
) -> None:
    """The mean of learning curves over seeds, up to where one of them diverged, against steps or seconds.

    Args:
        length: the steps, or the seconds, of the whole training.
        skip: points at the beginning, which are not drawn: they would leave no room for the differences.
    """
    means = [math.nan if None in values else sum(values) / len(values) for values in zip(*curves, strict=True)]
    middles = [(i + 0.5) * length / len(means) for i in range(len(means))]
    panel.plot(middles[skip:], means[skip:], label=label, **style)
