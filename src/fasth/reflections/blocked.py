"""x Qᵀ and its derivatives by matrix products over blocks of reflections: any device, any dtype, any transform.

README.md beside this file derives the formulas, in the same notation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def householder(x: Tensor, V: Tensor, *, transpose: bool, triangular: bool, block_size: int) -> Tensor:
    """x Qᵀ with Q = H₁⋯H_r, or x Q if ``transpose``.  x: (B, m, d), V: (B, r, d) → (B, m, d).

    4·r·d operations per row of x and 2·r·d·k once, half of both if ``triangular``; with blocks of k reflections,
    3 r/k + 2 log₂ k matrix products in sequence. It is a composition of PyTorch's operations, which every transform can
    follow. Autograd saves the results of all of them, so training goes by ``forward`` and ``gradients`` instead.
    """
    Y, _ = blocks_of(V, block_size, triangular)
    out, _ = sweep(_compute(x), Y, triangular_factors(Y, triangular), transpose, triangular, record=False)
    return out.to(x.dtype)


def forward(
    x: Tensor, V: Tensor, *, transpose: bool, triangular: bool, block_size: int, save_states: bool
) -> tuple[Tensor, ...]:
    """The output, and what is saved for ``gradients``: T, and if ``save_states`` each Z and the rows after a block."""
    Y, _ = blocks_of(V, block_size, triangular)
    T = triangular_factors(Y, triangular)
    out, steps = sweep(_compute(x), Y, T, transpose, triangular, record=save_states)
    out = out.to(x.dtype) if steps or Y.shape[1] else x.clone()  # no block: the output is not to be x itself
    states = [step.Z for step in steps] + [step.after for step in steps[:-1]]  # after the last: the output
    return out, T, *states


class Step(NamedTuple):
    """One block's turn in a sweep: after = before − Z Y, in the columns from ``column`` on."""

    Y: Tensor  # (B, k, d - column)
    column: int
    before: Tensor  # (B, m, d - column)
    Z: Tensor  # (B, m, k)
    after: Tensor  # (B, m, d - column)


def sweep(
    x: Tensor, Y: Tensor, T: Tensor, transpose: bool, triangular: bool, record: bool = True
) -> tuple[Tensor, list[Step]]:
    """x times each block I − Yᵀ T Y in turn: the last first for x Qᵀ, the first first for x Q (``transpose``)."""
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
            steps.append(Step(Yi, column, before, Z, after))
    return x, steps


def blocks_of(V: Tensor, k: int, triangular: bool) -> tuple[Tensor, Tensor]:
    """V in blocks of k rows, Y: (B, n, k, d), every row divided by a scale: (B, r, 1).

    The scale is a power of two, so nothing is rounded, but not in exported programs. It is a constant to autograd: Q
    does not depend on the length of a reflector, so no derivative of Q does either.
    """
    V = _reflectors(V, triangular)
    largest = V.detach()[..., :1]
    if V.shape[1]:  # the meta device has no such norm of no rows
        largest = torch.linalg.vector_norm(V.detach(), torch.inf, -1, keepdim=True)
    if torch.compiler.is_exporting():
        scale = torch.where(largest == 0, 1, largest)  # ONNX has no frexp
    else:
        exponent = torch.frexp(largest).exponent.to(largest.dtype)  # the compiler fails on integers beside float64
        scale = torch.ldexp(torch.ones_like(largest), exponent - 1)
    return _cut(V / scale, k), scale


def triangular_factors(Y: Tensor, triangular: bool) -> Tensor:
    """T = B⁻¹: (B, n, k, k), upper triangular, with H₁⋯H_k = I − Yᵀ T Y in each block of Y: (B, n, k, d).

    B is the upper half of the Gram matrix, with ½ of its diagonal. It is inverted by halves, 2 log₂ k products in
    sequence: when T holds the inverses of the squares of size s along the diagonal, −T₁₁ B₁₂ T₂₂ is what those of size
    2s lack. T (B∘mask) T is that for all of them at once, where the mask keeps each B₁₂: the entries above the diagonal
    whose row and column numbers have s as the highest bit in which they differ.
    """
    gram = _products(Y, Y, triangular).flatten(0, 1)
    k = gram.shape[-1]
    squared_norms = gram.diagonal(dim1=-2, dim2=-1)
    T = torch.diag_embed(2 / torch.where(squared_norms == 0, 2, squared_norms))  # a zero reflector: T = 1, Y = 0
    index = torch.arange(k, device=Y.device)
    highest = (index[:, None] ^ index).triu()
    for level in range((k - 1).bit_length()):
        B12 = torch.where(highest >> level == 1, gram, 0)
        T = torch.baddbmm(T, torch.bmm(T, B12), T, alpha=-1)
    return T.unflatten(0, Y.shape[:2])


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
    """The gradients of x and V from that of the output, g; differentiable in g, out and V if nothing was saved.

    ``saved`` is what ``forward`` gives besides the output. These are constants to autograd.
    """
    Y, scale = blocks_of(V, block_size, triangular)
    T = saved[0] if saved else triangular_factors(Y, triangular)
    # Each block is orthogonal, so gradients run through its transpose, and so does the way back from the output.
    rows, m = _compute(g), g.shape[1]
    states_missing = needs_V and len(saved) <= 1
    if states_missing:
        rows = torch.cat((rows, _compute(out)), 1)
    dx, steps = sweep(rows, Y, T, not transpose, triangular, record=needs_V)
    dV = None
    if needs_V:
        if states_missing:
            states = [(-step.Z.narrow(1, m, m), step.before.narrow(1, m, m)) for step in steps]
        else:
            Z, after = saved[1 : len(steps) + 1], [*saved[len(steps) + 1 :], _compute(out)]
            states = list(zip(reversed(Z), reversed(after), strict=True))
        dY = [
            _gradient_of_block(step.Y, step.before.narrow(1, 0, m), step.Z.narrow(1, 0, m), *state, transpose)
            for step, state in zip(steps, states, strict=True)
        ]
        dV = _join(dY[::-1] if transpose else dY, scale, V, triangular)
    return dx.narrow(1, 0, m).to(g.dtype) if needs_x else None, dV


def _gradient_of_block(Y: Tensor, g: Tensor, R: Tensor, Z: Tensor, after: Tensor, transpose: bool) -> Tensor:
    """∂Y: (B, k, d - column), with g the gradient of ``after`` and R what Z is called in the sweep of g."""
    after = _from_column(after, after.shape[-1] - Y.shape[-1])
    M = torch.bmm(Z.mT, R)
    N = (M - M.mT).triu(1) if transpose else (M - M.mT).tril(-1)
    dY = torch.baddbmm(torch.bmm(N, Y), Z.mT, g, alpha=-1)
    return torch.baddbmm(dY, R.mT, after, alpha=-1)


def _join(dY: list[Tensor], scale: Tensor, V: Tensor, triangular: bool) -> Tensor:
    """The gradient of V: (B, r, d) from those of its blocks."""
    r, d = V.shape[1:]
    if not dY:
        return torch.zeros_like(V)
    dV = torch.cat([F.pad(part, (d - part.shape[-1], 0)) for part in dY], 1).narrow(1, 0, scale.shape[1]) / scale
    if triangular:
        dV = F.pad(dV.triu(), (0, 0, 0, r - dV.shape[1]))
    return dV.to(V.dtype)


def _products(X: Tensor, Y: Tensor, triangular: bool) -> Tensor:
    """X Yᵀ: (B, n, k, k) of every block, without work on the zeros left of the diagonal."""
    n, k = Y.shape[1:3]
    if not triangular or n < 2:
        return X @ Y.mT
    return torch.stack([X[:, i, :, i * k :] @ Y[:, i, :, i * k :].mT for i in range(n)], 1)


def expand_compact(V: Tensor) -> Tensor:
    """Compact reflectors (*, r, d) as triangular ones: ones on the diagonal, what stands right of it, zeros."""
    return V.triu(1) + torch.eye(*V.shape[-2:], dtype=V.dtype, device=V.device)


def _reflectors(V: Tensor, triangular: bool) -> Tensor:
    V = _compute(V)
    return V[:, : V.shape[-1]].triu() if triangular else V


def _from_column(t: Tensor, column: int) -> Tensor:
    """Not by an index, which makes an alias of all of it where the column is 0: batched gradients have none."""
    return t.narrow(-1, column, t.shape[-1] - column)


def _cut(V: Tensor, k: int) -> Tensor:
    """(B, r, d) in blocks (B, n, k, d), with zero rows, which reflect nothing, at the end."""
    r = V.shape[1]
    n = -(-r // k)
    return F.pad(V, (0, 0, 0, n * k - r)).unflatten(1, (n, k))


def _compute(t: Tensor) -> Tensor:
    """bfloat16 and float16 only store: computing in them would lose orthogonality with every block."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t
