"""Compiled networks beside the same in eager mode: the ratio of their times, for our layers and for nn.Linear.

A step is forward and backward of 32 rows, or as many as asked for. Inference is within ``fasth.cached()``, and has
another line: the compiled time as a multiple of that of nn.Linear, compiled. The answers are compared before they are
timed.
Run: python benchmarks/compiled.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn

import fasth
from fasth.tools.timing import compare

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


def verified(run: Callable[..., list[Tensor]], model: nn.Module, x: Tensor) -> dict[str, Callable[[], object]]:
    """The call in eager mode and the compiled one."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    compiled = torch.compile(model, fullgraph=True)
    expected = [t.clone() for t in run(model, parameters, x)]
    torch.testing.assert_close(run(compiled, parameters, x), expected, rtol=1e-3, atol=1e-3)
    return {"eager": lambda: run(model, parameters, x), "compiled": lambda: run(compiled, parameters, x)}


def ratios(run: Callable[..., list[Tensor]], models: list[nn.Module], x: Tensor, rounds: int) -> list[list[float]]:
    """Each model's compiled time over its eager time, and over the first model's compiled time."""
    torch.compiler.reset()
    calls = {(i, name): call for i, model in enumerate(models) for name, call in verified(run, model, x).items()}
    timings = compare({str(key): call for key, call in calls.items()}, device=x.device, rounds=rounds, min_time=5e-3)
    median = dict(zip(calls, (timing.median for timing in timings), strict=True))
    every = range(len(models))
    over_eager = [median[i, "compiled"] / median[i, "eager"] for i in every]
    return [over_eager, [median[i, "compiled"] / median[0, "compiled"] for i in every]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"compiled over eager, {options.depth} layers with ReLU between them, {torch.get_num_threads()} threads")
    print(f"{'d':>5} {'':>12}", *(f"{name:>17}" for name in LAYERS))
    for d in options.sizes:
        x = torch.randn(options.rows, d)
        models = [network(layer, d, options.depth) for layer in LAYERS.values()]
        over_eager, _ = ratios(step, models, x, options.rounds)
        show(d, "training", over_eager)
        with fasth.cached():
            over_eager, over_linear = ratios(inference, models, x, options.rounds)
        show(d, "inference", over_eager)
        show(d, "× nn.Linear", over_linear)


def show(d: int, what: str, found: list[float]) -> None:
    print(f"{d:>5} {what:>12}", *(f"{ratio:>17.2f}" for ratio in found), flush=True)


if __name__ == "__main__":
    main()
