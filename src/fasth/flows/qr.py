"""The invertible linear map, or 1×1 convolution, W = Q R, with Q a product of reflections."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fasth.flows.reflectors import ReflectorTransform, by_matrix, check_reflectors, check_triangle
from fasth.functional import householder
from fasth.operators.matrix import broadcast_batches

__all__ = ["QRTransform"]


class QRTransform(ReflectorTransform):
    """y = W x at every position, with W = Q R, Q = H₁H₂⋯H_r and R upper triangular; log |det| = positions · Σ log rᵢᵢ.

    The diagonal of R is given by its logarithm, so W is invertible for any numbers. The inverse is x = R⁻¹Qᵀy,
    by a triangular solve. With c reflectors every W is reached whose determinant has the sign (−1)ᶜ.

    Args:
        V: (*b, r, c), the reflectors, as in ``HouseholderTransform``.
        R: (*b, c, c). Above the diagonal it is R; on the diagonal it is log rᵢᵢ, so zeros make R = I. Entries below the
            diagonal are not read.
        event_dim: 1 for vectors (*, c); 3 for images (*, c, height, width), the invertible 1×1 convolution; 2 for
            sequences (*, c, length).
        cache_size: as in every Transform: with 1, the inverse of the last result is the argument that it came from.

    The batch * of x broadcasts against the batches b of V and R: no batch is one W for all, the parameters of a model.
    A position takes 4·r·c + 2·c² operations. Where more than c positions share W, it is formed: 4·r·c² operations, and
    2·c² for each position. The determinant takes O(c).

    Example:
        >>> encoder = nn.Linear(10, 2 * 6 * 6)  # a 1×1 convolution for each image, from a context of 10 numbers
        >>> V, R = encoder(torch.randn(5, 10)).unflatten(-1, (2, 6, 6)).unbind(-3)
        >>> flow, x = QRTransform(V, R, event_dim=3), torch.randn(5, 6, 4, 4)
        >>> y = flow(x)
        >>> y.shape, flow.log_abs_det_jacobian(x, y).shape, torch.allclose(flow.inv(y), x, atol=1e-3)
        (torch.Size([5, 6, 4, 4]), torch.Size([5]), True)

    Hoogeboom, van den Berg and Welling, *Emerging Convolutions for Generative Normalizing Flows*, 2019.
    """

    def __init__(self, V: Tensor, R: Tensor, event_dim: int = 1, cache_size: int = 0) -> None:
        check_reflectors(V)
        c = V.shape[-1]
        check_triangle("R", R, c)
        if R.shape[-1] != c:
            raise ValueError(
                f"`R` should have shape (*b, {c}, {c}) to match `V` of shape {tuple(V.shape)}; got {tuple(R.shape)}"
            )
        if event_dim not in (1, 2, 3):
            raise ValueError(f"`event_dim` should be 1, 2 or 3; got {event_dim!r}")
        batch = broadcast_batches(V=tuple(V.shape[:-2]), R=tuple(R.shape[:-2]))
        super().__init__({"V": V, "R": R}, batch, event_dim, cache_size)
        self.R = R

    def with_cache(self, cache_size: int = 1) -> QRTransform:
        return QRTransform(self.V, self.R, self.event_dim, cache_size)

    def _call(self, x: Tensor) -> Tensor:
        return self._of_rows(self._multiply, x)

    def _inverse(self, y: Tensor) -> Tensor:
        return self._of_rows(self._solve, y)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """positions · Σ log rᵢᵢ: (*), the shape of the batch.  O(c)."""
        shape, n = self.forward_shape(x.shape), self.event_dim
        logabsdet = self.R.diagonal(dim1=-2, dim2=-1).sum(-1)
        return (math.prod(shape[len(shape) - n + 1 :]) * logabsdet).expand(shape[:-n]).clone()

    def _of_rows(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Applies the function to x as rows (*b, m, c), where m rows share a matrix."""
        shape, n = self.forward_shape(x.shape), self.event_dim
        c, positions = shape[-n], math.prod(shape[len(shape) - n + 1 :])
        rows = x.reshape(*x.shape[:-n], c, positions).mT
        return by_matrix(function, rows, len(self.batch)).mT.reshape(shape)

    def _triangle(self) -> Tensor:
        return self.R.triu(1) + self.R.diagonal(dim1=-2, dim2=-1).exp().diag_embed()

    def _multiply(self, rows: Tensor) -> Tensor:
        """x Rᵀ Qᵀ. Q R is formed first if that has fewer rows."""
        Rt = self._triangle().mT
        if rows.shape[-2] > Rt.shape[-1]:
            return rows @ householder(Rt, self.V)
        return householder(rows @ Rt, self.V)

    def _solve(self, rows: Tensor) -> Tensor:
        """y Q R⁻ᵀ."""
        w = householder(rows, self.V, transpose=True)
        return torch.linalg.solve_triangular(self._triangle().mT, w, upper=False, left=False)
