"""A layer with its adapters, which replaces the layer in the model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fasth.adapters.kinds import Adapter, Layer
from fasth.adapters.layers import Matrices, matrices_of


class Adapted(nn.Module):
    """A frozen layer, ``base``, and its adapters by name. Active adapters apply in order, each to the previous result.

    ``weight`` and ``bias`` belong to a plain layer that computes the same. Attributes missing here, such as
    ``in_features`` or ``stride``, are looked up in the base.
    """

    base: nn.Module
    adapters: nn.ModuleDict

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.adapters = base, nn.ModuleDict()
        self.active: tuple[str, ...] = ()  # in the order in which they apply
        self.merged: tuple[str, ...] = ()  # adapters merged into the base, which is then called alone
        self.enabled = True
        self.train(base.training)
        self.register_load_state_dict_pre_hook(_take_plain_state)

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The base's output, changed by the active adapters. Takes the arguments of the base."""
        layer: Layer = self.base
        for adapter in self.acting():
            layer = partial(adapter, layer)
        return layer(input, *args, **kwargs)

    def acting(self) -> list[Adapter]:
        """The adapters that a call goes through."""
        if self.merged or not self.enabled:
            return []
        return [self.adapters[name] for name in self.active]  # type: ignore[misc]

    @property
    def weight(self) -> Tensor:
        """The weight of a plain layer that computes the same, differentiable; writing into it changes nothing."""
        adapters = self.acting()
        if not adapters:
            return self.base.weight  # type: ignore[return-value]
        matrices = self.matrices()
        W, _ = self._through(adapters, matrices.read(self.base.weight), None)  # type: ignore[arg-type]
        return matrices.write(W)

    @property
    def bias(self) -> Tensor | None:
        """The bias of a plain layer that computes the same."""
        bias: Any = self.base.bias
        adapters = self.acting()
        if bias is None or not adapters:
            return bias
        return self._through(adapters, self.matrices().read(self.base.weight), bias)[1]  # type: ignore[arg-type]

    @staticmethod
    def _through(adapters: list[Adapter], W: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        for adapter in adapters:
            W, bias = adapter.merged(W, bias)
        return W, bias

    def matrices(self) -> Matrices:
        """The conversion of the base's weight to matrices."""
        found = matrices_of(self.base)
        if isinstance(found, str):
            raise AttributeError(f"no dense weight is made of an adapted {type(self.base).__name__}: {found}")
        return found

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or name == "base":
                raise
            if name in ("weight", "bias"):  # a property above raised the error, and PyTorch has another one
                return getattr(type(self), name).fget(self)
            return getattr(self.base, name)

    def extra_repr(self) -> str:
        state = f"merged={list(self.merged)}" if self.merged else f"active={list(self.active)}"
        return state if self.enabled else f"{state}, disabled"


@torch.no_grad()
def _take_plain_state(layer: Adapted, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
    """Called before a state_dict is loaded: renames the tensors of a plain layer to tensors of the base."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        name = key.removeprefix(prefix)
        if not name.startswith(("base.", "adapters.")):
            state_dict[f"{prefix}base.{name}"] = state_dict.pop(key)
