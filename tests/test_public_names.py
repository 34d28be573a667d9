"""The public names of the package, read in every way that Python has."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from contextlib import nullcontext

import pytest
import torch
from layers import CASES, Case, of_every, output
from torch import nn

import fasth


@pytest.mark.parametrize("name", fasth.__all__)
def test_a_function_that_hides_its_module_has_the_public_names_of_the_module(name: str) -> None:
    if importlib.util.find_spec(f"fasth.{name}") is None:
        return
    namespace: dict[str, object] = {}
    exec(f"import fasth.{name} as bound", namespace)
    module = importlib.import_module(f"fasth.{name}")
    assert module.__all__
    for public in module.__all__:
        assert getattr(namespace["bound"], public) is getattr(module, public)


def test_these_functions_hide_their_modules() -> None:
    hidden = [name for name in fasth.__all__ if importlib.util.find_spec(f"fasth.{name}") and name == name.lower()]
    called = sorted(name for name in hidden if callable(getattr(fasth, name)))
    assert called == ["hidden_gradients", "spectra", "tune"]


def test_the_module_of_spectra_is_read_as_a_module_and_called_as_a_function() -> None:
    import fasth.spectra as s
    from fasth.spectra import LayerSpectrum, spectra

    found = fasth.spectra(nn.Sequential(fasth.LinearSVD(3, 2)))
    assert s.LayerSpectrum is LayerSpectrum and isinstance(found["0"], s.LayerSpectrum)
    assert s.spectra is spectra is fasth.spectra
    assert torch.equal(s(nn.Sequential(fasth.LinearSVD(3, 2)))["0"].singular_values, torch.ones(2))


@of_every(CASES)
def test_arguments_have_the_names_that_they_have_in_torch(case: Case) -> None:
    layer, dense = case.make(), case.dense()
    assert list(inspect.signature(layer.forward).parameters) == list(inspect.signature(dense.forward).parameters)[:2]
    if not isinstance(layer, fasth.LinearSymmetric):  # which has one size
        names = list(inspect.signature(type(dense)).parameters)
        if names != ["args", "kwargs"]:  # nn.RNN and its kin
            assert list(inspect.signature(type(layer)).parameters)[: len(names)] == names
    x = case.input()
    for context in (nullcontext(), fasth.cached()):
        with context:
            torch.testing.assert_close(output(lambda x: layer(input=x), x), output(layer, x))


@pytest.mark.parametrize("kind", [fasth.LinearSVD, fasth.LinearOrthogonal, fasth.LinearSymmetric])
@pytest.mark.parametrize("shape", [(2, 4), (5,), ()])
def test_errors_call_the_input_by_its_name(kind: type, shape: tuple[int, ...]) -> None:
    layer = kind(3) if kind is fasth.LinearSymmetric else kind(3, 3)
    for context in (nullcontext(), fasth.cached()):
        with (
            context,
            pytest.raises(ValueError, match=f"`input` should have last dimension 3; got shape {re.escape(str(shape))}"),
        ):
            layer(input=torch.randn(shape))
