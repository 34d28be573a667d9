"""``tune``: measures the best block size, and the number of rows from which forming Q is faster, on this machine."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fasth import functional
from fasth.reflections import tuning_file
from fasth.reflections.autograd import Householder
from fasth.reflections.plan import TORCH, TRIANGULAR, TRITON
from fasth.reflections.planner import (
    MANY_ROWS,
    backend_for,
    block_size_by_rule,
    crossover_by_rule,
    even_block_size,
    forget_plans,
    plan_householder,
)
from fasth.reflections.triton.configurations import LONGEST
from fasth.tools import timing

__all__ = ["Tuned", "block_sizes", "tune"]

_MOST_KERNEL_ROWS = 1 << 14
_MOST_STATES = 1 << 30  # rows · d²; the kernels' backward pass allocates a quarter of it in bytes
_GAIN = 0.97  # a block size other than the default must be faster by more than noise


@dataclass(frozen=True)
class Tuned:
    """The result of ``tune``: the entry that was stored, and the times with it and with the defaults."""

    entry: tuning_file.Entry
    default_block_size: int
    default_crossover: int
    seconds: float  # of a training step with the block size of ``entry``
    default_seconds: float  # of a training step with the default block size


def tune(d: int, rows: int = 32, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tuned:
    """Finds the fastest block size for d reflections of d dimensions, and the number of rows from which to form Q.

    This is the search of the paper's section 3.3, over sizes up to c√d and some beyond, with the current number of
    threads. On a GPU it also finds up to how many rows the kernels are fastest. The result is stored in
    ``FASTH_CACHE_DIR``, or the user's cache folder, and the library uses it from then on, in this process and in
    others. It affects speed alone. Takes less than a second for d = 784.

    Args:
        d: the number of dimensions, at least 2.
        rows: the number of rows for which the block size is optimized.
    """
    if not isinstance(d, int) or isinstance(d, bool) or d < 2:
        raise ValueError(f"`d` should be an int of at least 2; got {d!r}")
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        raise ValueError(f"`rows` should be a positive int; got {rows!r}")
    device = torch.device(device)
    generator = torch.Generator().manual_seed(d)
    V = torch.randn(d, d, generator=generator).triu().to(device, dtype).requires_grad_()
    backend = backend_for(V)
    by_products = TORCH if backend == TRITON else backend  # the kernels have no block size
    default = block_size_by_rule(d, device.type == "cpu", rows >= MANY_ROWS)
    times = _by_block_size(V, rows, by_products, default)
    best = min(times, key=lambda k: times[k])
    best = best if times[best] < _GAIN * times[default] else default
    by_rule = crossover_by_rule(d, d, triangular=True)
    crossover = _crossover(V, best, by_products, by_rule)
    kernel_rows = 0
    if backend == TRITON and _kernels_are_right(V, rows, best):
        kernel_rows, crossover = _limits(V, best)
    name, core = tuning_file.machine(device.type)
    entry = tuning_file.Entry(
        machine=name,
        core=core,
        device=device.type,
        threads=torch.get_num_threads(),
        dtype=str(dtype).removeprefix("torch."),
        d=d,
        rows=rows,
        block_size=best,
        crossover=crossover,
        kernel_rows=kernel_rows,
    )
    tuning_file.store(entry)
    forget_plans()
    return Tuned(entry, default, math.ceil(by_rule), times[best], times[default])


def block_sizes(d: int, default: int | None = None) -> list[int]:
    """Block sizes to try: even splits into blocks of at most 4, 8, 16, 24, … 128, up to about 4√d, and the default."""
    widest = [w for w in (4, 8, 16, 24, 32, 48, 64, 96, 128) if w <= max(32, 4 * math.sqrt(d))]
    return sorted({even_block_size(d, w) for w in widest} | {default or block_size_by_rule(d)})


def _by_block_size(V: Tensor, rows: int, backend: str, default: int) -> dict[int, float]:
    """Times a training step with each block size. Maps the block size to seconds."""
    sizes = block_sizes(len(V), default)
    calls = {str(k): _step(V, rows, _applied(V, k, backend)) for k in sizes}
    medians = _medians(calls, V.device, rounds=7, time_limit=0.03)
    return {k: medians[str(k)] for k in sizes}


def _kernels_are_right(V: Tensor, rows: int, k: int) -> bool:
    """Checks the kernels against the blocks, and warns if they differ: a compiler may be wrong for one GPU."""
    d = len(V)
    if d > LONGEST:
        return False
    if _agrees(V, rows, _applied(V, k, TRITON), _applied(V, k, TORCH)):
        return True
    warnings.warn(
        f"the Triton kernels give another answer than PyTorch for d = {d} here; FASTH_BACKEND=torch does without "
        "them, and `fasth check` writes a report to send",
        RuntimeWarning,
        stacklevel=3,
    )
    return False


def _limits(V: Tensor, k: int) -> tuple[int, int]:
    """Finds up to how many rows the kernels are faster than blocks of k, and from how many rows forming Q is fastest.

    The number of rows is doubled until forming Q is fastest, or the kernels would take too much memory.
    """
    d = len(V)
    eye = torch.eye(d, dtype=V.dtype, device=V.device)
    apply, of_identity = _applied(V, k, TRITON), _applied(V, k, TRITON, of_identity=True)
    kernel_rows, number = 0, 1
    while number <= _MOST_KERNEL_ROWS and number * d * d <= _MOST_STATES:
        calls = {
            "blocks": _step(V, number, _applied(V, k, TORCH)),
            "formed": _step(V, number, lambda x: x @ of_identity(eye)),
        }
        if kernel_rows == number // 2:  # the kernels have been faster so far
            calls["kernels"] = _step(V, number, apply)
        medians = {"kernels": math.inf, **_medians(calls, V.device, rounds=5, time_limit=0.03)}
        if medians["formed"] < min(medians["kernels"], medians["blocks"]):
            break
        if medians["kernels"] <= medians["blocks"]:
            kernel_rows = number
        number *= 2
    return kernel_rows, number


def _agrees(V: Tensor, rows: int, one: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor]) -> bool:
    """Whether both functions run and give the same output and gradients for the same rows, to rounding."""
    try:
        pairs = list(zip(_step(V, rows, one)(), _step(V, rows, other)(), strict=True))
    except Exception:  # Triton raises errors of its own types
        return False
    limit = 64 * math.sqrt(len(V)) * torch.finfo(torch.float32).eps + 8 * torch.finfo(V.dtype).eps
    return all(torch.dist(a.double(), b.double()) <= limit * b.double().norm() for a, b in pairs)


def _crossover(V: Tensor, k: int, backend: str, by_rule: float) -> int:
    """Finds the number of rows n at which applying costs as much as forming Q: n = m · form / (apply − linear).

    Applying and multiplying by a formed Q are timed with m rows, enough for times proportional to m. The result is
    limited to between d + 1 and four times the rule's number.
    """
    d = len(V)
    m = max(d, 512)
    eye = torch.eye(d, dtype=V.dtype, device=V.device)

    def form() -> object:
        return torch.autograd.grad(functional.first_rows_of(V, d, "triangular", k), V, eye)

    W = V.detach().clone().requires_grad_()
    calls = {
        "apply": _step(V, m, _applied(V, k, backend)),
        "linear": _step(W, m, lambda x: F.linear(x, W)),
        "form": form,
    }
    medians = _medians(calls, V.device, rounds=3, time_limit=0.08)
    saved = medians["apply"] - medians["linear"]
    rows = m * medians["form"] / saved if saved > 0 else math.inf
    return math.ceil(min(max(rows, d + 1), 4 * by_rule))


def _applied(V: Tensor, k: int, backend: str, of_identity: bool = False) -> Callable[[Tensor], Tensor]:
    """Returns the function that applies the reflections of V to rows, in blocks of k on one backend."""

    def apply(x: Tensor) -> Tensor:
        plan = plan_householder(x, V, TRIANGULAR, block_size=k, of_identity=of_identity, backend=backend)
        return Householder.apply(x, V, plan)

    return apply


def _step(V: Tensor, rows: int, function: Callable[[Tensor], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """Returns a training step: the function of Gaussian rows, and the gradients of the rows and of V."""
    generator = torch.Generator().manual_seed(rows)
    x, g = (torch.randn(rows, V.shape[1], generator=generator).to(V.device, V.dtype) for _ in range(2))
    x.requires_grad_()

    def step() -> tuple[Tensor, ...]:
        out = function(x)
        return out, *torch.autograd.grad(out, (x, V), g)

    return step


def _medians(
    calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int, time_limit: float
) -> dict[str, float]:
    timings = timing.compare(calls, device=device, rounds=rounds, min_time=2e-4, time_limit=time_limit)
    return {one.name: one.median for one in timings}
