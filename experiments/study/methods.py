"""The methods that are compared: how the weights of a network are held, and the rates of their optimizer."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fasth
from experiments.study.networks import hidden_layers, layers

PLAIN, SVD, ONE_RATE, ORTHOGONAL = "plain", "SVD", "SVD, one rate", "orthogonal"
WEIGHT_DECAY = 0.1

OPTIMIZERS: dict[str, tuple[Any, float, dict[str, Any]]] = {  # the class, the weight decay and further options
    "Adam": (torch.optim.Adam, 0.0, {}),
    "AdamW": (torch.optim.AdamW, WEIGHT_DECAY, {}),
    "SGD": (torch.optim.SGD, 0.0, {"momentum": 0.9}),
}


def optimizer(
    model: nn.Module, name: str, lr: float, *, one_rate: bool = False, sigma: float = 1.0, reflectors: float = 1.0
) -> torch.optim.Optimizer:
    """The optimizer, with the groups of ``fasth.param_groups``: plain layers are trained at ``lr``.

    Args:
        one_rate: set one rate for all, as with ``model.parameters()``.
        sigma, reflectors: multiply the rates of these, to see what that does.
    """
    kind, weight_decay, options = OPTIMIZERS[name]
    if one_rate:
        return kind(model.parameters(), lr=lr, weight_decay=weight_decay, **options)
    groups = fasth.param_groups(model, lr=lr, weight_decay=weight_decay, optimizer=kind)
    for group in groups:
        group["lr"] *= {"sigma": sigma, "reflectors": reflectors}.get(group["name"], 1.0)
    return kind(groups, lr=lr, **options)


def to_orthogonal(model: nn.Module, names: Sequence[str] | None = None) -> nn.Module:
    """Replaces the hidden layers, or the named ones, by layers with the nearest orthogonal weights."""
    for name in hidden_layers(model) if names is None else names:
        _replace(model, name, _orthogonal(model.get_submodule(name)))
    return model


def _orthogonal(layer: Any) -> nn.Module:
    if isinstance(layer, nn.Linear):
        return fasth.LinearOrthogonal.from_linear(layer)
    made: Any = fasth.RNNSVD.from_rnn(layer) if isinstance(layer, nn.RNN) else fasth.Conv2dSVD.from_conv(layer)
    for name, parameter in made.named_parameters():
        if name.startswith("sigma"):
            nn.init.ones_(parameter.requires_grad_(False))  # an SVD with all singular values at 1 is orthogonal
    return made


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)


def fresh(init: str) -> Callable[[nn.Module], nn.Module]:
    """Replaces the hidden layers by SVD layers with this start; the last layer keeps the start of ``nn.Linear``."""

    def convert(model: nn.Module) -> nn.Module:
        for name in hidden_layers(model):
            layer: Any = model.get_submodule(name)
            if isinstance(layer, nn.Linear):
                _replace(model, name, fasth.LinearSVD(layer.in_features, layer.out_features, init=init))
            else:
                sizes = (layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding)
                _replace(model, name, fasth.Conv2dSVD(*sizes, init=init))
        return to_svd(model)

    return convert


def plain_orthogonal_start(model: nn.Module) -> nn.Module:
    """Starts the hidden layers with ``nn.init.orthogonal_``; all layers stay plain."""
    for name in hidden_layers(model):
        nn.init.orthogonal_(model.get_parameter(f"{name}.weight"))
    return model


def to_svd(model: nn.Module, **options: Any) -> nn.Module:
    """``fasth.to_svd`` for the layers that methods replace; the function stays the same."""
    names = layers(model)
    return fasth.to_svd(model, filter=lambda name, _: name in names, report=[], **options)


def _unchanged(model: nn.Module) -> nn.Module:
    return model


def to_thin(model: nn.Module, rank: int) -> nn.Module:
    """Gives all layers this rank, except the last one, which is small and becomes an SVD of full rank."""
    *hidden, _ = layers(model)
    model = fasth.to_svd(model, rank=rank, filter=lambda name, _: name in hidden, report=[])
    return fasth.to_svd(model, report=[])


CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    PLAIN: _unchanged,
    SVD: to_svd,
    "SVD, full reflectors": partial(to_svd, reflectors="full"),
    ONE_RATE: to_svd,
    ORTHOGONAL: to_orthogonal,
    "plain, orthogonal start": plain_orthogonal_start,
    "SVD, σ = 1": fresh("haar"),
    "SVD, linear": fresh("linear"),
}


def square_layers(model: nn.Module) -> list[str]:
    """The square hidden layers. Rectangular ones are left out: some peers embed them in a much larger square matrix."""
    return [name for name in hidden_layers(model) if len({*model.get_parameter(f"{name}.weight").shape}) == 1]


def _with_fasth(model: nn.Module) -> nn.Module:
    return to_orthogonal(model, square_layers(model))


def _with_torch(map_name: str) -> Callable[[nn.Module], nn.Module]:
    def convert(model: nn.Module) -> nn.Module:
        for name in square_layers(model):
            parametrizations.orthogonal(model.get_submodule(name), orthogonal_map=map_name)
        return model

    return convert


def _with_geotorch(model: nn.Module) -> nn.Module:
    geotorch = importlib.import_module("geotorch")

    for name in square_layers(model):
        layer: Any = model.get_submodule(name)
        start = layer.weight.detach().clone()
        geotorch.orthogonal(layer, "weight")
        layer.weight = start
    return model


PEERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fasth": _with_fasth,
    "torch, matrix_exp": _with_torch("matrix_exp"),
    "torch, cayley": _with_torch("cayley"),
    "torch, householder": _with_torch("householder"),
    "geotorch": _with_geotorch,
}
CONVERSIONS |= PEERS
# These start as the same function as the plain network, which has an orthogonal start beside the peers.
SAME_FUNCTION = (SVD, "SVD, full reflectors", ONE_RATE, *PEERS)


def installed(method: str) -> bool:
    return method != "geotorch" or importlib.util.find_spec("geotorch") is not None


def weights(model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """The dense matrix of each weight that is held by factors, and the singular values that it should have."""
    for layer in model.modules():
        if isinstance(layer, fasth.RNNSVD):
            for svd in layer.svds.values():
                yield svd.dense(), svd.sigma
        elif isinstance(layer, fasth.LinearOrthogonal):
            yield layer.weight, torch.ones(min(layer.weight.shape))
        elif isinstance(layer, (fasth.LinearSVD, fasth.Conv2dSVD)):
            svd = layer.svd
            yield svd.dense(), svd.sigma
