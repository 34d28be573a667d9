"""A training step of recurrent nets: forward over all times, and backward to the input and to all parameters.

The output of each is compared with that of its twin in torch.nn with the same weights, or, with modReLU, of a loop,
before it is timed. Single calls are timed in turns, and shown as ratios of medians to the step of the twin; that of
modReLU is nn.RNN with tanh. The loop is what one would write by hand around an nn.Linear with
``parametrizations.orthogonal``. Then the peak memory of a step on top of its input and parameters.
Run: python benchmarks/recurrent.py, and make readme to put benchmarks/recurrent/speed.md into docs/recurrent.md
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import fasth
from fasth import _files
from fasth.tools.environment import describe
from fasth.tools.reproduce import memory
from fasth.tools.timing import compare

sys.path.append(str(Path(__file__).parents[1]))
from experiments.harness.tables import Table, markdown, show
from experiments.recurrent.models import Loop

CPU = torch.device("cpu")
BATCH, LONG = 32, 1000
TWINS: dict[str, Callable[..., Any]] = {
    "nn.RNN": nn.RNN,
    "nn.RNN relu": lambda *sizes: nn.RNN(*sizes, nonlinearity="relu"),
    "nn.LSTM": nn.LSTM,
    "nn.GRU": nn.GRU,
}
# Each, and whose step it is compared with.
NETS: dict[str, tuple[Callable[..., Any], str]] = {
    "tanh": (lambda *sizes: fasth.RNNSVD(*sizes, nonlinearity="tanh"), "nn.RNN"),
    "relu": (lambda *sizes: fasth.RNNSVD(*sizes, nonlinearity="relu"), "nn.RNN relu"),
    "modReLU": (fasth.RNNSVD, "nn.RNN"),
    "orthogonal": (lambda *sizes: fasth.RNNSVD(*sizes, eps=0), "nn.RNN"),
    "loop": (lambda *sizes: Loop(*sizes, fasth.parametrizations.orthogonal), "nn.RNN"),
    "LSTMSVD": (fasth.LSTMSVD, "nn.LSTM"),
    "GRUSVD": (fasth.GRUSVD, "nn.GRU"),
}


def step(net: nn.Module, x: Tensor) -> Callable[[], object]:
    tensors = [x, *net.parameters()]

    def call() -> None:
        for tensor in tensors:
            tensor.grad = None
        net(x)[0].square().mean().backward()

    return call


def verify(name: str, h: int, inputs: int) -> None:
    """The net in float64 beside its twin, over a few steps, and the gradient of its input; modReLU beside the loop."""
    net, x = NETS[name][0](inputs, h).double(), torch.randn(5, 3, inputs, dtype=torch.float64, requires_grad=True)
    if getattr(net, "nonlinearity", "") == "modrelu":
        nn.init.uniform_(net.bias_modrelu_l0, -0.1, 0.1)
        twin = Loop(inputs, h, lambda linear: None).double()
        pairs = {twin.input: net.weight_ih_l0, twin.hidden: net.weight_hh_l0}
        with torch.no_grad():
            for linear, weight in pairs.items():
                linear.weight.copy_(weight)
                linear.bias.copy_(net.bias_ih_l0 if linear is twin.input else net.bias_hh_l0)
            twin.bias_modrelu.copy_(net.bias_modrelu_l0)
    else:
        twin = fasth.to_dense(net, report=[])
    (ours, gradient), (theirs, reference) = (
        (out := one(x)[0], torch.autograd.grad(out.square().sum(), x)[0]) for one in (net, twin)
    )
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradient, reference)


def time_table(options: argparse.Namespace) -> Table:
    rows = []
    for h, inputs in itertools.product(options.hidden, options.inputs):
        for name in NETS:
            verify(name, h, inputs)
        for times in options.times:
            torch.manual_seed(0)
            x = torch.randn(times, BATCH, inputs, requires_grad=True)
            nets = TWINS | {name: make for name, (make, _) in NETS.items()}
            calls = {name: step(make(inputs, h), x) for name, make in nets.items()}
            found = {t.name: t for t in compare(calls, device=CPU, rounds=options.rounds, min_time=0, time_limit=60)}
            ratios = (f"{found[name].ratio(found[twin]):.2f}" for name, (_, twin) in NETS.items())
            rows.append([str(h), str(inputs), str(times), f"{found['nn.RNN'].median * 1e3:.1f}", *ratios])
            print(*rows[-1], flush=True)
    title = f"Training step, {BATCH} sequences, as multiples of the twin's; that of modReLU is nn.RNN"
    return Table(title, ["hidden", "inputs", "time steps", "nn.RNN, ms", *NETS], rows)


def memory_table(hidden: list[int]) -> Table:
    names = [name for name, (_, twin) in NETS.items() if twin.startswith("nn.RNN")]
    rows = []
    for h in hidden:
        found = {name: peak_of(name, h) for name in ("nn.RNN", *names)}
        ratios = (f"{found[name] / found['nn.RNN']:.2f}" for name in names)
        rows.append([str(h), f"{found['nn.RNN'] / 1e6:.0f}", *ratios])
    title = f"Peak memory of a training step, {LONG} time steps, {BATCH} sequences, as multiples of nn.RNN's"
    return Table(title, ["hidden", "nn.RNN, MB", *names], rows)


def peak_of(name: str, h: int) -> int:
    """Peak memory, measured in a separate process whose allocator returns freed memory."""
    command = [sys.executable, __file__, "--peak", name, "--hidden", str(h)]
    done = subprocess.run(
        command, env={**os.environ, **memory.ALLOCATOR}, stdout=subprocess.PIPE, text=True, check=True
    )
    return int(done.stdout)


def print_peak(name: str, h: int) -> None:
    torch.set_num_threads(1)
    make = TWINS[name] if name in TWINS else NETS[name][0]
    net, x = make(h, h), torch.randn(LONG, BATCH, h, requires_grad=True)
    step(net, torch.randn(2, BATCH, h))()  # loads and sets up what there is to set up
    print(memory.peak(step(net, x)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--times", type=int, nargs="+", default=[100, 300], help="time steps")
    parser.add_argument("--inputs", type=int, nargs="+", default=[10, 128], help="how many numbers a time step has")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="a file for the tables, in Markdown")
    parser.add_argument("--peak", help="only print the peak memory of this net, in bytes")
    options = parser.parse_args()
    if options.peak:
        return print_peak(options.peak, options.hidden[0])
    tables = [time_table(options)]
    if memory.available("cpu"):
        tables.append(memory_table(options.hidden))
    for table in tables:
        show(table, Console())
    if options.out:
        machine = describe()
        made = f"{machine['cpu']}, {machine['threads']} threads, float32, torch {torch.__version__}."
        _files.write(options.out, "\n\n".join([*map(markdown, tables), made]) + "\n")


if __name__ == "__main__":
    main()
