"""The singular values of a model's weights: norms, condition numbers, and the penalty on their sum."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fasth.nn.held_weight import named_held_weights
from fasth.operators.matrix import computing_dtype

__all__ = ["LayerSpectrum", "Spectra", "nuclear_norm", "spectra"]


def spectra(model: nn.Module) -> Spectra:
    """Returns the current singular values of every weight of ``model`` that is held as an SVD. Nothing is decomposed.

    Included are the layers of fasth and the tensors under ``fasth.parametrizations``. A layer of lower rank has its r
    values here, without the zeros. O(d log d) for each weight, to sort them.

    Example:
        >>> print(spectra(nn.Sequential(fasth.LinearSVD(64, 64), nn.ReLU(), fasth.LinearOrthogonal(64, 10))))
        layer  weight  largest  median  smallest  condition
        0      64×64         1       1         1          1
        2      10×64         1       1         1          1
    """
    with torch.no_grad():
        return Spectra(
            [
                LayerSpectrum(name, held.shape, held.singular_values.detach().abs().sort(-1, descending=True).values)
                for name, held in named_held_weights(model)
                if not held.is_changed
            ]
        )


def nuclear_norm(model: nn.Module) -> Tensor:
    """Σ|σ|, the sum of ‖W‖_* over the weights W = U diag(σ) Vᵀ of ``model``: a scalar, differentiable.  O(Σ min(n, m)).

    The nuclear norm is to the rank what Σ|w| is to the number of nonzero weights: as a penalty it drives those singular
    values to zero that hardly lower the loss, and ``compress`` then removes them. Nothing is decomposed.

    The sum is over ``LinearSVD``, ``LinearSymmetric``, the convolutions, the recurrent layers and the tensors under
    ``fasth.parametrizations.svd``; a shared weight counts once. Orthogonal weights, whose norm is constant, and dense
    weights are excluded. The sum is in float32 at least.

    Example:
        >>> model, x, y = fasth.LinearSVD(64, 10), torch.randn(32, 64), torch.randint(10, (32,))
        >>> loss = F.cross_entropy(model(x), y) + 1e-3 * nuclear_norm(model)
    """
    held = [weight for _, weight in named_held_weights(model) if weight.trained and not weight.is_changed]
    weights = {tuple(map(id, weight.factors)): weight for weight in held}
    if not weights:
        raise ValueError(
            "`model` should hold a weight as its SVD, as LinearSVD does and to_svd makes them; "
            f"got a {type(model).__name__} without one"
        )
    values = [weight.singular_values for weight in weights.values()]
    norms = [sigma.abs().sum(dtype=computing_dtype(sigma.dtype)) for sigma in values]
    return sum((norm.to(norms[0].device) for norm in norms[1:]), norms[0])


class LayerSpectrum(NamedTuple):
    """The singular values of one weight."""

    name: str  # as in ``model.named_modules()``, or of a tensor of one of them
    shape: tuple[int, ...]  # (n, m), or (*b, n, m)
    singular_values: Tensor  # (k,), or (*b, k), descending: all min(n, m), or those that a layer of lower rank has

    @property
    def norm(self) -> float:
        """The spectral norm ‖W‖₂, the largest singular value; for a batch the largest of all."""
        return self._largest().max().item()

    @property
    def cond(self) -> float:
        """The largest over the smallest singular value, or infinity if that is zero; for a batch the largest of all."""
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
        """Writes norms, condition numbers and histograms of the singular values to TensorBoard's ``SummaryWriter``."""
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
    """The median: for an even number of values the mean of the middle two, where ``Tensor.median`` takes the lower."""
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
