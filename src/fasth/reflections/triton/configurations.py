"""The sizes that the kernels are compiled with. Each compiles without spills: ``tests/test_kernels_compiled.py``."""

from __future__ import annotations

# A fused multiply-add rounds once, a product and a sum round twice. The compiler fuses differently for threads that
# hold copies of one number, so the copies would differ, and PTX does not define which copy is stored.
FUSE = False

BLOCK = 16  # reflections with one T; tl.dot takes no less, and IEEE products of 64 spill
STEP = 8  # reflections in a step of the sweep; with 16 and 8 warps all of Y goes through shared memory
GROUP = 32  # reflections whose gradient one program computes
LONGEST = 2048  # numbers in a row that one program holds

# Warps of the sweep by the number of columns, rounded up to a power of two.
SWEEP_WARPS = {16: 1, 32: 1, 64: 1, 128: 2, 256: 4, 512: 4, 1024: 8, 2048: 16}
# Limit of registers for a thread of the sweep on NVIDIA's GPUs. Without a limit their assembler spills a few.
SWEEP_REGISTERS = {128: 168, 1024: 255}
SWEEP_STAGES = {1024: 1}  # of its loads; with 2, rows of 1024 numbers spill
DEFAULT_REGISTERS = 128
FACTORS_WARPS = 4
GRADIENT_WARPS = 8  # 4 spill on sm_75
SUMS_WARPS = 4

LARGEST_STATE = 256  # numbers in a state of a recurrence
SEQUENCES = 16  # sequences that one program takes through all times
STATE_SLICE = 16  # numbers of a state that are multiplied at a time; 32 spill
STATE_TILE = 128  # numbers of the next state that are computed at a time; 256 compile for minutes
STATE_WARPS = {16: 4, 32: 4, 64: 4, 128: 8}
STATE_REGISTERS = 168


def columns_held(d: int) -> int:
    """The power of two that d columns are rounded up to."""
    return max(16, 1 << (d - 1).bit_length())


def chunk(d: int) -> int:
    """Number of columns that ``factors``, ``gradient`` and ``sums_over_rows`` process at a time."""
    return min(32, columns_held(d))
