"""x Wᵀ with W = U Σ Vᵀ in one call of the compiled core, with its autograd Function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor

from fasth.reflections.native import COMPACT, address, as_saved, functions, plain, watched
from fasth.reflections.tuning import default_block_size

_SMALL = 1 << 18  # numbers that are kept without asking whether they are worth their memory


def svd_linear(
    x: Tensor,
    U: Tensor,
    sigma: Tensor,
    V: Tensor | None,
    bias: Tensor | None,
    signs: Tensor | None,
    kind: int,
    composed: Callable[..., Tensor],
) -> Tensor:
    """x Wᵀ + bias in one call, with W = Q_U[:, :k] diag(sigma · signs) Q_V[:, :k]ᵀ.  x: (*, m) → (*, n).

    U: (·, n) and V: (·, m) are reflectors; or V is None and U the (n, m) matrix that holds both sides, compact.
    sigma: (k,), signs: (2, k). ``composed`` computes the same of the same arguments; second derivatives go through it.
    """
    sigma, bias, signs = _flat(sigma), _flat(bias), _flat(signs)
    tensors = x, U, sigma, V, bias
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return _run(*tensors, signs, kind, composed)
    return _forward(x.contiguous(), U, sigma, V, bias, signs, kind, False)[0]


def _forward(
    x: Tensor,
    U: Tensor,
    sigma: Tensor,
    V: Tensor | None,
    bias: Tensor | None,
    signs: Tensor | None,
    kind: int,
    keep: bool,
) -> tuple[Tensor, tuple[int, ...], Tensor | None, tuple[int, int]]:
    core_functions = functions(x.dtype)
    problem, U_strides, V_strides = _problem(x, U, sigma, V, kind)
    threads = torch.get_num_threads()
    kept, U_kept, with_states = None, 0, False
    if keep:
        room = max(2 * (x.numel() + U.numel() + (0 if V is None else V.numel())), _SMALL)
        size, U_kept, with_states = core_functions.svd_plan(*problem, threads, room)
        kept = x.new_empty(size)
    out = x.new_empty((*x.shape[:-1], problem[2]))
    members = core_functions.svd_forward(
        *problem,
        threads,
        x.data_ptr(),
        (0, problem[1], 1),
        address(U if V is None else V),
        V_strides,
        sigma.data_ptr(),
        address(signs),
        U.data_ptr(),
        U_strides,
        address(bias),
        out.data_ptr(),
        address(kept),
        U_kept,
        with_states,
    )
    return out, problem, kept, (U_kept, members)


def _problem(
    x: Tensor, U: Tensor, sigma: Tensor, V: Tensor | None, kind: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """In the core's terms; and the strides of both sides."""
    U_strides, V_strides = _strides(U, V)
    if V is None:
        n, m = U.shape
        r_U, r_V = m, n
    else:
        (r_U, n), (r_V, m) = U.shape, V.shape
    blocks = default_block_size(min(r_V, m)), default_block_size(min(r_U, n))
    return (x.numel() // m, m, n, r_V, r_U, kind, *blocks, sigma.shape[0]), U_strides, V_strides


def _strides(U: Tensor, V: Tensor | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    rows, columns = U.stride()
    return ((0, columns, rows), (0, rows, columns)) if V is None else ((0, rows, columns), (0, *V.stride()))


class _SVDLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, U: Tensor, sigma: Tensor, V: Tensor | None, bias: Tensor | None, *rest: Any
    ) -> Tensor:
        signs, kind, ctx.composed = rest
        out, ctx.problem, kept, ctx.layout = _forward(x.contiguous(), U, sigma, V, bias, signs, kind, True)
        ctx.kept_size = 0 if kept is None else kept.numel()
        ctx.save_for_backward(x, U, sigma, V, bias, signs, kept)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, signs, kept = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled() or watched() or not plain(g):  # a second derivative is to follow, for one
            return *_differentiable_gradients(ctx.composed, g, inputs, signs, needs[:5]), None, None, None
        x, U, sigma, V, bias = inputs
        _check_saved(ctx, g, x, U, sigma, V, bias, signs)
        kept = as_saved(kept, ctx.kept_size, g.dtype)
        U_strides, V_strides = _strides(U, V)
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else None
        # Compact reflectors write one side of their matrix. Two that share one write all of it.
        new = torch.zeros_like if V is not None and ctx.problem[5] == COMPACT else torch.empty_like
        dU = new(U) if needs[1] else None
        dV = new(V) if needs[3] else None
        dsigma = torch.empty_like(sigma)
        dbias = torch.empty_like(bias) if needs[4] else None
        dU_strides, dV_strides = _strides(U if dU is None else dU, V if dV is None else dV)
        g = g.contiguous()
        functions(g.dtype).svd_backward(
            *ctx.problem,
            torch.get_num_threads(),
            g.data_ptr(),
            (0, g.shape[-1], 1),
            address(U if V is None else V),
            V_strides,
            sigma.data_ptr(),
            address(signs),
            U.data_ptr(),
            U_strides,
            address(kept),
            *ctx.layout,
            address(dx),
            address(dU if V is None else dV),
            dV_strides,
            dsigma.data_ptr(),
            address(dU),
            dU_strides,
            address(dbias),
        )
        return dx, dU, dsigma if needs[2] else None, dV, dbias, None, None, None


def _check_saved(ctx: Any, g: Tensor, x: Tensor, U: Tensor, sigma: Tensor, *others: Tensor | None) -> None:
    """That hooks on saved tensors gave them back as they were, before their addresses are used."""
    V, *small = others
    same = _problem(x, U, sigma, V, ctx.problem[5])[0] == ctx.problem
    tensors = [t for t in (x, U, sigma, *others) if t is not None]
    if not same or any(t.dtype != g.dtype or not t.is_cpu for t in tensors) or any(_flat(t) is not t for t in small):
        raise RuntimeError("a hook on saved tensors should give them back as they were")


_run = super(torch.autograd.Function, _SVDLinear).apply


def _differentiable_gradients(
    composed: Callable[..., Tensor],
    g: Tensor,
    inputs: list[Tensor | None],
    signs: Tensor | None,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        wanted = [t for t, need in zip(inputs, needs, strict=True) if need and t is not None]
        found = iter(torch.autograd.grad(composed(*inputs, signs), wanted, g, create_graph=again))
    return tuple(next(found) if need else None for need in needs)


@overload
def _flat(t: Tensor) -> Tensor: ...
@overload
def _flat(t: Tensor | None) -> Tensor | None: ...
def _flat(t: Tensor | None) -> Tensor | None:
    return t if t is None or t.is_contiguous() else t.contiguous()
