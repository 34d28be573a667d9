"""benchmarks/spectral_norm.py: the norms that it reports are those of the weights that the forward pass used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

for package in ("rich", "sklearn"):
    pytest.importorskip(package, reason=f"{package} is not installed; it comes with fasth[dev,reproduce]")


@pytest.fixture(scope="module")
def benchmark():
    """benchmarks/spectral_norm.py, imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
        import spectral_norm

        yield spectral_norm


def test_norms_are_those_of_the_weights_that_were_used(benchmark):
    """The outputs in training mode, which iterates, are those of the weights that are decomposed after it."""
    x = torch.rand(5, 64)
    for name, new in benchmark.LAYERS.items():
        torch.manual_seed(0)
        model = benchmark.critic(new)
        outputs = model(x)
        norms = benchmark.true_norms(model)
        assert model.training and len(norms) == 4
        assert torch.equal(model.eval()(x), outputs), name


def test_layers_of_fasth_keep_their_bound_and_power_iteration_does_not(benchmark):
    for name, new in benchmark.LAYERS.items():
        norms = benchmark.train(new, seed=0, steps=30, rate=1e-2).norms
        if name in benchmark.OURS:
            assert norms.max() <= 1 + 1e-5, name
        elif "spectral_norm" in name:
            assert norms.min() > 1 - 1e-5 and norms.max() > 1.01, name
        else:
            assert norms.max() > 2


def test_it_writes_a_table(benchmark, tmp_path, capsys):
    out = tmp_path / "new" / "norms.md"
    benchmark.main(["--seeds", "1", "--steps", "11", "--rates", "0.001", "--out", str(out)])
    assert out.read_text().strip() in capsys.readouterr().out
    assert all(f"| {name} |" in out.read_text() for name in benchmark.LAYERS)
    with pytest.raises(SystemExit):
        benchmark.main(["--steps", "10"])
    assert "more than 10 steps and a seed; got 10 and 3" in capsys.readouterr().err
