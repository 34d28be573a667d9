"""Choices that change the speed and not the result: how many reflections make a block, and whether to form Q."""

from __future__ import annotations

import functools

import torch


@functools.cache
def default_block_size(r: int) -> int:
    """Wide enough for products to pay, and even: 33 reflections are 17 + 16, not 32 + 1."""
    widest = 32 if r <= 1024 else 64
    blocks = max(1, -(-r // widest))
    return max(1, -(-r // blocks))


def materialising_pays(rows: int, r: int, d: int, triangular: bool) -> bool:
    """Whether forming Q and multiplying by it costs less than applying the reflections to so many rows.

    In units of d² operations per row, a training step by a formed Q takes 6. Applying r reflections takes 12 r/d, half
    of that if triangular, in products that were measured to run at 40 % of the speed. Forming Q is applying them to d
    rows, at half as much again, since the states of so many rows are not kept. With r = d it pays from 2 d rows or so.
    """
    if torch.compiler.is_compiling() or rows <= d:
        return False  # a compiled graph should not depend on the number of rows
    apply = (6 if triangular else 12) * r / d / 0.4
    return rows * (apply - 6) > 1.5 * apply * d
