"""Converts layers by parametrizing their weights as SVDs: attention, and more kinds of convolutions.

The class of the layer still computes the output. Its weight is reshaped to a batch of matrices, each with its own SVD,
by ``fasth.parametrizations.svd``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from fasth._private import drop_load_hook
from fasth.nn.registry import register
from fasth.parametrizations import OrthogonalWeight, SVDWeight, convert_plain_state, svd
from fasth.spectrum import Spectrum

Shapes = dict[str, tuple[int, ...]]


class ByParametrization:
    """The converter of layers whose weights, by name, are reshaped to matrices: (*b, n, m)."""

    def __init__(self, shapes: Callable[[Any], Shapes]) -> None:
        self.shapes = shapes

    def weights(self, dense: Any) -> tuple[str, ...]:
        """The names of the parameters that are replaced by factors."""
        return tuple(self.shapes(dense))

    def why_not(self, dense: Any) -> str:
        """Returns "": reasons depend on the values of the weights, which are checked later."""
        return ""

    def to_svd(self, dense: Any, spectrum: Spectrum, reflectors: str, rank: int | None) -> tuple[nn.Module, str]:
        """Copies the layer with parametrized weights of full rank and shares its other parameters."""
        layer = _copy_with_parameters(dense)
        for name, shape in self.shapes(dense).items():
            svd(layer, name, spectrum, shape=shape)
        return layer, "by fasth.parametrizations.svd"


def is_parametrized_alone(module: nn.Module) -> bool:
    """True if all parametrizations of a module are from ``fasth.parametrizations``."""
    return parametrize.is_parametrized(module) and all(
        len(held) == 1 and isinstance(held[0], (OrthogonalWeight, SVDWeight))
        for held in module.parametrizations.values()  # type: ignore[operator]
    )


def without_parametrizations(module: Any) -> nn.Module:
    """Copies the layer with plain parameters instead of parametrized ones, and shares its other parameters.

    ``remove_parametrizations`` would change the class, which copies of a parametrized module share.
    """
    dense = _copy_with_parameters(module)
    dense.__class__ = parametrize.type_before_parametrizations(module)
    del dense.parametrizations
    drop_load_hook(dense, convert_plain_state)
    others = dict(dense.named_parameters(recurse=False))
    for name in others:
        delattr(dense, name)
    for name, held in module.parametrizations.items():
        trained = any(original.requires_grad for original in held.parameters())
        dense.register_parameter(name, nn.Parameter(getattr(module, name).detach().clone(), requires_grad=trained))
    for name, parameter in others.items():  # in the order of PyTorch's classes: weights first
        dense.register_parameter(name, parameter)
    return dense


def _copy_with_parameters(module: nn.Module) -> Any:
    """Copies a module and shares its parameters."""
    return copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})


def _as_it_is(layer: Any) -> Shapes:
    return {"weight": tuple(layer.weight.shape)}


def _by_group(conv: Any) -> Shapes:
    """One matrix for each group: from a patch to output channels; transposed, from input channels to a patch."""
    first, *others = conv.weight.shape
    matrix = first // conv.groups, math.prod(others)
    return {"weight": matrix if conv.groups == 1 else (conv.groups, *matrix)}


def _by_projection(attention: Any) -> Shapes:
    """One matrix each for queries, keys and values. PyTorch stacks them if they have the same size."""
    if attention.in_proj_weight is None:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        return {name: tuple(getattr(attention, name).shape) for name in names}
    return {"in_proj_weight": (3, attention.embed_dim, attention.embed_dim)}


register(nn.MultiheadAttention, ByParametrization(_by_projection))
register(NonDynamicallyQuantizableLinear, ByParametrization(_as_it_is))  # the output projection of attention
register(nn.Bilinear, ByParametrization(_as_it_is))
register("transformers.pytorch_utils.Conv1D", ByParametrization(_as_it_is))
for _kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
    register(_kind, ByParametrization(_by_group))  # Conv1d and Conv2d with groups; without, they have SVD layers

# For messages.
PARAMETRIZED = ("MultiheadAttention", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "Bilinear")
