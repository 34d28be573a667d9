"""The zoo itself: it has the checks and architectures that it says, and they find planted bugs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from zoo.checks import CHECKS, Specimen
from zoo.libraries import define_operators_of_torchvision, missing
from zoo.models import ARCHITECTURES, Architecture
from zoo.run import FAILS, HOLDS, SKIPPED, main, results_of, summary

import fasth
from fasth.nn.factored import Factored


class Images(nn.Module):
    """Convolutions, one with groups, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.grouped = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=4)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.grouped(torch.relu(self.first(x)))).mean((2, 3)))


def images() -> Architecture:
    return Architecture("torch", "images", Images, lambda: {"x": torch.randn(4, 3, 8, 8, dtype=torch.float64)})


def test_all_checks_hold_of_a_small_model() -> None:
    assert results_of(images(), [*CHECKS]) == dict.fromkeys(CHECKS, (HOLDS, ""))


def wrong_sigma(s: Specimen) -> None:
    with torch.no_grad():
        s.svd.head.sigma.mul_(1.01)


def wrong_signs(s: Specimen) -> None:
    with torch.no_grad():
        s.svd.head.reflectors.diagonal().neg_()


def lost_reason(s: Specimen) -> None:
    s.report = [c for c in s.report if c.name != "grouped"]


def blind(s: Specimen) -> None:
    s.svd = fasth.to_dense(s.svd)


@pytest.mark.parametrize(
    ("plant", "checks"),
    [
        (wrong_sigma, ["conversion", "cached", "step", "to_dense", "copies"]),
        (wrong_signs, ["conversion", "cached", "step", "bfloat16", "to_dense", "copies", "compress"]),
        (lost_reason, ["report"]),
        (blind, ["report"]),
    ],
)
def test_planted_bugs_are_found(plant: Callable[[Specimen], None], checks: list[str]) -> None:
    for check in checks:
        specimen = Specimen(images())
        CHECKS[check](specimen)
        plant(specimen)
        with pytest.raises(AssertionError):
            CHECKS[check](specimen)


def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is taken, and not loaded."""
    monkeypatch.setattr(Factored, "_load_from_state_dict", lambda *_: None)


def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """fused optimizers with another rate."""
    groups = fasth.param_groups
    calls: list[int] = []

    def wrong(*args: object, **options: object) -> object:
        calls.append(1)
        found = groups(*args, **options)  # type: ignore[arg-type]
        for group in found:
            group["lr"] *= 2 if len(calls) == 3 else 1
        return found

    monkeypatch.setattr(fasth, "param_groups", wrong)


@pytest.mark.parametrize(
    ("plant", "check"), [(forgotten, "state dict"), (forgotten, "plain checkpoint"), (narrow, "optimizers")]
)
def test_bugs_planted_in_the_library_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    specimen = Specimen(images())
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        CHECKS[check](specimen)


def test_a_compiled_model_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    specimen = Specimen(images())

    def compiled(model: nn.Module, **_: object) -> Callable[..., Tensor]:
        return lambda **x: model(**x) * 1.01

    monkeypatch.setattr(torch, "compile", compiled)
    with pytest.raises(AssertionError, match="the output is off"):
        CHECKS["compile"](specimen)


def test_the_zoo_has_54_architectures_and_12_checks() -> None:
    assert (len(ARCHITECTURES), len(CHECKS)) == (54, 12)
    assert len({str(architecture) for architecture in ARCHITECTURES}) == 54


def test_the_summary_counts_and_names_what_does_not_hold() -> None:
    found = {
        "a": {"step": (HOLDS, ""), "cached": (FAILS, "it is off")},
        "b": {"step": (SKIPPED, "no"), "cached": (HOLDS, "")},
    }
    lines = summary(found, ["step", "cached"]).splitlines()
    assert lines[1].split() == ["step", "1", "0", "1"] and lines[2].split() == ["cached", "1", "1", "0"]
    assert lines[3:5] == ["a, cached: fails: it is off", "b, step: skipped: no"]
    assert lines[5].startswith("2 of 2 × 2 = 4 hold, 1 do not, and 1 the plain model cannot do")


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("zoo.run.missing", lambda: ["timm"])
    with pytest.raises(SystemExit):
        main([])
    assert "timm should be installed; `make zoo` does that" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["transformers/llama", "timm/mixer", "torchvision/densenet"])
def test_one_of_each_library(name: str) -> None:
    (architecture,) = (a for a in ARCHITECTURES if str(a) == name)
    needed = ("timm", "torchvision") if architecture.library == "timm" else (architecture.library,)
    if absent := missing(needed):
        pytest.skip(f"{absent[0]} is not installed; `make zoo` installs it")
    define_operators_of_torchvision()
    results = results_of(architecture, [check for check in CHECKS if check != "compile"])
    assert all(result == HOLDS for result, _ in results.values()), results
