"""How far a weight W: (n, m) moves when each of its numbers moves by ±lr, at random, as Adam moves them.

In the Frobenius norm, as a multiple of lr·√(n·m), which is how far a dense weight moves; with one rate for all, and
with the rates of ``fasth.param_groups`` for lr = 0.003.

Run: python benchmarks/steps.py
"""

from __future__ import annotations

import math

import torch
from torch import nn

import fasth

LR = 1e-6
RULE = 0.003  # the lr at which the rule moves a weight as far as a dense one moves
SHAPES = [(64, 64), (256, 256), (1024, 1024), (256, 784), (10, 256)]
LAYERS = {
    "from nn.Linear": lambda n, m: fasth.LinearSVD.from_linear(nn.Linear(m, n)),
    "from nn.Linear, full": lambda n, m: fasth.LinearSVD.from_linear(nn.Linear(m, n), reflectors="full"),
    "from nn.Linear, rank 4": lambda n, m: fasth.LinearSVD.from_linear(nn.Linear(m, n), rank=4),
    "σ = 1": lambda n, m: fasth.LinearSVD(m, n),
    "orthogonal": lambda n, m: fasth.LinearOrthogonal(m, n),
}


@torch.no_grad()
def moved(layer: nn.Module, kind: str, rule: bool) -> float:
    """Distance that W moves in a step of the parameters of one kind."""
    before, (n, m) = layer.weight, layer.weight.shape
    for group in fasth.param_groups(layer, lr=RULE):
        for parameter in group["params"] if group["name"] == kind else ():
            parameter += LR * (group["lr"] / RULE if rule else 1.0) * torch.randn_like(parameter).sign()
    return torch.dist(layer.weight, before).item() / (LR * math.sqrt(n * m))


def main() -> None:
    torch.manual_seed(0)
    print(f"{'layer':24}{'weight':>11}   sigma: one rate, rule   reflectors: one rate, rule")
    for name, make in LAYERS.items():
        for n, m in SHAPES:
            figures = [moved(make(n, m).double(), kind, rule) for kind in ("sigma", "reflectors") for rule in (0, 1)]
            print(f"{name:24}{n:6}×{m:<4}{figures[0]:19.3f}{figures[1]:6.2f}{figures[2]:23.2f}{figures[3]:6.2f}")


if __name__ == "__main__":
    main()
