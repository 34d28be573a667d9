"""param_groups: learning rates and weight decay for the parameters of a model with SVDs."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fasth.nn.held_weight import HeldWeight, held_weights
from fasth.spectrum import Spectrum, free

__all__ = ["param_groups"]

OptimizerClass: TypeAlias = type[Optimizer]

SIGMA, DENSE, REFLECTORS, VECTORS = KINDS = ("sigma", "dense", "reflectors", "vectors")
CONSTANT = "constant"  # parameters that are not given to an optimizer

# The lr at which an SVD moves W as far as a dense layer does: in the middle of the rates that Adam is used with.
LR = 0.003

# Steps of these optimizers are proportional to the gradient. Steps of all others are about as large as the rate.
_STEP_FOLLOWS_GRADIENT = (torch.optim.SGD, torch.optim.ASGD)
# These optimizers add the decay to the gradient before normalizing it. All others subtract rate · decay · parameter.
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
    reflectors: float = 1.0,
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer, with rates at which W = U diag(σ) Vᵀ learns as a dense W does at lr.

    **Rates.** Adam and similar optimizers move every number by about lr. A dense W: (n, m) then moves by a matrix
    with entries ±lr, of norm lr·√(n·m). A square W moves as far if the rate of sigma is lr·(√n + √m)/2 and the rate of
    compact reflectors lr; full reflectors are twice as many numbers, and take lr/√2. But a dense W grows in training,
    so that its relative step shrinks, the more so the larger lr is, and U and V do not grow. So both rates follow √lr:

        sigma: √(0.003·lr) · (√n + √m)/2        compact reflectors: √(0.003·lr)        others: lr

    Where a spectrum maps sigma to σ, its rate is divided by the slope of the map. For a layer of rank r, both are
    multiplied by √(min(n, m)/r), since fewer numbers move W less. For an ``optimizer`` whose step is as long as the
    gradient, ``torch.optim.SGD``, sigma has lr·(√n + √m)/2, divided by the square of the slope, and reflectors have
    0.3·lr, and half of it if they are full. Orthogonal weights, which have no sigma, have lr, or lr/√2. An ``RNNSVD``
    whose σ are bounded, as by default, is made to remember, and a change of W_hh acts at every time step: its
    reflectors have lr/40, or lr/20 where W_hh is orthogonal, and sigma a hundredth of lr·(√n + √m)/2.
    ``docs/training.md`` has the derivation, how the rates were chosen, and how they were judged on other tasks.

    **Decay.** As ‖W‖² = Σσ², decay of a free sigma is exactly decay of W: where the loss has no gradient, a step takes
    W to (1 − lr·weight_decay)·W, as it does with a dense layer. So sigma's decay is divided by what its rate was
    multiplied by. A sigma with a spectrum decays to 0, and σ to the spectrum's value at 0, which for
    ``around(center, eps)`` is the center. Reflectors do not decay: the length of full reflectors has no effect on W,
    and scaling compact reflectors turns U and V.

    Args:
        model: any module; some layers may be plain. A shared parameter is listed once.
        lr: the rate for training a dense model. If None, the groups use the optimizer's rate.
        weight_decay: the optimizer's weight decay. It is set for every group, in place of the optimizer's default.
        optimizer: the optimizer class that will get the groups. Steps of ``SGD`` and ``ASGD`` follow the
            gradient; any other class is treated like Adam. ``Adam`` and other classes that add the decay to the
            gradient get it undivided.
        reflectors: multiplies the rate of reflectors.

    Returns:
        Groups with "params", "weight_decay", "name", and, if lr is given, "lr". The names are "sigma", for every layer
        of fasth and every tensor under ``fasth.parametrizations``, one group for each rate; "dense", every other
        parameter of two or more dimensions; "reflectors"; and "vectors", such as biases. "reflectors" and "vectors" do
        not decay. Empty groups are omitted.

    Example:
        >>> model = fasth.to_svd(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
        >>> optimizer = torch.optim.AdamW(param_groups(model, lr=1e-3, weight_decay=0.01))
    """
    _check(model, lr, weight_decay, optimizer, reflectors)
    groups: dict[tuple[str, float], dict[str, Any]] = {}
    rule = None if lr is None else _rule(optimizer, float(lr), float(reflectors))
    for parameter, (kind, multiple) in _roles(model, rule).items():
        decay = weight_decay if _is_a(optimizer, _DECAY_IS_GRADIENT) else weight_decay / multiple
        group: dict[str, Any] = {"params": [], "name": kind, "weight_decay": 0.0}
        if kind in (SIGMA, DENSE):
            group["weight_decay"] = float(decay)
        if lr is not None:
            group["lr"] = float(lr * multiple)
        groups.setdefault((kind, multiple), group)["params"].append(parameter)
    return sorted(groups.values(), key=lambda group: KINDS.index(group["name"]))


class _Role(NamedTuple):
    """The kind of a parameter, and its rate as a multiple of a dense weight's rate."""

    kind: str
    multiple: float = 1.0


class _Rule:
    """Rates of an SVD as multiples of a dense weight's rate, for Adam and similar optimizers."""

    def __init__(self, lr: float, reflectors: float) -> None:
        self.lr, self.times = lr, reflectors

    def sigma(self, held: HeldWeight) -> _Role:
        return _Role(SIGMA, _size(held) / _slope(held.spectrum or free()) * _thinness(held) * self.root(held))

    def reflectors(self, held: HeldWeight) -> _Role:
        return _Role(REFLECTORS, self.times * held.rates[1] * _fullness(held) * _thinness(held) * self.root(held))

    def root(self, held: HeldWeight) -> float:
        """√(LR / lr), since the rates of an SVD follow √lr; 1 for weights whose rates follow lr: orthogonal weights,
        and recurrent nets with rates of their own."""
        return math.sqrt(LR / self.lr) if _is_ordinary(held) and self.lr else 1.0


class _GradientRule(_Rule):
    """Rates for SGD, whose step is proportional to the gradient."""

    def sigma(self, held: HeldWeight) -> _Role:
        return _Role(SIGMA, _size(held) / _slope(held.spectrum or free()) ** 2)

    def reflectors(self, held: HeldWeight) -> _Role:
        return _Role(REFLECTORS, self.times * held.rates[1] * 0.3 * _fullness(held) ** 2)


def _rule(optimizer: OptimizerClass, lr: float, reflectors: float) -> _Rule:
    return (_GradientRule if _is_a(optimizer, _STEP_FOLLOWS_GRADIENT) else _Rule)(lr, reflectors)


def _is_ordinary(held: HeldWeight) -> bool:
    """True if the weight has trained singular values, and no rates of its own."""
    return held.trained and held.rates == (1.0, 1.0)


def _size(held: HeldWeight) -> float:
    """(√n + √m)/2: the multiple of the rate at which sigma moves W as far as a dense W moves."""
    n, m = held.shape[-2:]
    return held.rates[0] * (math.sqrt(n) + math.sqrt(m)) / 2


def _fullness(held: HeldWeight) -> float:
    """1/√2 for full reflectors, which are twice as many numbers as compact ones; else 1."""
    return math.sqrt(0.5) if held.form == "full" else 1.0


def _thinness(held: HeldWeight) -> float:
    """√(min(n, m)/r): a weight of rank r has fewer numbers, so each has to move further."""
    return math.sqrt(min(held.shape[-2:]) / held.rank)


def _roles(model: nn.Module, rule: _Rule | None) -> dict[nn.Parameter, _Role]:
    """Maps each parameter to its role. Without a rule, all rates are a dense weight's rate."""
    roles: dict[nn.Parameter, _Role] = {}
    for module in model.modules():
        held = _roles_of_factors(module, rule)
        for name, parameter in module.named_parameters(recurse=False):
            if is_lazy(parameter):
                raise ValueError(f"`model` should have seen a first batch, which sets the size of its {module}")
            # PyTorch's pruning renames a parameter, and stores the pruned tensor under its name.
            role = held.get(id(getattr(module, name.removesuffix("_orig"), parameter)))
            if role is None:
                role = _Role(DENSE if parameter.ndim >= 2 else VECTORS)
            # A parameter that is both a reflector and something else counts as a reflector, and does not decay.
            if role.kind != CONSTANT and (parameter not in roles or role.kind == REFLECTORS):
                roles[parameter] = role
    return roles


def _roles_of_factors(module: nn.Module, rule: _Rule | None) -> dict[int, _Role]:
    """Maps the id of each tensor that a module holds as a factor to its role."""
    roles: dict[int, _Role] = {}
    for held in held_weights(module):
        reflectors = rule.reflectors(held) if rule else _Role(REFLECTORS)
        roles |= {id(t): reflectors for t in (held.U, held.V) if t is not None}
        if held.sigma is not None:
            roles[id(held.sigma)] = rule.sigma(held) if rule else _Role(SIGMA)
        if held.signs is not None:
            roles[id(held.signs)] = _Role(CONSTANT)
    return roles


def _slope(spectrum: Spectrum) -> float:
    """dσ/draw at σ = 1, or at the nearest σ where the map is not flat; at least 0.05.

    The slope does not depend on a layer's values, so that an optimizer made after loading a checkpoint has the same
    groups. With a smaller slope, the range of σ would be so narrow that one step might cross it.
    """
    raw = spectrum.inverse(torch.ones(2, dtype=torch.float64, device="cpu")).clamp(-2.5, 2.5)
    step = torch.tensor([1e-5, -1e-5], dtype=torch.float64, device="cpu")
    change = (spectrum(raw + step) - spectrum(raw - step)) / (2 * step)
    return max(round(change.abs().mean().item(), 6), 0.05)


def _is_a(optimizer: OptimizerClass, kinds: tuple[OptimizerClass, ...]) -> bool:
    return issubclass(optimizer, kinds) and not issubclass(optimizer, torch.optim.AdamW)  # an Adam, too


def _check(model: Any, lr: Any, weight_decay: Any, optimizer: Any, reflectors: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` should be a torch.nn.Module; got {type(model).__name__}")
    if lr is not None and not (isinstance(lr, Real) and 0 <= float(lr) < math.inf):
        raise ValueError(f"`lr` should be a number of at least 0, or None; got {lr!r}")
    if not (isinstance(weight_decay, Real) and 0 <= float(weight_decay) < math.inf):
        raise ValueError(f"`weight_decay` should be a number of at least 0; got {weight_decay!r}")
    if not (isinstance(reflectors, Real) and 0 < float(reflectors) < math.inf):
        raise ValueError(f"`reflectors` should be a positive number; got {reflectors!r}")
    if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
        raise TypeError(f"`optimizer` should be a class, such as torch.optim.SGD; got {optimizer!r}")
    if issubclass(optimizer, torch.optim.LBFGS):
        raise ValueError("`optimizer` should be one that takes groups of parameters; got LBFGS, which takes none")
