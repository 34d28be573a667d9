"""param_groups: the rates, the angles and the decay with which the parameters of a model with SVDs train well."""

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
CONSTANT = "constant"  # not for an optimizer

# Chosen by experiments/rates, on the tasks that choose: the lr at which an SVD moves W as far as a dense layer does;
# and, for ``fasth.optim.AdamW``, the root mean square of a step of reflectors.
LR, ANGLE = 0.003, 0.0014

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
    reflectors: float = 1.0,
) -> list[dict[str, Any]]:
    """Parameters for an optimizer, with rates at which W = U diag(σ) Vᵀ learns as a dense W does at lr.

    **Rates.** Adam and its kin move every number by about lr. A dense W: (n, m) then moves by a matrix with entries
    ±lr, of norm lr·√(n·m). A square W moves as far if the rate of sigma is lr·(√n + √m)/2 and that of compact
    reflectors lr; full ones are twice as many numbers, and take lr/√2. But a dense W grows in training, so that its
    relative step shrinks, the more so the larger lr is, and U and V do not grow. So both rates follow √lr:

        sigma: √(0.003·lr) · (√n + √m)/2        compact reflectors: √(0.003·lr)        all else: lr

    Where a spectrum maps sigma to σ, its rate is divided by the slope of the map. For a layer of rank r, both are
    multiplied by √(min(n, m)/r), since fewer numbers move W less. For an ``optimizer`` whose step is as long as the
    gradient, ``torch.optim.SGD``, sigma has lr·(√n + √m)/2, divided by the square of the slope, and reflectors have
    0.3·lr, and half of it if they are full. Orthogonal weights, which have no sigma, have lr, or lr/√2. An ``RNNSVD``
    whose σ are bounded, as by default, is made to remember, and a change of W_hh acts at every time step: its
    reflectors have lr/40, or lr/20 where W_hh is orthogonal, and sigma a hundredth of lr·(√n + √m)/2.
    ``docs/training.md`` has the derivation, how the rates were chosen, and how they were judged on other tasks.

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
            ``fasth.optim.AdamW``, which calls this function, gets an angle for reflectors in place of a rate.
        reflectors: multiplies the rate of reflectors, or their angle.

    Returns:
        Groups with "params", "weight_decay", "name", and, if lr is given, "lr". The names are "sigma", of every layer
        of fasth and every tensor under ``fasth.parametrizations``, one group for each rate; "dense", every other
        parameter of two or more dimensions; "reflectors"; and "vectors", biases and the like. The last two do not
        decay. A group without parameters is left out.

    Example:
        >>> model = fasth.to_svd(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
        >>> optimizer = torch.optim.AdamW(param_groups(model, lr=1e-3, weight_decay=0.01))
    """
    _check(model, lr, weight_decay, optimizer, reflectors)
    groups: dict[tuple[str, float, float | None], dict[str, Any]] = {}
    rule = None if lr is None else _rule(optimizer, float(lr), float(reflectors))
    for parameter, (kind, multiple, angle) in _roles(model, rule).items():
        decay = weight_decay if _is_a(optimizer, _DECAY_IS_GRADIENT) else weight_decay / multiple
        group: dict[str, Any] = {"params": [], "name": kind, "weight_decay": 0.0}
        if kind in (SIGMA, DENSE):
            group["weight_decay"] = float(decay)
        if lr is not None:
            group["lr"] = float(lr * multiple)
        if kind == REFLECTORS and isinstance(rule, _Angles):
            group["angle"] = angle
        groups.setdefault((kind, multiple, angle), group)["params"].append(parameter)
    return sorted(groups.values(), key=lambda group: KINDS.index(group["name"]))


class _Role(NamedTuple):
    """The purpose of a parameter, by how much its rate is larger than that of a dense weight, and its angle, if any."""

    kind: str
    multiple: float = 1.0
    angle: float | None = None


class _Rule:
    """By how much the rates of an SVD are larger than that of its dense twin, for Adam's kin."""

    def __init__(self, lr: float, reflectors: float) -> None:
        self.lr, self.times = lr, reflectors

    def sigma(self, held: HeldWeight) -> _Role:
        return _Role(SIGMA, _size(held) / _slope(held.spectrum or free()) * _thinness(held) * self.root(held))

    def reflectors(self, held: HeldWeight) -> _Role:
        return _Role(REFLECTORS, self.times * held.rates[1] * _fullness(held) * _thinness(held) * self.root(held))

    def root(self, held: HeldWeight) -> float:
        """√(LR / lr): the rates of an SVD follow √lr. Those of an orthogonal weight, and of a net that is made to
        remember, follow lr."""
        return math.sqrt(LR / self.lr) if _is_ordinary(held) and self.lr else 1.0


class _GradientRule(_Rule):
    """For SGD, whose step is as long as the gradient."""

    def sigma(self, held: HeldWeight) -> _Role:
        return _Role(SIGMA, _size(held) / _slope(held.spectrum or free()) ** 2)

    def reflectors(self, held: HeldWeight) -> _Role:
        return _Role(REFLECTORS, self.times * held.rates[1] * 0.3 * _fullness(held) ** 2)


class _Angles(_Rule):
    """For ``fasth.optim.AdamW``."""

    def reflectors(self, held: HeldWeight) -> _Role:
        if not _is_ordinary(held):
            return super().reflectors(held)
        return _Role(REFLECTORS, 1.0, ANGLE * self.times * _fullness(held) * _thinness(held))


def _rule(optimizer: OptimizerClass, lr: float, reflectors: float) -> _Rule:
    if getattr(optimizer, "turns_by_angles", False):
        return _Angles(lr, reflectors)
    return (_GradientRule if _is_a(optimizer, _STEP_FOLLOWS_GRADIENT) else _Rule)(lr, reflectors)


def _is_ordinary(held: HeldWeight) -> bool:
    """Whether it has singular values to train, and no rates of its own."""
    return held.trained and held.rates == (1.0, 1.0)


def _size(held: HeldWeight) -> float:
    """(√n + √m)/2: the rate of sigma at which W moves as far as a dense one."""
    n, m = held.shape[-2:]
    return held.rates[0] * (math.sqrt(n) + math.sqrt(m)) / 2


def _fullness(held: HeldWeight) -> float:
    """Full reflectors are twice as many numbers, and move a weight as far with steps that are smaller by √2."""
    return math.sqrt(0.5) if held.form == "full" else 1.0


def _thinness(held: HeldWeight) -> float:
    """A weight of lower rank has fewer numbers, and moves less when each of them moves by the rate."""
    return math.sqrt(min(held.shape[-2:]) / held.rank)


def _roles(model: nn.Module, rule: _Rule | None) -> dict[nn.Parameter, _Role]:
    """Without a rule all rates are those of a dense weight."""
    roles: dict[nn.Parameter, _Role] = {}
    for module in model.modules():
        held = _roles_of_factors(module, rule)
        for name, parameter in module.named_parameters(recurse=False):
            if is_lazy(parameter):
                raise ValueError(f"`model` should have seen a first batch, which sets the size of its {module}")
            # PyTorch's pruning renames a parameter, and puts what is left of it in its place.
            role = held.get(id(getattr(module, name.removesuffix("_orig"), parameter)))
            if role is None:
                role = _Role(DENSE if parameter.ndim >= 2 else VECTORS)
            # Held twice, as a reflector and as something else: it is a reflector, and does not decay.
            if role.kind != CONSTANT and (parameter not in roles or role.kind == REFLECTORS):
                roles[parameter] = role
    return roles


def _roles_of_factors(module: nn.Module, rule: _Rule | None) -> dict[int, _Role]:
    """The roles of the tensors that a module holds as factors, by their id."""
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
