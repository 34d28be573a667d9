"""The launches as operators of PyTorch, ``torch.ops.fasth.triton_*``, for the graphs of ``torch.compile``.

They are opaque to the compiler, so that the same operators run interpreted on the CPU and are tested there in compiled
graphs. They allocate by shapes alone, read no value back and do not synchronize: CUDA graphs can record them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fasth.reflections.heuristics import number_of_blocks
from fasth.reflections.library import FULL, define, or_empty, or_none
from fasth.reflections.triton.configurations import BLOCK

_ANY_DEVICE = "CompositeExplicitAutograd"


def _launch() -> Any:
    from fasth.reflections.triton import launch

    return launch


def _factors(V: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """Fake T and scales."""
    *batch, r, d = V.shape
    B, blocks = batch[0] if batch else 1, number_of_blocks(r, d, kind == FULL, BLOCK)
    T = V.new_empty((B, blocks, BLOCK, BLOCK), dtype=torch.float32)
    return T, V.new_empty((B, blocks * BLOCK), dtype=torch.float32)


def _householder(x: Tensor, V: Tensor, transpose: bool, kind: int, save: bool, of_identity: bool) -> tuple[Tensor, ...]:
    return or_empty(_launch().householder(x, V, transpose, kind, save, of_identity), x)


def _householder_fake(
    x: Tensor, V: Tensor, transpose: bool, kind: int, save: bool, of_identity: bool
) -> tuple[Tensor, ...]:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return or_empty((out, *(_factors(V, kind) if save else (None, None))), x)


def _householder_backward(
    g: Tensor,
    out: Tensor | None,
    V: Tensor,
    T: Tensor,
    scale: Tensor,
    transpose: bool,
    kind: int,
    needs_x: bool,
    needs_V: bool,
) -> tuple[Tensor, ...]:
    saved = or_none(T), or_none(scale)
    return or_empty(_launch().householder_backward(g, out, V, *saved, transpose, kind, needs_x, needs_V), g)


def _householder_backward_fake(
    g: Tensor, out: Tensor | None, V: Tensor, T: Tensor, scale: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    *_, needs_x, needs_V = options
    dx = torch.empty_like(g, memory_format=torch.contiguous_format) if needs_x else None
    return or_empty((dx, torch.empty_like(V) if needs_V else None), g)


def _svd_linear(
    x: Tensor, U: Tensor, sigma: Tensor | None, V: Tensor | None, bias: Tensor | None, kind: int, save: bool
) -> tuple[Tensor, ...]:
    return or_empty(_launch().svd_linear(x, U, sigma, V, bias, kind, save), x)


def _svd_linear_fake(
    x: Tensor, U: Tensor, sigma: Tensor | None, V: Tensor | None, bias: Tensor | None, kind: int, save: bool
) -> tuple[Tensor, ...]:
    U_side, V_side = (U.mT, U) if V is None else (U, V)
    n, m = U_side.shape[1], V_side.shape[1]
    out = x.new_empty((*x.shape[:-1], n))
    if not save:
        return or_empty((out, *[None] * 6), x)
    rows = x.numel() // m
    inner = x.new_empty((rows, m), dtype=torch.float32)
    product = x.new_empty((1, rows, n), dtype=torch.float32) if bias is not None or x.dtype != torch.float32 else None
    return *or_empty((out, inner, product), x), *_factors(V_side, kind), *_factors(U_side, kind)


def _svd_linear_backward(
    g: Tensor,
    inner: Tensor,
    product: Tensor,
    U: Tensor,
    sigma: Tensor | None,
    V: Tensor | None,
    T_V: Tensor,
    scale_V: Tensor,
    T_U: Tensor,
    scale_U: Tensor,
    kind: int,
    needs: Sequence[bool],
    symmetric: bool,
) -> tuple[Tensor, ...]:
    saved = T_V, scale_V, T_U, scale_U
    V = U if symmetric else V
    return or_empty(_launch().svd_linear_backward(g, inner, product, U, sigma, V, *saved, kind, needs, symmetric), g)


def _svd_linear_backward_fake(
    g: Tensor,
    inner: Tensor,
    product: Tensor,
    U: Tensor,
    sigma: Tensor | None,
    V: Tensor | None,
    T_V: Tensor,
    scale_V: Tensor,
    T_U: Tensor,
    scale_U: Tensor,
    kind: int,
    needs: Sequence[bool],
    symmetric: bool,
) -> tuple[Tensor, ...]:
    dx, dU, dsigma, dV, dbias = needs
    results = (
        g.new_empty((*g.shape[:-1], inner.shape[1])) if dx else None,
        torch.empty_like(U) if dU else None,
        g.new_empty(sigma.shape) if dsigma and sigma is not None else None,
        torch.empty_like(V) if dV and V is not None else None,
        g.new_empty(g.shape[-1]) if dbias else None,
    )
    return or_empty(results, g)


_FACTORS = "Tensor U, Tensor? sigma, Tensor? V"
_SEVEN = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"

householder = define(
    "triton_householder",
    "(Tensor x, Tensor V, bool transpose, int kind, bool save, bool of_identity) -> (Tensor, Tensor, Tensor)",
    _householder,
    _householder_fake,
    _ANY_DEVICE,
)
householder_backward = define(
    "triton_householder_backward",
    "(Tensor g, Tensor? out, Tensor V, Tensor T, Tensor scale, bool transpose, int kind, bool needs_x, bool needs_V) "
    "-> (Tensor, Tensor)",
    _householder_backward,
    _householder_backward_fake,
    _ANY_DEVICE,
)
svd_linear = define(
    "triton_svd_linear",
    f"(Tensor x, {_FACTORS}, Tensor? bias, int kind, bool save) -> {_SEVEN}",
    _svd_linear,
    _svd_linear_fake,
    _ANY_DEVICE,
)
svd_linear_backward = define(
    "triton_svd_linear_backward",
    f"(Tensor g, Tensor inner, Tensor product, {_FACTORS}, Tensor T_V, Tensor scale_V, Tensor T_U, Tensor scale_U, "
    "int kind, bool[] needs, bool symmetric) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _svd_linear_backward,
    _svd_linear_backward_fake,
    _ANY_DEVICE,
)
