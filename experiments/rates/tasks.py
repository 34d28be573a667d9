"""The tasks. The rule was chosen by the scores on CHOOSING; JUDGING and TIMED were run once, when it was fixed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from experiments.harness import data
from experiments.harness.data import Text
from experiments.rates import networks, texts
from experiments.rates.texts import Regression
from experiments.study.tasks import MLP, RECURRENT, TRANSFORMER, Task, image_task

CONTEXT = 64


def _regression(name: str, width: int, steps: int, rows: Callable[[], Regression]) -> Task:
    def batch(generator: Generator) -> Any:
        inputs, targets = rows().training
        chosen = torch.randint(len(inputs), (64,), generator=generator)
        return inputs[chosen], targets[chosen]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    def network(width: int) -> nn.Module:
        inputs, targets = rows().test
        return networks.regressor(inputs.shape[1], targets.shape[1], width)

    def score(model: nn.Module) -> float:
        return 1000 * loss(model, rows().test).item()

    return Task(name, "1000·MSE", False, width, steps, network, batch, loss, score)


def _characters(
    name: str, width: int, steps: int, rows: int, text: Callable[[], Text], network: Callable[[int], nn.Module]
) -> Task:
    def windows(codes: Tensor, starts: Tensor) -> Tensor:
        return codes[starts.unsqueeze(1) + torch.arange(CONTEXT + 1)]

    def batch(generator: Generator) -> Tensor:
        codes = text().training
        return windows(codes, torch.randint(len(codes) - CONTEXT, (rows,), generator=generator))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def score(model: nn.Module) -> float:
        """Nats for a character of 512 windows of the held-out text."""
        codes = text().test
        held_out = windows(codes, torch.linspace(0, len(codes) - CONTEXT - 1, 512).long())
        return sum(loss(model, part).item() for part in held_out.split(64)) / 8

    return Task(name, "nats", False, width, steps, network, batch, loss, score)


def _autoencoder(width: int, steps: int) -> Task:
    def batch(generator: Generator) -> Tensor:
        images = data.images().training.inputs
        return images[torch.randint(len(images), (128,), generator=generator)]

    def loss(model: nn.Module, images: Tensor) -> Tensor:
        return F.mse_loss(model(images), images.flatten(1))

    def score(model: nn.Module) -> float:
        return 1000 * loss(model, data.images().test.inputs[:2000]).item()

    def network(width: int) -> nn.Module:
        return networks.autoencoder(data.images().test.inputs[0].numel(), width)

    return Task("autoencoder", "1000·MSE", False, width, steps, network, batch, loss, score)


def _error(task: Task) -> Task:
    """Replaces the accuracy by the error on 4,000 test images, so that lower is better for every task."""

    def score(model: nn.Module) -> float:
        inputs, classes = (part[:4000] for part in data.images().test)
        found = torch.cat([model(part).argmax(-1) for part in inputs.split(500)])
        return 100 * (found != classes).double().mean().item()

    return replace(task, higher_is_better=False, score=score)


def _width_of_images() -> int:
    return data.images().test.inputs.shape[-1]


def convnet_with_norms(width: int) -> nn.Module:
    """Three 3×3 convolutions, each with batch norm."""
    layers: list[nn.Module] = [nn.Unflatten(1, (1, -1))]
    for inputs, outputs, stride in ((1, width // 2, 2), (width // 2, width, 2), (width, width, 1)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def _of_32_images(task: Task) -> Task:
    def batch(generator: Generator) -> data.Examples:
        return data.Examples(*(part[:32] for part in task.batch(generator)))

    return replace(task, batch=batch)


def _shorter(task: Task, steps: int, width: int = 0) -> Task:
    return replace(task, steps=steps, width=width or task.width)


# The study's tasks, shorter, and one with batch norm.
CHOOSING = (
    _shorter(_error(MLP), 400),
    _error(image_task("convolutions, batch norm", 32, 200, convnet_with_norms)),
    _shorter(_error(RECURRENT), 200),
    _shorter(TRANSFORMER, 200),
)
# None of these, of their texts and tables, and of their networks has chosen anything. Images are the same as above.
JUDGING = (
    _regression("table", 128, 400, texts.table),
    _regression("photograph", 256, 500, texts.photograph),
    _characters("LSTM", 128, 120, 32, texts.english, lambda width: networks.Characters(data.CHARACTERS, width)),
    _error(image_task("ResNet, batch norm", 32, 150, networks.ResNet)),
    _autoencoder(512, 120),
    _error(image_task("ViT", 64, 120, lambda width: networks.ViT(_width_of_images(), width))),
    _characters("GPT", 64, 150, 32, texts.packages, lambda width: networks.GPT(data.CHARACTERS, width, CONTEXT)),
)
# Two of these for longer, with smaller batches of images; and a GPT with 4,096 rows a step.
TIMED = (
    replace(_shorter(JUDGING[2], 480), name="LSTM, 480 steps"),
    replace(_shorter(_of_32_images(JUDGING[3]), 600), name="ResNet, 32 images"),
    _characters(
        "GPT, 4,096 rows", 256, 80, 64, texts.packages, lambda width: networks.GPT(data.CHARACTERS, width, CONTEXT)
    ),
)
TASKS = {task.name: task for task in (*CHOOSING, *JUDGING, *TIMED)}
