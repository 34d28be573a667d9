"""x Wᵀ with W = U Σ Vᵀ in one call of the compiled core, with its autograd Function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fasth.reflections import native
from fasth.reflections.one_by_one import is_batch, one_by_one


def svd_linear(
    x: Tensor,
    U: Tensor,
    sigma: Tensor,
    V: Tensor | None,
    bias: Tensor | None,
    signs: Tensor | None,
    options: tuple[bool, int, int, int],
    composed: Callable[..., Tensor],
) -> Tensor:
    """x Wᵀ + bias in one call, with W = Q_U[:, :k] diag(sigma · signs) Q_V[:, :k]ᵀ.  x: (*, m) → (*, n).

    U: (·, n) and V: (·, m) are reflectors; or V is None and U the (n, m) matrix that holds both sides, compact.
    sigma: (k,), signs: (2, k). ``options`` are: whether x holds columns, W x; the kind of reflectors; the block sizes
    of U and V. ``composed`` computes the same of the same tensors; second derivatives go through it.
    """
    if torch.is_grad_enabled() and (
        x.requires_grad
        or U.requires_grad
        or sigma.requires_grad
        or (V is not None and V.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        return _run(x, U, sigma, V, bias, signs, options, composed)
    return native.core().svd_linear(x, U, sigma, V, bias, signs, *options, torch.get_num_threads(), False)[0]


class _SVDLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        U: Tensor,
        sigma: Tensor,
        V: Tensor | None,
        bias: Tensor | None,
        signs: Tensor | None,
        options: tuple[bool, int, int, int],
        composed: Callable[..., Tensor],
    ) -> Tensor:
        ctx.core, ctx.options, ctx.composed, ctx.one = native.core(), options, composed, V is U
        threads = torch.get_num_threads()
        out, kept = ctx.core.svd_linear(x, U, sigma, V, bias, signs, *options, threads, True)
        ctx.save_for_backward(x, U, sigma, V, bias, signs, kept)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, signs, kept = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled() or native.watched() or not ctx.core.plain(g):  # a second derivative is to follow
            if is_batch(g):
                return one_by_one(_SVDLinear.backward, ctx, g)
            return *differentiable_gradients(ctx.composed, g, inputs, signs, needs[:5]), None, None, None
        found = ctx.core.svd_linear_backward(
            g, *inputs, signs, kept, ctx.one, *ctx.options, torch.get_num_threads(), needs
        )
        return *found, None, None, None


# Function.apply without its preparations for functorch, as in native.py.
_run = super(torch.autograd.Function, _SVDLinear).apply


def differentiable_gradients(
    composed: Callable[..., Tensor],
    g: Tensor,
    inputs: list[Tensor | None],
    signs: Tensor | None,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # U and V may be one tensor, of which each would be given the gradient of both.
        inputs = [t if t is None else t.view_as(t) for t in inputs]
        wanted = [t for t, need in zip(inputs, needs, strict=True) if need and t is not None]
        found = iter(torch.autograd.grad(composed(*inputs, signs), wanted, g, create_graph=again))
    return tuple(next(found) if need else None for need in needs)
