"""The README's picture: what a step costs beside other orthogonal layers, and how networks learn beside plain ones.

It is drawn from what ``make bench`` and ``make study`` measured.

Run: make readme, or python benchmarks/headline.py --help
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fasth import _files
from fasth.tools.reproduce.figures import RC, file
from fasth.tools.reproduce.methods import COMPACT, LINEAR
from fasth.tools.reproduce.tables import by, number, ratio, select

sys.path.append(str(Path(__file__).parents[1]))
from experiments.harness.results import FILE, read
from experiments.study.figures import STYLES
from experiments.study.methods import PLAIN, SVD

HERE = Path(__file__).parent
SIZE = 512
# The methods that are drawn, and what a reader knows them by.
SHOWN = {
    LINEAR.name: "F.linear, a free weight",
    COMPACT.name: "fasth",
    "FastH": "FastH, the paper's algorithm",
    "torch cayley": "PyTorch, cayley",
    "nflows HouseholderSequence": "nflows",
    "torch-householder": "torch-householder",
    "torch householder": "PyTorch, householder",
    "torch matrix_exp": "PyTorch, matrix_exp",
    "geotorch": "geotorch",
}
TASKS = {"convolutions": "Convolutions, Fashion-MNIST", "transformer": "Transformer, text"}
FIRST = 1  # point of a curve that is drawn: at the start all fall from far above


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results.json", help="what bench.py wrote")
    parser.add_argument("--study", type=Path, default=HERE / "study" / FILE, help="what make study wrote")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "headline.png")
    options = parser.parse_args()
    measured = json.loads(options.results.read_text(encoding="utf-8"))
    _, records = read(options.study)
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(11, 3.4), layout="constrained")
        costs, *curves = figure.subplots(1, 1 + len(TASKS), width_ratios=[1.5, *(1 for _ in TASKS)])
        draw_costs(costs, measured)
        for panel, (task, title) in zip(curves, TASKS.items(), strict=True):
            draw_curves(panel, [r for r in records if r["experiment"] == "long" and r["task"] == task])
            panel.set_title(title)
        _files.write(options.out, file(figure, "png"))


def draw_costs(panel: Axes, measured: dict[str, Any]) -> None:
    found = by(select(measured, "peers", what="step"), "name", "d")
    multiples = [ratio(found[name, SIZE], found[LINEAR.name, SIZE], "median") for name in SHOWN]
    colors = ["#0072B2" if name == COMPACT.name else "#B0B0B0" for name in SHOWN]
    bars = panel.barh(list(SHOWN.values()), multiples, color=colors)
    panel.bar_label(bars, [f"{number(multiple)}×" for multiple in multiples], padding=3)
    panel.invert_yaxis()
    panel.set(xscale="log", xlim=(0.8, 2000), title=f"Training step, orthogonal {SIZE}×{SIZE}, CPU")
    panel.set_xlabel("time, as a multiple of F.linear's")
    panel.grid(axis="y", visible=False)


def draw_curves(panel: Axes, records: list[dict[str, Any]]) -> None:
    """The mean over seeds, and the range of them."""
    for method, label in ((PLAIN, "plain"), (SVD, "with SVDs")):
        own = [record for record in records if record["method"] == method]
        curves = list(zip(*(record["curve"] for record in own), strict=True))
        at = [(i + 0.5) * own[0]["steps"] / len(curves) for i in range(len(curves))]
        style = STYLES[method]
        means = [sum(values) / len(values) for values in curves]
        panel.plot(at[FIRST:], means[FIRST:], style.line, color=style.color, label=label)
        low, high = map(min, curves), map(max, curves)
        panel.fill_between(at[FIRST:], list(low)[FIRST:], list(high)[FIRST:], color=style.color, alpha=0.2, linewidth=0)
    panel.set(xlabel="step", ylabel="training loss")
    panel.legend()


if __name__ == "__main__":
    main()
