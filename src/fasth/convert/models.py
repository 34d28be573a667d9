"""Converts whole models: to SVDs, back to dense layers, or to lower rank. A report has the reason for every layer that
is not converted."""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from fasth import _private
from fasth.convert import lowrank
from fasth.convert.lowrank import LowRank, matrix_shape, truncated
from fasth.convert.parametrized import PARAMETRIZED, is_parametrized_alone, without_parametrizations
from fasth.convert.replace import (
    EXCLUDED,
    FILTERED,
    Conversion,
    Filter,
    Replacement,
    is_weight_parameter,
    parameters_of,
    weight_parameters,
)
from fasth.nn import LinearOrthogonal
from fasth.nn.factored import Factored, one_of
from fasth.nn.factors import REFLECTORS
from fasth.nn.held_weight import held_weights
from fasth.nn.recurrent import Recurrent
from fasth.nn.registry import converter_for, is_registered, path_of
from fasth.reflections.plan import DTYPES
from fasth.spectrum import Spectrum, free

__all__ = ["Conversion", "LowRank", "compress", "to_dense", "to_svd"]

logger = logging.getLogger("fasth")

HOOKS_LOST = "its hooks would be lost"


def to_svd(
    model: nn.Module,
    *,
    filter: Filter | None = None,
    exclude: str | Iterable[str] = (),
    inplace: bool = False,
    spectrum: Spectrum | None = None,
    reflectors: str = "compact",
    rank: int | None = None,
    report: list[Conversion] | None = None,
) -> nn.Module:
    """The model with the weights of its Linear, Conv and recurrent layers held as W = U Σ Vᵀ; the same to rounding.

    Layers of exactly the classes Linear, Conv1d, Conv2d, RNN, LSTM and GRU are converted, and of the last three the
    hidden-to-hidden weights. A subclass may compute something else, or be read by its parent. Device, dtype,
    ``requires_grad`` and the training mode stay as they are, and biases stay the same parameters. Modules that share a
    weight are all converted and share its factors, or none of them is. Also excluded are layers with hooks, which would
    be lost, layers with tensors other than their weight and bias, and the layers below a wrapper that presents their
    weight as its own and may write into it, as PEFT's adapters do.

    Args:
        model: any module, also a single layer. An error is raised if no layer can be converted.
        filter: ``filter(name, module)`` returns whether to convert a layer that can be converted.
        exclude: a name, or several names, of modules that are not converted, with all modules below them. A name is the
            end of a path of ``model.named_modules()``, in whole components: "head" matches "decoder.head" too, but not
            "myhead". A name that matches no module is an error.
        inplace: change ``model`` instead of a copy. If it is a layer itself, only the returned layer is converted.
        spectrum: the map to the singular values, by default ``spectrum.free()``. Other spectra replace singular values
            outside their range by the nearest inside, which changes the model's output.
        reflectors: "compact", or "full" for the paper's square U and V. Recurrent layers are always compact.
        rank: the largest number of singular values of each Linear and Conv layer; by default all. With fewer the weight
            becomes the nearest of that rank, and the layer has r·(n + m) parameters for a weight of shape (n, m).
            Recurrent layers keep their rank, and layers that are SVDs already are not changed: see ``compress``.
        report: a list, to which one ``Conversion`` is added for each module that holds a matrix. Without it, layers
            that multiply by a weight and were not converted are logged, as a warning of the logger "fasth".

    Returns:
        The converted model. If an error is raised, ``model`` is unchanged. Costs an SVD of each weight.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        >>> to_svd(model, filter=lambda name, module: name == "0")[0].svd
        SVD(64×64, compact, float32)
    """
    one_of("reflectors", reflectors, REFLECTORS)
    if spectrum is not None and not isinstance(spectrum, Spectrum):
        raise TypeError(f"`spectrum` should be one of fasth.spectrum; got {spectrum!r}")
    _check_rank(rank)
    spectrum = free() if spectrum is None else spectrum

    def convert(name: str, layer: nn.Module) -> tuple[nn.Module | None, str]:
        _check_finite(name, layer)
        converter, reason = converter_for(layer)
        return (None, reason) if converter is None else converter.to_svd(layer, spectrum, reflectors, rank)

    replacement = Replacement(model, _why_not_to_svd, filter, inplace, exclude, _is_wrapper)
    if not replacement.possible and not any(True for module in replacement.names for _ in held_weights(module)):
        raise ValueError(
            "`model` should have a Linear, Conv1d, Conv2d, RNN, LSTM or GRU layer that can be converted, or one of "
            f"{', '.join(PARAMETRIZED)}; got {type(model).__name__}{_listed(replacement.left_alone())}"
        )
    return _finish(replacement, replacement.carry_out(convert), "to_svd", report)


def to_dense(
    model: nn.Module,
    *,
    filter: Filter | None = None,
    exclude: str | Iterable[str] = (),
    inplace: bool = False,
    report: list[Conversion] | None = None,
) -> nn.Module:
    """Replaces the layers of fasth in the model by plain Linear, Conv and recurrent layers of ``torch.nn``.

    Arguments and guarantees are those of ``to_svd``. A model without layers of fasth is returned unchanged.
    """

    def convert(name: str, layer: Any) -> tuple[nn.Module, str]:
        return layer._to_dense() if isinstance(layer, Factored) else without_parametrizations(layer), ""

    replacement = Replacement(model, _why_not_to_dense, filter, inplace, exclude)
    return _finish(replacement, replacement.carry_out(convert), "to_dense", report)


def compress(
    model: nn.Module,
    *,
    rank: int | None = None,
    energy: float | None = None,
    trainable: bool = False,
    filter: Filter | None = None,
    exclude: str | Iterable[str] = (),
    inplace: bool = False,
    report: list[Conversion] | None = None,
) -> nn.Module:
    """Truncates each Linear and Conv weight of the model to its largest singular values: the nearest of lower rank.

    A layer with a weight of shape (n, m) that keeps r singular values becomes two thin layers, ``LowRank``, with
    r·(n + m) parameters, if these are fewer than n·m, and a dense layer otherwise, both of ``torch.nn``. A dense layer
    costs an SVD; a layer of fasth is not decomposed, as its singular values are known. RNNs are not truncated, as their
    kernels take no thin weights, nor is ``LinearOrthogonal``, whose singular values are equal.

    Args:
        rank: the largest number of singular values that a layer keeps, at most the rank of some layer.
        energy: alternatively, each layer keeps as few as have this fraction, in (0, 1], of ‖W‖² = Σσ².
        trainable: truncate to SVDs, for further training: a ``LinearSVD``, ``Conv1dSVD`` or ``Conv2dSVD`` with
            ``rank`` = r, which has r·(n + m) parameters and the singular values. A layer of fasth keeps its spectrum
            and its form of reflectors, a ``LinearSymmetric`` becomes a ``LinearSVD``, and a dense layer gets
            ``spectrum.free()``.

    The other arguments, and the guarantees, are those of ``to_svd``.
    """
    if (rank is None) == (energy is None):
        raise ValueError(f"exactly one of `rank` and `energy` should be given; got {rank} and {energy}")
    _check_rank(rank)
    if energy is not None and not 0 < energy <= 1:
        raise ValueError(f"`energy` should be above 0 and at most 1; got {energy!r}")

    def convert(name: str, layer: nn.Module) -> tuple[nn.Module | None, str]:
        _check_finite(name, layer)
        return truncated(layer, rank, energy, trainable)

    replacement = Replacement(model, _why_not_to_compress, filter, inplace, exclude, _is_wrapper)
    if not replacement.possible:
        raise ValueError(
            "`model` should have a Linear or Conv layer that can be truncated; "
            f"got {type(model).__name__}{_listed(replacement.left_alone())}"
        )
    largest = max(min(matrix_shape(layer)) for layer in replacement.possible)
    if rank is not None and rank > largest:
        raise ValueError(f"`rank` should be at most {largest}, the largest of a layer of `model`; got {rank}")
    return _finish(replacement, replacement.carry_out(convert), "compress", report)


def _finish(
    replacement: Replacement, conversions: list[Conversion], name: str, report: list[Conversion] | None
) -> nn.Module:
    if report is not None:
        report.extend(conversions)
        return replacement.model
    left = [
        conversion
        for module, conversion in zip(replacement.reasons, conversions, strict=True)
        if conversion.after is None and conversion.reason not in (FILTERED, EXCLUDED) and _is_expected(module)
    ]
    if left:
        logger.warning("%s left alone%s", name, _listed(left))
    return replacement.model


def _is_expected(module: nn.Module) -> bool:
    """True for modules that multiply by a weight, so that one would expect a conversion. Embeddings are excluded."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or "Norm" in type(module).__name__:
        return False
    matrices = [name for name, parameter in parameters_of(module) if is_lazy(parameter) or parameter.ndim >= 2]
    parametrized = list(module.parametrizations) if is_parametrized(module) else []  # type: ignore[arg-type]
    return (
        isinstance(module, Factored)
        or _is_packed(module)
        or any("weight" in name for name in (*matrices, *parametrized))
    )


def _is_wrapper(module: nn.Module) -> bool:
    """True for a module whose class presents the weight of a layer below it as its own, by a property.

    PEFT's adapters are such modules: their ``weight`` is their base layer's, and merging an adapter writes into it. A
    layer of fasth and a ``LowRank`` compute their weight, and write into no layer below them.
    """
    presents = isinstance(inspect.getattr_static(type(module), "weight", None), property)
    return presents and not is_parametrized(module) and not isinstance(module, (Factored, LowRank))


def _is_packed(module: nn.Module) -> bool:
    """True for a quantized layer, whose weight is a method."""
    return callable(getattr(type(module), "weight", None))


def _listed(conversions: Iterable[Conversion]) -> str:
    """Lists one line for each kind of module and reason, since a model may have a hundred modules of a kind."""
    names = defaultdict(list)
    for name, before, _, reason in conversions:
        names[before, reason].append(name or "the model itself")
    lines = (
        f"\n  {first}{f' and {len(more)} more' if more else ''} ({before}): {reason}"
        for (before, reason), (first, *more) in names.items()
    )
    return "".join(lines)


def _why_not_to_svd(module: nn.Module) -> str | None:
    if isinstance(module, Factored) or is_parametrized_alone(module) or not _holds_matrix(module):
        return None
    if reason := _why_not_parameters(module):
        return reason
    if not is_registered(type(module)):
        for kind in type(module).__mro__[1:]:
            if is_registered(kind):
                return f"a subclass of {kind.__name__} may compute something else"
        return f"its class, {path_of(type(module))}, is none that to_svd converts"
    converter, reason = converter_for(module)
    return reason if converter is None else _why_not(module, converter.weights(module))


def _why_not_to_dense(module: nn.Module) -> str | None:
    if is_parametrized_alone(module):
        return _why_not_tensors([*module.parameters()])
    if not isinstance(module, Factored):
        return None
    return module._why_not_to_dense() or _why_not_parameters(module) or _why_not_fasth(module)


def _why_not_to_compress(module: nn.Module) -> str | None:
    if not _holds_matrix(module):
        return None
    if isinstance(module, (nn.RNNBase, Recurrent)):
        return "an RNN's kernel takes no thin weights"
    if isinstance(module, LinearOrthogonal):
        return "its singular values are all 1"
    if reason := _why_not_parameters(module):
        return reason
    if isinstance(module, lowrank.FACTORED):
        return _why_not_fasth(module)
    if type(module) not in lowrank.DENSE:
        for kind in lowrank.DENSE:
            if isinstance(module, kind):
                return f"a subclass of {kind.__name__} may compute something else"
        return f"its class, {path_of(type(module))}, is none that compress truncates"
    if getattr(module, "groups", 1) != 1:
        return "with groups its weight is several matrices"
    return _why_not(module, ("weight",))


def _why_not_fasth(module: Any) -> str:
    """The reason why a layer of fasth cannot be replaced, or "". Subclasses may compute something else."""
    if type(module).__module__.partition(".")[0] != "fasth":
        return f"a subclass of {type(module).__mro__[1].__name__} may compute something else"
    return _why_not(module, module._factor_names)


def _why_not_parameters(module: nn.Module) -> str:
    """The reason why the parameters of a module prevent its replacement, or ""."""
    if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
        return "its size is not known before a first batch"
    return "it is parametrized" if is_parametrized(module) else ""


def _why_not(module: nn.Module, weights: tuple[str, ...]) -> str:
    """The reason why a module of a known class cannot be replaced, or "" if it has nothing besides its class."""
    if _private.number_of_hooks(module) > isinstance(module, Factored):  # a layer of fasth has one hook of its own
        return HOOKS_LOST
    if "forward" in vars(module):
        return "its forward method is not that of its class"
    held = [name for name, _ in (*parameters_of(module), *module.named_buffers(recurse=False)) if name != "_layout"]
    held += [name for name, _ in module.named_children() if not isinstance(module, nn.MultiheadAttention)]
    others = [name for name in held if name not in weights]
    if any(name not in held for name in weights) or any(map(is_weight_parameter, others)):
        return f"it holds {', '.join(held)}, not what its class holds"
    return _why_not_tensors([*module.parameters(recurse=False)])


def _why_not_tensors(parameters: list[nn.Parameter]) -> str:
    for parameter in parameters:
        if type(parameter) is not nn.Parameter:
            return f"it holds a {type(parameter).__name__}"
        if parameter.dtype not in DTYPES:
            return f"it is {parameter.dtype}"
        if parameter.is_meta:
            return "it has no values, being on the meta device"
        if parameter.numel() == 0:
            return "it has no elements"
    return ""


def _holds_matrix(module: nn.Module) -> bool:
    return (
        is_parametrized(module)
        or _is_packed(module)
        or any(is_lazy(parameter) or parameter.ndim >= 2 for parameter in module.parameters(recurse=False))
    )


def _check_rank(rank: int | None) -> None:
    if rank is not None and (not isinstance(rank, int) or isinstance(rank, bool) or rank < 1):
        raise ValueError(f"`rank` should be an int of at least 1; got {rank!r}")


def _check_finite(name: str, layer: nn.Module) -> None:
    if not all(p.isfinite().all() for p in weight_parameters(layer)):
        raise ValueError(f"`model` should have finite weights; got nan or infinity in {name or 'it'}")
