"""The operations that flows need of a layer: y = W x + bias and its inverse, each with the log-determinant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fasth.nn import (
    Conv1dMapSVD,
    Conv1dOrthogonal,
    Conv1dSVD,
    Conv2dMapSVD,
    Conv2dOrthogonal,
    Conv2dSVD,
    LinearOrthogonal,
    LinearSVD,
    LinearSymmetric,
)
from fasth.nn.factors import SVDFactors

_LINEAR = (LinearSVD, LinearSymmetric, LinearOrthogonal)
_CONV = (Conv1dSVD, Conv2dSVD, Conv1dMapSVD, Conv2dMapSVD, Conv1dOrthogonal, Conv2dOrthogonal)


def invertible(layer: nn.Module) -> Any:
    """Checks that a layer can have an inverse and returns it: square linear, 1×1 convolution or exact, of full rank."""
    if isinstance(layer, _LINEAR):
        layer._check_square("SVDTransform")
    elif isinstance(layer, _CONV):
        layer._check_invertible("SVDTransform")
        if layer.in_channels != layer.out_channels:  # an orthogonal convolution with a stride
            raise ValueError(f"`SVDTransform` needs as many output as input channels; got {layer}")
    else:
        names = ", ".join(kind.__name__ for kind in (*_LINEAR, *_CONV))
        raise TypeError(f"`layer` should be one of {names}; got {type(layer).__name__}")
    if isinstance(layer, SVDFactors) and layer._is_thin:
        raise ValueError(f"`SVDTransform` needs a layer of full rank; got {layer}")
    return layer


def event_shape(layer: Any) -> tuple[int | str, ...]:
    """The shape of one sample: (features,), (channels, length) or (channels, height, width), sizes where known."""
    if isinstance(layer, _LINEAR):
        return (layer.in_features,)
    if not isinstance(layer, _CONV):
        invertible(layer)  # raises if the layer was replaced, by ``to_dense`` for example
    return (layer.in_channels, *(("length",) if len(layer.kernel_size) == 1 else ("height", "width")))


def written(shape: tuple[int | str, ...]) -> str:
    """Formats a shape for messages, without quotes around words: (3, height, width)."""
    return str(shape).replace("'", "")


def forward(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """y = W x + bias and log |det ∂y/∂x|.  x: (batch, *event) → (batch, *event) and (batch,)."""
    check_batch(layer, x)
    return both_with_any_batch(layer.forward_and_logabsdet, layer, x)


def inverse(layer: Any, y: Tensor) -> tuple[Tensor, Tensor]:
    """x = W⁻¹ (y − bias) and log |det ∂x/∂y|.  y: (batch, *event) → (batch, *event) and (batch,)."""
    check_batch(layer, y)
    return both_with_any_batch(layer.inverse_and_logabsdet, layer, y)


def logabsdet(layer: Any, x: Tensor) -> Tensor:
    """log |det| of the layer as a map of one sample, for every sample.  x: (*, *event) → (*)."""
    batch = x.ndim - len(event_shape(layer))
    positions = x.shape[batch + 1 :]  # the positions of a convolution follow the channels
    return layer.logabsdet(*positions).expand(x.shape[:batch]).clone()  # flow libraries sum determinants in place


def with_any_batch(function: Callable[[Tensor], Tensor], layer: Any, x: Tensor) -> Tensor:
    """Applies ``function``, the layer or its inverse, to x: (*, *event)."""
    return function(_with_one_batch(layer, x)).reshape(x.shape)


def both_with_any_batch(
    function: Callable[[Tensor], tuple[Tensor, Tensor]], layer: Any, x: Tensor
) -> tuple[Tensor, Tensor]:
    """Applies ``function``, which also returns a log-determinant, to x: (*, *event) → (*, *event) and (*)."""
    y, logabsdet = function(_with_one_batch(layer, x))
    return y.reshape(x.shape), logabsdet.expand(x.shape[: x.ndim - len(event_shape(layer))]).clone()


def _with_one_batch(layer: Any, x: Tensor) -> Tensor:
    """Reshapes x to at most one batch dimension, as convolutions require."""
    batch = x.ndim - len(event_shape(layer))
    return x if batch < 2 or isinstance(layer, _LINEAR) else x.flatten(0, batch - 1)


def check_batch(layer: Any, x: Tensor) -> None:
    expected = event_shape(layer)
    if x.ndim != 1 + len(expected) or x.shape[1] != expected[0]:
        shape = written(("batch", *expected))
        raise ValueError(f"the input should have shape {shape} to match {layer}; got {tuple(x.shape)}")
