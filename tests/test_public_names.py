"""The public names of the package, read in every way that Python has."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch
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
