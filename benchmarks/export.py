"""Measures ``torch.export`` of a layer and of a deep network: seconds, and nodes of the graph, inputs included.

For nn.Linear, for LinearSVD as it is, and by the two ways to export its dense weight: within ``fasth.cached()`` and by
``fasth.to_dense``. Each program's answer is compared with the model's.
Run: python benchmarks/export.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import fasth


def as_it_is(model: nn.Module, x: Tensor) -> torch.export.ExportedProgram:
    return torch.export.export(model, (x,))


@torch.no_grad()
def within_cached(model: nn.Module, x: Tensor) -> torch.export.ExportedProgram:
    with fasth.cached():
        model(x)
        return torch.export.export(model, (x,))


def by_to_dense(model: nn.Module, x: Tensor) -> torch.export.ExportedProgram:
    return torch.export.export(fasth.to_dense(model), (x,))


Layer = Callable[[int, int], nn.Module]
WAYS: list[tuple[str, Layer, Callable[[nn.Module, Tensor], torch.export.ExportedProgram]]] = [
    ("nn.Linear", nn.Linear, as_it_is),
    ("LinearSVD", fasth.LinearSVD, as_it_is),
    ("LinearSVD within cached()", fasth.LinearSVD, within_cached),
    ("to_dense(LinearSVD)", fasth.LinearSVD, by_to_dense),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=50)
    parser.add_argument("--rows", type=int, default=32)
    options = parser.parse_args()
    torch.manual_seed(0)
    as_it_is(nn.Linear(2, 2), torch.randn(2, 2))  # the first export imports modules
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"{'':28} {'seconds':>8} {'nodes':>6}")
    for depth, d in ((1, 512), (options.depth, 256)):
        print(f"{depth} of ({d}, {d})")
        x = torch.randn(options.rows, d)
        for name, layer, export in WAYS:
            model = nn.Sequential(*[layer(d, d) for _ in range(depth)])
            start = time.perf_counter()
            program = export(model, x)
            seconds = time.perf_counter() - start
            torch.testing.assert_close(program.module()(x), model(x), rtol=1e-3, atol=1e-3)
            print(f"  {name:26} {seconds:8.2f} {len(program.graph.nodes):6}", flush=True)


if __name__ == "__main__":
    main()
