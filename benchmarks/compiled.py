"""Compiled networks beside the same in eager mode: the ratio of their times, for our layers and for nn.Linear.

A step is forward and backward of 32 rows, or as many as asked for. The answers are compared before they are timed.
Run: python benchmarks/compiled.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn

import fasth
from fasth.reproduce.timing import compare

LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "nn.Linear": nn.Linear,
    "LinearSVD": fasth.LinearSVD,
    "LinearOrthogonal": fasth.LinearOrthogonal,
}


def network(layer: Callable[[int, int], nn.Module], d: int, depth: int) -> nn.Module:
    """Layers with ReLU between them, and not after the last."""
    return nn.Sequential(*[module for _ in range(depth) for module in (layer(d, d), nn.ReLU())][:-1])


def step(model: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], x: Tensor) -> list[Tensor]:
    for parameter in parameters:
        parameter.grad = None
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in parameters if p.grad is not None)]


@torch.no_grad()
def inference(model: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], x: Tensor) -> list[Tensor]:
    return [model(x)]


def ratio(run: Callable[..., list[Tensor]], model: nn.Module, x: Tensor, rounds: int) -> float:
    """How many times the eager time a compiled call takes."""
    torch.compiler.reset()
    parameters, compiled = list(model.parameters()), torch.compile(model, fullgraph=True)
    expected = [t.clone() for t in run(model, parameters, x)]
    torch.testing.assert_close(run(compiled, parameters, x), expected, rtol=1e-3, atol=1e-3)
    calls = {name: lambda one=one: run(one, parameters, x) for name, one in (("eager", model), ("compiled", compiled))}
    eager, fast = compare(calls, device=x.device, rounds=rounds, min_time=5e-3)
    return fast.ratio(eager)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"compiled over eager, {options.depth} layers with ReLU between them, {torch.get_num_threads()} threads")
    print(f"{'d':>5} {'':>10}", *(f"{name:>17}" for name in LAYERS))
    for d in options.sizes:
        x = torch.randn(options.rows, d)
        for name, run, training in (("training", step, True), ("inference", inference, False)):
            models = [network(layer, d, options.depth).train(training) for layer in LAYERS.values()]
            found = [ratio(run, model, x, options.rounds) for model in models]
            print(f"{d:>5} {name:>10}", *(f"{r:>17.2f}" for r in found), flush=True)


if __name__ == "__main__":
    main()
