"""Does U stay orthogonal over 10⁵ steps of training? ‖UᵀU − I‖ in units of rounding, step by step.

One network with every kind of reflectors learns to read scikit-learn's digits in float32, by AdamW with
``fasth.param_groups``. For comparison one of its matrices starts orthogonal and is kept so as Riemannian optimizers do
it: each step multiplies it by an orthogonal matrix, exp of a skew-symmetric one. There roundings add up.

The measure is ‖QᵀQ − I‖ / (√d·eps), the Frobenius norm, of Q as float32 has it, computed in float64. Times are not
reported. Writes training.md, training.json and orthogonality.png into benchmarks/reliability.

Run: make long-training, or python benchmarks/long_training.py --steps 1000 --out build/reliability for a first look
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fasth
from fasth import RNNSVD, LinearOrthogonal, LinearSVD
from fasth.tools.environment import describe

D, ROWS, LR = 64, 32, 1e-3
EPS = torch.finfo(torch.float32).eps
BY_PRODUCTS = "dense matrix, updated by products"
Curves = dict[str, list[float]]


class Network(nn.Module):
    """An image as rows through a recurrent layer, and as a vector through one layer after the other; then both."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = RNNSVD(8, 32)
        self.compact = LinearSVD(D, D)
        self.full = LinearSVD(D, D, reflectors="full")
        self.orthogonal = LinearOrthogonal(D, D)
        # Not a parameter: ``multiply`` trains it, not the optimizer.
        self.products = LinearOrthogonal(D, D).weight.detach().clone().requires_grad_()
        self.out = nn.Linear(D + 32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """x: (rows, 64) → (rows, 10)."""
        _, h = self.rnn(x.unflatten(1, (8, 8)).transpose(0, 1))
        y = torch.relu(self.full(torch.relu(self.compact(x))))
        y = torch.relu(F.linear(self.orthogonal(y), self.products))
        return self.out(torch.cat((y, h[0]), 1))

    def factors(self) -> dict[str, Tensor]:
        """Each orthogonal factor, dense, as this network has it now."""
        recurrent = self.rnn.svds["weight_hh_l0"]
        return {
            "LinearSVD, U": self.compact.svd.U.dense(),
            "LinearSVD, V": self.compact.svd.V.dense(),
            "LinearSVD of full reflectors, U": self.full.svd.U.dense(),
            "LinearSVD of full reflectors, V": self.full.svd.V.dense(),
            "LinearOrthogonal, W": self.orthogonal.weight,
            "RNNSVD, U": recurrent.U.dense(),
            "RNNSVD, V": recurrent.V.dense(),
            BY_PRODUCTS: self.products,
        }


def departure(Q: Tensor) -> float:
    """‖QᵀQ − I‖ / (√d·eps)."""
    Q = Q.detach().double()
    error = Q.mT @ Q - torch.eye(len(Q), dtype=torch.float64)
    return (torch.linalg.matrix_norm(error) / (len(Q) ** 0.5 * EPS)).item()


@torch.no_grad()
def multiply(Q: Tensor, lr: float) -> None:
    """Q ← exp(−lr·A) Q, with A the skew-symmetric part of the gradient along Q, of length 1: it stays orthogonal."""
    assert Q.grad is not None
    A = Q.grad @ Q.mT
    A = A - A.mT
    Q.copy_(torch.linalg.matrix_exp(-lr * A / A.norm().clamp(min=1e-12)) @ Q)


def measured_at(steps: int) -> list[int]:
    """0, 1, and about eight a decade."""
    return sorted({0, 1, steps, *(round(10 ** (i / 8)) for i in range(200) if 10 ** (i / 8) <= steps)})


def train(steps: int, seed: int) -> tuple[list[int], Curves, float]:
    """The steps at which the factors were measured, what was found, and the share of new digits read correctly."""
    torch.manual_seed(seed)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(x))
    new, known = order[:360], order[360:]
    network = Network()
    optimizer = torch.optim.AdamW(fasth.param_groups(network, lr=LR, weight_decay=1e-2))
    at: list[int] = []
    curves: Curves = {name: [] for name in network.factors()}
    wanted, started, shown = set(measured_at(steps)), time.monotonic(), 0.0
    try:
        for step in range(steps + 1):
            if step in wanted:
                at.append(step)
                for name, Q in network.factors().items():
                    curves[name].append(departure(Q))
            if time.monotonic() - shown > 5:
                shown = time.monotonic()
                left = (shown - started) / max(step, 1) * (steps - step)
                print(f"step {step:,} of {steps:,}, about {left / 60:.0f} minutes left", flush=True)
            batch = known[torch.randint(len(known), (ROWS,))]
            loss = F.cross_entropy(network(x[batch]), y[batch], label_smoothing=0.1)
            optimizer.zero_grad()
            network.products.grad = None
            loss.backward()
            optimizer.step()
            multiply(network.products, LR)
    except KeyboardInterrupt:
        print(f"interrupted at step {step:,}; what was measured up to there is written")
    with torch.no_grad():
        correct = (network(x[new]).argmax(1) == y[new]).double().mean().item()
    return at, curves, correct


def draw(at: list[int], curves: Curves, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, values in curves.items():
        by_products = name == BY_PRODUCTS
        style: dict[str, Any] = {"color": "0.4", "linestyle": "--"} if by_products else {}
        axes.plot([max(step, 0.5) for step in at], values, label=name, **style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("steps of training (0 at the left edge)")
    axes.set_ylabel("‖QᵀQ − I‖ / (√d · eps)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def table(at: list[int], curves: Curves, correct: float) -> str:
    """The measure at powers of ten, and the largest of all."""
    powers = [i for i, step in enumerate(at) if step == 0 or step in (10**p for p in range(2, 9))]
    lines = [
        "| " + " | ".join(["", *(f"step {at[i]:,}" for i in powers), "largest"]) + " |",
        "|---|" + "---:|" * (len(powers) + 1),
    ]
    for name, values in curves.items():
        numbers = [values[i] for i in powers] + [max(values)]
        lines.append("| " + " | ".join([name, *map("{:.2f}".format, numbers)]) + " |")
    about = describe()
    lines += [
        "",
        f"Made by `make long-training`: {at[-1]:,} steps of {ROWS} digits in float32, after which {correct:.1%} of new "
        f"digits are read correctly; torch {about['versions']['torch']}, core {about['core']}, {about['cpu']}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "reliability")
    options = parser.parse_args()
    torch.set_num_threads(1)
    at, curves, correct = train(options.steps, options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    found = {"steps": at, "curves": curves, "correct": correct, "environment": describe()}
    (options.out / "training.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (options.out / "training.md").write_text(text := table(at, curves, correct), encoding="utf-8")
    draw(at, curves, options.out / "orthogonality.png")
    print(text)


if __name__ == "__main__":
    main()
