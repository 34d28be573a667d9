"""``cached()``: a context in which every layer forms its dense weight once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from fasth._private import holds, is_exporting, is_fake, saved_tensors_hooks_active, stands_for, transform_active


class _State:
    enabled: bool = False  # whether weights are cached now
    depth: int = 0  # how many contexts are open


state = _State()
_all: weakref.WeakSet[Cache] = weakref.WeakSet()


class Entry(NamedTuple):
    """A cached weight, and the tensors from which it was formed. It is valid for these tensor objects only."""

    weight: Any  # a tensor, or several: thin factors, the weights of a recurrent layer
    with_graph: bool
    inference: bool  # formed in inference mode, in eager mode
    factors: dict[str, Tensor]

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the weight."""
        return (self.weight,) if isinstance(self.weight, Tensor) else tuple(self.weight)


class Cache:
    """A layer's cached weight, if there is one. A deep copy or a pickle of the layer starts without it."""

    def __init__(self) -> None:
        self.entry: Entry | None = None
        _all.add(self)  # here, since torch.compile would have to guard what changes when a weight is formed

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        return Cache()

    def __reduce__(self) -> tuple[type[Cache], tuple[()]]:
        return Cache, ()


@contextmanager
def cached() -> Iterator[None]:
    """Within ``with fasth.cached():`` each layer forms its dense weight once, at its first use, and multiplies by it.

    Use it for inference, where a layer then costs as much as its twin in ``torch.nn``, and for training steps that call
    a layer more than once, as in a loop over time: the weight is formed once and differentiated once. Weights are
    dropped when the context ends. As with ``torch.nn.utils.parametrize.cached()``, values of parameters should not
    change within it, and only one backward pass may go through a cached weight, unless the graph is retained. A cached
    weight is used only with the tensors from which it was formed: copies, replicas and ``torch.func.functional_call``
    form their own.

    In eager mode and under ``torch.compile``, on every device. Transforms of ``torch.func`` and regions of
    ``torch.utils.checkpoint`` take no cached weight. ``torch.export`` takes those that were cached before, under
    ``torch.no_grad()``, as constants: ``model(x)`` and then ``torch.export.export(model, (x,))``, both within the same
    ``with torch.no_grad(), fasth.cached():``.

    Example:
        >>> model, batches = fasth.LinearSVD(64, 10), torch.randn(5, 32, 64)
        >>> with torch.no_grad(), fasth.cached():
        ...     predictions = [model(x) for x in batches]
    """
    state.depth += 1
    state.enabled = True
    try:
        yield
    finally:
        state.depth -= 1
        if state.depth == 0:
            state.enabled = False
            for cache in _all:
                cache.entry = None


def weight_from(cache: Cache, layer: nn.Module, names: Iterable[str], form: Callable[[], Any]) -> Any:
    """Returns the cached weight of these factors, formed by ``form()`` at the first use; None if none may be used.

    Transforms of ``torch.func`` take no cached weight. Nor does a region of ``torch.utils.checkpoint`` in eager mode:
    it runs twice, and has to save the same tensors both times, even if the second run is outside of the context.
    """
    entry, with_graph = cache.entry, torch.is_grad_enabled()
    if is_exporting():
        return _constant(entry, layer)
    if transform_active() or (with_graph and not is_compiling() and saved_tensors_hooks_active()):
        return None
    if entry is None or (with_graph and not entry.with_graph) or not holds(layer, entry.factors):
        in_eager_mode = not is_compiling()  # torch.compile follows neither of the two questions below
        inference = in_eager_mode and torch.is_inference_mode_enabled()
        factors = {name: getattr(layer, name) for name in names}
        entry = Entry(form(), with_graph, inference, factors)
        if not (in_eager_mode and any(is_fake(t) for t in entry.tensors())):
            cache.entry = entry
    return entry.weight


def _constant(entry: Entry | None, layer: nn.Module) -> Any:
    """Returns the cached weight as a constant of an exported program; None without one, or if gradients are needed.

    The weight has to be cached before: while ``torch.export`` traces, parameters have no values. A tensor made in
    inference mode would make the program fail outside of that mode.
    """
    if entry is None or torch.is_grad_enabled() or entry.with_graph or entry.inference:
        return None
    found = ((getattr(layer, name), t) for name, t in entry.factors.items())
    return entry.weight if all(now is t or stands_for(now, t) for now, t in found) else None
