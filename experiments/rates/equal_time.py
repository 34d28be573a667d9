"""Training for equal time: the cost of a step in each way to hold the weights, the runs, and gain against cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Generator

from experiments.harness import Record, Results, Run, tables
from experiments.harness.tables import Score, Table, number, score
from experiments.rates import grid, training
from experiments.rates.tasks import TIMED
from experiments.rates.ways import ATTENTION, CONVERSIONS, PLAIN, SCALED, SVD, THIN
from experiments.study.tasks import Task

BATCHES = 4  # whose gradients are added, within fasth.cached()
# The ways for each task, with the number of batches for a step. An LSTMSVD has no rank.
WAYS = {
    "LSTM, 480 steps": ((PLAIN, 1), (SVD, 1), (PLAIN, BATCHES), (SVD, BATCHES)),
    "ResNet, 32 images": ((PLAIN, 1), (SVD, 1), (THIN, 1), (PLAIN, BATCHES), (SVD, BATCHES)),
    "GPT, 4,096 rows": ((PLAIN, 1), (SVD, 1), (THIN, 1), (ATTENTION, 1), (SCALED, 1)),
}
RATES = grid.RATES[:4]
Costs = dict[tuple[str, str, int], float]
"""The milliseconds of a step, by task, way and number of batches."""


def measured(task: Task, rounds: int) -> Costs:
    """Single steps with one thread, taken in turns."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    calls: dict[str, Callable[[], object]] = {}
    for way, count in WAYS[task.name]:
        torch.manual_seed(0)
        model = CONVERSIONS[way](task.network(task.width))
        batches = [task.batch(Generator().manual_seed(0)) for _ in range(count)]
        optimizer = training.optimizer_of(model, {"method": way, "lr": 1e-3})
        calls[f"{way} {count}"] = partial(training.step, model, task, batches, optimizer)
    seconds = tables.step_times(calls, rounds)
    torch.set_num_threads(threads)
    return {(task.name, way, count): 1e3 * seconds[f"{way} {count}"] for way, count in WAYS[task.name]}


def cost_runs(quick: bool) -> list[Run]:
    return [
        {"part": "cost", "task": task.name, "method": way, "batches": count}
        for task in (TIMED[:1] if quick else TIMED)
        for way, count in WAYS[task.name]
    ]


def costs(results: Results, quick: bool) -> Costs:
    return {(r["task"], r["method"], r["batches"]): r["ms"] for r in results.finished(cost_runs(quick))}


def sweeps(found: Costs, quick: bool) -> list[list[Run]]:
    """A sweep for each way, whose trainings take the time of those of the plain network."""
    by_name = {task.name: task for task in TIMED}
    made = []
    for (name, way, count), ms in found.items():
        steps = by_name[name].steps * (0.1 if quick else 1) * found[name, PLAIN, 1] / found[name, PLAIN, count]
        settings = {"part": "time", "task": name, "method": way, "batches": count, "seed": 0}
        settings["steps"] = max(round(steps * found[name, PLAIN, count] / ms), 1)
        made.append([{**settings, "lr": lr} for lr in (RATES[:1] if quick else RATES)])
    return made


def table(results: Results, quick: bool) -> Table:
    """Gain against cost. Both are relative to the plain network with as many batches for a step."""
    found = costs(results, quick)
    records = [r for r in results.records if r["part"] == "time"]
    rows = []
    for name, way, count in found:
        plain, mine = (_best(records, name, one, count) for one in (PLAIN, way))
        if plain is None or mine is None:
            continue
        digits = 2 if "ResNet" in name else 3
        gain = "" if way == PLAIN else f"{100 * (1 - mine[0].mean / plain[0].mean):+.1f} %"
        cost = number(found[name, way, count] / found[name, PLAIN, count]) if way != PLAIN else "1"
        batches = f", {count} batches a step" if count > 1 else ""
        rows.append([f"{name}{batches}", way, cost, f"{mine[0].text(digits)} ({mine[1]:g})", gain])
    columns = ["task", "weights", "cost of a step", "score at the best rate ↓ (its rate)", "gain"]
    return Table("For equal time: gain against cost", columns, rows)


def _best(records: Iterable[Record], task: str, way: str, count: int) -> tuple[Score, float] | None:
    """The score at the best rate, and that rate."""
    mine = [r for r in records if (r["task"], r["method"], r["batches"]) == (task, way, count)]
    sweep = [r for r in mine if r["seed"] == 0]
    if not any(r["score"] is not None for r in sweep):
        return None
    lr = grid.best_rate(sweep)
    found = score(r["score"] for r in mine if r["lr"] == lr)
    return (found, lr) if found else None
