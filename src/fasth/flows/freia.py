"""Invertible layers as modules of FrEIA (``pip install FrEIA``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from FrEIA.modules import InvertibleModule
from torch import Tensor, nn

from fasth.flows.layer import event_shape, forward, inverse, invertible, written

__all__ = ["SVDTransform"]

Dims = Iterable[tuple[int, ...]]


class SVDTransform(InvertibleModule):
    """y = W x + bias and log |det W|, from the factors of W.  x: ((batch, d),) → ((batch, d),) and (batch,).

    With ``rev=True`` the inverse, which costs about the same, and −log |det W|. The determinant is O(d), and is
    returned with ``jac=False`` too.

    Args:
        dims_in: the shape of one sample, as FrEIA passes it: [(d,)], [(channels, length)] or
            [(channels, height, width)].
        layer: as ``fasth.SVDTransform`` takes it.
        dims_c: shapes of conditions. They are not used: the layer is the same for every condition.

    Example:
        >>> inn = FrEIA.framework.SequenceINN(8)
        >>> inn.append(SVDTransform, layer=fasth.LinearSVD(8, 8, spectrum=fasth.spectrum.positive()))
        >>> z, logabsdet = inn(torch.randn(5, 8))
    """

    def __init__(self, dims_in: Dims, layer: nn.Module, dims_c: Dims | None = None) -> None:
        super().__init__(dims_in, dims_c)
        self.layer = invertible(layer)
        expected = event_shape(layer)
        if len(self.dims_in) != 1 or len(self.dims_in[0]) != len(expected) or self.dims_in[0][0] != expected[0]:
            raise ValueError(f"`dims_in` should be [{written(expected)}] to match {layer}; got {self.dims_in}")

    def forward(
        self, x_or_z: Iterable[Tensor], c: Any = None, rev: bool = False, jac: bool = True
    ) -> tuple[tuple[Tensor], Tensor]:
        """(W x + bias,) and log |det W|; with ``rev`` (W⁻¹ (x − bias),) and −log |det W|."""
        (x,) = x_or_z
        y, logabsdet = inverse(self.layer, x) if rev else forward(self.layer, x)
        return (y,), logabsdet

    def output_dims(self, input_dims: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The shapes of the outputs, equal to the shapes of the inputs."""
        return input_dims
