"""Invertible layers as transforms of ``torch.distributions``, for normalizing flows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributions import constraints
from torch.distributions.transforms import Transform

from fasth.nn import Conv1dSVD, Conv2dSVD, LinearOrthogonal, LinearSVD, LinearSymmetric

__all__ = ["SVDTransform"]

_LINEAR = (LinearSVD, LinearSymmetric, LinearOrthogonal)
_CONV = (Conv1dSVD, Conv2dSVD)


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
        >>> flow = SVDTransform(LinearSVD(8, 8, spectrum=fasth.spectrum.positive()))
        >>> torch.distributions.TransformedDistribution(base, [flow]).log_prob(torch.randn(5, 8)).shape
        torch.Size([5])
    """

    bijective = True

    def __init__(self, layer: nn.Module, cache_size: int = 0) -> None:
        super().__init__(cache_size=cache_size)
        self.layer: Any = layer
        if isinstance(layer, _LINEAR):
            layer._check_square("SVDTransform")
            event_dim = 1
        elif isinstance(layer, _CONV):
            layer._check_invertible("SVDTransform")
            event_dim = 1 + len(layer.kernel_size)
        else:
            names = ", ".join(kind.__name__ for kind in (*_LINEAR, *_CONV))
            raise TypeError(f"`layer` should be one of {names}; got {type(layer).__name__}")
        self.domain = self.codomain = constraints.independent(constraints.real, event_dim)

    def with_cache(self, cache_size: int = 1) -> SVDTransform:
        return self if cache_size == self._cache_size else SVDTransform(self.layer, cache_size)

    def _call(self, x: Tensor) -> Tensor:
        return self._of_events(self.layer, x)

    def _inverse(self, y: Tensor) -> Tensor:
        return self._of_events(self.layer.inverse, y)

    def _of_events(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A convolution takes one dimension as batch, or none."""
        if x.ndim - self.event_dim < 2 or self.event_dim == 1:
            return function(x)
        return function(x.flatten(0, -self.event_dim - 1)).reshape(x.shape)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        batch = x.ndim - self.event_dim
        positions = x.shape[batch + 1 :]  # after the channels of a convolution
        return self.layer.logabsdet(*positions).expand(x.shape[:batch])

    # A Transform compares by identity, and is then not hashable; a module has to be.
    __hash__ = nn.Module.__hash__
    __repr__ = nn.Module.__repr__

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return state | {"_cached_x_y": (None, None)} if self._cache_size else state
