"""Five tasks on real data: each has a network, batches, a loss and a score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from experiments.harness import data
from experiments.study import networks

CONTEXT = 64  # characters that the transformer sees


@dataclass(frozen=True)
class Task:
    name: str
    unit: str  # of the score
    higher_is_better: bool
    width: int  # of its network, except in the part of the study about widths
    steps: int  # in a training
    network: Callable[[int], nn.Module]  # called with the width
    batch: Callable[[Generator], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    score: Callable[[nn.Module], float]  # on held-out data

    def best(self, scores: list[float]) -> float:
        return max(scores) if self.higher_is_better else min(scores)


def _image_batch(generator: Generator) -> data.Examples:
    training = data.images().training
    chosen = torch.randint(len(training.classes), (64,), generator=generator)
    return data.Examples(training.inputs[chosen], training.classes[chosen])


def _image_loss(model: nn.Module, batch: data.Examples) -> Tensor:
    return F.cross_entropy(model(batch.inputs), batch.classes)


def accuracy(model: nn.Module) -> float:
    """The part of the test images that is classified correctly, in per cent."""
    inputs, classes = data.images().test
    parts = [model(part).argmax(-1) for part in inputs.split(500)]
    return 100 * (torch.cat(parts) == classes).double().mean().item()


def _text_batch(generator: Generator) -> Tensor:
    text = data.text().training
    return _windows(text, torch.randint(len(text) - CONTEXT, (16,), generator=generator))


def _windows(text: Tensor, starts: Tensor) -> Tensor:
    return text[starts.unsqueeze(1) + torch.arange(CONTEXT + 1)]


def _text_loss(model: nn.Module, windows: Tensor) -> Tensor:
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def _text_score(model: nn.Module) -> float:
    """Nats per character, in 256 windows of the held-out files."""
    text = data.text().test
    windows = _windows(text, torch.linspace(0, len(text) - CONTEXT - 1, 256).long())
    return sum(_text_loss(model, part).item() for part in windows.split(32)) / 8


def _table_batch(generator: Generator) -> Tensor:
    table = data.table()
    rows = table.training[torch.randint(len(table.training), (128,), generator=generator)]
    return table.noisy(rows, generator)


def _table_loss(model: nn.Module, rows: Tensor) -> Tensor:
    return model(rows).mean() / rows.shape[-1]


def _table_score(model: nn.Module) -> float:
    """Nats per dimension of the held-out rows, with the same noise for all models."""
    table = data.table()
    return _table_loss(model, table.noisy(table.test, Generator().manual_seed(0))).item()


def _pixels() -> int:
    return data.images().test.inputs[0].numel()


def _row() -> int:
    return data.images().test.inputs.shape[-1]


def image_task(name: str, width: int, steps: int, network: Callable[[int], nn.Module]) -> Task:
    return Task(name, "%", True, width, steps, network, _image_batch, _image_loss, accuracy)


MLP = image_task("MLP", 256, 600, lambda width: networks.mlp(_pixels(), width))
CONV = image_task("convolutions", 64, 400, networks.convnet)
RECURRENT = image_task("recurrent", 128, 400, lambda width: networks.Recurrent(_row(), width))
TRANSFORMER = Task(
    name="transformer",
    unit="nats",
    higher_is_better=False,
    width=64,
    steps=300,
    network=lambda width: networks.Transformer(data.CHARACTERS, width, CONTEXT),
    batch=_text_batch,
    loss=_text_loss,
    score=_text_score,
)


def flow_task(name: str, swap_couplings: bool) -> Task:
    return Task(
        name=name,
        unit="nats",
        higher_is_better=False,
        width=128,
        steps=600,
        network=lambda width: networks.Flow(data.table().test.shape[-1], width, swap_couplings=swap_couplings),
        batch=_table_batch,
        loss=_table_loss,
        score=_table_score,
    )


FLOW = flow_task("flow", swap_couplings=False)
FLOW_WHOLE = flow_task("flow, couplings too", swap_couplings=True)


def deep(layers: int, activation: type[nn.Module], name: str) -> Task:
    """A deep network without norms."""
    return image_task(
        f"{layers} layers, {name}", 64, 400, lambda width: networks.mlp(_pixels(), width, layers, activation)
    )


FIVE = (MLP, CONV, TRANSFORMER, RECURRENT, FLOW)
DEEP = tuple(deep(layers, *kind) for kind in ((nn.ReLU, "ReLU"), (nn.Tanh, "tanh")) for layers in (10, 30, 50))
TASKS = {task.name: task for task in (*FIVE, FLOW_WHOLE, *DEEP)}
