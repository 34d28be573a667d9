"""Choices that change speed and memory, and not the result: the block size, whether to form Q, what to save.

What ``fasth.tune`` found on this machine decides, where it was asked, and a rule elsewhere. A compiled graph should not
depend on a file: under ``torch.compile`` it is always the rule.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch.compiler import is_compiling

from fasth.private import is_exporting
from fasth.reflections import gpu_model, tuning_file
from fasth.reflections.backends import kernels_forced
from fasth.reflections.triton.configurations import BLOCK, LONGEST


class Where(NamedTuple):
    """Of what is computed: the type of the device, and the dtype."""

    device: str
    dtype: torch.dtype


CPU = Where("cpu", torch.float32)

MANY_ROWS = 512
WIDEST_BLOCK = 256  # on other devices than the CPU: see ``block_size_by_rule``
MOST_SAVED_ROWS = 8 << 20  # bytes of A, above which reading it from memory takes longer than computing it again
ALWAYS_SAVED = 1 << 18  # numbers that a weight may save whatever its size

# What is saved for backward besides the output; each includes those before it.
SAVE_NOTHING, SAVE_T, SAVE_Z, SAVE_A = range(4)


def default_block_size(r: int, where: Where = CPU, rows: int = 32) -> int:
    """The block size for r reflections of so many rows. Exported programs have few wide blocks, so few operations."""
    if is_exporting():
        return block_size_by_rule(r, on_cpu=False)
    found = _tuned(r, where)
    return block_size_by_rule(r, where.device == "cpu", rows >= MANY_ROWS) if found is None else found.block_size


def block_size_by_rule(r: int, on_cpu: bool = True, many_rows: bool = False) -> int:
    """Wide enough for products to pay, and even: 33 reflections are 17 + 16, not 32 + 1.

    On the CPU many reflections come in wider blocks where there are many rows, beside which the small products of a
    block do not count. On other devices every product in sequence is a launch, so there are only four blocks, as long
    as none is wider than 256: beyond either, nearly parallel reflectors in float32 could cost Q more of its
    orthogonality than LAPACK's tests accept. A block is a power of two times at most 32, to be inverted by halves.
    """
    if on_cpu:
        return even_block_size(r, 64 if r > 1024 and many_rows else 32)
    k = even_block_size(r, min(max(32, -(-r // 4)), WIDEST_BLOCK))
    part = 1 << ((k - 1) // 32).bit_length()
    return -(-k // part) * part


def even_block_size(r: int, widest: int) -> int:
    """The size of blocks that share r reflections evenly, none wider than ``widest``."""
    blocks = max(1, -(-r // widest))
    return max(1, -(-r // blocks))


def block_size_for(rows: int, r: int, d: int, given: int | None, where: Where) -> int:
    """No larger than r, nor than d: reflectors that depend on one another make T large, and its rounding with it."""
    largest = min(r, d)
    return min(given or default_block_size(largest, where, rows), max(largest, 1))


def plan_householder(
    rows: int,
    r: int,
    d: int,
    full: bool,
    block_size: int | None,
    needs: tuple[bool, bool],
    where: Where,
) -> tuple[int, int]:
    """The block size for x: (rows, d) times V: (r, d), and what to save for backward: as much again as x and V.

    V and the output are saved anyway. T and Z take little beside them, and with A, the rows after every block, it is
    just as much where x has as many rows as a block has reflections. ``needs``: whether there is a backward pass of x,
    and of V.
    """
    k = block_size_for(rows, r, d, block_size, where)
    if not needs[1]:
        return k, SAVE_T if needs[0] else SAVE_NOTHING
    blocks = number_of_blocks(r, d, full, k)
    T, Z, A = sizes_of_saved(rows, d, blocks, max(blocks - 1, 0), k)
    return k, _level(T, Z, A, rows * d + r * d, where.dtype)


def plan_svd_linear(
    rows: int,
    n: int,
    m: int,
    r_U: int,
    r_V: int,
    full: bool,
    shared: bool,
    needs: tuple[bool, bool],
    where: Where,
) -> tuple[int, int]:
    """The same for W: (n, m) as U Σ Vᵀ with these numbers of reflectors, or both in one matrix (``shared``).

    Twice as much as x and the reflectors, besides T and what is small: two more products are saved, x Q_V and x Wᵀ.
    ``needs``: whether there is a backward pass, and one of reflectors.
    """
    r = max(min(r_U, n), min(r_V, m))
    k = min(default_block_size(r, where, rows), max(r, 1))
    if not needs[1]:
        return k, SAVE_T if needs[0] else SAVE_NOTHING
    blocks = number_of_blocks(r_V, m, full, k), number_of_blocks(r_U, n, full, k)
    steps = sum(max(count - 1, 0) for count in blocks)
    T, Z, A = sizes_of_saved(rows, max(n, m), sum(blocks), steps, k)
    reflectors = n * m if shared else r_U * n + r_V * m
    room = max(2 * (rows * m + reflectors) + T, ALWAYS_SAVED) - rows * (n + m)
    return k, max(_level(T, Z, A, room, where.dtype), SAVE_T)


def number_of_blocks(r: int, d: int, full: bool, block_size: int) -> int:
    """Of triangular and compact reflectors those beyond d are zero."""
    return ((r if full else min(r, d)) + block_size - 1) // block_size


def sizes_of_saved(rows: int, d: int, blocks: int, steps: int, block_size: int) -> tuple[int, int, int]:
    """How many numbers T, Z and A have."""
    K, M, D = padded(block_size), padded(rows), padded(d)
    return blocks * K * K, blocks * M * K, steps * D * M


def padded(size: int) -> int:
    """Sizes of what is saved are multiples of 16, the most numbers in a register."""
    return (size + 15) // 16 * 16


def _level(T: int, Z: int, A: int, room: int, dtype: torch.dtype) -> int:
    """What fits into the room of so many numbers. Half precision saves in float32."""
    itemsize = max(dtype.itemsize, 4)
    room = room * dtype.itemsize // itemsize
    if T + Z + A <= room and A * itemsize <= MOST_SAVED_ROWS:
        return SAVE_A
    if T + Z <= room:
        return SAVE_Z
    return SAVE_T if T <= room else SAVE_NOTHING


def kernels_pay(rows: int, r: int, d: int, triangular: bool, where: Where) -> bool:
    """Whether the Triton kernels, which take these rows, are faster than blocks of PyTorch's products."""
    if d > LONGEST or kernels_forced():
        return d <= LONGEST
    found = _tuned(d, where)
    if found is not None and (r == d or not found.warps):  # no warps: their answer was wrong
        return rows <= found.kernel_rows
    return rows <= _kernel_rows(r, d, triangular)


def kernels_save(rows: int, r: int, d: int, full: bool, needs: tuple[bool, bool], where: Where) -> bool:
    """Whether they save T and the scales for backward: as ``plan_householder``, where they fit beside x and V."""
    if not needs[1]:
        return needs[0]
    saved = number_of_blocks(r, d, full, BLOCK) * BLOCK * (BLOCK + 1)
    return saved * 4 <= (rows * d + r * d) * where.dtype.itemsize


def tuned_warps(d: int, where: Where) -> int:
    """Of the kernels; 0 where nothing was tuned."""
    found = _tuned(d, where)
    return found.warps if found else 0


# These depend on sizes that are constants in a compiled graph, and not on the number of rows, which is compared with
# the result. There the cost model is always that of one GPU, and nothing is remembered: Dynamo follows no cache.


def _kernel_rows(r: int, d: int, triangular: bool) -> int:
    k = block_size_by_rule(min(r, d), False)
    if is_compiling():
        return gpu_model.kernel_rows(gpu_model.A100, r, d, triangular, k)
    return _remembered_kernel_rows(gpu_model.gpu_here(), r, d, triangular, k)


def _forming_rows(r: int, d: int, triangular: bool, sides: int) -> int:
    k = block_size_by_rule(min(r, d), False)
    if is_compiling():
        return gpu_model.forming_rows(gpu_model.A100, r, d, triangular, k, sides)
    return _remembered_forming_rows(gpu_model.gpu_here(), r, d, triangular, k, sides)


def _thin_forming_rows(n: int, m: int, r_U: int, r_V: int, rank: int, triangular: bool) -> int:
    sides = (min(r_U, n), n), (min(r_V, m), m)
    k = block_size_by_rule(max(r for r, _ in sides), False)
    if is_compiling():
        return gpu_model.thin_forming_rows(gpu_model.A100, sides, rank, triangular, k)
    return _remembered_thin_forming_rows(gpu_model.gpu_here(), sides, rank, triangular, k)


_remembered_kernel_rows = functools.cache(gpu_model.kernel_rows)
_remembered_forming_rows = functools.cache(gpu_model.forming_rows)
_remembered_thin_forming_rows = functools.cache(gpu_model.thin_forming_rows)


def forming_pays(rows: int, r: int, d: int, triangular: bool, where: Where = CPU, sides: int = 1) -> bool:
    """Whether forming Q, or U Σ Vᵀ with two sides, and multiplying by it costs less than applying the reflections."""
    on_cpu = where.device == "cpu"
    if on_cpu and rows <= d:
        return False
    found = _tuned(d, where) if r == d else None
    if found is None and not on_cpu:
        return rows > _forming_rows(r, d, triangular, sides)
    by_rule = crossover_by_rule(r, d, triangular, sides)
    if found is None:
        return rows > by_rule
    crossover = found.crossover if triangular else found.crossover_full
    return rows >= (crossover if sides == 1 else crossover * by_rule / crossover_by_rule(r, d, triangular))


def forming_svd_pays(
    rows: int, n: int, m: int, r_U: int, r_V: int, k: int, triangular: bool, where: Where = CPU
) -> bool:
    """Whether forming W = U Σ Vᵀ: (n, m) with k singular values costs less than applying the reflections of U and V.

    What is formed is W, or, where k < min(n, m), the first k columns of U and of V.
    """
    if k == min(n, m):
        return forming_pays(rows, k, max(n, m), triangular, where, 2 if r_U and r_V else 1)
    if where.device != "cpu":
        return rows > _thin_forming_rows(n, m, r_U, r_V, k, triangular)
    return rows > thin_crossover_by_rule(n, m, r_U, r_V, k)


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
    identity alone. For two sides, more than d rows leave no room to save A, which makes a step longer by a seventh.
    With r = d it pays from 1.7 to 2.3 d rows on, of U Σ Vᵀ from 1.4 d, and later where d is small. ``fasth.tune`` finds
    out for one machine.
    """
    apply = sides * (6 if triangular else 12) * r / d / 0.68
    form = 1.12 * apply * (0.67 if triangular and sides == 1 else 1)
    apply *= 8 / 7 if sides == 2 else 1
    return form * d / (apply - 6) + 8192 / d if apply > 6 else float("inf")


def _tuned(d: int, where: Where) -> tuning_file.Entry | None:
    if is_compiling():
        return None
    table = tuning_file.table()
    dtype = str(where.dtype).removeprefix("torch.")
    threads = torch.get_num_threads() if where.device == "cpu" else 0
    return table.get((where.device, threads, dtype, d)) if table else None
