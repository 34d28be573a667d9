"""The options of ``fasth reproduce``. Imports only the standard library, so that ``fasth`` starts fast, and an error
can name a missing package.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

NAMES = ("step", "inverse", "determinant", "exponential", "cayley", "block-size", "rows", "memory", "peers", "counts")
OUT = "fasth-reproduction"


def add(parser: argparse.ArgumentParser) -> None:
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="about three minutes on two cores; the default")
    size.add_argument("--full", action="store_true", help="the paper's grid, d = 64, 128, …, 3072, 100 repetitions")
    parser.add_argument("--device", default="cpu", help="where it runs, such as cuda; default: %(default)s")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32", help="default: %(default)s")
    parser.add_argument("--threads", type=int, help="of the CPU; default: as many as torch takes")
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", help=f"some of: {', '.join(NAMES)}")
    parser.add_argument("--sizes", nargs="+", type=int, metavar="D", help="these d in every experiment")
    parser.add_argument("--repetitions", type=int, metavar="N", help="default: 10, or 100 with --full")
    parser.add_argument("--time-limit", type=float, metavar="S", help="seconds for each method at each size")
    parser.add_argument("--out", type=Path, default=Path(OUT), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--again", action="store_true", help="do not go on from what is in the folder: measure anew")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    try:
        from fasth.tools.reproduce import command
    except ModuleNotFoundError as error:
        wanted = f"`fasth reproduce` needs {error.name}: pip install 'fasth[reproduce]'"
        print(f"fasth: {wanted}", file=sys.stderr)
        return 2
    return command.run(options)
