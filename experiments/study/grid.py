"""The runs of the study. Within one of its parts every method has the same rates, seeds and batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from experiments.harness import Run
from experiments.study import methods
from experiments.study.methods import ONE_RATE, ORTHOGONAL, PLAIN, SVD
from experiments.study.tasks import CONV, DEEP, FIVE, FLOW_WHOLE, MLP, Task

NAMES = ("sweep", "equal time", "low rank", "factors", "peers", "starts", "long", "widths", "optimizers")
FIXED_RATE = 1e-3
SGD_RATE = 3e-2  # near the best of the MLP's and of the convolutions' sweeps
STARTS = (PLAIN, "plain, orthogonal start", "SVD, σ = 1", "SVD, linear")
PEERS_WIDTH = 128

Costs = dict[tuple[str, str], float]
"""The time of a step, over the time with plain layers, by task and method."""


@dataclass(frozen=True)
class Grid:
    """The size of a study."""

    shortened: float  # multiplies the steps of all trainings
    seeds: int
    fewer_seeds: int  # for parts with many runs
    tasks: Sequence[Task]
    rates: Sequence[float]
    fewer_rates: Sequence[float]  # for parts with many runs
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
    """All runs of these parts of the study; a run's label "experiment" is its part."""
    few, compared = grid.fewer_seeds, (PLAIN, SVD, ORTHOGONAL)
    sweep = _all(grid, grid.tasks, (PLAIN, SVD, ONE_RATE, ORTHOGONAL), grid.rates, grid.seeds)
    sweep += _all(grid, [FLOW_WHOLE], (PLAIN, SVD), grid.rates, grid.seeds)
    parts = {
        "sweep": sweep,
        "equal time": _equal_time(sweep, costs),
        "low rank": _low_rank(grid),
        "factors": _factors(grid),
        "peers": _all(grid, [MLP], grid.peers, grid.fewer_rates, few, width=PEERS_WIDTH),
        "starts": _all(grid, grid.starts, STARTS, grid.rates_of_starts, few),
        "long": _all(grid, grid.tasks, (PLAIN, SVD), [FIXED_RATE], few, length=8),
        # Half as long as the other trainings: those of width 1024 take most of the study's time.
        "widths": [
            run for width in grid.widths for run in _all(grid, [MLP], compared, grid.fewer_rates, few, width, 0.5)
        ],
        "optimizers": [
            run
            for optimizer, rates in (("AdamW", grid.rates_of_adamw), ("SGD", grid.rates_of_sgd))
            for run in _all(grid, grid.tasks, compared, rates, few, optimizer=optimizer)
        ],
    }
    return [{"experiment": name, **run} for name in NAMES if name in only for run in parts[name]]


def timed(grid: Grid) -> list[tuple[Task, int, tuple[str, ...]]]:
    """The tasks, widths and methods whose steps are timed, in turns, before anything is trained."""
    compared = [(task, task.width, (PLAIN, SVD, ORTHOGONAL)) for task in grid.tasks]
    return [*compared, (MLP, PEERS_WIDTH, (PLAIN, *grid.peers))]


def _all(
    grid: Grid,
    tasks: Iterable[Task],
    methods: Sequence[str],
    rates: Sequence[float],
    seeds: int,
    width: int = 0,
    length: float = 1.0,
    optimizer: str = "Adam",
    **more: Any,
) -> list[Run]:
    """Every combination; ``length`` multiplies the steps, ``more`` are further settings."""
    return [
        {
            "task": task.name,
            "method": method,
            "optimizer": optimizer,
            "lr": lr,
            "seed": seed,
            "width": width or task.width,
            "steps": round(length * grid.shortened * task.steps),
            **more,
        }
        for task, method, lr, seed in product(tasks, methods, rates, range(seeds))
    ]


def _equal_time(sweep: Iterable[Run], costs: Costs) -> list[Run]:
    """The sweep in the time that plain layers take: fewer steps, each training with a schedule of that length."""
    found = [run for run in sweep if (run["task"], run["method"]) in costs and run["method"] != PLAIN]
    return [{**run, "steps": max(1, round(run["steps"] / costs[run["task"], run["method"]]))} for run in found]


def _factors(grid: Grid) -> list[Run]:
    """The rule's rate of σ, or of the reflectors, times a factor."""
    return [
        run if factor == 1 else run | {changed: factor}
        for task, method, optimizer, lr in factor_rows(grid)
        for changed, factor in product(("sigma", "reflectors"), grid.factors)
        for run in _all(grid, [task], [method], [lr], grid.fewer_seeds, optimizer=optimizer)
    ]


def factor_rows(grid: Grid) -> list[tuple[Task, str, str, float]]:
    """Tasks, methods, optimizers and rates with which the factors are tried."""
    full = (MLP, "SVD, full reflectors", "Adam", FIXED_RATE)
    with_sgd = [(task, SVD, "SGD", SGD_RATE) for task in (MLP, CONV) if task in grid.tasks]
    return [*((task, SVD, "Adam", FIXED_RATE) for task in grid.tasks), full, *with_sgd]


def _low_rank(grid: Grid) -> list[Run]:
    """Plain and cut, thin from the start, and SVDs that are trained with a penalty, or without one, and cut."""
    settings: list[tuple[str, dict[str, Any]]] = [(PLAIN, {"penalty": 0.0}), (SVD, {"penalty": 0.0})]
    settings += [(SVD, {"rank": rank}) for rank in grid.ranks]
    settings += [(SVD, {"penalty": penalty}) for penalty in grid.penalties]
    return [run for method, more in settings for run in _all(grid, [MLP], [method], [FIXED_RATE], grid.seeds, **more)]
