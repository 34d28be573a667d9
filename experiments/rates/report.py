"""The results as tables and one picture: what chose the rule, and how it was judged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from matplotlib.figure import Figure
from rich.console import Console

from experiments.harness import Options, Record, Results, figures, tables
from experiments.harness.figures import Style
from experiments.harness.tables import Score, Table, score
from experiments.rates import equal_time, grid
from experiments.rates.tasks import CHOOSING, JUDGING
from experiments.rates.training import ANGLES, GROUPS
from experiments.rates.ways import ATTENTION, PLAIN
from experiments.study.tasks import Task
from fasth.tools.environment import describe

STYLES = {PLAIN: Style("#D55E00", "s", "--"), GROUPS: Style("#0072B2", "o"), ANGLES: Style("#009E73", "^", "-.")}


def report(options: Options, results: Results, console: Console) -> None:
    folder = results.path.parent
    judged = [record for record in results.records if record["part"] == "judge"]
    made = {
        "choosing": chosen(results, options.quick),
        "low": at_the_low_rate(judged),
        "best": at_the_best_rate(judged),
        "thrice": at_three_times_the_best(judged),
        "growth": growth(judged),
        "longer": longer(results.records),
        "kin": kin(results.records),
        "time": equal_time.table(results, options.quick),
    }
    machine = f"{describe()['cpu']}, one thread for each run, torch {torch.__version__}"
    made_by = f"Made by `make rates` on: {machine}; images: {results.header['images']}."
    for name, table in made.items():
        if table.rows:
            tables.write(folder / f"{name}.md", [table], made_by if name == "growth" else "", console)
    if judged:
        figures.save(folder, "judging", partial(draw, judged))


def chosen(results: Results, quick: bool) -> Table:
    """A line for each variant; a cell has the scores at the three rates."""
    found = results.finished(grid.choosing(quick))
    rows = []
    for name, settings in grid.VARIANTS.items():
        mine = [r for r in found if grid.variant_of(r) == settings]
        cells = [[r for r in mine if r["task"] == task.name] for task in CHOOSING]
        if mine:
            rows.append(
                [name, *(" / ".join(_scores_by_rate(task, c)) for task, c in zip(CHOOSING, cells, strict=True))]
            )
    columns = ["rule", *(f"{task.name}, {task.unit}" for task in CHOOSING)]
    rates = " / ".join(f"{lr:g}" for lr in (grid.LOW, grid.MIDDLE, grid.HIGH))
    return Table(f"The tasks that choose, at {rates}, one seed; lower is better", columns, rows)


def _scores_by_rate(task: Task, records: Sequence[Record]) -> list[str]:
    by_rate = {r["lr"]: r["score"] for r in records}
    return [_text(task, score([by_rate[lr]])) for lr in sorted(by_rate)]


def at_the_low_rate(judged: Sequence[Record]) -> Table:
    rows = [
        _row(task, [_cell(task, _of(judged, task, method, grid.LOW)) for method in _methods(judged)])
        for task in JUDGING
    ]
    return Table(f"The tasks that judge, at {grid.LOW:g}", ["task", *_methods(judged)], _whole(rows))


def at_the_best_rate(judged: Sequence[Record]) -> Table:
    rows = []
    for task in JUDGING:
        best = [_best(judged, task, method) for method in _methods(judged)]
        cells = [
            f"{_cell(task, _of(judged, task, m, lr))} ({lr:g})" if lr else ""
            for m, lr in zip(_methods(judged), best, strict=True)
        ]
        rows.append(_row(task, cells))
    return Table("The tasks that judge, at the best rate of each", ["task", *_methods(judged)], _whole(rows))


def at_three_times_the_best(judged: Sequence[Record]) -> Table:
    """The score there, and by how much it is worse than at the best rate."""
    rows = []
    for task in JUDGING:
        cells = []
        for method in _methods(judged):
            best = _best(judged, task, method)
            one, other = (
                (score(_of(judged, task, method, lr)) for lr in (best, grid.thrice(best))) if best else (None, None)
            )
            lost = f" ({100 * (other.mean / one.mean - 1):+.1f} %)" if one and other and not other.diverged else ""
            cells.append(_text(task, other) + lost if other else "")
        rows.append(_row(task, cells))
    return Table("The tasks that judge, at about three times the best rate", ["task", *_methods(judged)], _whole(rows))


def growth(judged: Sequence[Record]) -> Table:
    """The geometric mean over the weights of ‖W‖ at the end over ‖W‖ at the start."""
    rows = []
    for task in JUDGING:
        best = [_best(judged, task, method) for method in _methods(judged)]
        values = [
            _of(judged, task, m, lr, "growth") if lr else [] for m, lr in zip(_methods(judged), best, strict=True)
        ]
        rows.append([task.name, *(found.text(2) if (found := score(v)) else "" for v in values)])
    return Table(
        "The factor by which weights grew in training, at the best rate of each",
        ["task", *_methods(judged)],
        _whole(rows),
    )


def longer(records: Sequence[Record]) -> Table:
    found = [r for r in records if r["part"] == "longer"]
    rows = []
    for task in JUDGING:
        mine = [[r for r in found if (r["task"], r["method"]) == (task.name, method)] for method in (PLAIN, GROUPS)]
        rows.append(_row(task, [f"{_cell(task, [r['score'] for r in m])} ({m[0]['lr']:g})" if m else "" for m in mine]))
    title = "The tasks that judge, four times as long, at the rates that were best for short trainings"
    return Table(title, ["task", PLAIN, GROUPS], _whole(rows))


def kin(records: Sequence[Record]) -> Table:
    """The best of each sweep."""
    found = [r for r in records if r["part"] == "kin"]
    rows = []
    for optimizer, svd in (("Lion", GROUPS), ("Muon", ATTENTION)):
        for task in JUDGING:
            cells = []
            for method in (PLAIN, svd):
                mine = [r for r in found if (r["task"], r["optimizer"], r["method"]) == (task.name, optimizer, method)]
                lr = _best(mine, task, method)
                cells.append(f"{_cell(task, _of(mine, task, method, lr))} ({lr:g})" if lr else "")
            label = {"Lion": "Lion", "Muon": "Muon for dense matrices, AdamW for the rest; SVDs in the attention"}[
                optimizer
            ]
            rows.append([label, *_row(task, cells)])
    return Table("Other optimizers, at the best rate of each", ["optimizer", "task", PLAIN, "SVD"], _whole(rows, 2))


def _methods(judged: Iterable[Record]) -> list[str]:
    """The methods that have results."""
    found = {record["method"] for record in judged}
    return [method for method in STYLES if method in found]


def _of(judged: Iterable[Record], task: Task, method: str, lr: float, what: str = "score") -> list[float | None]:
    return [r[what] for r in judged if (r["task"], r["method"], r["lr"]) == (task.name, method, lr)]


def _best(judged: Iterable[Record], task: Task, method: str) -> float | None:
    sweep = [r for r in judged if (r["task"], r["method"], r["seed"]) == (task.name, method, 0)]
    return grid.best_rate(sweep) if any(r["score"] is not None for r in sweep) else None


def _cell(task: Task, values: Sequence[float | None]) -> str:
    found = score(values)
    return _text(task, found) if found else ""


def _text(task: Task, found: Score | None) -> str:
    return found.text(3 if task.unit == "nats" else 2) if found else ""


def _row(task: Task, cells: list[str]) -> list[str]:
    return [f"{task.name}, {task.unit} ↓", *cells]


def _whole(rows: list[list[str]], labels: int = 1) -> list[list[str]]:
    """The rows that have a result beside their labels."""
    return [row for row in rows if any(row[labels:])]


def draw(judged: Sequence[Record]) -> Figure:
    """The scores of all rates: means over seeds, and bands of one standard deviation."""
    tasks = [task for task in JUDGING if any(r["task"] == task.name for r in judged)]
    figure, axes = figures.panels([task.name for task in tasks], 4, width=3.0)
    for task, panel in zip(tasks, axes, strict=False):
        worst = []
        for method in _methods(judged):
            style = STYLES[method]
            points = {lr: score(_of(judged, task, method, lr)) for lr in (*grid.RATES, *grid.BEYOND)}
            found = {lr: value for lr, value in points.items() if value and not value.diverged}
            means = [value.mean for value in found.values()]
            panel.plot(list(found), means, style.line, color=style.color, marker=style.marker, label=method)
            low, high = ([v.mean + sign * v.spread for v in found.values()] for sign in (-1, 1))
            panel.fill_between(list(found), low, high, color=style.color, alpha=0.15, linewidth=0)
            worst += means
        panel.set(xscale="log", xlabel="learning rate", ylabel=f"{task.unit}, lower is better")
        if worst:
            # The worst quarter would leave no room for the differences.
            least, most = min(worst), sorted(worst)[3 * len(worst) // 4]
            panel.set_ylim(least - 0.08 * (most - least), most + 0.08 * (most - least))
    figures.legend(figure, axes)
    return figure
