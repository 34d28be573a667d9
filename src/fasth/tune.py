"""``tune``: the best block size, and from how many rows on forming Q pays, measured on this machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fasth import functional, timing
from fasth.reflections import tuning_file
from fasth.reflections.core import core_for
from fasth.reflections.heuristics import MANY_ROWS, block_size_by_rule, crossover_by_rule, even_block_size
from fasth.reflections.library import TRIANGULAR

_GAIN = 0.97  # another block size than the default should be faster by more than noise


@dataclass(frozen=True)
class Tuned:
    """What was found, and what it is worth."""

    entry: tuning_file.Entry
    default_block_size: int
    default_crossover: int
    seconds: float  # of a training step with the block size that was found
    default_seconds: float  # with the default


def tune(d: int, rows: int = 32, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tuned:
    """Finds the fastest block size for d reflections of d dimensions, and from how many rows on forming Q is faster.

    The search of the paper's section 3.3, over sizes up to c√d and some beyond. With the number of threads that torch
    has now. The library uses the result from then on, in this process and in others: it is kept in
    ``FASTH_CACHE_DIR``, or the user's cache folder, and is about speed alone. Under a second for d = 784.

    Args:
        d: at least 2.
        rows: the number of rows to find the block size for.
    """
    if not isinstance(d, int) or isinstance(d, bool) or d < 2:
        raise ValueError(f"`d` should be an int of at least 2; got {d!r}")
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        raise ValueError(f"`rows` should be a positive int; got {rows!r}")
    device = torch.device(device)
    generator = torch.Generator().manual_seed(d)
    V = torch.randn(d, d, generator=generator).triu().to(device, dtype).requires_grad_()
    times = _by_block_size(V, rows)
    default = block_size_by_rule(d, device.type == "cpu", rows >= MANY_ROWS)
    best = min(times, key=lambda k: times[k])
    best = best if times[best] < _GAIN * times[default] else default
    by_rule = {triangular: crossover_by_rule(d, d, triangular) for triangular in (False, True)}
    crossover = _crossover(V, best, by_rule[True])
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
        crossover_full=max(d + 1, math.ceil(crossover * by_rule[False] / by_rule[True])),
    )
    tuning_file.store(entry)
    return Tuned(entry, default, math.ceil(by_rule[True]), times[best], times[default])


def block_sizes(d: int) -> list[int]:
    """Those to try: even splits into blocks of at most 4, 8, 16, 24, … 128, up to about 4√d, and the default."""
    widest = [w for w in (4, 8, 16, 24, 32, 48, 64, 96, 128) if w <= max(32, 4 * math.sqrt(d))]
    return sorted({even_block_size(d, w) for w in widest} | {block_size_by_rule(d)})


def _by_block_size(V: Tensor, rows: int) -> dict[int, float]:
    """Seconds of a training step, by block size."""
    sizes = block_sizes(len(V))
    calls = {str(k): _step(V, rows, _applied(V, k)) for k in sizes}
    medians = _medians(calls, V.device, rounds=7, time_limit=0.03)
    return {k: medians[str(k)] for k in sizes}


def _crossover(V: Tensor, k: int, by_rule: float) -> int:
    """The rows n at which n applied cost as much as Q formed and n multiplied by it: n = m · form / (apply − linear).

    The latter two are timed with m rows, many enough to be proportional to them. Between d and four times the rule's.
    """
    d = len(V)
    m = max(d, 512)
    eye = torch.eye(d, dtype=V.dtype, device=V.device)

    def form() -> object:
        return torch.autograd.grad(functional._first_rows(V, d, TRIANGULAR, k), V, eye)

    W = V.detach().clone().requires_grad_()
    calls = {
        "apply": _step(V, m, _applied(V, k)),
        "linear": _step(W, m, lambda x: F.linear(x, W)),
        "form": form,
    }
    of = _medians(calls, V.device, rounds=3, time_limit=0.08)
    saved = of["apply"] - of["linear"]
    rows = m * of["form"] / saved if saved > 0 else math.inf
    return math.ceil(min(max(rows, d + 1), 4 * by_rule))


def _applied(V: Tensor, k: int) -> Callable[[Tensor], Tensor]:
    return lambda x: functional._apply(x, V, (len(x), *V.shape), TRIANGULAR, False, k, core_for(x, V) is not None)


def _step(V: Tensor, rows: int, function: Callable[[Tensor], Tensor]) -> Callable[[], object]:
    """The function of Gaussian rows, and the gradients of these and of V."""
    generator = torch.Generator().manual_seed(rows)
    x, g = (torch.randn(rows, V.shape[1], generator=generator).to(V.device, V.dtype) for _ in range(2))
    x.requires_grad_()
    return lambda: torch.autograd.grad(function(x), (x, V), g)


def _medians(
    calls: dict[str, Callable[[], object]], device: torch.device, rounds: int, time_limit: float
) -> dict[str, float]:
    timings = timing.compare(calls, device=device, rounds=rounds, min_time=2e-4, time_limit=time_limit)
    return {one.name: one.median for one in timings}
