"""Merges adapters into the weights of their layers and out of them, and restarts merged adapters in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fasth.adapters.adapted import Adapted
from fasth.adapters.kinds import Adapter
from fasth.adapters.layers import matrices_of
from fasth.adapters.targets import named_adapted


@torch.no_grad()
def merge(model: nn.Module) -> nn.Module:
    """Merges the active adapters into the weights of their layers, in place. A call then costs as much as the layer's.

    W is computed in float64 where the device has it, and rounded once to the dtype of the layer. ``unmerge`` takes the
    adapters out again; ``remove`` leaves plain layers. If a layer has no dense weight, or shares its weight with
    another module, nothing is changed, and the error names the layer.
    """
    found = {name: adapted for name, adapted in named_adapted(model) if adapted.active and not adapted.merged}
    _check(model, found)
    for adapted in found.values():
        _write(adapted, [adapter.merged for adapter in _named(adapted, adapted.active)])
        adapted.merged = adapted.active
    return model


@torch.no_grad()
def unmerge(model: nn.Module) -> nn.Module:
    """Takes merged adapters out of the weights, in place. The original weights are restored up to rounding."""
    for _, adapted in named_adapted(model):
        if adapted.merged:
            _write(adapted, [adapter.unmerged for adapter in reversed(_named(adapted, adapted.merged))])
            adapted.merged = ()
    return model


@torch.no_grad()
def merge_and_restart(model: nn.Module, optimizer: Optimizer | None = None) -> nn.Module:
    """Merges the active adapters into the weights, and resets them to the identity. The model computes the same.

    A weight is then trained by one small adapter after another, as in ReLoRA and POET, with the optimizer's state of
    one adapter: r·(n + m) numbers of each kind. Adapters that turn keep the singular values of every weight, up to
    rounding, for any number of restarts.

    Args:
        optimizer: the adapters' parameters lose their state, which belongs to the merged reflections.
    """
    merge(model)
    for _, adapted in named_adapted(model):
        for adapter in _named(adapted, adapted.merged):
            adapter.restart()
            for parameter in adapter.parameters() if optimizer is not None else ():
                optimizer.state.pop(parameter, None)  # type: ignore[union-attr]
        adapted.merged = ()
    return model


def _named(adapted: Adapted, names: tuple[str, ...]) -> list[Adapter]:
    return [adapted.adapters[name] for name in names]  # type: ignore[misc]


def _write(adapted: Adapted, steps: list[Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]]) -> None:
    base: Any = adapted.base
    matrices = adapted.matrices()
    wide = torch.float32 if base.weight.device.type == "mps" else torch.float64  # MPS has no float64
    W, bias = matrices.read(base.weight).to(wide), None if base.bias is None else base.bias.to(wide)
    for step in steps:
        W, bias = step(W, bias)
    base.weight.copy_(matrices.write(W))
    if bias is not None:
        base.bias.copy_(bias)


def _check(model: nn.Module, found: dict[str, Adapted]) -> None:
    owners: dict[int, set[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(name)
    for name, adapted in found.items():
        matrices = matrices_of(adapted.base)
        if isinstance(matrices, str):
            raise ValueError(f"the adapters of {name!r} cannot be merged: {matrices}")
        others = owners[id(adapted.base.weight)] - {f"{name}.base".lstrip(".")}
        if others:
            raise ValueError(
                f"the adapters of {name!r} cannot be merged: its weight is also that of {', '.join(sorted(others))}"
            )
