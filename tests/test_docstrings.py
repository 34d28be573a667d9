"""Docstrings: their examples run and print what they say, and nothing public is without one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fasth

PUBLIC = ["fasth", "fasth.spectrum", "fasth.parametrizations", "fasth.flows"]
ADAPTERS = {"fasth.flows.freia": "FrEIA", "fasth.flows.nflows": "nflows", "fasth.flows.normflows": "normflows"}
ADAPTERS["fasth.flows.zuko"] = "zuko"
# Methods that torch's classes require, which torch documents.
ASKED_FOR = {"extra_repr", "with_cache", "bijective", "domain", "codomain", "convert_state", "map_of_torch", "bounded"}


def modules() -> Iterator[str]:
    for module in pkgutil.walk_packages(fasth.__path__, "fasth."):
        if not module.name.startswith(("fasth.__main__", "fasth.tools.reproduce", "fasth.reflections.triton")):
            yield module.name


def examples_of(module: ModuleType) -> list[doctest.DocTest]:
    """Examples of the names defined in the module, with the imports that PyTorch's documentation assumes."""
    names = {"torch": torch, "nn": nn, "F": F, "fasth": fasth, **vars(module)}
    if library := ADAPTERS.get(module.__name__):
        names[library] = importlib.import_module(library)
    found = doctest.DocTestFinder(exclude_empty=True).find(module, globs=names)
    return [test for test in found if test.examples]


def load(name: str) -> ModuleType:
    if name in ADAPTERS:
        pytest.importorskip(ADAPTERS[name])
    return importlib.import_module(name)


@pytest.mark.parametrize("name", list(modules()))
def test_examples_print_what_they_say(name: str) -> None:
    for test in examples_of(load(name)):
        printed: list[str] = []
        doctest.DocTestRunner(verbose=False).run(test, out=printed.append)
        assert not printed, "".join(printed)


def test_there_are_examples() -> None:
    found = {test.name for name in modules() if name not in ADAPTERS for test in examples_of(load(name))}
    assert {"fasth.functional.householder", "fasth.optim.param_groups", "fasth.spectra.spectra"} <= found


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that we define."""
    ours = {name for owner in cls.__mro__ if owner.__module__.startswith("fasth.") for name in vars(owner)}
    for name in sorted(ours):
        member = inspect.getattr_static(cls, name)
        if not name.startswith("_") and (callable(member) or isinstance(member, property | classmethod)):
            yield name, member


@pytest.mark.parametrize("name", [*PUBLIC, *ADAPTERS])
def test_everything_public_has_a_docstring(name: str) -> None:
    module = load(name)
    for public in module.__all__:
        found = getattr(module, public)
        assert inspect.getdoc(found), f"{name}.{public}"
        for member, method in members(found) if isinstance(found, type) else ():
            if member not in ASKED_FOR:
                assert inspect.getdoc(method), f"{name}.{public}.{member}"
