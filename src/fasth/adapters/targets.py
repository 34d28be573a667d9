"""Selects layers of a model by name, pattern, class or function."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import nn

from fasth.adapters.adapted import Adapted
from fasth.adapters.layers import features_of

Target: TypeAlias = "str | re.Pattern[str] | type | Callable[[str, nn.Module], bool] | Iterable[Any] | None"


def layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields all modules of a model with their names, adapted layers as one module, shared modules repeatedly."""
    within = None  # prefix of the last adapted layer, whose own modules follow it
    for name, module in model.named_modules(remove_duplicate=False):
        if within is None or not name.startswith(within):
            yield name, module
            if isinstance(module, Adapted):
                within = f"{name}." if name else ""


def named_adapted(model: nn.Module) -> Iterator[tuple[str, Adapted]]:
    """Yields the adapted layers of a model with their names. A shared layer comes once."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` should be a torch.nn.Module; got {type(model).__name__}")
    for name, module in model.named_modules():
        if isinstance(module, Adapted):
            yield name, module


def chosen(model: nn.Module, target: Target) -> dict[str, nn.Module]:
    """Maps names to the layers that ``target`` chooses. Naming a layer that cannot be adapted is an error."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` should be a torch.nn.Module; got {type(model).__name__}")
    found: dict[str, nn.Module] = {}
    for name, module in layers(model):
        dense = module.base if isinstance(module, Adapted) else module
        features = features_of(dense)
        if target is None:
            if features is not None:
                found[name] = module
        elif _matches(name, dense, target):
            if features is None and not callable(target):
                raise ValueError(f"`target` names {name!r}, and a {type(dense).__name__} cannot be adapted")
            if features is not None:
                found[name] = module
    if not found:
        names = [name for name, module in layers(model) if features_of(module) is not None]
        known = f"those of {type(model).__name__} are {', '.join(names[:8])}{', …' * (len(names) > 8)}"
        raise ValueError(f"`target` should choose a layer that can be adapted; got {target!r}, and {known}")
    return found


def _matches(name: str, module: nn.Module, target: Any) -> bool:
    if isinstance(target, str):
        if any(c in target for c in "*?["):
            return fnmatchcase(name, target)
        return name == target or name.endswith(f".{target}")
    if isinstance(target, re.Pattern):
        return target.fullmatch(name) is not None
    if isinstance(target, type):
        return isinstance(module, target)
    if callable(target):
        return bool(target(name, module))
    if isinstance(target, Iterable):
        return any(_matches(name, module, part) for part in target)
    raise TypeError(
        "`target` should be a name, a pattern, a class of layers, a function of a name and a module, or several of "
        f"these; got {type(target).__name__}"
    )
