"""What an optimizer should know of a model's layers: on which parameters weight decay means what it says."""

from __future__ import annotations

from numbers import Real
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from fasth.nn.factored import Factored
from fasth.parametrizations import OrthogonalWeight, SVDWeight

__all__ = ["param_groups"]


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters for an optimizer, in two groups: those that ``weight_decay`` is for, and those it is not for.

    As ‖W‖² = Σσ², decay of a free sigma is exactly decay of W = U diag(σ) Vᵀ: where the loss has no gradient, a step
    takes W to (1 − lr·weight_decay)·W, as it does with a dense layer. On reflectors it would mean something else: the
    length of full ones says nothing about W, and shorter compact ones turn U and V. So the decay falls on

    - sigma of every layer of fasth, and of every tensor under ``fasth.parametrizations``. Where a spectrum maps this
      parameter to σ, it decays to 0, and σ to what the spectrum makes of 0, which for ``around(center, eps)`` is the
      center;
    - every other parameter of two or more dimensions, for what the model holds dense;

    and not on reflectors, biases and other vectors, such as the gains of norms.

    Args:
        model: any module. A parameter that it holds twice is listed once.
        weight_decay: as the optimizer takes it.

    Example:
        >>> model = nn.Sequential(LinearSVD(64, 64), nn.ReLU(), LinearSVD(64, 10))
        >>> optimizer = torch.optim.AdamW(param_groups(model, weight_decay=0.01), lr=1e-3)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` should be a torch.nn.Module; got {type(model).__name__}")
    if not isinstance(weight_decay, Real) or not weight_decay >= 0:
        raise ValueError(f"`weight_decay` should be a number of at least 0; got {weight_decay!r}")
    decayed: dict[nn.Parameter, bool] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if is_lazy(parameter):
                raise ValueError(f"`model` should have seen a first batch, which sets the size of its {module}")
            # Held twice, as a reflector and as something else: not decayed.
            decayed[parameter] = decayed.get(parameter, True) and _decays(module, name, parameter)
    groups = (
        {"params": [p for p, decays in decayed.items() if decays == wanted], "weight_decay": float(decay)}
        for wanted, decay in ((True, weight_decay), (False, 0.0))
    )
    return [group for group in groups if group["params"]]


def _decays(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    if isinstance(module, ParametrizationList):
        if isinstance(module[0], SVDWeight):
            return name == "original1"
        if isinstance(module[0], OrthogonalWeight):
            return False
    if isinstance(module, Factored):
        if name.startswith("sigma"):
            return True
        if name in ("U", "V") or name.startswith("reflectors"):
            return False
    return parameter.ndim >= 2
