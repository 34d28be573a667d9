"""``householder``: rows times a product of Householder reflections. Checks its arguments, then picks a path."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from fasth.reflections import blocked, native, native_svd, ops, tuned
from fasth.reflections.native import FORMS
from fasth.reflections.ops import svd_linear as svd_linear_operator
from fasth.reflections.ops import usable as usable_in_graph
from fasth.reflections.registry import constant_in_graphs
from fasth.reflections.tuning import (
    block_size_or_form,
    block_sizes_or_form,
    default_block_size,
    forming_svd_pays,
    materialising_pays,
)

__all__ = ["FORMS", "householder", "householder_compact", "svd_dense", "svd_linear", "svd_thin"]

# From so many columns on, forming Q apart from the singular values saves more than an operation of their own costs.
FORMED_APART = 128

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def householder(
    x: Tensor,
    V: Tensor,
    *,
    transpose: bool = False,
    triangular: bool = False,
    block_size: int | None = None,
) -> Tensor:
    """x Qᵀ, as ``F.linear(x, Q)``, with Q = H₁H₂⋯H_r the product of the reflections H = I − 2vvᵀ/‖v‖², v the rows of V.

    Q is orthogonal to rounding for every V, and never formed when applying the reflections is cheaper. A zero row is
    the identity and gets a zero gradient; the length of a row does not matter.

    Args:
        x: (*, d), or (*b, m, d) where V is batched.
        V: (r, d), or (*b, r, d) with one Q for each entry of the batch; b broadcasts against that of x.
        transpose: multiply by Qᵀ = Q⁻¹ instead, x Q.
        triangular: take row i of V to be zero left of column i, whatever stands there. Half the work; d such reflectors
            reach every orthogonal matrix up to the signs of its columns.
        block_size: how many reflections are handled as one, k, at most d. It changes the speed, not the result.

    Returns:
        (*, d), the shape of x broadcast against the batch of V, in x's dtype.

    About 4·r·d operations per row of x and direction, half of that if ``triangular``, and r/k + O(log k) matrix
    products in sequence. Between forward and backward it keeps at most twice the memory of x and V together.

    Example:
        >>> x, V = torch.randn(32, 64), torch.randn(64, 64)
        >>> y = householder(x, V)
        >>> torch.allclose(householder(y, V, transpose=True), x, atol=1e-5)
        True
    """
    if block_size is None:
        out = _at_once(x, V, transpose, native.TRIANGULAR if triangular else native.FULL)
        if out is not None:
            return out
    _check(x, V, block_size)
    if autocast_on(x.device.type):
        # Inside, it would take the precision of the products, and with it Q's orthogonality.
        with torch.autocast(x.device.type, enabled=False):
            return _householder(x.to(V.dtype), V, transpose, triangular, block_size)
    return _householder(x, V, transpose, triangular, block_size)


def householder_compact(
    x: Tensor, matrix: Tensor, *, lower: bool = False, transpose: bool = False, block_size: int | None = None
) -> Tensor:
    """``householder`` with compact reflectors, read from one side of a matrix that two products may share.

    Row i of V is zero left of column i and 1 in it. What follows is row i of ``matrix`` right of its diagonal, or, if
    ``lower``, column i below it. The diagonal and the other side are not read, and get no gradient.

    Args:
        x: (*, d) with d the length of the matrix's rows, or of its columns if ``lower``.
        matrix: (n, m), of any strides: it is read in place, as min(n, m) reflectors.
    """
    if matrix.ndim != 2:
        raise ValueError(f"`matrix` should have two dimensions; got shape {_shape(matrix)}")
    V = matrix.mT if lower else matrix
    if block_size is None:
        out = _at_once(x, V, transpose, native.COMPACT)
        if out is not None:
            return out
    _check(x, V, block_size)
    x, (r, d) = x.to(V.dtype), V.shape
    if materialising_pays(x.numel() // d, min(r, d), d, True, V):
        Qt = _formed(V, d, native.COMPACT, block_size, keep=_has_room(x, V))
        return x @ (Qt.mT if transpose else Qt)
    return _apply(x, V, transpose, native.COMPACT, block_size)


def svd_linear(
    x: Tensor,
    U: Tensor,
    sigma: Tensor,
    V: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    signs: Tensor | None = None,
    form: str = "compact",
    columns: bool = False,
) -> Tensor:
    """x Wᵀ + bias, as ``F.linear(x, W, bias)``, with W = Q_U[:, :k] diag(sigma) Q_V[:, :k]ᵀ never formed for few rows.

    For many rows W is formed or, where k < min(n, m), its two thin factors: see ``svd_thin``.

    Args:
        x: (*, m).
        U: (·, n), the reflectors of Q_U, of the given form: "full", "triangular" or "compact". None of them, (0, n), is
            the identity.
        sigma: (k,) with k ≤ min(n, m); of any sign.
        V: (·, m), the reflectors of Q_V. Left out, U is the (n, m) matrix that holds both, compact: V's as its rows
            right of the diagonal, U's as its columns below it.
        bias: (n,).
        signs: (2, k), those of U's and of V's columns. Constants: they get no gradient.
        columns: x holds columns, (m, c), and the result is W x: (n, c).

    Returns:
        (*, n).
    """
    if is_compiling():
        return _svd_in_graph(x, U, sigma, V, bias, signs, form, columns)
    if _core_at_once():  # the shortest way, for small steps
        sizes = native.core().plain_svd_linear(x, U, sigma, V, bias, signs, bool(columns))
        if sizes is not None:
            triangular, threads = form != "full", torch.get_num_threads()
            blocks = block_sizes_or_form(*sizes, len(sigma), triangular, U.dtype, threads, tuned.changes)
            if blocks is not None:
                kind = FORMS.index(form)
                composed = (SVD_COMPOSED_COLUMNS if columns else SVD_COMPOSED)[kind]
                return native_svd.svd_linear(x, U, sigma, V, bias, signs, (bool(columns), kind, *blocks), composed)
    if columns:
        return svd_linear(x.mT, U, sigma, V, bias, signs=signs, form=form).mT
    n, m = _check_svd(x, U, sigma, V, bias, signs)
    if autocast_on(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return svd_linear(x.to(U.dtype), U, sigma, V, bias, signs=signs, form=form)
    k, (r_U, r_V) = len(sigma), (m, n) if V is None else (len(U), len(V))
    if not forming_svd_pays(x.numel() // m, n, m, r_U, r_V, k, form != "full", U):
        return _svd_composed(x, U, sigma, V, bias, signs, form=form)
    if k < min(n, m):
        A, B = svd_thin(U, sigma, V, signs=signs, form=form)
        return F.linear(F.linear(x, A), B, bias)
    return F.linear(x, svd_dense(U, sigma, V, signs=signs, form=form), bias)


def _svd_in_graph(
    x: Tensor,
    U: Tensor,
    sigma: Tensor,
    V: Tensor | None,
    bias: Tensor | None,
    signs: Tensor | None,
    form: str,
    columns: bool,
) -> Tensor:
    """``svd_linear`` for a graph in the making, by as few steps as can be: see ops.py."""
    if columns:
        return _svd_in_graph(x.mT, U, sigma, V, bias, signs, form, False).mT
    _check_svd(x, U, sigma, V, bias, signs)
    if autocast_on(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return _svd_in_graph(x.to(U.dtype), U, sigma, V, bias, signs, form, False)
    if usable_in_graph(x, U, sigma, V, bias, signs):
        return svd_linear_operator(x, U, sigma, V, bias, signs, form)
    return _svd_composed(x, U, sigma, V, bias, signs, form=form)


def svd_dense(
    U: Tensor, sigma: Tensor, V: Tensor | None = None, *, signs: Tensor | None = None, form: str = "compact"
) -> Tensor:
    """W: (n, m) of ``svd_linear``, by applying the reflections to the smaller identity, or from its thin factors."""
    n, m = U.shape if V is None else (U.shape[1], V.shape[1])
    if len(sigma) < min(n, m):
        if autocast_on(sigma.device.type):
            with torch.autocast(sigma.device.type, enabled=False):
                return svd_dense(U, sigma, V, signs=signs, form=form)
        A, B = svd_thin(U, sigma, V, signs=signs, form=form)
        return B @ A
    if V is not None and len(sigma) >= FORMED_APART and 0 in (len(U), len(V)):
        Q, other = (U, m) if len(U) else (V, n)
        if other == len(sigma) and native.usable(Q):
            scaled = _signed(sigma, signs).unsqueeze(-1) * _formed(Q, other, FORMS.index(form), None)
            return scaled.mT if Q is U else scaled
    identity = torch.eye(min(n, m), dtype=sigma.dtype, device=sigma.device)
    if n >= m:
        return svd_linear(identity, U, sigma, V, signs=signs, form=form, columns=True)
    U, V = (U.mT, None) if V is None else (V, U)  # I (Wᵀ)ᵀ
    return svd_linear(identity, U, sigma, V, signs=signs, form=form)


def svd_thin(
    U: Tensor, sigma: Tensor, V: Tensor | None = None, *, signs: Tensor | None = None, form: str = "compact"
) -> tuple[Tensor, Tensor]:
    """A: (k, m) and B: (n, k) with W = B A, that of ``svd_linear``: A = diag(sigma) Q_V[:, :k]ᵀ and B = Q_U[:, :k].

    By applying the reflections to k rows of the identity: 4·k·(r_U·n + r_V·m) operations, after which a row takes
    2·k·(n + m). A carries the signs of both sides.
    """
    if autocast_on(sigma.device.type):
        with torch.autocast(sigma.device.type, enabled=False):
            return svd_thin(U, sigma, V, signs=signs, form=form)
    U, V = (U.mT, U) if V is None else (U, V)
    columns_of_U, columns_of_V = (_formed(Q, len(sigma), FORMS.index(form), None).mT for Q in (U, V))
    return _signed(sigma, signs).unsqueeze(-1) * columns_of_V.mT, columns_of_U


def _svd_composed(
    x: Tensor, U: Tensor, sigma: Tensor, V: Tensor | None, bias: Tensor | None, signs: Tensor | None, *, form: str
) -> Tensor:
    U, V = (U.mT, U) if V is None else (U, V)
    k, n = sigma.shape[-1], U.shape[-1]
    rows = _of_form(x, V, form, transpose=True)[..., :k] * _signed(sigma, signs)
    out = _of_form(F.pad(rows, (0, n - k)), U, form)
    return out if bias is None else out + bias


def _svd_composed_columns(x: Tensor, *factors: Any, form: str) -> Tensor:
    return _svd_composed(x.mT, *factors, form=form).mT


SVD_COMPOSED = [partial(_svd_composed, form=form) for form in FORMS]
SVD_COMPOSED_COLUMNS = [partial(_svd_composed_columns, form=form) for form in FORMS]


def _signed(sigma: Tensor, signs: Tensor | None) -> Tensor:
    return sigma if signs is None else sigma * signs[0] * signs[1]


def _of_form(x: Tensor, V: Tensor, form: str, transpose: bool = False) -> Tensor:
    if not (len(V) or V.requires_grad):
        return x
    if form == "compact":
        return householder_compact(x, V, transpose=transpose)
    return householder(x, V, transpose=transpose, triangular=form == "triangular")


def _householder(x: Tensor, V: Tensor, transpose: bool, triangular: bool, block_size: int | None) -> Tensor:
    """Picks the path: materialise or apply, on the compiled core or in PyTorch."""
    r, d = V.shape[-2:]
    kind = native.TRIANGULAR if triangular else native.FULL
    if V.ndim == 2 and materialising_pays(x.numel() // d, r, d, triangular, V):
        Qt = _formed(V, d, kind, block_size, keep=_has_room(x, V))
        return x @ (Qt.mT if transpose else Qt)  # x Qᵀ, or x Q
    return _apply(x, V, transpose, kind, block_size)


def _has_room(x: Tensor, V: Tensor) -> bool:
    """Whether x, V, Q and as much again as the last two are at most twice the memory of x and V."""
    return x.numel() >= 2 * V.numel()


def _formed(V: Tensor, rows: int, kind: int, block_size: int | None, keep: bool = True) -> Tensor:
    """The first rows of Qᵀ: (rows, d), from those of the identity. ``keep``: states, which the core never does."""
    eye = torch.eye(rows, V.shape[1], dtype=V.dtype, device=V.device)
    if native.usable(V):
        k = _block_size(V, rows, block_size)
        # Full reflectors save nothing by it, and would not keep the states that fit.
        of_identity = kind != native.FULL
        return native.householder(eye, V, transpose=False, kind=kind, block_size=k, of_identity=of_identity)
    return _apply(eye, V, False, kind, block_size, keep)


def _apply(x: Tensor, V: Tensor, transpose: bool, kind: int, block_size: int | None, keep: bool = True) -> Tensor:
    k = _block_size(V, x.numel() // V.shape[-1], block_size)
    core = _core_for(x, V)
    if core is not None and V.ndim == 2:
        return core(x, V, transpose=transpose, kind=kind, block_size=k)
    V = blocked.expand_compact(V) if core is None and kind == native.COMPACT else V
    rows, reflectors, shape = _batched(x, V)
    if core is not None:
        out = core(rows, reflectors, transpose=transpose, kind=kind, block_size=k)
    else:
        triangular = kind != native.FULL
        out = blocked.householder(rows, reflectors, transpose=transpose, triangular=triangular, block_size=k, keep=keep)
    return out.reshape(shape)


def _block_size(V: Tensor, rows: int, given: int | None) -> int:
    """No larger than r, nor than d: reflectors that depend on one another make T large, and its rounding with it."""
    largest = min(V.shape[-2:])
    return min(given or default_block_size(largest, V, rows), max(largest, 1))


def _core_for(x: Tensor, V: Tensor) -> Callable[..., Tensor] | None:
    """The compiled core, called at once or from the graph that is being made; None where it does not serve."""
    if native.usable(x, V):
        return native.householder
    return ops.householder if usable_in_graph(x, V) else None


def _at_once(x: Tensor, V: Tensor, transpose: bool, kind: int) -> Tensor | None:
    """The shortest way to the core, for small steps of the commonest shapes. None for others, and where Q is formed."""
    sizes = native.core().plain_householder(x, V) if _core_at_once() else None
    if sizes is None:
        return None
    rows, r, d = sizes
    r = min(r, d) if kind == native.COMPACT else r
    k = block_size_or_form(rows, r, d, kind != native.FULL, V.dtype, torch.get_num_threads(), tuned.changes)
    return None if k is None else native.householder(x, V, transpose=transpose, kind=kind, block_size=k)


def _core_at_once() -> bool:
    """Whether the compiled core may be asked what it takes: it is there, nobody watches, and no dtype is to change."""
    return not native.watched() and native.core() is not None and not torch._C._is_any_autocast_enabled()


def _check(x: Tensor, V: Tensor, block_size: int | None) -> None:
    if not (isinstance(x, Tensor) and isinstance(V, Tensor)):
        name, wrong = ("V", V) if isinstance(x, Tensor) else ("x", x)
        raise TypeError(f"`{name}` should be a tensor; got {type(wrong).__name__}")
    if V.ndim < 2:
        raise ValueError(f"`V` should have shape (r, d) or (*b, r, d), one reflector a row; got {_shape(V)}")
    d = V.shape[-1]
    if d < 1:
        raise ValueError(f"`V` should have reflectors of at least one entry; got shape {_shape(V)}")
    if x.ndim < 1 or x.shape[-1] != d:
        raise ValueError(f"`x` should have last dimension {d} to match `V` of shape {_shape(V)}; got {_shape(x)}")
    if x.device != V.device:
        raise ValueError(f"`x` and `V` should be on one device; got {x.device} and {V.device}")
    if x.dtype not in _DTYPES or V.dtype not in _DTYPES:
        name, wrong = ("V", V) if x.dtype in _DTYPES else ("x", x)
        raise TypeError(f"`{name}` should be float32, float64, bfloat16 or float16; got {wrong.dtype}")
    if x.dtype != V.dtype and not autocast_on(x.device.type):
        raise TypeError(f"`x` and `V` should have one dtype; got {x.dtype} and {V.dtype}")
    if block_size is not None:
        if not isinstance(block_size, int) or isinstance(block_size, bool):
            raise TypeError(f"`block_size` should be an int or None; got {type(block_size).__name__}")
        if block_size < 1:
            raise ValueError(f"`block_size` should be at least 1; got {block_size}")


def _check_svd(
    x: Tensor, U: Tensor, sigma: Tensor, V: Tensor | None, bias: Tensor | None, signs: Tensor | None
) -> tuple[int, int]:
    """The shape of W, after a look at all of them."""
    n, m = U.shape if V is None else (U.shape[1], V.shape[1])
    if x.ndim < 1 or x.shape[-1] != m:
        raise ValueError(f"`x` should have last dimension {m} to match a weight of shape {(n, m)}; got {_shape(x)}")
    tensors = [t for t in (x, U, sigma, V, bias, signs) if t is not None]
    dtype, device = sigma.dtype, sigma.device
    for t in tensors:
        if (t.dtype is not dtype and not (t is x and autocast_on(x.device.type))) or t.device != device:
            got = ", ".join(f"{t.dtype} on {t.device}" for t in tensors)
            raise TypeError(f"the input and the factors of the weight should have one dtype and device; got {got}")
    k = sigma.shape[0]
    if k > min(n, m) or (signs is not None and signs.shape != (2, k)) or (bias is not None and bias.shape != (n,)):
        raise ValueError(
            f"a weight of shape {(n, m)} should have at most {min(n, m)} singular values, two rows of as many signs, "
            f"and a bias of {n}; got {k}, {signs is not None and _shape(signs)} and {bias is not None and _shape(bias)}"
        )
    return n, m


def _batched(x: Tensor, V: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """x as (B, m, d) and V as (B, r, d), and the shape of the result."""
    d = V.shape[-1]
    if V.ndim == 2:
        return x.reshape(1, -1, d), V.unsqueeze(0), x.shape
    rows = x.unsqueeze(0) if x.ndim == 1 else x
    try:
        batch = torch.broadcast_shapes(rows.shape[:-2], V.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"the batch of `x`, {_shape(x)[:-2]}, should broadcast against that of `V`, {_shape(V)[:-2]}; "
            f"got shapes {_shape(x)} and {_shape(V)}"
        ) from None
    B = math.prod(batch)
    shape = (*batch, d) if x.ndim == 1 else (*batch, *x.shape[-2:])
    rows = rows.expand(*batch, -1, -1).reshape(B, rows.shape[-2], d)
    return rows, V.expand(*batch, -1, -1).reshape(B, V.shape[-2], d), shape


@constant_in_graphs
def autocast_on(device: str) -> bool:
    """Whether autocast is to choose the dtype of products on devices of this type. Graphs follow that by themselves."""
    return torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(device)


def _shape(t: Tensor) -> tuple[int, ...]:
    return tuple(t.shape)
