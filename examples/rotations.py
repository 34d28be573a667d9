"""Four bits for the weights and the activations of a trained network, after a rotation that its layers undo.

A residual network without gains in its norms computes the same if a rotation R turns its residual stream: what writes
into the stream becomes R W, what reads from it W Rᵀ. Rounded to four bits it does not, and some R round better than
others: a random Hadamard matrix, or one that is trained on the loss of the rounded network, as in SpinQuant. Then R is
folded into the weights, and costs nothing.

Run: python examples/rotations.py --help
"""

from __future__ import annotations

import argparse
import math
import statistics
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn

import fasth
from fasth import _files
from fasth.tools.reproduce.tables import Table, markdown

D, BLOCKS, BATCH, BITS = 64, 3, 64, 4
OUT = Path(__file__).parents[1] / "build" / "rotations"
RATES = {"Cayley SGD": (0.05, 0.2, 0.8), "**LinearOrthogonal, Adam**": (1e-3, 3e-3, 1e-2)}


class Network(nn.Module):
    """h = W_in x, then h + W_down relu(W_up h/‖h‖) in each block, then the head of h/‖h‖."""

    def __init__(self) -> None:
        super().__init__()
        self.read_in = nn.Linear(64, D, bias=False)
        self.up = nn.ModuleList(nn.Linear(D, 2 * D) for _ in range(BLOCKS))
        self.down = nn.ModuleList(nn.Linear(2 * D, D, bias=False) for _ in range(BLOCKS))
        self.head = nn.Linear(D, 10)

    def forward(self, x: Tensor, R: Tensor | None = None, rounded: bool = False) -> Tensor:
        """The logits; with R the stream is turned by it, and with ``rounded`` every product is of numbers of 4 bits."""
        low = four_bits if rounded else lambda t: t

        def write(layer: nn.Module, y: Tensor) -> Tensor:
            W: Tensor = layer.weight  # type: ignore[assignment]
            return F.linear(low(y), low(W if R is None else R @ W))

        def read(layer: nn.Module, h: Tensor) -> Tensor:
            W: Tensor = layer.weight  # type: ignore[assignment]
            return F.linear(low(F.rms_norm(h, (D,))), low(W if R is None else W @ R.mT), layer.bias)  # type: ignore[arg-type]

        h = write(self.read_in, x)
        for up, down in zip(self.up, self.down, strict=True):
            h = h + write(down, torch.relu(read(up, h)))
        return read(self.head, h)


def four_bits(t: Tensor) -> Tensor:
    """Every row to whole numbers from −7 to 7 times a scale; backward as if it were not rounded."""
    scale = t.detach().abs().amax(-1, keepdim=True).clamp_min(1e-8) / (2 ** (BITS - 1) - 1)
    return t + ((t / scale).round() * scale - t).detach()


class Data(NamedTuple):
    training: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def digits(seed: int) -> Data:
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    x, y = torch.tensor(pixels, dtype=torch.float32)[order] / 8 - 1, torch.tensor(labels)[order]
    return Data((x[:1200], y[:1200]), (x[1200:], y[1200:]))


def batches(data: Data, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator, (x, y) = torch.Generator().manual_seed(seed), data.training
    for _ in range(steps):
        chosen = torch.randint(len(y), (BATCH,), generator=generator)
        yield x[chosen], y[chosen]


def trained_network(data: Data, steps: int, seed: int) -> Network:
    """Trains a network with a few channels much larger than the others, as in language models."""
    torch.manual_seed(seed)
    model = Network()
    with torch.no_grad():
        model.read_in.weight[:4] *= 30
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for x, y in batches(data, steps, seed):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.requires_grad_(False)


def hadamard(seed: int) -> Tensor:
    """A Hadamard matrix with columns of random signs, orthogonal."""
    H = torch.ones(1, 1)
    while len(H) < D:
        H = torch.cat((torch.cat((H, H), 1), torch.cat((H, -H), 1)))
    return H / math.sqrt(D) * torch.randint(2, (D,), generator=torch.Generator().manual_seed(seed)).mul(2).sub(1)


Loss = Callable[[Tensor, tuple[Tensor, Tensor]], Tensor]


def by_cayley_sgd(R: Tensor, loss: Loss, steps: list[tuple[Tensor, Tensor]], rate: float) -> Tensor:
    """Li, Li, Todorovic: momentum, and two steps of an iteration for the Cayley map, as SpinQuant has it."""
    momentum = torch.zeros_like(R)
    for i, batch in enumerate(steps):
        R = R.detach().requires_grad_()
        (g,) = torch.autograd.grad(loss(R, batch), R)
        with torch.no_grad():
            momentum = 0.9 * momentum - g
            A = momentum @ R.mT - 0.5 * R @ (R.mT @ momentum @ R.mT)
            A = A - A.mT
            momentum = A @ R
            a = min(rate * (1 - i / len(steps)), 1 / (A.norm() + 1e-8).item())
            Y = R + a * momentum
            for _ in range(2):
                Y = R + 0.5 * a * A @ (R + Y)
            R = Y
    return R.detach()


def by_reflections(R: Tensor, loss: Loss, steps: list[tuple[Tensor, Tensor]], rate: float) -> Tensor:
    """R is the weight of a ``LinearOrthogonal``, and any optimizer will do."""
    layer = fasth.LinearOrthogonal(D, D, bias=False).set_weight_(R)
    optimizer = torch.optim.Adam(layer.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, len(steps))
    for batch in steps:
        optimizer.zero_grad()
        loss(layer.weight, batch).backward()
        optimizer.step()
        schedule.step()
    return layer.weight.detach()


TRAINED = {"Cayley SGD": by_cayley_sgd, "**LinearOrthogonal, Adam**": by_reflections}


def one_seed(seed: int, steps: int) -> dict[str, tuple[float, float, float, float]]:
    """For each R: the change of the logits, test loss and accuracy, and how far R is from orthogonal."""
    data = digits(seed)
    model = trained_network(data, 3 * steps, seed)

    def loss(R: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0], R, rounded=True), batch[1])

    start = hadamard(seed)
    found: dict[str, Tensor | None] = {"no rotation": None, "random Hadamard": start}
    for name, train in TRAINED.items():
        tried = [train(start, loss, [*batches(data, steps, seed + 1)], rate) for rate in RATES[name]]
        found[name] = min(tried, key=lambda R: loss(R, data.training).item())  # the rate, on the training data
    x, y = data.test
    exact = model(x)
    results = {"32 bits": (0.0, *scores(exact, y), 0.0)}
    for name, R in found.items():
        if R is not None:  # it changes nothing but the rounding
            torch.testing.assert_close(model(x, R), exact, rtol=1e-2, atol=1e-2)
        error = 0.0 if R is None else (R @ R.mT - torch.eye(D)).abs().max().item()
        logits = model(x, R, rounded=True)
        results[name] = (100 * ((logits - exact).norm() / exact.norm()).item(), *scores(logits, y), error)
    return results


def scores(logits: Tensor, classes: Tensor) -> tuple[float, float]:
    return F.cross_entropy(logits, classes).item(), 100 * (logits.argmax(-1) == classes).double().mean().item()


def shown(values: Sequence[float], digits: int) -> str:
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=200, help="of a rotation; default: %(default)s")
    parser.add_argument("--out", type=Path, default=OUT, help="a folder; default: build/rotations")
    options = parser.parse_args(arguments)
    found = [one_seed(seed, options.steps) for seed in range(options.seeds)]
    rows = []
    for name in found[0]:
        changes, losses, accuracies, errors = zip(*(results[name] for results in found), strict=True)
        rows.append([name, shown(changes, 1), shown(losses, 3), shown(accuracies, 1),
                     f"{max(errors):.0e}" if max(errors) else ""])  # fmt: skip
    columns = ["rotation", "change of the logits, % ↓", "test loss ↓", "test accuracy, % ↑", "‖R Rᵀ − I‖"]
    table = Table("Rounded to four bits", columns, rows)
    note = textwrap.fill(
        f"Seeds: {options.seeds}; steps of each rotation: {options.steps}, each at the best of three rates.", 120
    )
    print(report := f"{markdown(table)}\n\n{note}")
    _files.write(options.out / "rotations.md", report + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)  # layers this small gain nothing by more
    main()
