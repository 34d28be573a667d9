"""The product by a packed weight, as graphs for inference call it, beside F.linear: the ratio of their times.

The answers are compared before they are timed.
Run: python benchmarks/packed.py
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F

import fasth
from fasth.reflections import native
from fasth.reproduce.timing import compare


@torch.no_grad()
def ratio(d: int, rows: int, rounds: int) -> float:
    """How many times F.linear's time it takes."""
    layer, x = fasth.LinearOrthogonal(d, d).eval(), torch.randn(rows, d)
    weight, made_of = layer.weight.contiguous(), layer._own()

    def packed() -> torch.Tensor:
        return torch.ops.fasth.kept_linear.default(x, made_of, layer.bias, layer._number, d)

    def linear() -> torch.Tensor:
        return F.linear(x, weight, layer.bias)

    for _ in range(3):  # it is packed when it is asked for again
        torch.testing.assert_close(packed(), linear(), rtol=1e-4, atol=1e-4)
    assert layer._kept_for_graphs is not None and not isinstance(layer._kept_for_graphs.weight, torch.Tensor)
    plain, fast = compare({"F.linear": linear, "packed": packed}, device=x.device, rounds=rounds, min_time=2e-3)
    return fast.ratio(plain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 512])
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    core = native.core()
    if core is None or core.isa == "baseline":
        raise SystemExit("weights are packed for a core with AVX2 at least; `fasth info` says which one this is")
    torch.manual_seed(0)
    print(f"packed over F.linear, float32, {core.isa}, {torch.get_num_threads()} threads")
    print(f"{'d':>5}", *(f"{rows:>6} rows" for rows in options.rows))
    for d in options.sizes:
        print(f"{d:>5}", *(f"{ratio(d, rows, options.rounds):>11.2f}" for rows in options.rows), flush=True)


if __name__ == "__main__":
    main()
