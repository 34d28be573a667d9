"""The runs: variants of the rule on the tasks that choose, and the chosen one beside plain layers on those that judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.harness import Record, Run
from experiments.rates.tasks import CHOOSING, JUDGING
from experiments.rates.training import GROUPS, PLAIN, VARIANT

PARTS = ("choose", "judge")
VARIANTS: dict[str, dict[str, Any]] = {
    PLAIN: {"method": PLAIN},
    GROUPS: {"method": GROUPS},
    "angle 0.0014, σ × 0.3": {"angle": 0.0014, "sigma": 0.3},
    "direction m": {"angle": 0.0014, "sigma": 0.3, "direction": "momentum"},
    "angle 0.0014, σ × 1": {"angle": 0.0014},
    "angle 0.0007": {"angle": 0.0007, "sigma": 0.3},
    "angle 0.0028": {"angle": 0.0028, "sigma": 0.3},
    "angle 0.0014, σ by √lr": {"angle": 0.0014, "sigma_root": True},
    "reflectors and σ by √lr": {"root": True, "sigma_root": True},
    "half of a norm": {"angle": 0.0014, "sigma_root": True, "power": 0.5},
    "angle 0.0007, σ by √lr": {"angle": 0.0007, "sigma_root": True},
    "bounded": {"angle": 0.0028, "sigma_root": True, "bounded": True},
    "angle 0.0014, σ by √lr, half": {"angle": 0.0014, "sigma_root": True, "sigma": 0.5},
}
SKIP = ("direction m", "angle 0.0007", "angle 0.0028")
CHOOSING_RATES = (1e-2, 1e-3, 3e-2)


def choosing(quick: bool) -> list[Run]:
    tasks = CHOOSING[:2] if quick else CHOOSING
    return [
        {
            "part": "choose",
            "task": task.name,
            "method": VARIANT,
            "lr": lr,
            "seed": 0,
            "steps": _steps(task.steps, quick),
        }
        | settings
        for name, settings in VARIANTS.items()
        if name not in SKIP
        for task in tasks
        for lr in CHOOSING_RATES
    ]


def _steps(steps: int, quick: bool) -> int:
    return max(round(0.1 * steps), 1) if quick else steps
