"""One autograd Function for x Qᵀ, and one for x Wᵀ with W = U Σ Vᵀ: the same in eager mode and under torch.compile.

Both carry out a plan. ``saved`` is a sequence of tensors in the format of the backend that made them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from fasth.reflections import blocked, operators_for_compile
from fasth.reflections import core as compiled
from fasth.reflections.plan import COMPACT, CORE, FULL, SAVE_A, SAVE_T, TORCH, TRITON, Plan
from fasth.reflections.precision import ieee_products


class Householder(torch.autograd.Function):
    """x, V ↦ x Qᵀ, or x Q if ``plan.transpose``.  x: (*, d), V: (r, d); or x: (B, m, d), V: (B, r, d)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, V: Tensor, plan: Plan) -> Tensor:
        out, *saved = _on_backend(plan, "householder", x, V)
        needs_V = ctx.needs_input_grad[1]
        ctx.plan = plan
        ctx.save_for_backward(
            x if needs_V else None,  # only for second derivatives
            V,
            out if needs_V and not plan.copy_output else None,
            *saved,
        )
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, V, output, *saved = ctx.saved_tensors
        plan, needs = ctx.plan, ctx.needs_input_grad[:2]
        if has_to_compose(g, plan.backend):
            if x is None:  # not read: V needs no gradient
                x = V.new_zeros(g.shape, requires_grad=True)

            def multiply(x: Tensor, V: Tensor) -> Tensor:
                return compose(x, V, plan.form, plan.transpose, plan.block_size)

            dx, dV = _gradients_by_autograd(multiply, (x, V), g, needs)
            return dx, dV if dV is None or plan.form != COMPACT else with_sign_guard(dV, V), None
        return *_on_backend(plan, "householder_backward", g, output, V, saved, needs), None


class SVDLinear(torch.autograd.Function):
    """x, U, sigma, V, bias ↦ x Wᵀ + bias with W = Q_U[:, :k] diag(sigma) Q_V[:, :k]ᵀ.  x: (*, m) → (*, n).

    On the core or by the kernels. As in ``functional.svd_linear``, all arguments except x and U may be None. Only the
    kernels take ``signs``, which get no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        U: Tensor,
        sigma: Tensor | None,
        V: Tensor | None,
        bias: Tensor | None,
        signs: Tensor | None,
        plan: Plan,
    ) -> Tensor:
        options = {} if signs is None else {"signs": signs}
        out, *saved = _on_backend(plan, "svd_linear", x, U, sigma, U if plan.symmetric else V, bias, **options)
        ctx.plan = plan
        ctx.save_for_backward(x, U, sigma, V, bias, signs, None if plan.copy_output else out, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, U, sigma, V, bias, signs, output, *saved = ctx.saved_tensors
        plan, needs = ctx.plan, ctx.needs_input_grad[:5]
        if has_to_compose(g, plan.backend):

            def product(x: Tensor, V: Tensor, form: int, transpose: bool) -> Tensor:
                k = min(plan.block_size, *V.shape) if len(V) else 1
                return Householder.apply(x, V, Plan(TORCH, form, transpose, k, SAVE_T))

            def multiply(x: Tensor, U: Tensor, sigma: Tensor | None, V: Tensor | None, bias: Tensor | None) -> Tensor:
                sigma = sigma if signs is None else times_signs(sigma, signs)
                return svd_by_products(product, x, U, sigma, U if plan.symmetric else V, bias, plan.form)

            return *_gradients_by_autograd(multiply, (x, U, sigma, V, bias), g, needs), None, None
        V = U if plan.symmetric else V
        options = {} if signs is None else {"signs": signs}
        found = _on_backend(plan, "svd_linear_backward", g, output, U, sigma, V, saved, needs, **options)
        return *found, None, None


# The backends.


def _on_backend(plan: Plan, name: str, *arguments: Any, **options: Any) -> Sequence[Any]:
    """Returns a call of the backend's function of this name with the arguments and the plan.

    ``options``: arguments that only the kernels take.
    """
    if plan.backend == TORCH:
        return _BLOCKED[name](*arguments, plan)
    if is_compiling():
        return operators_for_compile.call(name, *arguments, plan)
    if plan.backend == TRITON:
        return getattr(kernels(), name)(*arguments, plan, **options)
    return getattr(compiled._core, name)(*arguments, plan, torch.get_num_threads())


def kernels() -> Any:
    """The module that launches the Triton kernels, imported when it is first needed."""
    from fasth.reflections.triton import launch

    return launch


def has_to_compose(g: Tensor, backend: str) -> bool:
    """True for a second derivative, and where the backend cannot read g, as in a batch of gradients."""
    if torch.is_grad_enabled():
        return True
    if is_compiling():
        return False
    core: Any = compiled._core
    return not (core.accepts(g) if backend == CORE else _has_memory(g))


def _has_memory(t: Tensor) -> bool:
    """True for a tensor with its own memory, not negated. Tensors in a transform have none."""
    if type(t) is not Tensor or t.is_neg():
        return False
    try:
        t.data_ptr()
    except RuntimeError:
        return False
    return True


# In PyTorch's operations.


def _householder_in_blocks(x: Tensor, V: Tensor, plan: Plan) -> tuple[Tensor, ...]:
    rows, reflectors = _for_blocked(x, V, plan.form)
    with ieee_products(x):
        out, *saved = blocked.forward(
            rows,
            reflectors,
            transpose=plan.transpose,
            triangular=plan.form != FULL,
            block_size=plan.block_size,
            save_states=plan.save >= SAVE_A,
        )
    if out.shape != x.shape:
        out = out.reshape(x.shape)
    copy = (out.clone(),) if plan.copy_output else ()
    return out, *copy, *(saved if plan.save else ())


def _householder_backward_in_blocks(
    g: Tensor, output: Tensor | None, V: Tensor, saved: Sequence[Tensor], needs: Sequence[bool], plan: Plan
) -> tuple[Tensor | None, Tensor | None]:
    if plan.copy_output:
        output, *saved = saved
    rows, reflectors = _for_blocked(g, V, plan.form)
    after = rows if output is None else output.reshape(rows.shape)
    options = plan.transpose, plan.form != FULL, plan.block_size
    with ieee_products(g):
        dx, dV = blocked.gradients(rows, after, reflectors, *options, needs[0], needs[1], saved)
    if dV is not None:
        dV = dV.reshape(V.shape)
        dV = with_sign_guard(dV.triu(1), V) if plan.form == COMPACT else dV
    return None if dx is None else dx.reshape(g.shape), dV


_BLOCKED: dict[str, Callable[..., Any]] = {
    "householder": _householder_in_blocks,
    "householder_backward": _householder_backward_in_blocks,
}


def compose(x: Tensor, V: Tensor, form: int, transpose: bool, block_size: int) -> Tensor:
    """x Qᵀ, or x Q, as a composition of PyTorch's operations."""
    rows, reflectors = _for_blocked(x, V, form)
    with ieee_products(x):
        out = blocked.householder(rows, reflectors, transpose=transpose, triangular=form != FULL, block_size=block_size)
    return out.reshape(x.shape)


def svd_by_products(
    multiply: Callable[[Tensor, Tensor, int, bool], Tensor],
    x: Tensor,
    U: Tensor,
    sigma: Tensor | None,
    V: Tensor | None,
    bias: Tensor | None,
    form: int,
) -> Tensor:
    """x Wᵀ + bias as two products. ``multiply(x, V, form, transpose)`` is x Qᵀ, or x Q, by the reflections of V."""
    sigma = signed_sigma(U, sigma, V, form)
    U, V = (U.mT, U) if V is None else (U, V)
    k, n = len(sigma), U.shape[-1]
    rows = multiply(x, V, form, True)[..., :k] * sigma
    out = multiply(F.pad(rows, (0, n - k)), U, form, False)
    return out if bias is None else out + bias


def _gradients_by_autograd(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor | None],
    g: Tensor,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of those ``inputs`` that need one, by autograd through ``function(*inputs)``."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # New views, at which the graph of the function ends.
        inputs = [t if t is None else t.view_as(t) for t in inputs]
        wanted = [t for t, need in zip(inputs, needs, strict=True) if need and t is not None]
        out = function(*inputs)
        if out.requires_grad:
            found = iter(torch.autograd.grad(out, wanted, g, create_graph=again, materialize_grads=True))
        else:  # where there are no reflectors, x Qᵀ is x
            found = iter([torch.zeros_like(t) for t in wanted])
    return [next(found) if need else None for need in needs]


def _for_blocked(x: Tensor, V: Tensor, form: int) -> tuple[Tensor, Tensor]:
    """Reshapes x to (B, m, d) and V to (B, r, d), with compact reflectors expanded to triangular ones."""
    V = blocked.expand_compact(V) if form == COMPACT else V
    return (x, V) if V.ndim == 3 else (x.reshape(1, -1, V.shape[-1]), V.unsqueeze(0))


# The signs on the diagonal of compact reflectors.


def signed_sigma(U: Tensor, sigma: Tensor | None, V: Tensor | None, form: int) -> Tensor:
    """sigma, or ones, times the signs on the diagonals of compact reflectors."""
    if sigma is None:
        sigma = U.new_ones(min(U.shape) if V is None else min(U.shape[1], V.shape[1]))
    for t in (U, V) if form == COMPACT and V is not U else ():
        if t is not None and len(t):
            signs = diagonal_signs(t, len(sigma))
            missing = len(sigma) - len(signs)
            sigma = sigma * (F.pad(signs, (0, missing), value=1.0) if missing else signs)
    return sigma


def times_signs(sigma: Tensor | None, signs: Tensor) -> Tensor:
    """sigma: (k,), or ones, times the signs of all rows: (n, k); constants to autograd."""
    product = signs_of(signs).prod(0)
    return product if sigma is None else sigma * product.to(sigma.dtype)


def diagonal_signs(reflectors: Tensor, k: int) -> Tensor:
    """The signs of the first k entries of the diagonal: (*b, k), 1 or −1; constants to autograd."""
    return signs_of(reflectors.detach().diagonal(dim1=-2, dim2=-1)[..., :k])


def signs_of(t: Tensor) -> Tensor:
    """1 or −1, by the sign bit: weight decay may make an entry −0, which is still negative."""
    return torch.where(t.detach().signbit(), -1.0, 1.0).to(t.dtype)


def with_sign_guard(gradient: Tensor, reflectors: Tensor) -> Tensor:
    """Sets the diagonal of ``gradient``, for the signs: zero, or for an entry close to zero a push away from zero.

    An optimizer that adds weight decay to the gradient, as Adam does, would otherwise move an entry across zero, and
    the sign should not change.
    """
    diagonal = reflectors.detach().diagonal(dim1=-2, dim2=-1)
    push = torch.full_like(diagonal, 0.1).copysign(-diagonal)
    guard = torch.where(diagonal.abs() < 0.25, push, 0.0)
    return torch.diagonal_scatter(gradient, guard.to(gradient.dtype), dim1=-2, dim2=-1)
