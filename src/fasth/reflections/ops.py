"""The compiled core as operators of PyTorch, so that the graphs of ``torch.compile`` call it, forward and backward.

``fasth::householder`` and ``fasth::svd_linear`` are differentiable, and nothing but two operators each that are not:
``…_forward`` gives (out, kept), and ``kept`` is what ``…_backward`` needs besides. Only these are left in a graph, so
that autograd costs it nothing when it runs.

They differ from the eager functions in two ways, since the number of rows may be a symbol when a graph is made. The
size of ``kept`` is a formula in it, the same on any number of threads. And whether to form the matrix is decided
inside, when the operator runs. All that the formula and the decision need is an argument, ``sizes``, and so part of the
graph: graphs outlive this process in the compiler's cache.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from fasth.reflections import native, native_svd, registry
from fasth.reflections.blocked import is_exporting
from fasth.reflections.native import COMPACT, DTYPES, FORMS, FULL, PLAIN, TRIANGULAR, core
from fasth.reflections.registry import constant_in_graphs
from fasth.reflections.tuning import block_size_by_rule, crossover_by_rule, sides_of

_KINDS = (FULL, TRIANGULAR, COMPACT)
_NEVER = 1 << 62
ALWAYS_KEPT = 1 << 18  # as in native/calls.hpp


def usable(*tensors: Tensor | None) -> bool:
    """Whether a graph in the making may call the core for these: float32 or float64 on the CPU, and no transform."""
    kinds = [(type(t), t.dtype, t.is_cpu) for t in tensors if t is not None]
    return is_dynamo_compiling() and _core_takes(kinds) and forward_ad._current_level < 0


@constant_in_graphs
def _core_takes(kinds: list[tuple[type, torch.dtype, bool]]) -> bool:
    """Not while exporting: an exported program should run where fasth and its core are not."""
    for kind, dtype, on_cpu in kinds:
        if not (on_cpu and dtype in DTYPES and kind in PLAIN):
            return False
    return not is_exporting() and not torch._C._are_functorch_transforms_active() and core() is not None


def householder(x: Tensor, V: Tensor, *, transpose: bool, kind: int, block_size: int) -> Tensor:
    """``native.householder`` for a graph in the making."""
    r, d, block_size = _numbers(*V.shape[-2:], block_size)
    sizes = householder_sizes(V.dtype, r, d, kind, block_size, V.ndim == 3, _threads())
    return _householder_operator(x, V, transpose, kind, block_size, sizes)


def svd_linear(
    x: Tensor,
    U: Tensor,
    sigma: Tensor,
    V: Tensor | None,
    bias: Tensor | None,
    signs: Tensor | None,
    form: str,
) -> Tensor:
    """``native_svd.svd_linear`` for a graph in the making."""
    r_U, n = _numbers(*U.shape)
    r_V, m = (r_U, n) if V is None else _numbers(*V.shape)
    if V is None:
        r_U, n = n, r_U
    (k,) = _numbers(sigma.shape[0])
    kind, blocks, sizes = _svd_plan(U.dtype, n, m, r_U, r_V, k, form, V is None)
    return _svd_linear_operator(x, U, sigma, V, bias, signs, kind, blocks, sizes)


@constant_in_graphs
def _svd_plan(
    dtype: torch.dtype, n: int, m: int, r_U: int, r_V: int, k: int, form: str, shared: bool
) -> tuple[int, list[int], list[int]]:
    """The kind of reflectors, the block sizes of U and V, and ``sizes``."""
    kind = FORMS.index(form)
    U_block, V_block = block_size_by_rule(min(r_U, n)), block_size_by_rule(min(r_V, m))
    sizes = svd_sizes(dtype, n, m, r_U, r_V, k, kind, U_block, V_block, shared, torch.get_num_threads())
    return kind, [U_block, V_block], sizes


@constant_in_graphs
def _threads() -> int:
    return torch.get_num_threads()


def _numbers(*sizes: int) -> list[int]:
    """The sizes of reflectors and blocks, where a graph may have symbols too: written out, they are numbers."""
    return [int(f"{size}") for size in sizes]


# How much is kept of how many rows is as in eager mode: of few rows, the rows after every block; of more, Z; both up to
# what is worth its memory. From a crossover on the matrix is formed, of fewer rows, and may itself be kept. To the
# compiler all this is one formula, of minima and quotients: a condition it would guard, and make a graph for each side.


class _Sizes(NamedTuple):
    """Of m rows, M in whole packets, min(fixed + per_row M, room + room_per_row m) are kept, or so much with Z."""

    few: int  # rows, the most of which more than Z is kept
    fixed: int
    per_row: int
    fixed_with_Z: int
    per_row_with_Z: int
    room: int
    room_per_row: int
    packet: int
    formed_rows: int  # how many rows the matrix is formed of
    formed_size: int  # what is kept of it besides
    crossover: int


@constant_in_graphs
def householder_sizes(
    dtype: torch.dtype, r: int, d: int, kind: int, block_size: int, batched: bool, threads: int
) -> list[int]:
    """As the core has it, at most as much as x and V. One more number says what is kept."""
    least, Z_per_row, fixed, per_row, packet = _kept_sizes(dtype, r, d, d, kind, block_size, threads)
    crossover = _NEVER if batched else _first_above(crossover_by_rule(r, d, kind != FULL))
    few = _most_rows(core().householder_keeps_states, crossover, threads, r, d, kind, block_size, batched, dtype)
    room = 1 + max(r * d, least), d
    return [*_Sizes(few, 1 + fixed, per_row, 1 + least, Z_per_row, *room, packet, d, d * d, crossover)]


def svd_sizes(
    dtype: torch.dtype,
    n: int,
    m: int,
    r_U: int,
    r_V: int,
    k: int,
    kind: int,
    U_block: int,
    V_block: int,
    shared: bool,
    threads: int,
) -> list[int]:
    """Likewise, at most twice as much as x and the reflectors, besides T; with the rows after both products."""
    least_U, Z_per_row_U, fixed_U, per_row_U, packet = _kept_sizes(dtype, r_U, n, max(n, m), kind, U_block, threads)
    least_V, Z_per_row_V, fixed_V, per_row_V, _ = _kept_sizes(dtype, r_V, m, max(n, m), kind, V_block, threads)
    numbers = n * m if shared else r_U * n + r_V * m
    most = max(2 * numbers + least_U + least_V + 32, ALWAYS_KEPT)  # 32: the rows are rounded up to 16, twice
    crossover = _first_above(crossover_by_rule(min(n, m), max(n, m), kind != FULL, sides_of(r_U, r_V)))
    crossover = crossover if k == min(n, m) else _NEVER  # a matrix of low rank is never formed
    weight = n, m, r_U, r_V, kind, U_block, V_block, shared
    few = _most_rows(core().svd_keeps_states, crossover, threads, *weight, dtype)
    sizes = 33 + fixed_U + fixed_V, n + m + per_row_U + per_row_V
    with_Z = 33 + least_U + least_V, n + m + Z_per_row_U + Z_per_row_V
    return [*_Sizes(few, *sizes, *with_Z, 1 + most, max(2 * m, n + m), packet, min(n, m), 0, crossover)]


def _most_rows(keeps: Callable[..., bool], limit: int, threads: int, *options: Any) -> int:
    """The most rows of which more than Z is kept."""
    *shape, dtype = options

    def does_not(rows: int) -> bool:
        return not keeps(rows, *shape, threads, dtype.itemsize)

    return bisect.bisect_left(range(1, min(limit, 1 << 20)), True, key=does_not)


def _kept_sizes(
    dtype: torch.dtype, r: int, d: int, longest: int, kind: int, block_size: int, threads: int
) -> tuple[int, ...]:
    """``kept_sizes`` of the core, for one thread, or all if that is more."""
    found = [core().kept_sizes(r, d, longest, kind, block_size, members, dtype.itemsize) for members in (1, threads)]
    return tuple(max(sizes) for sizes in zip(*found, strict=True))


def _size(numbers: Sequence[int], rows: Any) -> Any:
    if len(numbers) != len(_Sizes._fields):
        raise ValueError(f"`sizes` should be {len(_Sizes._fields)} numbers; got {len(numbers)}")
    sizes = _Sizes(*numbers)
    least = min if isinstance(rows, int) else torch.sym_min
    formed = 0 if sizes.crossover >= _NEVER else least(1, rows // sizes.crossover)
    rows = rows + (sizes.formed_rows - rows) * formed
    whole, room = (rows + sizes.packet - 1) // sizes.packet * sizes.packet, sizes.room + sizes.room_per_row * rows
    with_Z = least(sizes.fixed_with_Z + sizes.per_row_with_Z * whole, room)
    more = least(sizes.fixed + sizes.per_row * whole, room) - with_Z
    return with_Z + more * (1 - least(1, rows // (sizes.few + 1))) + sizes.formed_size * formed


def _first_above(bound: float) -> int:
    return _NEVER if math.isinf(bound) else math.floor(bound) + 1


# x Qᵀ.


def _rows_of(x: Tensor, V: Tensor, kind: int, block_size: int) -> tuple[Any, Any]:
    """The number of matrices and the rows for each. They may be symbols, and the core is not there to check them."""
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
    return (x.shape[0], x.shape[1]) if batch else (1, math.prod(x.shape[:-1]))


def _householder(
    x: Tensor, V: Tensor, transpose: bool, kind: int, block_size: int, sizes: Sequence[int], keep: bool
) -> tuple[Tensor, Tensor]:
    B, m = _rows_of(x, V, kind, block_size)
    kept = _new_kept(x, B * _size(sizes, m) if keep else 0)
    options = transpose, kind, block_size, torch.get_num_threads()
    if m < sizes[-1]:
        out, _ = core().householder(x, V, *options, kept if keep else False)
    else:
        d = V.shape[1]
        Qt, _ = core().householder(_eye(d, x), V, False, *options[1:], kept[d * d :] if keep else False, kind != FULL)
        kept[: d * d].copy_(Qt.flatten()[: kept.numel()])
        out = x @ (Qt.mT if transpose else Qt)
    return out, kept


def _householder_fake(
    x: Tensor, V: Tensor, transpose: bool, kind: int, block_size: int, sizes: Sequence[int], keep: bool
) -> tuple[Tensor, Tensor]:
    B, m = _rows_of(x, V, kind, block_size)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, x.new_empty(B * _size(sizes, m) if keep else 0)


def _householder_backward(
    g: Tensor,
    out: Tensor,
    V: Tensor,
    kept: Tensor,
    transpose: bool,
    kind: int,
    block_size: int,
    sizes: Sequence[int],
    needs_x: bool,
    needs_V: bool,
) -> tuple[Tensor, Tensor]:
    _, m = _rows_of(g, V, kind, block_size)
    options = transpose, kind, block_size, torch.get_num_threads()
    if m < sizes[-1]:
        dx, dV = core().householder_backward(g, out, V, kept, *options, needs_x, needs_V)
    else:
        d = V.shape[1]
        Qt, dV = kept[: d * d].view(d, d), None
        P = Qt.mT if transpose else Qt
        dx = g @ P.mT if needs_x else None
        if needs_V:
            # out = x P and P is orthogonal, so xᵀ g = P outᵀ g.
            dP = P @ (out.reshape(-1, d).mT @ g.reshape(-1, d))
            dQt = dP.mT if transpose else dP
            _, dV = core().householder_backward(
                dQt, Qt, V, kept[d * d :], False, *options[1:], False, True, kind != FULL
            )
    return _result(dx, g), _result(dV, g, V)


def _householder_backward_fake(g: Tensor, out: Tensor, V: Tensor, kept: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    *_, needs_x, needs_V = options
    return _fake_result(needs_x, g, g), _fake_result(needs_V, g, V, torch.preserve_format)


class _Householder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, V: Tensor, *options: Any) -> Tensor:
        out, kept = torch.ops.fasth.householder_forward(x, V, *options, True)
        ctx.options = options
        ctx.save_for_backward(V, out, kept)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        V, out, kept = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():  # a second derivative is to follow
            dx, dV = native.differentiable_gradients(g, out, V, ctx.options[:3], *needs)
        else:
            dx, dV = torch.ops.fasth.householder_backward(g, out, V, kept, *ctx.options, *needs)
        return dx if needs[0] else None, dV if needs[1] else None, *(None,) * 4


# x Wᵀ with W = U Σ Vᵀ.


class _Weight(NamedTuple):
    """W: (n, m) as its factors, in the terms of the core."""

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

    def to_form(self) -> _Weight:
        """W or Wᵀ: that with fewer columns, since the transpose is formed of as many rows."""
        return self.mT if self.shape[0] < self.shape[1] else self

    def multiply(self, x: Tensor, bias: Tensor | None, kept: Tensor | None) -> Tensor:
        """x Wᵀ + bias, and ``kept`` filled, if it is given."""
        U, sigma, V, signs, *options = self
        keep = False if kept is None else kept
        return core().svd_linear(x, U, sigma, V, bias, signs, False, *options, torch.get_num_threads(), keep)[0]

    def gradients(
        self, g: Tensor, x: Tensor, bias: Tensor | None, kept: Tensor, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Those of x, U, sigma, V and bias; None where not needed."""
        U, sigma, V, signs, *options = self
        threads = torch.get_num_threads()
        return core().svd_linear_backward(g, x, U, sigma, V, bias, signs, kept, False, False, *options, threads, needs)


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
    weight = _Weight(U, sigma, V, signs, kind, *blocks)
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
    sizes: Sequence[int],
    keep: bool,
) -> tuple[Tensor, Tensor]:
    weight, rows = _weight(x, U, sigma, V, bias, signs, kind, blocks), math.prod(x.shape[:-1])
    kept = _new_kept(x, _size(sizes, rows) if keep else 0)
    if rows < sizes[-1]:
        return weight.multiply(x, bias, kept if keep else None), kept
    formed = weight.to_form()
    W = formed.multiply(_eye(formed.shape[1], x), None, kept if keep else None)
    return torch.nn.functional.linear(x, W if formed is not weight else W.mT, bias), kept


def _svd_linear_fake(
    x: Tensor,
    U: Tensor,
    sigma: Tensor,
    V: Tensor | None,
    bias: Tensor | None,
    signs: Tensor | None,
    kind: int,
    blocks: Sequence[int],
    sizes: Sequence[int],
    keep: bool,
) -> tuple[Tensor, Tensor]:
    weight = _weight(x, U, sigma, V, bias, signs, kind, blocks)
    kept = x.new_empty(_size(sizes, math.prod(x.shape[:-1])) if keep else 0)
    return x.new_empty((*x.shape[:-1], weight.shape[0])), kept


def _svd_linear_backward(
    g: Tensor,
    x: Tensor,
    U: Tensor,
    sigma: Tensor,
    V: Tensor | None,
    bias: Tensor | None,
    signs: Tensor | None,
    kept: Tensor,
    kind: int,
    blocks: Sequence[int],
    sizes: Sequence[int],
    needs: Sequence[bool],
) -> tuple[Tensor, ...]:
    weight = _Weight(U, sigma, V, signs, kind, *blocks)
    run = _gradients_of_formed if math.prod(x.shape[:-1]) >= sizes[-1] else _Weight.gradients
    dx, dU, dsigma, dV, dbias = run(weight, g, x, bias, kept, needs)
    return _result(dx, g), _result(dU, g, U), _result(dsigma, g), _result(dV, g, V), _result(dbias, g)


def _gradients_of_formed(
    weight: _Weight, g: Tensor, x: Tensor, bias: Tensor | None, kept: Tensor, needs: Sequence[bool]
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
    rows = x.new_empty(m, m)  # those of the identity; only their shape counts
    _, dU, dsigma, dV, _ = formed.gradients(dW, rows, None, kept, (False, needs_U, needs[2], needs_V, False))
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
    kind: int,
    blocks: Sequence[int],
    sizes: Sequence[int],
    needs: Sequence[bool],
) -> tuple[Tensor, ...]:
    return (
        _fake_result(needs[0], g, x),
        _fake_result(needs[1], g, U, torch.preserve_format),
        _fake_result(needs[2], g, sigma),
        _fake_result(needs[3], g, V, torch.preserve_format),
        _fake_result(needs[4], g, bias),
    )


class _SVDLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        out, kept = torch.ops.fasth.svd_linear_forward(*arguments, True)
        ctx.options = arguments[6:]
        ctx.save_for_backward(*arguments[:6], kept)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, signs, kept = ctx.saved_tensors
        needs = ctx.needs_input_grad[:5]
        found: Sequence[Tensor | None]
        if torch.is_grad_enabled():  # a second derivative is to follow
            from fasth.reflections import SVD_COMPOSED

            found = native_svd.differentiable_gradients(SVD_COMPOSED[ctx.options[0]], g, inputs, signs, needs)
        else:
            found = torch.ops.fasth.svd_linear_backward(g, *inputs, signs, kept, *ctx.options, needs)
        return *(t if need else None for t, need in zip(found, needs, strict=True)), *(None,) * 4


# Both.


def _eye(n: int, like: Tensor) -> Tensor:
    return torch.eye(n, dtype=like.dtype, device=like.device)


def _new_kept(x: Tensor, size: int) -> Tensor:
    return core().new_kept(x, size) if size else x.new_empty(0)


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


def _derive(name: str, arguments: str, fake: Any, function: type[torch.autograd.Function]) -> None:
    """The operator that the function differentiates, out of the one that its forward calls."""
    forward = getattr(torch.ops.fasth, f"{name}_forward")

    def without_gradients(*arguments: Any) -> Tensor:
        return forward(*arguments, False)[0]

    def with_gradients(*arguments: Any) -> Tensor:
        needed = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in arguments)
        return function.apply(*arguments) if needed else without_gradients(*arguments)

    registry.define(name, f"({arguments}) -> Tensor", without_gradients, lambda *arguments: fake(*arguments, False)[0])
    registry.differentiate(name, with_gradients)


_HOUSEHOLDER = "bool transpose, int kind, int block_size, int[] sizes"
registry.define(
    "householder_forward",
    f"(Tensor x, Tensor V, {_HOUSEHOLDER}, bool keep) -> (Tensor, Tensor)",
    _householder,
    _householder_fake,
    at_once=True,
)
registry.define(
    "householder_backward",
    f"(Tensor g, Tensor out, Tensor V, Tensor kept, {_HOUSEHOLDER}, bool needs_x, bool needs_V) -> (Tensor, Tensor)",
    _householder_backward,
    _householder_backward_fake,
    at_once=True,
)
_derive("householder", f"Tensor x, Tensor V, {_HOUSEHOLDER}", _householder_fake, _Householder)

_FACTORS = "Tensor U, Tensor sigma, Tensor? V, Tensor? bias, Tensor? signs"
_OPTIONS = "int kind, int[] blocks, int[] sizes"
registry.define(
    "svd_linear_forward",
    f"(Tensor x, {_FACTORS}, {_OPTIONS}, bool keep) -> (Tensor, Tensor)",
    _svd_linear,
    _svd_linear_fake,
    at_once=True,
)
registry.define(
    "svd_linear_backward",
    f"(Tensor g, Tensor x, {_FACTORS}, Tensor kept, {_OPTIONS}, bool[] needs) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    _svd_linear_backward,
    _svd_linear_backward_fake,
    at_once=True,
)
_derive("svd_linear", f"Tensor x, {_FACTORS}, {_OPTIONS}", _svd_linear_fake, _SVDLinear)

_householder_operator, _svd_linear_operator = torch.ops.fasth.householder, torch.ops.fasth.svd_linear
