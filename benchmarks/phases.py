"""Where the compiled core's time goes, and what fraction of the machine's own matrix-product speed it reaches.

Builds native/phases.cpp for this machine and prints its tables, for native/README.md. Run: make phases
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent


def build(into: Path) -> Path:
    eigen = next(p for p in (Path(d) / "cmeel.prefix/include/eigen3" for d in sys.path) if p.exists())
    program = into / "phases"
    flags = ["-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-w", f"-isystem{eigen}"]
    subprocess.run([os.environ.get("CXX", "c++"), *flags, ROOT / "native/phases.cpp", "-o", program], check=True)
    return program


def peak(threads: int) -> float:
    """Operations per second of torch's own product of two 2048 × 2048 matrices, the best of 20."""
    torch.set_num_threads(threads)
    A = torch.randn(2048, 2048)
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        A @ A
        seconds.append(time.perf_counter() - start)
    return 2 * 2048**3 / min(seconds)


def useful_operations(d: int) -> float:
    """Operations of a triangular step with 32 rows in blocks of 32, without products with Y, Gram matrices and N Y."""
    return 6 * 32 * d * d


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        for threads in (1, 2):
            best = peak(threads)
            print(f"{threads} thread{'s' * (threads > 1)}: torch multiplies matrices at {best / 1e9:.0f} GFlop/s")
            for d in (64, 512, 2048):
                outputs = [subprocess.run([program, str(d), str(threads)], capture_output=True, text=True, check=True)
                           for _ in range(5)]  # fmt: skip
                totals = [sum(map(float, re.findall(r": ([0-9.]+) µs", run.stdout))) for run in outputs]
                fastest = min(range(5), key=totals.__getitem__)
                fraction = useful_operations(d) / (totals[fastest] * 1e-6) / best
                print(f"\nd = {d}: {totals[fastest]:.0f} µs a step, {100 * fraction:.0f} % of that speed")
                print(outputs[fastest].stdout)


if __name__ == "__main__":
    main()
