"""Training steps of this version of fasth beside another one, single calls taken in turns.

Each version runs in a process of its own. A step is forward and backward of some rows. The result is the ratio of the
medians, this version over the other, for each kind of layer and width, and their geometric mean.

Run: python benchmarks/versions.py OTHER/.venv/bin/python [--rows 32] [--sizes 64 …] [--no-bias]
         [--env FASTH_CORE_DIR=DIR]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time

KINDS = ("triangular", "full", "LinearOrthogonal", "LinearSVD")
PAUSE = 2e-3  # seconds, after which the other process's threads no longer spin
FLOOR = 30  # the fewest readings of each


class Worker:
    """A process with one version."""

    def __init__(self, python: str, environment: dict[str, str]) -> None:
        # Runs this file by its path, so that versions of fasth that do not have it can run it.
        command = [python, os.path.abspath(__file__), "--worker"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )

    def ask(self, *request: object) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return float(json.loads(self.process.stdout.readline()))


def work() -> None:
    """Answers requests: to build a case, or to take a step of it and say how long it took."""
    import torch
    from torch import nn

    import fasth

    def build(kind: str, d: int, rows: int, bias: bool):
        torch.manual_seed(0)
        x, g = torch.randn(rows, d, requires_grad=True), torch.randn(rows, d)
        if kind in ("triangular", "full"):
            V = torch.randn(d, d).triu() if kind == "triangular" else torch.randn(d, d)
            V.requires_grad_()
            return lambda: torch.autograd.grad(fasth.householder(x, V, triangular=kind == "triangular"), (x, V), g)
        layer: nn.Module = getattr(fasth if kind != "Linear" else nn, kind)(d, d, bias=bias)
        parameters = [p for p in layer.parameters() if p.requires_grad]
        return lambda: torch.autograd.grad(layer(x), (x, *parameters), g)

    step = None
    for line in sys.stdin:
        request = json.loads(line)
        if request:
            step = build(*request)
            for _ in range(4):
                step()
        step()  # wakes the threads
        start = time.perf_counter()
        step()
        print(time.perf_counter() - start, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="the other version's Python")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048])
    parser.add_argument("--no-bias", action="store_true", help="layers without bias")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--seconds", type=float, default=1.5, help="for each layer and width")
    parser.add_argument("--env", action="append", default=[], help="NAME=VALUE for this version's process")
    options = parser.parse_args()
    mine = Worker(sys.executable, dict(setting.split("=", 1) for setting in options.env))
    other = Worker(options.python, {})
    print(f"{'d':>5}", *(f"{kind:>17}" for kind in options.kinds), f"  this over the other, {options.rows} rows")
    found: dict[str, list[float]] = {kind: [] for kind in options.kinds}
    for d in options.sizes:
        for kind in options.kinds:
            for worker in (mine, other):
                worker.ask(kind, d, options.rows, not options.no_bias)
            readings: list[tuple[float, float]] = []
            end = time.monotonic() + options.seconds
            while time.monotonic() < end or len(readings) < FLOOR:
                pair = []
                for worker in (mine, other) if len(readings) % 2 else (other, mine):
                    time.sleep(PAUSE)
                    pair.append(worker.ask())
                readings.append((pair[0], pair[1]) if len(readings) % 2 else (pair[1], pair[0]))
            medians = [statistics.median(one) for one in zip(*readings, strict=True)]
            found[kind].append(medians[0] / medians[1])
        print(f"{d:>5}", *(f"{found[kind][-1]:>17.3f}" for kind in options.kinds), flush=True)
    means = {kind: math.exp(statistics.fmean(map(math.log, ratios))) for kind, ratios in found.items()}
    print(" mean", *(f"{means[kind]:>17.3f}" for kind in options.kinds))


if __name__ == "__main__":
    work() if "--worker" in sys.argv else main()
