"""The functions behind every layer, x Qᵀ and x Wᵀ. Each checks its arguments, makes a plan, and runs the plan.

A plan (``reflections/plan.py``) applies the reflections, or, for many rows, forms Q or W first. Reflections are
applied by the compiled core on the CPU, by the Triton kernels on a GPU where they are the fastest, and by PyTorch's
operations elsewhere.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.jit import is_tracing  # type: ignore[attr-defined]  # missing in torch's types

from fasth.reflections.autograd import Householder, SVDLinear, compose, signed_sigma, svd_by_products, times_signs
from fasth.reflections.formed import columns_at_once, svd_at_once
from fasth.reflections.plan import COMPOSED, CORE, DTYPES, FORMS, FULL, TORCH, TRIANGULAR, TRITON, Plan
from fasth.reflections.planner import forms_at_once, plan_householder, plan_svd_linear

__all__ = ["DTYPES", "FORMS", "householder", "reflect", "svd_dense", "svd_linear", "svd_thin"]


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
        V: (r, d), or (*b, r, d) with one Q for each entry of the batch; b broadcasts against the batch of x.
        transpose: if True, computes x Q instead, a product with Qᵀ = Q⁻¹.
        triangular: if True, entries of V left of the diagonal are treated as zero, whatever their values. This halves
            the work; d such reflectors represent every orthogonal matrix up to the signs of its columns.
        block_size: k, the number of reflections applied together, at most d. It affects the speed, not the result.

    Returns:
        (*, d), the shape of x broadcast against the batch of V, in x's dtype.

    About 4·r·d operations per row of x and direction, 2·r·d if ``triangular``, and r/k + O(log k) matrix
    products in sequence. Between forward and backward it saves at most twice the memory of x and V together, and a
    copy of the output, which may be changed in place.

    Example:
        >>> x, V = torch.randn(32, 64), torch.randn(64, 64)
        >>> y = householder(x, V)
        >>> torch.allclose(householder(y, V, transpose=True), x, atol=1e-5)
        True
    """
    if block_size is not None:
        _check_block_size(block_size)
    return _reflect(x, V, TRIANGULAR if triangular else FULL, transpose, block_size)


def reflect(
    x: Tensor,
    V: Tensor,
    form: str,
    *,
    transpose: bool = False,
    block_size: int | None = None,
    internal: bool = False,
) -> Tensor:
    """``householder`` with reflectors of any form: "full", "triangular" or "compact".

    Compact reflectors are triangular with ones on the diagonal: row i of V is taken as 1 in column i and as zero left
    of it, whatever is stored there. The stored diagonal holds signs of U Σ Vᵀ, which are ignored here. V may have any
    strides; it is read in place. ``internal``: the caller does not change the result in place, so that it may be saved
    for backward without a copy.
    """
    return _reflect(x, V, FORMS.index(form), transpose, block_size, internal)


def svd_linear(
    x: Tensor,
    U: Tensor,
    sigma: Tensor | None,
    V: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    form: str = "compact",
    signs: Tensor | None = None,
    of_identity: bool = False,
) -> Tensor:
    """x Wᵀ + bias, as ``F.linear(x, W, bias)``, with W = Q_U[:, :k] diag(sigma) Q_V[:, :k]ᵀ never formed for few rows.

    For many rows W is formed or, where k < min(n, m), its two thin factors: see ``svd_thin``. Under autocast the output
    has the dtype of ``F.linear``'s. Reflections and W are computed without autocast; rows are multiplied by W with it.

    Args:
        x: (*, m).
        U: (·, n), the reflectors of Q_U, of form ``form``, as in ``reflect``. With none, (0, n), Q_U is the identity.
        sigma: (k,) with k ≤ min(n, m), of any sign; or None: min(n, m) ones.
        V: (·, m), the reflectors of Q_V. If None, U: (n, m) holds the compact reflectors of both sides: V's in its rows
            right of the diagonal, U's in its columns below the diagonal.
        bias: (n,).
        form: with "compact" reflectors, sigma_i is multiplied by the signs of the entries (i, i) of U and V, or of the
            shared matrix: −1 for a negative entry. ``with_sign_guard`` defines the gradient of these entries.
        signs: (1, k) or (2, k): sigma_i is also multiplied by column i of ``signs``, for full reflectors.
        of_identity: True if x is the identity, to form W.

    Returns:
        (*, n).
    """
    n, m = U.shape if V is None else (U.shape[1], V.shape[1])
    _check_svd_linear(x, sigma, bias, n, m)
    lower = autocast_enabled(x)
    x = as_reflectors(x, U.dtype) if lower else x
    of_identity &= bias is None  # with a bias the output is not x Wᵀ, the tensor to save
    plan = plan_svd_linear(x, U, sigma, V, bias, FORMS.index(form), of_identity=of_identity)
    if lower and not plan.forms_matrix:
        with torch.autocast(x.device.type, enabled=False):
            out = svd_linear(x, U, sigma, V, bias, form=form, signs=signs)
        return out if out.dtype == torch.float64 else out.to(torch.get_autocast_dtype(x.device.type))
    if signs is not None and (plan.forms_matrix or plan.backend != TRITON or is_compiling()):
        sigma, signs = times_signs(sigma, signs), None  # the kernels multiply by the signs while reading sigma
    if plan.forms_matrix:
        if sigma is None or len(sigma) == min(n, m):
            return F.linear(x, svd_dense(U, sigma, V, form=form), bias)
        A, B = svd_thin(U, sigma, V, form=form)
        return F.linear(F.linear(x, A), B, bias)
    if plan.backend in (CORE, TRITON):
        return SVDLinear.apply(x, U, sigma, None if plan.symmetric else V, bias, signs, plan)
    _check_one_dtype(x, U, sigma, V, bias)  # the other backends need tensors of one dtype

    def multiply(x: Tensor, V: Tensor, form: int, transpose: bool) -> Tensor:
        last = plan.copy_output and bias is None and not transpose  # this product is returned to the caller
        return _multiply(x, V, form, transpose, internal=not last) if len(V) or V.requires_grad else x

    return svd_by_products(multiply, x, U, sigma, V, bias, plan.form)


def svd_dense(
    U: Tensor, sigma: Tensor | None, V: Tensor | None = None, *, form: str = "compact", is_rounded: bool = False
) -> Tensor:
    """W: (n, m) of ``svd_linear``, by applying the reflections to the smaller identity, or from thin factors.

    On a GPU both sides are formed at once, unless Triton kernels are used: see ``reflections/formed.py``.
    Under autocast, which sets ``is_rounded``, W is rounded before it multiplies, so that TF32 may form it there.
    """
    _refuse_tracing()
    if autocast_enabled(U):
        with torch.autocast(U.device.type, enabled=False):
            return svd_dense(U, sigma, V, form=form, is_rounded=True)
    n, m = U.shape if V is None else (U.shape[1], V.shape[1])
    k = min(n, m) if sigma is None else len(sigma)
    if k < min(n, m):
        A, B = svd_thin(U, sigma, V, form=form)
        return B @ A
    if V is not None and 0 in (len(U), len(V)):
        Q, empty, other = (U, V, m) if len(U) else (V, U, n)
        if other == k and not empty.requires_grad:  # W is some columns of Q, or of its transpose
            columns = _scaled(first_rows_of(Q, k, form, is_rounded=is_rounded), U, sigma, V, form)
            return columns.mT if Q is U else columns
    if forms_at_once(max(n, m), k, U, sigma, V):
        return svd_at_once(U, sigma, V, FORMS.index(form), is_rounded)
    identity = torch.eye(min(n, m), dtype=U.dtype, device=U.device)
    if n < m:
        U, V = (U.mT, None) if V is None else (V, U)  # I (Wᵀ)ᵀ
    W = svd_linear(identity, U, sigma, V, form=form, of_identity=True)
    return W if n < m else W.mT


def svd_thin(
    U: Tensor, sigma: Tensor | None, V: Tensor | None = None, *, form: str = "compact"
) -> tuple[Tensor, Tensor]:
    """A: (k, m) and B: (n, k) with W = B A as in ``svd_linear``: A = diag(sigma) Q_V[:, :k]ᵀ and B = Q_U[:, :k].

    Applies the reflections to k rows of the identity: 4·k·(r_U·n + r_V·m) operations. A product of a row with both
    factors then takes 2·k·(n + m). A includes the signs of both sides.
    """
    _refuse_tracing()
    if autocast_enabled(U):
        with torch.autocast(U.device.type, enabled=False):
            return svd_thin(U, sigma, V, form=form)
    U_side, V_side = (U.mT, U) if V is None else (U, V)
    k = min(U_side.shape[1], V_side.shape[1]) if sigma is None else len(sigma)
    U_rows, V_rows = (first_rows_of(Q, k, form) for Q in (U_side, V_side))
    return _scaled(V_rows, U, sigma, V, form), U_rows.mT


def _scaled(rows: Tensor, U: Tensor, sigma: Tensor | None, V: Tensor | None, form: str) -> Tensor:
    if sigma is None and form != "compact":
        return rows
    return signed_sigma(U, sigma, V, FORMS.index(form)).unsqueeze(-1) * rows


def _reflect(
    x: Tensor, V: Tensor, form: int, transpose: bool, block_size: int | None, internal: bool = False
) -> Tensor:
    _check_householder(x, V)
    if autocast_enabled(x):
        # Inside autocast the products would lose precision, and Q its orthogonality.
        x = as_reflectors(x, V.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return _multiply(x, V, form, transpose, block_size, internal=internal)
    return _multiply(x, V, form, transpose, block_size, internal=internal)


def _multiply(
    x: Tensor, V: Tensor, form: int, transpose: bool, block_size: int | None = None, *, internal: bool = False
) -> Tensor:
    """x Qᵀ, or x Q. ``internal``: the caller does not return the result itself to the user."""
    if V.ndim > 2:
        rows, reflectors, shape = _batched(x, V)
        plan = plan_householder(rows, reflectors, form, transpose, block_size, internal=internal)
        return run_householder(rows, reflectors, plan).reshape(shape)
    plan = plan_householder(x, V, form, transpose, block_size, internal=internal)
    if plan.forms_matrix:
        Qt = first_rows_of(V, V.shape[1], FORMS[form], block_size)
        return x @ (Qt.mT if transpose else Qt)
    return run_householder(x, V, plan)


def first_rows_of(
    V: Tensor, rows: int, form: str, block_size: int | None = None, *, is_rounded: bool = False
) -> Tensor:
    """The first rows of Qᵀ: (rows, d), by applying the reflections to rows of the identity.  V: (r, d)."""
    if block_size is None and forms_at_once(V.shape[1], rows, V):
        return columns_at_once(V, rows, FORMS.index(form), is_rounded).mT
    eye = torch.eye(rows, V.shape[1], dtype=V.dtype, device=V.device)
    return run_householder(eye, V, plan_householder(eye, V, FORMS.index(form), False, block_size, of_identity=True))


def run_householder(x: Tensor, V: Tensor, plan: Plan) -> Tensor:
    if plan.backend not in (CORE, TRITON):
        _check_tensors(x, V)  # the other backends need tensors of one dtype
    if plan.backend == COMPOSED:
        return compose(x, V, plan.form, plan.transpose, plan.block_size)
    if plan.backend == TORCH and V.ndim == 2:
        # Reshaped here, since a view that is returned by a custom Function cannot be changed in place.
        return Householder.apply(x.reshape(1, -1, x.shape[-1]), V, plan).reshape(x.shape)
    return Householder.apply(x, V, plan)


# Arguments.


def autocast_enabled(t: Tensor) -> bool:
    """True if autocast chooses the dtype of products on the tensor's device. The meta device has no autocast."""
    if t.is_cpu:
        return torch.is_autocast_enabled("cpu")
    return not t.is_meta and torch.is_autocast_enabled(t.device.type)


def as_reflectors(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts x to the dtype of the reflectors under autocast, which leaves float64 alone, as in ``F.linear``."""
    if x.dtype != dtype and torch.float64 in (x.dtype, dtype):
        raise TypeError(f"`x` should be {dtype}, since autocast does not convert float64; got {x.dtype}")
    return x.to(dtype)


def _refuse_tracing() -> None:
    if is_tracing():
        raise NotImplementedError(
            "torch.jit.trace does not take a product of reflections; use torch.export, or trace fasth.to_dense(model)"
        )


def _check_tensors(x: Tensor, V: Tensor) -> None:
    _refuse_tracing()
    if x.device != V.device:
        raise ValueError(f"`x` and `V` should be on one device; got {x.device} and {V.device}")
    if x.dtype not in DTYPES or V.dtype not in DTYPES:
        name, wrong = ("V", V) if x.dtype in DTYPES else ("x", x)
        raise TypeError(f"`{name}` should be float32, float64, bfloat16 or float16; got {wrong.dtype}")
    if x.dtype != V.dtype:
        raise TypeError(f"`x` and `V` should have one dtype; got {x.dtype} and {V.dtype}")


def _check_householder(x: Tensor, V: Tensor) -> None:
    if not (isinstance(x, Tensor) and isinstance(V, Tensor)):
        _refuse_type(*(("V", V) if isinstance(x, Tensor) else ("x", x)))
    if V.ndim < 2:
        raise ValueError(f"`V` should have shape (r, d) or (*b, r, d), one reflector a row; got {_shape(V)}")
    if V.shape[-1] < 1:
        raise ValueError(f"`V` should have reflectors of at least one entry; got shape {_shape(V)}")
    if x.ndim < 1 or x.shape[-1] != V.shape[-1]:
        raise ValueError(
            f"`x` should have last dimension {V.shape[-1]} to match `V` of shape {_shape(V)}; got {_shape(x)}"
        )


def _check_block_size(block_size: int) -> None:
    if not isinstance(block_size, int) or isinstance(block_size, bool):
        raise TypeError(f"`block_size` should be an int or None; got {type(block_size).__name__}")
    if block_size < 1:
        raise ValueError(f"`block_size` should be at least 1; got {block_size}")


def check_tensor(name: str, value: object) -> None:
    """Called first by layers, so that an fx.Proxy gets a clear TypeError."""
    if not isinstance(value, Tensor):
        _refuse_type(name, value)


def check_rows(x: Tensor, n: int, m: int) -> None:
    """Checks that x is a tensor of rows for a weight of shape (n, m)."""
    if not isinstance(x, Tensor):
        _refuse_type("x", x)
    if x.ndim < 1 or x.shape[-1] != m:
        raise ValueError(f"`x` should have last dimension {m} to match a weight of shape {(n, m)}; got {_shape(x)}")


def _check_svd_linear(x: Tensor, sigma: Tensor | None, bias: Tensor | None, n: int, m: int) -> None:
    if not isinstance(x, Tensor) or x.ndim < 1 or x.shape[-1] != m:
        check_rows(x, n, m)
    if sigma is not None and sigma.shape[0] > min(n, m):
        raise ValueError(
            f"`sigma` should have at most {min(n, m)} singular values for a weight of shape {(n, m)}; "
            f"got {_shape(sigma)}"
        )
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"`bias` should have shape {(n,)} for a weight of shape {(n, m)}; got {_shape(bias)}")


def _check_one_dtype(x: Tensor, *factors: Tensor | None) -> None:
    _refuse_tracing()
    tensors = [x, *(t for t in factors if t is not None)]
    dtype, device = tensors[1].dtype, tensors[1].device
    if any((t.dtype, t.device) != (dtype, device) for t in tensors):
        got = ", ".join(f"{t.dtype} on {t.device}" for t in tensors)
        raise TypeError(f"the input and the factors of the weight should have one dtype and device; got {got}")
    if dtype not in DTYPES:
        raise TypeError(f"the factors of the weight should be float32, float64, bfloat16 or float16; got {dtype}")


def _refuse_type(name: str, wrong: object) -> None:
    hint = ""
    if isinstance(wrong, torch.fx.Proxy):
        hint = ": torch.fx.symbolic_trace needs a Tracer that takes the layers of fasth as leaves (docs/pytorch.md)"
    raise TypeError(f"`{name}` should be a tensor; got {type(wrong).__name__}{hint}")


def _batched(x: Tensor, V: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Reshapes x to (B, m, d) and V to (B, r, d), and returns the shape of the result too."""
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
