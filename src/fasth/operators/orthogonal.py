"""An orthogonal matrix as reflectors and signs, made from a dense matrix or at random."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fasth.functional import reflect
from fasth.operators.matrix import Matrix, broadcast_batches, computing_dtype, values_known
from fasth.reflections.autograd import diagonal_signs
from fasth.reflections.blocked import expand_compact
from fasth.reflections.plan import FORMS


class Orthogonal(Matrix):
    """Q = H₁H₂⋯H_r · diag(signs), a d×d orthogonal matrix, with H = I − 2vvᵀ/‖v‖² and v the rows of V.

    Args:
        V: (r, d) or (*b, r, d), the reflectors.
        form: "full"; "triangular": row i is taken as zero left of column i; or "compact": as 1 in column i, too.
        signs: (k,) or (*b, k) with k ≤ d, ±1: the signs of the first k columns. Without them, d triangular or compact
            reflectors reach every orthogonal matrix only up to these signs.

    ``Q @ X`` and ``Q.mT @ X`` cost about 4·r·d operations per column, half of that for triangular and compact ones.
    """

    V: Tensor
    form: str
    signs: Tensor | None
    transposed: bool
    _signs_are_stored: bool = False  # on the diagonal of V, where ``svd_linear`` reads them

    def __init__(self, V: Tensor, *, form: str = "full", signs: Tensor | None = None) -> None:
        check_form(form)
        if not isinstance(V, Tensor):
            raise TypeError(f"`V` should be a tensor; got {type(V).__name__}")
        if V.ndim < 2 or V.shape[-1] < 1:
            raise ValueError(f"`V` should have shape (r, d) or (*b, r, d), one reflector a row; got {tuple(V.shape)}")
        if signs is not None:
            _check_signs(signs, V)
        if form == "compact":
            V = expand_compact(V)  # with ones on the diagonal, which is not read as signs
        self.V, self.form, self.signs, self.transposed = V, form, signs, False

    @classmethod
    def of_stored(cls, V: Tensor, form: str = "compact") -> Orthogonal:
        """Makes Q from compact reflectors with the signs of columns on the diagonal, in the given form."""
        signs = diagonal_signs(V, min(V.shape[-2:]))
        if form != "compact":
            return cls(expand_compact(V), form=form, signs=signs)
        Q = object.__new__(cls)
        Q.V, Q.form, Q.signs, Q.transposed, Q._signs_are_stored = V, form, signs, False, True
        return Q

    @classmethod
    def from_dense(cls, Q: Tensor, form: str = "compact") -> Orthogonal:
        """A d×d orthogonal matrix whose first columns are Q.  Q: (*b, d, k) with orthonormal columns, k ≤ d.

        For k = d this is Q itself, with determinant 1 or −1. The factors are constants to autograd. O(d·k²) operations.
        """
        check_form(form)
        if Q.ndim < 2 or not Q.shape[-1] <= Q.shape[-2] or Q.shape[-2] < 1:
            raise ValueError(f"`Q` should have shape (*b, d, k) with k ≤ d; got {tuple(Q.shape)}")
        if values_known(Q):
            _check_orthonormal(Q.detach())
        return cls.from_orthonormal(Q, form, Q.dtype)

    @classmethod
    def from_orthonormal(cls, Q: Tensor, form: str, dtype: torch.dtype) -> Orthogonal:
        """``from_dense`` without its check. The factors are rounded to the dtype."""
        return cls.of_stored(compact_from_dense(Q).to(dtype), form)

    @classmethod
    def identity(
        cls,
        d: int,
        *,
        form: str = "compact",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Orthogonal:
        """I, as d reflections of one coordinate each and signs that undo them, so that no gradient of V vanishes."""
        check_form(form)
        _check_size(d)
        return cls.of_stored(-torch.eye(d, dtype=dtype, device=device), form)

    @classmethod
    def haar(
        cls,
        d: int,
        *,
        form: str = "compact",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Orthogonal:
        """A random orthogonal matrix, uniform over all of them: Haar-distributed. O(d²) operations."""
        check_form(form)
        _check_size(d)
        return cls.of_stored(haar_compact(d, d, dtype=dtype, device=device, generator=generator), form)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the reflectors."""
        return self.V.dtype

    @property
    def device(self) -> torch.device:
        """The device of the reflectors."""
        return self.V.device

    @property
    def mT(self) -> Orthogonal:
        """Qᵀ = Q⁻¹."""
        view = object.__new__(Orthogonal)
        view.V, view.form, view.signs, view.transposed = self.V, self.form, self.signs, not self.transposed
        view._signs_are_stored = self._signs_are_stored
        return view

    def det(self) -> Tensor:
        """The determinant, 1 or −1: (*b). Each reflection contributes −1, a zero reflector 1."""
        r, d = self.V.shape[-2:]
        if self.form == "compact":
            det = self.V.new_ones(()) if self.signs is None else self.signs.detach().prod(-1)
            return (-det if min(r, d) % 2 else det).expand(self._batch())
        V = self.V.detach()
        V = V[..., :d, :].triu() if self.form == "triangular" else V
        det = (1 - 2 * ((V != 0).any(-1).sum(-1) % 2)).to(self.dtype)
        return det if self.signs is None else det * self.signs.detach().prod(-1)

    def signs_of(self, k: int) -> Tensor | None:
        """The signs of the first k columns, (*b, k); None if all are +1."""
        if self.signs is None or self.signs.shape[-1] == k:
            return self.signs
        return F.pad(self.signs, (0, max(k - self.signs.shape[-1], 0)), value=1.0)[..., :k]

    def _batch(self) -> tuple[int, ...]:
        if self.V.ndim == 2 and (self.signs is None or self.signs.ndim == 1):
            return ()
        return broadcast_batches(V=self.V.shape[:-2], signs=() if self.signs is None else self.signs.shape[:-1])

    def _sides(self) -> tuple[int, int]:
        d = self.V.shape[-1]
        return d, d

    def _times(self, X: Tensor) -> Tensor:
        signs = self.signs_of(self.V.shape[-1])
        if signs is None:
            return self._reflect(X)
        if self.transposed:
            return signs.unsqueeze(-1) * self._reflect(X)
        return self._reflect(signs.unsqueeze(-1) * X)

    def _reflect(self, X: Tensor) -> Tensor:
        """H₁⋯H_r X, or H_r⋯H₁ X if transposed. ``reflect`` multiplies rows from the right."""
        return reflect(X.mT, self.V, self.form, transpose=self.transposed).mT

    def _form(self) -> str:
        return self.form


def compact_from_dense(Q: Tensor) -> Tensor:
    """Compact V with Q = (H₁⋯H_k · diag(signs))[:, :k] and the signs on its diagonal.  Q: (*b, d, k) → (*b, k, d).

    The columns of Q should be orthonormal: then its QR decomposition, computed by LAPACK's ``geqrf`` in 2·d·k²
    operations, has an R that is diagonal with entries ±1. Every entry of V is within ±1, and zero left of the diagonal.
    A constant to autograd.
    """
    A, tau = torch.geqrf(Q.detach().to(computing_dtype(Q.dtype)))
    k = Q.shape[-1]
    R = A.diagonal(dim1=-2, dim2=-1)[..., :k]
    # LAPACK omits the reflection of a column that is already zero below the diagonal; compact reflectors cannot.
    signs = torch.where((R < 0) != (tau == 0), -1.0, 1.0)
    return with_diagonal(A.mT.triu(1), signs).to(Q.dtype)


def haar_compact(
    k: int,
    d: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draws compact V: (k, d) such that the first k ≤ d columns of Q are Haar-distributed. O(k·d) operations.

    Row i is v / v₁ with v = x + sign(x₁)‖x‖e₁ and x Gaussian with d − i entries. Its reflection maps x/‖x‖, uniform on
    the sphere, to −sign(x₁)e₁. As v / v₁ is the same for −x, the sign is independent of it, and drawn separately. The
    diagonal holds the signs.
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    x = torch.randn(k, d, dtype=computing_dtype(dtype), device=device, generator=generator).triu()
    first = x.diagonal()
    pivot = first + torch.linalg.vector_norm(x, dim=-1).copysign(first)
    signs = torch.randint(2, (k,), device=device, generator=generator) * 2 - 1
    return with_diagonal((x / pivot.unsqueeze(-1)).triu(1), signs).to(dtype)


def with_diagonal(reflectors: Tensor, signs: Tensor) -> Tensor:
    """Writes signs (*, k) on the first k entries of the diagonal of compact reflectors (*, r, d); row-major."""
    reflectors = reflectors.clone(memory_format=torch.contiguous_format)
    reflectors.diagonal(dim1=-2, dim2=-1)[..., : signs.shape[-1]] = signs
    return reflectors


def check_form(form: str) -> None:
    if form not in FORMS:
        raise ValueError(f"`form` should be one of {', '.join(map(repr, FORMS))}; got {form!r}")


def _check_signs(signs: Tensor, V: Tensor) -> None:
    if not isinstance(signs, Tensor):
        raise TypeError(f"`signs` should be a tensor or None; got {type(signs).__name__}")
    if signs.ndim < 1 or signs.shape[-1] > V.shape[-1]:
        raise ValueError(
            f"`signs` should have at most {V.shape[-1]} entries for `V` of shape {tuple(V.shape)}; "
            f"got shape {tuple(signs.shape)}"
        )
    if (signs.dtype, signs.device) != (V.dtype, V.device):
        raise TypeError(f"`signs` should be {V.dtype} on {V.device}, as `V` is; got {signs.dtype} on {signs.device}")
    broadcast_batches(V=V.shape[:-2], signs=signs.shape[:-1])


def _check_size(d: int) -> None:
    if not isinstance(d, int) or isinstance(d, bool) or d < 1:
        raise ValueError(f"`d` should be a positive int; got {d!r}")


def _check_orthonormal(Q: Tensor) -> None:
    """Checks QᵀQ = I up to the rounding of Q's entries and of the algorithm that computed them."""
    d, k = Q.shape[-2:]
    P = Q.to(computing_dtype(Q.dtype))
    error = (P.mT @ P - torch.eye(k, dtype=P.dtype, device=P.device)).abs()
    tolerance = 4 * torch.finfo(Q.dtype).eps + 10 * d * torch.finfo(P.dtype).eps
    if not (error <= tolerance).all():
        raise ValueError(
            f"`Q` should have orthonormal columns, QᵀQ = I within {tolerance:.1e}; got an error of {error.max():.1e}"
        )
