"""Estimated times on GPUs, to choose between algorithms. Nothing here was measured: no time is to be quoted as speed.

A launch takes its latency, or what its operations take, or its bytes, whichever is most; launches follow one another. A
kernel with fewer programs than there are multiprocessors has that share of the GPU. Three algorithms are compared, for
a training step, the output and both gradients:

- *kernels*: the Triton kernels, each row through all reflections in one program;
- *blocks*: ``blocked.py``, wide blocks by torch's products;
- *forming*: Q by the better of the two, then torch's product by it.

A sweep by tiles of rows on tensor cores is estimated too. It has no kernel: ``docs/gpu.md`` has the figures.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from fasth.reflections.triton.configurations import BLOCK, GROUP, LONGEST, STEP, columns_held


class GPU(NamedTuple):
    """Peaks as published by the manufacturer: float32 operations and bytes of memory a second."""

    name: str
    multiprocessors: int
    operations: float
    bandwidth: float
    tensor_operations: float  # of TF32 tensor cores; 0: it has none


RTX_2080_TI = GPU("RTX 2080 Ti", 68, 13.4e12, 616e9, 0.0)
A100 = GPU("A100", 108, 19.5e12, 1555e9, 156e12)
H100 = GPU("H100", 132, 67e12, 3350e9, 495e12)
GPUS = (RTX_2080_TI, A100, H100)

# How many programs of the sweep share a multiprocessor, by the columns they hold: what their registers leave room for.
RESIDENT = {64: 16, 128: 12, 256: 6, 512: 4, 1024: 1, 2048: 1}

MOST_STATES = 1 << 28  # bytes that the kernels may take for a moment in a backward pass
LATENCY = 5e-6  # seconds of a launch that does next to nothing
SEQUENTIAL_STEP = 0.7e-6  # of a step of the sweep: a load from the L2 cache, a sum over all warps, a small product
SEQUENTIAL_TILE = 0.4e-6  # of a product of two tiles that are read from the L2 cache
CACHE = 3.0  # how many times the memory's bandwidth the L2 cache has
REACHED = 0.7  # the share of a peak that large products reach
REACHED_BY_BLOCKS = 0.5  # that those of a block reach, a few hundred columns wide
REACHED_BY_TILES = 0.3  # that products of tiles of 32 reach


def launch(gpu: GPU, operations: float, moved: float, programs: float = math.inf, cached: bool = False) -> float:
    """Seconds of one launch that moves so many bytes, to and from memory or the L2 cache."""
    share = min(1.0, max(programs, 1) / gpu.multiprocessors)
    bandwidth = gpu.bandwidth * (CACHE if cached else 1.0)
    return max(LATENCY, operations / (gpu.operations * share * REACHED), moved / (bandwidth * share))


def kernels(gpu: GPU, rows: int, r: int, d: int, triangular: bool) -> float:
    """Four launches: T, the sweep of the rows; the sweep of g and the output, the gradient of V."""
    if d > LONGEST or state_bytes(rows, r, d) > MOST_STATES:
        return math.inf
    stored = r * d * (0.5 if triangular else 1.0)
    factors = launch(gpu, 2 * BLOCK * stored, 8 * stored, r / BLOCK)
    gradient = launch(gpu, 8 * rows * stored, 2 * state_bytes(rows, r, d) + 8 * stored)
    return factors + sweep(gpu, rows, r, d, stored) + sweep(gpu, 2 * rows, r, d, stored) + gradient


def state_bytes(rows: int, r: int, d: int) -> float:
    """Of g and the output before every group of reflections, which the kernels write in the backward pass."""
    return 4 * r / GROUP * 2 * rows * d


def sweep(gpu: GPU, rows: int, r: int, d: int, stored: float) -> float:
    """Each program reads all reflectors, from the L2 cache, and takes their steps one after another."""
    waves = math.ceil(rows / (gpu.multiprocessors * RESIDENT[max(64, columns_held(d))]))
    return max(launch(gpu, 4 * rows * r * d, 4 * rows * stored, rows, cached=True), waves * r / STEP * SEQUENTIAL_STEP)


def blocks(gpu: GPU, rows: int, r: int, d: int, triangular: bool, k: int) -> float:
    """As many launches as section 11 of ``reflections/README.md`` counts for n blocks of k, one after another."""
    n, halvings = -(-r // k), ((k - 1) // 32).bit_length()
    launches = (13 if triangular else 9) * n + 6 * halvings + 38
    work = 12 * rows * r * d * (0.5 if triangular else 1.0) + 4 * k * r * d
    return launches * LATENCY + work / (gpu.operations * REACHED_BY_BLOCKS)


def multiplying(gpu: GPU, rows: int, n: int, m: int) -> float:
    """By a formed matrix: three products, of the rows and of both gradients."""
    return 3 * launch(gpu, 2 * rows * n * m, 4 * (rows * (n + m) + n * m))


def tiles(gpu: GPU, rows: int, r: int, d: int, triangular: bool, side: int = 32) -> float:
    """A sweep by square tiles of rows and columns, in 3×TF32 where there are tensor cores."""
    rate = max(gpu.operations, gpu.tensor_operations / 3) * REACHED_BY_TILES
    share = min(1.0, rows / side / gpu.multiprocessors)
    stored = r * d * (0.5 if triangular else 1.0)
    in_sequence = stored / side**2 * SEQUENTIAL_TILE
    gradient = launch(gpu, 8 * rows * stored, 2 * state_bytes(rows, r, d) + 8 * stored)
    sweeps = (max(in_sequence, 4 * number * stored / (rate * share)) for number in (rows, 2 * rows))
    return 2 * LATENCY + sum(sweeps) + gradient


def applying(gpu: GPU, rows: int, r: int, d: int, triangular: bool, k: int) -> float:
    """By the kernels or by blocks of k, whichever takes less."""
    return min(kernels(gpu, rows, r, d, triangular), blocks(gpu, rows, r, d, triangular, k))


def kernel_rows(gpu: GPU, r: int, d: int, triangular: bool, k: int) -> int:
    """The most rows for which the kernels take less than the blocks; 0 where they never do."""
    return _last(lambda rows: kernels(gpu, rows, r, d, triangular) <= blocks(gpu, rows, r, d, triangular, k))


def forming_rows(gpu: GPU, r: int, d: int, triangular: bool, k: int, sides: int = 1) -> int:
    """The most rows for which applying the reflections of one side, or of both, takes less than forming the matrix."""
    formed = sides * applying(gpu, d, r, d, triangular, k)
    return _last(lambda rows: sides * applying(gpu, rows, r, d, triangular, k) <= formed + multiplying(gpu, rows, d, d))


def thin_forming_rows(gpu: GPU, sides: tuple[tuple[int, int], ...], rank: int, triangular: bool, k: int) -> int:
    """The same for the first columns of each side, as many as the rank, of sides with r reflections of d columns."""

    def apply(rows: int) -> float:
        return sum(applying(gpu, rows, r, d, triangular, k) for r, d in sides if r)

    formed = apply(rank)
    return _last(lambda rows: apply(rows) <= formed + sum(multiplying(gpu, rows, rank, d) for _, d in sides))


def _last(holds: Callable[[int], bool]) -> int:
    """The last of 1, 2, 3, 4, 6, 8, 12, … up to which it holds; at most a million."""
    last = 0
    for exponent in range(20):
        for rows in (1 << exponent, 3 << exponent >> 1):
            if rows > last and not holds(rows):
                return last
            last = rows
    return last


@functools.cache
def gpu_here() -> GPU:
    """The published GPU that is most like the one of this machine, or, where there is none, like most."""
    if not torch.cuda.is_available():
        return A100
    if torch.version.hip or torch.cuda.get_device_capability() >= (9, 0):
        return H100
    return A100 if torch.cuda.get_device_capability() >= (8, 0) else RTX_2080_TI
