"""Invertible layers as flows of normflows (``pip install normflows``)."""

from __future__ import annotations

from typing import Any

from normflows.flows.base import Flow
from torch import Tensor, nn

from fasth.flows.layer import forward, inverse, invertible

__all__ = ["SVDTransform"]


class SVDTransform(Flow):
    """y = W z + bias and log |det W|, from the factors of W.  z: (batch, d) → (batch, d) and (batch,).

    In normflows ``forward`` takes noise to data: a sample costs the layer, a density the layer's inverse, which is
    about the same, and the determinant O(d). So W is here the matrix of ``forward``; that of normflows' own
    ``Invertible1x1Conv`` is the matrix of ``inverse``. ``normflows.flows.Reverse`` turns it round.

    Args:
        layer: as ``fasth.SVDTransform`` takes it. Convolutions are for images (batch, channels, height, width) or
            sequences (batch, channels, length).

    ``context`` is not used: the layer is the same for every condition.

    Example:
        >>> layer = fasth.LinearSVD(8, 8, spectrum=fasth.spectrum.positive())
        >>> flow = normflows.NormalizingFlow(normflows.distributions.DiagGaussian(8), [SVDTransform(layer)])
        >>> flow.log_prob(torch.randn(5, 8)).shape
        torch.Size([5])
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = invertible(layer)

    def forward(self, z: Tensor, context: Any = None) -> tuple[Tensor, Tensor]:
        """y = W z + bias and log |det W|.  z: (batch, d) → (batch, d) and (batch,)."""
        return forward(self.layer, z)

    def inverse(self, z: Tensor, context: Any = None) -> tuple[Tensor, Tensor]:
        """W⁻¹ (z − bias) and −log |det W|.  z: (batch, d) → (batch, d) and (batch,)."""
        return inverse(self.layer, z)
