"""The compiled CPU core behind the same signature: which one to load, when it serves, and its autograd Function."""

from __future__ import annotations

import functools
import os
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from fasth.reflections import blocked

LEVELS = ("baseline", "avx2", "avx512")
FULL, TRIANGULAR, COMPACT = range(3)  # Kind in native/reflections.hpp

DTYPES = (torch.float32, torch.float64)
PLAIN = (Tensor, torch.nn.Parameter)


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
    if missing := [name for name in _Functions._fields if not hasattr(module, f"{name}_float32")]:
        raise ImportError(f"the core for {level} is older than these files, without {missing[0]}: install fasth again")
    return module


def _spec(level: str) -> Any:
    import fasth

    directory = os.environ.get("FASTH_CORE_DIR")
    return PathFinder.find_spec(f"fasth._core_{level}", [directory] if directory else list(fasth.__path__))


def usable(*tensors: Tensor) -> bool:
    """Whether the core takes these: eager work on plain float32 or float64 CPU tensors, watched by nobody."""
    return not watched() and core() is not None and all(map(plain, tensors)) and tensors[0].dtype in DTYPES


def watched() -> bool:
    """Whether a compiler, a transform or a mode wants to see every operation."""
    return (
        is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
        or torch._C._is_tracing()
    )


def plain(t: Tensor) -> bool:
    """Whether what stands in t's memory is all there is to it. There is none for zeros kept as such, or once freed."""
    return (
        type(t) in PLAIN
        and t.is_cpu
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
    return _forward(in_rows(x, V), V, (transpose, kind, block_size), False, False)[0]


def _forward(
    x: Tensor, V: Tensor, options: tuple[bool, int, int], needs_x: bool, needs_V: bool
) -> tuple[Tensor, tuple[Any, ...], Tensor | None, tuple[int, int]]:
    """The output; the problem in the core's terms; what is kept for a gradient, how it is laid out."""
    problem = problem_of(x, V, *options)
    kept, size, with_states = None, 0, False
    if needs_x or needs_V:
        # V and the output are kept anyway. The rest may take as much again.
        size, with_states = functions(x.dtype).plan(*problem, torch.get_num_threads(), x.numel() + V.numel())
        kept = x.new_empty(problem[-1] * size) if size else None
    out, members = multiply(x, V, problem, kept, size, with_states)
    return out, problem, kept, (size, members)


def problem_of(x: Tensor, V: Tensor, transpose: bool, kind: int, block_size: int) -> tuple[Any, ...]:
    B, m, _ = _batch_rows_strides(x, V)
    return m, *V.shape[-2:], kind, transpose, block_size, B


def multiply(
    x: Tensor, V: Tensor, problem: tuple[Any, ...], kept: Tensor | None, size: int, with_states: bool
) -> tuple[Tensor, int]:
    """The output, on the core, and for how many threads the states were kept: 0 if they were not.

    ``size`` of the numbers in ``kept`` are for each matrix of the batch, as ``plan`` says.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    members = functions(x.dtype).forward(
        *problem,
        torch.get_num_threads(),
        x.data_ptr(),
        _batch_rows_strides(x, V)[2],
        V.data_ptr(),
        _batch_rows_strides(V, V)[2],
        out.data_ptr(),
        address(kept),
        size,
        with_states,
    )
    return out, members


class _Householder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, V: Tensor, *options: Any) -> Tensor:
        needs_x, needs_V, *_ = ctx.needs_input_grad
        x = in_rows(x, V)
        out, ctx.problem, kept, ctx.layout = _forward(x, V, options, needs_x, needs_V)
        ctx.kept_size = 0 if kept is None else kept.numel()
        ctx.save_for_backward(V, out if needs_V else None, kept)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        V, out, kept = ctx.saved_tensors
        needs_x, needs_V, *_ = ctx.needs_input_grad
        _, r, d, kind, transpose, block_size, _ = ctx.problem
        if torch.is_grad_enabled() or watched() or not plain(g):  # a second derivative is to follow, for one
            dx, dV = differentiable_gradients(g, out, V, transpose, kind, block_size, needs_x, needs_V)
            return dx, dV, None, None, None
        if V.dtype != g.dtype or V.shape[-2:] != (r, d):
            raise RuntimeError("a hook on saved tensors should give them back as they were")
        out, kept = as_saved(out, g.numel(), g.dtype), as_saved(kept, ctx.kept_size, g.dtype)
        dx, dV = gradients(in_rows(g, V), out, V, ctx.problem, kept, ctx.layout, needs_x, needs_V)
        return dx, dV, None, None, None


def gradients(
    g: Tensor,
    out: Tensor | None,
    V: Tensor,
    problem: tuple[Any, ...],
    kept: Tensor | None,
    layout: tuple[int, int],
    needs_x: bool,
    needs_V: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Those of x and V from that of the output, on the core. ``problem``, ``kept`` and ``layout`` are ``forward``'s."""
    dx = torch.empty_like(g, memory_format=torch.contiguous_format) if needs_x else None
    dV = None
    if needs_V:
        dV = torch.zeros_like(V) if problem[3] == COMPACT else torch.empty_like(V)
    functions(g.dtype).backward(
        *problem,
        torch.get_num_threads(),
        g.data_ptr(),
        _batch_rows_strides(g, V)[2],
        address(out),
        V.data_ptr(),
        _batch_rows_strides(V, V)[2],
        address(kept),
        *layout,
        address(dx),
        address(dV),
        (0, 0, 0) if dV is None else _batch_rows_strides(dV, V)[2],
    )
    return dx, dV


# Function.apply without its preparations for functorch, which `usable` has ruled out and which cost as much as a small
# product.
_run = super(torch.autograd.Function, _Householder).apply


def differentiable_gradients(
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
    clear: Any
    svd_plan: Any
    svd_forward: Any
    svd_backward: Any
    svd_clear: Any


def functions(dtype: torch.dtype) -> _Functions:
    return _functions(core(), dtype)


@functools.cache
def _functions(module: Any, dtype: torch.dtype) -> _Functions:
    suffix = "float32" if dtype == torch.float32 else "float64"
    return _Functions(*(getattr(module, f"{name}_{suffix}") for name in _Functions._fields))


def _batch_rows_strides(t: Tensor, V: Tensor) -> tuple[int, int, tuple[int, ...]]:
    """How t lies in memory as (B, rows, d). If V has no batch, all of t is rows, and B is 1."""
    dims = t.ndim
    if dims == V.ndim:
        return (t.shape[0], t.shape[1], t.stride()) if dims == 3 else (1, t.shape[0], (0, *t.stride()))
    return 1, t.numel() // t.shape[-1], (0, t.shape[-1], 1)  # contiguous: in_rows saw to that


def in_rows(t: Tensor, V: Tensor) -> Tensor:
    """t in memory such that three strides describe it."""
    return t if t.ndim == V.ndim else t.contiguous()


def address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def as_saved(t: Tensor | None, size: int, dtype: torch.dtype) -> Tensor | None:
    """t in one piece of memory, wherever a hook on saved tensors has put it."""
    if t is None:
        return None
    if t.dtype != dtype or t.numel() != size or not t.is_cpu:
        raise RuntimeError(f"a saved tensor of {size} {dtype} was given back as {t.numel()} {t.dtype} on {t.device}")
    return t.contiguous()
