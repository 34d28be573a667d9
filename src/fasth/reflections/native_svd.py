"""x Wᵀ with W = U Σ Vᵀ in one call of the compiled core, with its autograd Function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasth.reflections.native import COMPACT, address, as_saved, functions, plain, watched
from fasth.reflections.tuning import default_block_size

SMALL = 1 << 18  # numbers that are kept without asking whether they are worth their memory


class Factors(NamedTuple):
    """Where the factors are, in the core's terms: addresses and strides."""

    V: int
    V_strides: tuple[int, ...]
    sigma: int
    signs: int
    U: int
    U_strides: tuple[int, ...]


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
    if not sigma.is_contiguous():
        sigma = sigma.contiguous()
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    if signs is not None and not signs.is_contiguous():
        signs = signs.contiguous()
    if torch.is_grad_enabled() and (
        x.requires_grad
        or U.requires_grad
        or sigma.requires_grad
        or (V is not None and V.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        return _run(x, U, sigma, V, bias, signs, kind, composed)
    return _forward(x, U, sigma, V, bias, signs, kind, False)[0]


def _forward(
    x: Tensor,
    U: Tensor,
    sigma: Tensor,
    V: Tensor | None,
    bias: Tensor | None,
    signs: Tensor | None,
    kind: int,
    keep: bool,
) -> tuple[Tensor, tuple[int, ...], Factors, Tensor | None, tuple[int, int]]:
    """The output; the problem and the factors in the core's terms; what is kept for a gradient, how it is laid out."""
    core = functions(x.dtype)
    x = x.contiguous()
    if V is None:
        n, m = r_V, r_U = U.shape
    else:
        (r_U, n), (r_V, m) = U.shape, V.shape
    size = x.numel()
    blocks = (default_block_size(min(r, d), U, size // m) for r, d in ((r_V, m), (r_U, n)))
    problem = (size // m, m, n, r_V, r_U, kind, *blocks, sigma.shape[0])
    factors = locate(U, sigma, V, signs)
    threads = torch.get_num_threads()
    kept, U_kept, with_states = None, 0, False
    if keep:
        room = max(2 * (size + U.numel() + (0 if V is None else V.numel())), SMALL)
        kept_size, U_kept, with_states = core.svd_plan(*problem, threads, room)
        kept = x.new_empty(kept_size)
    out, members = multiply(x, problem, factors, bias, kept, U_kept, with_states)
    return out, problem, factors, kept, (U_kept, members)


def multiply(
    x: Tensor,
    problem: tuple[int, ...],
    factors: Factors,
    bias: Tensor | None,
    kept: Tensor | None,
    U_kept: int,
    with_states: bool,
) -> tuple[Tensor, int]:
    """The output for a contiguous x, and for how many threads the states were kept: 0 if they were not."""
    rows, m, n, *_ = problem
    out = x.new_empty((rows, n) if x.ndim == 2 else (*x.shape[:-1], n))
    members = functions(x.dtype).svd_forward(
        *problem,
        torch.get_num_threads(),
        x.data_ptr(),
        (0, m, 1),
        *factors,
        address(bias),
        out.data_ptr(),
        address(kept),
        U_kept,
        with_states,
    )
    return out, members


def locate(U: Tensor, sigma: Tensor, V: Tensor | None, signs: Tensor | None) -> Factors:
    U_address, (rows, columns) = U.data_ptr(), U.stride()
    small = sigma.data_ptr(), address(signs)
    if V is None:
        return Factors(U_address, (0, rows, columns), *small, U_address, (0, columns, rows))
    return Factors(V.data_ptr(), (0, *V.stride()), *small, U_address, (0, rows, columns))


class _SVDLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, U: Tensor, sigma: Tensor, V: Tensor | None, bias: Tensor | None, *rest: Any
    ) -> Tensor:
        signs, kind, ctx.composed = rest
        out, *ctx.problem, kept, ctx.layout = _forward(x, U, sigma, V, bias, signs, kind, True)
        ctx.kept_size = 0 if kept is None else kept.numel()
        ctx.save_for_backward(x, U, sigma, V, bias, signs, kept)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, signs, kept = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled() or watched() or not plain(g):  # a second derivative is to follow, for one
            return *differentiable_gradients(ctx.composed, g, inputs, signs, needs[:5]), None, None, None
        x, U, sigma, V, bias = inputs
        problem, factors = ctx.problem
        if (given_back := locate(U, sigma, V, signs)) != factors or x.shape[:-1] != g.shape[:-1]:
            _check_given_back(problem, g, [*inputs[1:], signs])
            factors = given_back
        kept = as_saved(kept, ctx.kept_size, g.dtype)
        found = gradients(g.contiguous(), x, U, sigma, V, bias, problem, factors, kept, ctx.layout, needs)
        return *found, None, None, None


def gradients(
    g: Tensor,
    x: Tensor,
    U: Tensor,
    sigma: Tensor,
    V: Tensor | None,
    bias: Tensor | None,
    problem: tuple[int, ...],
    factors: Factors,
    kept: Tensor | None,
    layout: tuple[int, int],
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Those of x, U, sigma, V and bias from that of the output, contiguous, on the core; None where not needed."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else None
    # Compact reflectors write one side of their matrix. Two that share one write all of it.
    new = torch.zeros_like if V is not None and problem[5] == COMPACT else torch.empty_like
    dU = new(U) if needs[1] else None
    dV = new(V) if V is not None and needs[3] else None
    dsigma = torch.empty_like(sigma)
    dbias = torch.empty_like(bias) if bias is not None and needs[4] else None
    to = locate(U if dU is None else dU, dsigma, V if dV is None else dV, None)
    functions(g.dtype).svd_backward(
        *problem,
        torch.get_num_threads(),
        g.data_ptr(),
        (0, problem[2], 1),
        *factors,
        address(kept),
        *layout,
        address(dx),
        to.V if (dU if V is None else dV) is not None else 0,
        to.V_strides,
        to.sigma,
        to.U if dU is not None else 0,
        to.U_strides,
        address(dbias),
    )
    return dx, dU, dsigma if needs[2] else None, dV, dbias


# Function.apply without its preparations for functorch, as in native.py.
_run = super(torch.autograd.Function, _SVDLinear).apply


def _check_given_back(problem: tuple[int, ...], g: Tensor, tensors: list[Tensor | None]) -> None:
    """That hooks on saved tensors, which gave back other memory, gave it back as it was."""
    _, m, n, r_V, r_U, *_, k = problem
    _, sigma, V, bias, signs = tensors
    shapes = [(n, m) if V is None else (r_U, n), (k,), (r_V, m), (n,), (2, k)]
    for t, shape in zip(tensors, shapes, strict=True):
        if t is not None and (t.shape != shape or t.dtype != g.dtype or not t.is_cpu):
            raise RuntimeError(
                f"a hook on saved tensors should give them back as they were, {shape} {g.dtype} on the CPU; "
                f"got {tuple(t.shape)} {t.dtype} on {t.device}"
            )
    for t in (sigma, bias, signs):
        if t is not None and not t.is_contiguous():
            raise RuntimeError("a hook on saved tensors should give them back as they were, contiguous")


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
