"""Measures the claims of docs/adapters.md other than speed, one table each:

restarts   the singular values of a weight that was trained by 10,000 steps of reflections, merged after each
oft        how far PEFT's default of OFT is from a rotation, and what a merge costs, by the angle
half       the time of reflections of half-precision activations, beside that of float32
frames     r orthonormal rows, as LoReFT has them, beside torch.nn.utils.parametrizations.orthogonal

Run: python benchmarks/adapter_checks.py --help
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import fasth
from fasth import adapters
from fasth.adapters.turns import ReflectionsTurn

sys.path.append(str(Path(__file__).parents[1]))
from experiments.harness import tables
from experiments.harness.tables import Table

OUT = Path(__file__).parent / "adapters"
HALF_SIZES = ((2048, 256, 8), (2048, 1024, 32), (4096, 256, 64))  # d, rows, r
FRAMES = ((768, 8), (2048, 8), (4096, 8), (4096, 64))  # d, r
ANGLES = (5, 15, 30, 53, 77, 90, 120, 150)


def restarts(options: argparse.Namespace) -> list[Table]:
    """Steps of Adam on the reflections of both sides, each merged into the weight, towards another weight."""
    rows = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        layer: Any = nn.Linear(96, 64, bias=False).to(dtype)
        first, target = layer.weight.detach().clone().double(), torch.randn(64, 96)
        model: Any = adapters.add(layer, "reflections", r=4, side="both")
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=3e-3)
        for _ in range(options.restarts):
            x = torch.randn(16, 96)
            (model(x.to(dtype)).float() - x @ target.mT).square().mean().backward()
            optimizer.step()
            state = sum(t.numel() for found in optimizer.state.values() for t in found.values() if t.ndim)
            optimizer.zero_grad()
            adapters.merge_and_restart(model, optimizer)
        last = model.base.weight.detach().double()
        before, after = torch.linalg.svdvals(first), torch.linalg.svdvals(last)
        moved = ((last - first).norm() / first.norm()).item()
        change = ((after - before) / before).abs().max().item()
        rows.append([str(dtype).removeprefix("torch."), f"{100 * moved:.0f} %", f"{change:.1e}", f"{state:,}",
                     f"{2 * first.numel():,}"])  # fmt: skip
    columns = ["weight", "W has moved by", "largest relative change of a singular value", "numbers of Adam's state",
               "of W's own"]  # fmt: skip
    return [Table(f"{options.restarts:,} restarts", columns, rows)]


def oft(options: argparse.Namespace) -> list[Table]:
    """One rotation of every pair of features, in float32."""
    import peft

    rows = []
    for degrees in ANGLES:
        torch.manual_seed(0)
        config = peft.OFTConfig(target_modules=["0"], oft_block_size=2, r=0)
        model: Any = peft.get_peft_model(nn.Sequential(nn.Linear(64, 32)), config)
        layer = model.base_model.model[0]
        layer.oft_R["default"].weight.data.fill_(math.tan(math.radians(degrees) / 2))
        of_series, R = _errors(copy.deepcopy(model)), layer.get_delta_weight("default")
        with fasth.peft.enable(oft="exact"):
            difference = (layer.get_delta_weight("default") - R).norm() / 64**0.5
            rows.append([str(degrees), *of_series, *_errors(model), f"{difference.item():.0e}"])
    columns = ["angle, °", "default: singular values off 1 by", "default: merge and unmerge change W by",
               "exact: singular values off 1 by", "exact: merge and unmerge change W by",
               "between default and exact: W R changes by"]  # fmt: skip
    return [Table("OFT by the angle of its rotation", columns, rows)]


def _errors(model: Any) -> tuple[str, str]:
    layer = model.base_model.model[0]
    W = layer.base_layer.weight.detach().clone()
    R = layer.get_delta_weight("default").detach().double()
    off = f"{(torch.linalg.svdvals(R) - 1).abs().max().item():.0e}"
    try:
        model.merge_adapter()
        model.unmerge_adapter()
    except RuntimeError:  # of PEFT, which inverts R
        return off, "R is singular"
    return off, f"{((layer.base_layer.weight - W).norm() / W.norm()).item():.0e}"


def half(options: argparse.Namespace) -> list[Table]:
    rows = []
    for d, n, r in HALF_SIZES:
        calls: dict[str, Callable[[], object]] = {}
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            turn = ReflectionsTurn(d, r)
            x, g = torch.randn(n, d).to(dtype).requires_grad_(), torch.randn(n, d).to(dtype)
            calls[str(dtype)] = partial(_step, turn, x, g)
        seconds = tables.step_times(calls, options.rounds)
        ms, *others = seconds.values()
        rows.append([str(d), str(n), str(r), f"{1e3 * ms:.3g} ms", *(f"{t / ms:.2f}" for t in others)])
    return [Table("A step of r reflections", ["d", "rows", "r", "float32", "bfloat16", "float16"], rows)]


def frames(options: argparse.Namespace) -> list[Table]:
    rows = []
    for d, r in FRAMES:
        x, g = torch.randn(256, d), torch.randn(256, r)
        ours = fasth.LinearOrthogonal(d, r, bias=False)
        layers: dict[str, nn.Module] = {"nn.Linear": nn.Linear(d, r, bias=False), "LinearOrthogonal": ours}
        layers["parametrizations.orthogonal"] = nn.utils.parametrizations.orthogonal(nn.Linear(d, r, bias=False))
        seconds = tables.step_times({name: partial(_step, f, x, g) for name, f in layers.items()}, options.rounds)
        errors = [_orthogonality(layer.weight) for layer in list(layers.values())[1:]]  # type: ignore[arg-type]
        first, *others = seconds.values()
        rows.append([str(d), str(r), f"{1e3 * first:.3g} ms", *(f"{t / first:.1f}" for t in others),
                     *(f"{e:.0e}" for e in errors)])  # fmt: skip
    columns = ["d", "r", "nn.Linear", "LinearOrthogonal", "torch's", "‖R Rᵀ − I‖, LinearOrthogonal", "torch's"]
    return [Table("A step of r orthonormal rows, 256 rows of x", columns, rows)]


def _step(layer: nn.Module, x: Tensor, g: Tensor) -> object:
    wanted = [t for t in (x, *layer.parameters()) if t.requires_grad]
    return torch.autograd.grad(layer(x), wanted, g)


def _orthogonality(R: Tensor) -> float:
    R = R.detach().double()
    return (R @ R.mT - torch.eye(len(R))).abs().max().item()


CHECKS = {"restarts": restarts, "oft": oft, "half": half, "frames": frames}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*CHECKS], default=[*CHECKS])
    parser.add_argument("--restarts", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps; default: %(default)s")
    parser.add_argument("--out", type=Path, default=OUT, help="a folder")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # PEFT's
    for name in options.only:
        note = f"{tables.machine()}. Medians, taken in turns." if name in ("half", "frames") else ""
        tables.write(options.out / f"{name}.md", CHECKS[name](options), note, Console())


if __name__ == "__main__":
    main()
