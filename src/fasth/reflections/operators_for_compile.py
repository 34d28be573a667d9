"""The backends as operators of PyTorch, ``torch.ops.fasth``, for the graphs of ``torch.compile``.

There is one pair of operators for products of reflections, one for U Σ Vᵀ and one for recurrences, each with a kernel
for the CPU, the compiled core, and one for CUDA, the Triton kernels. An operator takes the entries of a plan one by one
and gives a list of tensors; the functions here have the signatures of the backends themselves. The Triton kernels
allocate by shapes alone, read no value back and do not synchronize, so CUDA graphs can record them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fasth.reflections.core import core
from fasth.reflections.plan import CORE, TRITON, Plan
from fasth.reflections.planner import kernels_on, number_of_blocks, saved_size
from fasth.reflections.triton.configurations import BLOCK

_PLAN = "int form, bool transpose, int block_size, int save, bool copy_output, bool of_identity, bool symmetric"
_FACTORS = "Tensor U, Tensor? sigma, Tensor? V"


# As the backends have them.


def householder(x: Tensor, V: Tensor, plan: Plan) -> Sequence[Tensor]:
    """x Qᵀ, and what is saved for backward."""
    return torch.ops.fasth.householder(x, V, *_entries(plan))


def householder_backward(
    g: Tensor, output: Tensor | None, V: Tensor, saved: Sequence[Tensor], needs: Sequence[bool], plan: Plan
) -> list[Tensor | None]:
    """The gradients of x and V, each None where it is not needed."""
    found = torch.ops.fasth.householder_backward(g, output, V, saved, list(needs), *_entries(plan))
    return _in_place(found, needs)


def svd_linear(
    x: Tensor, U: Tensor, sigma: Tensor | None, V: Tensor | None, bias: Tensor | None, plan: Plan
) -> Sequence[Tensor]:
    """x Wᵀ + bias, and what is saved for backward."""
    return torch.ops.fasth.svd_linear(x, U, sigma, None if plan.symmetric else V, bias, *_entries(plan))


def svd_linear_backward(
    g: Tensor,
    output: Tensor | None,
    U: Tensor,
    sigma: Tensor | None,
    V: Tensor | None,
    saved: Sequence[Tensor],
    needs: Sequence[bool],
    plan: Plan,
) -> list[Tensor | None]:
    """The gradients of x, U, sigma, V and the bias, each None where it is not needed."""
    tensors = g, output, U, sigma, None if plan.symmetric else V, saved
    found = torch.ops.fasth.svd_linear_backward(*tensors, list(needs), *_entries(plan))
    return _in_place(found, _svd_gradients(needs, plan.symmetric))


def recurrence(
    x: Tensor, sizes: list[int] | None, W: Tensor, h0: Tensor, bias: Tensor | None, f: int, reverse: bool
) -> Tensor:
    """The states at all times, of x's shape."""
    return torch.ops.fasth.recurrence(x, sizes, W, h0, bias, f, reverse)


def recurrence_backward(
    g: Tensor,
    sizes: list[int] | None,
    W: Tensor,
    out: Tensor,
    h0: Tensor,
    f: int,
    reverse: bool,
    needs_h0: bool,
    needs_bias: bool,
) -> list[Tensor | None]:
    """The gradients of x, h0 and the bias, each None where it is not needed."""
    found = torch.ops.fasth.recurrence_backward(g, sizes, W, out, h0, f, reverse, needs_h0, needs_bias)
    return _in_place(found, (True, needs_h0, needs_bias))


def _entries(plan: Plan) -> tuple[Any, ...]:
    return plan[1:8]


def _svd_gradients(needs: Sequence[bool], symmetric: bool) -> list[bool]:
    """Which gradients the operator gives: where U and V are one tensor, that of U is that of both."""
    return [needs[0], needs[1], needs[2], needs[3] and not symmetric, needs[4]]


def _in_place(found: Sequence[Tensor], given: Sequence[bool]) -> list[Tensor | None]:
    """The tensors found, each in the place that ``given`` says, None elsewhere."""
    tensors = iter(found)
    return [next(tensors) if is_given else None for is_given in given]


class _Kernels:
    """The kernels of all operators for one kind of device."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def _call(self, name: str, *arguments: Any) -> Sequence[Tensor | None]:
        if self.backend == CORE:
            return getattr(core(), name)(*arguments, torch.get_num_threads())
        from fasth.reflections.triton import launch

        return getattr(launch, name)(*arguments)

    def householder(self, x: Tensor, V: Tensor, *entries: Any) -> list[Tensor]:
        return _given(self._call("householder", x, V, Plan(self.backend, *entries)))

    def householder_backward(
        self, g: Tensor, output: Tensor | None, V: Tensor, saved: Sequence[Tensor], needs: Sequence[bool], *entries: Any
    ) -> list[Tensor]:
        return _given(self._call("householder_backward", g, output, V, saved, needs, Plan(self.backend, *entries)))

    def svd_linear(
        self, x: Tensor, U: Tensor, sigma: Tensor | None, V: Tensor | None, bias: Tensor | None, *entries: Any
    ) -> list[Tensor]:
        plan = Plan(self.backend, *entries)
        return _given(self._call("svd_linear", x, U, sigma, U if plan.symmetric else V, bias, plan))

    def svd_linear_backward(
        self,
        g: Tensor,
        output: Tensor | None,
        U: Tensor,
        sigma: Tensor | None,
        V: Tensor | None,
        saved: Sequence[Tensor],
        needs: Sequence[bool],
        *entries: Any,
    ) -> list[Tensor]:
        plan = Plan(self.backend, *entries)
        V = U if plan.symmetric else V
        return _given(self._call("svd_linear_backward", g, output, U, sigma, V, saved, needs, plan))

    def recurrence(self, *arguments: Any) -> Any:
        return self._call("recurrence", *arguments)

    def recurrence_backward(self, *arguments: Any) -> list[Tensor]:
        return _given(self._call("recurrence_backward", *arguments))


def _given(results: Sequence[Tensor | None]) -> list[Tensor]:
    return [t for t in results if t is not None]


# What the operators give, without computing it.


def _backend_of(x: Tensor) -> str:
    return CORE if x.device.type == "cpu" and kernels_on() != "cpu" else TRITON


def _factors_saved(V: Tensor, form: int) -> list[Tensor]:
    """T and the scales, as the Triton kernels save them."""
    *batch, r, d = V.shape
    B, blocks = batch[0] if batch else 1, number_of_blocks(r, d, form, BLOCK)
    T = V.new_empty((B, blocks, BLOCK, BLOCK), dtype=torch.float32)
    return [T, V.new_empty((B, blocks * BLOCK), dtype=torch.float32)]


def _householder_fake(x: Tensor, V: Tensor, *entries: Any) -> list[Tensor]:
    plan = Plan(_backend_of(x), *entries)
    (r, d), batch = V.shape[-2:], V.shape[0] if V.ndim == 3 else 1
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if plan.backend == TRITON:
        copy = [torch.empty_like(out)] if plan.copy_output else []
        return [out, *copy, *(_factors_saved(V, plan.form) if plan.save else [])]
    rows, blocks = x.numel() // d // batch, [number_of_blocks(r, d, plan.form, plan.block_size)]
    size = saved_size(rows, d, blocks, plan.block_size, plan.save, batch, output=x.numel() if plan.copy_output else 0)
    return [out, x.new_empty(size)] if plan.save or plan.copy_output else [out]


def _householder_backward_fake(
    g: Tensor, output: Tensor | None, V: Tensor, saved: Sequence[Tensor], needs: Sequence[bool], *entries: Any
) -> list[Tensor]:
    dx = [torch.empty_like(g, memory_format=torch.contiguous_format)] if needs[0] else []
    return dx + ([torch.empty_like(V)] if needs[1] else [])


def _svd_linear_fake(
    x: Tensor, U: Tensor, sigma: Tensor | None, V: Tensor | None, bias: Tensor | None, *entries: Any
) -> list[Tensor]:
    plan = Plan(_backend_of(x), *entries)
    U_side, V_side = (U.mT, U) if V is None and not plan.symmetric else (U, U if V is None else V)
    (r_U, n), (r_V, m) = U_side.shape, V_side.shape
    out, rows = x.new_empty((*x.shape[:-1], n)), x.numel() // m
    if not plan.save:
        return [out]
    if plan.backend == TRITON:
        inner = x.new_empty((rows, m), dtype=torch.float32)
        copy = [x.new_empty((1, rows, n), dtype=torch.float32)] if plan.copy_output else []
        sides = (V_side,) if plan.symmetric else (V_side, U_side)
        return [out, inner, *copy, *(t for side in sides for t in _factors_saved(side, plan.form))]
    k = plan.block_size
    blocks = [number_of_blocks(r_V, m, plan.form, k), number_of_blocks(r_U, n, plan.form, k)]
    sizes = {"inner": rows * m, "output": rows * n if plan.copy_output else 0}
    return [out, x.new_empty(saved_size(rows, max(n, m), blocks, k, plan.save, **sizes))]


def _svd_linear_backward_fake(
    g: Tensor,
    output: Tensor | None,
    U: Tensor,
    sigma: Tensor | None,
    V: Tensor | None,
    saved: Sequence[Tensor],
    needs: Sequence[bool],
    *entries: Any,
) -> list[Tensor]:
    symmetric = Plan("", *entries).symmetric
    n, m = U.shape if V is None and not symmetric else (U.shape[1], (U if V is None else V).shape[1])
    like_x = g.new_empty((*g.shape[:-1], m))
    gradients = [like_x, U, sigma, V, g.new_empty(n)]
    return [
        torch.empty_like(t)
        for t, is_given in zip(gradients, _svd_gradients(needs, symmetric), strict=True)
        if is_given and t is not None
    ]


def _recurrence_fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _recurrence_backward_fake(
    g: Tensor, sizes: list[int] | None, W: Tensor, out: Tensor, h0: Tensor, *options: Any
) -> list[Tensor]:
    *_, needs_h0, needs_bias = options
    dx, dh0 = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (g, h0))
    return [dx, *([dh0] if needs_h0 else []), *([g.new_empty(len(W))] if needs_bias else [])]


_SCHEMAS: dict[str, tuple[str, Callable[..., Any]]] = {
    "householder": (f"(Tensor x, Tensor V, {_PLAN}) -> Tensor[]", _householder_fake),
    "householder_backward": (
        f"(Tensor g, Tensor? output, Tensor V, Tensor[] saved, bool[] needs, {_PLAN}) -> Tensor[]",
        _householder_backward_fake,
    ),
    "svd_linear": (f"(Tensor x, {_FACTORS}, Tensor? bias, {_PLAN}) -> Tensor[]", _svd_linear_fake),
    "svd_linear_backward": (
        f"(Tensor g, Tensor? output, {_FACTORS}, Tensor[] saved, bool[] needs, {_PLAN}) -> Tensor[]",
        _svd_linear_backward_fake,
    ),
    "recurrence": (
        "(Tensor x, SymInt[]? sizes, Tensor W, Tensor h0, Tensor? bias, int f, bool reverse) -> Tensor",
        _recurrence_fake,
    ),
    "recurrence_backward": (
        "(Tensor g, SymInt[]? sizes, Tensor W, Tensor out, Tensor h0, int f, bool reverse, bool needs_h0, "
        "bool needs_bias) -> Tensor[]",
        _recurrence_backward_fake,
    ),
}
_CPU, _CUDA = _Kernels(TRITON if kernels_on() == "cpu" else CORE), _Kernels(TRITON)
_library = torch.library.Library("fasth", "DEF")
for _name, (_schema, _fake) in _SCHEMAS.items():
    _library.define(f"{_name}{_schema}", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, getattr(_CPU, _name), "CPU")
    _library.impl(_name, getattr(_CUDA, _name), "CUDA")
    torch.library.register_fake(f"fasth::{_name}", _fake, lib=_library)
