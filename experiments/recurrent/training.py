"""One run: a recurrent net that is trained and tested."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Generator, Tensor, nn

from experiments.harness import Record, Run, finite, means
from experiments.recurrent.models import Net, groups
from experiments.recurrent.tasks import TASKS, Task

HIDDEN, CLIP = 128, 1.0
POINTS = 40  # in a learning curve


def new_net(method: str, task: Task, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(method, task.inputs, HIDDEN, task.outputs)


def train(run: Run, _: Path) -> Record:
    """Loss and score of the training batches, as curves, and of the test."""
    task, generator = TASKS[run["task"]], Generator().manual_seed(1000 + run["seed"])
    net = new_net(run["method"], task, run["seed"])
    optimizer = torch.optim.Adam(groups(net, run["lr"]))
    found = [training_step(net, task, task.batch(generator), optimizer) for _ in range(run["steps"])]
    losses, scores = zip(*found, strict=True)
    with torch.no_grad():
        tested = [(net(x), y) for x, y in task.test()]
    return {
        "curve": means(losses, POINTS, 5),
        "scores": means(scores, POINTS, 5),
        "loss": finite(sum(task.loss(out, y).item() for out, y in tested) / len(tested), 5),
        "score": finite(sum(task.score(out, y) for out, y in tested) / len(tested), 5),
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
