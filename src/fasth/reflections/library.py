"""The compiled core as operators of PyTorch, ``torch.ops.fasth``, for the graphs of ``torch.compile``.

Each has the signature of the core's function of its name, without the number of threads, and does nothing but call it.
Operators have no optional results: what the core leaves out is an empty tensor here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fasth.reflections.core import core
from fasth.reflections.heuristics import SAVE_A, SAVE_T, SAVE_Z, number_of_blocks, padded

FORMS = ("full", "triangular", "compact", "signed")
FULL, TRIANGULAR, COMPACT, SIGNED = range(len(FORMS))  # Kind in native/layout.hpp


def _saved(
    x: Tensor, batch: tuple[int, ...], rows: int, d: int, blocks: Sequence[int], k: int, save: int
) -> list[Tensor]:
    """Fake T: (N, K, K), Z: (N, M, K) and A: (N − 1, D, M): N blocks, of each product, and padded K, M and D."""
    N, steps, K, M, D = sum(blocks), sum(max(n - 1, 0) for n in blocks), padded(k), padded(rows), padded(d)
    shapes = {SAVE_T: (N, K, K), SAVE_Z: (N, M, K), SAVE_A: (steps, D, M)}
    return [x.new_empty((*batch, *shape) if save >= level else 0) for level, shape in shapes.items()]


def or_empty(results: Sequence[Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
    """Results as operators have them, with empty tensors for None; ``or_none`` undoes it."""
    return tuple(like.new_empty(0) if t is None else t for t in results)


def or_none(t: Tensor) -> Tensor | None:
    return t if t.numel() or t.ndim > 1 else None


def _householder(
    x: Tensor, V: Tensor, transpose: bool, kind: int, block_size: int, save: int, of_identity: bool
) -> tuple[Tensor, ...]:
    threads = torch.get_num_threads()
    return or_empty(core().householder(x, V, transpose, kind, block_size, threads, save, of_identity), x)


def _householder_fake(
    x: Tensor, V: Tensor, transpose: bool, kind: int, block_size: int, save: int, of_identity: bool
) -> tuple[Tensor, ...]:
    (r, d), batch = V.shape[-2:], tuple(V.shape[:-2])
    rows = x.shape[1] if batch else x.numel() // d
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, *_saved(x, batch, rows, d, [number_of_blocks(r, d, kind == FULL, block_size)], block_size, save)


def _householder_backward(
    g: Tensor,
    out: Tensor | None,
    V: Tensor,
    T: Tensor,
    Z: Tensor,
    A: Tensor,
    transpose: bool,
    kind: int,
    block_size: int,
    needs_x: bool,
    needs_V: bool,
    of_identity: bool,
) -> tuple[Tensor, ...]:
    saved = (or_none(t) for t in (T, Z, A))
    options = transpose, kind, block_size, torch.get_num_threads(), needs_x, needs_V, of_identity
    return or_empty(core().householder_backward(g, out, V, *saved, *options), g)


def _householder_backward_fake(
    g: Tensor, out: Tensor | None, V: Tensor, T: Tensor, Z: Tensor, A: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    *_, needs_x, needs_V, _ = options
    dx = torch.empty_like(g, memory_format=torch.contiguous_format) if needs_x else None
    return or_empty((dx, torch.empty_like(V) if needs_V else None), g)


def _svd_linear(
    x: Tensor,
    U: Tensor,
    sigma: Tensor | None,
    V: Tensor | None,
    bias: Tensor | None,
    kind: int,
    block_size: int,
    save: int,
) -> tuple[Tensor, ...]:
    threads = torch.get_num_threads()
    return or_empty(core().svd_linear(x, U, sigma, V, bias, kind, block_size, threads, save), x)


def _svd_linear_fake(
    x: Tensor,
    U: Tensor,
    sigma: Tensor | None,
    V: Tensor | None,
    bias: Tensor | None,
    kind: int,
    block_size: int,
    save: int,
) -> tuple[Tensor, ...]:
    (r_U, n), (r_V, m) = (U.mT.shape, U.shape) if V is None else (U.shape, V.shape)
    out = x.new_empty((*x.shape[:-1], n))
    inner = torch.empty_like(x, memory_format=torch.contiguous_format) if save else None
    product = torch.empty_like(out) if save and bias is not None else None
    blocks = [number_of_blocks(r_V, m, kind == FULL, block_size), number_of_blocks(r_U, n, kind == FULL, block_size)]
    saved = _saved(x, (), x.numel() // m, max(n, m), blocks, block_size, save)
    return *or_empty((out, inner, product), x), *saved


def _svd_linear_backward(
    g: Tensor,
    inner: Tensor,
    product: Tensor,
    U: Tensor,
    sigma: Tensor | None,
    V: Tensor | None,
    T: Tensor,
    Z: Tensor,
    A: Tensor,
    kind: int,
    block_size: int,
    needs: Sequence[bool],
    symmetric: bool,
) -> tuple[Tensor, ...]:
    saved = (or_none(t) for t in (T, Z, A))
    options = kind, block_size, torch.get_num_threads(), needs, symmetric
    return or_empty(core().svd_linear_backward(g, inner, product, U, sigma, V, *saved, *options), g)


def _svd_linear_backward_fake(
    g: Tensor,
    inner: Tensor,
    product: Tensor,
    U: Tensor,
    sigma: Tensor | None,
    V: Tensor | None,
    T: Tensor,
    Z: Tensor,
    A: Tensor,
    kind: int,
    block_size: int,
    needs: Sequence[bool],
    symmetric: bool,
) -> tuple[Tensor, ...]:
    dx, dU, dsigma, dV, dbias = needs
    results = (
        torch.empty_like(inner) if dx else None,
        torch.empty_like(U) if dU else None,
        g.new_empty(sigma.shape) if dsigma and sigma is not None else None,
        torch.empty_like(V) if dV and V is not None and not symmetric else None,
        g.new_empty(g.shape[-1]) if dbias else None,
    )
    return or_empty(results, g)


def _recurrence(
    x: Tensor, sizes: list[int] | None, W: Tensor, h0: Tensor, bias: Tensor | None, f: int, reverse: bool
) -> Tensor:
    return core().recurrence(x, sizes, W, h0, bias, f, reverse, torch.get_num_threads())


def _recurrence_fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _recurrence_backward(
    g: Tensor,
    sizes: list[int] | None,
    W: Tensor,
    out: Tensor,
    h0: Tensor,
    f: int,
    reverse: bool,
    needs_h0: bool,
    needs_bias: bool,
) -> tuple[Tensor, ...]:
    options = f, reverse, needs_h0, needs_bias, torch.get_num_threads()
    return or_empty(core().recurrence_backward(g, sizes, W, out, h0, *options), g)


def _recurrence_backward_fake(
    g: Tensor, sizes: list[int] | None, W: Tensor, out: Tensor, h0: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    *_, needs_h0, needs_bias = options
    dx, dh0 = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (g, h0))
    return or_empty((dx, dh0 if needs_h0 else None, g.new_empty(len(W)) if needs_bias else None), g)


_library = torch.library.Library("fasth", "DEF")


def define(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], key: str = "CPU") -> Any:
    """The operator ``fasth::name``, whose kernel is for the devices of one dispatch key."""
    _library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, kernel, key)
    torch.library.register_fake(f"fasth::{name}", fake, lib=_library)
    return getattr(torch.ops.fasth, name).default


_OF_HOUSEHOLDER = "bool transpose, int kind, int block_size"
_FACTORS = "Tensor U, Tensor? sigma, Tensor? V"

householder = define(
    "householder",
    f"(Tensor x, Tensor V, {_OF_HOUSEHOLDER}, int save, bool of_identity) -> (Tensor, Tensor, Tensor, Tensor)",
    _householder,
    _householder_fake,
)
householder_backward = define(
    "householder_backward",
    f"(Tensor g, Tensor? out, Tensor V, Tensor T, Tensor Z, Tensor A, {_OF_HOUSEHOLDER}, "
    "bool needs_x, bool needs_V, bool of_identity) -> (Tensor, Tensor)",
    _householder_backward,
    _householder_backward_fake,
)
svd_linear = define(
    "svd_linear",
    f"(Tensor x, {_FACTORS}, Tensor? bias, int kind, int block_size, int save) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _svd_linear,
    _svd_linear_fake,
)
svd_linear_backward = define(
    "svd_linear_backward",
    f"(Tensor g, Tensor inner, Tensor product, {_FACTORS}, Tensor T, Tensor Z, Tensor A, "
    "int kind, int block_size, bool[] needs, bool symmetric) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _svd_linear_backward,
    _svd_linear_backward_fake,
)
recurrence = define(
    "recurrence",
    "(Tensor x, SymInt[]? sizes, Tensor W, Tensor h0, Tensor? bias, int f, bool reverse) -> Tensor",
    _recurrence,
    _recurrence_fake,
)
recurrence_backward = define(
    "recurrence_backward",
    "(Tensor g, SymInt[]? sizes, Tensor W, Tensor out, Tensor h0, int f, bool reverse, bool needs_h0, bool needs_bias) "
    "-> (Tensor, Tensor, Tensor)",
    _recurrence_backward,
    _recurrence_backward_fake,
)
