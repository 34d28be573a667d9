"""What a network with a Lipschitz constant of 1 needs besides orthogonal layers, and the bound that such a network has.

All constants are those of the Euclidean norm, of whole images or vectors. ``docs/convolutions.md`` has an example.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from fasth.nn.conv import Conv1dSVD, Conv2dSVD
from fasth.nn.conv_svd_map import Conv1dMapSVD, Conv2dMapSVD
from fasth.nn.factored import at_least_one, check_dtype
from fasth.nn.held_weight import held_weights
from fasth.nn.image_map import ImageMap
from fasth.nn.linear import LinearOrthogonal, LinearSVD, LinearSymmetric
from fasth.nn.orthogonal_conv import (
    Conv1dOrthogonal,
    Conv2dOrthogonal,
    ConvTranspose1dOrthogonal,
    ConvTranspose2dOrthogonal,
)

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

Rule: TypeAlias = Callable[[Any], float]


# Layers. Each is 1-Lipschitz.


class GroupSort(nn.Module):
    """Sorts the channels within groups, in ascending order: (*, channels, *) → the same shape.

    A permutation that depends on the input: it keeps the norm of the input, and that of the gradient, where ReLU loses
    both. With ``size`` = 2, the default, it is MaxMin (Anil, Lucas & Grosse, 2019).

    Args:
        size: of a group; it divides the number of channels.
        dim: of the channels.
    """

    def __init__(self, size: int = 2, dim: int = 1) -> None:
        super().__init__()
        at_least_one(size=size)
        self.size, self.dim = size, dim

    def forward(self, input: Tensor) -> Tensor:
        """Sorted along ``dim`` in groups of ``size``."""
        if input.shape[self.dim] % self.size:
            raise ValueError(
                f"dimension {self.dim} of `input` should be a multiple of the group size {self.size}; "
                f"got shape {tuple(input.shape)}"
            )
        dim = self.dim % input.ndim
        groups = input.unflatten(dim, (-1, self.size))
        if self.size == 2:  # in less time than a sort
            first, second = groups.unbind(dim + 1)
            ordered = torch.stack((torch.minimum(first, second), torch.maximum(first, second)), dim + 1)
        else:
            ordered = groups.sort(dim + 1).values
        return ordered.flatten(dim, dim + 1)

    def extra_repr(self) -> str:
        return f"size={self.size}, dim={self.dim}"


class ScaledAvgPool2d(nn.Module):
    """k · mean over patches of k×k pixels: the orthogonal projection to images that are constant there.

    (*, c, H, W) → (*, c, ⌊H/k⌋, ⌊W/k⌋). ``nn.AvgPool2d`` has the norm 1/k. What should lose nothing is
    ``nn.PixelUnshuffle``, or an orthogonal convolution with a stride.
    """

    def __init__(self, kernel_size: int) -> None:
        super().__init__()
        at_least_one(kernel_size=kernel_size)
        self.kernel_size = kernel_size

    def forward(self, input: Tensor) -> Tensor:
        """The scaled mean of each patch."""
        return self.kernel_size * F.avg_pool2d(input, self.kernel_size)

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}"


class NormPool2d(nn.Module):
    """‖patch‖₂ of patches of k×k pixels: (*, c, H, W) → (*, c, ⌊H/k⌋, ⌊W/k⌋). It keeps the norm of the image.

    The gradient of a patch of zeros is zero.
    """

    def __init__(self, kernel_size: int) -> None:
        super().__init__()
        at_least_one(kernel_size=kernel_size)
        self.kernel_size = kernel_size

    def forward(self, input: Tensor) -> Tensor:
        """The norm of each patch."""
        k = self.kernel_size
        height, width = (size // k * k for size in input.shape[-2:])
        patches = input[..., :height, :width].unflatten(-1, (-1, k)).unflatten(-3, (-1, k))
        return torch.linalg.vector_norm(patches, dim=(-3, -1))

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}"


class Residual(nn.Module):
    """α x + (1 − α) f(x) with α in (0, 1) learnt, one half at the start: 1-Lipschitz where f is.

    x + f(x) has a constant of up to 2.
    """

    def __init__(self, *f: nn.Module) -> None:
        super().__init__()
        self.f = f[0] if len(f) == 1 else nn.Sequential(*f)
        self.raw = nn.Parameter(torch.zeros(()))

    @property
    def alpha(self) -> Tensor:
        """The part of the input: a scalar."""
        return self.raw.sigmoid()

    def forward(self, input: Tensor) -> Tensor:
        """The convex combination of ``input`` and f(input), which has its shape."""
        return torch.lerp(self.f(input), input, self.alpha.to(input.dtype))


class LinearUnitRows(nn.Linear):
    """x Wᵀ + bias with rows of W of norm 1: each output is 1-Lipschitz, and free to point where it likes.

    As the last layer of a classifier: see ``certified_radius``. ``nn.Linear``'s signature; ``weight`` are the rows
    before they are divided by their norms.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_dtype(dtype)
        super().__init__(in_features, out_features, bias, device, dtype)

    @property
    def rows(self) -> Tensor:
        """W: (out, in), differentiable. Rows that began shorter than 1e-12 stay shorter than 1."""
        return F.normalize(self.weight, dim=1)

    def forward(self, input: Tensor) -> Tensor:
        """(*, in) → (*, out)."""
        return F.linear(input, self.rows, self.bias)


# What a classifier is trained with, and what it is then certain of.


def margin_loss(scores: Tensor, labels: Tensor, *, margin: float = 1.0, temperature: float = 0.25) -> Tensor:
    """τ · cross entropy((scores − margin · onehot(labels)) / τ), the mean over the batch: a scalar.

    As τ → 0 that is max(0, margin − (the label's score − the largest other)): scores of a 1-Lipschitz network cannot
    grow without bound, and what is to grow is their distance, up to ``margin`` and, with τ, softly beyond. A larger
    margin buys certified radius with accuracy.

    Args:
        scores: (batch, classes).
        labels: (batch,), integers.
        margin: in the units of the scores: √2 times the radius that is wanted, for a last layer with orthonormal rows.
        temperature: τ, above 0.
    """
    if not temperature > 0:
        raise ValueError(f"`temperature` should be above 0; got {temperature}")
    moved = scores - margin * F.one_hot(labels, scores.shape[-1]).to(scores.dtype)
    return temperature * F.cross_entropy(moved / temperature, labels)


def certified_radius(
    scores: Tensor, labels: Tensor | None = None, *, lipschitz: float = 1.0, rows: Tensor | None = None
) -> Tensor:
    """How far an input can be moved without the class changing: (batch,), in the Euclidean norm.

    min over j ≠ y of (score_y − score_j) / (L · ‖w_y − w_j‖), with y the label, or the largest score if no labels are
    given; negative where the label is not the largest.

    Args:
        scores: (batch, classes).
        labels: (batch,).
        lipschitz: L, a Lipschitz constant of the map to all scores, or, with ``rows``, of what is before the last
            layer.
        rows: (classes, features), the weight of the last layer, ``LinearUnitRows.rows`` for example. Without it
            ‖w_y − w_j‖ is √2, as for the scores themselves, and for orthonormal rows.
    """
    y = scores.argmax(-1) if labels is None else labels
    distances: Tensor | float = math.sqrt(2)
    if rows is not None:
        distances = (rows[y].unsqueeze(1) - rows).norm(dim=-1)
    margins = scores.gather(-1, y.unsqueeze(-1)) - scores
    radii = (margins / distances / lipschitz).scatter(-1, y.unsqueeze(-1), math.inf)
    return radii.amin(-1)


# The bound of a model.


class LipschitzBound(NamedTuple):
    """A Lipschitz constant of a model, and the factors that it is the product of."""

    value: float
    parts: dict[str, float]  # by the name of the module, as in ``model.named_modules()``

    def __str__(self) -> str:
        width = max(map(len, (*self.parts, "bound")))
        lines = [f"{name:{width}}  {factor:.6g}" for name, factor in self.parts.items()]
        return "\n".join([*lines, f"{'bound':{width}}  {self.value:.6g}"])


def bound(model: nn.Module, *, rules: Mapping[type[nn.Module], Rule] | None = None) -> LipschitzBound:
    """A Lipschitz constant of ``model`` as it is now, in evaluation mode: the product of those of its parts, in
    float64.

    The constants are exact, to the rounding of the weights, for linear layers, for the layers of fasth and for
    activations. Of a convolution of ``torch.nn``, and of ``Conv2dSVD``, it is ``conv_norm_bound``. A model may be
    one of these layers, ``nn.Sequential``, a module of this file, or a module with a method ``lipschitz_bound()`` that
    returns a number. A module that has a rule is not looked into; any other is an error that names it, as a ``forward``
    method cannot be read.

    Args:
        rules: functions from a module of exactly this class to its constant, which come before those known here.

    Example:
        >>> net = nn.Sequential(fasth.Conv2dOrthogonal(2, 8, 3, padding=1), GroupSort(), nn.Flatten(), nn.Linear(512,
        10)) >>> print(bound(net.eval()))
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
        parts[name or "model"] = _of_layer(module, kind, name, rules)


@torch.no_grad()
def _of_layer(module: Any, kind: type, name: str, rules: dict[type, Rule]) -> float:
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

    With zero or circular padding, any stride, dilation and groups. It is the smaller of √(taps)·‖K‖₂, with K the
    kernel as a matrix, and of the largest norm of the kernel's Fourier transform on a grid of N points an axis, over
    cos(πd/N) for each axis, with d = ⌈(k − 1)/2⌉: between the points of a grid a trigonometric polynomial of degree d
    rises no further (M. Riesz). For 3×3 kernels, with N = 32, that is 1 % above the norm on large images. Costs N²/2
    decompositions of (out, in) matrices.
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
    """√(windows that a pixel is in)."""
    if layer.dilation not in (1, (1,), (1, 1)):
        raise ValueError(f"`dilation` should be 1; got {layer.dilation}")
    return math.sqrt(_windows(layer))


def _avg_pool(layer: Any) -> float:
    """√(windows that a pixel is in / pixels of a window), the latter only if no window is divided by fewer."""
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
