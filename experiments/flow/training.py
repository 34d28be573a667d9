"""The data of the flows, and one run: a flow that is trained and judged."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Generator, Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

import fasth
from experiments.flow.models import IMAGE_MIXERS, MIXERS, Flow
from experiments.harness import Record, Run, data, finite, means

BATCH, FIRST_BATCH, WARM_UP = 64, 1024, 50
CHECKS = 8  # how often a run is judged on validation data
POINTS = 40  # in a learning curve
HELD_OUT = 1000  # images for validation, and as many for the test
SAMPLES, TEMPERATURE = 12, 0.7


@dataclass(frozen=True)
class Data:
    """Scaled whole numbers. Noise between adjacent numbers makes them continuous, as a density needs."""

    name: str
    unit: str
    training: Tensor
    validation: Tensor
    test: Tensor
    spacing: Tensor  # the distance of adjacent numbers, after scaling
    score: Callable[[float], float]  # from −log p in nats

    def noisy(self, x: Tensor, generator: Generator) -> Tensor:
        return x + self.spacing * torch.rand(x.shape, generator=generator)

    def batch(self, size: int, generator: Generator) -> Tensor:
        return self.noisy(self.training[torch.randint(len(self.training), (size,), generator=generator)], generator)


@cache
def images() -> Data:
    """Pixels from −½ to ½; the score is in bits per pixel."""
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
    """Columns of variance 1; the score is in nats per row."""
    found = data.table()
    validation = torch.arange(len(found.training)) % 5 == 4
    first = found.unit / 2  # the noise is from 0 to 1, not from −½ to ½, and the columns have mean 0 with it
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


def name_of(run: Run) -> str:
    setting = ", ".join(run[name] for name in ("data", "task", "mixer", "start"))
    return f"{setting}, {run['lr']:g}, seed {run['seed']}, {run['steps']} steps"


def sample_file(run: Run, folder: Path) -> Path:
    return folder / "samples" / f"{name_of(run)}.pt"


def new_flow(run: Run) -> Flow:
    """The seed decides the matrices to start from and the coupling nets: they are the same for every mixer."""
    torch.manual_seed(run["seed"])
    mixer = (MIXERS | IMAGE_MIXERS)[run["mixer"]]
    return Flow(tuple(DATA[run["task"]]().training.shape[1:]), mixer, run["start"])


def train(run: Run, folder: Path) -> Record:
    """The scores at the best check on validation data, which is the last check unless the flow overfits; the curve of
    the training loss; and the error of the inverse. Samples of images go to a file, for the first seed.
    """
    task, flow, generator = DATA[run["task"]](), new_flow(run), Generator().manual_seed(1000 + run["seed"])
    steps = run["steps"]
    flow(task.batch(FIRST_BATCH, generator), normalize=True)
    optimizer = torch.optim.Adam(fasth.param_groups(flow, lr=run["lr"]))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: rate_at(i, steps))
    losses, scores = [], {"validation": math.inf, "test": math.inf}
    for i in range(1, steps + 1):
        losses.append(task.score(training_step(flow, task.batch(BATCH, generator), optimizer)))
        schedule.step()
        if i * CHECKS % steps < CHECKS and (now := nats(flow, task, "validation")) < scores["validation"]:
            scores = {"validation": now, "test": nats(flow, task, "test")}
    if run["task"] == "images" and run["seed"] == 0:
        save_samples(flow, run, folder)
    return {
        **{part: finite(task.score(value)) for part, value in scores.items()},
        "curve": means(losses, POINTS, 4),
        "inverse": inverse_error(flow, task),
    }


def rate_at(i: int, steps: int) -> float:
    """A factor that rises from 0 to 1 in the warm-up, and falls back to 0 as a cosine."""
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


def save_samples(flow: Flow, run: Run, folder: Path) -> None:
    path = sample_file(run, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(run["seed"])
    with suppress(LinAlgError):  # a matrix became singular
        torch.save(flow.sample(SAMPLES, TEMPERATURE), path)


@torch.no_grad()
def inverse_error(flow: Flow, task: Data) -> float | None:
    """The largest error of an entry, relative to the largest entry; None if a matrix is singular."""
    x = task.noisy(task.test[:100], Generator().manual_seed(0))
    try:
        return finite(((flow.inverse(flow(x)[0]) - x).abs().max() / x.abs().max()).item())
    except LinAlgError:
        return None
