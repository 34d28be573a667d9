"""The weight that a layer keeps for inference, for the graphs of ``torch.compile``.

Whether a kept weight is still that of its parameters shows only when a graph runs, so the graph calls an operator,
which asks the layer. A graph serves every layer of its kind, as it does with ``nn.Linear``, so the layer is an
argument: a tensor with its number. On the CPU only: elsewhere a graph may be recorded and replayed without asking.

A weight that is only multiplied by is packed for the compiled core, which multiplies few rows faster than F.linear.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fasth.reflections import native, registry
from fasth.reflections.blocked import is_exporting


class Keeper(Protocol):
    def kept_weight_of(self, made_of: Sequence[Tensor]) -> Any:
        """The weight that these make, a tensor or packed: the kept one where they are the layer's own."""


_keepers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(layer: Keeper) -> Tensor:
    """The layer's number, by which the operators find it for as long as it lives."""
    number = next(_numbers)
    _keepers[number] = layer
    return torch.tensor(number, device="cpu")


def usable(number: Tensor, made_of: Sequence[Tensor | None]) -> bool:
    """Whether a graph in the making may ask for the weight when it runs."""
    kinds = [(type(t), t is not None and t.is_cpu) for t in (number, *made_of)]
    return is_dynamo_compiling() and _may_be_asked_for(kinds)


@registry.constant_in_graphs
def _may_be_asked_for(kinds: Sequence[tuple[type, bool]]) -> bool:
    for kind, on_cpu in kinds:
        if not (on_cpu and kind in native.PLAIN):
            return False
    return not (is_exporting() or torch._C._are_functorch_transforms_active() or torch._C._is_any_autocast_enabled())


def packed(weight: Tensor, number: Tensor, made_of: Sequence[tuple[Tensor, int, int]]) -> Any:
    """The weight as ``_linear`` multiplies by it fastest: packed, or as it is.

    ``made_of``: tensors with their versions and addresses. As long as they stay the same, and until it is forgotten,
    graphs find the packed weight without asking the layer of this number.
    """
    core = native.core()
    # Narrow registers would gain nothing: without AVX2 the library that F.linear calls has wider ones at times.
    serves = core is not None and core.isa != "baseline" and core.plain(weight) and _is_exact()
    return core.KeptWeight(int(number), weight, made_of) if serves else weight


def forget(weight: Any) -> None:
    """Graphs are to find it no more, whoever else may hold it: a traceback does."""
    if not isinstance(weight, Tensor):
        weight.forget()


def _is_exact() -> bool:
    """Whether products of float32 are to be those of float32."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # it cannot say, since the user has set it for each backend
        return False


def _weight(made_of: Sequence[Tensor], number: Tensor, shape: Sequence[int]) -> Tensor:
    weight = _keepers[int(number)].kept_weight_of(made_of)
    # A graph takes the results of its operators for its own, and may overwrite them.
    return weight.clone(memory_format=torch.contiguous_format) if isinstance(weight, Tensor) else weight.dense()


def _weight_fake(made_of: Sequence[Tensor], number: Tensor, shape: Sequence[int]) -> Tensor:
    return made_of[0].new_empty(shape)


def _linear(x: Tensor, made_of: Sequence[Tensor], bias: Tensor | None, number: Tensor, out_features: int) -> Tensor:
    weight = _keepers[int(number)].kept_weight_of(made_of)
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    out = None if native.watched() else weight.linear(x, bias, torch.get_num_threads())
    # F.linear has an error that says so, a bias to broadcast, or a tangent.
    return F.linear(x, weight.dense(), bias) if out is None else out


def _linear_fake(
    x: Tensor, made_of: Sequence[Tensor], bias: Tensor | None, number: Tensor, out_features: int
) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


registry.define("kept_weight", "(Tensor[] made_of, Tensor number, int[] shape) -> Tensor", _weight, _weight_fake)
registry.define(
    "kept_linear",
    "(Tensor x, Tensor[] made_of, Tensor? bias, Tensor number, int out_features) -> Tensor",
    _linear,
    _linear_fake,
    at_once=True,
)

linear = torch.ops.fasth.kept_linear
