"""Saves and loads adapters without the model."""

from __future__ import annotations

import json
import os
from typing import Any

from torch import Tensor, nn

from fasth.adapters.adapted import Adapted
from fasth.adapters.kinds import Adapter
from fasth.adapters.layers import features_of
from fasth.adapters.model import attach, new_adapter
from fasth.adapters.targets import layers, named_adapted

FORMAT = "fasth.adapters"
VERSION = 1


def save(model: nn.Module, path: str | os.PathLike[str], *names: str) -> None:
    """Writes the named adapters, by default all, to a safetensors file: their tensors, kinds and layers."""
    tensors: dict[str, Tensor] = {}
    adapters: dict[str, dict[str, Any]] = {}
    for where, adapted in named_adapted(model):
        for name, adapter in adapted.adapters.items():
            if names and name not in names:
                continue
            assert isinstance(adapter, Adapter)
            own = adapter.state_dict()
            made = {"kind": adapter.kind, "options": adapter.options, "tensors": [*own]}
            adapters.setdefault(name, {})[where] = made
            tensors |= {_key(where, name, key): t.detach().contiguous() for key, t in own.items()}
    if missing := [name for name in names if name not in adapters] or (["any"] if not adapters else []):
        raise ValueError(f"`model` should have adapters called {', '.join(missing)}; got {type(model).__name__}")
    content = {FORMAT: json.dumps({"version": VERSION, "adapters": adapters})}
    _safetensors().torch.save_file(tensors, path, metadata=content)


def load(model: nn.Module, path: str | os.PathLike[str], *names: str, freeze: bool = True) -> nn.Module:
    """Adds the named adapters, by default all, of a file written by ``save`` to a model with the same layers.

    The model is changed in place and returned, as by ``add``. The last adapter of the file becomes the active one.
    """
    with _safetensors().safe_open(path, framework="pt") as file:
        content = json.loads((file.metadata() or {}).get(FORMAT, "{}"))
        if content.get("version") != VERSION:
            raise ValueError(f"{os.fspath(path)} should be a file of fasth.adapters.save, version {VERSION}")
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    if missing := [name for name in names if name not in content["adapters"]]:
        raise ValueError(f"the file should have {', '.join(missing)}; it has {', '.join(content['adapters'])}")
    loaded: dict[str, dict[str, Adapter]] = {}
    for name, places in content["adapters"].items():
        if not names or name in names:
            loaded[name] = {where: _loaded(model, where, name, made, tensors) for where, made in places.items()}
    for name, adapters in loaded.items():
        found = dict(layers(model))  # looked up again: the first adapter of a layer replaces the layer in the model
        model = attach(model, {found[where]: adapter for where, adapter in adapters.items()}, name, freeze)
    return model


def _loaded(model: nn.Module, where: str, name: str, made: dict[str, Any], tensors: dict[str, Tensor]) -> Adapter:
    """Makes the adapter of one layer, with the loaded tensors."""
    layer = dict(layers(model)).get(where)
    if layer is None or features_of(layer.base if isinstance(layer, Adapted) else layer) is None:
        raise ValueError(f"`model` should have a layer {where!r}, which the adapter {name!r} is for")
    if isinstance(layer, Adapted) and name in layer.adapters:
        raise ValueError(f"{where!r} should have no adapter called {name!r} yet")
    own = {key: tensors[_key(where, name, key)] for key in made["tensors"]}
    dtype = next(t.dtype for t in own.values())
    adapter = new_adapter(made["kind"], layer, made["options"], dtype)
    try:
        adapter.load(own)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"the adapter {name!r} does not fit the layer {where!r}: {error}") from error
    return adapter


def _key(where: str, name: str, key: str) -> str:
    """The name of a tensor in the state_dict of the model."""
    return ".".join(part for part in (where, "adapters", name, key) if part)


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError("adapters are saved by safetensors; get it with pip install fasth[adapters]") from error
    return safetensors
