"""The recurrent nets that are compared. Each maps (time, batch, inputs) to (time, batch, hidden)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import fasth
from fasth.nn.init import rotations
from fasth.nn.recurrence import modrelu


class Loop(nn.Module):
    """A modReLU cell as people write it around an orthogonal weight: a loop over time, with the weight formed once.

    It starts as ``RNNSVD`` does.
    """

    def __init__(self, inputs: int, hidden: int, constrain: Callable[[nn.Linear], object]) -> None:
        super().__init__()
        self.input, self.hidden = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
        bound = hidden**-0.5
        for parameter in (*self.input.parameters(), self.hidden.bias):
            nn.init.uniform_(parameter, -bound, bound)
        with torch.no_grad():
            self.hidden.weight.copy_(rotations(hidden, "henaff"))
        constrain(self.hidden)
        self.bias_modrelu = nn.Parameter(torch.zeros(hidden))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, states = x.new_zeros(x.shape[1], len(self.bias_modrelu)), []
        with parametrize.cached():
            for step in self.input(x):
                h = modrelu(step + self.hidden(h), self.bias_modrelu)
                states.append(h)
        return torch.stack(states), h


def with_geotorch(constraint: str, **options: Any) -> Callable[[nn.Linear], None]:
    """A function that puts a constraint of geotorch on a weight, which keeps its value."""

    def constrain(linear: nn.Linear) -> None:
        geotorch = importlib.import_module("geotorch")
        start = linear.weight.detach().clone()
        getattr(geotorch, constraint)(linear, "weight", **options)
        linear.weight = start

    return constrain


def by(constrain: Callable[[nn.Linear], object]) -> Callable[[int, int], nn.Module]:
    return lambda inputs, hidden: Loop(inputs, hidden, constrain)


Make = Callable[[int, int], Any]
METHODS: dict[str, Make] = {
    "nn.RNN": nn.RNN,
    "nn.LSTM": nn.LSTM,
    "nn.GRU": nn.GRU,
    "torch orthogonal": by(parametrizations.orthogonal),
    "geotorch orthogonal": by(with_geotorch("orthogonal")),
    "geotorch almost orthogonal": by(with_geotorch("almost_orthogonal", lam=0.01)),
    "RNNSVD": fasth.RNNSVD,
    "RNNSVD, eps = 0": lambda inputs, hidden: fasth.RNNSVD(inputs, hidden, eps=0),
    "RNNSVD, eps = 0, relu": lambda inputs, hidden: fasth.RNNSVD(inputs, hidden, nonlinearity="relu", eps=0),
    "RNNSVD, init = cayley": lambda inputs, hidden: fasth.RNNSVD(inputs, hidden, init="cayley"),
    "LSTMSVD": fasth.LSTMSVD,
    "GRUSVD": fasth.GRUSVD,
}
OURS = tuple(name for name in METHODS if "SVD" in name)


def installed() -> list[str]:
    return [name for name in METHODS if "geotorch" not in name or find_spec("geotorch") is not None]


class Net(nn.Module):
    """A recurrent net, and a linear layer from its states to the outputs."""

    def __init__(self, method: str, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.rnn = METHODS[method](inputs, hidden)
        self.head = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


def groups(net: nn.Module, lr: float) -> list[dict[str, Any]]:
    """``fasth.param_groups``; orthogonal weights of other libraries get a tenth of the rate, as in expRNN."""
    found = fasth.param_groups(net, lr=lr)
    slow = {
        id(p)
        for module in net.modules()
        if isinstance(module, parametrize.ParametrizationList)
        for p in module.parameters()
    }
    others = [p for group in found for p in group["params"] if id(p) in slow]
    for group in found:
        group["params"] = [p for p in group["params"] if id(p) not in slow]
    return [group for group in found if group["params"]] + ([{"params": others, "lr": lr / 10}] if others else [])
