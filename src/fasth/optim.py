"""What an optimizer should know of a model's layers: the rates and the decay with which their parameters train well."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer

from fasth.nn import RNNSVD, LinearOrthogonal, LinearSymmetric
from fasth.nn.factors import SVDFactors
from fasth.nn.recurrent import Recurrent
from fasth.parametrizations import OrthogonalWeight, SVDWeight
from fasth.spectrum import Spectrum, free

__all__ = ["param_groups"]

OptimizerClass: TypeAlias = type[Optimizer]

SIGMA, DENSE, REFLECTORS, VECTORS = KINDS = ("sigma", "dense", "reflectors", "vectors")

# A step of these is as long as the gradient. That of any other optimizer has its rate's size, whatever the gradient's.
_STEP_FOLLOWS_GRADIENT = (torch.optim.SGD, torch.optim.ASGD)
# These add the decay to the gradient before they normalise it. The others take rate times decay off a parameter.
_DECAY_IS_GRADIENT = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
)


def param_groups(
    model: nn.Module,
    *,
    lr: float | None = None,
    weight_decay: float = 0.0,
    optimizer: OptimizerClass = torch.optim.AdamW,
) -> list[dict[str, Any]]:
    """Parameters for an optimizer, in groups with rates at which W = U diag(σ) Vᵀ moves about as far as a dense W at lr.

    **Rates.** Adam and its kin move every number by about lr. A dense W: (n, m) then moves by a matrix with entries
    ±lr: its norm is lr·√(n·m), and its spectral norm about lr·(√n + √m) where the signs are random. One rate for all
    would move W by lr·√k through its k singular values, of spectral norm lr: far less. The rate of sigma is
    lr·(√n + √m)/2, with which a square W moves by lr·√(n·m), as the dense one does. Compact reflectors move W that much
    at the rate lr, if the singular values are those that ``nn.Linear`` starts with; full ones are twice as many
    numbers, and get lr/√2. For an ``optimizer`` whose step is as long as the gradient, ``torch.optim.SGD``, sigma's
    rate is the same, and that of the reflectors is 0.3·lr, and half of it for full ones. Where a spectrum maps sigma to
    σ, the rate is divided by the slope of the map, for SGD by its square. For a layer of rank r, Adam's rates are
    multiplied by √(min(n, m)/r), since fewer numbers move W less. An ``RNNSVD`` whose σ are bounded, as by default, is
    made to remember, and a change of W_hh acts at every time step: its reflectors have lr/40, or lr/20 where W_hh is
    orthogonal, and sigma a hundredth of the rate above. All else has the rate lr.
    ``docs/training.md`` has the derivation, the experiments that the rates were chosen by, and where dense layers learn
    better.

    **Decay.** As ‖W‖² = Σσ², decay of a free sigma is exactly decay of W: where the loss has no gradient, a step takes
    W to (1 − lr·weight_decay)·W, as it does with a dense layer. So sigma's decay is divided by what its rate was
    multiplied by. A sigma with a spectrum decays to 0, and σ to what the spectrum makes of 0, which for
    ``around(center, eps)`` is the center. Reflectors do not decay: the length of full ones says nothing about W, and
    shorter compact ones turn U and V.

    Args:
        model: any module, of which some layers may be plain. A parameter that it holds twice is listed once.
        lr: the rate that a dense model would be trained with. Without it the groups take the optimizer's.
        weight_decay: as the optimizer takes it. It is set for every group, in place of the optimizer's default.
        optimizer: the class that the groups are for. ``SGD`` and ``ASGD`` follow the gradient, any other class counts
            as one of Adam's kin. ``Adam`` and others that add the decay to the gradient get it undivided.

    Returns:
        Groups with "params", "weight_decay", "name" and, if given, "lr"; the names are "sigma", of every layer of fasth
        and every tensor under ``fasth.parametrizations``, one group for each rate; "dense", every other parameter of
        two or more dimensions; "reflectors"; and "vectors", biases and the like. The last two do not decay. A group
        without parameters is left out.

    Example:
        >>> model = fasth.to_svd(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
        >>> optimizer = torch.optim.AdamW(param_groups(model, lr=1e-3, weight_decay=0.01))
    """
    _check(model, lr, weight_decay, optimizer)
    groups: dict[tuple[str, float], dict[str, Any]] = {}
    rule = None if lr is None else _Rule(follows_gradient=_is_a(optimizer, _STEP_FOLLOWS_GRADIENT))
    for parameter, (kind, factor) in _roles(model, rule).items():
        decay = weight_decay if _is_a(optimizer, _DECAY_IS_GRADIENT) else weight_decay / factor
        group: dict[str, Any] = {"params": [], "name": kind, "weight_decay": 0.0}
        if kind in (SIGMA, DENSE):
            group["weight_decay"] = float(decay)
        if lr is not None:
            group["lr"] = float(lr * factor)
        groups.setdefault((kind, factor), group)["params"].append(parameter)
    return sorted(groups.values(), key=lambda group: KINDS.index(group["name"]))


class _Role(NamedTuple):
    """What a parameter is for, and by how much its rate is larger than that of a dense weight."""

    kind: str
    factor: float = 1.0


class _Weight(NamedTuple):
    """What a module holds as its factors: W: (n, m) with ``rank`` singular values."""

    n: int
    m: int
    rank: int
    form: str
    spectrum: Spectrum
    # What the rates of sigma and of reflectors are multiplied by: less than 1 in an RNN that is made to remember.
    for_sigma: float = 1.0
    for_reflectors: float = 1.0


class _Rule(NamedTuple):
    """By how much the rates of an SVD are larger than that of its dense twin."""

    follows_gradient: bool  # the optimizer's step, as SGD's does

    def sigma(self, W: _Weight) -> float:
        factor, slope = (math.sqrt(W.n) + math.sqrt(W.m)) / 2, _slope(W.spectrum)
        factor *= W.for_sigma
        return factor / slope**2 if self.follows_gradient else factor / slope * _thinness(W)

    def reflectors(self, W: _Weight) -> float:
        factor = 1.0 if W.form == "compact" else math.sqrt(0.5)
        return W.for_reflectors * (0.3 * factor**2 if self.follows_gradient else factor * _thinness(W))


def _thinness(W: _Weight) -> float:
    """A weight of lower rank has fewer numbers, and moves less when each of them moves by the rate."""
    return math.sqrt(min(W.n, W.m) / W.rank)


def _roles(model: nn.Module, rule: _Rule | None) -> dict[nn.Parameter, _Role]:
    """Without a rule all factors are 1."""
    roles: dict[nn.Parameter, _Role] = {}
    for module in model.modules():
        weight = _weight_of(module)
        for name, parameter in module.named_parameters(recurse=False):
            if weight is not None and name == "signs":
                continue  # constants
            if is_lazy(parameter):
                raise ValueError(f"`model` should have seen a first batch, which sets the size of its {module}")
            role = _role(weight, name.removesuffix("_orig"), parameter, rule)  # as torch.nn.utils.prune renames it
            # Held twice, as a reflector and as something else: it is a reflector, and does not decay.
            if parameter not in roles or role.kind == REFLECTORS:
                roles[parameter] = role
    return roles


def _role(weight: _Weight | None, name: str, parameter: nn.Parameter, rule: _Rule | None) -> _Role:
    if weight is not None and name.startswith(("sigma", "original1")):
        return _Role(SIGMA, rule.sigma(weight) if rule else 1.0)
    if weight is not None and (name in ("U", "V") or name.startswith(("reflectors", "original"))):
        return _Role(REFLECTORS, rule.reflectors(weight) if rule else 1.0)
    return _Role(DENSE if parameter.ndim >= 2 else VECTORS)


def _weight_of(module: Any) -> _Weight | None:
    """What a module holds as its factors, if it does; an RNN's weights are alike."""
    if isinstance(module, ParametrizationList) and isinstance(module[0], (OrthogonalWeight, SVDWeight)):
        n, m = module[0].shape[-2:]
        return _Weight(n, m, min(n, m), "compact", getattr(module[0], "spectrum", free()))
    if isinstance(module, SVDFactors):
        return _Weight(*module._matrix_shape, module.rank, module.form, module.spectrum)
    if isinstance(module, Recurrent):
        n, m = module._matrix_shape
        spectrum, smaller = module.spectrum or free(), (1.0, 1.0)
        if isinstance(module, RNNSVD) and module.spectrum is None:
            smaller = (1.0, 0.05)
        elif isinstance(module, RNNSVD) and spectrum.bounded:
            smaller = (0.01, 0.025)  # what it remembers passes through two orthogonal matrices, U and V
        return _Weight(n, m, min(n, m), "compact", spectrum, *smaller)
    if isinstance(module, (LinearOrthogonal, LinearSymmetric)):
        n, m = module.out_features, module.in_features
        return _Weight(n, m, min(n, m), module.form, getattr(module, "spectrum", free()))
    return None


def _slope(spectrum: Spectrum) -> float:
    """dσ/draw where σ = 1, or as near to that as the map is not flat; at least 0.05.

    It does not depend on the values of a layer: an optimizer that is made after a checkpoint was loaded has the groups
    of the one before. A smaller slope belongs to a range of σ so narrow that one step might cross it.
    """
    raw = spectrum.inverse(torch.ones(2, dtype=torch.float64, device="cpu")).clamp(-2.5, 2.5)
    step = torch.tensor([1e-5, -1e-5], dtype=torch.float64, device="cpu")
    change = (spectrum(raw + step) - spectrum(raw - step)) / (2 * step)
    return max(round(change.abs().mean().item(), 6), 0.05)


def _is_a(optimizer: OptimizerClass, kinds: tuple[OptimizerClass, ...]) -> bool:
    return issubclass(optimizer, kinds) and not issubclass(optimizer, torch.optim.AdamW)  # which may be an Adam


def _check(model: Any, lr: Any, weight_decay: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` should be a torch.nn.Module; got {type(model).__name__}")
    if lr is not None and not (isinstance(lr, Real) and 0 <= float(lr) < math.inf):
        raise ValueError(f"`lr` should be a number of at least 0, or None; got {lr!r}")
    if not (isinstance(weight_decay, Real) and 0 <= float(weight_decay) < math.inf):
        raise ValueError(f"`weight_decay` should be a number of at least 0; got {weight_decay!r}")
    if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
        raise TypeError(f"`optimizer` should be a class, such as torch.optim.SGD; got {optimizer!r}")
    if issubclass(optimizer, torch.optim.LBFGS):
        raise ValueError("`optimizer` should be one that takes groups of parameters; got LBFGS, which takes none")
