"""A symmetric matrix as its eigendecomposition: the paper's exponential and Cayley map, and any other function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fasth.operators.matrix import LinAlgError, computing_dtype, has_entry, values_known
from fasth.operators.orthogonal import Orthogonal, check_form
from fasth.operators.svd import SVD


class Symmetric(SVD):
    """W = U[:, :k] diag(sigma) U[:, :k]ᵀ, an n×n matrix. Its eigenvalues are sigma and n − k zeros.

    An ``SVD`` with V = U, whose operations return ``Symmetric`` matrices.

    Args:
        U: n×n, an ``Orthogonal`` or its full reflectors.
        sigma: (k,) or (*b, k) with k ≤ n, of any sign and in any order.
    """

    def __init__(self, U: Orthogonal | Tensor, sigma: Tensor) -> None:
        U = U if isinstance(U, Orthogonal) else Orthogonal(U)
        super().__init__(U, sigma, U)

    @classmethod
    def from_dense(cls, W: Tensor, form: str = "compact") -> Symmetric:
        """The eigendecomposition of W, (n, n) or (*b, n, n), by ``torch.linalg.eigh``: sigma ascending.

        The factors are constants to autograd.
        """
        check_form(form)
        if W.ndim < 2 or W.shape[-1] != W.shape[-2] or W.shape[-1] < 1:
            raise ValueError(f"`W` should have shape (n, n) or (*b, n, n) with n ≥ 1; got {tuple(W.shape)}")
        W = W.detach()
        if values_known(W):
            _check_symmetric(W)
        sigma, U = torch.linalg.eigh(W.to(computing_dtype(W.dtype)))
        return cls(Orthogonal.from_orthonormal(U, form, W.dtype), sigma.to(W.dtype))

    def expm(self) -> Symmetric:
        """The matrix exponential, U e^Σ Uᵀ.  O(n) operations."""
        return self.apply(torch.exp)

    def cayley(self) -> Symmetric:
        """The Cayley map, (I − W)(I + W)⁻¹ = U (I − Σ)(I + Σ)⁻¹ Uᵀ.  O(n) operations.

        Raises ``torch.linalg.LinAlgError`` if an eigenvalue is −1, as ``torch.linalg.solve`` does, where values can be
        read (see ``inverse``).
        """
        if has_entry(self.sigma, -1):
            raise LinAlgError(f"cayley: I + W is singular, {self!r} has an eigenvalue that is -1")
        return self.apply(lambda sigma: (1 - sigma) / (1 + sigma))

    def apply(self, f: Callable[[Tensor], Tensor]) -> Symmetric:
        """f(W) = U f(Σ) Uᵀ.  f maps all n eigenvalues, zeros included, one by one: (*b, n) → (*b, n)."""
        sigma = self._values()
        result = f(sigma)
        if result.shape != sigma.shape:
            raise ValueError(f"`f` should keep the shape {tuple(sigma.shape)}; got {tuple(result.shape)}")
        return self._with(result)

    def _orientation(self) -> Tensor:
        return torch.ones((), dtype=self.dtype, device=self.device)  # det U · det U


def _check_symmetric(W: Tensor) -> None:
    """Checks W = Wᵀ up to the rounding of its entries and of the product that computed them."""
    P = W.to(computing_dtype(W.dtype))
    error, size = (P - P.mT).abs().amax((-2, -1)), P.abs().amax((-2, -1))
    tolerance = 4 * torch.finfo(W.dtype).eps + 10 * W.shape[-1] * torch.finfo(P.dtype).eps
    if not (error <= tolerance * size).all():
        raise ValueError(
            f"`W` should be symmetric, W = Wᵀ within {tolerance:.1e} of its largest entry; "
            f"got an error of {(error / size).max():.1e}"
        )
