"""The compiled CPU core behind the same signature: which one to load, when it serves, and its autograd Function."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fasth.reflections import blocked
from fasth.reflections.tuning import default_block_size

LEVELS = ("baseline", "avx2", "avx512")
FULL, TRIANGULAR, COMPACT = range(3)  # Kind in native/reflections.hpp

_PLAIN = (Tensor, torch.nn.Parameter)
_SMALL = 1 << 18  # numbers that are kept without asking whether they are worth their memory


def machine_level() -> str:
    """The highest instruction set that this machine and torch agree on."""
    return {"AVX2": "avx2", "AVX512": "avx512"}.get(torch.backends.cpu.get_cpu_capability(), "baseline")


def available_levels() -> list[str]:
    """The levels that are both built and usable here, lowest first."""
    return [level for level in LEVELS[: LEVELS.index(machine_level()) + 1] if _spec(level)]


@functools.cache
def core() -> ModuleType | None:
    """The module for this machine, loaded when first asked for, or None: not built, or ``FASTH_CORE=off``.

    ``FASTH_ISA`` picks a lower instruction set.
    """
    if os.environ.get("FASTH_CORE", "on").lower() in ("off", "0", "false", "no"):
        return None
    levels = available_levels()
    wanted = os.environ.get("FASTH_ISA")
    if wanted and levels:
        if wanted not in levels:
            raise ValueError(
                f"FASTH_ISA should be one of {levels}, which this machine and this build have; got {wanted!r}"
            )
        levels = [wanted]
    return load(levels[-1]) if levels else None


def load(level: str) -> ModuleType:
    """The core for one instruction set. It is loaded after torch, and so shares torch's thread pool."""
    spec = _spec(level)
    if spec is None or spec.loader is None:
        raise ImportError(f"the core for {level} is not built")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _spec(level: str) -> Any:
    import fasth

    directory = os.environ.get("FASTH_CORE_DIR")
    return PathFinder.find_spec(f"fasth._core_{level}", [directory] if directory else list(fasth.__path__))


def usable(x: Tensor, V: Tensor) -> bool:
    """Whether the core takes this: eager work on plain float32 or float64 CPU tensors, watched by nobody."""
    return (
        x.dtype in (torch.float32, torch.float64) and not _watched() and _plain(x) and _plain(V) and core() is not None
    )


def _watched() -> bool:
    """Whether a compiler, a transform or a mode wants to see every operation."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
        or torch._C._is_tracing()
    )


def _plain(t: Tensor) -> bool:
    """Whether what stands in t's memory is all there is to it. There is none for zeros kept as such, or once freed."""
    return (
        t.is_cpu
        and type(t) in _PLAIN
        and not t.is_neg()
        and not torch._C._functorch.is_functorch_wrapped_tensor(t)  # one that has outlived its transform
        and t.data_ptr() != 0
    )


def householder(x: Tensor, V: Tensor, *, transpose: bool, kind: int, block_size: int) -> Tensor:
    """x Qᵀ, or x Q if ``transpose``.  x: (*, d) and V: (r, d), or x: (B, m, d) and V: (B, r, d) → the shape of x.

    V is FULL, TRIANGULAR or COMPACT; it may have any strides, and is read where it lies.
    """
    if torch.is_grad_enabled() and (x.requires_grad or V.requires_grad):
        return _run(x, V, transpose, kind, block_size)
    return _forward(_in_rows(x, V), V, (transpose, kind, block_size), False, False)[0]


def _forward(
    x: Tensor, V: Tensor, options: tuple[bool, int, int], needs_x: bool, needs_V: bool
) -> tuple[Tensor, tuple[Any, ...], Tensor | None, tuple[int, int]]:
    """The output; the problem in the core's terms; what is kept for a gradient, how it is laid out."""
    functions = _functions(core(), x.dtype)
    transpose, kind, block_size = options
    B, m, x_strides = _batch_rows_strides(x, V)
    problem = m, *V.shape[-2:], kind, transpose, block_size, B
    kept, size, with_states = None, 0, False
    if needs_x or needs_V:
        # V and the output are kept anyway. The rest may take as much again.
        size, with_states = functions.plan(*problem, torch.get_num_threads(), x.numel() + V.numel())
        kept = x.new_empty(B * size) if size else None
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    members = functions.forward(
        *problem,
        torch.get_num_threads(),
        x.data_ptr(),
        x_strides,
        V.data_ptr(),
        _batch_rows_strides(V, V)[2],
        out.data_ptr(),
        0 if kept is None else kept.data_ptr(),
        size,
        with_states,
    )
    return out, problem, kept, (size, members)


class _Householder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, V: Tensor, *options: Any) -> Tensor:
        needs_x, needs_V, *_ = ctx.needs_input_grad
        x = _in_rows(x, V)
        out, ctx.problem, kept, ctx.layout = _forward(x, V, options, needs_x, needs_V)
        ctx.kept_size = 0 if kept is None else kept.numel()
        ctx.save_for_backward(V, out if needs_V else None, kept)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        V, out, kept = ctx.saved_tensors
        needs_x, needs_V, *_ = ctx.needs_input_grad
        _, r, d, kind, transpose, block_size, _ = ctx.problem
        if torch.is_grad_enabled() or _watched() or not _plain(g):  # a second derivative is to follow, for one
            dx, dV = _differentiable_gradients(g, out, V, transpose, kind, block_size, needs_x, needs_V)
            return dx, dV, None, None, None
        if V.dtype != g.dtype or V.shape[-2:] != (r, d):
            raise RuntimeError("a hook on saved tensors should give them back as they were")
        out, kept = _as_saved(out, g.numel(), g.dtype), _as_saved(kept, ctx.kept_size, g.dtype)
        g = _in_rows(g, V)
        dx = torch.empty_like(g, memory_format=torch.contiguous_format) if needs_x else None
        dV = None
        if needs_V:
            dV = torch.zeros_like(V) if kind == COMPACT else torch.empty_like(V)
        _functions(core(), g.dtype).backward(
            *ctx.problem,
            torch.get_num_threads(),
            g.data_ptr(),
            _batch_rows_strides(g, V)[2],
            0 if out is None else out.data_ptr(),
            V.data_ptr(),
            _batch_rows_strides(V, V)[2],
            0 if kept is None else kept.data_ptr(),
            *ctx.layout,
            0 if dx is None else dx.data_ptr(),
            0 if dV is None else dV.data_ptr(),
            (0, 0, 0) if dV is None else _batch_rows_strides(dV, V)[2],
        )
        return dx, dV, None, None, None


# Function.apply without its preparations for functorch, which `usable` has ruled out and which cost as much as a small
# product.
_run = super(torch.autograd.Function, _Householder).apply


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
    sigma: (k,), contiguous like bias and signs: (2, k). ``composed`` computes the same of the same arguments in PyTorch;
    second derivatives go through it.
    """
    tensors = x, U, sigma, V, bias
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return _run_svd(*tensors, signs, kind, composed)
    return _svd_forward(x.contiguous(), U, sigma, V, bias, signs, kind, False)[0]


def _svd_forward(
    x: Tensor,
    U: Tensor,
    sigma: Tensor,
    V: Tensor | None,
    bias: Tensor | None,
    signs: Tensor | None,
    kind: int,
    keep: bool,
) -> tuple[Tensor, tuple[int, ...], Tensor | None, tuple[int, int]]:
    functions = _functions(core(), x.dtype)
    U, V = (U.mT, U) if V is None else (U, V)
    (r_U, n), (r_V, m), k = U.shape, V.shape, sigma.shape[0]
    rows = x.numel() // m
    problem = rows, m, n, r_V, r_U, kind, default_block_size(min(r_V, m)), default_block_size(min(r_U, n)), k
    kept, U_kept, with_states = None, 0, False
    if keep:
        room = max(2 * (x.numel() + U.numel() + (0 if U.numel() == V.numel() else V.numel())), _SMALL)
        size, U_kept, with_states = functions.svd_plan(*problem, torch.get_num_threads(), room)
        kept = x.new_empty(size)
    out = x.new_empty((*x.shape[:-1], n))
    members = functions.svd_forward(
        *problem,
        torch.get_num_threads(),
        x.data_ptr(),
        (0, m, 1),
        V.data_ptr(),
        (0, *V.stride()),
        sigma.data_ptr(),
        0 if signs is None else signs.data_ptr(),
        U.data_ptr(),
        (0, *U.stride()),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        0 if kept is None else kept.data_ptr(),
        U_kept,
        with_states,
    )
    return out, problem, kept, (U_kept, members)


class _SVDLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, U: Tensor, sigma: Tensor, V: Tensor | None, bias: Tensor | None, *rest: Any) -> Tensor:
        signs, ctx.kind, ctx.composed = rest
        out, ctx.problem, kept, ctx.layout = _svd_forward(x.contiguous(), U, sigma, V, bias, signs, ctx.kind, True)
        assert kept is not None
        ctx.kept_size = kept.numel()
        ctx.save_for_backward(x, U, sigma, V, bias, signs, kept)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, signs, kept = ctx.saved_tensors
        needs = ctx.needs_input_grad[:5]
        if torch.is_grad_enabled() or _watched() or not _plain(g):  # a second derivative is to follow, for one
            return *_svd_differentiable_gradients(ctx, g, inputs, signs, needs), None, None, None
        x, U, sigma, V, bias = inputs
        kept = _as_saved(kept, ctx.kept_size, g.dtype)
        needs_x, needs_U, needs_sigma, needs_V, needs_bias = needs
        g = g.contiguous()
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
        dbias = torch.empty_like(bias) if needs_bias else None
        shared = V is None
        U_side, V_side = (U.mT, U) if shared else (U, V)
        new = torch.zeros_like if ctx.kind == COMPACT and not shared else torch.empty_like
        dU = new(U) if needs_U else None
        dV = dU if shared else new(V) if needs_V else None
        dU_side = dU.mT if shared and dU is not None else dU
        dsigma = torch.empty_like(sigma) if needs_sigma or needs_x or dV is not None else None
        _functions(core(), g.dtype).svd_backward(
            *ctx.problem,
            torch.get_num_threads(),
            g.data_ptr(),
            (0, g.shape[-1], 1),
            V_side.data_ptr(),
            (0, *V_side.stride()),
            sigma.data_ptr(),
            0 if signs is None else signs.data_ptr(),
            U_side.data_ptr(),
            (0, *U_side.stride()),
            kept.data_ptr(),
            *ctx.layout,
            0 if dx is None else dx.data_ptr(),
            0 if dV is None else dV.data_ptr(),
            (0, 0, 0) if dV is None else (0, *dV.stride()),
            0 if dsigma is None else dsigma.data_ptr(),
            0 if dU_side is None else dU_side.data_ptr(),
            (0, 0, 0) if dU_side is None else (0, *dU_side.stride()),
            0 if dbias is None else dbias.data_ptr(),
        )
        return dx, dU, dsigma if needs_sigma else None, None if shared else dV, dbias, None, None, None


_run_svd = super(torch.autograd.Function, _SVDLinear).apply


def _svd_differentiable_gradients(
    ctx: Any, g: Tensor, inputs: list[Tensor | None], signs: Tensor | None, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    with torch.enable_grad():
        out = ctx.composed(*inputs, signs)
        wanted = [t for t, need in zip(inputs, needs, strict=True) if need]
        found = iter(torch.autograd.grad(out, wanted, g, create_graph=torch.is_grad_enabled()))
    return tuple(next(found) if need else None for need in needs)


def _differentiable_gradients(
    g: Tensor,
    out: Tensor | None,
    V: Tensor,
    transpose: bool,
    kind: int,
    block_size: int,
    needs_x: bool,
    needs_V: bool,
) -> tuple[Tensor | None, Tensor | None]:
    reflectors = blocked.expand_compact(V) if kind == COMPACT else V
    rows, after = (t if V.ndim == 3 else t.reshape(1, -1, t.shape[-1]) for t in (g, g if out is None else out))
    dx, dV = blocked.gradients(
        rows,
        after,
        reflectors if V.ndim == 3 else reflectors.unsqueeze(0),
        transpose,
        kind != FULL,
        block_size,
        needs_x,
        needs_V,
    )
    if kind == COMPACT and dV is not None:
        dV = dV.triu(1)
    return None if dx is None else dx.reshape(g.shape), None if dV is None else dV.reshape(V.shape)


class _Functions(NamedTuple):
    plan: Any
    forward: Any
    backward: Any
    svd_plan: Any
    svd_forward: Any
    svd_backward: Any


@functools.cache
def _functions(module: Any, dtype: torch.dtype) -> _Functions:
    suffix = "float32" if dtype == torch.float32 else "float64"
    return _Functions(*(getattr(module, f"{name}_{suffix}") for name in _Functions._fields))


def _batch_rows_strides(t: Tensor, V: Tensor) -> tuple[int, int, tuple[int, ...]]:
    """How t lies in memory as (B, rows, d). If V has no batch, all of t is rows, and B is 1."""
    if t.ndim == V.ndim:
        return (t.shape[0], t.shape[1], t.stride()) if t.ndim == 3 else (1, t.shape[0], (0, *t.stride()))
    return 1, t.numel() // t.shape[-1], (0, t.shape[-1], 1)  # contiguous: _in_rows saw to that


def _in_rows(t: Tensor, V: Tensor) -> Tensor:
    """t in memory such that three strides describe it."""
    return t if t.ndim == V.ndim else t.contiguous()


def _as_saved(t: Tensor | None, size: int, dtype: torch.dtype) -> Tensor | None:
    """t in one piece of memory, wherever a hook on saved tensors has put it."""
    if t is None:
        return None
    if t.dtype != dtype or t.numel() != size or not t.is_cpu:
        raise RuntimeError(f"a saved tensor of {size} {dtype} was given back as {t.numel()} {t.dtype} on {t.device}")
    return t.contiguous()
