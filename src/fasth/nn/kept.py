"""The weight that a layer keeps for inference, for the graphs of ``torch.compile``.

Whether a kept weight is still that of its parameters shows only when a graph runs, so the graph calls an operator,
which asks the layer. A graph serves every layer of its kind, as it does with ``nn.Linear``, so the layer is an
argument: a tensor with its number. On the CPU only: elsewhere a graph may be recorded and replayed without asking.

A large weight that is only multiplied by is kept in oneDNN's blocks, as Inductor keeps the weights of a frozen graph.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fasth.reflections import native, registry
from fasth.reflections.blocked import is_exporting


class Keeper(Protocol):
    def kept_weight_of(self, made_of: Sequence[Tensor]) -> Tensor:
        """The weight that these make: the kept one where they are the layer's own, which may be packed."""


# From so many entries on, the blocks are worth a longer call: for one row about as fast as a plain matrix, for a few
# twice as fast and more on an AMD EPYC.
PACKED_ENTRIES = 512 * 512

_keepers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(layer: Keeper) -> Tensor:
    """The layer's number, by which the operators find it for as long as it lives."""
    number = next(_numbers)
    _keepers[number] = layer
    return torch.tensor(number, device="cpu")


def usable(number: Tensor, made_of: Sequence[Tensor | None]) -> bool:
    """Whether a graph in the making may ask for the weight when it runs."""
    return (
        torch.compiler.is_dynamo_compiling()
        and not is_exporting()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._is_any_autocast_enabled()
        and type(number) is Tensor
        and all(t is not None and type(t) in (Tensor, torch.nn.Parameter) and t.is_cpu for t in made_of)
    )


def packed(weight: Tensor) -> Tensor:
    """The weight as ``_linear`` multiplies by it fastest: in oneDNN's blocks, or as it is."""
    pays = weight.numel() >= PACKED_ENTRIES and weight.dtype is torch.float32 and weight.is_cpu
    return torch.ops.mkldnn._reorder_linear_weight(weight) if pays and _has_blocks() and _is_exact() else weight


def _has_blocks() -> bool:
    """Whether oneDNN is there, on a processor like those that this was measured on: x86 with AVX2 at least."""
    mkldnn = torch.backends.mkldnn
    return mkldnn.is_available() and bool(mkldnn.enabled) and native.machine_level() != "baseline"


def _is_exact() -> bool:
    """Whether products of float32 are to be those of float32."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # it cannot say, since the user has set it for each backend
        return False


def _weight(made_of: Sequence[Tensor], number: Tensor, shape: Sequence[int]) -> Tensor:
    weight = _keepers[int(number)].kept_weight_of(made_of)
    # A graph takes the results of its operators for its own, and may overwrite them.
    return weight.to_dense() if weight.is_mkldnn else weight.clone(memory_format=torch.contiguous_format)


def _weight_fake(made_of: Sequence[Tensor], number: Tensor, shape: Sequence[int]) -> Tensor:
    return made_of[0].new_empty(shape)


def _linear(x: Tensor, made_of: Sequence[Tensor], bias: Tensor | None, number: Tensor, out_features: int) -> Tensor:
    weight = _keepers[int(number)].kept_weight_of(made_of)
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    n, m = weight.shape
    if x.shape[-1:] != (m,) or (bias is not None and bias.shape != (n,)):
        return F.linear(x, weight.to_dense(), bias)  # an error that says so, or a bias to broadcast
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


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
    lambda x, *others: _linear(x, *others) if type(x) in native.PLAIN and x.is_cpu else None,
)
