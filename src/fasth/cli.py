"""The command ``fasth``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import fasth
from fasth.environment import describe


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, or 2 if what it was given makes no sense."""
    parser = argparse.ArgumentParser(
        prog="fasth", description="Orthogonal matrices that are trained by gradient descent."
    )
    parser.add_argument("--version", action="version", version=f"fasth {fasth.__version__}")
    parser.set_defaults(run=lambda _: parser.print_help())
    commands = parser.add_subparsers(title="commands", metavar="command")

    info = commands.add_parser("info", help="which core computes, on how many threads, in which versions")
    info.add_argument("--json", action="store_true", help="for a program to read")
    info.set_defaults(run=_info)

    options = parser.parse_args(arguments)
    return options.run(options) or 0


def _info(options: argparse.Namespace) -> int:
    try:
        found = describe()
    except (ImportError, ValueError) as error:  # a core that does not load, or FASTH_ISA names one that is not here
        print(f"fasth: {error}", file=sys.stderr)
        return 2
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
        "eager CPU work": _path(found["core"]),
        "levels built": ", ".join(found["levels"]["built"]) or "none",
        "levels of this machine": ", ".join(found["levels"]["machine"]),
        "OpenMP": {True: "yes", False: "no, the core runs on one thread", None: "no core in use"}[found["openmp"]],
        "threads": found["threads"],
        "CPU": f"{found['cpu']}, {found['cores']} cores",
        "system": found["system"],
        **found["settings"],
    }


def _path(core: str) -> str:
    if core == "off":
        return "PyTorch: the core is switched off by FASTH_CORE"
    if core == "not built":
        return "PyTorch: no compiled core was built (no C++ compiler when fasth was installed?)"
    return f"compiled core, {core}"
