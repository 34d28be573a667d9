"""The runs of the flows: a sweep with one seed, and the best setting of each mixer with others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from experiments.flow.models import IMAGE_MIXERS, STARTS
from experiments.flow.training import DATA
from experiments.harness import Record, Results, Run, best_of_first_seed, other_seeds, tables


@dataclass(frozen=True)
class Grid:
    """The settings of the experiment; all combinations are run."""

    rates: dict[str, Sequence[float]]
    starts: dict[str, Sequence[str]]
    seeds: int  # besides seed 0, which the sweep has
    steps: dict[str, int]


FULL = Grid(
    rates={"images": (0.003, 0.006, 0.012, 0.024), "table": (0.001, 0.002, 0.004)},
    starts=dict.fromkeys(DATA, STARTS),
    seeds=3,
    steps={"images": 400, "table": 600},
)
QUICK = Grid(
    rates={"images": (0.006,), "table": (0.002,)},
    starts={"images": ("whitening",), "table": ("permutation",)},
    seeds=0,
    steps={"images": 100, "table": 300},
)


def sweep(grid: Grid, tasks: Iterable[str], mixers: Iterable[str]) -> list[Run]:
    """Every setting, with seed 0."""
    return [
        {"task": task, "data": DATA[task]().name, "mixer": mixer, "start": start, "lr": lr, "seed": 0,
         "steps": grid.steps[task]}
        for task, mixer in product(tasks, mixers)
        if task == "images" or mixer not in IMAGE_MIXERS
        for start, lr in product(grid.starts[task], grid.rates[task])
    ]  # fmt: skip


def finals(swept: Sequence[Run], results: Results, grid: Grid) -> list[Run]:
    """The best setting of each mixer, with seeds that did not choose it."""
    pairs = dict.fromkeys((run["task"], run["mixer"]) for run in swept)
    winners = (best(results.finished(swept), task=task, mixer=mixer) for task, mixer in pairs)
    return [run for one in winners if one for run in other_seeds(results.settings(one.chosen), grid.seeds)]


@dataclass(frozen=True)
class Best:
    """The best setting of a mixer.

    Args:
        chosen: its record of seed 0, the one that is best on validation data.
        finals: its records with other seeds, or, without any, ``chosen`` itself.
    """

    chosen: Record
    finals: list[Record]

    @property
    def mixer(self) -> str:
        return str(self.chosen["mixer"])

    def __str__(self) -> str:
        score = tables.score(record["test"] for record in self.finals)
        return "–" if score is None else score.text(digits(score.mean), ".2g")


def best(records: Iterable[Record], **fixed: str) -> Best | None:
    records = list(records)
    chosen = best_of_first_seed(
        (record for record in records if fixed.items() <= record.items()), lambda record: record["validation"]
    )
    if chosen is None:
        return None
    setting = {name: chosen[name] for name in ("task", "mixer", "start", "lr")}
    others = [record for record in records if record["seed"] and setting.items() <= record.items()]
    return Best(chosen, others or [chosen])


def digits(value: float) -> int:
    return 3 if abs(value) < 10 else 2


def written(value: float | None) -> str:
    return "diverged" if value is None else f"{value:.{digits(value)}f}"
