"""How one call is computed, decided once: the backend, apply or form, the block size, and what is saved for backward.

Nothing else makes these decisions. The results of ``fasth.tune`` on this machine decide if there are any, and a rule
otherwise. A compiled graph should not depend on a file: under ``torch.compile`` the rule always decides.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.jit import is_tracing  # type: ignore[attr-defined]  # missing in torch's types

from fasth import _private
from fasth.reflections import core as compiled
from fasth.reflections import tuning_file
from fasth.reflections.core import backend_setting, core, interpreting
from fasth.reflections.plan import (
    COMPACT,
    COMPOSED,
    CORE,
    FULL,
    SAVE_A,
    SAVE_NOTHING,
    SAVE_T,
    SAVE_Z,
    TORCH,
    TRITON,
    Plan,
)
from fasth.reflections.triton.configurations import BLOCK, LONGEST

_CORE_DTYPES = (torch.float32, torch.float64)
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

MANY_ROWS = 512
WIDEST_BLOCK = 256  # on other devices than the CPU: see ``block_size_by_rule``
MOST_SAVED_ROWS = 8 << 20  # bytes of A, above which reading it from memory takes longer than computing it again
ALWAYS_SAVED = 1 << 18  # numbers that a weight may save whatever its size

# On a GPU, until a measurement replaces them (``fasth tune --device cuda``). The time of the kernels grows with the
# numbers of x, that of blocks hardly does: estimated from the published peaks of three GPUs, they meet near this many.
# Forming Q applies the reflections to as many rows as Q has, and products follow: it pays from three times as many on.
KERNEL_NUMBERS = 1 << 18
FORMING_ROWS = 3


class Where(NamedTuple):
    """Everything besides sizes that a plan depends on: ``device`` is a type, ``threads`` the number of CPU threads."""

    backend: str = CORE
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    threads: int = 1
    exporting: bool = False


def plan_householder(
    x: Tensor,
    V: Tensor,
    form: int,
    transpose: bool = False,
    block_size: int | None = None,
    *,
    of_identity: bool = False,
    internal: bool = False,
    backend: str | None = None,
) -> Plan:
    """The plan for x Qᵀ, or x Q if ``transpose``.  x: (*, d) with V: (r, d), or x: (B, m, d) with V: (B, r, d).

    Args:
        of_identity: x are the first rows of the identity, to form Qᵀ.
        internal: the caller gets something made from the output, so that the output itself may be saved.
        backend: for ``fasth.tune``, which compares them. The reflections are then applied, for any number of rows.
    """
    r, d = V.shape[-2:]
    batch = V.shape[0] if V.ndim == 3 else None
    rows = x.numel() // d if batch is None else x.shape[1]
    needs = (x.requires_grad, V.requires_grad) if torch.is_grad_enabled() else (False, False)
    make = _householder_plan if is_compiling() else _remembered_householder_plan
    where = _where(V, x, V) if backend is None else _where(V, x, V)._replace(backend=backend)
    options = form, bool(transpose), block_size, of_identity, internal, backend is not None
    return make(where, *options, rows, r, d, batch, needs)


def plan_svd_linear(
    x: Tensor,
    U: Tensor,
    sigma: Tensor | None,
    V: Tensor | None,
    bias: Tensor | None,
    form: int,
    *,
    of_identity: bool = False,
) -> Plan:
    """The plan for x Wᵀ + bias with W: (n, m) = U Σ Vᵀ, tensors as ``functional.svd_linear`` takes them.

    ``of_identity``: x is the identity, to form W, which may be saved itself.
    """
    if V is None:
        n, m = r_V, r_U = U.shape
    else:
        (r_U, n), (r_V, m) = U.shape, V.shape
    k = min(n, m) if sigma is None else sigma.shape[0]
    needs = False, False
    if torch.is_grad_enabled():
        reflectors = U.requires_grad or (V is not None and V.requires_grad)
        needs = reflectors or any(t is not None and t.requires_grad for t in (x, sigma, bias)), reflectors
    make = _svd_plan if is_compiling() else _remembered_svd_plan
    where = _where(U, x, U, sigma, V, bias)
    return make(where, form, V is None, V is U, of_identity, x.numel() // m, n, m, r_U, r_V, k, needs)


def _where(reflectors: Tensor, *tensors: Tensor | None) -> Where:
    backend, device = backend_for(*tensors), "cpu" if reflectors.is_cpu else reflectors.device.type
    threads = torch.get_num_threads() if device == "cpu" and not is_compiling() else 0
    return Where(backend, device, reflectors.dtype, threads, backend == COMPOSED and _private.is_exporting())


def _householder_plan(
    where: Where,
    form: int,
    transpose: bool,
    block_size: int | None,
    of_identity: bool,
    internal: bool,
    fixed: bool,
    rows: int,
    r: int,
    d: int,
    batch: int | None,
    needs: tuple[bool, bool],
) -> Plan:
    """``fixed``: the backend is not to be chosen here."""
    backend, used = where.backend, min(r, d) if form == COMPACT else r
    if batch is None and not (fixed or of_identity or where.exporting):
        if forming_pays(rows, used, d, form != FULL, where):
            return Plan(backend, form, transpose, forms_matrix=True)
    if backend == TRITON and not fixed and not kernels_pay(rows * (batch or 1), r, d, where):
        backend = TORCH
    k = block_size_for(rows, r, d, block_size, where)
    if backend == COMPOSED:  # autograd saves what it needs
        return Plan(backend, form, transpose, k)
    save = SAVE_NOTHING
    if backend == TRITON:
        save = SAVE_T if _kernels_save(rows, r, d, form, needs, where.dtype) else SAVE_NOTHING
    elif needs[1]:
        # V and the output are saved anyway. T and Z take little beside them, and with A, the rows after every block, it
        # is just as much where x has as many rows as a block has reflections.
        blocks = number_of_blocks(r, d, form, k)
        T, Z, A = sizes_of_saved(rows, d, blocks, max(blocks - 1, 0), k)
        # Few reflections are an adapter, beside which every copy of the rows counts: room for Z, and A of few rows.
        room = r * (rows + 2 * d) if 8 * r <= d else (rows + r) * d
        save = _level(T, Z, A, room, where.dtype)
    elif needs[0]:
        save = SAVE_T
    copy_output = needs[1] and not (of_identity or internal)
    return Plan(backend, form, transpose, k, save, copy_output, of_identity)


def _svd_plan(
    where: Where,
    form: int,
    shared: bool,
    symmetric: bool,
    of_identity: bool,
    rows: int,
    n: int,
    m: int,
    r_U: int,
    r_V: int,
    k: int,
    needs: tuple[bool, bool],
) -> Plan:
    """``shared``: one matrix holds the reflectors of both sides. ``needs``: a backward pass, and one of reflectors."""
    if not (of_identity or where.exporting) and forming_svd_pays(rows, n, m, r_U, r_V, k, form != FULL, where):
        return Plan(where.backend, form, forms_matrix=True)
    backend, longest = where.backend, max(n, m)
    if backend == COMPOSED:
        return Plan(backend, form)
    if backend == TRITON and not kernels_pay(rows, max(min(r_U, n), min(r_V, m)), longest, where):
        backend = TORCH
    r = max(min(r_U, n), min(r_V, m))
    block_size = min(default_block_size(r, where, rows), max(r, 1))
    save = SAVE_T if needs[0] else SAVE_NOTHING
    if needs[1]:
        # At most twice x and the reflectors, plus T and small tensors: two products are saved, x Q_V and x Wᵀ.
        blocks = number_of_blocks(r_V, m, form, block_size), number_of_blocks(r_U, n, form, block_size)
        steps = sum(max(count - 1, 0) for count in blocks)
        T, Z, A = sizes_of_saved(rows, longest, sum(blocks), steps, block_size)
        reflectors = n * m if shared else r_U * n + r_V * m
        room = max(2 * (rows * m + reflectors) + T, ALWAYS_SAVED) - rows * (n + m)
        save = max(_level(T, Z, A, room, where.dtype), SAVE_T)
    copy_output = needs[1] and not of_identity
    return Plan(backend, form, False, block_size, save, copy_output, symmetric=symmetric)


# A small step takes little longer than making a plan.
_remembered_householder_plan = functools.lru_cache(4096)(_householder_plan)
_remembered_svd_plan = functools.lru_cache(4096)(_svd_plan)


@functools.cache
def tuning() -> dict[tuple[str, int, str, int], tuning_file.Entry]:
    """The entries that ``fasth.tune`` wrote on this machine, by (device, threads, dtype, d)."""
    return tuning_file.entries_here()


def forget_plans() -> None:
    """Clears all plans. Call it after a change of the file of ``fasth.tune``."""
    for memo in (_remembered_householder_plan, _remembered_svd_plan, tuning):
        memo.cache_clear()


# The backend.


def backend_for(*tensors: Tensor | None) -> str:
    """The backend that takes all of these tensors, COMPOSED while a transform or an export is active.

    The core takes unwrapped float32 and float64 CPU tensors, the kernels unwrapped float32, bfloat16 and float16
    tensors of a CUDA or HIP device. Under ``torch.compile`` both are called by operators, but not in an exported
    program, which should run without fasth.
    """
    if is_compiling():
        if _private.is_exporting() or _private.transform_active():
            return COMPOSED
        return _backend_in_graph([t for t in tensors if t is not None])
    if _private.functorch_active() or _private.forward_level() >= 0:
        return COMPOSED
    if is_tracing() or (_private.dispatch_modes() and not _counting):  # a trace would not record the core or a kernel
        return TORCH
    module = compiled._core
    if isinstance(module, ModuleType):
        if module.accepts(*tensors):
            return CORE
    elif module is not None:
        raise module  # an error in the settings
    return TRITON if _kernels_take([t for t in tensors if t is not None]) else TORCH


def _backend_in_graph(tensors: Sequence[Tensor]) -> str:
    """The backend for tensors that are being traced, and have no memory."""
    first = tensors[0]
    if any(type(t) not in (Tensor, torch.nn.Parameter) or t.dtype != first.dtype for t in tensors):
        return TORCH
    if core() is not None and first.dtype in _CORE_DTYPES and all(t.is_cpu for t in tensors):
        return CORE
    return TRITON if _kernels_serve(first.device, first.dtype) else TORCH


def _kernels_take(tensors: Sequence[Tensor]) -> bool:
    first = tensors[0]
    if not _kernels_serve(first.device, first.dtype):
        return False
    if any(type(t) not in (Tensor, torch.nn.Parameter) or t.is_neg() for t in tensors):  # is_neg: stored negated
        return False
    if any(t.dtype != first.dtype or t.device != first.device for t in tensors):
        return False
    return _counting or _forced or _can_launch(first.device)


def _kernels_serve(device: torch.device, dtype: torch.dtype) -> bool:
    return (device.type == _kernels_on or (_counting and device.type == "meta")) and dtype in _KERNEL_DTYPES


@functools.cache
def _can_launch(device: torch.device) -> bool:
    """Whether a first launch succeeds. Triton needs a C compiler for it, which not every machine with a GPU has."""
    try:
        from fasth.reflections.triton import launch

        launch.factored(torch.ones(1, 1, device=device), FULL)
    except Exception as error:
        warnings.warn(
            f"the Triton kernels cannot be launched, and PyTorch's products are used ({error!r}); "
            "with FASTH_BACKEND=torch they are not tried",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def kernels_setting() -> str:
    """The device type of the Triton kernels: "cuda", "cpu" if they are interpreted, "off", or "not installed"."""
    setting = backend_setting()
    if setting not in ("auto", "triton"):
        return "off"
    if find_spec("triton") is None:
        return "not installed"
    return "cpu" if setting == "triton" and interpreting() else "cuda"


def kernels_on() -> str:
    """The device type on which the Triton kernels run in this process: "cuda", "cpu", or none."""
    return _kernels_on


@contextmanager
def counting_kernels() -> Iterator[None]:
    """Context in which the kernels take tensors of the meta device, where nothing runs, to count launches."""
    global _counting
    before, _counting = _counting, True
    forget_plans()
    try:
        yield
    finally:
        _counting = before
        forget_plans()


# Settled here, and not at the first call, which torch.compile may be tracing. What is wrong with the settings is an
# error at that call: ``core`` raises it.
_counting = False
try:
    core()
    _kernels_on = kernels_setting()
    _forced = backend_setting() == "triton"
except (ImportError, ValueError):
    _kernels_on, _forced = "off", False


# Block sizes.


def default_block_size(r: int, where: Where, rows: int = 32) -> int:
    """The block size for r reflections of so many rows. Exported programs have few wide blocks, so few operations."""
    if where.exporting:
        return block_size_by_rule(r, on_cpu=False)
    found = _tuned(r, where)
    return block_size_by_rule(r, where.device == "cpu", rows >= MANY_ROWS) if found is None else found.block_size


def block_size_by_rule(r: int, on_cpu: bool = True, many_rows: bool = False) -> int:
    """The block size by a rule: wide enough for fast products, and even, so that 33 reflections are 17 + 16.

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


def block_size_for(rows: int, r: int, d: int, block_size: int | None, where: Where) -> int:
    """``block_size``, or the default, but at most r and d: dependent reflectors make T large, and its rounding."""
    largest = min(r, d)
    return min(block_size or default_block_size(largest, where, rows), max(largest, 1))


def number_of_blocks(r: int, d: int, form: int, block_size: int) -> int:
    """Triangular and compact reflectors beyond the first d are zero."""
    return ((r if form == FULL else min(r, d)) + block_size - 1) // block_size


# Memory.


def sizes_of_saved(rows: int, d: int, blocks: int, steps: int, block_size: int) -> tuple[int, int, int]:
    """The sizes of T, Z and A."""
    K, M, D = padded(block_size), padded(rows), padded(d)
    return blocks * K * K, blocks * M * K, steps * D * M


def padded(size: int) -> int:
    """Sizes of what is saved are multiples of 16, the most numbers in a register."""
    return (size + 15) // 16 * 16


def saved_size(
    rows: int,
    d: int,
    blocks: Sequence[int],
    block_size: int,
    save: int,
    batch: int = 1,
    inner: int = 0,
    output: int = 0,
) -> int:
    """How many numbers the core's saved tensor has: SavedTensor in native/calls.hpp.

    ``blocks``: how many each product of reflections has. ``inner`` and ``output``: the sizes of x Q_V and of the
    output, as far as they are saved.
    """
    steps = sum(max(count - 1, 0) for count in blocks)
    T, Z, A = sizes_of_saved(rows, d, sum(blocks), steps, block_size)
    scales, flag = sum(blocks) * padded(block_size), 16
    levels = {SAVE_T: batch * (T + scales), SAVE_Z: batch * Z, SAVE_A: batch * A + flag}
    return padded(inner) + padded(output) + sum(size for level, size in levels.items() if save >= level)


def _level(T: int, Z: int, A: int, room: int, dtype: torch.dtype) -> int:
    """The highest level of saving that fits into ``room`` numbers. Half precision saves in float32."""
    itemsize = max(dtype.itemsize, 4)
    room = room * dtype.itemsize // itemsize
    if T + Z + A <= room and A * itemsize <= MOST_SAVED_ROWS:
        return SAVE_A
    if T + Z <= room:
        return SAVE_Z
    return SAVE_T if T <= room else SAVE_NOTHING


def _kernels_save(rows: int, r: int, d: int, form: int, needs: tuple[bool, bool], dtype: torch.dtype) -> bool:
    """Whether the kernels save T and the scales for backward: where they fit beside x and V."""
    if not needs[1]:
        return needs[0]
    saved = number_of_blocks(r, d, form, BLOCK) * BLOCK * (BLOCK + 1)
    return saved * 4 <= (rows * d + r * d) * dtype.itemsize


# Apply or form.


def kernels_pay(rows: int, r: int, d: int, where: Where) -> bool:
    """Whether the Triton kernels, which take these rows, are faster than blocks of PyTorch's products."""
    if d > LONGEST or _forced or _counting:
        return d <= LONGEST
    found = _tuned(d, where)
    if found is not None and (r == d or found.kernel_rows == 0):  # 0: they were never faster, or their answer was wrong
        return rows <= found.kernel_rows
    return rows * d <= KERNEL_NUMBERS


def forming_pays(rows: int, r: int, d: int, triangular: bool, where: Where, sides: int = 1) -> bool:
    """Whether forming Q, or U Σ Vᵀ with two sides, and multiplying by it costs less than applying the reflections."""
    on_cpu = where.device == "cpu"
    if on_cpu and rows <= d:
        return False
    found = _tuned(d, where) if r == d else None
    if found is None and not on_cpu:  # a row takes 12·r·d operations by the reflections, and 6·d² by Q
        return 2 * r > d and _forming_pays_on_gpu(rows, d, d)
    by_rule = crossover_by_rule(r, d, triangular, sides)
    if found is None:
        return rows > by_rule
    return rows >= found.crossover * by_rule / crossover_by_rule(d, d, triangular=True)  # the measured crossover


def forming_svd_pays(rows: int, n: int, m: int, r_U: int, r_V: int, k: int, triangular: bool, where: Where) -> bool:
    """Whether forming W = U Σ Vᵀ: (n, m) with k singular values costs less than applying the reflections of U and V.

    What is formed is W, or, where k < min(n, m), the first k columns of U and of V.
    """
    if k == min(n, m):
        return forming_pays(rows, k, max(n, m), triangular, where, 2 if r_U and r_V else 1)
    if where.device != "cpu":
        return _forming_pays_on_gpu(rows, k, max(n, m))
    return rows > thin_crossover_by_rule(n, m, r_U, r_V, k)


def forms_at_once(d: int, k: int, U: Tensor, *others: Tensor | None) -> bool:
    """Whether k columns of matrices of up to d rows are formed by ``formed.py``: where launches take the time.

    That is on a GPU, up to d = 2048, unless the kernels apply the reflections to the identity in nine.
    """
    if U.device.type not in ("cuda", "meta") or d > LONGEST or k == 0:
        return False
    where = _where(U, U, *others)
    if where.backend == TRITON:
        return not kernels_pay(k, k, d, where)
    return where.backend == TORCH


def _forming_pays_on_gpu(rows: int, formed: int, d: int) -> bool:
    """``formed``: the rows of the identity that the reflections are applied to."""
    return rows > FORMING_ROWS * formed and rows * d > KERNEL_NUMBERS


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
    if is_compiling() or not tuning():
        return None
    return tuning().get((where.device, where.threads, str(where.dtype).removeprefix("torch."), d))
