"""x Qᵀ and its derivatives by matrix products over blocks of reflections: any device, any dtype, any transform.

README.md beside this file derives the formulas, in the same notation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fasth import _private

_WIDEST_MASKS = 32  # above this, a product with masks would mostly multiply zeros
_EXPONENT_BITS = {torch.float32: (torch.int32, 0xFF << 23), torch.float64: (torch.int64, 0x7FF << 52)}


def householder(x: Tensor, V: Tensor, *, transpose: bool, triangular: bool, block_size: int) -> Tensor:
    """x Qᵀ with Q = H₁⋯H_r, or x Q if ``transpose``.  x: (B, m, d), V: (B, r, d) → (B, m, d).

    4·r·d operations per row of x and 2·r·d·k once, half of both if ``triangular``; with blocks of k reflections,
    3 r/k + 2 log₂ k matrix products in sequence. It is a composition of PyTorch's operations, which every transform can
    follow. Autograd saves the results of all of them, so training goes by ``forward`` and ``gradients`` instead.
    """
    Y, _ = blocks_of(V, block_size, triangular)
    out, _ = sweep(_compute(x), Y, triangular_T(Y, triangular), transpose, triangular, record=False)
    return out.to(x.dtype)


def forward(
    x: Tensor, V: Tensor, *, transpose: bool, triangular: bool, block_size: int, save_states: bool
) -> tuple[Tensor, ...]:
    """Returns the output and the tensors saved for ``gradients``: T; with ``save_states`` all Z and rows after blocks.

    T: (B, n, k, k), Z: (B, n, m, k). The rows after the block that acts last are the output, which is not saved again.
    """
    Y, _ = blocks_of(V, block_size, triangular)
    T = triangular_T(Y, triangular)
    out, steps = sweep(_compute(x), Y, T, transpose, triangular, record=save_states)
    out = (
        out.to(x.dtype) if steps or Y.shape[1] else x.clone()
    )  # without blocks, a copy: the output must not be x itself
    if not steps:
        return out, T
    but_the_last = steps[:-1] if transpose else steps[1:]
    return out, T, torch.stack([step.Z for step in steps], 1), *(step.after for step in but_the_last)


class Step(NamedTuple):
    """One block's turn in a sweep: after = before − Z Y, in the columns from ``column`` on, which the block acts on."""

    Y: Tensor  # (B, k, d - column)
    before: Tensor  # (B, m, d - column)
    Z: Tensor  # (B, m, k)
    after: Tensor  # (B, m, d - column)


def sweep(
    x: Tensor, Y: Tensor, T: Tensor, transpose: bool, triangular: bool, record: bool = True
) -> tuple[Tensor, list[Step]]:
    """x times each block I − Yᵀ T Y in turn: the last first for x Qᵀ, the first first for x Q (``transpose``).

    The steps are in the order of the blocks, not in the order in which they act.
    """
    n, k = Y.shape[1:3]
    Ys, Ts = Y.unbind(1), (T if transpose else T.mT).unbind(1)
    steps = []
    for block in range(n) if transpose else reversed(range(n)):
        column = block * k if triangular else 0
        Yi, before = _from_column(Ys[block], column), _from_column(x, column)
        Z = torch.bmm(torch.bmm(before, Yi.mT), Ts[block])
        after = torch.baddbmm(before, Z, Yi, alpha=-1)
        x = torch.cat((x.narrow(-1, 0, column), after), -1) if column else after
        if record:
            steps.append(Step(Yi, before, Z, after))
    return x, steps if transpose else steps[::-1]


def blocks_of(V: Tensor, k: int, triangular: bool) -> tuple[Tensor, Tensor]:
    """Splits V into blocks of k rows, Y: (B, n, k, d), each row divided by a scale: (B, r, 1).

    The scale is a power of two, so that nothing is rounded, except in exported programs. It is a constant to autograd:
    Q does not depend on the length of a reflector, nor do the derivatives of Q.
    """
    V = _reflectors(V, triangular)
    scale = scale_of(V.detach())
    return _cut(V / scale, k), scale


def scale_of(V: Tensor) -> Tensor:
    """The largest entry of every row, rounded down to a power of two: (B, r, 1). Its mantissa's bits are set to zero.

    At least the smallest normal number, so that a row of zeros is not divided by zero.
    """
    largest = V[..., :1]
    if V.shape[1]:  # the meta device cannot compute this norm of zero rows
        largest = torch.linalg.vector_norm(V, torch.inf, -1, keepdim=True)
    if _private.is_exporting():  # ONNX has no view of the bits
        return torch.where(largest == 0, 1, largest)
    normal = largest.clamp_min(torch.finfo(V.dtype).tiny)
    if _private.transform_active():  # in torch 2.10 vmap has no rule for a view of the bits
        return normal / (2 * torch.frexp(normal).mantissa)
    integer, exponent = _EXPONENT_BITS[V.dtype]
    return (normal.view(integer) & exponent).view(V.dtype)


def triangular_T(Y: Tensor, triangular: bool) -> Tensor:
    """T = B⁻¹: (B, n, k, k), upper triangular, with H₁⋯H_k = I − Yᵀ T Y in each block of Y: (B, n, k, d).

    B is the upper half of the Gram matrix, with ½ of its diagonal. Its inverse takes 2 log₂ k products in sequence.
    """
    return _inverses(_products(Y, Y, triangular).flatten(0, 1)).unflatten(0, Y.shape[:2])


def _inverses(gram: Tensor) -> Tensor:
    """T = B⁻¹ of Gram matrices (N, k, k), by halves: T₁₁ and T₂₂ in one batch, and T₁₂ = −T₁₁ B₁₂ T₂₂."""
    k = gram.shape[-1]
    if k <= _WIDEST_MASKS or k % 2:
        return _inverses_by_masks(gram)
    (B11, B12), (_, B22) = (rows.chunk(2, -1) for rows in gram.chunk(2, -2))
    T11, T22 = _inverses(torch.cat((B11, B22))).chunk(2)
    T12 = torch.baddbmm(B12, torch.bmm(T11, B12), T22, beta=0, alpha=-1)  # beta=0: nothing is added
    return torch.cat((torch.cat((T11, T12), -1), F.pad(T22, (k // 2, 0))), -2)


def _inverses_by_masks(gram: Tensor) -> Tensor:
    """``_inverses`` for few or an odd number of reflections: all squares of one size in one product of full matrices.

    When T holds the inverses of the squares of size s along the diagonal, −T₁₁ B₁₂ T₂₂ completes those of size 2s.
    −T (B∘mask) T computes it for all squares, where the mask keeps each B₁₂: the entries above the diagonal whose row
    and column numbers have s as the highest bit in which they differ.
    """
    k = gram.shape[-1]
    squared_norms = gram.diagonal(dim1=-2, dim2=-1)
    T = torch.diag_embed(2 / squared_norms.masked_fill(squared_norms == 0, 2))  # a zero reflector: T = 1, Y = 0
    index = torch.arange(k, device=gram.device)
    level = torch.arange((k - 1).bit_length(), device=gram.device)
    highest = (index[:, None] ^ index).triu()
    for B12 in gram * (torch.bitwise_right_shift(highest, level[:, None, None, None]) == 1):
        T = torch.baddbmm(T, torch.bmm(T, B12), T, alpha=-1)
    return T


def gradients(
    g: Tensor,
    out: Tensor,
    V: Tensor,
    transpose: bool,
    triangular: bool,
    block_size: int,
    needs_x: bool,
    needs_V: bool,
    saved: Sequence[Tensor] = (),
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and V from the output's, g; differentiable in g, out and V if nothing was saved.

    ``saved``: the tensors that ``forward`` returns after the output, constants to autograd.
    """
    Y, scale = blocks_of(V, block_size, triangular)
    T = saved[0] if saved else triangular_T(Y, triangular)
    # Each block is orthogonal: gradients go through its transpose, which also recomputes its input from its output.
    rows, m = _compute(g), g.shape[1]
    states_missing = needs_V and len(saved) <= 1
    if states_missing:
        rows = torch.cat((rows, _compute(out)), 1)
    dx, steps = sweep(rows, Y, T, not transpose, triangular, record=needs_V)
    dV = None
    if steps:
        R = torch.stack([step.Z for step in steps], 1)
        if states_missing:
            R, Z = R.narrow(2, 0, m), -R.narrow(2, m, m)
            after = [step.before.narrow(1, m, m) for step in steps]
        else:
            last = _compute(out)
            Z, after = saved[1], [*saved[2:], last] if transpose else [last, *saved[2:]]
        dV = _join(_gradients_of_blocks(steps, R, Z, after, transpose), scale, V, triangular)
    elif needs_V:
        dV = torch.zeros_like(V)
    return dx.narrow(1, 0, m).to(g.dtype) if needs_x else None, dV


def _gradients_of_blocks(
    steps: Sequence[Step], R: Tensor, Z: Tensor, after: Sequence[Tensor], transpose: bool
) -> list[Tensor]:
    """∂Y = N Y − Zᵀ g − Rᵀ O of each block: (B, k, d - column), with O the rows after it and g their gradient.

    The steps are the sweep of g, whose Z is R: (B, n, m, k). N: (B, n, k, k) is half of Zᵀ R − Rᵀ Z.
    """
    M = Z.mT @ R
    N = (M - M.mT).triu(1) if transpose else (M - M.mT).tril(-1)
    dY = []
    for (Y, before, *_), O, Ni, Zi, Ri in zip(steps, after, N.unbind(1), Z.unbind(1), R.unbind(1), strict=True):
        g, O = before.narrow(1, 0, R.shape[2]), _from_column(O, O.shape[-1] - Y.shape[-1])
        of_block = torch.baddbmm(torch.bmm(Ni, Y), Zi.mT, g, alpha=-1)
        dY.append(torch.baddbmm(of_block, Ri.mT, O, alpha=-1))
    return dY


def _join(dY: list[Tensor], scale: Tensor, V: Tensor, triangular: bool) -> Tensor:
    """Joins the gradients of blocks to the gradient of V: (B, r, d)."""
    r, d = V.shape[1:]
    dV = torch.cat([_pad(part, left=d - part.shape[-1]) for part in dY], 1).narrow(1, 0, scale.shape[1]) / scale
    if triangular:
        dV = _pad(dV.triu(), below=r - dV.shape[1])
    return dV.to(V.dtype)


def _products(X: Tensor, Y: Tensor, triangular: bool) -> Tensor:
    """X Yᵀ: (B, n, k, k) of every block, skipping the zeros left of the diagonal; one product when exporting."""
    n, k = Y.shape[1:3]
    if not triangular or n < 2 or _private.is_exporting():
        return X @ Y.mT
    return torch.stack([X[:, i, :, i * k :] @ Y[:, i, :, i * k :].mT for i in range(n)], 1)


def expand_compact(V: Tensor) -> Tensor:
    """Expands compact reflectors (*, r, d) to triangular ones: ones on the diagonal, zeros left of it."""
    return V.triu(1) + torch.eye(*V.shape[-2:], dtype=V.dtype, device=V.device)


def _reflectors(V: Tensor, triangular: bool) -> Tensor:
    V = _compute(V)
    return V[:, : V.shape[-1]].triu() if triangular else V


def _from_column(t: Tensor, column: int) -> Tensor:
    """Narrows without an index, which for column 0 is an alias of the tensor: batched gradients have no rule for it."""
    return t.narrow(-1, column, t.shape[-1] - column)


def _cut(V: Tensor, k: int) -> Tensor:
    """Cuts (B, r, d) into blocks (B, n, k, d), padded with zero rows, which are the identity."""
    r = V.shape[1]
    n = -(-r // k)
    return _pad(V, below=n * k - r).unflatten(1, (n, k))


def _pad(t: Tensor, *, left: int = 0, below: int = 0) -> Tensor:
    """Pads a matrix with columns and rows of zeros, without a copy if there is nothing to pad."""
    return F.pad(t, (left, 0, 0, below)) if left or below else t


def _compute(t: Tensor) -> Tensor:
    """Casts bfloat16 and float16 to float32: computing in them would lose orthogonality with every block."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t
