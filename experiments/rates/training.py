"""One run: a network trained with AdamW, or with a rule for its SVDs."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Generator, nn

import fasth
from experiments.harness import Record, Run, finite, means
from experiments.rates.kin import Lion, MuonBesideAdamW
from experiments.rates.tasks import TASKS
from experiments.rates.variants import Angles
from experiments.rates.ways import CONVERSIONS, PLAIN, to_svd
from experiments.study.tasks import Task
from fasth.nn.held_weight import named_held_weights

# A run has the settings "part", "task", "method", "lr", "seed", "steps". Further ones are "optimizer", if that is not
# AdamW; "batches", whose gradients are added for each step; and what a variant of the rule is given.
FOUND = ("seconds", "score", "growth", "curve", "ms")
GROUPS, ANGLES, VARIANT = "SVD, param_groups", "SVD, angles", "variant"
WEIGHT_DECAY, WARM_UP = 0.01, 0.1
SETTINGS = ("part", "task", "method", "lr", "seed", "steps")


def train(run: Run, _: Path) -> Record:
    """The seed decides the plain network and the batches; SVDs start as the same function."""
    task = TASKS[run["task"]]
    torch.manual_seed(run["seed"])
    model = task.network(task.width)
    model = CONVERSIONS.get(run["method"], to_svd)(model)
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


def fit(model: nn.Module, task: Task, run: Run) -> list[float]:
    """The loss of each step. A tenth of the steps is a linear warm-up, the rest a cosine to zero."""
    optimizer, steps = optimizer_of(model.train(), run), run["steps"]
    warm = max(round(WARM_UP * steps), 1)

    def part(i: int) -> float:
        return (i + 1) / warm if i < warm else 0.5 + 0.5 * math.cos(math.pi * (i - warm) / max(steps - warm, 1))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, part)
    generator, losses = Generator().manual_seed(1000 + run["seed"]), []
    for _ in range(steps):
        batches = [task.batch(generator) for _ in range(run.get("batches", 1))]
        losses.append(step(model, task, batches, optimizer))
        schedule.step()
        if not math.isfinite(losses[-1]):
            break
    return losses


def step(model: nn.Module, task: Task, batches: Sequence[Any], optimizer: torch.optim.Optimizer) -> float:
    """A step by the mean gradient of the batches, for which each weight is formed once."""
    optimizer.zero_grad()
    with fasth.cached() if len(batches) > 1 else nullcontext():
        loss = torch.stack([task.loss(model, batch) for batch in batches]).mean()
        loss.backward()
    optimizer.step()
    return loss.item()


def optimizer_of(model: nn.Module, run: Run) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": run["lr"], "weight_decay": WEIGHT_DECAY}
    kind = run.get("optimizer", "AdamW")
    if kind == "Muon":
        return MuonBesideAdamW(model, **options)
    if run["method"] == ANGLES:
        return Angles(model, **options, angle=0.0014, sigma_root=True)
    if run["method"] == VARIANT:
        return Angles(model, **options, **{name: value for name, value in run.items() if name not in SETTINGS})
    groups = model.parameters() if run["method"] == PLAIN else fasth.param_groups(model, **options)
    made: Any = {"AdamW": torch.optim.AdamW, "Lion": Lion}[kind](groups, **options)
    return made


@torch.no_grad()
def sizes(model: nn.Module) -> list[float]:
    """The root mean square of each weight's singular values, of matrices and kernels."""
    held = [weight.singular_values.norm().item() for _, weight in named_held_weights(model)]
    kinds = (nn.Linear, nn.Conv2d, nn.RNN, nn.LSTM)
    plain = [module for module in model.modules() if isinstance(module, kinds)]
    names = ("weight", "weight_hh_l0")
    return held or [getattr(m, name).norm().item() for m in plain for name in names if hasattr(m, name)]
