"""One run: a network trained with one method, and verified before and after."""

from __future__ import annotations

import copy
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Generator, nn

import fasth
from experiments.harness import Record, Run, WrongAnswer, means
from experiments.study import methods
from experiments.study.networks import count_parameters
from experiments.study.tasks import TASKS, Task

# A run has the settings "experiment", "task", "method", "optimizer", "lr", "seed", "width" and "steps", and some have
# "sigma", "reflectors", "rank" or "penalty". The results are:
FOUND = ("seconds", "parameters", "curve", "score", "cut", "ms")
POINTS = 30  # in a learning curve
CUTS = (0.05, 0.1, 0.2)  # parts of the parameters that are left


def train(run: Run, _: Path) -> Record:
    """The score, the learning curve and the seconds of a run.

    The seed decides the network before its conversion, and the batches: all methods start from the same ones.
    """
    task = TASKS[run["task"]]
    torch.manual_seed(run["seed"])
    model = converted(task.network(run["width"]), run, task)
    start = time.perf_counter()
    losses = fit(model, task, run, Generator().manual_seed(1000 + run["seed"]))
    seconds = round(time.perf_counter() - start, 3)
    found: Record = {"seconds": seconds, "parameters": count_parameters(model), "curve": means(losses, POINTS, 4)}
    found["score"] = None  # stays None if it diverged
    if math.isfinite(losses[-1]) and all(parameter.isfinite().all() for parameter in model.parameters()):
        found["score"] = _score(model, task)
        check_weights(model)
        if "penalty" in run:
            found["cut"] = {str(part): cut(model, part, task, run) for part in CUTS}
    return found


def fit(model: nn.Module, task: Task, run: Run, generator: Generator) -> list[float]:
    """Trains the model and returns the loss of each step."""
    optimizer = optimizer_of(model.train(), run)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, run["steps"])
    losses = []
    for _ in range(run["steps"]):
        losses.append(step(model, task, task.batch(generator), optimizer, run.get("penalty", 0.0)))
        schedule.step()
    return losses


def converted(model: nn.Module, run: Run, task: Task) -> nn.Module:
    """The network with its weights held as the method does; verified where the method keeps the function."""
    if "rank" in run:
        return methods.to_thin(model, run["rank"])
    if run["method"] in methods.PEERS:
        methods.plain_orthogonal_start(model)
    plain = copy.deepcopy(model)
    model = methods.CONVERSIONS[run["method"]](model)
    if run["method"] in methods.SAME_FUNCTION:
        with torch.no_grad():
            batch = task.batch(Generator().manual_seed(0))
            expected, got = task.loss(plain, batch).item(), task.loss(model, batch).item()
        if not math.isclose(expected, got, rel_tol=1e-4, abs_tol=1e-5):
            raise WrongAnswer(f"{run}: the converted network should have the loss {expected}; got {got}")
    return model


def optimizer_of(model: nn.Module, run: Run) -> torch.optim.Optimizer:
    factors = {name: run[name] for name in ("sigma", "reflectors") if name in run}
    one_rate = run["method"] == methods.ONE_RATE
    return methods.optimizer(model, run["optimizer"], run["lr"], one_rate=one_rate, **factors)


def step(model: nn.Module, task: Task, batch: Any, optimizer: torch.optim.Optimizer, penalty: float = 0.0) -> float:
    optimizer.zero_grad()
    loss = task.loss(model, batch)
    whole = loss + penalty * fasth.nuclear_norm(model) if penalty else loss
    whole.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def check_weights(model: nn.Module) -> None:
    """Checks that the dense weights have the singular values that the layers hold: U and V are still orthogonal."""
    for W, sigma in methods.weights(model):
        expected = sigma.detach().double().abs().sort(descending=True).values
        got = torch.linalg.svdvals(W.double())[: len(expected)]
        limit = 1e-5 * max(expected[0].item(), 1e-3) * math.sqrt(max(W.shape))
        if not torch.allclose(got, expected, rtol=0, atol=limit):
            raise WrongAnswer(f"a weight of shape {tuple(W.shape)} has other singular values than its layer holds")


def cut(model: nn.Module, part: float, task: Task, run: Run) -> dict[str, float]:
    """Cuts off the smallest singular values until at most this part of the parameters is left: the score then, and
    the score after a tenth more training.

    Every layer keeps the same part of its energy, except the last one, which is small and needs its whole rank.
    """
    *_, last = (name for name, module in model.named_modules() if isinstance(module, (nn.Linear, fasth.LinearSVD)))
    whole = count_parameters(fasth.to_dense(model))

    def compressed(energy: float, trainable: bool = False) -> nn.Module:
        def chosen(name: str, _: nn.Module) -> bool:
            return name != last

        return fasth.compress(model, energy=energy, trainable=trainable, filter=chosen, report=[])

    low, high = 1e-6, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        small = count_parameters(compressed(middle)) <= part * whole
        low, high = (middle, high) if small else (low, middle)
    found = {"parameters": count_parameters(compressed(low)), "score": _score(compressed(low), task)}
    smaller = compressed(low, trainable=True)
    fit(
        smaller, task, {**run, "steps": run["steps"] // 10, "penalty": 0.0}, Generator().manual_seed(2000 + run["seed"])
    )
    return {**found, "trained on": _score(smaller, task)}


@torch.no_grad()
def _score(model: nn.Module, task: Task) -> float:
    return round(task.score(model.eval()), 4)
