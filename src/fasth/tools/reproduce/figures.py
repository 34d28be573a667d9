"""The figures, all in one style. Each method has a colour, a marker and a line, so that colour is not needed."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, NullFormatter, NullLocator

from fasth.tools.reproduce import tables
from fasth.tools.reproduce.methods import COMPACT, FULL, LINEAR, TRIANGULAR
from fasth.tools.reproduce.operations import OPERATIONS
from fasth.tools.reproduce.tables import OURS, by, ratio, select, unique
from fasth.tools.reproduce.tasks import Record


class Style(NamedTuple):
    color: str  # from Okabe and Ito's palette for colour-blind readers, and two more
    marker: str
    line: str = "-"


STYLES = {
    COMPACT.name: Style("#0072B2", "o"),
    "fasth": Style("#0072B2", "o"),
    TRIANGULAR.name: Style("#0072B2", "o"),
    FULL.name: Style("#56B4E9", "s"),
    "FastH": Style("#D55E00", "^"),
    "FastH++": Style("#E69F00", "v"),
    "sequential": Style("#009E73", "D"),
    "parallel": Style("#CC79A7", "P"),
    "exponential": Style("#6A3D9A", "X"),
    "Cayley": Style("#7F5F00", "*"),
    LINEAR.name: Style("#888888", ".", ":"),
    "applied": Style("#E69F00", "v", "--"),
    "materialised": Style("#009E73", "^", "--"),
    **{operation.standard_name: Style("#333333", "X", "--") for operation in OPERATIONS},
}
LABELS = {TRIANGULAR.name: "what fasth chooses", "FastH": "FastH (the paper's)"}

RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.labelcolor": "#222222",
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.5,
    "svg.fonttype": "path",
    "svg.hashsalt": "fasth",  # equal figures give equal files
}


@dataclass(frozen=True)
class Drawing:
    name: str  # the name of its files
    caption: str
    draw: Callable[[dict[str, Any]], Figure]
    experiments: tuple[str, ...]  # drawn if one of these has records


def drawn(results: dict[str, Any]) -> Iterator[tuple[Drawing, dict[str, bytes]]]:
    """Draws each figure that has records. Maps the endings png and svg to the contents of its files."""
    for drawing in DRAWINGS:
        if any(select(results, experiment) for experiment in drawing.experiments):
            with matplotlib.rc_context(RC):
                figure = drawing.draw(results)
                yield drawing, {ending: file(figure, ending) for ending in ("png", "svg")}


def file(figure: Figure, ending: str) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format=ending, dpi=160, metadata={"Date": None} if ending == "svg" else None)
    return file.getvalue()


def _figure(columns: int = 1, rows: int = 1, height: float = 3.9) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(6.6 if columns == 1 else 9.6, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.flat)


def _curve(axes: Axes, records: Sequence[Record], x: str = "d", name: str = "") -> None:
    """Mean times in ms with a band of one standard deviation. Hollow: stopped at the limit; cross: too slow."""
    timed = [r for r in records if r["mean"]]
    if not timed:
        return
    style = STYLES[timed[0]["name"]]
    at, mean = [r[x] for r in timed], [r["mean"] * 1e3 for r in timed]
    label = name or LABELS.get(timed[0]["name"], timed[0]["name"])
    axes.plot(at, mean, style.line, color=style.color, marker=style.marker, label=label, markevery=_every(timed))
    # On a log axis a band cannot reach below zero; it ends at the fastest reading.
    low = [max(r["mean"] - r["deviation"], min(r["readings"])) * 1e3 for r in timed]
    high = [(r["mean"] + r["deviation"]) * 1e3 for r in timed]
    axes.fill_between(at, low, high, color=style.color, alpha=0.16, linewidth=0)
    stopped = [(a, m) for a, m, r in zip(at, mean, timed, strict=True) if r["status"] == "stopped"]
    axes.plot(
        *zip(*stopped, strict=True) if stopped else ([], []),
        linestyle="none",
        marker=style.marker,
        color=style.color,
        markerfacecolor="white",
    )
    if any(r["status"] == "too slow" for r in records):
        axes.plot(at[-1:], mean[-1:], marker="x", color=style.color, markersize=11, markeredgewidth=1.8)


def _every(records: Sequence[Record]) -> int:
    """Puts a marker at each size, or at every sixth of the paper's whole grid."""
    return max(1, len(records) // 8)


def _sizes(axes: Axes, sizes: Sequence[float], label: str) -> None:
    """Makes a log axis with the measured sizes as ticks, as many as fit."""
    axes.set_xscale("log", base=2)
    shown, last = [], 0.0
    for size in sorted(set(sizes)):
        if size >= 1.25 * last:
            shown.append(size)
            last = size
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_major_formatter(FixedFormatter([f"{size:g}" for size in shown]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)


def _times(axes: Axes, label: str = "time of a step, ms") -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(label)


def _legend(axes: Axes, records: Sequence[Record], **options: Any) -> None:
    """Draws the legend of the curves, and of the marks that occur."""
    if any(r["status"] == "stopped" for r in records):
        axes.plot([], [], "o", color="#555555", markerfacecolor="white", label="hollow: stopped at the time limit")
    if any(r["status"] == "too slow" for r in records):
        axes.plot([], [], "x", color="#555555", markersize=8, label="× : too slow beyond")
    if axes.get_legend_handles_labels()[0]:  # empty if no answer was right
        axes.legend(**({"loc": "center left", "bbox_to_anchor": (1.01, 0.5)} | options))


def _curves(axes: Axes, records: Sequence[Record], x: str = "d", label: str = "d") -> None:
    for name in unique(records, "name"):
        _curve(axes, [r for r in records if r["name"] == name], x)
    _sizes(axes, unique(records, x), label)
    _times(axes)


def _running_time(results: dict[str, Any]) -> Figure:
    figure, (axes,) = _figure()
    records = select(results, "step")
    _curves(axes, records)
    axes.set_title("A gradient step with one orthogonal matrix, 32 rows")
    _legend(axes, records)
    return figure


def _relative_improvement(results: dict[str, Any]) -> Figure:
    figure, (axes,) = _figure()
    records = select(results, "step")
    found = by(records, "name", "d")
    sizes = unique(records, "d")
    for name in [n for n in unique(records, "name") if n not in (OURS, LINEAR.name)]:
        ratios = {d: ratio(found.get((name, d)), found.get((OURS, d))) for d in sizes}
        known = [d for d in sizes if not math.isnan(ratios[d])]
        if not known:
            continue
        style = STYLES[name]
        label = LABELS.get(name, name)
        every = max(1, len(known) // 8)
        axes.plot(known, [ratios[d] for d in known], marker=style.marker, color=style.color, label=label,
                  markevery=every)  # fmt: skip
    axes.axhline(1, color=STYLES[OURS].color, linewidth=1.2)
    axes.annotate(OURS, (1, 1), xycoords=("axes fraction", "data"), xytext=(3, 0), textcoords="offset points",
                  color=STYLES[OURS].color, va="center", fontsize=8.5)  # fmt: skip
    _sizes(axes, sizes, "d")
    _times(axes, f"times slower than {OURS}")
    axes.set_title(f"Time relative to {OURS}")
    _legend(axes, [], bbox_to_anchor=(1.01, 0.62))
    return figure


def _inversion(results: dict[str, Any]) -> Figure:
    figure, (axes,) = _figure()
    records = select(results, "inverse")
    _curves(axes, records)
    axes.set_title("Inverse, forward pass and gradients, 32 rows")
    _legend(axes, records)
    return figure


def _operations(results: dict[str, Any]) -> Figure:
    found = [(operation, select(results, operation.name.split()[0].lower())) for operation in OPERATIONS]
    found = [(operation, records) for operation, records in found if records]
    figure, panels = _figure(2, math.ceil(len(found) / 2), 3.1 * math.ceil(len(found) / 2))
    for axes in panels[len(found) :]:
        axes.remove()
    for axes, (operation, records) in zip(panels, found, strict=False):
        for name in ("sequential", "parallel", "FastH", operation.standard_name, "fasth"):
            _curve(axes, [r for r in records if r["name"] == name])
        _sizes(axes, unique(records, "d"), "d")
        _times(axes, "ms")
        axes.set_title(operation.name[0].upper() + operation.name[1:])
        _legend(axes, records, loc="upper left", bbox_to_anchor=None)
    return figure


def _block_size(results: dict[str, Any]) -> Figure:
    records = select(results, "block-size")
    sizes = unique(records, "d")
    figure, panels = _figure(min(len(sizes), 2), math.ceil(len(sizes) / 2), 3.9 * math.ceil(len(sizes) / 2))
    for axes in panels[len(sizes) :]:
        axes.remove()
    for axes, d in zip(panels, sizes, strict=False):
        own = [r for r in records if r["d"] == d]
        _curves(axes, own, "k", "block size k")
        axes.set_title(f"d = {d}, 32 rows")
        for name in unique(own, "name"):
            best = min((r for r in own if r["name"] == name and r["mean"]), key=lambda r: r["mean"], default=None)
            if best:
                axes.plot(best["k"], best["mean"] * 1e3, "o", markersize=13, markerfacecolor="none",
                          color=STYLES[name].color)  # fmt: skip
        axes.plot([], [], "o", markersize=9, markerfacecolor="none", color="#555555", label="the fastest k")
        _legend(axes, own, **({} if len(sizes) == 1 else {"loc": "upper right", "bbox_to_anchor": None}))
    return figure


def _rows(results: dict[str, Any]) -> Figure:
    records = select(results, "rows")
    sizes = unique(records, "d")
    figure, panels = _figure(min(len(sizes), 2), math.ceil(len(sizes) / 2), 3.9 * math.ceil(len(sizes) / 2))
    for axes in panels[len(sizes) :]:
        axes.remove()
    for axes, d in zip(panels, sizes, strict=False):
        own = [r for r in records if r["d"] == d]
        _curves(axes, own, "rows", "rows")
        axes.set_title(f"d = {d}, triangular reflectors")
        _legend(axes, own, loc="upper left", bbox_to_anchor=None)
    return figure


def _bars(axes: Axes, records: Sequence[Record], value: str, form: Callable[[float], str], scale: float = 1.0) -> None:
    """Draws horizontal bars with their values, the smallest on top; fasth's in its own colour."""
    ordered = sorted((r for r in records if r[value]), key=lambda r: -r[value])
    if not ordered:
        axes.text(0.5, 0.5, "nothing above zero was measured", ha="center", transform=axes.transAxes)
        return
    names = [r["name"] for r in ordered]
    colors = [STYLES[OURS].color if n.startswith("fasth") else "#B8B8B8" if n != LINEAR.name else "#777777"
              for n in names]  # fmt: skip
    drawn = axes.barh(names, [r[value] * scale for r in ordered], color=colors, height=0.68)
    axes.bar_label(drawn, [" " + form(r[value]) for r in ordered], fontsize=8.5, color="#222222")
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(low / 1.5, high * 3)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(False, axis="y")


def _memory(results: dict[str, Any]) -> Figure:
    records = select(results, "memory")
    d = max(unique(records, "d"))
    figure, (axes,) = _figure()
    _bars(axes, [r for r in records if r["d"] == d], "bytes", tables.megabytes, 1e-6)
    axes.set_title(f"Peak memory of a gradient step, d = {d}, 32 rows")
    axes.set_xlabel("MB on top of the input, the parameters and the gradient of the output")
    return figure


def _peers(results: dict[str, Any]) -> Figure:
    records = select(results, "peers")
    sizes = unique(records, "d")
    shown = sizes if len(sizes) <= 2 else [sizes[0], sizes[-1]]
    figure, panels = _figure(len(shown))
    for axes, d in zip(panels, shown, strict=True):
        _bars(axes, [r for r in records if r["d"] == d], "mean", tables.seconds, 1e3)
        axes.set_title(f"d = {d}, 32 rows")
        axes.set_xlabel("time of a step, ms")
    return figure


_BAND = "Mean of the repetitions and a band of one standard deviation."

DRAWINGS = [
    Drawing("figure-1", f"Figure 1: time of matrix inversion. {_BAND}", _inversion, ("inverse",)),
    Drawing("figure-3a", f"Figure 3a: running time. {_BAND}", _running_time, ("step",)),
    Drawing(
        "figure-3b",
        f"Figure 3b: relative improvement, the mean time of each method over that of {OURS}.",
        _relative_improvement,
        ("step",),
    ),
    Drawing(
        "figure-4",
        "Figure 4: the matrix operations. Dashed: the standard methods of Table 1 on a dense matrix. "
        f"Solid: by the factors. {_BAND}",
        _operations,
        ("inverse", "determinant", "exponential", "cayley"),
    ),
    Drawing("block-size", f"Section 3.3: time against the block size k. {_BAND}", _block_size, ("block-size",)),
    Drawing(
        "rows", f"Few rows are multiplied by the reflections, for many Q is formed once. {_BAND}", _rows, ("rows",)
    ),
    Drawing("memory", "Peak memory: by the operating system, or by torch on a GPU.", _memory, ("memory",)),
    Drawing("peers", "Other libraries, each as its documentation says to use it. Mean time.", _peers, ("peers",)),
]
