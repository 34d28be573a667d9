"""A Lipschitz constant of a model: the product of its layers' constants."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from fasth.nn.conv import Conv1dSVD, Conv2dSVD
from fasth.nn.conv_svd_map import Conv1dMapSVD, Conv2dMapSVD
from fasth.nn.held_weight import held_weights
from fasth.nn.image_map import ImageMap
from fasth.nn.linear import LinearOrthogonal, LinearSVD, LinearSymmetric
from fasth.nn.lipschitz.layers import GroupSort, LinearUnitRows, NormPool2d, Residual, ScaledAvgPool2d
from fasth.nn.orthogonal_conv import (
    Conv1dOrthogonal,
    Conv2dOrthogonal,
    ConvTranspose1dOrthogonal,
    ConvTranspose2dOrthogonal,
)

Rule: TypeAlias = Callable[[Any], float]


class LipschitzBound(NamedTuple):
    """A Lipschitz constant of a model, and the layers' constants, whose product it is."""

    value: float
    parts: dict[str, float]  # maps the name of a module, as in ``model.named_modules()``, to its constant

    def __str__(self) -> str:
        width = max(map(len, (*self.parts, "bound")))
        lines = [f"{name:{width}}  {constant:.6g}" for name, constant in self.parts.items()]
        return "\n".join([*lines, f"{'bound':{width}}  {self.value:.6g}"])


def bound(model: nn.Module, *, rules: Mapping[type[nn.Module], Rule] | None = None) -> LipschitzBound:
    """A Lipschitz constant of ``model`` in evaluation mode: the product of its layers' constants, in float64.

    The constants are exact, to the rounding of the weights, for linear layers, for the layers of fasth and for
    activations. Convolutions of ``torch.nn`` and ``Conv2dSVD`` have the constant ``conv_norm_bound``. A model may be
    one of these layers, ``nn.Sequential``, a module of ``fasth.nn.lipschitz``, or a module with a method
    ``lipschitz_bound()`` that returns a number. The children of a module that has a rule are ignored. Any other module
    raises a ValueError with its name.

    Args:
        rules: maps a class to a function from a module of exactly this class to its constant; precedes the built-in
            rules.

    Example:
        >>> net = nn.Sequential(fasth.Conv2dOrthogonal(2, 8, 3, padding=1), GroupSort(), nn.Flatten())
        >>> print(bound(net.eval()))
        0      1
        1      1
        2      1
        bound  1
    """
    parts: dict[str, float] = {}
    _collect(model, "", dict(_RULES) | dict(rules or {}), parts)
    return LipschitzBound(math.prod(parts.values()), parts)


def _collect(module: nn.Module, name: str, rules: dict[type, Rule], parts: dict[str, float]) -> None:
    kind = type_before_parametrizations(module)
    if kind is nn.Sequential and kind not in rules:
        for key, child in module.named_children():
            _collect(child, f"{name}.{key}" if name else key, rules, parts)
    elif kind is Residual and kind not in rules:
        inner: dict[str, float] = {}
        _collect(module.f, f"{name}.f" if name else "f", rules, inner)  # type: ignore[arg-type]
        alpha = module.alpha.item()  # type: ignore[operator]
        parts[name or "model"] = alpha + (1 - alpha) * math.prod(inner.values())
    else:
        parts[name or "model"] = _constant(module, kind, name, rules)


@torch.no_grad()
def _constant(module: Any, kind: type, name: str, rules: dict[type, Rule]) -> float:
    rule = rules.get(kind)
    if rule is None and not hasattr(module, "lipschitz_bound"):
        raise ValueError(
            f"no Lipschitz constant is known for {name or 'the model'}, {kind.__module__}.{kind.__qualname__}: give it "
            "a method lipschitz_bound(), or say it by `rules`"
        )
    try:
        value = float(module.lipschitz_bound() if rule is None else rule(module))
    except ValueError as error:
        raise ValueError(f"{name or 'the model'}: {error}") from None
    return value


def conv_norm_bound(conv: Any) -> float:
    """A bound of the norm of any 1-d or 2-d convolution, or transposed one, as a map of images of any size.

    Padding may be zero or circular; stride, dilation and groups are arbitrary. The bound is the smaller of two numbers:
    √(taps)·‖K‖₂, with K the kernel as a matrix; and the largest norm of the kernel's Fourier transform on a grid of N
    points per axis, divided by cos(πd/N) for each axis, with d = ⌈(k − 1)/2⌉, since a trigonometric polynomial of
    degree d rises no further between the points of the grid (M. Riesz). For 3×3 kernels, N = 32 and large images the
    bound is 1 % above the norm. Costs N²/2 decompositions of (out, in) matrices.
    """
    if conv.padding_mode not in ("zeros", "circular"):
        raise ValueError(f"`padding_mode` should be 'zeros' or 'circular' for a bound; got {conv.padding_mode!r}")
    kernel = conv.weight.detach().double()
    groups = kernel.unflatten(0, (conv.groups, -1))
    sizes, dims = kernel.shape[2:], kernel.ndim - 2
    by_matrix = math.sqrt(math.prod(sizes)) * torch.linalg.matrix_norm(groups.flatten(2), 2).max().item()
    N = max(32, 8 * max(sizes))
    axes = list(range(-dims, 0))
    matrices = torch.fft.rfftn(groups, s=[1 if k == 1 else N for k in sizes], dim=axes).movedim((1, 2), (-2, -1))
    between = math.prod(math.cos(math.pi * (k // 2) / N) for k in sizes)  # k // 2 = ⌈(k − 1)/2⌉
    return min(by_matrix, torch.linalg.svdvals(matrices).max().item() / between)


def _linear(layer: nn.Linear) -> float:
    return torch.linalg.matrix_norm(layer.weight.double(), 2).item()


def _held(layer: Any) -> float:
    return max(held.singular_values.abs().max().item() for held in held_weights(layer))


def _image_map(layer: ImageMap) -> float:
    return layer.norm().item()


def _batch_norm(layer: Any) -> float:
    _check_evaluating(layer)
    if layer.running_var is None:
        raise ValueError("batch normalization without running statistics has no Lipschitz constant")
    scale = (layer.running_var.double() + layer.eps).rsqrt()
    return (scale if layer.weight is None else scale * layer.weight.abs()).max().item()


def _dropout(layer: nn.Module) -> float:
    _check_evaluating(layer)
    return 1.0


def _check_evaluating(layer: nn.Module) -> None:
    if layer.training:
        raise ValueError(f"{type(layer).__name__} should be in evaluation mode, model.eval(); got training mode")


def _max_pool(layer: Any) -> float:
    """√(number of windows that contain a pixel)."""
    if layer.dilation not in (1, (1,), (1, 1)):
        raise ValueError(f"`dilation` should be 1; got {layer.dilation}")
    return math.sqrt(_windows(layer))


def _avg_pool(layer: Any) -> float:
    """√(number of windows that contain a pixel / pixels of a window). Windows must all be divided alike."""
    partial = layer.ceil_mode or not layer.count_include_pad or getattr(layer, "divisor_override", None)
    if partial:
        raise ValueError("windows at the border should be divided by as many pixels as the others")
    return math.sqrt(_windows(layer) / math.prod(_pair(layer.kernel_size, layer)))


def _windows(layer: Any) -> int:
    sizes = zip(_pair(layer.kernel_size, layer), _pair(layer.stride, layer), strict=True)
    return math.prod(math.ceil(k / s) for k, s in sizes)


def _pair(value: Any, layer: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, tuple) else (value,) * (1 if "1d" in type(layer).__name__ else 2)


def _adaptive_pool(layer: Any) -> float:
    if any(size != 1 for size in _pair(layer.output_size, layer)):
        raise ValueError(f"`output_size` should be 1, since other windows depend on the input; got {layer.output_size}")
    return 1.0


def _at_most_1(layer: nn.Module) -> float:
    return 1.0


_IMAGE_MAPS = (
    *(Conv1dOrthogonal, Conv2dOrthogonal, ConvTranspose1dOrthogonal, ConvTranspose2dOrthogonal),
    *(Conv1dMapSVD, Conv2dMapSVD),
)
_RULES: dict[type, Rule] = {
    **{
        kind: _at_most_1
        for kind in (
            *(GroupSort, ScaledAvgPool2d, NormPool2d, nn.Identity, nn.Flatten, nn.Unflatten),
            *(nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle, nn.ZeroPad1d, nn.ZeroPad2d),
            *(nn.ReLU, nn.ReLU6, nn.Tanh, nn.Hardtanh, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Softmax),
        )
    },
    nn.Sigmoid: lambda layer: 0.25,
    nn.LeakyReLU: lambda layer: max(1.0, abs(layer.negative_slope)),
    nn.ELU: lambda layer: max(1.0, layer.alpha),
    nn.PReLU: lambda layer: max(1.0, layer.weight.abs().max().item()),
    nn.Linear: _linear,
    LinearUnitRows: lambda layer: torch.linalg.matrix_norm(layer.rows.double(), 2).item(),
    **dict.fromkeys((LinearSVD, LinearSymmetric, LinearOrthogonal), _held),
    **dict.fromkeys(
        (nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d, Conv1dSVD, Conv2dSVD), conv_norm_bound
    ),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d), _batch_norm),
    **dict.fromkeys((nn.Dropout, nn.Dropout1d, nn.Dropout2d), _dropout),
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool2d), _max_pool),
    **dict.fromkeys((nn.AvgPool1d, nn.AvgPool2d), _avg_pool),
    **dict.fromkeys((nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d), _adaptive_pool),
    **dict.fromkeys(_IMAGE_MAPS, _image_map),
}
