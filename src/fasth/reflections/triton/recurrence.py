"""The recurrence h_t = f(x_t + W h_{t−1}) and its gradients, one launch each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasth.reflections.triton import recurrence_kernels as kernels
from fasth.reflections.triton.configurations import (
    SEQUENCES,
    STATE_REGISTERS,
    STATE_SLICE,
    STATE_TILE,
    STATE_WARPS,
    columns_held,
)
from fasth.reflections.triton.launching import launched


def recurrence(
    x: Tensor, sizes: list[int] | None, W: Tensor, h0: Tensor, bias: Tensor | None, f: int, reverse: bool
) -> Tensor:
    """The states at all times, of x's shape.  x: (time, batch, h), since packed sequences are not supported."""
    _check_sizes(sizes)
    x, W = x.contiguous(), W.contiguous()
    out = torch.empty_like(x)
    launched(
        kernels.recurrence,
        *_programs(x),
        X=x,
        W=W,
        H0=h0.contiguous(),
        BIAS=None if bias is None else bias.contiguous(),
        OUT=out,
        F=f,
        **_sizes(x, reverse),
    )
    return out


def recurrence_backward(
    g: Tensor,
    sizes: list[int] | None,
    W: Tensor,
    out: Tensor,
    h0: Tensor,
    f: int,
    reverse: bool,
    needs_h0: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of x, h0 and the bias of modReLU, the last two None where they are not needed."""
    _check_sizes(sizes)
    g, W, out = g.contiguous(), W.contiguous(), out.contiguous()
    dx, dh0 = torch.empty_like(g), torch.empty_like(h0, memory_format=torch.contiguous_format) if needs_h0 else None
    launched(
        kernels.recurrence_backward,
        *_programs(g),
        G=g,
        W=W,
        OUT=out,
        DX=dx,
        DH0=dh0,
        F=f,
        NEEDS_H0=needs_h0,
        **_sizes(g, reverse),
    )
    return dx, dh0, (dx * out.sign()).sum((0, 1)) if needs_bias else None


def _programs(x: Tensor) -> tuple[int, dict[str, int]]:
    return -(-x.shape[1] // SEQUENCES), {"num_warps": STATE_WARPS[_tile(x.shape[2])], "maxnreg": STATE_REGISTERS}


def _tile(h: int) -> int:
    return min(STATE_TILE, columns_held(h))


def _sizes(x: Tensor, reverse: bool) -> dict[str, Any]:
    times, batch, h = x.shape
    # Products of numbers that bfloat16 or float16 stored are exact in TF32.
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    tiles = {"ROWS": SEQUENCES, "TILE": _tile(h), "SLICE": STATE_SLICE}
    return {"times": times, "batch": batch, "h": h, "REVERSE": reverse, **tiles, "PRECISION": precision}


def _check_sizes(sizes: list[int] | None) -> None:
    if sizes is not None:
        raise NotImplementedError("the kernels take no packed sequences")
