"""Which rates adapters train well at, beside LoRA's: a sweep over tasks that are not those of the comparisons.

Networks learn one task and are adapted to another one, every layer but the last by one kind of adapter, by Adam with
one rate for all of its numbers. The best rate of a kind as a multiple of LoRA's best is what ``fasth.param_groups``
multiplies its rates by.

Run: python benchmarks/adapter_rates.py --help
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Generator, Tensor, nn

from fasth import adapters
from fasth.tools.environment import describe

sys.path.append(str(Path(__file__).parents[1]))
from experiments.harness import data, tables
from experiments.harness.results import FILE, Results, Run, finite

OUT = Path(__file__).parent / "adapters" / "rates"
RATES = tuple(round(10 ** (-4 + i / 2), 6) for i in range(8))
SEEDS, STEPS, BATCH, R = 2, 200, 64, 8
Batch = tuple[Tensor, Tensor]


class LoRA(nn.Module):
    """layer(x) + B A x with B = 0 at the start: LoRA with alpha = r."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.A = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(R, layer.in_features), a=math.sqrt(5)))
        self.B = nn.Parameter(torch.zeros(layer.out_features, R))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + F.linear(F.linear(x, self.A), self.B)


def with_lora(model: nn.Module) -> None:
    model.requires_grad_(False)
    for name, layer in [*model.named_modules()]:
        if is_adapted(name, layer):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, LoRA(layer))  # type: ignore[arg-type]


def is_adapted(name: str, layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and name != "head"


# Functions that turn a trained network into one with trainable adapters.
KINDS: dict[str, Callable[[nn.Module], object]] = {
    "LoRA": with_lora,
    "reflections": lambda model: adapters.add(model, "reflections", R, is_adapted),
    "reflections, output": lambda model: adapters.add(model, "reflections", R, is_adapted, side="output"),
    "reflections, both": lambda model: adapters.add(model, "reflections", R // 2, is_adapted, side="both"),
    "orthogonal": lambda model: adapters.add(model, "orthogonal", target=is_adapted),
    "orthogonal, blocks of 16": lambda model: adapters.add(model, "orthogonal", target=is_adapted, block_size=16),
}


class Network(nn.Module):
    """Layers of one width, and a head."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second, self.head = (
            nn.Linear(inputs, width),
            nn.Linear(width, width),
            nn.Linear(width, outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(x)))))


class Attention(nn.Module):
    """A transformer of one block that reads twelve tokens at once, and names one at each place."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(16, d), nn.Parameter(torch.randn(12, d) / 4)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down, self.head = nn.Linear(d, 4 * d), nn.Linear(4 * d, d), nn.Linear(d, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places
        y = F.layer_norm(x, x.shape[-1:])
        q, k, v = (part(y).unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        x = x + self.down(torch.relu(self.up(F.layer_norm(x, x.shape[-1:]))))
        return self.head(F.layer_norm(x, x.shape[-1:]))


class Task:
    """Two tasks of one network: ``batch(new, generator)`` gives one of the first or of the new one."""

    def __init__(self, network: Callable[[], nn.Module], batch: Callable[[bool, Generator], Batch]) -> None:
        self.network, self.batch = network, batch


def of_images(new: bool, generator: Generator) -> Batch:
    """The classes 0 to 4, and then 5 to 9 on the same outputs."""
    inputs, classes = _classes(new)
    chosen = torch.randint(len(classes), (BATCH,), generator=generator)
    return inputs[chosen], classes[chosen]


@cache
def _classes(new: bool) -> Batch:
    inputs, classes = data.images().training
    of_task = (classes >= 5) == new
    return inputs[of_task].flatten(1)[:5000], classes[of_task][:5000] % 5


def of_teacher(new: bool, generator: Generator) -> Batch:
    """The answers of a network of random weights, and then of the same with each weight changed by a third."""
    x = torch.randn(BATCH, 32, generator=generator)
    with torch.no_grad():
        return x, _teacher(new)(x)


@cache
def _teacher(new: bool) -> nn.Module:
    torch.manual_seed(100)
    teacher = Network(32, 64, 8)
    for p in teacher.parameters() if new else ():
        p.data += torch.randn_like(p) * p.std() / 3
    return teacher


def of_sorting(new: bool, generator: Generator) -> Batch:
    """The tokens in their order, and then in the opposite one."""
    tokens = torch.randint(16, (BATCH, 12), generator=generator)
    return tokens, tokens.sort(-1, descending=new).values


TASKS = {
    "teacher, 64": Task(lambda: Network(32, 64, 8), of_teacher),
    "teacher, 512": Task(lambda: Network(32, 512, 8), of_teacher),
    "images, 128": Task(lambda: Network(data.images().training.inputs[0].numel(), 128, 5), of_images),
    "sorting, 64": Task(lambda: Attention(64), of_sorting),
}


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    out = model(x)
    return F.mse_loss(out, y) if y.is_floating_point() else F.cross_entropy(out.flatten(0, -2), y.flatten())


def fit(model: nn.Module, task: Task, new: bool, rate: float, steps: int, seed: int) -> float:
    """Trains with a cosine schedule; the mean loss of the last tenth of the steps."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator, losses = Generator().manual_seed(seed), []
    for _ in range(steps):
        loss = loss_of(model, task.batch(new, generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return statistics.fmean(losses[-max(1, steps // 10) :])


@cache
def trained(name: str, seed: int, steps: int) -> nn.Module:
    torch.manual_seed(seed)
    model = TASKS[name].network()
    fit(model, TASKS[name], False, 1e-3, 4 * steps, seed)
    return model


def train(run: Run) -> Run:
    model = copy.deepcopy(trained(run["task"], run["seed"], run["steps"]))
    torch.manual_seed(run["seed"])
    KINDS[run["kind"]](model)
    loss = fit(model, TASKS[run["task"]], True, run["rate"], run["steps"], run["seed"] + 1000)
    return {"loss": finite(loss, 6)}


def best_rate(losses: dict[float, float]) -> float:
    """The minimum of a parabola of log loss through the best rate and its neighbours, in the logarithm of the rate."""
    rates = sorted(losses)
    i = min(range(len(rates)), key=lambda i: losses[rates[i]])
    if not 0 < i < len(rates) - 1 or not all(math.isfinite(losses[r]) for r in rates[i - 1 : i + 2]):
        return rates[i]
    left, middle, right = (math.log(losses[r]) for r in rates[i - 1 : i + 2])
    curvature = left - 2 * middle + right
    shift = 0.0 if curvature <= 0 else (left - right) / (2 * curvature)
    return rates[i] * (rates[i + 1] / rates[i]) ** shift


def summary(results: Results, runs: list[Run]) -> list[tables.Table]:
    """The best rates, as multiples of LoRA's, and the losses at them."""
    losses: dict[tuple[str, str], dict[float, list[float]]] = {}
    for record in results.finished(runs):
        value = math.inf if record["loss"] is None else record["loss"]
        losses.setdefault((record["task"], record["kind"]), {}).setdefault(record["rate"], []).append(value)
    means = {key: {rate: statistics.fmean(found) for rate, found in by.items()} for key, by in losses.items()}
    best = {key: best_rate(by) for key, by in means.items()}
    rates, scores = [], []
    for kind in KINDS:
        multiples = [best[task, kind] / best[task, "LoRA"] for task in TASKS]
        mean = math.exp(statistics.fmean(map(math.log, multiples)))
        rates.append([kind, *(f"{best[task, kind]:.2g} ({m:.2g})" for task, m in zip(TASKS, multiples, strict=True)),
                      f"{mean:.2g}"])  # fmt: skip
        scores.append([kind, *(f"{min(means[task, kind].values()):.3g}" for task in TASKS)])
    names = ["adapter", *TASKS]
    return [
        tables.Table("Best rate (as a multiple of LoRA's)", [*names, "multiple, mean"], rates),
        tables.Table("Loss at the best of the rates that were tried", names, scores),
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s; four times that to learn first")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=OUT, help="a folder; an interrupted command resumes from it")
    options = parser.parse_args(arguments)
    console = Console()
    results = Results(options.out / FILE, ("loss",), {"versions": describe() | {"torch": torch.__version__}})
    runs: list[dict[str, Any]] = [
        {"task": task, "kind": kind, "rate": rate, "seed": seed, "steps": options.steps}
        for task in TASKS
        for seed in range(options.seeds)
        for kind in KINDS
        for rate in RATES
    ]
    for i, run in enumerate(missing := results.missing(runs)):
        results.add(run | train(run))
        if i % 20 == 0:
            console.print(f"{i} of {len(missing)}: {run}")
    note = f"{options.seeds} seeds, {options.steps} steps of {BATCH}, r = {R}, {R // 2} a side for both sides."
    tables.write(options.out / "table.md", summary(results, runs), note, console)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
