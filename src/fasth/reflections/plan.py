"""A plan: how one call is computed. ``planner.py`` makes it, and the autograd Functions carry it out."""

from __future__ import annotations

from typing import NamedTuple

import torch

FORMS = ("full", "triangular", "compact")  # how reflectors are stored; the order of Form in native/layout.hpp
FULL, TRIANGULAR, COMPACT = range(len(FORMS))

# The compiled core, the Triton kernels, or blocked.py, each with gradients of our own; or a composition of PyTorch's
# operations, which transforms and exports can follow.
CORE, TRITON, TORCH, COMPOSED = "core", "triton", "torch", "composed"

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# What is saved for backward besides the output; each level includes those before it.
SAVE_NOTHING, SAVE_T, SAVE_Z, SAVE_A = range(4)


class Plan(NamedTuple):
    """How to multiply by a product of reflections, or by U Σ Vᵀ. The autograd Functions carry it out."""

    backend: str
    form: int = FULL
    transpose: bool = False
    block_size: int = 1
    save: int = SAVE_NOTHING
    copy_output: bool = False  # saves a copy of the output, since the caller may change the output in place
    of_identity: bool = False  # x is the first rows of the identity, in x Qᵀ, and gets no gradient
    symmetric: bool = False  # U and V are one tensor, passed once: torch.compile does not take one twice
    forms_matrix: bool = False  # instead of all this, Q or W is formed, and rows are multiplied by it
