"""The results of the study as figures. Bands are one standard deviation over seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.harness import Record
from experiments.harness.figures import Style, curve, legend, panels, save
from experiments.harness.tables import Score
from experiments.study.grid import FIXED_RATE, PEERS_WIDTH, STARTS
from experiments.study.methods import ONE_RATE, ORTHOGONAL, PLAIN, SVD
from experiments.study.tables import Study, best, by_rate, cut_score, mean, with_factor
from experiments.study.tasks import DEEP, MLP, Task
from experiments.study.training import CUTS

STYLES = {
    PLAIN: Style("#D55E00", "s", "--"),
    SVD: Style("#0072B2", "o"),
    ONE_RATE: Style("#56B4E9", "v", ":"),
    ORTHOGONAL: Style("#009E73", "^", "-."),
    "plain, orthogonal start": Style("#E69F00", "D", "--"),
    "SVD, σ = 1": Style("#0072B2", "o"),
    "SVD, linear": Style("#56B4E9", "v", ":"),
    "fasth": Style("#0072B2", "o"),
    "torch, matrix_exp": Style("#CC79A7", "P", "--"),
    "torch, cayley": Style("#E69F00", "D", "--"),
    "torch, householder": Style("#D55E00", "s", "--"),
    "geotorch": Style("#7F5F00", "X", ":"),
}
WIDTHS = ("#440154", "#31688E", "#35B779", "#B5A100", "#D55E00")


def draw(study: Study, folder: Path) -> None:
    """Draws each figure that there are results for."""
    for name, (part, function) in FIGURES.items():
        if study.records(part):
            save(folder, name, partial(function, study), ("png", "svg"))


def _line(axes: Axes, points: dict[float, Score | None], style: Style, label: str) -> None:
    """Means with a band, without the points that diverged."""
    found = {x: value for x, value in points.items() if value and not value.diverged}
    means, spreads = [value.mean for value in found.values()], [value.spread for value in found.values()]
    axes.plot(list(found), means, style.line, color=style.color, marker=style.marker, label=label)
    low, high = ([m + sign * s for m, s in zip(means, spreads, strict=True)] for sign in (-1, 1))
    axes.fill_between(list(found), low, high, color=style.color, alpha=0.15, linewidth=0)


def _axis(task: Task) -> str:
    return "test accuracy, %" if task.higher_is_better else "held-out nats, lower is better"


def sweep(study: Study) -> Figure:
    tasks = [task for task in study.grid.tasks if study.records("sweep", task=task.name)]
    figure, axes = panels([task.name for task in tasks], 3)
    for task, panel in zip(tasks, axes, strict=False):
        for method in (PLAIN, SVD, ONE_RATE, ORTHOGONAL):
            points = by_rate(study.records("sweep", task=task.name, method=method))
            _line(panel, points, STYLES[method], _with_rule(method))
        panel.set(xscale="log", xlabel="learning rate", ylabel=_axis(task))
        _without_the_worst([panel], task)
    legend(figure, axes)
    return figure


def _with_rule(method: str) -> str:
    return "SVD, param_groups" if method == SVD else method


def _without_the_worst(panels: Sequence[Axes], task: Task) -> None:
    """Limits the axes to the better three quarters: the rest would leave no room for the differences."""
    lines = [line for panel in panels for line in panel.get_lines()]
    values = sorted(float(y) for line in lines for y in np.asarray(line.get_ydata()))
    good = values[len(values) // 4 :] if task.higher_is_better else values[: -(len(values) // 4) or None]
    if good and good[0] < good[-1]:
        margin = 0.08 * (good[-1] - good[0])
        for panel in panels:
            panel.set_ylim(good[0] - margin, good[-1] + margin)


def curves(study: Study) -> Figure:
    tasks = [task for task in study.grid.tasks if study.records("sweep", task=task.name)]
    figure, axes = panels([task.name for task in tasks], 3)
    for task, panel in zip(tasks, axes, strict=False):
        for method in (PLAIN, SVD, ONE_RATE):
            records = study.records("sweep", task=task.name, method=method, lr=FIXED_RATE)
            _curve(panel, records, STYLES[method], _with_rule(method))
        panel.set(xlabel="step", ylabel="training loss")
    legend(figure, axes)
    return figure


def _curve(panel: Axes, records: Sequence[Record], style: Style, label: str, seconds: float = 1.0) -> None:
    """The loss against steps, or against time, given the seconds of a step."""
    if records:
        length = records[0]["steps"] * seconds
        losses = [record["curve"] for record in records]
        curve(panel, losses, length, label, skip=2, linestyle=style.line, color=style.color)


def widths(study: Study) -> Figure:
    methods = (PLAIN, SVD, ORTHOGONAL)
    figure, axes = panels([_with_rule(method) for method in methods], 3)
    for method, panel in zip(methods, axes, strict=True):
        for width, color in zip(study.grid.widths, WIDTHS, strict=False):
            _line(
                panel, by_rate(study.records("widths", width=width, method=method)), Style(color, "o"), f"width {width}"
            )
        panel.set(xscale="log", xlabel="learning rate", ylabel=_axis(MLP))
    _without_the_worst(axes, MLP)
    legend(figure, axes)
    return figure


def factors(study: Study) -> Figure:
    tasks = [task for task in study.grid.tasks if study.records("factors", task=task.name)]
    figure, axes = panels([task.name for task in tasks], 3)
    looks = {"sigma": ("rate of σ", STYLES[SVD]), "reflectors": ("rate of the reflectors", STYLES[ORTHOGONAL])}
    for task, panel in zip(tasks, axes, strict=False):
        for changed, (label, style) in looks.items():
            records = study.records("factors", task=task.name, method=SVD, optimizer="Adam")
            points = {factor: mean(with_factor(records, changed, factor)) for factor in study.grid.factors}
            _line(panel, points, style, label)
        panel.set_xscale("log", base=2)
        panel.set(xlabel="times the rule's rate", ylabel=_axis(task))
    legend(figure, axes)
    return figure


def starts(study: Study) -> Figure:
    kinds = {name: [task for task in DEEP if task.name.endswith(name)] for name in ("ReLU", "tanh")}
    figure, axes = panels([f"deep nets without norms, {name}" for name in kinds], 2)
    for tasks, panel in zip(kinds.values(), axes, strict=True):
        for method in STARTS:
            found = {
                int(task.name.split()[0]): best(task, study.records("starts", task=task.name, method=method))
                for task in tasks
            }
            points = {float(layers): one and one[1] for layers, one in found.items()}
            _line(panel, points, STYLES[method], method)
        panel.set(xlabel="hidden layers", ylabel=_axis(MLP))
    legend(figure, axes)
    return figure


def low_rank(study: Study) -> Figure:
    figure, axes = panels(["cut", "cut, and a tenth more training"], 2, height=3.6)
    plain = study.records("low rank", method=PLAIN)
    lines = {
        "plain": (plain, STYLES[PLAIN]),
        "SVD": (study.records("low rank", method=SVD, penalty=0.0), STYLES[ONE_RATE]),
    }
    for penalty, color in zip(study.grid.penalties, ("#A6CEE3", "#56B4E9", "#0072B2"), strict=False):
        lines[f"SVD with penalty {penalty:g}"] = (study.records("low rank", penalty=penalty), Style(color, "o"))
    thin = [records for rank in study.grid.ranks if (records := study.records("low rank", rank=rank))]
    for panel, value in zip(axes, ("score", "trained on"), strict=True):
        for label, (records, style) in lines.items():
            if records:
                _line(panel, {100 * part: cut_score(records, part, value) for part in CUTS}, style, label)
        if plain:
            whole = mean(plain)
            panel.axhline(whole.mean if whole else 0, color="#888888", linestyle=":", label="plain, whole")
            sizes = [100 * records[0]["parameters"] / plain[0]["parameters"] for records in thin]
            _line(panel, dict(zip(sizes, map(mean, thin), strict=True)), STYLES[ORTHOGONAL], "thin from the start")
        panel.set(xlabel="parameters, % of the dense network's", ylabel=_axis(MLP))
    legend(figure, axes)
    return figure


def peers(study: Study) -> Figure:
    figure, axes = panels(["against steps", "against time"], 2)
    for method in study.grid.peers:
        records = study.records("peers", method=method)
        found = best(MLP, records)
        if found:
            at_best = [record for record in records if record["lr"] == found[0]]
            for panel, seconds in ((axes[0], 1.0), (axes[1], study.ms[MLP.name, PEERS_WIDTH, method] / 1e3)):
                _curve(panel, at_best, STYLES[method], method, seconds)
    axes[0].set(xlabel="step", ylabel="training loss")
    axes[1].set(xlabel="seconds", ylabel="training loss", xscale="log")
    legend(figure, axes)
    return figure


# Maps each figure's name to the part of the study that it shows.
FIGURES: dict[str, tuple[str, Callable[[Study], Figure]]] = {
    "sweep": ("sweep", sweep),
    "curves": ("sweep", curves),
    "widths": ("widths", widths),
    "factors": ("factors", factors),
    "starts": ("starts", starts),
    "low-rank": ("low rank", low_rank),
    "peers": ("peers", peers),
}
