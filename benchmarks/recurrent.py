"""A training step of recurrent nets: forward over all times, and backward to the input and to all parameters.

The output of each is compared with that of its twin in torch.nn with the same weights, or, with modReLU, of a loop, in
value and gradients, before it is timed. Single calls are timed in turns, and shown as ratios of medians to the step of
the twin; modReLU's to that of nn.RNN with tanh. The loop is what one would write by hand, as geotorch's example does.
With --memory: the peak of a step on top of its input and parameters, as a ratio to nn.RNN's.
Run: python benchmarks/recurrent.py
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fasth
from fasth.nn.recurrence import modrelu
from fasth.reproduce import memory
from fasth.timing import compare

CPU = torch.device("cpu")
BATCH = 32
TWINS: dict[str, Callable[..., Any]] = {
    "nn.RNN": nn.RNN,
    "nn.RNN relu": lambda *sizes: nn.RNN(*sizes, nonlinearity="relu"),
    "nn.LSTM": nn.LSTM,
    "nn.GRU": nn.GRU,
}
# Each, and whose step it is compared with.
NETS: dict[str, tuple[Callable[..., Any], str]] = {
    "tanh": (lambda *sizes: fasth.RNNSVD(*sizes, nonlinearity="tanh", eps=0.1), "nn.RNN"),
    "relu": (lambda *sizes: fasth.RNNSVD(*sizes, nonlinearity="relu", eps=0.1), "nn.RNN relu"),
    "modReLU": (lambda *sizes: fasth.RNNSVD(*sizes, eps=0.1), "nn.RNN"),
    "orthogonal": (lambda *sizes: fasth.RNNSVD(*sizes, eps=0), "nn.RNN"),
    "loop": (lambda *sizes: Loop(*sizes), "nn.RNN"),
    "LSTMSVD": (fasth.LSTMSVD, "nn.LSTM"),
    "GRUSVD": (fasth.GRUSVD, "nn.GRU"),
}


class Loop(nn.Module):
    """modReLU in a loop over time, around a LinearOrthogonal within ``fasth.cached()``."""

    def __init__(self, inputs: int, h: int) -> None:
        super().__init__()
        self.input, self.hidden = nn.Linear(inputs, h), fasth.LinearOrthogonal(h, h, bias=False)
        self.bias = nn.Parameter(torch.zeros(h))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, states = x.new_zeros(x.shape[1], self.hidden.in_features), []
        with fasth.cached():
            for step in self.input(x):
                h = modrelu(step + self.hidden(h), self.bias)
                states.append(h)
        return torch.stack(states), h


def step(net: nn.Module, x: Tensor) -> Callable[[], object]:
    tensors = [x, *net.parameters()]

    def call() -> None:
        for tensor in tensors:
            tensor.grad = None
        net(x)[0].square().mean().backward()

    return call


def verify(name: str, h: int, inputs: int) -> None:
    """The net in float64 beside its twin, over a few steps; modReLU beside the loop."""
    net, x = NETS[name][0](inputs, h).double(), torch.randn(5, 3, inputs, dtype=torch.float64, requires_grad=True)
    if getattr(net, "nonlinearity", "") == "modrelu":
        twin = Loop(inputs, h).double()
        with torch.no_grad():
            twin.input.weight.copy_(net.weight_ih_l0)
            twin.input.bias.copy_(net.bias_ih_l0 + net.bias_hh_l0)
            twin.bias.copy_(net.bias_modrelu_l0)
            twin.hidden.set_weight_(net.weight_hh_l0)  # orthogonal, at the start
    else:
        twin = fasth.to_dense(net, report=[])
    (ours, gradient), (theirs, reference) = (
        (out := of(x)[0], torch.autograd.grad(out.square().sum(), x)[0]) for of in (net, twin)
    )
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradient, reference)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--times", type=int, nargs="+", default=[100, 300])
    parser.add_argument("--inputs", type=int, help="how many numbers a time step has; default: as many as hidden units")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--memory", action="store_true", help="bytes in place of seconds, for 1000 time steps")
    options = parser.parse_args()
    if options.memory:
        return show_memory(options.hidden)
    print(f"{torch.get_num_threads()} threads, float32, {BATCH} sequences; times of nn.RNN in ms")
    print(f"{'hidden':>6} {'times':>6} {'nn.RNN':>8}", *(f"{name:>11}" for name in NETS))
    for h in options.hidden:
        inputs = options.inputs or h
        for name in NETS:
            verify(name, h, inputs)
        for times in options.times:
            torch.manual_seed(0)
            x = torch.randn(times, BATCH, inputs, requires_grad=True)
            nets = TWINS | {name: make for name, (make, _) in NETS.items()}
            calls = {name: step(make(inputs, h), x) for name, make in nets.items()}
            found = {t.name: t for t in compare(calls, device=CPU, rounds=options.rounds, min_time=0, time_limit=60)}
            ratios = (f"{found[name].ratio(found[twin]):>11.2f}" for name, (_, twin) in NETS.items())
            print(f"{h:>6} {times:>6} {found['nn.RNN'].median * 1e3:>8.1f}", *ratios, flush=True)


def show_memory(hidden: list[int]) -> None:
    if any(os.environ.get(name) != value for name, value in memory.ALLOCATOR.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **memory.ALLOCATOR})
    torch.set_num_threads(1)  # the threads of one process are not there in its children
    names = [name for name, (_, twin) in NETS.items() if twin.startswith("nn.RNN")]
    print(f"{'hidden':>6} {'nn.RNN, MB':>11}", *(f"{name:>11}" for name in names))
    for h in hidden:

        def peak(make: Callable[..., Any], h: int = h) -> int:
            x = torch.randn(1000, BATCH, h, requires_grad=True)
            step(make(h, h), x[:2].detach())()
            return memory.peak(step(make(h, h), x))

        found = {name: memory.forked(lambda make=make: peak(make)) for name, make in TWINS.items()}
        found |= {name: memory.forked(lambda make=NETS[name][0]: peak(make)) for name in names}
        ratios = (f"{found[name] / found['nn.RNN']:>11.2f}" for name in names)
        print(f"{h:>6} {found['nn.RNN'] / 1e6:>11.1f}", *ratios, flush=True)


if __name__ == "__main__":
    main()
