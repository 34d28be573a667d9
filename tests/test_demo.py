"""The demo: what it claims of both networks, of their layers and of their compression holds, and it prints it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import fasth

for package in ("matplotlib", "rich", "sklearn"):
    pytest.importorskip(package, reason=f"{package} is not installed; it comes with fasth[dev,reproduce]")

WIDTH = 64


@pytest.fixture(scope="module")
def demo():
    """examples/demo.py, imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent.parent / "examples")
        import demo

        yield demo


@pytest.fixture(scope="module")
def run(demo):
    return demo.train_both(seed=0, width=WIDTH, epochs=8, after_epoch=lambda losses: None)


def test_both_networks_begin_as_one_and_learn_as_well(demo, run):
    assert run.difference_at_start < 1e-5
    plain, svd = demo.accuracy(run.plain, run.test), demo.accuracy(run.svd, run.test)
    assert svd > plain > 85 and svd > 90
    assert demo.agreement(run) > 85
    sigmas = sum(layer.sigma.numel() for layer in run.svd.modules() if isinstance(layer, fasth.LinearSVD))
    assert demo.count_parameters(run.svd) == demo.count_parameters(run.plain) + sigmas
    assert len(run.seconds["plain"]) == len(run.seconds["SVD"]) > 0


def test_layers_know_what_torch_linalg_computes(demo, run):
    layers = [layer for layer in run.svd.modules() if isinstance(layer, fasth.LinearSVD)]
    assert len(layers) == 4
    for layer in layers:
        facts = {fact.name: fact for fact in demo.facts(layer, rounds=2)}
        assert len(facts) == (4 if layer.in_features == layer.out_features else 2)
        for name, fact in facts.items():
            # Errors by the factors do not grow with the condition number, except for products with the inverse.
            cond = facts["condition number"].exact.item() if name.startswith("inverse") else 1
            assert fact.error(fact.known) < math.sqrt(WIDTH) * torch.finfo(torch.float32).eps * cond, name


def test_spectra_are_those_of_the_dense_weights(demo, run):
    for before, after, dense in zip(
        run.spectra_at_start, demo.spectra(run.svd), demo.spectra(fasth.to_dense(run.svd)), strict=True
    ):
        torch.testing.assert_close(after, dense, rtol=0, atol=1e-5)
        assert not torch.allclose(before, after, atol=1e-2)


def test_compressed_networks_are_smaller_and_nearly_as_good(demo, run):
    whole = demo.accuracy(run.svd, run.test)
    for (rank, size, cut, trained_on), limit in zip(demo.compressed([run], WIDTH), (0.6, 0.35, 0.2), strict=True):
        assert size < limit * demo.count_parameters(run.plain)
        assert cut < trained_on
        assert rank < WIDTH // 4 or trained_on > whole - 5


def test_prints_tables_and_draws_the_picture(demo, tmp_path, capsys):
    picture = tmp_path / "new" / "spectra.png"
    demo.main(["--quick", "--epochs", "1", "--seeds", "2", "--width", "16", "--picture", str(picture)])
    printed = capsys.readouterr().out
    for words in ("2/2", "test accuracy", "training step", "condition number", "log |determinant|", "epochs later"):
        assert words in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("option", "least"), [("--seeds", 1), ("--width", 16), ("--epochs", 1)])
def test_too_small_a_size_is_an_error(demo, option, least, capsys):
    with pytest.raises(SystemExit):
        demo.main([option, "0"])
    assert f"{option} should be at least {least}; got 0" in capsys.readouterr().err
