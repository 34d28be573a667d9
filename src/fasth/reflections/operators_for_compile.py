"""The backends as operators of PyTorch, ``torch.ops.fasth``, for the graphs of ``torch.compile``.

There is one pair of operators for products of reflections, one for U Σ Vᵀ and one for recurrences, each with a kernel
for the CPU, the compiled core, and one for CUDA, the Triton kernels. An operator has the arguments of the backends'
function of the same name, with the plan's entries as separate arguments, and returns a list of tensors, without those
that are None. The Triton kernels allocate by shapes alone, read no value back and do not synchronize, so CUDA graphs
can record them.
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
_ENTRIES = slice(1, 8)  # the entries of a plan that operators take


def call(name: str, *arguments: Any) -> Sequence[Any]:
    """Calls an operator as a backend's function is called, with the plan as the last argument.

    In a backward pass the argument before the plan says which gradients are needed; the others are None.
    """
    *tensors, plan = arguments
    found = getattr(torch.ops.fasth, name)(*tensors, *plan[_ENTRIES])
    return in_place(found, tensors[-1]) if name.endswith("_backward") else found


def in_place(found: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
    """Puts the gradients in the positions that ``needs`` marks, and None in the others."""
    gradients = iter(found)
    return [next(gradients) if needed else None for needed in needs]


def _kernel(name: str, backend: str) -> Callable[..., Any]:
    """An operator's kernel for one kind of device: the backend's function of the same name."""
    takes_plan = "recurrence" not in name

    def kernel(*arguments: Any) -> Any:
        if takes_plan:
            count = _ENTRIES.stop - _ENTRIES.start
            arguments = *arguments[:-count], Plan(backend, *arguments[-count:])
        if backend == CORE:
            found = getattr(core(), name)(*arguments, torch.get_num_threads())
        else:
            from fasth.reflections.triton import launch

            found = getattr(launch, name)(*arguments)
        return found if isinstance(found, Tensor) else [t for t in found if t is not None]

    return kernel


# The shapes of the operators' results, for fake tensors.


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
    r, d = V.shape[-2:]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if plan.backend == TRITON:
        copy = [torch.empty_like(out)] if plan.copy_output else []
        return [out, *copy, *(_factors_saved(V, plan.form) if plan.save else [])]
    batch, rows = (V.shape[0], x.shape[1]) if V.ndim == 3 else (1, x.numel() // d)
    blocks = [number_of_blocks(r, d, plan.form, plan.block_size)]
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
    U_side, V_side = (U.mT, U) if V is None else (U, V)
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
    n, m = U.shape if V is None else (U.shape[1], V.shape[1])
    gradients = [g.new_empty((*g.shape[:-1], m)), U, sigma, V, g.new_empty(n)]
    return [torch.empty_like(t) for t, needed in zip(gradients, needs, strict=True) if needed and t is not None]


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
_library = torch.library.Library("fasth", "DEF")
for _name, (_schema, _fake) in _SCHEMAS.items():
    _library.define(f"{_name}{_schema}", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, _kernel(_name, TRITON if kernels_on() == "cpu" else CORE), "CPU")
    _library.impl(_name, _kernel(_name, TRITON), "CUDA")
    torch.library.register_fake(f"fasth::{_name}", _fake, lib=_library)
