"""One run: a network trained with AdamW, or with a rule for its SVDs."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Generator, nn

import fasth
from experiments.harness import Record, Run, finite, means
from experiments.rates.tasks import TASKS
from experiments.rates.variants import Angles
from experiments.study.tasks import Task
from experiments.study.training import step
from fasth.nn.held_weight import named_held_weights

# A run has the settings "part", "task", "method", "lr", "seed", "steps", and what a variant of the rule is given.
FOUND = ("seconds", "score", "growth", "curve")
PLAIN, GROUPS, ANGLES, VARIANT = "plain", "SVD, param_groups", "SVD, angles", "variant"
WEIGHT_DECAY, WARM_UP = 0.01, 0.1
SETTINGS = ("part", "task", "method", "lr", "seed", "steps")


def train(run: Run, _: Path) -> Record:
    """The seed decides the plain network and the batches; SVDs start as the same function."""
    task = TASKS[run["task"]]
    torch.manual_seed(run["seed"])
    model = task.network(task.width)
    if isinstance(model, nn.Module) and run["method"] != PLAIN:
        model = convert(model)
    start, before = time.perf_counter(), sizes(model)
    losses = fit(model, task, run)
    found: Record = {"seconds": round(time.perf_counter() - start, 2), "curve": means(losses, 20, 4), "score": None}
    found["growth"] = None
    if math.isfinite(losses[-1]):
        with torch.no_grad():
            found["score"] = finite(task.score(model.eval()), 4)
        logs = [math.log(after / first) for first, after in zip(before, sizes(model), strict=True)]
        found["growth"] = finite(math.exp(sum(logs) / max(len(logs), 1)), 3)
    return found


def convert(model: nn.Module) -> nn.Module:
    """Converts all layers that ``to_svd`` supports; in a flow only its linear maps, as in the study."""
    flow = hasattr(model, "mixers")
    return fasth.to_svd(model, filter=lambda name, _: not flow or name.startswith("mixers"), report=[])


def fit(model: nn.Module, task: Task, run: Run) -> list[float]:
    """The loss of each step. A tenth of the steps is a linear warm-up, the rest a cosine to zero."""
    optimizer, steps = optimizer_of(model.train(), run), run["steps"]
    warm = max(round(WARM_UP * steps), 1)

    def part(i: int) -> float:
        return (i + 1) / warm if i < warm else 0.5 + 0.5 * math.cos(math.pi * (i - warm) / max(steps - warm, 1))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, part)
    generator, losses = Generator().manual_seed(1000 + run["seed"]), []
    for _ in range(steps):
        losses.append(step(model, task, task.batch(generator), optimizer))
        schedule.step()
        if not math.isfinite(losses[-1]):
            break
    return losses


def optimizer_of(model: nn.Module, run: Run) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": run["lr"], "weight_decay": WEIGHT_DECAY}
    if run["method"] == PLAIN:
        return torch.optim.AdamW(model.parameters(), **options)
    if run["method"] == GROUPS:
        return torch.optim.AdamW(fasth.param_groups(model, **options))
    if run["method"] == ANGLES:
        return fasth.optim.AdamW(model, **options)
    made: Any = Angles(model, **options, **{name: value for name, value in run.items() if name not in SETTINGS})
    return made


@torch.no_grad()
def sizes(model: nn.Module) -> list[float]:
    """The root mean square of each weight's singular values, of matrices and kernels."""
    held = [weight.singular_values.norm().item() for _, weight in named_held_weights(model)]
    kinds = (nn.Linear, nn.Conv2d, nn.RNN, nn.LSTM)
    plain = [module for module in model.modules() if isinstance(module, kinds)]
    names = ("weight", "weight_hh_l0")
    return held or [getattr(m, name).norm().item() for m in plain for name in names if hasattr(m, name)]
