"""Measures the cost of an optimizer's step: ``fasth.optim.AdamW`` beside ``torch.optim.AdamW``, both fused.

Four layers of each width, plain and as SVDs; the optimizer's step alone, and a whole training step of 128 rows.

Run: python benchmarks/optimizer_step.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import fasth
from fasth.tools.timing import compare

WIDTHS, ROWS, LAYERS = (128, 512), 128, 4


def calls(width: int) -> dict[str, Callable[[], object]]:
    plain = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    made: dict[str, Callable[[], object]] = {}
    x = torch.randn(ROWS, width)
    for name, optimizer_of in {
        "plain, torch's": lambda m: torch.optim.AdamW(m.parameters(), fused=True),
        "SVD, torch's with param_groups": lambda m: torch.optim.AdamW(fasth.param_groups(m, lr=1e-3), fused=True),
        "SVD, fasth.optim.AdamW": lambda m: fasth.optim.AdamW(m, fused=True),
    }.items():
        model = plain if name.startswith("plain") else fasth.to_svd(plain)
        optimizer = optimizer_of(model)
        model(x).square().mean().backward()

        def whole(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        made[f"{name}: optimizer"], made[f"{name}: whole step"] = optimizer.step, whole
    return made


def main() -> None:
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; microseconds, and over the plain network's\n")
    for width in WIDTHS:
        found = {t.name: t.median for t in compare(calls(width), device=torch.device("cpu"), rounds=40, time_limit=40)}
        for name, seconds in found.items():
            first = found["plain, torch's:" + name.partition(":")[2]]
            print(f"{LAYERS} × {width}   {name:48} {1e6 * seconds:9.0f}   {seconds / first:.2f}")


if __name__ == "__main__":
    main()
