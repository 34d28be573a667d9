"""The sizes that the kernels are compiled with. Each compiles without spills: ``tests/test_kernels_compiled.py``."""

from __future__ import annotations

from typing import NamedTuple

# A fused multiply-add rounds once, a product and a sum round twice. The compiler fuses differently for threads that
# hold copies of one number, so the copies would differ, and PTX does not define which copy is stored.
FUSE = False

BLOCK = 16  # reflections with one T; tl.dot takes no less, and IEEE products of 64 spill
GROUP = 32  # reflections whose gradient one program computes
LONGEST = 2048  # numbers in a row that one program holds

DEFAULT_REGISTERS = 128  # limit for a thread on NVIDIA's GPUs; without one their assembler spills a few
FACTORS_WARPS = 4
GRADIENT_WARPS = 8  # 4 spill on sm_75
SUMS_WARPS = 4


class Sweep(NamedTuple):
    """Compile-time parameters of the sweep."""

    warps: int
    step: int = 8  # reflections that are loaded at a time; 16 go through shared memory
    stages: int = 2  # of the loads
    registers: int = DEFAULT_REGISTERS


# By the number of columns, rounded up to a power of two. 8 reflections of 1024 numbers or more spill in two stages.
SWEEPS = {
    16: Sweep(1),
    32: Sweep(1),
    64: Sweep(1),
    128: Sweep(2, registers=168),
    256: Sweep(4),
    512: Sweep(4, registers=168),
    1024: Sweep(8, step=4, registers=168),
    2048: Sweep(16, step=4),
}
# For reflectors that are columns of a matrix, where 8 of them fill a sector of memory and 4 would use half of it.
SWEEPS_OF_COLUMNS = {1024: Sweep(8, stages=1, registers=255), 2048: Sweep(16)}

LARGEST_STATE = 256  # numbers in a state of a recurrence
SEQUENCES = 16  # sequences that one program takes through all times
STATE_SLICE = 16  # numbers of a state that are multiplied at a time; 32 spill
STATE_TILE = 128  # numbers of the next state that are computed at a time; 256 compile for minutes
STATE_WARPS = {16: 4, 32: 4, 64: 4, 128: 8}
STATE_REGISTERS = 192  # with 168 a few spill on sm_90


def sweep_for(d: int, row_stride: int) -> Sweep:
    """The configuration for reflectors of d numbers that are ``row_stride`` numbers apart."""
    D = columns_held(d)
    return SWEEPS_OF_COLUMNS.get(D, SWEEPS[D]) if row_stride == 1 else SWEEPS[D]


def columns_held(d: int) -> int:
    """The power of two that d columns are rounded up to."""
    return max(16, 1 << (d - 1).bit_length())


def chunk(d: int) -> int:
    """Number of columns that ``factors``, ``gradient`` and ``sums_over_rows`` process at a time."""
    return min(32, columns_held(d))
