"""Python calls of fasth's own functions in one pass: how many, in how many files, and how often the file changes.

Only functions below src/fasth count. At d = 64 these calls, and not the compiled core, take most of a step.

Run: python benchmarks/calls.py
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

import fasth


class Calls(NamedTuple):
    calls: int
    files: int
    changes: int  # from the file of one call to that of the next


def count(run: Callable[[], Any]) -> Calls:
    """The calls of ``run()``, the second time: the first one makes what is remembered."""
    package = os.path.dirname(fasth.__file__)
    files: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            files.append(frame.f_code.co_filename)

    run()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return Calls(len(files), len(set(files)), sum(a != b for a, b in itertools.pairwise(files)))


def passes() -> dict[str, Callable[[], Any]]:
    """The passes by name. Each is one call of a layer with few rows, and what the name says besides."""
    linear, conv, rnn = fasth.LinearSVD(64, 64), fasth.Conv2dSVD(8, 8, 3), fasth.RNNSVD(8, 16)
    flow = fasth.SVDTransform(fasth.LinearSVD(64, 64, spectrum=fasth.spectrum.positive()))
    x, image, sequence = torch.randn(32, 64), torch.randn(2, 8, 8, 8), torch.randn(5, 2, 8)
    V = torch.randn(64, 64, requires_grad=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def log_density() -> None:
        flow.log_abs_det_jacobian(x, flow(x))

    return {
        "LinearSVD": lambda: linear(x),
        "LinearSVD, and backward": lambda: linear(x).sum().backward(),
        "Conv2dSVD": lambda: conv(image),
        "RNNSVD": lambda: rnn(sequence),
        "SVDTransform, and log |det W|": log_density,
        "SVDTransform.call_and_ladj": lambda: flow.call_and_ladj(x),
        "householder": lambda: fasth.householder(x, V),
        "to_svd of two layers": lambda: fasth.to_svd(model),
    }


def main() -> None:
    print(f"{'':<30}{'calls':>7}{'files':>7}{'changes of file':>17}")
    for name, run in passes().items():
        found = count(run)
        print(f"{name:<30}{found.calls:>7}{found.files:>7}{found.changes:>17}")


if __name__ == "__main__":
    main()
