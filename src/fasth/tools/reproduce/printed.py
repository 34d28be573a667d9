"""FastH as the paper prints it, line by line and in its notation: columns, P = I − 2WYᵀ. Read it beside the paper.

``baselines.fasth`` is the same algorithm with batched products for the paper's loops "in parallel". Here each of these
is a sequential loop in Python.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def fasth(x: Tensor, V: Tensor, k: int | None = None) -> Tensor:
    """x Qᵀ by Algorithms 1 and 2.  x: (m, d), V: (r, d) → (m, d).  k: reflections in a block, m unless given."""
    return _FastH.apply(x.mT, V.mT, k or max(1, x.shape[0])).mT


class _FastH(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, X: Tensor, V: Tensor, k: int) -> Tensor:
        """Algorithm 1.  X: (d, m), V: (d, r) with a Householder vector in each column."""
        blocks = V.split(k, dim=1)
        P = [_lemma_1(block) for block in blocks]  # step 1
        A = [X]
        for W, Y in reversed(P):  # step 2
            A.insert(0, A[0] - 2 * W @ (Y.mT @ A[0]))
        ctx.blocks, ctx.P, ctx.A = blocks, P, A[1:]
        ctx.save_for_backward(A[0])
        return A[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """Algorithm 2."""
        G = [gradient]
        for W, Y in ctx.P:  # step 1
            G.append(G[-1] - 2 * Y @ (W.mT @ G[-1]))
        dV = []
        A = [*ctx.saved_tensors, *ctx.A]
        for block, A_hat, G_hat in zip(ctx.blocks, A, G, strict=False):  # step 2
            for v in block.split(1, dim=1):
                A_next = _reflected(v, A_hat)
                dV.append(_gradient_of_v(v, A_next, G_hat))
                A_hat, G_hat = A_next, _reflected(v, G_hat)
        return G[-1], torch.cat(dV, dim=1), None


def _lemma_1(V: Tensor) -> tuple[Tensor, Tensor]:
    """Returns W and Y, both (d, k), with I − 2WYᵀ = H₁⋯H_k, by one Householder multiplication after another."""
    Y = torch.nn.functional.normalize(V, dim=0, eps=torch.finfo(V.dtype).tiny)
    W = Y[:, :1]
    for j in range(1, Y.shape[1]):
        y = Y[:, j : j + 1]
        W = torch.cat((W, y - 2 * W @ (Y[:, :j].mT @ y)), dim=1)
    return W, Y


def _reflected(v: Tensor, A: Tensor) -> Tensor:
    """HA, which is HᵀA: equation (A_hat)."""
    return A - _scale(v) * v @ (v.mT @ A)


def _gradient_of_v(v: Tensor, A: Tensor, G: Tensor) -> Tensor:
    """Equation (back_v), with a column of A and of G for each member l of the mini-batch."""
    a, g, scale = v.mT @ A, v.mT @ G, _scale(v)
    return -scale * (G @ a.mT + A @ g.mT - scale * (a @ g.mT) * v)


def _scale(v: Tensor) -> Tensor:
    """2/‖v‖², or 0 for a zero reflector, which is the identity."""
    square = v.mT @ v
    return torch.where(square == 0, 0, 2 / square)
