"""``cached()``: a context in which every layer forms its dense weight once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fasth.private import is_exporting, transform_active


class _State:
    enabled: bool = False  # whether weights are cached now
    depth: int = 0  # how many contexts are open


state = _State()
_all: weakref.WeakSet[Cache] = weakref.WeakSet()


class Cache:
    """A layer's cached weight, if it has one: with a graph for its gradient, or without. No copy of a layer has it."""

    def __init__(self) -> None:
        self.weight: Any = None
        self.with_graph: bool = False
        _all.add(self)  # here, since torch.compile would have to guard what changes when a weight is formed

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        return Cache()

    def __reduce__(self) -> tuple[type[Cache], tuple[()]]:
        return Cache, ()


@contextmanager
def cached() -> Iterator[None]:
    """Within ``with fasth.cached():`` each layer forms its dense weight once, at its first use, and multiplies by that.

    For inference, where a layer then costs what its twin in ``torch.nn`` costs; and for training, where a layer is used
    more than once in a step, as in a loop over time: the weight is formed once and differentiated once. It is dropped
    at the end. As with ``torch.nn.utils.parametrize.cached()``, parameters should not change within it, and what goes
    backward through a cached weight goes once, unless the graph is retained.

    In eager mode and under ``torch.compile``, on every device. Transforms of ``torch.func`` take no cached weight.

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
                cache.weight = None


def weight_from(cache: Cache, form: Callable[[], Any]) -> Any:
    """The cached weight, which ``form()`` makes the first time; None where none may be cached."""
    if is_exporting() or transform_active():
        return None
    with_graph = torch.is_grad_enabled()
    if cache.weight is None or (with_graph and not cache.with_graph):
        cache.weight = form()
        cache.with_graph = with_graph
    return cache.weight
