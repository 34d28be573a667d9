"""fasth.spectra of a model, against a decomposition, on the screen, in TensorBoard, in a picture."""

from __future__ import annotations

import builtins
import math
import statistics
from typing import Any

import pytest
import torch
from layers import ALL, Case, of_every
from torch import nn

from fasth import LinearSVD, parametrizations, spectra, spectrum
from fasth.spectra import Spectra
from fasth.tools.twins import perturbed


def weights_of(layer: Any) -> list[torch.Tensor]:
    if hasattr(layer, "svds"):
        return [svd.dense() for svd in layer.svds.values()]
    weight = layer.weight
    return [weight if hasattr(layer, "parametrizations") else weight.flatten(1)]


@of_every(ALL)
def test_singular_values_are_those_of_the_weight(case: Case) -> None:
    model = nn.Sequential(nn.ReLU(), perturbed(case.make(dtype=torch.float64)))
    found = spectra(model)
    weights = weights_of(model[1])
    assert len(found) == len(weights)
    for (name, layer), weight in zip(found.items(), weights, strict=True):
        values = torch.linalg.svdvals(weight.detach())
        assert name.startswith("1") and name == layer.name and "parametrizations" not in name
        assert layer.shape == tuple(weight.shape) and not layer.singular_values.requires_grad
        k = layer.singular_values.shape[-1]  # a weight of lower rank has no others
        torch.testing.assert_close(layer.singular_values, values[..., :k])
        assert (values[..., k:] < 1e-14).all()
        assert layer.norm == pytest.approx(torch.linalg.matrix_norm(weight, 2).max().item())
        assert layer.cond == pytest.approx((values[..., 0] / values[..., k - 1]).max().item())


def test_names() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(LinearSVD(4, 4), nn.Linear(4, 4))
            self.lstm = parametrizations.svd(nn.LSTM(4, 4), "weight_hh_l0")
            self.again = self.body[0]

    assert list(spectra(Net())) == ["body.0", "lstm.weight_hh_l0"]
    assert list(spectra(parametrizations.orthogonal(nn.Linear(4, 4)))) == ["weight"]
    assert list(spectra(LinearSVD(3, 3))) == [""]
    assert "\nmodel  3×3" in repr(spectra(LinearSVD(3, 3)))
    buffered = nn.Module()
    buffered.register_buffer("M", torch.eye(3))
    assert spectra(parametrizations.svd(buffered, "M"))["M"].norm == pytest.approx(1)


def test_nothing_is_decomposed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleList([case.make() for case in ALL.values()])
    for name in ("svd", "svdvals", "eigh", "eigvalsh", "qr", "cond", "matrix_norm"):
        monkeypatch.setattr(torch.linalg, name, lambda *_, **__: pytest.fail("a decomposition"))
    for layer in spectra(model).values():
        assert layer.norm > 0 and layer.cond >= 1


def test_the_table() -> None:
    model = nn.Sequential(LinearSVD(3, 12, spectrum=spectrum.positive()), nn.ReLU(), LinearSVD(12, 2))
    with torch.no_grad():
        model[0].sigma.copy_(model[0].spectrum.inverse(torch.tensor([2.0, 0.5, 1.0])))
        model[2].sigma.copy_(torch.tensor([-1234.5678, 0.0]))
    assert str(spectra(model)) == (
        "layer  weight  largest  median  smallest  condition\n"
        "0      12×3          2       1       0.5          4\n"
        "2      2×12       1235   617.3         0        inf"
    )
    assert str(spectra(nn.Linear(2, 2))) == "layer  weight  largest  median  smallest  condition"


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_the_median_of_an_even_number_is_the_mean_of_the_middle_two(k: int) -> None:
    layer, sigma = LinearSVD(k, k), torch.arange(k).square().float()
    with torch.no_grad():
        layer.sigma.copy_(sigma[torch.randperm(k)])
    shown = str(spectra(layer)).splitlines()[1].split()[3]
    assert float(shown) == statistics.median(sigma.tolist())


def test_singular_and_half_precision(dtype: torch.dtype) -> None:
    layer = LinearSVD(3, 3, dtype=dtype)
    assert spectra(layer)[""].cond == 1
    with torch.no_grad():
        layer.sigma[1] = 0
    assert spectra(layer)[""].cond == math.inf


class Writer:
    def __init__(self) -> None:
        self.written: dict[str, tuple[Any, int]] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.written[tag] = value, step

    add_histogram = add_scalar


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_log(tmp_path: Any) -> None:
    model = nn.Sequential(LinearSVD(4, 3), parametrizations.svd(nn.Linear(3, 3)).bfloat16())
    writer: Any = Writer()
    spectra(model).log(writer, 7)
    assert set(writer.written) == {
        f"{what}/{name}"
        for what in ("spectral_norm", "condition_number", "singular_values")
        for name in ("0", "1.weight")
    }
    assert writer.written["spectral_norm/0"] == (spectra(model)["0"].norm, 7)
    spectra(LinearSVD(2, 2)).log(writer, 0)
    assert "spectral_norm/model" in writer.written
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        for step in range(2):
            spectra(model).log(writer, step)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("spectral_norm/0")] == [0, 1]
    assert events.Scalars("condition_number/1.weight")[0].value == pytest.approx(spectra(model)["1.weight"].cond)
    assert events.Tags()["histograms"] == ["singular_values/0", "singular_values/1.weight"]


def test_plot(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    model = nn.Sequential(LinearSVD(4, 3), LinearSVD(1, 1), parametrizations.svd(nn.Conv2d(2, 2, 3)))
    ax = Figure().subplots()
    assert spectra(model).plot(ax) is ax
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["0, 3×4", "1, 1×1", "2.weight, 2×2×3×3"]
    assert list(ax.lines[0].get_ydata()) == pytest.approx([1, 1, 1])
    assert len(ax.lines[2].get_ydata()) == 2 * 2 * 3
    with torch.no_grad():
        model[0].sigma.fill_(5)
    spectra(model).plot(ax)  # over what is there: both can be seen
    low, high = ax.get_ylim()
    assert low <= 0 and high >= 5
    ax.figure.savefig(tmp_path / "spectra.png")
    assert spectra(nn.ReLU()).plot(Figure().subplots()).get_legend() is None


def test_plot_makes_a_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(pyplot, "switch_backend", pyplot.switch_backend)
    pyplot.switch_backend("agg")
    ax = spectra(LinearSVD(3, 3)).plot()
    assert len(ax.lines) == 1
    pyplot.close(ax.figure)


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"`plot` needs matplotlib; get it with pip install fasth\[reproduce\]"):
        spectra(LinearSVD(3, 3)).plot()


def test_errors_say_what_was_expected() -> None:
    with pytest.raises(TypeError, match=r"`model` should be a torch\.nn\.Module; got int"):
        spectra(3)  # type: ignore[arg-type]
    assert isinstance(spectra(nn.ReLU()), Spectra) and len(spectra(nn.ReLU())) == 0
