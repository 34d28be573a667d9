"""The runs: variants of the rule on the tasks that choose, and what was chosen, beside plain layers, on others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.harness import Record, Run, other_seeds
from experiments.rates.tasks import CHOOSING, JUDGING
from experiments.rates.training import ANGLES, GROUPS, VARIANT
from experiments.rates.ways import ATTENTION, PLAIN
from experiments.study.tasks import Task

PARTS = ("choose", "judge", "longer", "kin", "time")
LOW, MIDDLE, HIGH = 1e-3, 1e-2, 3e-2
OLD = "σ by lr, reflectors at lr (fasth 0.2)"
CHOSEN = "σ and reflectors by √lr"
TURNS: dict[str, Any] = {"method": VARIANT, "angle": 0.0014}
VARIANTS: dict[str, dict[str, Any]] = {
    PLAIN: {"method": PLAIN},
    OLD: {"method": VARIANT},
    "angle 0.0007, σ × 0.3": TURNS | {"angle": 0.0007, "sigma": 0.3},
    "angle 0.0014, σ × 0.3": TURNS | {"sigma": 0.3},
    "angle 0.0028, σ × 0.3": TURNS | {"angle": 0.0028, "sigma": 0.3},
    "the same with the direction m": TURNS | {"sigma": 0.3, "direction": "momentum"},
    "angle 0.0014, σ × 1": TURNS,
    "angle 0.0014, σ by √lr": TURNS | {"sigma_root": True},
    CHOSEN: {"method": VARIANT, "root": True, "sigma_root": True},
    # Tried when the rule had been judged, so that they could not replace it.
    "afterwards: both by lr^¼": {"method": VARIANT, "power": 0.25},
    "afterwards: both by lr^¾": {"method": VARIANT, "power": 0.75},
    "afterwards: both by √lr, equal at 0.001": {"method": VARIANT, "power": 0.5, "base": 0.001},
    "afterwards: both by √lr, equal at 0.01": {"method": VARIANT, "power": 0.5, "base": 0.01},
}
FEWER = ("angle 0.0007, σ × 0.3", "angle 0.0028, σ × 0.3", "the same with the direction m")  # not at the high rate

RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
BEYOND = (3e-1, 1.0, 3.0)  # where the best rate of a sweep is its last
SEEDS = 3
LADDER = (1e-5, 3e-5, 1e-4, 3e-4, *RATES, *BEYOND)
RATES_OF_LION = LADDER[2:7]
KIN_TASKS = ("LSTM", "autoencoder", "GPT")
JUDGED = ((PLAIN, GROUPS), (ANGLES,))  # in this order


def choosing(quick: bool) -> list[Run]:
    return [
        _run("choose", task, quick) | settings | {"lr": lr}
        for name, settings in VARIANTS.items()
        for task in (CHOOSING[:1] if quick else CHOOSING)
        for lr in ((LOW, MIDDLE) if name in FEWER else (LOW, MIDDLE, HIGH))
    ]


def variant_of(run: Run) -> dict[str, Any]:
    """The settings that identify a variant: all but the task, the rate and the seed."""
    names = ("part", "task", "lr", "seed", "steps", "seconds", "score", "growth", "curve")
    return {name: value for name, value in run.items() if name not in names}


def judging(methods: Sequence[str], quick: bool) -> list[Run]:
    """All rates with seed 0."""
    return [
        _run("judge", task, quick) | {"method": method, "lr": lr}
        for method in methods
        for task in (JUDGING[:1] if quick else JUDGING)
        for lr in (RATES[:2] if quick else RATES)
    ]


def beyond(swept: list[Record], methods: Sequence[str], quick: bool) -> list[Run]:
    """A higher rate for each sweep whose best rate is the last one."""
    return [
        _run("judge", task, quick) | {"method": method, "lr": BEYOND[0]}
        for method in methods
        for task in JUDGING
        if (sweep := _sweep(swept, method, task)) and best_rate(sweep) == RATES[-1]
    ]


def _sweep(records: list[Record], method: str, task: Task) -> list[Record]:
    """All rates with seed 0."""
    return [r for r in records if (r["method"], r["task"], r["seed"]) == (method, task.name, 0)]


def more_seeds(swept: list[Record], methods: Sequence[str], quick: bool) -> list[Run]:
    """Other seeds at 1e-3, at the best rate of a sweep, and at about three times that."""
    runs: list[Run] = []
    for method in methods:
        for task in JUDGING:
            if sweep := _sweep(swept, method, task):
                rates = {LOW, best := best_rate(sweep), thrice(best)}
                settings = [_run("judge", task, quick) | {"method": method, "lr": lr} for lr in sorted(rates)]
                runs += [run for one in settings for run in (one, *other_seeds(one, SEEDS - 1))]
    order = [task.name for task in JUDGING]
    return sorted(runs, key=lambda run: (run["seed"], order.index(run["task"])))


def longer(judged: list[Record], quick: bool) -> list[Run]:
    """Four times the steps, at the best rate of each sweep."""
    runs = []
    for method in (PLAIN, GROUPS):
        for task in JUDGING:
            if sweep := _sweep(judged, method, task):
                run = _run("longer", task, quick) | {"method": method, "lr": best_rate(sweep)}
                runs += [one | {"steps": 4 * one["steps"]} for one in (run, *other_seeds(run, SEEDS - 1))]
    return runs


def kin(quick: bool) -> list[list[Run]]:
    """Sweeps with other optimizers, each a list."""
    tasks = [task for task in JUDGING if task.name in KIN_TASKS]
    compared: list[tuple[Task, str, str, Sequence[float]]] = [
        (task, "Lion", method, RATES_OF_LION) for task in tasks for method in (PLAIN, GROUPS)
    ]
    compared += [(tasks[-1], "Muon", method, RATES) for method in (PLAIN, ATTENTION)]
    if quick:
        compared = compared[:1]
    return [
        [_run("kin", task, quick) | {"method": method, "optimizer": optimizer, "lr": lr} for lr in rates]
        for task, optimizer, method, rates in compared
    ]


def outward(swept: list[Record]) -> list[Run]:
    """The next rate beyond a sweep whose best one is its first or its last."""
    tried = sorted(r["lr"] for r in swept)
    best = best_rate(swept)
    step = -1 if best == tried[0] else 1 if best == tried[-1] else 0
    return [{**swept[0], "lr": LADDER[LADDER.index(best) + step]}] if step else []


def best_rate(sweep: list[Record]) -> float:
    """The rate with the least score; a run that diverged has none."""
    return min((r["score"], r["lr"]) for r in sweep if r["score"] is not None)[1]


def thrice(lr: float) -> float:
    """The next rate of the sweep, or beyond it."""
    rates = (*RATES, *BEYOND)
    return rates[rates.index(lr) + 1]


def _run(part: str, task: Task, quick: bool) -> Run:
    steps = max(round(0.1 * task.steps), 1) if quick else task.steps
    return {"part": part, "task": task.name, "method": "", "lr": 0.0, "seed": 0, "steps": steps}
