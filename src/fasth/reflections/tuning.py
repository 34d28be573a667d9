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

    In units of d² operations per row, a training step by a formed Q takes 6, and applying r reflections 12 r/d, or half
    of that if triangular, at about ⅔ of the speed. Forming Q is applying them to d rows, with more to compute again on
    the way back, where the states are not kept.
    """
    if torch.compiler.is_compiling() or rows <= d:
        return False  # a compiled graph should not depend on the number of rows
    apply = 1.5 * (6 if triangular else 12) * r / d
    form = 1.5 * (8 if triangular else 16) * r / d * d
    return rows * (apply - 6) > form
