"""What the study found, as tables: means over seeds, ± their standard deviation."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from fasth.reproduce.study import experiments
from fasth.reproduce.study.experiments import FIXED_RATE, PEERS_WIDTH, STARTS, Costs, Grid
from fasth.reproduce.study.methods import ONE_RATE, ORTHOGONAL, PLAIN, SVD
from fasth.reproduce.study.runner import Record, key
from fasth.reproduce.study.tasks import MLP, TASKS, Task
from fasth.reproduce.study.training import CUTS
from fasth.reproduce.tables import Table, number

COMPARED = (PLAIN, SVD, ORTHOGONAL)


class Score(NamedTuple):
    """Of some runs that differ in their seed."""

    mean: float
    spread: float  # the standard deviation; 0 of a single run

    def __str__(self) -> str:
        return f"{self.mean:.{2 if self.mean > 10 else 3}f} ± {self.spread:.{2 if self.mean > 10 else 3}f}"


class Study:
    """The records of a study, found by the experiment that asks for them."""

    def __init__(self, grid: Grid, records: Sequence[Record]) -> None:
        self.grid = grid
        self._of = {key(record): record for record in records}
        self.ms = {
            (record["task"], record["width"], record["method"]): record["ms"]
            for record in records
            if record["experiment"] == "cost"
        }
        self.costs: Costs = {
            (task, method): ms / self.ms[task, width, PLAIN]
            for (task, width, method), ms in self.ms.items()
            if width == TASKS[task].width
        }

    def of(self, experiment: str, **settings: Any) -> list[Record]:
        """The records of an experiment with these settings, as far as they were made; a setting of None: without it."""
        runs = experiments.runs(self.grid, self.costs, [experiment]) if self.costs else []
        found = (self._of.get(key(run)) for run in runs)
        return [
            record
            for record in found
            if record is not None and all(record.get(name) == value for name, value in settings.items())
        ]


def score(records: Iterable[Record], of: Callable[[Record], float | None] = lambda r: r["score"]) -> Score | None:
    """None if there are none, or one of them diverged."""
    values = [of(record) for record in records]
    numbers = [value for value in values if value is not None]
    if not numbers or len(numbers) < len(values):
        return None
    return Score(statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else 0.0)


def by_rate(records: Iterable[Record]) -> dict[float, Score | None]:
    of_rate = defaultdict(list)
    for record in records:
        of_rate[record["lr"]].append(record)
    return {lr: score(of_rate[lr]) for lr in sorted(of_rate)}


def best(task: Task, records: Iterable[Record]) -> tuple[float, Score] | None:
    """The best rate, and the score there."""
    found = [(lr, value) for lr, value in by_rate(records).items() if value is not None]
    return (max if task.higher_is_better else min)(found, key=lambda one: one[1].mean) if found else None


def _cell(value: Score | None) -> str:
    return "diverged" if value is None else str(value)


def _best_cell(found: tuple[float, Score] | None) -> str:
    return "diverged" if found is None else f"{found[1]} ({found[0]:g})"


def _label(task: Task) -> str:
    return f"{task.name}, {task.unit} {'↑' if task.higher_is_better else '↓'}"


def tables(study: Study) -> dict[str, Table]:
    """By name; those without results are left out."""
    made = {
        "fixed": _fixed(study),
        "best": _best(study, "sweep", (PLAIN, SVD, ONE_RATE, ORTHOGONAL), "Best of the sweep, Adam (its rate)"),
        "time": _equal_time(study),
        "adamw": _best(study, "optimizers", COMPARED, "Best of the sweep, AdamW (its rate)", optimizer="AdamW"),
        "sgd": _best(study, "optimizers", COMPARED, "Best of the sweep, SGD with momentum 0.9", optimizer="SGD"),
        "widths": _widths(study),
        "factors": _factors(study),
        "starts": _starts(study),
        "low-rank": _low_rank(study),
        "peers": _peers(study),
    }
    return {name: table for name, table in made.items() if table.rows}


def _fixed(study: Study) -> Table:
    methods = (PLAIN, SVD, ONE_RATE, ORTHOGONAL)
    rows = [
        [_label(task), *(_cell(score(study.of("sweep", task=task.name, method=m, lr=FIXED_RATE))) for m in methods)]
        for task in study.grid.tasks
        if study.of("sweep", task=task.name)
    ]
    return Table(f"Adam at {FIXED_RATE:g}, the same for all", ["task", *methods], rows)


def _best(study: Study, experiment: str, methods: Sequence[str], title: str, **settings: Any) -> Table:
    rows = [
        [
            _label(task),
            *(_best_cell(best(task, study.of(experiment, task=task.name, method=m, **settings))) for m in methods),
        ]
        for task in study.grid.tasks
        if study.of(experiment, task=task.name, **settings)
    ]
    return Table(title, ["task", *methods], rows)


def _equal_time(study: Study) -> Table:
    rows = []
    for task in study.grid.tasks:
        shorter = {method: study.of("equal time", task=task.name, method=method) for method in (SVD, ORTHOGONAL)}
        plain = study.of("sweep", task=task.name, method=PLAIN)
        if not plain or not all(shorter.values()):
            continue
        costs = [number(study.costs[task.name, method]) for method in shorter]
        fixed = [_cell(score(r for r in of if r["lr"] == FIXED_RATE)) for of in (plain, shorter[SVD])]
        rows.append([_label(task), *costs, *fixed, *(_best_cell(best(task, of)) for of in (plain, *shorter.values()))])
    columns = ["task", "cost of a step: SVD", "orthogonal", "plain at 1e-3", "SVD", "plain, best", "SVD", "orthogonal"]
    return Table("In the time that plain layers take, Adam", columns, rows)


def _widths(study: Study) -> Table:
    rows = [
        [str(width), *(_best_cell(best(MLP, study.of("widths", width=width, method=m))) for m in COMPARED)]
        for width in study.grid.widths
        if study.of("widths", width=width)
    ]
    return Table("MLP of different widths, Adam: best score (its rate)", ["width", *COMPARED], rows)


def _factors(study: Study) -> Table:
    rows = []
    for of, what in (("sigma", "σ"), ("reflectors", "reflectors")):
        for task, method, optimizer, lr in experiments.factor_rows(study.grid):
            records = study.of("factors", task=task.name, method=method, optimizer=optimizer)
            cells = [_cell(score(r for r in records if r.get(of) == factor)) for factor in study.grid.factors]
            if records:
                rows.append([what, f"{method}, {optimizer} at {lr:g}", _label(task), *cells])
    columns = ["rate of", "", "task", *(f"× {factor:g}" for factor in study.grid.factors)]
    return Table("The rule's rates times a factor", columns, rows)


def _starts(study: Study) -> Table:
    rows = [
        [_label(task), *(_best_cell(best(task, study.of("starts", task=task.name, method=m))) for m in STARTS)]
        for task in study.grid.starts
        if study.of("starts", task=task.name)
    ]
    return Table("Starts of the hidden layers, Adam: best score (its rate)", ["network", *STARTS], rows)


def _low_rank(study: Study) -> Table:
    rows = []
    plain = study.of("low rank", method=PLAIN)
    penalised = [(f"penalty {penalty:g}", study.of("low rank", penalty=penalty)) for penalty in study.grid.penalties]
    for name, records in ((PLAIN, plain), *penalised):
        for then, of in (("then cut", "score"), ("then cut, a tenth more training", "trained on")):
            if records:
                rows.append(
                    [f"{name}, {then}", _cell(score(records)), *(_cell(cut_score(records, p, of)) for p in CUTS)]
                )
    thin = {rank: study.of("low rank", rank=rank) for rank in study.grid.ranks}
    if plain and all(thin.values()):
        sizes = {rank: records[0]["parameters"] / plain[0]["parameters"] for rank, records in thin.items()}
        nearest = [min(sizes, key=lambda rank, part=part: abs(sizes[rank] - part)) for part in CUTS]  # type: ignore[misc]
        name = f"thin from the start, rank {', '.join(map(str, sizes))}"
        rows.append([name, "", *(_cell(score(thin[rank])) for rank in nearest)])
    columns = ["MLP, % ↑", "whole", *(f"{100 * part:.0f} % of the parameters" for part in CUTS)]
    return Table(f"Accuracy of smaller networks, Adam at {FIXED_RATE:g}", columns, rows)


def cut_score(records: Sequence[Record], part: float, of: str) -> Score | None:
    return score(records, lambda record: record["cut"][str(part)][of])


def _peers(study: Study) -> Table:
    rows = []
    for method in study.grid.peers:
        records = study.of("peers", method=method)
        found = best(MLP, records)
        ms = study.ms.get((MLP.name, PEERS_WIDTH, method))
        if found and ms:
            loss = score((r for r in records if r["lr"] == found[0]), lambda r: r["curve"][-1])
            plain = study.ms[MLP.name, PEERS_WIDTH, PLAIN]
            rows.append([method, _best_cell(found), _cell(loss), number(ms / plain)])
    columns = ["orthogonal layers by", "accuracy, % (its rate)", "training loss", "step, × plain"]
    return Table(f"One orthogonal network, MLP of width {PEERS_WIDTH}, each at its best rate, Adam", columns, rows)
