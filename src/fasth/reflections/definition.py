"""The definition: one reflection at a time. Everything else in fasth is tested against this file."""

from __future__ import annotations

import torch
from torch import Tensor


def householder(x: Tensor, V: Tensor, *, transpose: bool = False, triangular: bool = False) -> Tensor:
    """x Qᵀ with Q = H₁H₂⋯H_r, or x Q if ``transpose``.  x: (*b, m, d), V: (*b, r, d) → (*b, m, d).

    H = I − 2vvᵀ/‖v‖² for each row v of V, and H = I where v = 0. O(r·d) per row of x, r steps in sequence.
    """
    reflectors = V.triu() if triangular else V
    in_order = reflectors.unbind(-2)
    for v in in_order if transpose else reversed(in_order):  # x Qᵀ = x H_r ⋯ H₁: H_r acts first
        v = v.unsqueeze(-2)
        squared_norm = (v * v).sum(-1, keepdim=True)
        safe = torch.where(squared_norm == 0, 1, squared_norm)
        x = x - 2 * (x * v).sum(-1, keepdim=True) / safe * v
    return x
