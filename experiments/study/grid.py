"""Which runs the study consists of. Within an experiment every method has the same rates, seeds and batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fasth.reproduce.study import methods
from fasth.reproduce.study.methods import ONE_RATE, ORTHOGONAL, PLAIN, SVD
from fasth.reproduce.study.tasks import CONV, DEEP, FIVE, FLOW_WHOLE, MLP, Task
from fasth.reproduce.study.training import Run

NAMES = ("sweep", "equal time", "low rank", "factors", "peers", "starts", "long", "widths", "optimizers")
FIXED_RATE = 1e-3
SGD_RATE = 3e-2  # near the best of the MLP's and of the convolutions' sweeps
STARTS = (PLAIN, "plain, orthogonal start", "SVD, σ = 1", "SVD, linear")
PEERS_WIDTH = 128

Costs = dict[tuple[str, str], float]
"""The median time of a step of a task with a method, over that with plain layers."""


@dataclass(frozen=True)
class Grid:
    """The size of a study."""

    shortened: float  # what part of their steps all trainings take
    seeds: int
    fewer_seeds: int  # where there are many runs
    tasks: Sequence[Task]
    rates: Sequence[float]
    fewer_rates: Sequence[float]  # where there are many runs
    rates_of_starts: Sequence[float]
    rates_of_adamw: Sequence[float]
    rates_of_sgd: Sequence[float]
    widths: Sequence[int]
    factors: Sequence[float]
    ranks: Sequence[int]  # about 5, 10 and 20 % of the MLP's parameters
    penalties: Sequence[float]
    starts: Sequence[Task]
    peers: Sequence[str]


FULL = Grid(
    shortened=1.0,
    seeds=3,
    fewer_seeds=2,
    tasks=FIVE,
    rates=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    fewer_rates=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
    rates_of_starts=(1e-3, 3e-3),
    rates_of_adamw=(1e-4, 1e-3, 1e-2),
    rates_of_sgd=(3e-3, 3e-2, 3e-1),
    widths=(64, 128, 256, 512, 1024),
    factors=(1 / 16, 1 / 4, 1, 4),
    ranks=(7, 14, 28),
    penalties=(1e-3, 2e-3, 4e-3),
    starts=(MLP, CONV, *DEEP),
    peers=tuple(methods.PEERS),
)
QUICK = Grid(
    shortened=0.15,
    seeds=2,
    fewer_seeds=1,
    tasks=FIVE,
    rates=(1e-3, 1e-2),
    fewer_rates=(1e-3, 1e-2),
    rates_of_starts=(1e-3,),
    rates_of_adamw=(1e-3,),
    rates_of_sgd=(3e-2,),
    widths=(64, 256),
    factors=(1 / 16, 1, 4),
    ranks=(14,),
    penalties=(2e-3,),
    starts=(MLP, DEEP[0]),
    peers=("fasth", "torch, cayley"),
)


def runs(grid: Grid, costs: Costs, only: Iterable[str] = NAMES) -> list[Run]:
    """All runs of these experiments."""
    made = {
        "sweep": lambda: _sweep(grid),
        "equal time": lambda: _equal_time(grid, costs),
        "factors": lambda: _factors(grid),
        "low rank": lambda: _low_rank(grid),
        "peers": lambda: _peers(grid),
        "long": lambda: _long(grid),
        "starts": lambda: _starts(grid),
        "widths": lambda: _widths(grid),
        "optimizers": lambda: _optimizers(grid),
    }
    return [{"experiment": name, **run} for name in NAMES if name in only for run in made[name]()]


def timed(grid: Grid) -> list[tuple[Task, int, tuple[str, ...]]]:
    """The tasks, widths and methods whose steps are timed, in turns, before anything is trained."""
    compared = [(task, task.width, (PLAIN, SVD, ORTHOGONAL)) for task in grid.tasks]
    return [*compared, (MLP, PEERS_WIDTH, (PLAIN, *grid.peers))]


def _run(
    grid: Grid, task: Task, method: str, lr: float, seed: int, optimizer: str = "Adam", width: int = 0, **more: Any
) -> Run:
    steps = round(grid.shortened * task.steps)
    settings = {"task": task.name, "method": method, "optimizer": optimizer, "lr": lr, "seed": seed}
    return {**settings, "width": width or task.width, "steps": steps, **more}


def _sweep(grid: Grid) -> list[Run]:
    methods_of = {task: (PLAIN, SVD, ONE_RATE, ORTHOGONAL) for task in grid.tasks} | {FLOW_WHOLE: (PLAIN, SVD)}
    return [
        _run(grid, task, method, lr, seed)
        for task, compared in methods_of.items()
        for method in compared
        for lr in grid.rates
        for seed in range(grid.seeds)
    ]


def _equal_time(grid: Grid, costs: Costs) -> list[Run]:
    """Trainings that are shorter in steps, and as long in time as those with plain layers; each with its schedule."""
    found = [run for run in _sweep(grid) if (run["task"], run["method"]) in costs and run["method"] != PLAIN]
    return [{**run, "steps": max(1, round(run["steps"] / costs[run["task"], run["method"]]))} for run in found]


def _factors(grid: Grid) -> list[Run]:
    """The rates of σ and of the reflectors times a factor, with both kinds of reflectors, and for SGD."""
    return [
        _run(grid, task, method, lr, seed, optimizer) | ({} if factor == 1 else {of: factor})
        for task, method, optimizer, lr in factor_rows(grid)
        for of in ("sigma", "reflectors")
        for factor in grid.factors
        for seed in range(grid.fewer_seeds)
    ]


def factor_rows(grid: Grid) -> list[tuple[Task, str, str, float]]:
    """Tasks, methods, optimizers and rates with which the factors are tried."""
    full = (MLP, "SVD, full reflectors", "Adam", FIXED_RATE)
    of_sgd = [(task, SVD, "SGD", SGD_RATE) for task in (MLP, CONV) if task in grid.tasks]
    return [*((task, SVD, "Adam", FIXED_RATE) for task in grid.tasks), full, *of_sgd]


def _low_rank(grid: Grid) -> list[Run]:
    """Plain and cut, thin from the start, and SVDs that are trained with a penalty, or without one, and cut."""
    settings: list[tuple[str, dict[str, Any]]] = [(PLAIN, {"penalty": 0.0}), (SVD, {"penalty": 0.0})]
    settings += [(SVD, {"rank": rank}) for rank in grid.ranks]
    settings += [(SVD, {"penalty": penalty}) for penalty in grid.penalties]
    return [
        _run(grid, MLP, method, FIXED_RATE, seed, **more) for method, more in settings for seed in range(grid.seeds)
    ]


def _peers(grid: Grid) -> list[Run]:
    return [
        _run(grid, MLP, method, lr, seed, width=PEERS_WIDTH)
        for method in grid.peers
        for lr in grid.fewer_rates
        for seed in range(grid.fewer_seeds)
    ]


def _starts(grid: Grid) -> list[Run]:
    return [
        _run(grid, task, method, lr, seed)
        for task in grid.starts
        for method in STARTS
        for lr in grid.rates_of_starts
        for seed in range(grid.fewer_seeds)
    ]


def _long(grid: Grid) -> list[Run]:
    """Eight times as long, at the fixed rate."""
    return [
        {**_run(grid, task, method, FIXED_RATE, seed), "steps": 8 * round(grid.shortened * task.steps)}
        for task in grid.tasks
        for method in (PLAIN, SVD)
        for seed in range(grid.fewer_seeds)
    ]


def _widths(grid: Grid) -> list[Run]:
    """Half as long as the other trainings: those of 1024 take most of the study's time."""
    return [
        {**_run(grid, MLP, method, lr, seed, width=width), "steps": round(grid.shortened * MLP.steps / 2)}
        for width in grid.widths
        for method in (PLAIN, SVD, ORTHOGONAL)
        for lr in grid.fewer_rates
        for seed in range(grid.fewer_seeds)
    ]


def _optimizers(grid: Grid) -> list[Run]:
    rates = {"AdamW": grid.rates_of_adamw, "SGD": grid.rates_of_sgd}
    return [
        _run(grid, task, method, lr, seed, optimizer)
        for optimizer, its_rates in rates.items()
        for task in grid.tasks
        for method in (PLAIN, SVD, ORTHOGONAL)
        for lr in its_rates
        for seed in range(grid.fewer_seeds)
    ]
