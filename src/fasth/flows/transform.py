"""Invertible layers as transforms of ``torch.distributions``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributions import constraints
from torch.distributions.transforms import Transform

from fasth import _private
from fasth.flows.layer import both_with_any_batch, event_shape, invertible, logabsdet, with_any_batch

__all__ = ["SVDTransform"]


class SVDTransform(Transform, nn.Module):
    """y = W x + bias with its inverse and log |det W| from the factors of W, at no more than the cost of the layer.

    A ``Transform`` and, as Pyro's transforms are, a module: its parameters are those of the layer.

    Args:
        layer: square ``LinearSVD``, ``LinearSymmetric`` or ``LinearOrthogonal``, for vectors (*, d), or ``Conv1dSVD``
            or ``Conv2dSVD`` of 1×1 kernels, equal channels, stride 1 and no padding, for (*, channels, length) or
            (*, channels, height, width). With a spectrum such as ``positive()`` it is invertible whatever is learnt;
            with ``free()`` a singular value may reach zero, where there is no inverse and the determinant is zero.
        cache_size: as in every Transform: with 1, the inverse of the last result is the argument that it came from.

    ``log_abs_det_jacobian(x, y)`` has the shape of the batch, (*). It is Σ log |σ|, times the number of positions for
    a convolution: O(d), and nothing is decomposed.

    Example:
        >>> base = torch.distributions.MultivariateNormal(torch.zeros(8), torch.eye(8))
        >>> flow = SVDTransform(fasth.LinearSVD(8, 8, spectrum=fasth.spectrum.positive()))
        >>> torch.distributions.TransformedDistribution(base, [flow]).log_prob(torch.randn(5, 8)).shape
        torch.Size([5])
    """

    bijective = True

    def __init__(self, layer: nn.Module, cache_size: int = 0) -> None:
        super().__init__(cache_size=cache_size)
        self.cache_size = cache_size
        self.layer: Any = invertible(layer)
        self.domain = self.codomain = constraints.independent(constraints.real, len(event_shape(layer)))

    def with_cache(self, cache_size: int = 1) -> SVDTransform:
        return self if cache_size == self.cache_size else SVDTransform(self.layer, cache_size)

    def _call(self, x: Tensor) -> Tensor:
        return with_any_batch(self.layer, self.layer, x)

    def _inverse(self, y: Tensor) -> Tensor:
        return with_any_batch(self.layer.inverse, self.layer, y)

    def call_and_ladj(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """y and log |det ∂y/∂x|, with the singular values computed once for both: (*, *event) and (*)."""
        return both_with_any_batch(self.layer.forward_and_logabsdet, self.layer, x)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """log |det ∂y/∂x| = Σ log |σ|, for each position of a convolution: (*), the shape of the batch.  O(d)."""
        return logabsdet(self.layer, x)

    # Transform defines __eq__ and so is not hashable; a module has to be.
    __hash__ = nn.Module.__hash__
    __repr__ = nn.Module.__repr__

    def __getstate__(self) -> dict[str, Any]:
        return _private.without_last_values(super().__getstate__())
