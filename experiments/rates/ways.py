"""The ways in which a network holds its weights: as SVDs, in part or in full, or orthogonal with scaled rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fasth

PLAIN, SVD, THIN = "plain", "SVD", "SVD, a quarter of the rank"
ATTENTION, SCALED = "SVD in the attention only", "orthogonal, rows scaled"


def to_svd(model: nn.Module) -> nn.Module:
    """Converts all layers that ``fasth.to_svd`` supports; in a flow only its linear maps, as in the study."""
    flow = hasattr(model, "mixers")
    return fasth.to_svd(model, filter=lambda name, _: not flow or name.startswith("mixers"), report=[])


def thin(model: nn.Module) -> nn.Module:
    """Every linear layer and convolution with a quarter of its singular values."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            rank = max(min(layer.weight.flatten(1).shape) // 4, 1)
            model = fasth.to_svd(model, rank=rank, filter=partial(_is, name), report=[])
    return model


def _is(name: str, other: str, _: nn.Module) -> bool:
    return name == other


def attention(model: nn.Module) -> nn.Module:
    return fasth.to_svd(model, filter=lambda name, _: in_attention(name), report=[])


def in_attention(name: str) -> bool:
    return "qkv" in name or name.endswith("out")


def scaled(model: nn.Module) -> nn.Module:
    """Every linear layer of the blocks as ``ScaledRows``."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name.startswith("blocks"):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, ScaledRows(layer))
    return model


class ScaledRows(nn.Module):
    """y = s ∘ (Q x) + b with Q orthogonal and a trained scale for each row. Initially rows have the plain ones' norms.

    The scales are held divided by (√n + √m)/2, so that at the rate lr they move as the rule moves singular values.
    """

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        n, m = plain.weight.shape
        self.orthogonal = fasth.LinearOrthogonal(m, n, bias=False)
        self.per_unit = (math.sqrt(n) + math.sqrt(m)) / 2
        norms = plain.weight.detach().norm(dim=1) / self.orthogonal.weight.detach().norm(dim=1)
        self.scale, self.bias = nn.Parameter(norms / self.per_unit), nn.Parameter(plain.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, self.orthogonal(x), self.scale * self.per_unit)


CONVERSIONS: dict[str, Callable[[Any], nn.Module]] = {
    PLAIN: lambda model: model,
    SVD: to_svd,
    THIN: thin,
    ATTENTION: attention,
    SCALED: scaled,
}
