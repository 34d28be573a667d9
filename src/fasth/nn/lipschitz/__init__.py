"""Layers, losses and certificates for networks with a Lipschitz constant of 1, and a bound of any network's constant.

All constants are for the Euclidean norm of whole images or vectors. ``docs/convolutions.md`` has an example.
"""

from fasth.nn.lipschitz.bounds import LipschitzBound, bound, conv_norm_bound
from fasth.nn.lipschitz.classifiers import certified_radius, margin_loss
from fasth.nn.lipschitz.layers import GroupSort, LinearUnitRows, NormPool2d, Residual, ScaledAvgPool2d

__all__ = [
    "GroupSort",
    "LinearUnitRows",
    "LipschitzBound",
    "NormPool2d",
    "Residual",
    "ScaledAvgPool2d",
    "bound",
    "certified_radius",
    "conv_norm_bound",
    "margin_loss",
]
