"""Measures a training step when some of a network's weights are SVDs, as a multiple of the plain network's.

An LSTM, a residual net on 32 images and a GPT of 4,096 rows and width 256, with AdamW and one thread. Times are medians
of single steps, taken in turns. W is formed once a step where there are many rows; ``fasth.cached`` forms it once for
several batches whose gradients are added.

Run: python benchmarks/svd_costs.py, and make readme to put benchmarks/rates/costs.md into docs/training.md
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Generator, nn

import fasth

sys.path.append(str(Path(__file__).parents[1]))
from experiments.harness import data
from experiments.rates import networks
from experiments.rates.tasks import TASKS
from experiments.study.tasks import Task
from fasth import _files
from fasth.tools.reproduce.tables import Table, markdown
from fasth.tools.timing import compare

OUT = Path(__file__).parent / "rates" / "costs.md"
BATCHES = 4  # whose gradients are added, in one line of the table
ROUNDS = 5


def tasks() -> list[Task]:
    wide = replace(TASKS["GPT"], name="GPT, 256 wide, 4,096 rows", width=256)
    gpt = replace(wide, network=lambda width: networks.GPT(data.CHARACTERS, width, 64))
    return [TASKS["LSTM"], TASKS["ResNet, batch norm"], gpt]


def attention(name: str, _: nn.Module) -> bool:
    return "qkv" in name or name.endswith("out")


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "SVD": partial(fasth.to_svd, report=[]),
    "SVD, a quarter of the rank": lambda model: thin(model),
    "SVD in the attention only": partial(fasth.to_svd, filter=attention, report=[]),
}


def thin(model: nn.Module) -> nn.Module:
    """Every linear layer with a quarter of its singular values."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            rank = max(min(layer.weight.shape) // 4, 1)
            model = fasth.to_svd(model, rank=rank, filter=lambda n, _, one=name: n == one, report=[])
    return model


def step(model: nn.Module, task: Task, batch: Any, optimizer: torch.optim.Optimizer, batches: int) -> None:
    optimizer.zero_grad()
    if batches == 1:
        task.loss(model, batch).backward()
    else:
        with fasth.cached():
            sum(task.loss(model, batch) for _ in range(batches)).backward()  # type: ignore[union-attr]
    optimizer.step()


def costs(task: Task) -> list[str]:
    torch.manual_seed(0)
    plain = task.network(task.width)
    batch: Any = task.batch(Generator().manual_seed(0))
    if task.name.startswith("GPT, 256"):
        batch = torch.cat((batch, batch))
    if task.name.startswith("ResNet"):
        batch = type(batch)(*(part[:32] for part in batch))
    calls: dict[str, Callable[[], object]] = {}
    for name, convert in WAYS.items():
        if "attention" in name and not task.name.startswith("GPT"):
            continue
        if "rank" in name and task.name.startswith("LSTM"):
            continue  # an LSTMSVD has all its singular values
        model = convert(copy.deepcopy(plain))
        optimizer = torch.optim.AdamW(fasth.param_groups(model, lr=1e-3))
        calls[name] = partial(step, model, task, batch, optimizer, 1)
        if name in ("plain", "SVD"):
            calls[f"{name}, {BATCHES}"] = partial(step, model, task, batch, optimizer, BATCHES)
    ms = {
        t.name: t.median for t in compare(calls, device=torch.device("cpu"), rounds=ROUNDS, min_time=0, time_limit=60)
    }
    cells = [ms[name] / ms["plain"] if name in ms else None for name in WAYS if name != "plain"]
    cells.append(ms[f"SVD, {BATCHES}"] / ms[f"plain, {BATCHES}"])
    return [task.name, f"{1e3 * ms['plain']:.0f}", *("–" if cell is None else f"{cell:.2f}" for cell in cells)]


def main() -> None:
    torch.set_num_threads(1)
    columns = ["task", "plain, ms", *(name for name in WAYS if name != "plain"), f"SVD, cached over {BATCHES} batches"]
    table = Table("The cost of a training step, over that of the plain network", columns, [costs(t) for t in tasks()])
    _files.write(OUT, markdown(table) + "\n")
    print(OUT.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
