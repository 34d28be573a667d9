"""Runs the examples, and puts what they print and draw into docs/examples.md, between two lines each: demo:start and
demo:end, and so on.

Run: make docs-examples, or python docs/run_examples.py --help
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from fasth import _files

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "examples.md"
PICTURES = ROOT / "docs" / "examples"


@dataclass(frozen=True)
class Example:
    command: str  # as one types it in the repository
    picture: str | None = None  # the file that it draws
    shows: str = ""  # the picture, for who does not see it
    markdown: bool = False  # what it prints


EXAMPLES = {
    "demo": Example(
        "python examples/demo.py",
        "build/demo/spectra.png",
        "Singular values of each layer before training, and after it in both networks",
    ),
    "spectra": Example(
        "python examples/spectra.py", "build/spectra.png", "Singular values of three layers before and after training"
    ),
    "remember": Example(
        "python examples/remember.py",
        "build/remember/gradients.png",
        "The gradient with respect to the hidden state at each time step, of an LSTM and of an RNNSVD",
    ),
    "adapters": Example(
        "python examples/adapters.py --quick --out build/adapters-example",
        "build/adapters-example/adapters.png",
        "Accuracy on the new task and on the old one, for each way to adapt a network",
        markdown=True,
    ),
    "rotations": Example("python examples/rotations.py --seeds 2 --steps 100", markdown=True),
    "flow": Example(
        "python -m experiments.flow --quick --tasks table --mixers dense PLU positive --out build/flow-example",
        "build/flow-example/curves.png",
        "Loss on validation data against training steps, for each mixer",
    ),
    "distributed": Example("torchrun --nproc-per-node 2 examples/distributed.py"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which; default all: {', '.join(EXAMPLES)}")
    names = parser.parse_args().names or list(EXAMPLES)
    if unknown := set(names) - set(EXAMPLES):
        parser.error(f"NAME should be one of {', '.join(EXAMPLES)}; got {', '.join(sorted(unknown))}")
    for name in names:
        print(f"{name}: {EXAMPLES[name].command}", end=" … ", flush=True)
        start = time.perf_counter()
        show(name, run(EXAMPLES[name]))
        print(f"{time.perf_counter() - start:.0f} s")
    return 0


def run(example: Example) -> str:
    """What the command prints, as to a file: without colours and progress bars."""
    program, *arguments = shlex.split(example.command)
    command = [str(Path(sys.executable).parent / program), *arguments]
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"failed with exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return readable(done.stdout)


def readable(printed: str) -> str:
    """Without lines that end in blanks, blank lines around, paths of this machine, and what a progress bar leaves."""
    lines = [line.rstrip() for line in printed.replace(f"{ROOT}{os.sep}", "").splitlines()]
    return "\n".join(line for line in lines if not re.search("[━╸╺]", line)).strip("\n")


def show(name: str, printed: str) -> None:
    """Puts the output between its two lines of the page, with its picture."""
    block = printed if EXAMPLES[name].markdown else f"```text\n{printed}\n```"
    if picture := EXAMPLES[name].picture:
        PICTURES.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / picture, PICTURES / f"{name}.png")
        block += f"\n\n![{EXAMPLES[name].shows}](examples/{name}.png)"
    start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    before, found, rest = PAGE.read_text(encoding="utf-8").partition(start)
    _, found_too, after = rest.partition(end)
    if not (found and found_too):
        raise SystemExit(f"{PAGE} should have a line {start} and, below it, a line {end}")
    _files.write(PAGE, f"{before}{start}\n{block}\n{end}{after}")


if __name__ == "__main__":
    sys.exit(main())
