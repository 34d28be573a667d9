"""The data, an attack, and one run: a network that is trained, certified and attacked."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

import fasth
from experiments.harness import Record, Run, WrongAnswer, data, finite, means
from experiments.lipschitz.networks import METHODS, by_construction, network
from fasth.nn.lipschitz import LinearUnitRows, bound, certified_radius, margin_loss

BATCH, MARGIN = 128, 1.0
POINTS = 20  # of the learning curve
HELD_OUT, ATTACKED, ATTACK_STEPS = 2000, 500, 15
RADII = (36 / 255, 72 / 255, 108 / 255, 1.0)
GRID = [i / 20 for i in range(31)]  # radii of the picture


class Task(NamedTuple):
    """Images (n, 1, height, width) from 0 to 1, and their classes."""

    training: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


@cache
def task(name: str) -> Task:
    _, levels, training, test = data.pixels(name)
    x, y = training.inputs.unsqueeze(1) / (levels - 1), training.classes.long()
    held_out = min(HELD_OUT, len(x) // 5)
    last = test.inputs.unsqueeze(1) / (levels - 1), test.classes.long()
    return Task((x[:-held_out], y[:-held_out]), (x[-held_out:], y[-held_out:]), last)


def new_network(run: Run) -> nn.Sequential:
    torch.manual_seed(run["seed"])
    return network(METHODS[run["method"]], *task(run["data"]).training[0].shape[-2:])


def loss_of(method: str) -> Callable[[Tensor, Tensor], Tensor]:
    return (lambda scores, y: margin_loss(scores, y, margin=MARGIN)) if METHODS[method].margin else F.cross_entropy


def training_step(
    net: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer
) -> float:
    optimizer.zero_grad()
    loss = loss_of(net(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def train(run: Run, folder: Path) -> Record:
    """Accuracies on validation data, and, but for the first seed, on test data: clean, certified and attacked."""
    found, net, generator = task(run["data"]), new_network(run), Generator().manual_seed(1000 + run["seed"])
    (x, y), steps, loss = found.training, run["steps"], loss_of(run["method"])
    optimizer = torch.optim.Adam(fasth.param_groups(net, lr=run["lr"], optimizer=torch.optim.Adam))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.5 * (1 + math.cos(math.pi * i / steps)))
    losses = []
    for _ in range(steps):
        batch = torch.randint(len(x), (BATCH,), generator=generator)
        losses.append(training_step(net, loss, x[batch], y[batch], optimizer))
        schedule.step()
    net.eval()
    constant = bound(net[:-1], rules=by_construction()).value
    record: Record = {"curve": means(losses, POINTS, 4), "constant": finite(constant, 6)}
    radii = radii_of(net, constant, *found.validation)
    clean, certified = fractions(radii, (0.0, RADII[0]))
    record["validation"] = finite((clean + certified) / 2, 4)
    if not run["seed"] and not run["judged"]:
        return record | {"clean": None, "certified": None, "attacked": None, "grid": None}
    radii = radii_of(net, constant, *found.test)
    attacked = attacked_accuracies(net, radii, *found.test)
    return record | {
        "clean": fractions(radii, (0.0,))[0],
        "certified": fractions(radii, RADII),
        "attacked": attacked,
        "grid": fractions(radii, GRID),
    }


@torch.no_grad()
def radii_of(net: nn.Sequential, constant: float, x: Tensor, y: Tensor) -> Tensor:
    """The certified radius of each image, negative where the class is wrong.

    ``constant``: of what is before the last layer, whose rows are known."""
    last = net[-1]
    rows: Any = last.rows if isinstance(last, LinearUnitRows) else last.weight
    with fasth.cached():
        scores = torch.cat([net(images) for images in x.split(1000)])
    return certified_radius(scores, y, lipschitz=constant, rows=rows)


def fractions(radii: Tensor, least: tuple[float, ...] | list[float]) -> list[float]:
    """The part of the images that are right within each of these radii."""
    return [round((radii > radius).double().mean().item(), 4) for radius in least]


def attack(net: nn.Module, x: Tensor, y: Tensor, radius: float, steps: int = ATTACK_STEPS) -> Tensor:
    """Images within ``radius`` of x that are to be misclassified: projected gradient descent on the margin.

    Each step has a length of 2.5 radius / steps along the gradient of each image (Madry et al., 2018, in the Euclidean
    norm, from a random start); of all steps the first that was misclassified stays.
    """
    e = torch.randn_like(x)
    e = radius * e / norms(e)
    for _ in range(steps):
        e.requires_grad_()
        scores = net((x + e).clamp(0, 1))
        own = scores.gather(1, y[:, None])[:, 0]
        others = scores.scatter(1, y[:, None], -math.inf).amax(1)
        (gradient,) = torch.autograd.grad((others - own).sum(), e)
        right = (own > others)[:, None, None, None]
        moved = e.detach() + right * 2.5 * radius / steps * gradient / norms(gradient)
        e = moved * (radius / norms(moved)).clamp(max=1)
    return (x + e).clamp(0, 1)


def norms(x: Tensor) -> Tensor:
    return x.flatten(1).norm(dim=1).clamp(min=1e-12)[:, None, None, None]


def attacked_accuracies(net: nn.Sequential, radii: Tensor, x: Tensor, y: Tensor) -> list[float]:
    """Accuracy of the first images under the attack, for each of RADII. None that is certified may fail."""
    x, y, radii = x[:ATTACKED], y[:ATTACKED], radii[:ATTACKED]
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    accuracies = []
    with fasth.cached():
        for radius in RADII:
            torch.manual_seed(0)
            right = net(attack(net, x, y, radius)).argmax(1) == y
            if (broken := int((~right & (radii > radius * (1 + 1e-4))).sum())) > 0:
                raise WrongAnswer(f"{broken} images were certified for {radius:.3f} and misclassified within it")
            accuracies.append(round((right & (radii > 0)).double().mean().item(), 4))
    return accuracies
