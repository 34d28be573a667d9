"""The layers that can be adapted: their numbers of input and output features, and their weight as matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

Convolution: TypeAlias = nn.modules.conv._ConvNd
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class Features(NamedTuple):
    """The sizes of a layer's input and output along the dimension that holds its features."""

    inputs: int
    outputs: int
    axis: int  # index of the dimension, from the end: −1, or −3 for images


def features_of(layer: Any) -> Features | None:
    """The features of a layer, or None if it cannot be adapted.

    Supported are the convolutions of ``torch.nn``, the ``Conv1D`` of transformers, and every class with the attributes
    ``in_features`` and ``out_features``, including quantized layers; these classes act on the last dimension.
    """
    if isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED)):
        return Features(layer.in_channels, layer.out_channels, -1 - len(layer.kernel_size))
    if _is_conv1d_of_transformers(layer):
        return Features(layer.nx, layer.nf, -1)
    sizes = getattr(layer, "in_features", None), getattr(layer, "out_features", None)
    if isinstance(layer, nn.Module) and all(isinstance(size, int) and size > 0 for size in sizes):
        return Features(*sizes, -1)  # type: ignore[arg-type]
    return None


class Matrices(NamedTuple):
    """Converts a dense weight to matrices (*p, n, m), one for each position p of a kernel, and back."""

    read: Callable[[Tensor], Tensor]
    write: Callable[[Tensor], Tensor]


def matrices_of(layer: Any) -> Matrices | str:
    """The conversion of a layer's weight to matrices from input to output features, or the reason why there is none."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return f"{type(layer).__name__} has no dense weight"
    if isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED)):
        if layer.groups != 1:
            return "with groups its weight is several matrices"
        places = (1, 0) if isinstance(layer, TRANSPOSED) else (0, 1)
        return Matrices(lambda W: W.movedim(places, (-2, -1)), lambda M: M.movedim((-2, -1), places))
    if _is_conv1d_of_transformers(layer):
        return Matrices(lambda W: W.mT, lambda M: M.mT)
    features = features_of(layer)
    if features is None or tuple(weight.shape) != (features.outputs, features.inputs):
        return f"the weight of {type(layer).__name__} has shape {tuple(weight.shape)}"
    return Matrices(lambda W: W, lambda M: M)


def _is_conv1d_of_transformers(layer: Any) -> bool:
    kind = type(layer)
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")
