"""What the layers of a model know about themselves while it trains: singular values, norms, condition numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from fasth.nn import LinearOrthogonal, LinearSymmetric
from fasth.nn.factors import SVDFactors
from fasth.nn.recurrent import Recurrent
from fasth.parametrizations import OrthogonalWeight, SVDWeight

__all__ = ["LayerSpectrum", "Spectra", "spectra"]


def spectra(model: nn.Module) -> Spectra:
    """The singular values of every weight of ``model`` that is held as its factors, now. Nothing is decomposed.

    That is, of the layers of fasth and of the tensors under ``fasth.parametrizations``. O(d log d) for each, to sort
    them. A layer of lower rank has its r values here, without the zeros.

    Example:
        >>> print(spectra(nn.Sequential(fasth.LinearSVD(64, 64), nn.ReLU(), fasth.LinearOrthogonal(64, 10))))
        layer  weight  largest  median  smallest  condition
        0      64×64         1       1         1          1
        2      10×64         1       1         1          1
    """
    with torch.no_grad():
        return Spectra(list(_layers(model)))


class LayerSpectrum(NamedTuple):
    """The singular values of one weight."""

    name: str  # as in ``model.named_modules()``, or of a tensor of one of them
    shape: tuple[int, ...]  # (n, m), or (*b, n, m)
    singular_values: Tensor  # (k,), or (*b, k), descending: all min(n, m), or those that a layer of lower rank has

    @property
    def norm(self) -> float:
        """The spectral norm ‖W‖₂, the largest singular value: of a batch, that of all."""
        return self._largest().max().item()

    @property
    def cond(self) -> float:
        """The largest over the smallest singular value, infinite if that is zero: of a batch, the largest of all."""
        largest, smallest = self._largest(), self.singular_values[..., -1].double()
        return torch.where(smallest == 0, math.inf, largest / torch.where(smallest == 0, 1, smallest)).max().item()

    def _largest(self) -> Tensor:
        return self.singular_values[..., 0].double()


class Spectra(Mapping[str, LayerSpectrum]):
    """The spectra of a model's weights by name. ``print`` shows them as a table."""

    def __init__(self, layers: list[LayerSpectrum]) -> None:
        self._layers = {layer.name: layer for layer in layers}

    def __getitem__(self, name: str) -> LayerSpectrum:
        return self._layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        rows: list[tuple[str, ...]] = [("layer", "weight", "largest", "median", "smallest", "condition")]
        for name, layer in self.items():
            values = layer.singular_values.double()
            numbers = (layer.norm, _median(values), values.min().item(), layer.cond)
            rows.append((name or "model", _times(layer.shape), *(f"{number:.4g}" for number in numbers)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        formats = [f"{{:{'<' if i < 2 else '>'}{width}}}" for i, width in enumerate(widths)]
        return "\n".join("  ".join(formats).format(*row) for row in rows)

    def log(self, writer: Any, step: int | None = None) -> None:
        """Norms, condition numbers and histograms of the singular values to a ``SummaryWriter`` of TensorBoard."""
        for name, layer in self.items():
            name = name or "model"
            writer.add_scalar(f"spectral_norm/{name}", layer.norm, step)
            writer.add_scalar(f"condition_number/{name}", layer.cond, step)
            writer.add_histogram(f"singular_values/{name}", layer.singular_values.float().cpu(), step)

    def plot(self, ax: Any = None) -> Any:
        """One curve for each weight, its singular values in descending order. Returns the matplotlib Axes.

        Args:
            ax: where to draw; by default in a new figure, ``ax.figure``.
        """
        if ax is None:
            ax = new_axes()
        for name, layer in self.items():
            values = layer.singular_values.flatten().sort(descending=True).values.double().cpu()
            place = torch.linspace(0, 1, len(values)) if len(values) > 1 else torch.zeros(1)
            label = f"{name or 'model'}, {_times(layer.shape)}"
            ax.plot(place.tolist(), values.tolist(), label=label, marker="." * (len(values) < 2))
        ax.update_datalim([(0, 0)])  # show zero; limits that were set would cut off what is drawn there later
        ax.autoscale_view()
        ax.set(xlabel="from the largest to the smallest", ylabel="singular value")
        if self:
            ax.legend()
        return ax


def _median(values: Tensor) -> float:
    """The median; of an even number of values the mean of the middle two, where ``Tensor.median`` takes the lower."""
    ordered = values.flatten().sort().values
    return ((ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2).item()


def _times(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def new_axes() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("`plot` needs matplotlib; get it with pip install fasth[reproduce]") from error
    return pyplot.subplots(layout="constrained")[1]


class Weight(NamedTuple):
    """A weight that is held as its factors, as it is now."""

    name: str  # as in ``LayerSpectrum``
    shape: tuple[int, ...]
    singular_values: Tensor  # (k,), or (*b, k), of any sign and order; differentiable
    trained: bool  # whether they are: those of an orthogonal weight are constants
    factors: tuple[Tensor, ...]  # the tensors that it is made of, without the signs: shared weights share all of them


def weights_of(model: nn.Module) -> Iterator[Weight]:
    """What ``model`` holds as its factors. A module that it holds twice comes once."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` should be a torch.nn.Module; got {type(model).__name__}")
    for path, module in model.named_modules():
        for weight in _weights_of(module):
            # A parametrized tensor is known by the name that it has in its module.
            parts = [part for part in (*path.split("."), weight.name) if part not in ("", "parametrizations")]
            yield weight._replace(name=".".join(parts), singular_values=_whole(weight.singular_values))


def _layers(model: nn.Module) -> Iterator[LayerSpectrum]:
    for name, shape, sigma, *_ in weights_of(model):
        yield LayerSpectrum(name, shape, sigma.detach().abs().sort(-1, descending=True).values)


def _whole(sigma: Any) -> Tensor:
    """Gathered, if it is sharded over processes."""
    return sigma.full_tensor() if hasattr(sigma, "full_tensor") else sigma


def _weights_of(module: Any) -> Iterator[Weight]:
    """Those of one module, by the names that they have in it.

    sigma is gathered before it is mapped: torch 2.10 has no softplus of a sharded tensor.
    """
    if isinstance(module, Recurrent):
        for name, factor_names in module._dense_names().items():
            sigma = module._sigma(module._place(name))
            shape = (*sigma.shape[:-1], *module._matrix_shape)
            yield Weight(name, shape, sigma, module.spectrum is not None, _factors(module, factor_names))
    elif isinstance(module, LinearOrthogonal):
        shape, ones = (module.out_features, module.in_features), module.reflectors.new_ones(len(module.reflectors))
        yield Weight("", shape, ones, False, _factors(module, module._factor_names))
    elif isinstance(module, (LinearSymmetric, SVDFactors)):
        shape = module._matrix_shape if isinstance(module, SVDFactors) else (module.out_features, module.in_features)
        yield Weight("", shape, module.spectrum(_whole(module.sigma)), True, _factors(module, module._factor_names))
    elif isinstance(module, ParametrizationList) and len(module) == 1:  # what others would do to it is not known
        weight, originals = (
            module[0],
            dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]),
        )
        if isinstance(weight, OrthogonalWeight):
            *batch, n, m = weight.shape
            ones = originals["original"].new_ones(*batch, min(n, m))
            yield Weight("", tuple(weight.shape), ones, False, (originals["original"],))
        elif isinstance(weight, SVDWeight):
            reflectors, raw = originals["original0"], originals["original1"]
            yield Weight("", tuple(weight.shape), weight.spectrum(_whole(raw)), True, (reflectors, raw))


def _factors(module: nn.Module, names: Sequence[str]) -> tuple[Tensor, ...]:
    return tuple(getattr(module, name) for name in names if not name.startswith("signs"))
