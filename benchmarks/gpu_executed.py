"""Counts what a training step executes on a GPU, by running the kernels' PTX in the emulator of tests/ptx.

Instructions, operations and memory are those of the code that Triton's compiler makes for sm_80. Nothing is timed.

Run: python benchmarks/gpu_executed.py [--sizes 64 256 768] [--write]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ["FASTH_BACKEND"] = "torch"  # the emulator makes kernels of what is called; the core is not needed
sys.path.append(str(Path(__file__).parent.parent / "tests"))

import torch
from ptx.gpu import Launch, emulated
from torch import Tensor

from fasth import LinearSVD, _files
from fasth.functional import reflect

FILE = Path(__file__).parent / "gpu" / "executed.md"
ROWS = 32
STEPS: dict[str, Callable[[int], Callable[[Tensor], Tensor]]] = {
    "x Qᵀ, full": lambda d: _product(d, "full"),
    "x Qᵀ, compact": lambda d: _product(d, "compact"),
    "`LinearSVD`": lambda d: LinearSVD(d, d),
    '`LinearSVD`, `reflectors="full"`': lambda d: LinearSVD(d, d, reflectors="full"),
}


def _product(d: int, form: str) -> Callable[[Tensor], Tensor]:
    V = torch.randn(d, d).clamp(-1, 1).requires_grad_()
    return lambda x: reflect(x, V, form)


def step(name: str, d: int) -> list[Launch]:
    """The launches of one training step of ROWS rows."""
    torch.manual_seed(0)
    function = STEPS[name](d)
    x = torch.randn(ROWS, d, requires_grad=True)
    with emulated(80) as gpu:
        function(x).sum().backward()
    if gpu.problems:
        raise RuntimeError(f"the emulator found: {gpu.problems[:3]}")
    return gpu.launches


def rows(name: str, d: int) -> list[str]:
    """A row for each kernel of the step, and one for all of it."""
    by_kernel: dict[str, list[Launch]] = {}
    launches = step(name, d)
    for one in launches:
        label = f"`{one.kernel}`{', back' if one.constants.get('RECORD') else ''}"
        by_kernel.setdefault(label, []).append(one)
    by_kernel["all"] = launches
    return [f"| {name} | {d} | {kernel} | {_sums(some)} |" for kernel, some in by_kernel.items()]


def _sums(launches: list[Launch]) -> str:
    instructions, flops, sectors, used = (
        sum(getattr(one, count) for one in launches) for count in ("instructions", "flops", "sectors", "used")
    )
    moved = f"{sectors / 1e3:,.1f} | {32 * sectors / 1e6:.2f} | {used / (32 * sectors):.0%}"
    return f"{len(launches)} | {instructions / 1e6:.2f} | {flops / 1e6:.1f} | {moved}"


def main() -> int:
    import triton

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256, 768])
    parser.add_argument("--write", action="store_true", help="the table, for docs/gpu.md")
    options = parser.parse_args()
    lines = [
        "| step | d | kernel | launches | million instructions of warps | Mflop | thousand sectors | MB | used |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for d in options.sizes:
        for name in STEPS:
            lines += rows(name, d)
            print("\n".join(lines[-6:]), file=sys.stderr, flush=True)
    said = (
        f"One training step with {ROWS} rows in float32, compiled for sm_80 by Triton {triton.__version__} and "
        "executed in an emulator: `python benchmarks/gpu_executed.py --write`. A sector is 32 bytes; used: of the "
        "bytes in those that were asked for."
    )
    text = "\n".join([*lines, "", said])
    print(text)
    if options.write:
        _files.write(FILE, text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
