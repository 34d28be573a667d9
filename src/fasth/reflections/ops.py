"""The compiled core as operators of PyTorch, so that the graphs of ``torch.compile`` call it, forward and backward.

``fasth::householder`` and ``fasth::svd_linear`` give (out, kept, layout): ``kept`` is what the backward operators need
besides, and ``layout`` says how it lies there. They differ from the eager functions in two ways, since the number of
rows may be a symbol when a graph is made. The size of ``kept`` is a formula in it, the same on any number of threads.
And whether to form the matrix is decided inside, when the operator runs. All that the formula and the decision need is
an argument, ``sizes``, and so part of the graph: graphs outlive this process in the compiler's cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fasth.reflections import native, native_svd
from fasth.reflections.blocked import is_exporting
from fasth.reflections.native import COMPACT, DTYPES, FULL, TRIANGULAR, functions
from fasth.reflections.tuning import block_size_by_rule, crossover_by_rule

_KINDS = (FULL, TRIANGULAR, COMPACT)
_NEVER = 1 << 62

_library = torch.library.Library("fasth", "DEF")


def usable(*tensors: Tensor) -> bool:
    """Whether a graph in the making may call the core for these: float32 or float64 on the CPU, and no transform.

    Not while exporting: an exported program should run where fasth and its core are not.
    """
    return (
        torch.compiler.is_dynamo_compiling()
        and not is_exporting()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and all(t.is_cpu and t.dtype in DTYPES and type(t) in native.PLAIN for t in tensors)
        and _core_is_there()
    )


def _core_is_there() -> bool:
    return native.core() is not None


def householder(x: Tensor, V: Tensor, *, transpose: bool, kind: int, block_size: int) -> Tensor:
    """``native.householder`` for a graph in the making."""
    keep = torch.is_grad_enabled() and (x.requires_grad or V.requires_grad)
    r, d, block_size = _numbers(*V.shape[-2:], block_size)
    sizes = householder_sizes(V.dtype, r, d, kind, block_size, V.ndim == 3)
    return torch.ops.fasth.householder(x, V, transpose, kind, block_size, sizes, keep)[0]


def svd_linear(
    x: Tensor,
    U: Tensor,
    sigma: Tensor,
    V: Tensor | None,
    bias: Tensor | None,
    signs: Tensor | None,
    kind: int,
) -> Tensor:
    """``native_svd.svd_linear`` for a graph in the making."""
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, U, sigma, V, bias))
    r_U, n = _numbers(*U.shape)
    r_V, m = (r_U, n) if V is None else _numbers(*V.shape)
    if V is None:
        r_U, n = n, r_U
    U_block, V_block = block_size_by_rule(min(r_U, n)), block_size_by_rule(min(r_V, m))
    sizes = svd_sizes(U.dtype, n, m, r_U, r_V, kind, U_block, V_block, V is None)
    return torch.ops.fasth.svd_linear(x, U, sigma, V, bias, signs, kind, [U_block, V_block], sizes, keep)[0]


def _numbers(*sizes: int) -> list[int]:
    """The sizes of reflectors and blocks, where a graph may have symbols too: written out, they are numbers."""
    return [int(f"{size}") for size in sizes]


class _Sizes(NamedTuple):
    """How many numbers are kept of m rows, and from how many rows on the matrix is formed.

    A linear function of m, as the rule of how much may be kept is: the compiler would guard on where any other bends,
    and make a graph for each side. All of it is allocated, and what fits is kept there.
    """

    fixed: int
    per_row: int
    crossover: int

    def of(self, m: Any) -> Any:
        return self.fixed + self.per_row * m


def householder_sizes(dtype: torch.dtype, r: int, d: int, kind: int, block_size: int, batched: bool) -> list[int]:
    """As in native.py, as much as x and V; or what is kept of any number of rows."""
    crossover = _NEVER if batched else _first_above(crossover_by_rule(r, d, kind != FULL))
    return [max(r * d, _without_states(dtype, r, d, kind, block_size)), d, crossover]


def svd_sizes(
    dtype: torch.dtype, n: int, m: int, r_U: int, r_V: int, kind: int, U_block: int, V_block: int, shared: bool
) -> list[int]:
    """As in native_svd.py, twice as much as x and the reflectors; or the rows after both products, and the rest."""
    rest = _without_states(dtype, r_V, m, kind, V_block) + _without_states(dtype, r_U, n, kind, U_block)
    numbers = n * m if shared else r_U * n + r_V * m
    crossover = _first_above(crossover_by_rule(min(n, m), max(n, m), kind != FULL))
    return [max(2 * numbers, rest + 32), max(2 * m, n + m), crossover]  # 32: both are rounded up to 16


def _without_states(dtype: torch.dtype, r: int, d: int, kind: int, block_size: int) -> int:
    size, _ = functions(dtype).plan(0, r, d, kind, False, block_size, 1, 1, _NEVER)
    return size


def _first_above(bound: float) -> int:
    return _NEVER if math.isinf(bound) else math.floor(bound) + 1


# What torch.compiler.assume_constant_result does. That would import the compiler whenever fasth is imported.
_constants: tuple[Any, ...] = (_core_is_there, householder_sizes, svd_sizes)
for _constant in _constants:
    _constant._dynamo_marked_constant = True


# x Qᵀ.


def _describe(x: Tensor, V: Tensor, kind: int, block_size: int, sizes: Sequence[int]) -> tuple[_Sizes, Any, Any]:
    """What is kept, the number of matrices and the rows for each."""
    if x.dtype not in DTYPES or x.dtype != V.dtype:
        raise TypeError(f"`x` and `V` should both be float32 or float64; got {x.dtype} and {V.dtype}")
    batch = V.ndim == 3 and x.ndim == 3 and x.shape[0] == V.shape[0]
    if not (batch or (V.ndim == 2 and x.ndim > 0)) or x.shape[-1] != V.shape[-1] or V.shape[-1] < 1:
        raise ValueError(
            f"`x` and `V` should have shapes (*, d) and (r, d) or (b, m, d) and (b, r, d), d ≥ 1; "
            f"got {tuple(x.shape)} and {tuple(V.shape)}"
        )
    if kind not in _KINDS or block_size < 1:
        raise ValueError(f"`kind` should be one of {_KINDS}, `block_size` at least 1; got {kind} and {block_size}")
    return (_Sizes(*sizes), x.shape[0], x.shape[1]) if batch else (_Sizes(*sizes), 1, math.prod(x.shape[:-1]))


def _householder(
    x: Tensor, V: Tensor, transpose: bool, kind: int, block_size: int, formula: Sequence[int], keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    sizes, B, m = _describe(x, V, kind, block_size, formula)
    kept = x.new_empty(B * sizes.of(m) if keep else 0)
    options = transpose, kind, block_size
    if m < sizes.crossover:
        out, layout = _apply(native.in_rows(x, V), V, options, kept)
    else:
        d = V.shape[1]
        P, layout = _apply(_eye(d, x), V, options, kept[d * d :])
        kept[: d * d].copy_(P.flatten()[: kept.numel()])
        out = x @ P
    return out, kept, _as_tensor(layout, keep)


def _apply(x: Tensor, V: Tensor, options: Any, kept: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """The output, and how ``kept``, which may be empty, is laid out."""
    core, problem, room = functions(x.dtype), native.problem_of(x, V, *options), kept.numel()
    if not room:
        return native.multiply(x, V, problem, None, 0, False)[0], (0, 0)
    size, with_states = core.plan(*problem, torch.get_num_threads(), room)
    out, members = native.multiply(x, V, problem, kept if size else None, size, with_states)
    core.clear(*problem, kept.data_ptr(), size, members, room)
    return out, (size, members)


def _householder_fake(
    x: Tensor, V: Tensor, transpose: bool, kind: int, block_size: int, formula: Sequence[int], keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    sizes, B, m = _describe(x, V, kind, block_size, formula)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, x.new_empty(B * sizes.of(m) if keep else 0), _fake_layout(x, keep)


def _householder_backward(
    g: Tensor,
    out: Tensor,
    V: Tensor,
    kept: Tensor,
    layout: Tensor,
    transpose: bool,
    kind: int,
    block_size: int,
    formula: Sequence[int],
    needs_x: bool,
    needs_V: bool,
) -> tuple[Tensor, Tensor]:
    sizes, B, m = _describe(g, V, kind, block_size, formula)
    _check_kept(g, out.shape, kept, layout, B * sizes.of(m))
    size, members = layout.tolist()
    options = transpose, kind, block_size
    if m < sizes.crossover:
        g, out = native.in_rows(g, V), out.contiguous()
        problem = native.problem_of(g, V, *options)
        dx, dV = native.gradients(g, out, V, problem, kept if size else None, (size, members), needs_x, needs_V)
    else:
        d = V.shape[1]
        P, kept = kept[: d * d].view(d, d), kept[d * d :]
        dx, dV = g @ P.mT if needs_x else None, None
        if needs_V:
            # out = x P and P is orthogonal, so xᵀ g = P outᵀ g.
            dP = P @ (out.reshape(-1, d).mT @ g.reshape(-1, d))
            problem = native.problem_of(dP, V, *options)
            _, dV = native.gradients(dP, P, V, problem, kept if size else None, (size, members), False, True)
    return _result(dx, g), _result(dV, g, V)


def _householder_backward_fake(
    g: Tensor, out: Tensor, V: Tensor, kept: Tensor, layout: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    *_, needs_x, needs_V = options
    return _fake_result(needs_x, g, g), _fake_result(needs_V, g, V, torch.preserve_format)


def _setup_householder(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, V, *ctx.options, ctx.keep = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(V, *output)


def _householder_derivative(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    _check_keep(ctx.keep)
    V, out, kept, layout = ctx.saved_tensors
    needs = ctx.needs_input_grad[:2]
    if torch.is_grad_enabled():  # a second derivative is to follow
        dx, dV = native.differentiable_gradients(g, out, V, *ctx.options[:3], *needs)
    else:
        dx, dV = torch.ops.fasth.householder_backward(g, out, V, kept, layout, *ctx.options, *needs)
    return dx if needs[0] else None, dV if needs[1] else None, *(None,) * 5


# x Wᵀ with W = U Σ Vᵀ.


class _Weight(NamedTuple):
    """W: (n, m) as its factors, in the terms of ``native_svd``."""

    U: Tensor
    sigma: Tensor
    V: Tensor | None
    signs: Tensor | None
    kind: int
    U_block: int
    V_block: int

    @property
    def mT(self) -> _Weight:
        U, V = (self.U.mT, None) if self.V is None else (self.V, self.U)
        return self._replace(U=U, V=V, U_block=self.V_block, V_block=self.U_block)

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""
        n, m = self.U.shape if self.V is None else (self.U.shape[1], self.V.shape[1])
        return int(n), int(m)

    @property
    def reflectors(self) -> tuple[int, int]:
        """Those of U and of V."""
        r_U, r_V = reversed(self.U.shape) if self.V is None else (self.U.shape[0], self.V.shape[0])
        return int(r_U), int(r_V)

    def problem(self, rows: int) -> tuple[int, ...]:
        (n, m), (r_U, r_V) = self.shape, self.reflectors
        return rows, m, n, r_V, r_U, self.kind, self.V_block, self.U_block, self.sigma.shape[0]

    def located(self) -> native_svd.Factors:
        return native_svd.locate(self.U, self.sigma, self.V, self.signs)

    def to_form(self) -> _Weight:
        """W or Wᵀ: that with fewer columns, since the transpose is formed of as many rows."""
        return self.mT if self.shape[0] < self.shape[1] else self


def _weight(
    x: Tensor,
    U: Tensor,
    sigma: Tensor,
    V: Tensor | None,
    bias: Tensor | None,
    signs: Tensor | None,
    kind: int,
    blocks: Sequence[int],
) -> _Weight:
    tensors = [t for t in (x, U, sigma, V, bias, signs) if t is not None]
    if x.dtype not in DTYPES or any(t.dtype != x.dtype for t in tensors):
        raise TypeError(f"all tensors should be float32 or all float64; got {[t.dtype for t in tensors]}")
    if U.ndim != 2 or (V is not None and V.ndim != 2) or sigma.ndim != 1 or kind not in _KINDS:
        raise ValueError(f"`U` and `V` should be matrices, `sigma` a vector and `kind` one of {_KINDS}")
    weight = _Weight(U, sigma.contiguous(), V, None if signs is None else signs.contiguous(), kind, *blocks)
    (n, m), k = weight.shape, sigma.shape[0]
    fits = x.ndim > 0 and x.shape[-1] == m > 0 and n > 0 and k <= min(n, m)
    if not fits or (bias is not None and bias.shape != (n,)) or (signs is not None and signs.shape != (2, k)):
        raise ValueError(f"the shapes do not fit a weight of shape {(n, m)}: {[tuple(t.shape) for t in tensors]}")
    return weight


def _svd_linear(
    x: Tensor,
    U: Tensor,
    sigma: Tensor,
    V: Tensor | None,
    bias: Tensor | None,
    signs: Tensor | None,
    kind: int,
    blocks: Sequence[int],
    formula: Sequence[int],
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    weight, rows = _weight(x, U, sigma, V, bias, signs, kind, blocks), math.prod(x.shape[:-1])
    sizes = _Sizes(*formula)
    kept = x.new_empty(sizes.of(rows) if keep else 0)
    if rows < sizes.crossover:
        out, layout = _apply_svd(x.contiguous(), weight, None if bias is None else bias.contiguous(), kept)
    else:
        formed = weight.to_form()
        W, layout = _apply_svd(_eye(formed.shape[1], x), formed, None, kept)
        out = torch.nn.functional.linear(x, W if formed is not weight else W.mT, bias)
    return out, kept, _as_tensor(layout, keep)


def _apply_svd(x: Tensor, weight: _Weight, bias: Tensor | None, kept: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """The output, and how ``kept``, which may be empty, is laid out."""
    core, located, room = functions(x.dtype), weight.located(), kept.numel()
    problem = weight.problem(x.numel() // x.shape[-1])
    if not room:
        return native_svd.multiply(x, problem, located, bias, None, 0, False)[0], (0, 0)
    size, U_kept, with_states = core.svd_plan(*problem, torch.get_num_threads(), room)
    if size > room:
        raise ValueError(f"`sizes` should be those of the weight's shape; they leave {room} numbers for {size}")
    out, members = native_svd.multiply(x, problem, located, bias, kept, U_kept, with_states)
    core.svd_clear(*problem, kept.data_ptr(), U_kept, members, room)
    return out, (U_kept, members)


def _svd_linear_fake(
    x: Tensor,
    U: Tensor,
    sigma: Tensor,
    V: Tensor | None,
    bias: Tensor | None,
    signs: Tensor | None,
    kind: int,
    blocks: Sequence[int],
    formula: Sequence[int],
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    weight = _weight(x, U, sigma, V, bias, signs, kind, blocks)
    kept = x.new_empty(_Sizes(*formula).of(math.prod(x.shape[:-1])) if keep else 0)
    return x.new_empty((*x.shape[:-1], weight.shape[0])), kept, _fake_layout(x, keep)


def _svd_linear_backward(
    g: Tensor,
    x: Tensor,
    U: Tensor,
    sigma: Tensor,
    V: Tensor | None,
    bias: Tensor | None,
    signs: Tensor | None,
    kept: Tensor,
    layout: Tensor,
    kind: int,
    blocks: Sequence[int],
    formula: Sequence[int],
    needs: Sequence[bool],
) -> tuple[Tensor, ...]:
    weight, rows = _weight(x, U, sigma, V, bias, signs, kind, blocks), math.prod(x.shape[:-1])
    sizes = _Sizes(*formula)
    _check_kept(g, (*x.shape[:-1], weight.shape[0]), kept, layout, sizes.of(rows))
    run = _svd_gradients if rows < sizes.crossover else _svd_gradients_of_formed
    found = run(g, x, weight, bias, kept, tuple(layout.tolist()), needs)
    dx, dU, dsigma, dV, dbias = found
    return _result(dx, g), _result(dU, g, U), _result(dsigma, g), _result(dV, g, V), _result(dbias, g)


def _svd_gradients(
    g: Tensor,
    x: Tensor,
    weight: _Weight,
    bias: Tensor | None,
    kept: Tensor,
    layout: tuple[int, int],
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    U, sigma, V, *_ = weight
    problem = weight.problem(g.numel() // g.shape[-1])
    located = weight.located()
    return native_svd.gradients(g.contiguous(), x, U, sigma, V, bias, problem, located, kept, layout, needs)


def _svd_gradients_of_formed(
    g: Tensor,
    x: Tensor,
    weight: _Weight,
    bias: Tensor | None,
    kept: Tensor,
    layout: tuple[int, int],
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    formed = weight.to_form()
    n, m = formed.shape
    start = -(-m * m // 16) * 16  # behind the rows after the first product
    W = kept[start : start + m * n].view(m, n)
    g_rows, x_rows = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
    if formed is weight:
        W, dW = W.mT, x_rows.mT @ g_rows
    else:
        dW = g_rows.mT @ x_rows
    needs_U, needs_V = needs[1], needs[3]
    if weight.V is not None and formed is not weight:
        needs_U, needs_V = needs_V, needs_U
    _, dU, dsigma, dV, _ = _svd_gradients(
        dW, dW, formed, None, kept, layout, (False, needs_U, needs[2], needs_V, False)
    )
    if formed is not weight:
        dU, dV = (dU, dV) if weight.V is None else (dV, dU)
        dU = dU.mT if weight.V is None and dU is not None else dU
    dbias = g_rows.sum(0) if needs[4] else None
    return g @ W if needs[0] else None, dU, dsigma, dV, dbias


def _svd_linear_backward_fake(
    g: Tensor,
    x: Tensor,
    U: Tensor,
    sigma: Tensor,
    V: Tensor | None,
    bias: Tensor | None,
    signs: Tensor | None,
    kept: Tensor,
    layout: Tensor,
    kind: int,
    blocks: Sequence[int],
    formula: Sequence[int],
    needs: Sequence[bool],
) -> tuple[Tensor, ...]:
    return (
        _fake_result(needs[0], g, x),
        _fake_result(needs[1], g, U, torch.preserve_format),
        _fake_result(needs[2], g, sigma),
        _fake_result(needs[3], g, V, torch.preserve_format),
        _fake_result(needs[4], g, bias),
    )


def _setup_svd_linear(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.kind, ctx.blocks, ctx.formula, ctx.keep = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*tensors, *output[1:])


def _svd_linear_derivative(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    _check_keep(ctx.keep)
    *inputs, signs, kept, layout = ctx.saved_tensors
    needs = ctx.needs_input_grad[:5]
    found: Sequence[Tensor | None]
    if torch.is_grad_enabled():  # a second derivative is to follow
        from fasth.reflections import SVD_COMPOSED

        found = native_svd.differentiable_gradients(SVD_COMPOSED[ctx.kind], g, inputs, signs, needs)
    else:
        found = torch.ops.fasth.svd_linear_backward(
            g, *inputs, signs, kept, layout, ctx.kind, ctx.blocks, ctx.formula, needs
        )
    return *(t if need else None for t, need in zip(found, needs, strict=True)), *(None,) * 5


# Both.


def _eye(n: int, like: Tensor) -> Tensor:
    return torch.eye(n, dtype=like.dtype, device=like.device)


def _result(t: Tensor | None, g: Tensor, like: Tensor | None = None) -> Tensor:
    """t with the strides of ``like``, or else in rows. Operators have no optional results, so None becomes empty."""
    if t is None:
        return g.new_empty(0)
    if like is None or t.stride() == like.stride():
        return t.contiguous() if like is None else t
    return torch.empty_like(like).copy_(t)


def _fake_result(
    need: bool, g: Tensor, like: Tensor | None, memory_format: torch.memory_format = torch.contiguous_format
) -> Tensor:
    return g.new_empty(0) if like is None or not need else torch.empty_like(like, memory_format=memory_format)


def _as_tensor(layout: tuple[int, int], keep: bool) -> Tensor:
    return torch.tensor(layout if keep else (), dtype=torch.int64)


def _fake_layout(x: Tensor, keep: bool) -> Tensor:
    return x.new_empty(2 if keep else 0, dtype=torch.int64)


def _check_keep(keep: bool) -> None:
    if not keep:
        raise RuntimeError("`keep` should be True where a gradient is to follow")


def _check_kept(g: Tensor, shape: Sequence[int], kept: Tensor, layout: Tensor, size: int) -> None:
    if tuple(g.shape) != tuple(shape) or kept.dtype != g.dtype or kept.shape != (size,) or layout.shape != (2,):
        raise ValueError("the gradient, `kept` and `layout` should be as the operator gave them")


def _register(name: str, arguments: str, results: str, kernel: Any, fake: Any) -> None:
    _library.define(f"{name}({arguments}) -> {results}", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, kernel, "CPU")
    torch.library.register_fake(f"fasth::{name}", fake, lib=_library)


def _derive(name: str, derivative: Any, setup: Any) -> None:
    torch.library.register_autograd(f"fasth::{name}", derivative, setup_context=setup, lib=_library)


_HOUSEHOLDER = "bool transpose, int kind, int block_size, int[] sizes"
_register(
    "householder",
    f"Tensor x, Tensor V, {_HOUSEHOLDER}, bool keep",
    "(Tensor, Tensor, Tensor)",
    _householder,
    _householder_fake,
)
_register(
    "householder_backward",
    f"Tensor g, Tensor out, Tensor V, Tensor kept, Tensor layout, {_HOUSEHOLDER}, bool needs_x, bool needs_V",
    "(Tensor, Tensor)",
    _householder_backward,
    _householder_backward_fake,
)
_FACTORS = "Tensor U, Tensor sigma, Tensor? V, Tensor? bias, Tensor? signs"
_register(
    "svd_linear",
    f"Tensor x, {_FACTORS}, int kind, int[] blocks, int[] sizes, bool keep",
    "(Tensor, Tensor, Tensor)",
    _svd_linear,
    _svd_linear_fake,
)
_register(
    "svd_linear_backward",
    f"Tensor g, Tensor x, {_FACTORS}, Tensor kept, Tensor layout, int kind, int[] blocks, int[] sizes, bool[] needs",
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    _svd_linear_backward,
    _svd_linear_backward_fake,
)
_derive("householder", _householder_derivative, _setup_householder)
_derive("svd_linear", _svd_linear_derivative, _setup_svd_linear)
