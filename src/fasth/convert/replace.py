"""Replaces the chosen layers of a model: all of them or, after an error, none. Shared parameters stay shared."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

Filter: TypeAlias = Callable[[str, nn.Module], bool]

FILTERED = "the filter leaves it alone"
EXCLUDED = "`exclude` names it"


class Conversion(NamedTuple):
    """The conversion of one layer of a model, for the report."""

    name: str  # as in ``model.named_modules()``: "" is the model itself
    before: str  # the name of its class
    after: str | None  # None: it was left alone
    reason: str  # why it was converted, or left alone


class Replacement:
    """The layers of a model to replace, and the reasons for the others.

    Args:
        model: any module; it is copied unless ``inplace``.
        why_not: returns the reason why a module cannot be replaced, "" if it can, or None if it is not a layer to
            report.
        filter: takes the name and the module of a layer that can be replaced, and returns whether to replace it.
        exclude: the names of modules that are not replaced, with all modules below them.
        is_wrapper: returns whether a module may write to the weights of the layers below it, which are not replaced.
    """

    def __init__(
        self,
        model: nn.Module,
        why_not: Callable[[nn.Module], str | None],
        filter: Filter | None,
        inplace: bool,
        exclude: str | Iterable[str] = (),
        is_wrapper: Callable[[nn.Module], bool] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"`model` should be a torch.nn.Module; got {type(model).__name__}")
        if filter is not None and not callable(filter):
            raise TypeError(f"`filter` should be a function of a name and a module; got {type(filter).__name__}")
        names = _checked_names(exclude)
        self.model = model if inplace else copy.deepcopy(model)
        self.names = {module: name for name, module in _named_modules(self.model, "", set())}
        self.reasons: dict[nn.Module, str] = {}
        for module in self.names:
            reason = why_not(module)
            if reason is not None:
                self.reasons[module] = reason
        for parent in self.names:
            for child in parent.children() if type(parent).__name__ == "OptimizedModule" else ():
                if self.reasons.get(child) == "":
                    self.reasons[child] = "it was compiled as it is: convert before torch.compile"
            if is_wrapper is not None and is_wrapper(parent):
                self._leave_below(parent)
        self.possible = [module for module, reason in self.reasons.items() if not reason]
        for module in self.possible:
            if filter is not None and not filter(self.names[module], module):
                self.reasons[module] = FILTERED
        for module in _named(self.model, names):
            if module in self.reasons:
                self.reasons[module] = EXCLUDED
        self._leave_those_that_share_with_others()

    def carry_out(self, convert: Callable[[str, nn.Module], tuple[nn.Module | None, str]]) -> list[Conversion]:
        """Replaces every chosen module by ``convert(name, module)``, which returns a module, or None, and a reason.

        All modules are converted before the first is replaced. Biases stay the same parameters.
        """
        made: dict[nn.Module, nn.Module] = {}
        first: dict[nn.Parameter, nn.Module] = {}  # the first module made from a parameter that others may share
        conversions = []
        for module, reason in self.reasons.items():
            new = None
            if not reason:
                new, reason = convert(self.names[module], module)
            if new is not None:
                _carry_over(module, new)
                _share_factors(
                    first.setdefault(weight_parameters(module)[0], new), new, children=dict(module.named_children())
                )
                made[module] = new.train(module.training)
            after = None if new is None else type(new).__name__
            conversions.append(Conversion(self.names[module], type(module).__name__, after, reason))
        places = [(path, module) for path, module in self.model.named_modules(remove_duplicate=False) if path]
        self.model = made.get(self.model, self.model)
        for path, module in places:  # parents come before their children, which a new parent has too
            if module in made:
                parent, _, name = path.rpartition(".")
                setattr(self.model.get_submodule(parent), name, made[module])
        return conversions

    def left_alone(self) -> list[Conversion]:
        """Lists the layers that will not be replaced, with their reasons."""
        return [
            Conversion(self.names[module], type(module).__name__, None, reason)
            for module, reason in self.reasons.items()
            if reason
        ]

    def _leave_below(self, wrapper: nn.Module) -> None:
        kind = type(wrapper)
        for module in wrapper.modules():
            if self.reasons.get(module) == "":
                self.reasons[module] = (
                    f"it is part of a {kind.__module__}.{kind.__qualname__}, which may read and write its weight"
                )

    def _leave_those_that_share_with_others(self) -> None:
        """Excludes modules that share a weight with a module that is not chosen or would not share the factors."""
        owners: dict[nn.Parameter, list[nn.Module]] = defaultdict(list)
        for module in self.names:
            for parameter in (*(p for _, p in parameters_of(module)), *_originals(module)):
                owners[parameter].append(module)
        chosen = {module for module, reason in self.reasons.items() if not reason}
        for module in chosen:
            for parameter in weight_parameters(module):
                if owners[parameter].count(module) > 1:
                    self.reasons[module] = "two of its weights are one parameter"
                for other in owners[parameter]:
                    if other is not module and not (other in chosen and _same_factors(other, module)):
                        owner = f"{type(other).__name__} `{self.names.get(other, '')}`"
                        self.reasons[module] = f"it shares a weight with {owner}, which would not share its factors"


def weight_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that hold a layer's weight, dense or factored: a conversion replaces them."""
    return [p for name, p in parameters_of(module) if is_weight_parameter(name)] + _originals(module)


def _originals(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that PyTorch's parametrizations of a module are computed from."""
    return [parameter for part in _parametrizations(module) for parameter in part.parameters()]


def _parametrizations(module: Any) -> list[nn.Module]:
    return (
        [part for held in module.parametrizations.values() for part in (held, *held)] if is_parametrized(module) else []
    )


def parameters_of(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The module's own parameters by name; a parameter with two names is listed twice."""
    return list(module.named_parameters(recurse=False, remove_duplicate=False))


def is_weight_parameter(name: str) -> bool:
    """True if a parameter of this name holds a layer's weight, dense or factored."""
    return not (name.startswith(("bias", "weight_ih", "weight_hr")) or name.endswith("bias"))


def _checked_names(exclude: str | Iterable[str]) -> list[str]:
    names = [exclude] if isinstance(exclude, str) else list(exclude) if isinstance(exclude, Iterable) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise TypeError(f"`exclude` should be a name or several names, as in named_modules(); got {exclude!r}")
    return names


def _named(model: nn.Module, names: list[str]) -> set[nn.Module]:
    """Returns the modules that the names match, and all modules below them.

    A name matches every module whose path is the name, or ends with a dot and the name: "head" matches "model.head".
    """
    found: set[nn.Module] = set()
    paths = dict(model.named_modules(remove_duplicate=False))
    for name in names:
        matches = [module for path, module in paths.items() if path and f".{path}".endswith(f".{name}")]
        if not name or not matches:
            there = [path for path in paths if path]
            listed = ", ".join(there[:50]) + (f" and {len(there) - 50} more" if len(there) > 50 else "")
            raise ValueError(
                f"`exclude` should name modules of `model`; got {name!r}, and there are {listed or 'none'}"
            )
        for module in matches:
            found.update(module.modules())
    return found


def _same_factors(a: nn.Module, b: nn.Module) -> bool:
    """True if two layers have the same matrix: the same parameters, shapes and spectra."""
    return (
        type_before_parametrizations(a) is type_before_parametrizations(b)
        and len(weight_parameters(a)) == len(weight_parameters(b))
        and all(p is q for p, q in zip(weight_parameters(a), weight_parameters(b), strict=True))
        and all(torch.equal(p, q) for p, q in zip(a.buffers(), b.buffers(), strict=True))
        and _spectra_of(a) == _spectra_of(b)
    )


def _spectra_of(module: nn.Module) -> list[object]:
    """The spectrum of a layer of fasth, or the spectra of its parametrizations."""
    return [getattr(part, "spectrum", None) for part in (module, *_parametrizations(module))]


def _carry_over(module: nn.Module, new: nn.Module) -> None:
    """Copies the other parameters; a LowRank's bias goes to its second layer."""
    for name, parameter in parameters_of(module):
        if not is_weight_parameter(name):
            setattr(new[-1] if isinstance(new, nn.Sequential) else new, name, parameter)


def _share_factors(first: nn.Module, new: nn.Module, children: Container[str]) -> None:
    """Gives ``new`` the factors of ``first``, of the same class and made from the same parameters.

    Parameters of ``children``, which the layer had before, are excluded.
    """
    for path, tensor in (*first.named_parameters(), *first.named_buffers()):
        where, _, name = path.rpartition(".")
        if is_weight_parameter(name) and where.partition(".")[0] not in children:
            setattr(new.get_submodule(where), name, tensor)


def _named_modules(module: nn.Module, name: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yields what ``module.named_modules()`` does, without the parametrizations of modules."""
    if module in seen:
        return
    seen.add(module)
    yield name, module
    for child_name, child in module.named_children():
        if child_name == "parametrizations" and is_parametrized(module):
            continue
        yield from _named_modules(child, f"{name}.{child_name}" if name else child_name, seen)
