"""examples/rotations.py: the rotation is undone exactly, stays orthogonal, and rounds as the definition says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

for package in ("click", "sklearn"):
    pytest.importorskip(package, reason=f"{package} is not installed; it comes with fasth[dev,reproduce]")


@pytest.fixture(scope="module")
def rotations() -> Iterator[Any]:
    """examples/rotations.py, imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent.parent / "examples")
        import rotations

        yield rotations


def test_the_network_is_the_same_with_every_rotation(rotations: Any) -> None:
    torch.manual_seed(0)
    model, x = rotations.Network().double(), torch.randn(5, 64, dtype=torch.float64)
    R = torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64)).Q
    torch.testing.assert_close(model(x, R), model(x))
    H = rotations.hadamard(3).double()
    torch.testing.assert_close(H @ H.mT, torch.eye(64, dtype=torch.float64))
    assert (H.abs() == H.abs()[0, 0]).all()


def test_four_bits_are_fifteen_numbers_a_row(rotations: Any) -> None:
    t = torch.randn(3, 1000, requires_grad=True)
    low = rotations.four_bits(t)
    numbers = low / t.abs().amax(-1, keepdim=True) * 7
    torch.testing.assert_close(numbers, numbers.round(), rtol=0, atol=1e-5)
    assert all(10 < len(row.round().unique()) <= 15 for row in numbers)
    assert ((low - t).abs() <= t.abs().amax(-1, keepdim=True) / 14 + 1e-6).all()
    (g,) = torch.autograd.grad(low.sum(), t)
    assert (g == 1).all()


@pytest.mark.parametrize("name", ["Cayley SGD", "**LinearOrthogonal, Adam**"])
def test_a_trained_rotation_is_orthogonal_and_has_less_loss(rotations: Any, name: str) -> None:
    data = rotations.digits(0)
    model = rotations.trained_network(data, 100, 0)
    start = rotations.hadamard(0)

    def loss(R: torch.Tensor, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0], R, rounded=True), batch[1])

    steps = [*rotations.batches(data, 60, 1)]
    R = rotations.TRAINED[name](start, loss, steps, rotations.RATES[name][1])
    torch.testing.assert_close(R @ R.mT, torch.eye(64), rtol=0, atol=1e-4)
    assert (R - start).norm() > 0.05
    assert loss(R, data.training) < loss(start, data.training)


def test_it_reports(rotations: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rotations.main(["--seeds", "1", "--steps", "10", "--out", str(tmp_path)])
    text = (tmp_path / "rotations.md").read_text()
    assert text.strip() in capsys.readouterr().out
    assert [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")][2:] == [
        "32 bits", "no rotation", "random Hadamard", "Cayley SGD", "**LinearOrthogonal, Adam**"]  # fmt: skip
