"""The algorithms that the paper compares, as it describes them, each a differentiable function of x: (m, d) and V.

The paper's vectors are columns and ours are rows, so its X, A and ∂L/∂A appear transposed here. Its W and Y have a
reflector in each column and ours in each row. Reflectors are scaled to the length √2 first: then H = I − uuᵀ, without
the paper's 2/‖v‖². All Householder algorithms return x Qᵀ with Q = H₁⋯H_r.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def sequential(x: Tensor, V: Tensor) -> Tensor:
    """x Qᵀ, one reflection after another.  x: (m, d), V: (r, d) → (m, d).  O(r·d·m), 2r steps in sequence.

    The sequential algorithm of Zhang et al. 2018: section 2.2, "Multiplication", of the paper.
    """
    return _Sequential.apply(x, V)


def parallel(x: Tensor, V: Tensor) -> Tensor:
    """x Qᵀ, all r reflections as one block, Q = I − Uᵀ T U.  O(r²·d): cubic in d, and all of it products and one solve.

    The parallel algorithm of Zhang et al. 2018: section 2.2, "Multiplication", of the paper.
    """
    return _Parallel.apply(x, V)


def fasth(x: Tensor, V: Tensor, k: int | None = None) -> Tensor:
    """x Qᵀ by blocks of k reflections.  O(r·d·(k + m)) with O(r/k + k) steps in sequence.

    The paper's own: Algorithms 1 and 2, with the block size k of section 3.3, which is m, the number of rows, unless
    given. Where k does not divide r, zero reflectors fill the last block.
    """
    return _FastH.apply(x, V, max(1, min(k or x.shape[0], V.shape[0])))


def fasthpp(x: Tensor, V: Tensor, width: int | None = 32) -> Tensor:
    """x Qᵀ by blocks that are made by merging pairs.  O(r·d·(width + m)), O(r/width + log width) steps in sequence.

    FastH++, which the authors added to their code after the paper. Two neighbours I + WᵀY, as the paper's Lemma 1 has
    them but for the sign, multiply to one of twice the width:

        (I + W₁ᵀY₁)(I + W₂ᵀY₂) = I + W₁ᵀY₁ + W₂'ᵀY₂   with   W₂' = W₂ + (W₂Y₁ᵀ)W₁

    From single reflections, W = −Y, all pairs of a level merge as one batch, until blocks are ``width`` wide: a power
    of two, 16 in the authors' code, where 32 is a little faster on a CPU; None merges everything. Zero reflectors fill
    the last block. The authors leave derivatives to autograd; the same ones written out take a tenth less time.
    """
    levels = (min(width or len(V), len(V)) - 1).bit_length()
    return _FastHpp.apply(x, V, levels)


def exponential(x: Tensor, V: Tensor) -> Tensor:
    """x φ(V)ᵀ with φ(V) = exp(A), A the skew-symmetric matrix of V: (d, d).  O(d³).

    Supplement, "Comparing Running Time".
    """
    return F.linear(x, torch.linalg.matrix_exp(skew(V)))


def cayley(x: Tensor, V: Tensor) -> Tensor:
    """x φ(V)ᵀ with φ(V) = (I − A)(I + A)⁻¹, A the skew-symmetric matrix of V: (d, d).  O(d³).

    Supplement, "Comparing Running Time"; by one solve as in Table 1, since the two factors commute.
    """
    A = skew(V)
    I = torch.eye(len(A), dtype=A.dtype, device=A.device)
    return F.linear(x, torch.linalg.solve(I + A, I - A))


def skew(V: Tensor) -> Tensor:
    """A = striu(V) − striu(V)ᵀ, the argument of the exponential and the Cayley map."""
    upper = V.triu(1)
    return upper - upper.mT


def _scaled(V: Tensor) -> tuple[Tensor, Tensor]:
    """Scales reflectors to length √2. Returns them and the scales, (r, 1). Zero reflectors stay zero."""
    length = torch.linalg.vector_norm(V, dim=-1, keepdim=True)
    zero = length == 0
    scale = torch.where(zero, 0, math.sqrt(2) / torch.where(zero, 1, length))
    return V * scale, scale


class _Sequential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, V: Tensor) -> Tensor:
        U, scale = _scaled(V)
        A = x.clone()
        for u in reversed(U.unbind()):
            A.addr_(A @ u, u, alpha=-1)
        ctx.save_for_backward(A, U, scale)
        return A

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        """Eq. (A_hat) and (back_v). The states are recomputed from the output, so none is saved.

        With s = Âⱼu and t = gu, (back_v) is Σ sₗ g'ₗ − tₗ aₗ, where a = Âⱼ₊₁ = Âⱼ − suᵀ and g' = g − tuᵀ are the
        reflections of Âⱼ and g: the first term of (back_v) has g, and its third turns g into g'.
        """
        A, U, scale = ctx.saved_tensors
        m = len(A)
        both, dU = torch.cat((A, g)), torch.empty_like(U)
        for u, du in zip(U.unbind(), dU.unbind(), strict=True):
            st = both @ u
            both.addr_(st, u, alpha=-1)
            torch.mv(both.mT, torch.cat((-st[m:], st[:m])), out=du)
        return both[m:], dU * scale


class _Parallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, V: Tensor) -> Tensor:
        U, scale = _scaled(V)
        B = U @ U.mT  # with ones on its diagonal, the upper half is T⁻¹
        Z = torch.linalg.solve_triangular(B.mT, x @ U.mT, upper=False, left=False, unitriangular=True)
        ctx.save_for_backward(x, U, scale, B, Z)
        return torch.addmm(x, Z, U, alpha=-1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        """By R = gUᵀT and M = RᵀZ:  ∂U = (triu(M) + striu(M)ᵀ) U − Zᵀg − Rᵀx,  ∂x = g − RU."""
        x, U, scale, B, Z = ctx.saved_tensors
        R = torch.linalg.solve_triangular(B, g @ U.mT, upper=True, left=False, unitriangular=True)
        M = (R.mT @ Z).triu_()
        dU = (M + M.triu(1).mT) @ U
        dU.addmm_(Z.mT, g, alpha=-1).addmm_(R.mT, x, alpha=-1)
        return torch.addmm(g, R, U, alpha=-1), dU * scale


class _FastH(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, V: Tensor, k: int) -> Tensor:
        """Algorithm 1. Step 1 makes P = I − WᵀY for all blocks at once, step 2 multiplies by one after another."""
        r, d = V.shape
        U, scale = _scaled(V)
        Y = F.pad(U, (0, 0, 0, -r % k)).view(-1, k, d)
        W = _lemma_1(Y)
        A = [x]
        for Yi, Wi in zip(reversed(Y.unbind()), reversed(W.unbind()), strict=True):
            A.append(torch.addmm(A[-1], A[-1] @ Yi.mT, Wi, alpha=-1))
        ctx.save_for_backward(Y, W, scale, *A[:0:-1])
        return A[-1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        """Algorithm 2. Step 1 goes back through one block after another, step 2 is in ``_step_2``."""
        Y, W, scale, *A = ctx.saved_tensors
        G = [g]
        for Yi, Wi in zip(Y.unbind(), W.unbind(), strict=True):
            G.append(torch.addmm(G[-1], G[-1] @ Wi.mT, Yi, alpha=-1))
        dY = _step_2(Y, A, G[:-1])
        return G[-1], dY.flatten(0, 1)[: len(scale)] * scale, None


def _lemma_1(Y: Tensor) -> Tensor:
    """W with I − WᵀY = H₁⋯H_k in each block of Y: (n, k, d), by k Householder multiplications in sequence.

    One more reflection, H(I − WᵀY), changes W to HW and appends the reflector to both.
    """
    W = Y.clone()
    for j in reversed(range(Y.shape[1] - 1)):
        y, rest = Y[:, j : j + 1], W[:, j + 1 :]
        rest.addcmul_(torch.bmm(y, rest.mT).mT, y, value=-1)
    return W


def _step_2(Y: Tensor, A: list[Tensor], G: list[Tensor]) -> Tensor:
    """Step 2 of Algorithm 2 for all blocks at once: from each block's output A and gradient G to ∂Y: (n, k, d).

    The equations are the same as in ``_Sequential.backward``; u is the j-th reflector of every block.
    """
    n, k, d = Y.shape
    m = len(A[0])
    both = torch.cat([t for pair in zip(A, G, strict=True) for t in pair]).view(n, 2 * m, d)
    dY = torch.empty_like(Y)
    for j in range(k):
        u = Y[:, j : j + 1]
        st = torch.bmm(u, both.mT)
        both.addcmul_(st.mT, u, value=-1)
        dY[:, j : j + 1] = torch.bmm(torch.cat((-st[..., m:], st[..., :m]), -1), both)
    return dY


class _FastHpp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, V: Tensor, levels: int) -> Tensor:
        r = len(V)
        U, scale = _scaled(V)
        Y = F.pad(U, (0, 0, 0, -r % (1 << levels)))
        W = [-Y]
        for level in range(levels):
            Y1, _ = _pairs(Y, level)
            W.append(W[-1].clone())
            W1, W2 = _pairs(W[-1], level)
            _add_products(W2, torch.bmm(W2, Y1.mT), W1)
        A = [x]
        for Yi, Wi in zip(reversed(Y.split(1 << levels)), reversed(W[-1].split(1 << levels)), strict=True):
            A.append(torch.addmm(A[-1], A[-1] @ Yi.mT, Wi))
        ctx.levels = levels
        ctx.save_for_backward(Y, scale, *W, *A[-2::-1])
        return A[-1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        """Back through the blocks, then through the merges, then through the scaling of the reflectors."""
        Y, scale, *kept = ctx.saved_tensors
        W, A = kept[: ctx.levels + 1], kept[ctx.levels + 1 :]
        dY, dW = torch.empty_like(Y), torch.empty_like(Y)
        blocks = zip(A, *(t.split(1 << ctx.levels) for t in (Y, W[-1], dY, dW)), strict=True)
        for Ai, Yi, Wi, dYi, dWi in blocks:  # each block is A ↦ A + (AYᵀ)W
            R = g @ Wi.mT
            torch.mm(R.mT, Ai, out=dYi)
            torch.mm(Yi @ Ai.mT, g, out=dWi)
            g = torch.addmm(g, R, Yi)
        for level in reversed(range(ctx.levels)):  # each merge is W₂ ↦ W₂ + (W₂Y₁ᵀ)W₁
            (Y1, _), (dY1, _), (W1, W2), (dW1, dW2) = (_pairs(t, level) for t in (Y, dY, W[level], dW))
            S = torch.bmm(dW2, W1.mT)
            _add_products(dW1, torch.bmm(Y1, W2.mT), dW2)
            _add_products(dY1, S.mT, W2)
            _add_products(dW2, S, Y1)
        r = len(scale)
        U, dU = Y[:r], (dY - dW)[:r]  # at the start, W = −Y
        return g, scale * (dU - 0.5 * (dU * U).sum(-1, keepdim=True) * U), None


def _pairs(t: Tensor, level: int) -> tuple[Tensor, Tensor]:
    """Splits t into pairs of neighbours of 2^level rows.  (r, d) → (n, 2^level, d) each."""
    first, second = t.view(-1, 2, 1 << level, t.shape[-1]).unbind(1)
    return first, second


def _add_products(C: Tensor, A: Tensor, B: Tensor) -> None:
    """C += A B, in batches. Column times row is faster as an elementwise product."""
    if A.shape[-1] == 1:
        C.addcmul_(A, B)
    else:
        C.baddbmm_(A, B)
