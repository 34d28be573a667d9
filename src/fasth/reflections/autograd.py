"""One autograd Function for x Qᵀ, and one for x Wᵀ with W = U Σ Vᵀ: the same in eager mode and under torch.compile.

Both call the compiled core or the Triton kernels: directly in eager mode, by the operators of the two library.py while
a graph is traced. Householder also has the PyTorch path, blocked.py, which serves what neither takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from fasth.reflections import blocked, library
from fasth.reflections.backends import CORE, TORCH, TRITON, has_memory
from fasth.reflections.core import core
from fasth.reflections.heuristics import SAVE_A, SAVE_T
from fasth.reflections.library import COMPACT, FULL, SIGNED
from fasth.reflections.precision import ieee_products
from fasth.reflections.triton import library as triton_library


class Options(NamedTuple):
    """How to multiply by a product of reflections."""

    transpose: bool
    kind: int
    block_size: int
    save: int
    backend: str
    of_identity: bool = False  # x are the first rows of the identity, in x Qᵀ, and get no gradient
    warps: int = 0  # of the kernels; 0: as many as by default


class Householder(torch.autograd.Function):
    """x, V ↦ x Qᵀ, or x Q if ``transpose``.  x: (*, d), V: (r, d); or x: (B, m, d), V: (B, r, d)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, V: Tensor, options: Options) -> Tensor:
        out, *saved = _FORWARD[options.backend](x, V, options)
        ctx.options = options
        ctx.save_for_backward(V, out if ctx.needs_input_grad[1] else None, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        V, out, *saved = ctx.saved_tensors
        options, (needs_x, needs_V, _) = ctx.options, ctx.needs_input_grad
        again = torch.is_grad_enabled()
        if options.backend == TORCH or again or not _readable(g, options.backend):
            # What was saved is constant to autograd, and another backend's is laid out in another way.
            saved = [] if again or options.backend != TORCH else saved
            return *_gradients_in_torch(g, out, V, saved, options, needs_x, needs_V), None
        gradients = _gradients_on_core if options.backend == CORE else _gradients_by_kernels
        dx, dV = gradients(g, out, V, saved, options, needs_x, needs_V)
        return dx if needs_x else None, dV if needs_V else None, None


def _readable(g: Tensor, backend: str) -> bool:
    """Whether the backend takes g. A batch of gradients has no memory to read."""
    return is_compiling() or (core().accepts(g) if backend == CORE else has_memory(g))


def _forward_on_core(x: Tensor, V: Tensor, options: Options) -> tuple[Tensor, ...]:
    transpose, kind, block_size, save, _, of_identity, _ = options
    if is_compiling():
        return library.householder(x, V, transpose, kind, block_size, save, of_identity)
    threads = torch.get_num_threads()
    return core().householder(x, V, transpose, kind, block_size, threads, save, of_identity)


def _gradients_on_core(
    g: Tensor, out: Tensor | None, V: Tensor, saved: Sequence[Tensor], options: Options, needs_x: bool, needs_V: bool
) -> tuple[Tensor | None, Tensor | None]:
    transpose, kind, block_size, _, _, of_identity, _ = options
    needs = needs_x, needs_V, of_identity
    if is_compiling():
        return library.householder_backward(g, out, V, *saved, transpose, kind, block_size, *needs)
    threads = torch.get_num_threads()
    return core().householder_backward(g, out, V, *saved, transpose, kind, block_size, threads, *needs)


def _forward_by_kernels(x: Tensor, V: Tensor, options: Options) -> tuple[Tensor, ...]:
    transpose, kind, _, save, _, of_identity, warps = options
    if is_compiling():
        return triton_library.householder(x, V, transpose, kind, save > 0, of_identity)
    return kernels().householder(x, V, transpose, kind, save > 0, of_identity, warps)


def _gradients_by_kernels(
    g: Tensor, out: Tensor | None, V: Tensor, saved: Sequence[Tensor], options: Options, needs_x: bool, needs_V: bool
) -> tuple[Tensor | None, Tensor | None]:
    how = options.transpose, options.kind, needs_x, needs_V
    if is_compiling():
        return triton_library.householder_backward(g, out, V, *saved, *how)
    return kernels().householder_backward(g, out, V, *saved, *how, options.warps)


def kernels() -> Any:
    """What launches the Triton kernels, imported when it is first needed."""
    from fasth.reflections.triton import launch

    return launch


def _forward_in_torch(x: Tensor, V: Tensor, options: Options) -> tuple[Tensor, ...]:
    rows, reflectors = _for_blocked(x, V, options.kind)
    with ieee_products(x):
        out, *saved = blocked.forward(
            rows,
            reflectors,
            transpose=options.transpose,
            triangular=options.kind != FULL,
            block_size=options.block_size,
            save_states=options.save >= SAVE_A,
        )
    return out.reshape(x.shape), *(saved if options.save else ())


_FORWARD = {CORE: _forward_on_core, TRITON: _forward_by_kernels, TORCH: _forward_in_torch}


def _gradients_in_torch(
    g: Tensor,
    out: Tensor | None,
    V: Tensor,
    saved: Sequence[Tensor],
    options: Options,
    needs_x: bool,
    needs_V: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Differentiable in g, out and V if nothing was saved."""
    kind = options.kind
    rows, reflectors = _for_blocked(g, V, kind)
    after = rows if out is None else out.reshape(rows.shape)
    with ieee_products(g):
        dx, dV = blocked.gradients(
            rows, after, reflectors, options.transpose, kind != FULL, options.block_size, needs_x, needs_V, saved
        )
    if kind >= COMPACT and dV is not None:
        dV = dV.triu(1)
        if kind == SIGNED:
            guard = sign_guard(V.detach().reshape(dV.shape).diagonal(dim1=-2, dim2=-1))
            dV = torch.diagonal_scatter(dV, guard, dim1=-2, dim2=-1)
    return None if dx is None else dx.reshape(g.shape), None if dV is None else dV.reshape(V.shape)


def _for_blocked(x: Tensor, V: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """x as (B, m, d) and V as (B, r, d), compact reflectors written out."""
    V = blocked.expand_compact(V) if kind >= COMPACT else V
    return (x, V) if V.ndim == 3 else (x.reshape(1, -1, V.shape[-1]), V.unsqueeze(0))


class SVDOptions(NamedTuple):
    """How to multiply by U Σ Vᵀ."""

    kind: int
    block_size: int
    save: int
    backend: str  # the core, or the kernels
    symmetric: bool  # U and V are one tensor, which is then given as U alone: torch.compile takes none twice


class SVDLinear(torch.autograd.Function):
    """x, U, sigma, V, bias ↦ x Wᵀ + bias with W = Q_U[:, :k] diag(sigma) Q_V[:, :k]ᵀ.  x: (*, m) → (*, n).

    On the core or by the kernels. As in ``functional.svd_linear``, all but x and U may be None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        U: Tensor,
        sigma: Tensor | None,
        V: Tensor | None,
        bias: Tensor | None,
        options: SVDOptions,
    ) -> Tensor:
        V = U if options.symmetric else V
        out, inner, product, *saved = _svd_forward(x, U, sigma, V, bias, options)
        ctx.options = options
        product = out if bias is None and x.dtype in (torch.float32, torch.float64) else product
        ctx.save_for_backward(x, U, sigma, None if options.symmetric else V, bias, inner, product, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, U, sigma, V, bias, inner, product, *saved = ctx.saved_tensors
        options, needs = ctx.options, ctx.needs_input_grad[:5]
        if torch.is_grad_enabled() or not _readable(g, options.backend):  # a second derivative, or batched gradients
            return *_differentiable_gradients(g, (x, U, sigma, V, bias), options, needs), None
        V = U if options.symmetric else V
        found = _svd_backward(g, (inner, product, U, sigma, V, *saved), options, needs)
        return *(t if need else None for t, need in zip(found, needs, strict=True)), None


def _svd_forward(
    x: Tensor, U: Tensor, sigma: Tensor | None, V: Tensor | None, bias: Tensor | None, options: SVDOptions
) -> tuple[Tensor, ...]:
    kind, block_size, save, backend, _ = options
    if backend == TRITON:
        operator = triton_library.svd_linear if is_compiling() else kernels().svd_linear
        return operator(x, U, sigma, V, bias, kind, save > 0)
    if is_compiling():
        return library.svd_linear(x, U, sigma, V, bias, kind, block_size, save)
    return core().svd_linear(x, U, sigma, V, bias, kind, block_size, torch.get_num_threads(), save)


def _svd_backward(
    g: Tensor, factors: Sequence[Tensor | None], options: SVDOptions, needs: Sequence[bool]
) -> Sequence[Tensor | None]:
    kind, block_size, _, backend, symmetric = options
    if backend == TRITON:
        operator = triton_library.svd_linear_backward if is_compiling() else kernels().svd_linear_backward
        return operator(g, *factors, kind, needs, symmetric)
    if is_compiling():
        return library.svd_linear_backward(g, *factors, kind, block_size, needs, symmetric)
    return core().svd_linear_backward(g, *factors, kind, block_size, torch.get_num_threads(), needs, symmetric)


def _differentiable_gradients(
    g: Tensor, inputs: Sequence[Tensor | None], options: SVDOptions, needs: Sequence[bool]
) -> list[Tensor | None]:
    def multiply(x: Tensor, V: Tensor, kind: int, transpose: bool) -> Tensor:
        k = min(options.block_size, *V.shape) if len(V) else 1
        return Householder.apply(x, V, Options(transpose, kind, k, SAVE_T, TORCH))

    again = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = [t if t is None else t.view_as(t) for t in inputs]  # their history is not to be differentiated here
        wanted = [t for t, need in zip(inputs, needs, strict=True) if need and t is not None]
        x, U, sigma, V, bias = inputs
        assert x is not None and U is not None
        out = svd_by_products(multiply, x, U, sigma, U if options.symmetric else V, bias, kind=options.kind)
        found = iter(torch.autograd.grad(out, wanted, g, create_graph=again))
    return [next(found) if need else None for need in needs]


def svd_by_products(
    multiply: Callable[[Tensor, Tensor, int, bool], Tensor],
    x: Tensor,
    U: Tensor,
    sigma: Tensor | None,
    V: Tensor | None,
    bias: Tensor | None,
    *,
    kind: int,
) -> Tensor:
    """x Wᵀ + bias as two products. ``multiply(x, V, kind, transpose)`` is x Qᵀ, or x Q, by the reflections of V."""
    sigma = signed_sigma(U, sigma, V, kind)
    U, V = (U.mT, U) if V is None else (U, V)
    k, n = len(sigma), U.shape[-1]
    rows = multiply(x, V, kind, True)[..., :k] * sigma
    out = multiply(F.pad(rows, (0, n - k)), U, kind, False)
    return out if bias is None else out + bias


def signed_sigma(U: Tensor, sigma: Tensor | None, V: Tensor | None, kind: int) -> Tensor:
    """sigma, or ones in its place, times the signs that signed reflectors have on their diagonals."""
    if sigma is None:
        sigma = U.new_ones(min(U.shape) if V is None else min(U.shape[1], V.shape[1]))
    for t in (U, V) if kind == SIGNED else ():
        if t is not None and len(t):
            sigma = sigma * diagonal_signs(t, len(sigma))
    return sigma


def diagonal_signs(reflectors: Tensor, k: int) -> Tensor:
    """Those of the first k entries of the diagonal: (*b, k), 1 or −1; constants to autograd."""
    return signs_of(reflectors.detach().diagonal(dim1=-2, dim2=-1)[..., :k])


def sign_guard(diagonal: Tensor) -> Tensor:
    """The gradient of diagonal entries that have signs: zero, and close to zero what pushes an entry away from there.

    An optimizer that adds its decay to the gradient, as Adam does, would take an entry without any to zero and beyond,
    and the sign should not change.
    """
    return torch.where(diagonal.abs() < 0.25, torch.where(diagonal.signbit(), 0.1, -0.1), 0.0).to(diagonal.dtype)


def signs_of(t: Tensor) -> Tensor:
    """1 or −1, by the sign bit: weight decay may make an entry −0, and that is still negative."""
    return torch.where(t.detach().signbit(), -1.0, 1.0).to(t.dtype)
