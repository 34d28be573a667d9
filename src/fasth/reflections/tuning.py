"""Choices that change the speed and not the result: how many reflections make a block, and whether to form Q.

What ``fasth.tune`` found on this machine decides, where it was asked, and a rule elsewhere. A compiled graph should not
depend on a file or on the number of rows: under ``torch.compile`` it is always the rule.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fasth.reflections import tuned

MANY_ROWS = 512


def default_block_size(r: int, like: Tensor | None = None, rows: int = 32) -> int:
    """The block size for r reflections of so many rows.

    Args:
        like: a tensor with the device and dtype of the work; float32 on the CPU if left out.
    """
    on_cpu = like is None or like.is_cpu
    if torch.compiler.is_compiling():
        return block_size_by_rule(r, on_cpu)
    found = _tuned(r, like)
    return block_size_by_rule(r, on_cpu, rows >= MANY_ROWS) if found is None else found.block_size


def block_size_by_rule(r: int, on_cpu: bool = True, many_rows: bool = False) -> int:
    """Wide enough for products to pay, and even: 33 reflections are 17 + 16, not 32 + 1.

    Many reflections come in wider blocks where there are many rows, beside which the small products of a block do not
    count, and on other devices, where every product in sequence is a launch.
    """
    return even_block_size(r, 64 if r > 1024 and (many_rows or not on_cpu) else 32)


def even_block_size(r: int, widest: int) -> int:
    """The size of blocks that share r reflections evenly, none wider than ``widest``."""
    blocks = max(1, -(-r // widest))
    return max(1, -(-r // blocks))


def materialising_pays(rows: int, r: int, d: int, triangular: bool, like: Tensor | None = None, sides: int = 1) -> bool:
    """Whether forming Q, or U Σ Vᵀ with two sides, and multiplying by it costs less than applying the reflections."""
    if torch.compiler.is_compiling() or rows <= d:
        return False  # a compiled graph should not depend on the number of rows
    found = _tuned(d, like) if r == d else None
    by_rule = crossover_by_rule(r, d, triangular, sides)
    if found is None:
        return rows > by_rule
    crossover = found.crossover if triangular else found.crossover_full
    return rows >= (crossover if sides == 1 else crossover * by_rule / crossover_by_rule(r, d, triangular))


# The same for eager work on the CPU, and remembered, since a small step takes little longer than asking. `threads` and
# `changes`, those of the table, are what the answers depend on besides.


@functools.lru_cache(4096)
def block_size_or_form(
    rows: int, r: int, d: int, triangular: bool, dtype: torch.dtype, threads: int, changes: int
) -> int | None:
    """The block size to apply r reflections with, or None where forming Q costs less."""
    like = torch.empty(0, dtype=dtype, device="cpu")
    return None if materialising_pays(rows, r, d, triangular, like) else default_block_size(min(r, d), like, rows)


@functools.lru_cache(4096)
def block_sizes_or_form(
    rows: int,
    n: int,
    m: int,
    r_U: int,
    r_V: int,
    k: int,
    triangular: bool,
    dtype: torch.dtype,
    threads: int,
    changes: int,
) -> tuple[int, int] | None:
    """Those of U and V to apply W = U Σ Vᵀ: (n, m) with, or None where forming W, or its thin factors, costs less."""
    like = torch.empty(0, dtype=dtype, device="cpu")
    if forming_svd_pays(rows, n, m, r_U, r_V, k, triangular, like):
        return None
    return default_block_size(min(r_U, n), like, rows), default_block_size(min(r_V, m), like, rows)


def sides_of(r_U: int, r_V: int) -> int:
    """How many sides of U Σ Vᵀ have reflections."""
    return 2 if r_U and r_V else 1


def forming_svd_pays(
    rows: int, n: int, m: int, r_U: int, r_V: int, k: int, triangular: bool, like: Tensor | None = None
) -> bool:
    """Whether forming W = U Σ Vᵀ: (n, m) with k singular values costs less than applying the reflections of U and V.

    What is formed is W, or, where k < min(n, m), the first k columns of U and of V.
    """
    if k == min(n, m):
        return materialising_pays(rows, k, max(n, m), triangular, like, sides_of(r_U, r_V))
    return not torch.compiler.is_compiling() and rows > thin_crossover_by_rule(n, m, r_U, r_V, k)


def thin_crossover_by_rule(n: int, m: int, r_U: int, r_V: int, k: int) -> float:
    """The number of rows above which forming the first k columns of U: (n, n) and V: (m, m) pays.

    A training step takes 12·(r_U·n + r_V·m) operations per row by the reflections and 6·k·(n + m) by the columns.
    Forming these is applying the reflections to k rows, and six more calls, which take as long as 9e6 operations:
    measured on one thread of an AMD EPYC, where it pays from 210 rows on for (n, m, k) = (256, 256, 16), 140 for
    (256, 784, 28), 70 for (1024, 1024, 16), 130 for (1024, 1024, 64) and 200 for (512, 512, 128).
    """
    # Where one matrix holds both sides, it has rows for more reflectors than there are.
    apply, multiply = 12 * (min(r_U, n) * n + min(r_V, m) * m), 6 * k * (n + m)
    return (k * apply + 9e6) / (apply - multiply) if apply > multiply else float("inf")


def crossover_by_rule(r: int, d: int, triangular: bool, sides: int = 1) -> float:
    """The number of rows above which forming Q, or U Σ Vᵀ with two sides, pays.

    In units of d² operations per row, a training step by a formed matrix takes 6. Applying r reflections takes 12 r/d,
    half of that if triangular, in products that run at 68 % of the speed: 57 % was measured on an Intel Xeon, 80 % and
    more on an AMD EPYC, and with what lies between neither loses more than a sixth. Forming Q is applying them to d
    rows, at a little more, since it is an operation besides; and less if they are triangular, which leave rows of the
    identity alone. For two sides, more than d rows leave no room to keep Z, which makes a step longer by a seventh.
    With r = d it pays from 1.7 to 2.3 d rows on, of U Σ Vᵀ from 1.4 d, and later where d is small. ``fasth.tune`` finds
    out for one machine.
    """
    apply = sides * (6 if triangular else 12) * r / d / 0.68
    form = 1.12 * apply * (0.67 if triangular and sides == 1 else 1)
    apply *= 8 / 7 if sides == 2 else 1
    return form * d / (apply - 6) + 8192 / d if apply > 6 else float("inf")


def _tuned(d: int, like: Tensor | None) -> tuned.Entry | None:
    table = tuned.table()
    if not table:
        return None
    device, dtype = ("cpu", "float32") if like is None else (like.device.type, str(like.dtype).removeprefix("torch."))
    return table.get((device, torch.get_num_threads(), dtype, d))
