"""Adds adapters to a model, switches, disables and removes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from fasth.adapters.adapted import Adapted
from fasth.adapters.beside import singular_values, thin_svd
from fasth.adapters.kinds import Adapter, dtype_beside
from fasth.adapters.targets import Target, chosen, layers, named_adapted
from fasth.adapters.turning import orthogonal, reflections
from fasth.functional import DTYPES

KINDS: dict[str, Callable[..., Adapter]] = {
    "reflections": reflections,
    "orthogonal": orthogonal,
    "singular values": singular_values,
    "thin SVD": thin_svd,
}


def add(
    model: nn.Module,
    kind: str = "reflections",
    r: int | None = None,
    target: Target = None,
    *,
    name: str = "default",
    side: str | None = None,
    block_size: int | None = None,
    dtype: torch.dtype | None = None,
    freeze: bool = True,
) -> nn.Module:
    """Adds adapters to layers of ``model``, in place. Its outputs stay the same, and its weights are frozen.

    A layer may be of any class with ``in_features`` and ``out_features``, including quantized layers, or a convolution,
    since an adapter only calls it. With W its weight, the kinds are

        "reflections": Q_out W Q_in, each Q a product of r reflections and constant signs: r·d numbers a side.
        "orthogonal": the same with any rotations, d² numbers a side of which half are used, or d·b in blocks of b.
        "singular values": U diag(σ + δ) Vᵀ, the r largest singular values of W changed: r numbers.
        "thin SVD": W + U diag(σ) Vᵀ with r singular values: r·(n + m + 1) numbers.

    For convolutions, the first two kinds turn the channels.

    Args:
        model: any module. If it is a layer itself, use the returned module.
        r: as above. The default is 8, or all for "singular values"; "orthogonal" has no r.
        target: a name as in ``model.named_modules()``, or the end of one in whole components ("q_proj"); a pattern
            ("layers.*.mlp.*", or a compiled regular expression for the whole name); a class; a function of a name and
            a module; or several of these. By default every layer that can be adapted.
        name: name of the adapter. It becomes the only active one: see ``use``.
        side: the side of the layer that "reflections" and "orthogonal" turn: "input" (default), "output" or "both".
        block_size: b, a divisor of the number of features; by default one block.
        dtype: dtype of the parameters. By default float64 for a float64 layer and float32 for all others: products of
            reflections are computed in it, and rounded once to the dtype of the activations.
        freeze: if True, only adapters require gradients. Parameters that are trained too have to be unfrozen later.

    Returns:
        The model. If an error is raised, the model is unchanged.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        >>> model = add(model, "reflections", r=4, target="0")
        >>> sum(p.numel() for p in model.parameters() if p.requires_grad)
        256
    """
    options = {"r": r, "side": side, "block_size": block_size}
    made: dict[nn.Module, Adapter] = {}
    for where, layer in chosen(model, target).items():
        if layer not in made:
            _check_free(where, layer, name)
            made[layer] = new_adapter(kind, layer, options, dtype)
    return attach(model, made, name, freeze)


def new_adapter(kind: str, layer: nn.Module, options: dict[str, Any], dtype: torch.dtype | None = None) -> Adapter:
    """Makes an adapter of a layer, on its device. Options that are None have the kind's defaults."""
    if kind not in KINDS:
        raise ValueError(f"`kind` should be one of {', '.join(map(repr, KINDS))}; got {kind!r}")
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(f"`dtype` should be float32, float64, bfloat16 or float16; got {dtype}")
    base = layer.base if isinstance(layer, Adapted) else layer
    tensors = [*chain(base.parameters(), base.buffers())]
    device = tensors[0].device if tensors else None
    chosen_options = {option: value for option, value in options.items() if value is not None}
    allowed = KINDS[kind].__kwdefaults__ or {}
    if unknown := sorted(set(chosen_options) - set(allowed)):
        raise ValueError(f"{kind!r} has no `{unknown[0]}`")
    adapter = KINDS[kind](base, **chosen_options, device=device, dtype=dtype or dtype_beside(tensors))
    return adapter.train(layer.training)


def attach(model: nn.Module, made: dict[nn.Module, Adapter], name: str, freeze: bool) -> nn.Module:
    """Adds the adapters in ``made`` to their layers under this name, and makes it the only active one."""
    if not isinstance(name, str) or not name or "." in name or hasattr(nn.ModuleDict, name):
        raise ValueError(f"`name` should be a string without dots, and no method of nn.ModuleDict; got {name!r}")
    if freeze:
        adapters = {p for _, adapted in named_adapted(model) for p in adapted.adapters.parameters()}
        for parameter in model.parameters():
            if parameter not in adapters:
                parameter.requires_grad_(False)
    adapted: dict[nn.Module, Adapted] = {}
    for layer, adapter in made.items():
        adapted[layer] = layer if isinstance(layer, Adapted) else Adapted(layer)
        adapted[layer].adapters[name] = adapter
    model = _replaced(model, adapted)
    return use(model, name)


def use(model: nn.Module, *names: str) -> nn.Module:
    """Makes the named adapters the active ones, in this order, and their parameters the trained ones.

    Each adapter acts on the layer with the adapters before it: with two that turn the input, W becomes (W Q₁) Q₂. A
    layer skips names that it has no adapter for. Without names, the model computes what it did before it was adapted.
    """
    found = dict(named_adapted(model))
    known = sorted({name for adapted in found.values() for name in adapted.adapters})
    for name in names:
        if name not in known:
            raise ValueError(f"each name should be one of {', '.join(map(repr, known)) or 'none'}; got {name!r}")
    _check_not_merged(found)
    for adapted in found.values():
        adapted.active = tuple(name for name in names if name in adapted.adapters)
        for name, adapter in adapted.adapters.items():
            adapter.requires_grad_(name in names)
    return model


@contextmanager
def disabled(model: nn.Module) -> Iterator[nn.Module]:
    """Context in which adapters are disabled: the model computes exactly what it did before it was adapted."""
    found = dict(named_adapted(model))
    _check_not_merged(found)
    before = {adapted: adapted.enabled for adapted in found.values()}
    try:
        for adapted in before:
            adapted.enabled = False
        yield model
    finally:
        for adapted, enabled in before.items():
            adapted.enabled = enabled


def remove(model: nn.Module, *names: str) -> nn.Module:
    """Removes the named adapters, by default all. Layers without any adapter left become plain layers again.

    Merged adapters stay in the weight: ``remove(merge(model))`` is the adapted model with its original layers.
    """
    found = dict(named_adapted(model))
    plain: dict[nn.Module, nn.Module] = {}
    for adapted in found.values():
        for name in names or tuple(adapted.adapters):
            if name in adapted.adapters:
                del adapted.adapters[name]
        adapted.active = tuple(name for name in adapted.active if name in adapted.adapters)
        adapted.merged = tuple(name for name in adapted.merged if name in adapted.adapters)
        if not adapted.adapters:
            plain[adapted] = adapted.base
    return _replaced(model, plain)


def _replaced(model: nn.Module, new: Any) -> nn.Module:
    """Replaces modules of the model, wherever it has them. ``new`` maps old modules to new ones."""
    for where, module in [*layers(model)]:
        if where and module in new:
            parent, _, name = where.rpartition(".")
            setattr(model.get_submodule(parent), name, new[module])
    return new.get(model, model)


def _check_free(where: str, layer: nn.Module, name: str) -> None:
    if isinstance(layer, Adapted):
        _check_not_merged({where: layer})
        if name in layer.adapters:
            raise ValueError(f"{where!r} should have no adapter called {name!r} yet; give `name` another one")


def _check_not_merged(found: dict[str, Adapted]) -> None:
    for name, adapted in found.items():
        if adapted.merged:
            raise RuntimeError(f"the adapters of {name!r} are merged into its weight: call `unmerge` first")
