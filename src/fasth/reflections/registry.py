"""Operators of PyTorch, ``torch.ops.fasth``, with kernels in Python: for the graphs of ``torch.compile`` on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fasth.reflections import native

_library = torch.library.Library("fasth", "DEF")
Function = TypeVar("Function", bound=Callable[..., Any])


def constant_in_graphs(function: Function) -> Function:
    """Marks a function of constants: a graph in the making calls it, and keeps the result.

    Graphs are called again while all that their making looked at is the same, and to look again takes time: every
    global name, function, method and attribute on the way counts, and a name that two modules know counts most. What a
    marked function looks at does not count. So it may only look at what does not change, or what graphs follow anyway.
    """
    # As torch.compiler.assume_constant_result does. That would import the compiler whenever fasth is imported.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def define(
    name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], *, at_once: bool = False
) -> None:
    """``torch.ops.fasth.<name>``.

    Args:
        kernel: computes it on the CPU.
        fake: gives results of the same shapes, without numbers.
        at_once: the compiled core does what ``kernel`` does, for the commonest arguments. Where nobody watches it is
            called without PyTorch's dispatcher, which would take the arguments from Python to C++ and back.
    """
    _library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    if at_once:
        _ask_core_first(name, getattr(torch.ops.fasth, name).default)
    _library.impl(name, kernel, "CPU")
    torch.library.register_fake(f"fasth::{name}", fake, lib=_library)


def differentiate(name: str, function: Callable[..., Any]) -> None:
    """Calls ``function`` in place of the kernel where autograd is to see the operator of this name."""
    _library.impl(name, function, "Autograd")


def _ask_core_first(name: str, operator: Any) -> None:
    dispatched = operator._op  # whose hash is that of the operator: so this comes before anybody asks for it
    core, fastest = None, dispatched

    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal core, fastest
        if core is not native.core():
            core = native.core()
            fastest = dispatched if core is None else core.Operator(name, dispatched)
        return fastest(*arguments, **named)

    operator._op = call
