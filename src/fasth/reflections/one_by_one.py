"""Backward passes that are given many gradients at once.

``torch.autograd.grad(…, is_grads_batched=True)`` and with it ``torch.autograd.functional.jacobian(…, vectorize=True)``
hand a node of the graph a tensor that stands for a batch of gradients, which few operations take. A backward pass of
ours takes them one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Gradients = tuple["Tensor | None", ...]

is_batch: Callable[[Tensor], bool] = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda t: False)

_LEVELS = 64  # of vmap in vmap, the most that PyTorch counts


def one_by_one(backward: Callable[[Any, Tensor], Gradients], ctx: Any, batch: Tensor) -> Gradients:
    """What ``backward(ctx, g)`` returns for each g of the batch, as batches."""
    level, gradients = _unwrapped(batch)
    each = [backward(ctx, g) for g in gradients]
    return tuple(
        None if found[0] is None else torch._add_batch_dim(torch.stack(found), 0, level)
        for found in zip(*each, strict=True)
    )


def _unwrapped(batch: Tensor) -> tuple[int, Tensor]:
    """The level of vmap that made the batch, and its gradients as one tensor. The thread that asks may not know it."""
    for level in range(1, _LEVELS):
        gradients = torch._remove_batch_dim(batch, level, 1, 0)
        if not is_batch(gradients):
            return level, gradients
    raise NotImplementedError("batches of batches of gradients are not supported: use torch.func.vmap and jacrev")
