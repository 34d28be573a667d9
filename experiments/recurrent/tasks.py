"""The tasks of the recurrent nets: copy memory, the adding problem, and images pixel by pixel.

Every step draws a new batch, and few images come twice, so that nothing can be learnt by heart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from experiments.harness import data

SYMBOLS, RECALLED = 8, 10
HELD_OUT = 2000  # images for the test


@dataclass(frozen=True)
class Task:
    name: str
    inputs: int
    outputs: int
    steps: int
    batch_size: int
    batch: Callable[[Generator], tuple[Tensor, Tensor]]  # inputs, (time, batch, inputs), and targets
    test: Callable[[], list[tuple[Tensor, Tensor]]]  # batches
    loss: Callable[[Tensor, Tensor], Tensor]  # from outputs, (time, batch, outputs), and targets
    score: Callable[[Tensor, Tensor], float]
    unit: str  # of the score, and an arrow: up where a larger score is better


def copy_memory(length: int, steps: int, size: int) -> Task:
    """Ten symbols, ``length`` blanks, then the ten symbols again. The loss of an even guess is scaled to 1."""
    guessing = RECALLED * math.log(SYMBOLS) / (length + 2 * RECALLED)

    def batch(generator: Generator) -> tuple[Tensor, Tensor]:
        symbols = torch.randint(1, SYMBOLS + 1, (RECALLED, size), generator=generator)
        x = torch.zeros(length + 2 * RECALLED, size, dtype=torch.long)
        y = torch.zeros_like(x)
        x[:RECALLED], x[-RECALLED - 1], y[-RECALLED:] = symbols, SYMBOLS + 1, symbols
        return F.one_hot(x, SYMBOLS + 2).float(), y

    return Task(
        name=f"copy, {length}",
        inputs=SYMBOLS + 2,
        outputs=SYMBOLS + 1,
        steps=steps,
        batch_size=size,
        batch=batch,
        test=lambda: drawn(batch),
        loss=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()) / guessing,
        score=lambda out, y: 100 * (out[-RECALLED:].argmax(-1) == y[-RECALLED:]).float().mean().item(),
        unit="% ↑",
    )


def adding(length: int, steps: int, size: int) -> Task:
    """The sum of two marked numbers, one from each half of a sequence. The error of the answer 1 is 1/6."""

    def batch(generator: Generator) -> tuple[Tensor, Tensor]:
        numbers, marks, row = (
            torch.rand(length, size, generator=generator),
            torch.zeros(length, size),
            torch.arange(size),
        )
        for first, last in ((0, length // 2), (length // 2, length)):
            marks[torch.randint(first, last, (size,), generator=generator), row] = 1
        return torch.stack((numbers, marks), -1), (numbers * marks).sum(0)

    return Task(
        name=f"adding, {length}",
        inputs=2,
        outputs=1,
        steps=steps,
        batch_size=size,
        batch=batch,
        test=lambda: drawn(batch),
        loss=lambda out, y: F.mse_loss(out[-1, :, 0], y),
        score=lambda out, y: F.mse_loss(out[-1, :, 0], y).item(),
        unit="squared error ↓",
    )


def drawn(batch: Callable[[Generator], tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Batches for the test, with a seed that no training has."""
    generator = Generator().manual_seed(123_456)
    return [batch(generator) for _ in range(20)]


def pixel_by_pixel(permuted: bool, steps: int, size: int) -> Task:
    """The class of an image that the net sees one pixel at a time, row by row or in a random order."""

    def prepared(images: Tensor) -> Tensor:
        return images.flatten(1)[:, order(permuted)].mT.unsqueeze(-1)

    def batch(generator: Generator) -> tuple[Tensor, Tensor]:
        images, classes = data.images().training
        chosen = torch.randint(len(classes), (size,), generator=generator)
        return prepared(images[chosen]), classes[chosen]

    def test() -> list[tuple[Tensor, Tensor]]:
        images, classes = (part[:HELD_OUT] for part in data.images().test)
        return [(prepared(x), y) for x, y in zip(images.split(250), classes.split(250), strict=True)]

    return Task(
        name="pixels, permuted" if permuted else "pixels",
        inputs=1,
        outputs=10,
        steps=steps,
        batch_size=size,
        batch=batch,
        test=test,
        loss=lambda out, y: F.cross_entropy(out[-1], y),
        score=lambda out, y: 100 * (out[-1].argmax(-1) == y).float().mean().item(),
        unit="% ↑",
    )


@cache
def order(permuted: bool) -> Tensor:
    count = data.images().training.inputs[0].numel()
    return torch.randperm(count, generator=Generator().manual_seed(0)) if permuted else torch.arange(count)


TASKS = {
    task.name: task
    for task in (
        copy_memory(100, steps=600, size=32),
        copy_memory(300, steps=600, size=20),
        copy_memory(1000, steps=500, size=20),
        adding(200, steps=1200, size=32),
        adding(750, steps=500, size=16),
        pixel_by_pixel(False, steps=300, size=50),
        pixel_by_pixel(True, steps=200, size=50),
    )
}
