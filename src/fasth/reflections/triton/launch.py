"""x Qᵀ and x (U Σ Vᵀ)ᵀ with their gradients, each a few launches of the kernels. Arguments are not checked here.

Between forward and backward T and the scales are saved, besides the tensors that ``autograd`` saves. The states for the
gradient are recomputed from the output: section 6 of ``reflections/README.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasth.reflections.plan import COMPACT, FULL, Plan
from fasth.reflections.precision import tf32_allowed
from fasth.reflections.triton import kernels
from fasth.reflections.triton.configurations import (
    BLOCK,
    DEFAULT_REGISTERS,
    FACTORS_WARPS,
    GRADIENT_WARPS,
    GROUP,
    SUMS_WARPS,
    chunk,
    columns_held,
    sweep_for,
)
from fasth.reflections.triton.launching import launched
from fasth.reflections.triton.recurrence import recurrence, recurrence_backward  # noqa: F401, with the others


class Side(NamedTuple):
    """A product of reflections: V: (B, r, d), T: (B, blocks, BLOCK, BLOCK) and the scales: (B, blocks·BLOCK)."""

    V: Tensor
    form: int
    T: Tensor
    scale: Tensor


class Sigma(NamedTuple):
    """The diagonal between the two sides: (k,), or None for ones, and up to two vectors whose signs multiply it."""

    values: Tensor | None
    k: int
    signs: tuple[tuple[Tensor | None, int], tuple[Tensor | None, int]]  # first entry and stride of each vector

    def arguments(self) -> dict[str, Any]:
        (U, U_stride), (V, V_stride) = self.signs
        return {
            "U_SIGNS": U,
            "V_SIGNS": V,
            "U_signs_stride": U_stride,
            "V_signs_stride": V_stride,
            "U_SIGNED": U is not None,
            "V_SIGNED": V is not None,
        }


NO_SIGNS = None, 0
NO_SIGMA = Sigma(None, 0, (NO_SIGNS, NO_SIGNS))


def householder(x: Tensor, V: Tensor, plan: Plan) -> list[Tensor]:
    """Returns x Qᵀ, or x Q; then the saved tensors: a copy of it, T and the scales.  x: (*, d) or (B, m, d)."""
    side = factored(V, plan.form)
    rows = _rows(x, V)
    out = torch.empty_like(rows)
    copy = torch.empty_like(rows) if plan.copy_output else None
    sweep(side, rows, out=out, copy=copy, last_first=not plan.transpose, of_identity=plan.of_identity)
    saved = [copy.reshape(x.shape)] if copy is not None else []
    return [out.reshape(x.shape), *saved, *((side.T, side.scale) if plan.save else ())]


def householder_backward(
    g: Tensor, output: Tensor | None, V: Tensor, saved: Sequence[Tensor], needs: Sequence[bool], plan: Plan
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and V, each None where it is not needed."""
    needs_x, needs_V = needs
    if plan.copy_output:
        output, *saved = saved
    side = factored(V, plan.form, *saved)
    rows = _rows(g, V)
    dx = torch.empty_like(rows)
    if not needs_V:
        sweep(side, rows, out=dx, last_first=plan.transpose)
        return dx.reshape(g.shape), None
    assert output is not None
    states = sweep(side, rows, _rows(output, V), out=dx, last_first=plan.transpose, record=True)
    dV = torch.empty_like(side.V)
    gradient(side, states, dV, plan.transpose)
    return dx.reshape(g.shape) if needs_x else None, dV.reshape(V.shape)


def svd_linear(
    x: Tensor,
    U: Tensor,
    sigma: Tensor | None,
    V: Tensor | None,
    bias: Tensor | None,
    plan: Plan,
    signs: Tensor | None = None,
) -> list[Tensor]:
    """Returns x Wᵀ + bias; then the saved tensors: x Q_V, x Wᵀ, T and the scales of each side.  x: (*, m) → (*, n).

    x Q_V and x Wᵀ are float32 for every dtype. ``signs``: (1, k) or (2, k), the column signs of full reflectors.
    """
    side_U, side_V = _sides(U, V, plan.form)
    n, m = side_U.V.shape[-1], side_V.V.shape[-1]
    scaling = _sigma(U, sigma, V, plan.form, min(n, m), signs)
    rows = _rows(x, side_V.V[0])
    inner = rows.new_empty(rows.shape, dtype=torch.float32)
    out = rows.new_empty(1, rows.shape[1], n)
    copy = torch.empty_like(out, dtype=torch.float32) if plan.copy_output else None
    sweep(side_V, rows, out=inner, last_first=False)
    bias = bias if bias is None else bias.contiguous()
    sweep(side_U, inner, out=out, copy=copy, last_first=True, sigma=scaling, bias=bias)
    out = out.reshape(*x.shape[:-1], n)
    if not plan.save:
        return [out]
    factors = side_V[2:] if plan.symmetric else (*side_V[2:], *side_U[2:])
    return [out, inner[0], *([copy] if copy is not None else []), *factors]


def svd_linear_backward(
    g: Tensor,
    output: Tensor | None,
    U: Tensor,
    sigma: Tensor | None,
    V: Tensor | None,
    saved: Sequence[Tensor],
    needs: Sequence[bool],
    plan: Plan,
    signs: Tensor | None = None,
) -> list[Tensor | None]:
    """The gradients of x, U, sigma, V and the bias, each None where it is not needed.

    U's is the whole gradient if U holds both sides, and the sum of both gradients if U and V are the same tensor.
    """
    needs_x, needs_U, needs_sigma, needs_V, needs_bias = needs
    needs_V = needs_U if plan.symmetric else needs_V
    factors = -2 if plan.symmetric else -4
    inner, *products = saved[:factors]
    side_U, side_V = _sides(U, V, plan.form, saved[factors:])
    n, m = side_U.V.shape[-1], side_V.V.shape[-1]
    scaling = _sigma(U, sigma, V, plan.form, min(n, m), signs)
    rows, inner = _rows(g, side_U.V[0]), inner.contiguous()
    train_U, train_V = needs_U and len(side_U.V[0]) > 0, (needs_U if V is None else needs_V) and len(side_V.V[0]) > 0
    g_inner = rows.new_empty(1, rows.shape[1], scaling.k, dtype=torch.float32)
    dx = rows.new_empty(1, rows.shape[1], m)
    recorded_U = recorded_V = None
    if train_U or needs_sigma or train_V or needs_x:
        product = products[0] if products else output
        other = product.contiguous().reshape(rows.shape) if train_U and product is not None else None
        recorded_U = sweep(side_U, rows, other, out=g_inner, last_first=False, record=train_U)
    if train_V or needs_x:
        other = inner[None] if train_V else None
        recorded_V = sweep(side_V, g_inner, other, out=dx, last_first=True, sigma=scaling, record=train_V)
    dU, dV = _gradients_of_sides(U, V, side_U, side_V, recorded_U, recorded_V, needs_U, needs_V)
    if plan.symmetric and dU is not None and dV is not None:
        dU, dV = dU + dV, None
    dsigma, dbias = sums_over_rows(rows[0], g_inner[0], inner, scaling, needs_sigma, needs_bias)
    return [dx.reshape(*g.shape[:-1], m) if needs_x else None, dU, dsigma, dV, dbias]


def _gradients_of_sides(
    U: Tensor,
    V: Tensor | None,
    side_U: Side,
    side_V: Side,
    recorded_U: Recorded | None,
    recorded_V: Recorded | None,
    needs_U: bool,
    needs_V: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """∂U and ∂V. Two sides in one matrix write their halves of one gradient; V's side writes the diagonal."""
    dU = torch.empty_like(U) if needs_U else None
    dV = torch.empty_like(V) if needs_V and V is not None else None
    if V is None and dU is not None:
        gradient(side_U, recorded_U, dU.mT[None], transpose=False, shared=True)
        gradient(side_V, recorded_V, dU[None], transpose=True, shared=True, diagonal=True)
        return dU, None
    if dU is not None:
        gradient(side_U, recorded_U, dU[None], transpose=False)
    if dV is not None:
        gradient(side_V, recorded_V, dV[None], transpose=True)
    return dU, dV


def _sides(U: Tensor, V: Tensor | None, form: int, saved: Sequence[Tensor] = ()) -> tuple[Side, Side]:
    """The sides of U and V. ``saved``: T and the scales of V's side, then of U's side if it is not the same."""
    reflectors_U, reflectors_V = (U.mT, U) if V is None else (U, V)
    side_V = factored(reflectors_V, form, *saved[:2])
    return side_V if V is U else factored(reflectors_U, form, *saved[2:]), side_V


def _sigma(U: Tensor, sigma: Tensor | None, V: Tensor | None, form: int, most: int, signs: Tensor | None) -> Sigma:
    """The diagonal between the sides. ``signs``: (1, k) or (2, k); compact reflectors have signs on their diagonals."""
    found: list[tuple[Tensor | None, int]] = []
    if signs is not None:
        found = [(row, row.stride(0)) for row in signs.unbind(0)]
    elif form == COMPACT:
        found = [(t, sum(t.stride())) for t in (U, V) if t is not None and len(t)]
    first, second = [*found, NO_SIGNS, NO_SIGNS][:2]
    values = None if sigma is None else sigma.contiguous()
    return Sigma(values, most if values is None else len(values), (first, second))


def factored(V: Tensor, form: int, T: Tensor | None = None, scale: Tensor | None = None) -> Side:
    """Makes the side of V: (r, d) or (B, r, d). One launch computes T and the scales if they are None."""
    V = V if V.ndim == 3 else V[None]
    if T is not None and scale is not None:
        return Side(V, form, T, scale)
    B, _, d = V.shape
    blocks = -(-_used(V, form) // BLOCK)
    T = V.new_empty(B, blocks, BLOCK, BLOCK, dtype=torch.float32)
    scale = V.new_empty(B, blocks * BLOCK, dtype=torch.float32)
    launched(
        kernels.factors,
        B * blocks,
        {"num_warps": FACTORS_WARPS},
        V=V,
        T=T,
        SCALE=scale,
        r=_used(V, form),
        d=d,
        **_strides(V),
        blocks=blocks,
        FORM=form,
        K=BLOCK,
        LEVELS=BLOCK.bit_length() - 1,
        BD=chunk(d),
    )
    return Side(V, form, T, scale)


class Recorded(NamedTuple):
    """Tensors that a sweep of g and the output records for the gradient."""

    Z: Tensor  # (B, 2m, blocks·BLOCK), R above −Z
    states: Tensor  # (B, groups, 2m, d), g above O before each group of reflections


def sweep(
    side: Side,
    x: Tensor,
    x2: Tensor | None = None,
    *,
    out: Tensor,
    last_first: bool,
    sigma: Sigma = NO_SIGMA,
    bias: Tensor | None = None,
    copy: Tensor | None = None,
    record: bool = False,
    of_identity: bool = False,
) -> Recorded | None:
    """Applies all blocks of a side to the rows of x: (B, m, ·) and x2: (B, m, d), and writes x's rows to out.

    ``copy`` receives the rows of out without the bias. One launch.
    """
    V, form, T, scale = side
    B, _, d = V.shape
    m, total = x.shape[1], x.shape[1] + (0 if x2 is None else x2.shape[1])
    known = scale.shape[1]
    recorded = None
    if record:
        Z = torch.empty(B, total, known, dtype=torch.float32, device=x.device)
        states = torch.empty(B, -(-known // GROUP), total, d, dtype=torch.float32, device=x.device)
        recorded = Recorded(Z, states)
    scaled = sigma is not NO_SIGMA
    sizes = sweep_for(d, V.stride(1))
    launched(
        kernels.sweep,
        B * -(-total // 2),
        {"num_warps": sizes.warps, "maxnreg": sizes.registers},
        X=x,
        X2=x if x2 is None else x2,
        OUT=out,
        COPY=out if copy is None else copy,
        V=V,
        SCALE=scale,
        T=T,
        Z=recorded and recorded.Z,
        STATES=recorded and recorded.states,
        SIGMA=sigma.values,
        BIAS=bias,
        m=m,
        m2=total - m,
        r=_used(V, form),
        d=d,
        x_columns=sigma.k if scaled else d,
        x_stride=x.shape[2],
        out_columns=out.shape[2],
        blocks=known // sizes.step,
        **_strides(V),
        **sigma.arguments(),
        LAST_FIRST=last_first,
        FORM=form,
        K=sizes.step,
        TK=BLOCK,
        GROUP=GROUP,
        D=columns_held(d),
        OF_IDENTITY=of_identity,
        RECORD=record,
        SCALED=scaled,
        HAS_SIGMA=sigma.values is not None,
        HAS_BIAS=bias is not None,
        HAS_COPY=copy is not None,
        STAGES=sizes.stages,
    )
    return recorded


def gradient(
    side: Side,
    recorded: Recorded | None,
    dV: Tensor,
    transpose: bool,
    shared: bool = False,
    diagonal: bool = False,
) -> None:
    """Writes the gradient of the side's reflectors to dV: (B, r, d), of any strides. One launch."""
    V, form, _, scale = side
    B, r, d = V.shape
    if recorded is None:  # no reflectors
        return
    dV_strides = {f"dv_{name}": stride for name, stride in _strides(dV).items()}
    launched(
        kernels.gradient,
        B * -(-r // GROUP) * -(-d // chunk(d)),
        {"num_warps": GRADIENT_WARPS, "maxnreg": DEFAULT_REGISTERS},
        V=V,
        SCALE=scale,
        Z=recorded.Z,
        STATES=recorded.states,
        DV=dV,
        m=recorded.Z.shape[1] // 2,
        r=r,
        used=_used(V, form),
        d=d,
        **_strides(V),
        **dV_strides,
        known=scale.shape[1],
        TRANSPOSE=transpose,
        FORM=form,
        SHARED=shared,
        DIAGONAL=diagonal,
        GROUP=GROUP,
        BM=16,
        BD=chunk(d),
        PRECISION="tf32" if tf32_allowed(V) else "ieee",
    )


def sums_over_rows(
    g: Tensor, g_inner: Tensor, inner: Tensor, sigma: Sigma, needs_sigma: bool, needs_bias: bool
) -> tuple[Tensor | None, Tensor | None]:
    """∂sigma: (k,) and ∂bias: (n,), each None where it is not needed. One launch."""
    n, k = g.shape[1], sigma.k
    dsigma = g.new_empty(k) if needs_sigma else None
    dbias = g.new_empty(n) if needs_bias else None
    if not (needs_sigma or needs_bias):
        return None, None
    BD = chunk(max(n, k))
    launched(
        kernels.sums_over_rows,
        -(-max(n, k) // BD),
        {"num_warps": SUMS_WARPS},
        G=g,
        G_INNER=g_inner,
        INNER=inner,
        DSIGMA=dsigma,
        DBIAS=dbias,
        m=len(g),
        n=n,
        k=k,
        inner_stride=inner.shape[1],
        **sigma.arguments(),
        NEEDS_SIGMA=needs_sigma,
        NEEDS_BIAS=needs_bias,
        BM=16,
        BD=BD,
    )
    return dsigma, dbias


def _rows(x: Tensor, V: Tensor) -> Tensor:
    """Reshapes x: (*, d) to (1, m, d) for V: (r, d). For V: (B, r, d), x is (B, m, d) already."""
    d = V.shape[-1]
    return (x if V.ndim == 3 else x.reshape(1, x.numel() // d, d)).contiguous()


def _used(V: Tensor, form: int) -> int:
    """The number of nonzero reflectors: triangular and compact reflectors beyond d are zero."""
    r, d = V.shape[-2:]
    return r if form == FULL else min(r, d)


def _strides(V: Tensor) -> dict[str, int]:
    return dict(zip(("batch_stride", "row_stride", "col_stride"), V.stride(), strict=True))
