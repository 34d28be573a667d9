"""One recurrent net, trained: what comes of a run of ``recurrent.py``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from recurrent_models import Net, groups
from recurrent_tasks import TASKS, Task
from torch import Generator, Tensor, nn

Record = dict[str, Any]

HIDDEN, CLIP = 128, 1.0
POINTS = 40  # of the curves


@dataclass(frozen=True)
class Run:
    task: str
    data: str  # the name of the images that are installed
    method: str
    lr: float
    seed: int
    steps: int

    def name(self) -> str:
        return f"{self.task}, {self.method}, {self.lr:g}, seed {self.seed}"


def new_net(method: str, task: Task, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(method, task.inputs, HIDDEN, task.outputs)


def train(run: Run) -> Record:
    """Loss and score of the training batches, the mean over parts of the run, and those of the test."""
    task, generator = TASKS[run.task], Generator().manual_seed(1000 + run.seed)
    net = new_net(run.method, task, run.seed)
    optimizer = torch.optim.Adam(groups(net, run.lr))
    found = [training_step(net, task, task.batch(generator), optimizer) for _ in range(run.steps)]
    losses, scores = zip(*found, strict=True)
    with torch.no_grad():
        tested = [(net(x), y) for x, y in task.test()]
    return {
        "curve": means(losses),
        "scores": means(scores),
        "loss": mean([task.loss(out, y).item() for out, y in tested]),
        "score": mean([task.score(out, y) for out, y in tested]),
    }


def training_step(
    net: nn.Module, task: Task, batch: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer
) -> tuple[float, float]:
    x, y = batch
    out = net(x)
    loss = task.loss(out, y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), CLIP)
    optimizer.step()
    return loss.item(), task.score(out.detach(), y)


def means(values: Sequence[float]) -> list[float | None]:
    parts = torch.tensor(values, dtype=torch.float64).tensor_split(min(POINTS, len(values)))
    return [finite(part.mean().item()) for part in parts]


def mean(values: Sequence[float]) -> float | None:
    return finite(sum(values) / len(values))


def finite(value: float) -> float | None:
    """None for what JSON cannot hold: the run diverged."""
    return round(value, 5) if math.isfinite(value) else None
