"""One flow, trained: the data of ``flow.py``, and what comes of a run on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from flow_models import MIXERS, Flow
from torch import Generator, Tensor

import fasth
from fasth.reproduce.study import data

Record = dict[str, Any]

BATCH, FIRST_BATCH, WARM_UP = 64, 1024, 50
CHECKS, POINTS = 8, 40  # on validation data; of the curve
HELD_OUT = 1000  # images each, for validation and for the test
SAMPLES, TEMPERATURE = 12, 0.7


@dataclass(frozen=True)
class Data:
    """Whole numbers, scaled. With noise between one and the next they are continuous, which a density needs."""

    name: str
    unit: str
    training: Tensor
    validation: Tensor
    test: Tensor
    spacing: Tensor  # of the numbers, after scaling
    score: Callable[[float], float]  # of −log p in nats

    def noisy(self, x: Tensor, generator: Generator) -> Tensor:
        return x + self.spacing * torch.rand(x.shape, generator=generator)

    def batch(self, size: int, generator: Generator) -> Tensor:
        return self.noisy(self.training[torch.randint(len(self.training), (size,), generator=generator)], generator)


@cache
def images() -> Data:
    """Pixels from −½ to ½, and bits for each of them."""
    name, levels, training, test = data.pixels()
    scaled, last = ((part.inputs / levels - 0.5).unsqueeze(1) for part in (training, test))
    held_out = min(HELD_OUT, len(scaled) // 5)
    dimensions = scaled[0].numel()
    return Data(
        name=name,
        unit="bits/dim",
        training=scaled[:-held_out],
        validation=scaled[-held_out:],
        test=last[:HELD_OUT],
        spacing=torch.tensor(1 / levels),
        score=lambda nats: nats / dimensions / math.log(2) + math.log2(levels),
    )


@cache
def table() -> Data:
    """Columns of variance 1, and nats for a row."""
    found = data.table()
    validation = torch.arange(len(found.training)) % 5 == 4
    first = found.unit / 2  # the noise here is from 0 to 1, and the columns have mean 0 with it
    return Data(
        name="digits",
        unit="nats",
        training=found.training[~validation] - first,
        validation=found.training[validation] - first,
        test=found.test - first,
        spacing=found.unit,
        score=lambda nats: nats,
    )


DATA = {"images": images, "table": table}


@dataclass(frozen=True)
class Run:
    task: str
    data: str  # the name of what is installed
    mixer: str
    start: str
    lr: float
    seed: int
    steps: int

    def name(self) -> str:
        return (
            f"{self.data}, {self.task}, {self.mixer}, {self.start}, {self.lr:g}, seed {self.seed}, {self.steps} steps"
        )


def new_flow(run: Run) -> Flow:
    """The seed gives the matrices to start from and the coupling nets, the same for every mixer."""
    torch.manual_seed(run.seed)
    return Flow(tuple(DATA[run.task]().training.shape[1:]), MIXERS[run.mixer], run.start)


def train(run: Run, samples: Path | None = None) -> Record:
    """What came of a run: the scores at the best of some checks on validation data, which is the last one unless it
    overfits; the curve of the training loss; and how far the inverse is from undoing the flow.
    """
    task, flow, generator = DATA[run.task](), new_flow(run), Generator().manual_seed(1000 + run.seed)
    flow(task.batch(FIRST_BATCH, generator), normalize=True)
    optimizer = torch.optim.Adam(fasth.param_groups(flow, lr=run.lr))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: rate_at(i, run.steps))
    losses, scores = [], {"validation": math.inf, "test": math.inf}
    for i in range(1, run.steps + 1):
        losses.append(training_step(flow, task.batch(BATCH, generator), optimizer))
        schedule.step()
        if i * CHECKS % run.steps < CHECKS and (now := nats(flow, task, "validation")) < scores["validation"]:
            scores = {"validation": now, "test": nats(flow, task, "test")}
    parts = torch.tensor(losses, dtype=torch.float64).tensor_split(min(POINTS, run.steps))
    if samples is not None:
        save_samples(flow, run, samples)
    return {
        **{part: finite(task.score(value)) for part, value in scores.items()},
        "curve": [finite(round(task.score(part.mean().item()), 4)) for part in parts],
        "inverse": inverse_error(flow, task),
    }


def rate_at(i: int, steps: int) -> float:
    """The rate rises from zero, and falls back to it as a cosine."""
    return min(1, (i + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * i / steps))


def training_step(flow: Flow, x: Tensor, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = flow.nats(x).mean()
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def nats(flow: Flow, task: Data, part: str) -> float:
    x = task.noisy(getattr(task, part), Generator().manual_seed(0))
    return torch.cat([flow.nats(rows) for rows in x.split(500)]).double().mean().item()


def save_samples(flow: Flow, run: Run, path: Path) -> None:
    torch.manual_seed(run.seed)
    with suppress(torch.linalg.LinAlgError):  # of a matrix that became singular
        torch.save(flow.sample(SAMPLES, TEMPERATURE), path)


@torch.no_grad()
def inverse_error(flow: Flow, task: Data) -> float | None:
    """The largest error of an entry, as a part of the largest entry; None if there is no inverse."""
    x = task.noisy(task.test[:100], Generator().manual_seed(0))
    try:
        return finite(((flow.inverse(flow(x)[0]) - x).abs().max() / x.abs().max()).item())
    except torch.linalg.LinAlgError:
        return None


def finite(value: float) -> float | None:
    """None for what JSON cannot hold: the run diverged."""
    return value if math.isfinite(value) else None
