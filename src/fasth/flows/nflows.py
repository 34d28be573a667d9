"""Invertible layers as transforms of nflows (``pip install nflows``)."""

from __future__ import annotations

from typing import Any

from nflows.transforms.base import Transform
from torch import Tensor, nn

from fasth.flows.layer import forward, inverse, invertible

__all__ = ["SVDTransform"]


class SVDTransform(Transform):
    """y = W x + bias and log |det W|, from the factors of W.  x: (batch, d) → (batch, d) and (batch,).

    In nflows ``forward`` takes data to noise: a density costs the layer, a sample the layer's inverse, which is about
    the same, and the determinant O(d). ``nflows.transforms.InverseTransform`` turns it round.

    Args:
        layer: as ``fasth.SVDTransform`` takes it. Convolutions are for images (batch, channels, height, width) or
            sequences (batch, channels, length).

    ``context`` is not used: the layer is the same for every condition.

    Example:
        >>> from nflows.distributions import StandardNormal
        >>> from nflows.flows import Flow
        >>> layer = fasth.LinearSVD(8, 8, spectrum=fasth.spectrum.positive())
        >>> Flow(SVDTransform(layer), StandardNormal([8])).log_prob(torch.randn(5, 8)).shape
        torch.Size([5])
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = invertible(layer)

    def forward(self, inputs: Tensor, context: Any = None) -> tuple[Tensor, Tensor]:
        """y = W x + bias and log |det W|.  x: (batch, d) → (batch, d) and (batch,)."""
        return forward(self.layer, inputs)

    def inverse(self, inputs: Tensor, context: Any = None) -> tuple[Tensor, Tensor]:
        """x = W⁻¹ (y − bias) and −log |det W|.  y: (batch, d) → (batch, d) and (batch,)."""
        return inverse(self.layer, inputs)
