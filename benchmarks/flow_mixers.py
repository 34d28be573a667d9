"""One linear map of a flow: a training step and the inverse, beside what flows use today.

A step is y = W x with log |det W|, and backward to x and to the parameters; the inverse is x of y, as in sampling. Rows
are samples, or the pixels of images. Answers are compared with torch.linalg in float64 before they are timed. Single
calls are timed in turns, and shown as ratios of medians: the step to dense + slogdet's, the inverse to PLU's two
triangular solves. Those of nflows that loop over reflections have turns of their own: what they leave in the caches and
in the allocator would slow down whoever comes next.
Run: python benchmarks/flow_mixers.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fasth.tools.timing import compare

sys.path.append(str(Path(__file__).parents[1]))
from experiments.flow.models import MIXERS, installed

Calls = dict[str, Callable[[], object]]
CPU = torch.device("cpu")


def mixer(name: str, W: Tensor) -> Any:
    """nflows' transforms alone: in a flow they come after a fixed matrix, which is not theirs to pay for."""
    made = MIXERS[name](W)
    return made.second if name.startswith("nflows") else made


def verify(made: Any, x: Tensor) -> None:
    """Checks that the map is linear, its log-determinant, and its inverse."""
    d = x.shape[1]
    with torch.no_grad():
        y, logabsdet = made(x)
        W = made(torch.eye(d))[0].mT.double()
        torch.testing.assert_close(y.double(), x.double() @ W.mT, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logabsdet.double(), torch.linalg.slogdet(W).logabsdet, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(made.inverse(y), x, rtol=1e-3, atol=1e-3)


def step(made: nn.Module, x: Tensor) -> Callable[[], object]:
    parameters = [x, *made.parameters()]

    def call() -> None:
        for parameter in parameters:
            parameter.grad = None
        y, logabsdet = made(x)
        (0.5 * y.square().sum() / len(y) - logabsdet).backward()

    return call


def inverse(made: Any, y: Tensor) -> Callable[[], object]:
    @torch.no_grad()
    def call() -> None:
        made.inverse(y)

    return call


LOOPS = ("nflows QR", "nflows Householder", "nflows SVD")
MOST_SAVED = 1 << 31  # numbers that a loop over reflections may save for backward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[48, 192, 768])
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    names = [name for name in installed() if name != "fixed"]
    print(f"{torch.get_num_threads()} threads, float32; times of dense + slogdet, and of PLU's inverse, in ms")
    print(f"{'d':>4} {'rows':>5} {'':8} {'ms':>8}", *(f"{name.replace('Householder', 'HH'):>10}" for name in names))
    for d in options.sizes:
        for rows in options.rows:
            torch.manual_seed(0)
            W, x = torch.linalg.qr(torch.randn(d, d)).Q, torch.randn(rows, d, requires_grad=True)
            small = rows * d * d <= MOST_SAVED
            made = {name: mixer(name, W) for name in names if small or name not in LOOPS}
            for one in made.values():
                verify(one, x)
            forward = {name: step(one, x) for name, one in made.items()}
            back = {name: inverse(one, x.detach()) for name, one in made.items()}
            show(d, rows, "step", forward, "dense", names, options.rounds)
            show(d, rows, "inverse", back, "PLU", names, options.rounds)


def show(d: int, rows: int, what: str, calls: Calls, yardstick: str, names: Sequence[str], rounds: int) -> None:
    loops = [yardstick, *(name for name in calls if name in LOOPS)]
    others = [name for name in calls if name not in LOOPS]
    ratios: dict[str, float] = {}
    for group, turns in ((loops, min(rounds, 5)), (others, rounds)):
        found = compare({name: calls[name] for name in group}, device=CPU, rounds=turns, min_time=0, time_limit=10)
        timings = {timing.name: timing for timing in found}
        ratios |= {name: timing.ratio(timings[yardstick]) for name, timing in timings.items()}
    milliseconds = timings[yardstick].median * 1e3
    cells = (f"{ratios[name]:>10.2f}" if name in ratios else f"{'–':>10}" for name in names)
    print(f"{d:>4} {rows:>5} {what:8} {milliseconds:>8.2f}", *cells, flush=True)


if __name__ == "__main__":
    main()
