"""The compiled CPU core behind the same signature: which one to load, when it serves, and its autograd Function."""

from __future__ import annotations

import functools
import os
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from fasth.reflections import blocked
from fasth.reflections.one_by_one import is_batch, one_by_one

LEVELS = ("baseline", "avx2", "avx512")
FORMS = ("full", "triangular", "compact")
FULL, TRIANGULAR, COMPACT = range(3)  # Kind in native/layout.hpp

DTYPES = (torch.float32, torch.float64)
PLAIN = (Tensor, torch.nn.Parameter)

# Somebody wants to see an operator of a graph, if one of these says so: autograd, a transform, a mode, the profiler.
_WATCHERS = (
    torch.is_grad_enabled,
    torch._C._are_functorch_transforms_active,
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
    torch._C._is_tracing,
    torch._C._autograd._profiler_enabled,
)

_FUNCTIONS = (
    "connect",
    "connect_graphs",
    "Operator",
    "KeptWeight",
    "plain",
    "contains",
    "plain_householder",
    "plain_svd_linear",
    "householder",
    "householder_backward",
    "svd_linear",
    "svd_linear_backward",
    "kept_sizes",
    "householder_keeps_states",
    "svd_keeps_states",
    "new_kept",
)


def machine_level() -> str:
    """The highest instruction set that this machine and torch agree on."""
    return {"AVX2": "avx2", "AVX512": "avx512"}.get(torch.backends.cpu.get_cpu_capability(), "baseline")


def available_levels() -> list[str]:
    """The levels that are both built and usable here, lowest first."""
    return [level for level in LEVELS[: LEVELS.index(machine_level()) + 1] if _spec(level)]


@functools.cache
def core() -> Any:
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
    if missing := [name for name in _FUNCTIONS if not hasattr(module, name)]:
        raise ImportError(f"the core for {level} is older than these files, without {missing[0]}: install fasth again")
    connect(module, getattr(Tensor, "__dlpack_c_exchange_api__", None))
    module.connect_graphs(_WATCHERS, forward_ad, torch.get_num_threads)
    return module


def connect(module: ModuleType, table: Any) -> None:
    """Shows PyTorch to the core. ``table`` has C functions to read tensors; without it they are read by methods."""
    in_rows = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)
    module.connect(Tensor, torch.nn.Parameter, *DTYPES, torch.empty_like, in_rows, table)


def _spec(level: str) -> Any:
    import fasth

    directory = os.environ.get("FASTH_CORE_DIR")
    return PathFinder.find_spec(f"fasth._core_{level}", [directory] if directory else list(fasth.__path__))


def usable(*tensors: Tensor) -> bool:
    """Whether the core takes these: eager work on plain float32 or float64 CPU tensors, watched by nobody."""
    return not watched() and core() is not None and core().plain(*tensors)


def watched() -> bool:
    """Whether a compiler, a transform or a mode wants to see every operation."""
    return (
        is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
        or torch._C._is_tracing()
    )


def householder(
    x: Tensor, V: Tensor, *, transpose: bool, kind: int, block_size: int, of_identity: bool = False
) -> Tensor:
    """x Qᵀ, or x Q if ``transpose``.  x: (*, d) and V: (r, d), or x: (B, m, d) and V: (B, r, d) → the shape of x.

    V is FULL, TRIANGULAR or COMPACT; it may have any strides, and is read where it lies. ``of_identity``: x are the
    first rows of the identity, in x Qᵀ, which saves a third of the work with the latter two.
    """
    if torch.is_grad_enabled() and (x.requires_grad or V.requires_grad):
        return _run(x, V, (bool(transpose), kind, block_size), of_identity)
    options = bool(transpose), kind, block_size, torch.get_num_threads()
    return core().householder(x, V, *options, False, of_identity)[0]


class _Householder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, V: Tensor, options: tuple[bool, int, int], of_identity: bool) -> Tensor:
        ctx.core, ctx.options, ctx.of_identity = core(), options, of_identity
        out, kept = ctx.core.householder(x, V, *options, torch.get_num_threads(), True, of_identity)
        ctx.save_for_backward(V, out if ctx.needs_input_grad[1] else None, kept)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        V, out, kept = ctx.saved_tensors
        needs_x, needs_V, *_ = ctx.needs_input_grad
        if torch.is_grad_enabled() or watched() or not ctx.core.plain(g):  # a second derivative is to follow, for one
            if is_batch(g):
                return one_by_one(_Householder.backward, ctx, g)
            return *differentiable_gradients(g, out, V, ctx.options, needs_x, needs_V), None, None
        options = *ctx.options, torch.get_num_threads(), needs_x, needs_V, ctx.of_identity
        return *ctx.core.householder_backward(g, out, V, kept, *options), None, None


# Function.apply without its preparations for functorch, which `usable` has ruled out and which cost as much as a small
# product.
_run = super(torch.autograd.Function, _Householder).apply


def differentiable_gradients(
    g: Tensor,
    out: Tensor | None,
    V: Tensor,
    options: tuple[bool, int, int],
    needs_x: bool,
    needs_V: bool,
) -> tuple[Tensor | None, Tensor | None]:
    transpose, kind, block_size = options
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
