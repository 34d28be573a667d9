"""The command ``fasth``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import fasth
from fasth.reflections import tuning_file
from fasth.reflections.planner import tuning
from fasth.tools.environment import describe
from fasth.tools.reproduce import options as reproduce_options
from fasth.tools.tune import tune

_SIZES = [64, 128, 256, 512, 768, 1024]
_DTYPES = ["float32", "bfloat16", "float16", "float64"]
_REPORT = Path("fasth-check.json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, or 1 for a wrong answer, 2 for invalid options."""
    parser = argparse.ArgumentParser(
        prog="fasth", description="Orthogonal matrices that are trained by gradient descent."
    )
    parser.add_argument("--version", action="version", version=f"fasth {fasth.__version__}")
    parser.set_defaults(run=lambda _: parser.print_help())
    commands = parser.add_subparsers(title="commands", metavar="command")

    info = commands.add_parser("info", help="which core computes, on how many threads, in which versions")
    info.add_argument("--json", action="store_true", help="for a program to read")
    info.set_defaults(run=_info)

    tune = commands.add_parser("tune", help="find the best block sizes for this machine, and remember them")
    tune.add_argument("d", nargs="*", type=int, help=f"sizes; default: {' '.join(map(str, _SIZES))}", default=_SIZES)
    tune.add_argument("--rows", type=int, default=32, help="default: %(default)s")
    tune.add_argument("--dtype", choices=_DTYPES, default="float32", help="default: %(default)s")
    tune.add_argument("--device", default="cpu", help="default: %(default)s")
    tune.set_defaults(run=_tune)

    check = commands.add_parser("check", help="compare what a device computes with the definition: under a minute")
    check.add_argument("--device", default="cpu", help="such as cuda; default: %(default)s")
    check.add_argument("--dtype", nargs="+", choices=_DTYPES, help="default: all that the device has")
    check.add_argument(
        "--threads", type=int, default=1, help="of the CPU, for problems this small; default: %(default)s"
    )
    check.add_argument("--only", default="", metavar="WORDS", help="the checks whose name contains these words")
    check.add_argument("--out", type=Path, default=_REPORT, metavar="FILE", help="the report; default: %(default)s")
    check.set_defaults(run=_check)

    reproduce = commands.add_parser("reproduce", help="the paper's experiments on this machine, with figures")
    reproduce_options.add(reproduce)

    options = parser.parse_args(arguments)
    return options.run(options) or 0


def _tune(options: argparse.Namespace) -> int:
    print("   d  block size  (default)  time of a step  (default)  Q is formed from  (default)")
    for d in options.d:
        try:
            found = tune(d, options.rows, dtype=getattr(torch, options.dtype), device=options.device)
        except (ValueError, RuntimeError, AssertionError) as error:  # the type depends on the missing device
            return _refuse(str(error).splitlines()[0])
        entry = found.entry
        print(
            f"{d:4}  {entry.block_size:10}  {found.default_block_size:9}  {found.seconds * 1e3:11.3f} ms"
            f"  {found.default_seconds * 1e3:6.3f} ms  {entry.crossover:11} rows  {found.default_crossover:9}"
            + (f"  kernels: up to {entry.kernel_rows} rows" if entry.kernel_rows else ""),
            flush=True,
        )
    print(f"Kept in {tuning_file.path()}")
    return 0


def _check(options: argparse.Namespace) -> int:
    from fasth.tools import check, device  # only this command needs them

    if options.threads < 1:
        return _refuse(f"--threads should be positive; got {options.threads}")
    torch.set_num_threads(options.threads)
    try:
        device.require(options.device)
        dtypes = options.dtype or check.usable(options.device, _DTYPES)
        chosen = [one for one in check.checks(options.device, dtypes) if options.only in one.name]
        if not chosen:
            return _refuse(f"no check has a name that contains {options.only!r}")
        return check.run(options.device, chosen, options.out)
    except (ImportError, OSError, ValueError) as error:  # from the core, the report's file and the device
        return _refuse(str(error))


def _refuse(reason: str) -> int:
    print(f"fasth: {reason}", file=sys.stderr)
    return 2


def _info(options: argparse.Namespace) -> int:
    try:
        found = describe()
    except (ImportError, ValueError) as error:  # the core does not load, or FASTH_ISA names a level that is missing
        return _refuse(str(error))
    found["tuning"] = {
        "file": str(tuning_file.path()),
        "entries": [asdict(entry) for entry in tuning().values()],
    }
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        lines = _lines(found)
        width = max(map(len, lines))
        print("\n".join(f"{name:{width}}  {value}" for name, value in lines.items()))
    return 0


def _lines(found: dict[str, Any]) -> dict[str, Any]:
    return {
        **found["versions"],
        "eager CPU work": _path(found["core"], found["kernels"]),
        "GPU work": _gpu_path(found["kernels"]),
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none that torch sees",
        "levels built": ", ".join(found["levels"]["built"]) or "none",
        "levels of this machine": ", ".join(found["levels"]["machine"]),
        "OpenMP": {True: "yes", False: "no, the core runs on one thread", None: "no core in use"}[found["openmp"]],
        "threads": found["threads"],
        "CPU": f"{found['cpu']}, {found['cores']} cores",
        "system": found["system"],
        **found["settings"],
        "tuning": found["tuning"]["file"] if found["tuning"]["entries"] else "none yet: `fasth tune` finds it",
        **{f"  d = {e['d']}, {e['dtype']}, {_where(e)}": _choices(e) for e in found["tuning"]["entries"]},
    }


def _where(entry: dict[str, Any]) -> str:
    return f"{entry['threads']} threads" if entry["device"] == "cpu" else entry["device"]


def _choices(entry: dict[str, Any]) -> str:
    kernels = f"kernels up to {entry['kernel_rows']} rows, " if entry["kernel_rows"] else ""
    return f"{kernels}blocks of {entry['block_size']}, Q formed from {entry['crossover']} rows"


def _path(core: str, kernels: str) -> str:
    if kernels == "cpu":
        return "Triton kernels, in Triton's interpreter: slow, to show what they compute (TRITON_INTERPRET)"
    if core == "off":
        return "PyTorch: the core is switched off by FASTH_BACKEND"
    if core == "not built":
        return "PyTorch: no compiled core was built (no C++ compiler when fasth was installed?)"
    return f"compiled core, {core}"


def _gpu_path(kernels: str) -> str:
    if kernels == "not installed":
        return "PyTorch: Triton is not installed (it comes with PyTorch's CUDA builds)"
    if kernels == "off":
        return "PyTorch: the Triton kernels are switched off by FASTH_BACKEND"
    if kernels == "cpu":
        return "PyTorch: the Triton kernels are interpreted, on CPU tensors"
    return "Triton kernels for few rows, as a rule or `fasth tune` says; PyTorch elsewhere"
