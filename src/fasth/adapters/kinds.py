"""The base class of adapters: each calls a frozen layer, and can be merged into the layer's weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Layer: TypeAlias = Callable[..., Tensor]


class Adapter(nn.Module):
    """One adapter of one layer: y = adapter(layer, x). ``merged`` returns the weight and bias that compute the same.

    Initially, and after ``restart``, y = layer(x).
    """

    def __init__(self, kind: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.kind, self.options = kind, options  # arguments that make another adapter like this one

    def forward(self, layer: Layer, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The output of the adapted layer, computed by calling ``layer``."""
        raise NotImplementedError

    def merged(self, W: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The weight, as matrices (*p, n, m), and the bias of a layer that computes the same without the adapter."""
        raise NotImplementedError

    def unmerged(self, W: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The inverse of ``merged``, to rounding."""
        raise NotImplementedError

    def restart(self) -> None:
        """Resets the adapter to the identity, after it was merged into its layer."""
        raise NotImplementedError

    def largest_angle(self) -> float | None:
        """The largest angle by which the adapter turns an activation, in degrees; None if it does not turn them."""
        return None

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Loads the tensors of the adapter's state_dict, in any dtype."""
        self.load_state_dict(tensors)

    def extra_repr(self) -> str:
        return ", ".join([repr(self.kind), *(f"{name}={value!r}" for name, value in self.options.items())])


def check_rank(r: Any) -> int:
    if not isinstance(r, int) or isinstance(r, bool) or r < 1:
        raise ValueError(f"`r` should be an int of at least 1; got {r!r}")
    return r


def degrees(angles: Tensor) -> float:
    return math.degrees(angles.max().item()) if angles.numel() else 0.0


def dtype_beside(tensors: Any) -> torch.dtype:
    """The dtype of an adapter of a layer with these tensors: float64 if they all are, else float32."""
    floating = [t.dtype for t in tensors if t.is_floating_point()]
    return torch.float64 if floating and all(dtype == torch.float64 for dtype in floating) else torch.float32
