"""How many reflections make a block."""

from __future__ import annotations


def default_block_size(r: int) -> int:
    """Wide enough for products to pay, and even: 33 reflections are 17 + 16, not 32 + 1."""
    widest = 32 if r <= 1024 else 64
    blocks = max(1, -(-r // widest))
    return max(1, -(-r // blocks))
