"""Invertible layers as lazy transforms of Zuko (``pip install zuko``)."""

from __future__ import annotations

from typing import Any

from torch import nn
from zuko.lazy import LazyTransform

from fasth.flows import transform
from fasth.flows.layer import invertible

__all__ = ["SVDTransform"]


class SVDTransform(LazyTransform):
    """Returns ``fasth.SVDTransform(layer)`` when called: y = W x + bias, with log |det W| from the factors of W.

    In Zuko a transform takes data to noise: a density costs the layer, a sample the layer's inverse, which is about
    the same, and the determinant O(d). ``.inv`` turns it round.

    Args:
        layer: as ``fasth.SVDTransform`` takes it.

    The context ``c`` is not used: the layer is the same for every condition.

    Example:
        >>> normal = zuko.distributions.DiagNormal
        >>> base = zuko.lazy.UnconditionalDistribution(normal, torch.zeros(8), torch.ones(8), buffer=True)
        >>> layer = fasth.LinearSVD(8, 8, spectrum=fasth.spectrum.positive())
        >>> zuko.flows.Flow([SVDTransform(layer)], base)().log_prob(torch.randn(5, 8)).shape
        torch.Size([5])
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = invertible(layer)

    def forward(self, c: Any = None) -> transform.SVDTransform:
        """Returns the transform; the context is ignored."""
        return transform.SVDTransform(self.layer)
