"""The results of the study as tables: means over seeds, ± their standard deviation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from experiments.harness import Record
from experiments.harness.results import key
from experiments.harness.tables import Score, Table, number, score
from experiments.study import grid as grids
from experiments.study.grid import FIXED_RATE, PEERS_WIDTH, STARTS, Costs, Grid
from experiments.study.methods import ONE_RATE, ORTHOGONAL, PLAIN, SVD
from experiments.study.tasks import FLOW_WHOLE, MLP, TASKS, Task
from experiments.study.training import CUTS, FOUND

COMPARED = (PLAIN, SVD, ORTHOGONAL)


class Study:
    """The records of a study, by the part of the study that asks for them."""

    def __init__(self, grid: Grid, records: Sequence[Record]) -> None:
        self.grid = grid
        costs = [record for record in records if record["experiment"] == "cost"]
        self.ms = {(record["task"], record["width"], record["method"]): record["ms"] for record in costs}
        self.costs: Costs = {
            (task, method): ms / self.ms[task, width, PLAIN]
            for (task, width, method), ms in self.ms.items()
            if width == TASKS[task].width
        }
        by_key = {key(record, FOUND): record for record in records}
        self._parts: dict[str, list[Record]] = defaultdict(list)
        for run in grids.runs(grid, self.costs) if self.costs else ():
            if record := by_key.get(key(run, FOUND)):
                self._parts[run["experiment"]].append(record)

    def records(self, part: str, **settings: Any) -> list[Record]:
        """The records of a part of the study with these settings; None means without that setting."""
        return [
            record for record in self._parts[part] if all(record.get(name) == value for name, value in settings.items())
        ]


def mean(records: Iterable[Record], value: Callable[[Record], float | None] = lambda r: r["score"]) -> Score | None:
    """The mean score, or another value, over seeds; None without records."""
    return score(map(value, records))


def by_rate(records: Iterable[Record]) -> dict[float, Score | None]:
    groups = defaultdict(list)
    for record in records:
        groups[record["lr"]].append(record)
    return {lr: mean(groups[lr]) for lr in sorted(groups)}


def best(task: Task, records: Iterable[Record]) -> tuple[float, Score] | None:
    """The best rate, and its score."""
    found = [(lr, value) for lr, value in by_rate(records).items() if value and not value.diverged]
    return (max if task.higher_is_better else min)(found, key=lambda one: one[1].mean) if found else None


def _cell(value: Score | None) -> str:
    return "–" if value is None else value.text(2 if value.mean > 10 else 3)


def _best_cell(task: Task, records: Sequence[Record]) -> str:
    found = best(task, records)
    return f"{_cell(found[1])} ({found[0]:g})" if found else "diverged" if records else "–"


def _label(task: Task) -> str:
    return f"{task.name}, {task.unit} {'↑' if task.higher_is_better else '↓'}"


def study_tables(study: Study) -> dict[str, Table]:
    """The tables that there are results for, by name."""
    made = {
        "fixed": _fixed(study),
        "best": _best(study, "sweep", (PLAIN, SVD, ONE_RATE, ORTHOGONAL), "Best of the sweep, Adam (its rate)"),
        "long": _long(study),
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
        [_label(task), *(_cell(mean(study.records("sweep", task=task.name, method=m, lr=FIXED_RATE))) for m in methods)]
        for task in (*study.grid.tasks, FLOW_WHOLE)
        if study.records("sweep", task=task.name)
    ]
    return Table(f"Adam at {FIXED_RATE:g}, the same for all", ["task", *methods], rows)


def _best(study: Study, experiment: str, methods: Sequence[str], title: str, **settings: Any) -> Table:
    rows = [
        [
            _label(task),
            *(_best_cell(task, study.records(experiment, task=task.name, method=m, **settings)) for m in methods),
        ]
        for task in (*study.grid.tasks, FLOW_WHOLE)
        if study.records(experiment, task=task.name, **settings)
    ]
    return Table(title, ["task", *methods], rows)


def _equal_time(study: Study) -> Table:
    rows = []
    for task in study.grid.tasks:
        shorter = {method: study.records("equal time", task=task.name, method=method) for method in (SVD, ORTHOGONAL)}
        plain = study.records("sweep", task=task.name, method=PLAIN)
        if not plain or not all(shorter.values()):
            continue
        costs = [number(study.costs[task.name, method]) for method in shorter]
        fixed = [_cell(mean(r for r in records if r["lr"] == FIXED_RATE)) for records in (plain, shorter[SVD])]
        rows.append([_label(task), *costs, *fixed, *(_best_cell(task, found) for found in (plain, *shorter.values()))])
    columns = ["task", "cost of a step: SVD", "orthogonal", "plain at 1e-3", "SVD", "plain, best", "SVD", "orthogonal"]
    return Table("In the time that plain layers take, Adam; steps timed in turns, with all threads", columns, rows)


def _widths(study: Study) -> Table:
    rows = [
        [str(width), *(_best_cell(MLP, study.records("widths", width=width, method=m)) for m in COMPARED)]
        for width in study.grid.widths
        if study.records("widths", width=width)
    ]
    return Table("MLP of different widths, Adam: best score (its rate)", ["width", *COMPARED], rows)


def _factors(study: Study) -> Table:
    rows = []
    for changed, symbol in (("sigma", "σ"), ("reflectors", "reflectors")):
        for task, method, optimizer, lr in grids.factor_rows(study.grid):
            records = study.records("factors", task=task.name, method=method, optimizer=optimizer)
            cells = [_cell(mean(with_factor(records, changed, factor))) for factor in study.grid.factors]
            if records:
                rows.append([symbol, f"{method}, {optimizer} at {lr:g}", _label(task), *cells])
    columns = ["rate of", "", "task", *(f"× {factor:g}" for factor in study.grid.factors)]
    return Table("The rule's rates times a factor", columns, rows)


def with_factor(records: Sequence[Record], changed: str, factor: float) -> list[Record]:
    """The records with one of the two rates at the rule's times ``factor``, and the other one at the rule's."""
    other = {"sigma": "reflectors", "reflectors": "sigma"}[changed]
    return [record for record in records if record.get(changed, 1) == factor and other not in record]


def _long(study: Study) -> Table:
    rows = [
        [
            _label(task),
            str(study.records("long", task=task.name)[0]["steps"]),
            *(_cell(mean(study.records("long", task=task.name, method=m))) for m in (PLAIN, SVD)),
        ]
        for task in study.grid.tasks
        if study.records("long", task=task.name)
    ]
    return Table(f"Held-out scores of long trainings, Adam at {FIXED_RATE:g}", ["task", "steps", PLAIN, SVD], rows)


def _starts(study: Study) -> Table:
    rows = [
        [_label(task), *(_best_cell(task, study.records("starts", task=task.name, method=m)) for m in STARTS)]
        for task in study.grid.starts
        if study.records("starts", task=task.name)
    ]
    return Table("Starts of the hidden layers, Adam: best score (its rate)", ["network", *STARTS], rows)


def _low_rank(study: Study) -> Table:
    rows = []
    plain = study.records("low rank", method=PLAIN)
    trained = {PLAIN: plain, "SVD": study.records("low rank", method=SVD, penalty=0.0)}
    for penalty in study.grid.penalties:
        trained[f"SVD, penalty {penalty:g}"] = study.records("low rank", penalty=penalty)
    for name, records in trained.items():
        for then, value in (("cut", "score"), ("cut, a tenth more training", "trained on")):
            if records:
                cells = [_cell(cut_score(records, part, value)) for part in CUTS]
                rows.append([f"{name}, {then}", _cell(mean(records)), *cells])
    thin = {rank: study.records("low rank", rank=rank) for rank in study.grid.ranks}
    if plain and all(thin.values()):
        sizes = {rank: records[0]["parameters"] / plain[0]["parameters"] for rank, records in thin.items()}
        nearest = [min(sizes, key=lambda rank, part=part: abs(sizes[rank] - part)) for part in CUTS]  # type: ignore[misc]
        parts = ", ".join(f"{100 * size:.0f} % (rank {rank})" for rank, size in sizes.items())
        name = f"thin from the start: {parts}"
        rows.append([name, "", *(_cell(mean(thin[rank])) for rank in nearest)])
    columns = ["MLP, % ↑", "whole", *(f"{100 * part:.0f} % of the parameters" for part in CUTS)]
    return Table(f"Accuracy of smaller networks, Adam at {FIXED_RATE:g}", columns, rows)


def cut_score(records: Sequence[Record], part: float, value: str) -> Score | None:
    return mean(records, lambda record: record["cut"][str(part)][value])


def _peers(study: Study) -> Table:
    rows = []
    for method in study.grid.peers:
        records = study.records("peers", method=method)
        found = best(MLP, records)
        ms = study.ms.get((MLP.name, PEERS_WIDTH, method))
        if found and ms:
            loss = mean((r for r in records if r["lr"] == found[0]), lambda r: r["curve"][-1])
            plain = study.ms[MLP.name, PEERS_WIDTH, PLAIN]
            rows.append([method, _best_cell(MLP, records), _cell(loss), number(ms / plain)])
    columns = ["orthogonal layers by", "accuracy, % (its rate)", "training loss", "step, × plain"]
    return Table(f"One orthogonal network, MLP of width {PEERS_WIDTH}, each at its best rate, Adam", columns, rows)
