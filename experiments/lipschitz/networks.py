"""One network for grey images, made of the layers of each method.

Pixels become channels, 2×2 first, then follow four 3×3 convolutions, the third with stride 2, with MaxMin between them,
an orthogonal matrix, MaxMin, and a last layer with rows of norm 1. The methods differ in the convolutions; for
``spectral_norm`` and plain networks the matrices differ, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import fasth
from fasth.nn.lipschitz import GroupSort, LinearUnitRows

CLASSES, WIDTH, FEATURES = 10, 16, 128
ConvOf = Callable[[int, int, int], nn.Module]
CIRCULAR: dict[str, Any] = {"padding": 1, "padding_mode": "circular"}


class ReshapedKernel(nn.Module):
    """A 3×3 convolution whose kernel, as a matrix (out, in·9), has orthonormal rows or columns over √(patches of a
    pixel): its norm is at most 1."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.matrix, self.stride = fasth.LinearOrthogonal(inputs * 9, outputs), stride
        self.scale = 1 / math.ceil(3 / stride)

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.scale * self.matrix.weight.unflatten(1, (-1, 3, 3))
        return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), kernel, self.matrix.bias, self.stride)

    def lipschitz_bound(self) -> float:
        return 1.0


def aoc(inputs: int, outputs: int, stride: int) -> nn.Module:
    from orthogonium.layers.conv.AOC import AdaptiveOrthoConv2d

    return AdaptiveOrthoConv2d(inputs, outputs, 3, stride, 1)


def by_construction() -> Mapping[type[nn.Module], Callable[[Any], float]]:
    """The constants of orthogonium's layers, which ``fasth.lipschitz.bound`` does not know: what they are made for."""
    if not find_spec("orthogonium"):
        return {}
    from orthogonium.layers.conv.AOC.bcop_x_rko_conv import BcopRkoConv2d
    from orthogonium.layers.conv.AOC.fast_block_ortho_conv import FastBlockConv2d

    return {kind: lambda layer: 1.0 for kind in (FastBlockConv2d, BcopRkoConv2d)}


@dataclass(frozen=True)
class Method:
    """The layers and the loss of one method. ``margin``: the margin loss instead of cross entropy."""

    conv: ConvOf
    dense: Callable[[int, int], nn.Module] = fasth.LinearOrthogonal
    last: Callable[[int, int], nn.Module] = LinearUnitRows
    activation: Callable[[], nn.Module] = field(default=GroupSort)
    margin: bool = True


METHODS: dict[str, Method] = {
    "orthogonal": Method(lambda n, m, stride: fasth.Conv2dOrthogonal(n, m, 3, stride, **CIRCULAR)),
    "AOC": Method(aoc),
    "reshaped kernel": Method(ReshapedKernel),
    "spectral_norm": Method(
        lambda n, m, stride: spectral_norm(nn.Conv2d(n, m, 3, stride, **CIRCULAR)),
        dense=lambda n, m: spectral_norm(nn.Linear(n, m)),
    ),
    "plain": Method(
        lambda n, m, stride: nn.Conv2d(n, m, 3, stride, **CIRCULAR), nn.Linear, nn.Linear, nn.ReLU, margin=False
    ),
}
OURS = ("orthogonal",)


def installed() -> list[str]:
    """The methods whose libraries are installed."""
    return [name for name in METHODS if name != "AOC" or (find_spec("orthogonium") and find_spec("einops"))]


def network(method: Method, height: int, width: int) -> nn.Sequential:
    """Scores of images of (1, height, width), which are multiples of 4."""
    conv, act, c = method.conv, method.activation, WIDTH
    return nn.Sequential(
        *(nn.PixelUnshuffle(2), conv(4, c, 1), act(), conv(c, c, 1), act(), conv(c, 2 * c, 2), act()),
        *(conv(2 * c, 2 * c, 1), act(), nn.Flatten(), method.dense(2 * c * height * width // 16, FEATURES), act()),
        method.last(FEATURES, CLASSES),
    )
