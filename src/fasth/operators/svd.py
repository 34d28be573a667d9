"""A matrix as its singular value decomposition, with the operations that this makes cheap."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fasth.functional import autocast_enabled, svd_dense, svd_linear
from fasth.operators.matrix import LinAlgError, Matrix, broadcast_batches, computing_dtype, has_entry
from fasth.operators.orthogonal import Orthogonal, check_form

if TYPE_CHECKING:
    from typing_extensions import Self

_VECTOR_NORMS: dict[str | int, float] = {"fro": 2, "nuc": 1, 2: math.inf, -2: -math.inf}


class SLogDet(NamedTuple):
    """The result of ``slogdet``, as in ``torch.linalg``: det = sign · exp(logabsdet)."""

    sign: Tensor
    logabsdet: Tensor


class SVD(Matrix):
    """W = U[:, :k] diag(sigma) V[:, :k]ᵀ, an n×m matrix.

    Args:
        U: n×n, an ``Orthogonal`` or its full reflectors.
        sigma: (k,) or (*b, k) with k ≤ min(n, m), of any sign and in any order. The singular values are |sigma| and
            min(n, m) − k zeros.
        V: m×m, likewise.

    ``W @ X`` costs as much as ``U @ X`` and ``V @ X`` together. Only ``dense`` forms W, and only ``from_dense``
    decomposes it. All results are differentiable in sigma and in the reflectors of U and V.
    """

    U: Orthogonal
    sigma: Tensor
    V: Orthogonal
    _shared: Tensor | None = None  # see ``of_shared``
    _transposed: bool = False  # True if this is the transpose of that matrix: then the signs are U's

    def __init__(self, U: Orthogonal | Tensor, sigma: Tensor, V: Orthogonal | Tensor) -> None:
        self.U = U if isinstance(U, Orthogonal) else Orthogonal(U)
        self.V = V if isinstance(V, Orthogonal) else Orthogonal(V)
        self.sigma = sigma
        _check_factors(self.U, sigma, self.V)

    @classmethod
    def from_dense(cls, W: Tensor, form: str = "compact") -> SVD:
        """The SVD of W, (n, m) or (*b, n, m), by ``torch.linalg.svd``: sigma ≥ 0, descending.

        The factors are constants to autograd.
        """
        check_form(form)
        if W.ndim < 2 or 0 in W.shape[-2:]:
            raise ValueError(f"`W` should have shape (n, m) or (*b, n, m) with n, m ≥ 1; got {tuple(W.shape)}")
        U, sigma, Vt = torch.linalg.svd(W.detach().to(computing_dtype(W.dtype)), full_matrices=False)
        U, V = (Orthogonal.from_orthonormal(Q, form, W.dtype) for Q in (U, Vt.mT))
        return cls(U, sigma.to(W.dtype), V)

    @classmethod
    def of_shared(cls, matrix: Tensor, sigma: Tensor) -> SVD:
        """Makes W from one (n, m) matrix with the compact reflectors of U and V, and signs, as in ``LinearSVD``.

        Products use the matrix directly, which gives one gradient instead of two that are added. U and V are made on
        first access; for a batch, (*b, n, m), immediately. The diagonal holds the signs of V's columns.
        """
        if matrix.ndim > 2:
            return cls(Orthogonal(matrix.mT, form="compact"), sigma, Orthogonal.of_stored(matrix))
        svd = object.__new__(cls)
        svd.sigma, svd._shared = sigma, matrix
        return svd

    def __getattr__(self, name: str) -> Any:
        if name not in ("U", "V") or self._shared is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        U, V = self._shared.mT, self._shared
        self.U = Orthogonal.of_stored(U) if self._transposed else Orthogonal(U, form="compact")
        self.V = Orthogonal(V, form="compact") if self._transposed else Orthogonal.of_stored(V)
        return getattr(self, name)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of sigma and of the reflectors."""
        return self.sigma.dtype

    @property
    def device(self) -> torch.device:
        """The device of sigma and of the reflectors."""
        return self.sigma.device

    @property
    def mT(self) -> Self:
        """Wᵀ = V Σ Uᵀ."""
        return self._with(self.sigma, transposed=True)

    def dense(self) -> Tensor:
        """W itself: (*b, n, m), differentiable. Costs at most as much as ``W @ X`` for min(n, m) columns."""
        if not self._is_one_product():
            return super().dense()
        if self._shared is not None:
            return svd_dense(self._shared, self.sigma)
        return svd_dense(self.U.V, self._signed_sigma(), self.V.V, form=self.U.form)

    def inverse(self) -> Self:
        """W⁻¹ = V Σ⁻¹ Uᵀ.  O(n) operations.

        Raises ``torch.linalg.LinAlgError`` if a singular value is zero, as ``torch.linalg.inv`` does. Where values
        cannot be read (``torch.compile``, ``torch.func``), the result is infinite instead.
        """
        self._check_square("inverse")
        if self.sigma.shape[-1] < self._sides()[0] or has_entry(self.sigma, 0):
            raise LinAlgError(f"inverse: {self!r} is singular, it has a singular value that is 0")
        return self._with(self.sigma.reciprocal(), transposed=True)

    def pinv(self, rtol: float | None = None) -> Self:
        """W⁺ = V Σ⁺ Uᵀ, m×n.  O(min(n, m)) operations.

        Singular values up to ``rtol`` times the largest count as zero; by default up to max(n, m) roundings of it, as
        in ``torch.linalg.pinv``.
        """
        rtol = self._rounding() if rtol is None else rtol
        if not rtol >= 0:
            raise ValueError(f"`rtol` should be at least 0; got {rtol}")
        zero = self.sigma.detach().abs() <= rtol * self.norm(2).detach().unsqueeze(-1)
        sigma = torch.where(zero, 0, torch.where(zero, 1, self.sigma).reciprocal())
        return self._with(sigma, transposed=True)

    def solve(self, B: Tensor) -> Tensor:
        """X with W X = B, for B of shape (n,), (n, c) or (*b, n, c).  Costs as much as ``W @ X``.

        Raises as ``inverse`` does if W is singular.
        """
        return self.inverse().matmul(B)

    def slogdet(self) -> SLogDet:
        """The sign of det W, det U · det V · Π sign(sigma), and log|det W| = Σ log|sigma|; each (*b).  O(n) operations.

        A singular W has sign 0 and log|det W| = −inf, as in ``torch.linalg.slogdet``.
        """
        self._check_square("slogdet")
        logabsdet = self.logabsdet()
        sign = self._orientation() * self._values().detach().sign().prod(-1)
        return SLogDet(sign.expand(logabsdet.shape), logabsdet)

    def logabsdet(self) -> Tensor:
        """log|det W| = Σ log|sigma|: (*b).  O(n) operations.

        −inf if W is singular. The gradient of a zero sigma is then 0, that of the others 1/sigma.
        """
        self._check_square("logabsdet")
        total, batch = log_abs_product(self._values()), self._batch()
        return total if total.shape == batch else total.expand(batch)

    def norm(self, ord: str | int = "fro") -> Tensor:
        """A norm of W, (*b): "fro", "nuc", 2 or −2, as in ``torch.linalg.matrix_norm``.  O(min(n, m)) operations.

        2 is the largest singular value, −2 the smallest, "nuc" their sum.
        """
        if ord not in _VECTOR_NORMS:
            raise ValueError(f"`ord` should be one of {', '.join(map(repr, _VECTOR_NORMS))}; got {ord!r}")
        return torch.linalg.vector_norm(self._values(), _VECTOR_NORMS[ord], -1).expand(self._batch())

    def cond(self) -> Tensor:
        """The largest over the smallest singular value, (*b); inf if W is singular.  O(min(n, m)) operations."""
        smallest = self.norm(-2)
        singular = smallest == 0
        return torch.where(singular, math.inf, self.norm(2) / torch.where(singular, 1, smallest))

    def rank(self, tol: float | Tensor | None = None) -> Tensor:
        """How many singular values are above ``tol``, (*b), int64.  O(min(n, m)) operations.

        By default ``tol`` is max(n, m) roundings of the largest of them, as in ``torch.linalg.matrix_rank``.
        """
        tol = self.norm(2).detach() * self._rounding() if tol is None else torch.as_tensor(tol, device=self.device)
        return (self._values().detach().abs() > tol.unsqueeze(-1)).sum(-1).expand(self._batch())

    def truncate(self, *, rank: int | None = None, energy: float | None = None) -> Self:
        """The nearest matrix of lower rank: all but the largest |sigma| set to zero, U and V as they are.

        Args:
            rank: how many to keep, 1 to min(n, m).
            energy: keep as few as make up this fraction of ‖W‖² = Σ sigma², above 0 and at most 1.
        """
        sizes, order = self.sigma.detach().abs().sort(dim=-1, descending=True, stable=True)
        kept: int | Tensor
        if rank is not None and energy is None:
            largest = min(self._sides())
            if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= largest:
                raise ValueError(f"`rank` should be an int from 1 to {largest} for {self!r}; got {rank!r}")
            kept = rank
        elif energy is not None and rank is None:
            if not 0 < energy <= 1:
                raise ValueError(f"`energy` should be above 0 and at most 1; got {energy}")
            kept = _number_with_energy(sizes, energy)
        else:
            raise ValueError(f"exactly one of `rank` and `energy` should be set; got rank={rank} and energy={energy}")
        return self._with(self.sigma * (order.argsort(-1) < kept))

    def _with(self, sigma: Tensor, transposed: bool = False) -> Self:
        """Returns a matrix with other singular values and the same U and V, or with U and V exchanged."""
        other = object.__new__(type(self))
        other.sigma = sigma
        if self._shared is None:
            other.U, other.V = (self.V, self.U) if transposed else (self.U, self.V)
        else:
            other._shared = self._shared.mT if transposed else self._shared
            other._transposed = self._transposed != transposed
        return other

    def _orientation(self) -> Tensor:
        return self.U.det() * self.V.det()

    def _values(self) -> Tensor:
        """sigma, padded with zeros: (*b, min(n, m))."""
        missing = min(self._sides()) - self.sigma.shape[-1]
        return F.pad(self.sigma, (0, missing)) if missing else self.sigma

    def _rounding(self) -> float:
        return max(self._sides()) * torch.finfo(self.dtype).eps

    def _batch(self) -> tuple[int, ...]:
        if self._shared is not None:
            return ()
        return broadcast_batches(U=self.U._batch(), sigma=self.sigma.shape[:-1], V=self.V._batch())

    def _sides(self) -> tuple[int, int]:
        if self._shared is not None:
            n, m = self._shared.shape
            return n, m
        return self.U.V.shape[-1], self.V.V.shape[-1]

    def _times(self, X: Tensor) -> Tensor:
        if self._is_one_product():
            return self._svd_linear(X.mT).mT
        U, V, k = self.U, self.V, self.sigma.shape[-1]
        Y = self.sigma.unsqueeze(-1) * V.mT._times(X)[..., :k, :]
        return U._times(F.pad(Y, (0, 0, 0, U.V.shape[-1] - k)))

    def _times_rows(self, X: Tensor) -> Tensor:
        return self._svd_linear(X) if self._is_one_product() else super()._times_rows(X)

    def _svd_linear(self, X: Tensor) -> Tensor:
        if autocast_enabled(X):
            with torch.autocast(X.device.type, enabled=False):
                return self._svd_linear(X)
        if self._shared is not None:
            return svd_linear(X, self._shared, self.sigma)
        return svd_linear(X, self.U.V, self._signed_sigma(), self.V.V, form=self.U.form)

    def _is_one_product(self) -> bool:
        """True if ``svd_linear`` takes W: no batch, one form, and no transposed factor."""
        if self._shared is not None:
            return True
        U, V = self.U, self.V
        batched = self.sigma.ndim > 1 or any(Q.V.ndim > 2 or (Q.signs is not None and Q.signs.ndim > 1) for Q in (U, V))
        return U.form == V.form and not (batched or U.transposed or V.transposed)

    def _signed_sigma(self) -> Tensor:
        """sigma times the signs of U's and V's first k columns, except signs that ``svd_linear`` reads itself: (k,)."""
        sigma, k = self.sigma, self.sigma.shape[-1]
        for Q in (self.U, self.V):
            signs = None if Q._signs_are_stored else Q.signs_of(k)
            sigma = sigma if signs is None else sigma * signs
        return sigma

    def _form(self) -> str:
        return self.U.form if self.U.form == self.V.form else f"{self.U.form} and {self.V.form}"

    def _check_square(self, operation: str) -> None:
        n, m = self._sides()
        if n != m:
            raise ValueError(f"{operation}: the matrix should be square; got {self!r}")


def log_abs_product(sigma: Tensor) -> Tensor:
    """Σ log|sigma| over the last dimension.  (*b, k) → (*b). A zero makes it −inf, and has the gradient 0."""
    zero = sigma == 0  # where autograd has 0/0
    return torch.where(zero, 1, sigma).abs().log().masked_fill(zero, -math.inf).sum(-1)


def _check_factors(U: Orthogonal, sigma: Tensor, V: Orthogonal) -> None:
    if not isinstance(sigma, Tensor):
        raise TypeError(f"`sigma` should be a tensor; got {type(sigma).__name__}")
    n, m = U.V.shape[-1], V.V.shape[-1]
    if sigma.ndim < 1 or sigma.shape[-1] > min(n, m):
        raise ValueError(
            f"`sigma` should have shape (k,) or (*b, k) with k ≤ {min(n, m)} for a matrix of {n}×{m}; "
            f"got {tuple(sigma.shape)}"
        )
    if not U.dtype == sigma.dtype == V.dtype:
        raise TypeError(f"`U`, `sigma` and `V` should have one dtype; got {U.dtype}, {sigma.dtype} and {V.dtype}")
    if not U.device == sigma.device == V.device:
        raise ValueError(f"`U`, `sigma` and `V` should be on one device; got {U.device}, {sigma.device}, {V.device}")
    broadcast_batches(U=U._batch(), sigma=sigma.shape[:-1], V=V._batch())


def _number_with_energy(sizes: Tensor, energy: float) -> Tensor:
    """The smallest number of leading ``sizes`` whose squares sum to the fraction ``energy`` of the total: (*b, 1)."""
    sizes = sizes.to(computing_dtype(sizes.dtype))
    largest = sizes[..., :1]
    squares = (sizes / torch.where(largest == 0, 1, largest)).square()
    rest = (
        squares.flip(-1).cumsum(-1).flip(-1)
    )  # sums of each square and all after it, from the smallest up: nothing is rounded away
    # 0.9 of ten equal values is nine of them, whatever the last digit of 1 − 0.9.
    slack = 1 + sizes.shape[-1] * torch.finfo(sizes.dtype).eps
    return (rest > (1 - energy) * slack * rest[..., :1]).sum(-1, keepdim=True)
