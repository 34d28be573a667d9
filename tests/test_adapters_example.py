"""examples/adapters.py: every method starts as the network that was trained, trains what it says, and merges."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

for package in ("matplotlib", "rich", "sklearn"):
    pytest.importorskip(package, reason=f"{package} is not installed; it comes with fasth[dev,reproduce]")


@pytest.fixture(scope="module")
def adapters():
    """examples/adapters.py, imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent.parent / "examples")
        import adapters

        yield adapters


def test_every_method_starts_as_the_trained_network(adapters):
    torch.manual_seed(0)
    start, x = adapters.network(), torch.randn(50, 64)
    for method in adapters.METHODS.values():
        model = method(copy.deepcopy(start))
        torch.testing.assert_close(model(x), start(x), rtol=0, atol=1e-5)


def test_only_what_should_be_trained_changes_and_it_merges(adapters):
    torch.manual_seed(0)
    start, data = adapters.network(), adapters.turned(0)
    for name, method in adapters.METHODS.items():
        model = method(copy.deepcopy(start))
        before = {key: value.clone() for key, value in model.named_parameters()}
        adapters.train(model, data.adapting, rate=1e-2, steps=5, seed=0)
        for key, value in model.named_parameters():
            assert torch.equal(value, before[key]) != value.requires_grad, f"{name}: {key}"
        expected = model(data.test.images)
        merged = adapters.merged(model)
        assert [type(layer) for layer in merged] == [type(layer) for layer in start], name
        torch.testing.assert_close(merged(data.test.images), expected, rtol=1e-4, atol=1e-4)


def test_orthogonal_adapters_keep_the_singular_values_and_thin_ones_the_rank(adapters):
    torch.manual_seed(0)
    start, data = adapters.network(), adapters.unseen(0)
    for name, method in adapters.METHODS.items():
        model = method(copy.deepcopy(start))
        adapters.train(model, data.adapting, rate=1e-2, steps=20, seed=0)
        for old, new in zip(start, adapters.merged(model), strict=True):
            if not isinstance(old, nn.Linear):
                continue
            assert not torch.allclose(old.weight, new.weight, atol=1e-4) or name == "the last layer"
            if "reflections" in name or "orthogonal" in name:
                torch.testing.assert_close(torch.linalg.svdvals(new.weight), torch.linalg.svdvals(old.weight))
            if "rank" in name:
                assert torch.linalg.matrix_rank(new.weight - old.weight, atol=1e-4) <= adapters.RANK


def test_no_image_is_trained_with_and_tested_on(adapters):
    turned, unseen = adapters.turned(0), adapters.unseen(0)
    assert set(unseen.pretraining.labels.tolist()) == set(unseen.test.labels.tolist()) == set(range(5))
    upright = turned.test.images.reshape(-1, 8, 8).rot90(-1, (1, 2)).flatten(1)
    assert torch.equal(upright, turned.old_test.images)
    for data, tested in ((turned, turned.test.images), (unseen, unseen.test.images)):
        for trained in (data.adapting.images, data.validation.images):
            assert torch.cdist(tested, trained).min() > 0
    assert torch.cdist(turned.old_test.images, turned.pretraining.images).min() > 0


def test_it_adapts_and_reports(adapters, tmp_path, capsys):
    adapters.main(["--quick", "--steps", "30", "--out", str(tmp_path / "new")])
    table = (tmp_path / "new" / "table.md").read_text()
    assert table.strip() in capsys.readouterr().out
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("|")]
    for method in adapters.METHODS:
        assert len([row for row in rows if row[0].strip() == method]) == len(adapters.TASKS)
    scores = {row[0].strip(): float(row[2]) for row in rows[2 : 2 + 1 + len(adapters.METHODS)]}
    assert min(scores["all weights"], scores["**orthogonal**"]) > scores["before"] + 20
    assert (tmp_path / "new" / "adapters.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("option", "least"), [("--seeds", 1), ("--steps", 1)])
def test_too_small_a_size_is_an_error(adapters, option, least, capsys):
    with pytest.raises(SystemExit):
        adapters.main([option, "0"])
    assert f"{option} should be at least {least}; got 0" in capsys.readouterr().err
