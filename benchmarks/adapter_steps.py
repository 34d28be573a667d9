"""A training step through one frozen layer with its adapter, at the sizes of Llama: time, saved memory, launches.

A step is the output and the gradients of the input and of the adapter. The adapters of one rank r are LoRA, as two
plain products; ours, reflections of the input; and PEFT's HRA (those same r reflections), OFT, BOFT and PSOFT. OFT and
BOFT have blocks of 2 r features, which is as many numbers as r reflections. Every adapter is checked before it is
timed: at the start it is the layer, and ours has the values and gradients of PEFT's HRA. Saved memory is what autograd
keeps for the backward pass, the input counted and the parameters not. Launches are counted on the meta device: nothing
runs on a GPU.

Run: python benchmarks/adapter_steps.py --help
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from fasth import adapters
from fasth.reflections.planner import KERNEL_NUMBERS, counting_kernels
from fasth.reflections.triton.configurations import LONGEST
from fasth.tools.reproduce.counts import observed
from fasth.tools.timing import compare

sys.path.append(str(Path(__file__).parents[1]))
from experiments.harness import tables
from experiments.harness.results import FILE, Results, Run

OUT = Path(__file__).parent / "adapters" / "steps"
LAYERS = {"2048²": (2048, 2048), "4096²": (4096, 4096), "4096 → 11008": (4096, 11008)}
ROWS, RANKS = (256, 1024), (8, 32, 64)
SLOW, TOO_SLOW = 1.0, 20.0  # seconds of a step: from SLOW on it is timed once, from TOO_SLOW on not at all
LARGEST_HRA = 8 * 4096**2  # r·d² of what is not too slow
LORA, OURS = "LoRA", "reflections"


class LoRA(nn.Module):
    """layer(x) + B A x: nothing but the two products."""

    def __init__(self, layer: nn.Linear, r: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(r, layer.in_features, device=layer.weight.device) / layer.in_features**0.5)
        self.B = nn.Parameter(torch.zeros(layer.out_features, r, device=layer.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + F.linear(F.linear(x, self.A), self.B)


def of_peft(name: str, **options: Any) -> Callable[[nn.Linear], nn.Module]:
    """PEFT's adapter of this configuration."""
    import peft

    config = getattr(peft, f"{name}Config")(target_modules=["0"], **options)
    return lambda layer: peft.get_peft_model(nn.Sequential(layer), config)


def methods(r: int) -> dict[str, Callable[[nn.Linear], nn.Module]]:
    return {
        LORA: lambda layer: LoRA(layer, r),
        OURS: lambda layer: adapters.add(layer, "reflections", r),
        "OFT": of_peft("OFT", oft_block_size=2 * r),
        "PSOFT": of_peft("Psoft", r=r, psoft_svd="lowrank"),
        "BOFT": of_peft("BOFT", boft_block_size=2 * r),
        "HRA": of_peft("HRA", r=r),
    }


def step(model: nn.Module, x: Tensor, direction: Tensor) -> list[Tensor]:
    wanted = [x, *(p for p in model.parameters() if p.requires_grad)]
    return list(torch.autograd.grad(model(x), wanted, direction))


def saved_mebibytes(model: nn.Module, x: Tensor) -> float:
    """Size of the tensors that the graph of one forward pass saves, each storage once."""
    kept: dict[int, int] = {}
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
    del y
    return sum(kept.values()) / 2**20


def verify(model: nn.Module, layer: nn.Linear, x: Tensor, name: str) -> None:
    with torch.no_grad():
        expected, found = layer(x[:4]), model(x[:4])
        error = ((found - expected).abs().max() / expected.abs().max()).item()
    if error > 1e-4:
        raise SystemExit(f"{name} should start as the layer; its output differs by {error:.1e}")


def verify_against_hra(r: int = 8) -> None:
    """Ours and PEFT's HRA of the same reflectors: one value, and one gradient."""
    torch.manual_seed(0)
    layer, x, g = (
        nn.Linear(256, 128).double(),
        torch.randn(32, 256).double().requires_grad_(),
        torch.randn(32, 128).double(),
    )
    ours: Any = adapters.add(copy.deepcopy(layer), "reflections", r)
    theirs: Any = of_peft("HRA", r=r)(copy.deepcopy(layer)).double()
    turn, U = ours.adapters["default"].input, theirs.base_model.model[0].hra_u["default"]
    with torch.no_grad():
        U.normal_()
        turn.V.copy_(U.mT)
        turn.signs.fill_(1)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-6, atol=1e-6)
    (dx, dV), (dx_, dU) = step(ours, x, g), step(theirs, x, g)
    torch.testing.assert_close(dx, dx_, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dV, dU.mT, rtol=1e-5, atol=1e-5)


def launches(r: int, d: int, rows: int, kind: str) -> tuple[int, int]:
    """Counts the adapter's kernel launches, forward and backward, without the layer's own products and bias."""
    counts = []
    kernels = counting_kernels if d <= LONGEST and rows * d <= KERNEL_NUMBERS else nullcontext
    for build in (methods(r)[kind], lambda layer: layer.requires_grad_(False)):
        model = build(nn.Linear(d, d, device="meta"))
        x, g = (torch.empty(rows, d, device="meta", requires_grad=i == 0) for i in range(2))
        with kernels(), observed() as forward:
            y = model(x)
        with kernels(), observed() as backward:
            torch.autograd.grad(y, [x, *(p for p in model.parameters() if p.requires_grad)], g)
        counts.append((len(forward), len(backward)))
    return counts[0][0] - counts[1][0], counts[0][1] - counts[1][1]


def measure(run: Run, rounds: int) -> Run:
    """Milliseconds of a step, and MiB, of every method."""
    torch.manual_seed(0)
    layer = nn.Linear(*LAYERS[run["layer"]])
    x, g = torch.randn(run["rows"], layer.in_features, requires_grad=True), torch.randn(run["rows"], layer.out_features)
    calls: dict[str, Callable[[], object]] = {}
    milliseconds, mebibytes = {}, {}
    for name, build in methods(run["r"]).items():
        if name == "HRA" and run["r"] * layer.in_features**2 > LARGEST_HRA:
            continue
        model = build(copy.deepcopy(layer))
        verify(model, layer, x, name)
        begin = time.perf_counter()
        step(model, x, g)
        milliseconds[name] = 1e3 * (time.perf_counter() - begin)
        mebibytes[name] = round(saved_mebibytes(model, x), 2)
        if milliseconds[name] < 1e3 * SLOW:
            calls[name] = partial(step, model, x, g)
    for timing in compare(calls, device=torch.device("cpu"), rounds=rounds):
        milliseconds[timing.name] = 1e3 * timing.median
    return {"ms": {name: round(ms, 2) for name, ms in milliseconds.items()}, "MiB": mebibytes}


def summary(records: list[Run]) -> list[tables.Table]:
    names = [*methods(8)]
    times, memory = [], []
    for record in records:
        ms, mib = record["ms"], record["MiB"]
        where = [record["layer"], str(record["rows"]), str(record["r"])]
        ratios = (f"{ms[name] / ms[LORA]:.2f}" if name in ms else "–" for name in names[1:])
        times.append([*where, f"{ms[LORA]:.3g} ms", *ratios])
        memory.append([*where, *(f"{mib[name]:.1f}" if name in mib else "–" for name in names)])
    heads = ["layer", "rows", "r"]
    ours = [f"**{name}**" if name == OURS else name for name in names]
    return [
        tables.Table("A training step, as a multiple of LoRA's", [*heads, *ours], times),
        tables.Table("Memory saved for the backward pass, MiB", [*heads, *ours], memory),
    ]


def of_launches() -> tables.Table:
    rows = []
    for d, n, r in ((2048, 128, 8), (2048, 256, 8), (4096, 1024, 64)):
        for kind in (LORA, OURS):
            forward, backward = launches(r, d, n, kind)
            rows.append([kind, f"{d}²", str(n), str(r), str(forward), str(backward)])
    return tables.Table(
        "Launches on a GPU besides those of the layer", ["adapter", "layer", "rows", "r", "forward", "backward"], rows
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="timed steps; default: %(default)s")
    parser.add_argument(
        "--minutes", type=float, default=3, help="stops after the case that ends later; default: %(default)s"
    )
    parser.add_argument("--report", action="store_true", help="times nothing: the tables of what was timed")
    parser.add_argument("--out", type=Path, default=OUT, help="a folder; an interrupted command resumes from it")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # PEFT's
    console, begin = Console(), time.monotonic()
    machine = tables.machine()
    results = Results(options.out / FILE, ("ms", "MiB"), {"versions": fasth_and_others(), "machine": machine})
    runs: list[Run] = [{"layer": layer, "rows": rows, "r": r} for rows in ROWS for r in RANKS for layer in LAYERS]
    verify_against_hra()
    for run in [] if options.report else results.missing(runs):
        if time.monotonic() - begin > 60 * options.minutes:
            console.print("Not finished: the same command goes on.")
            break
        results.add(run | measure(run, options.rounds))
        console.print(run)
    done = sorted(
        results.finished(runs), key=lambda record: ([*LAYERS].index(record["layer"]), record["rows"], record["r"])
    )
    note = (
        f"Medians of {options.rounds} steps, taken in turns; a step of more than {SLOW:g} s is timed once, and HRA "
        f"where it takes less than about {TOO_SLOW:g} s. float32. {results.header['machine']}, "
        f"PEFT {results.header['versions']['peft']}."
    )
    tables.write(options.out / "table.md", [*summary(done), of_launches()], note, console)


def fasth_and_others() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "peft")}


if __name__ == "__main__":
    main()
