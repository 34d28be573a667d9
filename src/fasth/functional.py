"""The functions behind every layer: arguments are checked here, once, and here it is decided how to compute.

x Qᵀ and x Wᵀ are computed by applying the reflections, or, for many rows, by forming Q or W first. Reflections are
applied by the compiled core on the CPU, by the Triton kernels on a GPU where they are the fastest, by PyTorch's
operations elsewhere: see ``reflections``.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.jit import is_tracing  # type: ignore[attr-defined]  # missing in torch's types

from fasth.private import is_exporting, transform_active
from fasth.reflections import blocked
from fasth.reflections.autograd import (
    Householder,
    Options,
    SVDLinear,
    SVDOptions,
    signed_sigma,
    svd_by_products,
)
from fasth.reflections.backends import TORCH, TRITON, backend_for
from fasth.reflections.heuristics import (
    SAVE_NOTHING,
    SAVE_T,
    Where,
    block_size_for,
    forming_pays,
    forming_svd_pays,
    kernels_pay,
    kernels_save,
    plan_householder,
    plan_svd_linear,
    tuned_warps,
)
from fasth.reflections.library import COMPACT, FORMS, FULL, TRIANGULAR
from fasth.reflections.precision import ieee_products
from fasth.reflections.tuning_file import tuning_state

__all__ = ["FORMS", "householder", "reflect", "svd_dense", "svd_linear", "svd_thin"]

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_ON_CPU = {dtype: Where("cpu", dtype) for dtype in DTYPES}


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
    products in sequence. Between forward and backward it saves at most twice the memory of x and V together.

    Example:
        >>> x, V = torch.randn(32, 64), torch.randn(64, 64)
        >>> y = householder(x, V)
        >>> torch.allclose(householder(y, V, transpose=True), x, atol=1e-5)
        True
    """
    if block_size is not None:
        _check_block_size(block_size)
    return _reflect(x, V, TRIANGULAR if triangular else FULL, transpose, block_size)


def reflect(x: Tensor, V: Tensor, form: str, *, transpose: bool = False, block_size: int | None = None) -> Tensor:
    """``householder`` with reflectors of any form: "full", "triangular", "compact" or "signed".

    Compact reflectors are triangular with ones on the diagonal: row i of V is 1 in column i and zero left of it,
    whatever stands there, and these entries get no gradient. Signed ones are the same here: only a weight U Σ Vᵀ has
    the signs. V may have any strides; it is read in place.
    """
    return _reflect(x, V, FORMS.index(form), transpose, block_size)


def svd_linear(
    x: Tensor,
    U: Tensor,
    sigma: Tensor | None,
    V: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    form: str = "compact",
) -> Tensor:
    """x Wᵀ + bias, as ``F.linear(x, W, bias)``, with W = Q_U[:, :k] diag(sigma) Q_V[:, :k]ᵀ never formed for few rows.

    For many rows W is formed or, where k < min(n, m), its two thin factors: see ``svd_thin``.

    Args:
        x: (*, m).
        U: (·, n), the reflectors of Q_U, of the given form, as in ``reflect``. None of them, (0, n), is the identity.
        sigma: (k,) with k ≤ min(n, m), of any sign; or None: min(n, m) ones.
        V: (·, m), the reflectors of Q_V. Left out, U is the (n, m) matrix that holds both, compact or signed: V's as
            its rows right of the diagonal, U's as its columns below it.
        bias: (n,).
        form: with "signed" reflectors, compact ones, sigma_i is multiplied by the signs of the entries (i, i) of U and
            V, or of the matrix that holds both: −1 where that is negative. Their gradient is ``sign_guard``'s.

    Returns:
        (*, n).
    """
    n, m = U.shape if V is None else (U.shape[1], V.shape[1])
    _check_svd_shapes(x, sigma, bias, n, m)
    backend = backend_for(x, U, sigma, V, bias)
    if backend == TORCH:  # the others take tensors of one dtype only
        _check_one_dtype(x, U, sigma, V, bias)
    kind = FORMS.index(form)
    if autocast_enabled(x):
        x = x.to(U.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return _svd_multiply(x, U, sigma, V, bias, kind, n, m, backend_for(x, U, sigma, V, bias))
    return _svd_multiply(x, U, sigma, V, bias, kind, n, m, backend)


def svd_dense(U: Tensor, sigma: Tensor | None, V: Tensor | None = None, *, form: str = "compact") -> Tensor:
    """W: (n, m) of ``svd_linear``, by applying the reflections to the smaller identity, or from its thin factors."""
    _refuse_tracing()
    if autocast_enabled(U):
        with torch.autocast(U.device.type, enabled=False):
            return svd_dense(U, sigma, V, form=form)
    n, m = U.shape if V is None else (U.shape[1], V.shape[1])
    k = min(n, m) if sigma is None else len(sigma)
    if k < min(n, m):
        A, B = svd_thin(U, sigma, V, form=form)
        return B @ A
    if V is not None and 0 in (len(U), len(V)):
        Q, empty, other = (U, V, m) if len(U) else (V, U, n)
        if other == k and not empty.requires_grad:  # W is some columns of Q, or of its transpose
            columns = _scaled(_first_rows(Q, k, FORMS.index(form)), U, sigma, V, form)
            return columns.mT if Q is U else columns
    identity = torch.eye(min(n, m), dtype=U.dtype, device=U.device)
    if n >= m:
        return svd_linear(identity, U, sigma, V, form=form).mT
    U, V = (U.mT, None) if V is None else (V, U)  # I (Wᵀ)ᵀ
    return svd_linear(identity, U, sigma, V, form=form)


def svd_thin(
    U: Tensor, sigma: Tensor | None, V: Tensor | None = None, *, form: str = "compact"
) -> tuple[Tensor, Tensor]:
    """A: (k, m) and B: (n, k) with W = B A, that of ``svd_linear``: A = diag(sigma) Q_V[:, :k]ᵀ and B = Q_U[:, :k].

    By applying the reflections to k rows of the identity: 4·k·(r_U·n + r_V·m) operations, after which a row takes
    2·k·(n + m). A carries the signs of both sides.
    """
    _refuse_tracing()
    if autocast_enabled(U):
        with torch.autocast(U.device.type, enabled=False):
            return svd_thin(U, sigma, V, form=form)
    U_side, V_side = (U.mT, U) if V is None else (U, V)
    k = min(U_side.shape[1], V_side.shape[1]) if sigma is None else len(sigma)
    U_rows, V_rows = (_first_rows(Q, k, FORMS.index(form)) for Q in (U_side, V_side))
    return _scaled(V_rows, U, sigma, V, form), U_rows.mT


def _scaled(rows: Tensor, U: Tensor, sigma: Tensor | None, V: Tensor | None, form: str) -> Tensor:
    if sigma is None and form != "signed":
        return rows
    return signed_sigma(U, sigma, V, FORMS.index(form)).unsqueeze(-1) * rows


# x Qᵀ.


def _reflect(x: Tensor, V: Tensor, kind: int, transpose: bool, block_size: int | None) -> Tensor:
    backend = backend_for(x, V)
    if backend == TORCH:  # the others take tensors of one dtype only
        _check_tensors(x, V)
    _check_shapes(x.shape, V.shape)
    if autocast_enabled(x):
        # Inside, it would take the precision of the products, and with it Q's orthogonality.
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(V.dtype)
            return _multiply(x, V, kind, transpose, block_size, backend_for(x, V))
    return _multiply(x, V, kind, transpose, block_size, backend)


def _multiply(x: Tensor, V: Tensor, kind: int, transpose: bool, block_size: int | None, backend: str) -> Tensor:
    """x Qᵀ, or x Q, by what is fastest for these sizes."""
    if V.ndim > 2:
        x, V, shape = _batched(x, V)
        sizes = x.shape[1], *V.shape[1:]
        return _apply(x, V, sizes, kind, transpose, block_size, backend_for(x, V)).reshape(shape)
    r, d = V.shape
    rows = x.numel() // d
    if _may_form() and forming_pays(rows, min(r, d) if kind >= COMPACT else r, d, kind != FULL, _where(V)):
        Qt = _first_rows(V, d, kind, block_size)
        return x @ (Qt.mT if transpose else Qt)
    return _apply(x, V, (rows, r, d), kind, transpose, block_size, backend)


def _apply(
    x: Tensor,
    V: Tensor,
    sizes: tuple[int, int, int],
    kind: int,
    transpose: bool,
    block_size: int | None,
    backend: str,
    of_identity: bool = False,
) -> Tensor:
    """The reflections applied to x: (*, d) with V: (r, d), or x: (B, rows, d) with V: (B, r, d). Sizes: rows, r, d."""
    rows, r, d = sizes
    if _must_compose():
        V = blocked.expand_compact(V) if kind >= COMPACT else V
        k = block_size_for(rows, r, d, block_size, _where(V))
        batch = (x, V) if V.ndim == 3 else (x.reshape(1, -1, d), V.unsqueeze(0))
        with ieee_products(x):
            out = blocked.householder(*batch, transpose=transpose, triangular=kind != FULL, block_size=k)
        return out.reshape(x.shape)
    needs = (x.requires_grad, V.requires_grad) if torch.is_grad_enabled() else (False, False)
    if backend == TRITON and not kernels_pay(x.numel() // d, r, d, kind != FULL, _where(V)):
        backend = TORCH
    how = bool(transpose), kind, backend, of_identity
    given = rows, r, d, kind == FULL, block_size, needs, _where(V)
    options = _options(how, given) if is_compiling() else _remembered_options(how, given, tuning_state())
    return Householder.apply(x, V, options)


def _options(how: tuple[bool, int, str, bool], given: tuple[Any, ...], *tuning_state: object) -> Options:
    transpose, kind, backend, of_identity = how
    block_size, save = plan_householder(*given)
    if backend != TRITON:
        return Options(transpose, kind, block_size, save, backend, of_identity)
    rows, r, d, full, _, needs, where = given
    save = SAVE_T if kernels_save(rows, r, d, full, needs, where) else SAVE_NOTHING
    return Options(transpose, kind, block_size, save, backend, of_identity, tuned_warps(d, where))


# A small step takes little longer than making a plan. That depends on the state of tuning, too.
_remembered_options = functools.lru_cache(4096)(_options)


def _first_rows(V: Tensor, rows: int, kind: int, block_size: int | None = None) -> Tensor:
    """The first rows of Qᵀ: (rows, d), from those of the identity.  V: (r, d)."""
    eye = torch.eye(rows, V.shape[1], dtype=V.dtype, device=V.device)
    # Full reflectors save nothing by knowing that it is the identity.
    sizes = rows, *V.shape
    return _apply(eye, V, sizes, kind, False, block_size, backend_for(V), of_identity=kind != FULL)


# x Wᵀ.


def _svd_multiply(
    x: Tensor,
    U: Tensor,
    sigma: Tensor | None,
    V: Tensor | None,
    bias: Tensor | None,
    kind: int,
    n: int,
    m: int,
    backend: str,
) -> Tensor:
    r_U, r_V = (m, n) if V is None else (len(U), len(V))
    k, rows, triangular = min(n, m) if sigma is None else len(sigma), x.numel() // m, kind != FULL
    if _may_form() and forming_svd_pays(rows, n, m, r_U, r_V, k, triangular, _where(U)):
        if k < min(n, m):
            A, B = svd_thin(U, sigma, V, form=FORMS[kind])
            return F.linear(F.linear(x, A), B, bias)
        return F.linear(x, svd_dense(U, sigma, V, form=FORMS[kind]), bias)
    if backend == TRITON and not kernels_pay(rows, max(min(r_U, n), min(r_V, m)), max(n, m), triangular, _where(U)):
        backend = TORCH
    if backend == TORCH or _must_compose():
        return svd_by_products(_multiply_by_side, x, U, sigma, V, bias, kind=kind)
    needs = False, False
    if torch.is_grad_enabled():
        trains_reflectors = U.requires_grad or (V is not None and V.requires_grad)
        needs = trains_reflectors or any(t is not None and t.requires_grad for t in (x, sigma, bias)), trains_reflectors
    how = kind, backend, V is U
    given = rows, n, m, r_U, r_V, kind == FULL, V is None, needs, _where(U)
    options = _svd_options(how, given) if is_compiling() else _remembered_svd_options(how, given, tuning_state())
    return SVDLinear.apply(x, U, sigma, None if options.symmetric else V, bias, options)


def _svd_options(how: tuple[int, str, bool], given: tuple[Any, ...], *tuning_state: object) -> SVDOptions:
    kind, backend, symmetric = how
    return SVDOptions(kind, *plan_svd_linear(*given), backend, symmetric)


_remembered_svd_options = functools.lru_cache(4096)(_svd_options)


def _multiply_by_side(x: Tensor, V: Tensor, kind: int, transpose: bool) -> Tensor:
    return _multiply(x, V, kind, transpose, None, backend_for(x, V)) if len(V) or V.requires_grad else x


# How to compute.


def autocast_enabled(t: Tensor) -> bool:
    """Whether autocast chooses the dtype of products on the tensor's device. The meta device knows none."""
    if t.is_cpu:
        return torch.is_autocast_enabled("cpu")
    return not t.is_meta and torch.is_autocast_enabled(t.device.type)


def _where(t: Tensor) -> Where:
    return _ON_CPU[t.dtype] if t.is_cpu else Where(t.device.type, t.dtype)


def _must_compose() -> bool:
    """Whether somebody follows every operation, so that it has to be a composition of PyTorch's own."""
    return transform_active() or is_exporting()


def _may_form() -> bool:
    """An exported program takes any number of rows, so it should not depend on how many there are now."""
    return not is_exporting()


# Arguments.


def _refuse_tracing() -> None:
    if is_tracing():
        raise NotImplementedError(
            "torch.jit.trace does not take a product of reflections; use torch.export, or trace fasth.to_dense(model)"
        )


def _check_tensors(x: Tensor, V: Tensor) -> None:
    _refuse_tracing()
    if not (isinstance(x, Tensor) and isinstance(V, Tensor)):
        _refuse_type(*(("V", V) if isinstance(x, Tensor) else ("x", x)))
    if x.device != V.device:
        raise ValueError(f"`x` and `V` should be on one device; got {x.device} and {V.device}")
    if x.dtype not in DTYPES or V.dtype not in DTYPES:
        name, wrong = ("V", V) if x.dtype in DTYPES else ("x", x)
        raise TypeError(f"`{name}` should be float32, float64, bfloat16 or float16; got {wrong.dtype}")
    if x.dtype != V.dtype and not autocast_enabled(x):
        raise TypeError(f"`x` and `V` should have one dtype; got {x.dtype} and {V.dtype}")


def _check_shapes(x: torch.Size, V: torch.Size) -> None:
    if len(V) < 2:
        raise ValueError(f"`V` should have shape (r, d) or (*b, r, d), one reflector a row; got {tuple(V)}")
    if V[-1] < 1:
        raise ValueError(f"`V` should have reflectors of at least one entry; got shape {tuple(V)}")
    if len(x) < 1 or x[-1] != V[-1]:
        raise ValueError(f"`x` should have last dimension {V[-1]} to match `V` of shape {tuple(V)}; got {tuple(x)}")


def _check_block_size(block_size: int) -> None:
    if not isinstance(block_size, int) or isinstance(block_size, bool):
        raise TypeError(f"`block_size` should be an int or None; got {type(block_size).__name__}")
    if block_size < 1:
        raise ValueError(f"`block_size` should be at least 1; got {block_size}")


def check_tensor(name: str, value: object) -> None:
    """Layers call it first: whoever traces them symbolically would else meet an error of the spectrum."""
    if not isinstance(value, Tensor):
        _refuse_type(name, value)


def check_rows(x: Tensor, n: int, m: int) -> None:
    """That x is a tensor of rows that a weight of shape (n, m) can be multiplied by."""
    if not isinstance(x, Tensor):
        _refuse_type("x", x)
    if x.ndim < 1 or x.shape[-1] != m:
        raise ValueError(f"`x` should have last dimension {m} to match a weight of shape {(n, m)}; got {_shape(x)}")


def _check_svd_shapes(x: Tensor, sigma: Tensor | None, bias: Tensor | None, n: int, m: int) -> None:
    check_rows(x, n, m)
    if (sigma is not None and len(sigma) > min(n, m)) or (bias is not None and bias.shape != (n,)):
        raise ValueError(
            f"a weight of shape {(n, m)} should have at most {min(n, m)} singular values and a bias of {n}; "
            f"got {sigma is not None and _shape(sigma)} and {bias is not None and _shape(bias)}"
        )


def _check_one_dtype(x: Tensor, *factors: Tensor | None) -> None:
    _refuse_tracing()
    given = [t for t in factors if t is not None]
    dtype, device = given[0].dtype, given[0].device
    as_autocast = autocast_enabled(x) and x.dtype in DTYPES
    if any((t.dtype, t.device) != (dtype, device) for t in given) or not (
        x.device == device and (x.dtype == dtype or as_autocast)
    ):
        got = ", ".join(f"{t.dtype} on {t.device}" for t in (x, *given))
        raise TypeError(f"the input and the factors of the weight should have one dtype and device; got {got}")
    if dtype not in DTYPES:
        raise TypeError(f"the factors of the weight should be float32, float64, bfloat16 or float16; got {dtype}")


def _refuse_type(name: str, wrong: object) -> None:
    hint = ""
    if isinstance(wrong, torch.fx.Proxy):
        hint = ": torch.fx.symbolic_trace needs a Tracer that takes the layers of fasth as leaves (docs/pytorch.md)"
    raise TypeError(f"`{name}` should be a tensor; got {type(wrong).__name__}{hint}")


def _batched(x: Tensor, V: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """x as (B, m, d) and V as (B, r, d), and the shape of the result."""
    d = V.shape[-1]
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


def _shape(t: Tensor) -> tuple[int, ...]:
    return tuple(t.shape)
