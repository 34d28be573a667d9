"""Linear layers and convolutions through sequences of changes, against the twin of their current parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from fasth import Conv1dSVD, Conv2dSVD, LinearOrthogonal, LinearSVD, LinearSymmetric, cached, spectrum
from fasth.nn.conv import _ConvSVD
from fasth.nn.held_weight import HeldWeight
from fasth.tools.twins import definition_linear, definition_weight
from fuzz.changes import change, nearby, trained
from fuzz.compare import check, norm, tolerance
from fuzz.draws import Draw

SPECTRA = [
    spectrum.free(),
    spectrum.positive(),
    spectrum.between(0.5, 2.0),
    spectrum.around(1.0, 0.1),
    spectrum.normalized(),
]
REFLECTORS = ("compact", "compact", "full")


def linear_case(draw: Draw) -> None:
    dtype = draw.dtype()
    kind = draw.choice([LinearSVD, LinearSVD, LinearSVD, LinearSymmetric, LinearOrthogonal])
    n, m = draw.size(30, rare=150), draw.size(30, rare=150)
    n = m if kind is LinearSymmetric or draw.chance(0.3) else n
    options: dict[str, Any] = {"bias": draw.chance(0.7), "reflectors": draw.choice(REFLECTORS), "dtype": dtype}
    options["init"] = draw.choice(["haar", "haar", "identity"])
    if kind is not LinearOrthogonal:
        options["spectrum"] = draw.choice(SPECTRA)
    if kind is LinearSVD and draw.chance(0.3):
        options["rank"] = draw.between(1, min(n, m))
    layer: Any = kind(*((m,) if kind is LinearSymmetric else (m, n)), **options)
    shape = (*draw.choice([(), (0,), (1,), (3,), (3,), (2, 3), (draw.size(),), (60,)]), m)
    draw.note(layer, f"x {shape}")
    through_changes(draw, moved(draw, layer), lambda draw, dtype: draw.rows(*shape, dtype=dtype))


def conv_case(draw: Draw) -> None:
    dtype = draw.dtype()
    one = draw.chance(0.4)
    dims = 1 if one else 2
    channels = draw.between(1, 5), draw.between(1, 6)
    geometry: dict[str, Any] = {
        "kernel_size": tuple(draw.between(1, 3) for _ in range(dims)),
        "stride": draw.choice([1, 1, 2]),
        "dilation": draw.choice([1, 1, 2]),
        "padding": draw.choice([0, 0, 1]),
        "padding_mode": draw.choice(["zeros", "zeros", "zeros", "circular", "replicate"]),
    }
    if geometry["stride"] == 1 and draw.chance(0.2):
        geometry["padding"] = "same"
    options: dict[str, Any] = {"bias": draw.chance(0.7), "reflectors": draw.choice(REFLECTORS), "dtype": dtype}
    options["spectrum"] = draw.choice(SPECTRA)
    layer: Any = (Conv1dSVD if one else Conv2dSVD)(*channels, **geometry, **options)
    if draw.chance(0.3):
        options["rank"] = draw.between(1, layer.rank)
        layer = (Conv1dSVD if one else Conv2dSVD)(*channels, **geometry, **options)
    batch = draw.choice([(), (0,), (1,), (3,)])
    shape = (*batch, channels[0], *(draw.between(5, 8) for _ in range(dims)))
    draw.note(layer, f"x {shape}")
    through_changes(draw, moved(draw, layer), lambda draw, dtype: draw.rows(*shape, dtype=dtype))


def moved(draw: Draw, layer: Any) -> Any:
    """Away from where it began, with singular values of some size."""
    with torch.no_grad():
        for name, p in trained(layer).items():
            p.copy_(nearby(draw, p, 0.3))
            if name.startswith("sigma") and draw.chance(0.3):
                p.mul_(draw.choice([0.125, 4.0]))
    return layer


def through_changes(draw: Draw, layer: Any, draw_input: Callable[[Draw, torch.dtype], Tensor]) -> None:
    """Compares, changes and compares again, one to four times."""
    for again in range(draw.weighted({1: 3, 2: 3, 3: 1, 4: 1})):
        x = draw_input(draw, next(layer.parameters()).dtype)
        if again:
            layer = change(draw, layer, lambda layer, x=x: layer(x.to(next(layer.parameters()).dtype)))
            x = x.to(next(layer.parameters()).dtype)
        compare_layer(draw, layer, x)


def compare_layer(draw: Draw, layer: Any, x: Tensor) -> None:
    """Compares one call of the layer, in a random mode, with a twin made of its current parameters."""
    mode = draw.weighted(
        {"train": 8, "no_grad": 3, "inference_mode": 1, "cached": 4, "functional_call": 2, "weight": 2}
    )
    draw.note(mode)
    draw.actions[mode] += 1
    if mode == "weight" and max(_matrix_shape(layer)) > 60:
        mode = "train"
    {"train": compare_training, "cached": _cached, "functional_call": _functional_call, "weight": _weight}.get(
        mode, lambda draw, layer, x: _without_gradients(layer, x, mode)
    )(draw, layer, x)


def compare_training(draw: Draw, layer: Any, x: Tensor, call: Callable[[Tensor], Tensor] | None = None) -> None:
    """The output, and the gradients of x and of all parameters that want one."""
    x = x.detach().requires_grad_(draw.chance(0.8))
    twin, x64 = twin_of(layer), x.detach().double().requires_grad_(x.requires_grad)
    out = (layer if call is None else call)(x)
    expected = output_of(layer, twin, x64)
    check_output(layer, twin, x, out, expected)
    if not out.requires_grad:
        return
    g = draw.arranged(draw.numbers(*out.shape, dtype=out.dtype))
    wanted = {name: t for name, t in (*layer.named_parameters(), ("x", x)) if t.requires_grad}
    found = torch.autograd.grad(out, list(wanted.values()), g, allow_unused=True)
    twins = [x64 if name == "x" else getattr(twin, name) for name in wanted]
    references = torch.autograd.grad(expected, twins, g.double(), allow_unused=True)
    check_gradients(
        layer, twin, x, g, dict(zip(wanted, found, strict=True)), dict(zip(wanted, references, strict=True))
    )


def _without_gradients(layer: Any, x: Tensor, mode: str) -> None:
    with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
        out = layer(x)
    twin = twin_of(layer)
    check_output(layer, twin, x, out, output_of(layer, twin, x.double()))


def _cached(draw: Draw, layer: Any, x: Tensor) -> None:
    """Calls with and without gradients in one context, of which the first forms the weight."""
    with cached():
        if draw.chance(0.5):
            _without_gradients(layer, x, "no_grad")
        compare_training(draw, layer, x)
        if draw.chance(0.3):
            _without_gradients(layer, x, "no_grad")


def _functional_call(draw: Draw, layer: Any, x: Tensor) -> None:
    """Calls the layer with other parameters by ``functional_call``; afterwards it has its own again."""
    other = {name: nearby(draw, p) for name, p in trained(layer).items()}
    out = functional_call(layer, other, (x,))
    own = {name: p.detach() for name, p in layer.named_parameters()}
    twin = twin_of(layer, own | other)
    check_output(layer, twin, x, out, output_of(layer, twin, x.double()))
    _without_gradients(layer, x, "no_grad")


def _weight(draw: Draw, layer: Any, x: Tensor) -> None:
    """The dense weight, and of a square layer the inverse and the determinant."""
    twin = twin_of(layer)
    reference = definition_weight(twin)
    W = layer.weight
    relative, size = _relative(layer, W.dtype), _largest(twin)
    check("weight", W.flatten(1), reference, size, relative)
    if not isinstance(layer, _ConvSVD) and layer.in_features == layer.out_features and hasattr(layer, "logabsdet"):
        _inverse(layer, twin, reference.detach(), x)


def _inverse(layer: Any, twin: Any, W: Tensor, y: Tensor) -> None:
    if y.dtype not in (torch.float32, torch.float64) or getattr(layer, "_is_thin", False):
        return
    singular = torch.linalg.svdvals(W)
    condition = float(singular.max() / singular.min().clamp(min=1e-300))
    relative = _relative(layer, y.dtype) * condition
    if relative > 0.1:
        return
    d, smallest = len(W), float(singular.min())
    bias = 0 if layer.bias is None else twin.bias.detach()
    x = torch.linalg.solve(W, (y.double() - bias).reshape(-1, d).mT).mT.reshape(y.shape)
    largest = norm(y) + (0 if layer.bias is None else norm(twin.bias))
    check("inverse", layer.inverse(y), x, largest / smallest, relative)
    check(
        "logabsdet",
        layer.logabsdet(),
        torch.linalg.slogdet(W).logabsdet,
        d * (1 + float(singular.log().abs().max())),
        relative,
    )


# The twin.


class Twin(SimpleNamespace):
    """A layer's parameters in float64, by their names."""

    held: HeldWeight

    def held_weights(self) -> Iterator[HeldWeight]:
        """The one that the definition is computed from."""
        yield self.held


def twin_of(layer: Any, tensors: dict[str, Tensor] | None = None) -> Twin:
    """Makes the twin from the layer's parameters in float64 and its options, and nothing else."""
    tensors = dict(layer.named_parameters()) if tensors is None else tensors
    copies = {name: t.detach().double().requires_grad_(t.requires_grad) for name, t in tensors.items()}
    options = {"form": layer.form, "spectrum": getattr(layer, "spectrum", None)}
    if isinstance(layer, LinearSymmetric):
        U, V = copies["reflectors"], copies["reflectors"]
    elif "reflectors" in copies:
        U, V = copies["reflectors"], None
    else:
        U, V = (copies[name] for name in (("U", "V") if layer.form == "full" else ("reflectors_U", "reflectors_V")))
    factors = {"U": U, "sigma": copies.get("sigma"), "V": V, "signs": copies.get("signs")}
    held = HeldWeight("", _matrix_shape(layer), **factors, **options)
    return Twin(**{"bias": None, "held": held} | options | copies)


def output_of(layer: Any, twin: Any, x: Tensor) -> Tensor:
    """The layer's output in float64, by the definition."""
    if not isinstance(layer, _ConvSVD):
        out = definition_linear(twin, x.reshape(-1, x.shape[-1]))
        return out.reshape(*x.shape[:-1], out.shape[-1])
    W = definition_weight(twin).reshape(layer.out_channels, layer.in_channels, *layer.kernel_size)
    padding: Any = layer.padding
    if layer.padding_mode != "zeros":
        x, padding = F.pad(x, layer._padding_on_all_sides(), mode=layer.padding_mode), 0
    convolve: Any = F.conv1d if isinstance(layer, Conv1dSVD) else F.conv2d
    return convolve(x, W, twin.bias, layer.stride, padding, layer.dilation)


# Rounding errors that are allowed.


def _matrix_shape(layer: Any) -> tuple[int, int]:
    return layer._matrix_shape if hasattr(layer, "_matrix_shape") else (layer.out_features, layer.in_features)


def _relative(layer: Any, dtype: torch.dtype, stored: float = 1.0) -> float:
    return tolerance(dtype, sum(_matrix_shape(layer)) + 10, stored)


def _largest(twin: Any) -> float:
    """max |σ|."""
    return float(twin.spectrum(twin.sigma.detach()).abs().max()) if hasattr(twin, "sigma") else 1.0


def _patch(layer: Any) -> int:
    """The largest number of outputs that depend on one entry of the input."""
    return max(torch.Size(layer.kernel_size).numel(), 1) * 3 if isinstance(layer, _ConvSVD) else 1


def check_output(layer: Any, twin: Any, x: Tensor, out: Tensor, expected: Tensor) -> None:
    assert out.dtype == x.dtype, f"output: {out.dtype}, not {x.dtype}"
    size = _largest(twin) * norm(x) + (0 if layer.bias is None else float(twin.bias.detach().abs().max()))
    check("output", out, expected, size, _relative(layer, x.dtype, 2))


def check_gradients(
    layer: Any, twin: Any, x: Tensor, g: Tensor, found: dict[str, Any], references: dict[str, Any]
) -> None:
    """Each by its natural size: max|σ|·‖g‖ for x, ‖x‖·‖g‖ for σ, max|σ|·‖x‖·‖g‖ over its length for a reflector."""
    X, G, largest = norm(x), norm(g), _largest(twin)
    rows = g.numel() // max(_matrix_shape(layer)[0], 1)  # that gradients of parameters are sums over
    relative = tolerance(x.dtype, sum(_matrix_shape(layer)) + rows + 10, 3)
    for name, reference in references.items():
        gradient = found[name]
        like = x if name == "x" else getattr(twin, name)
        reference = torch.zeros(like.shape, dtype=torch.float64) if reference is None else reference
        gradient = torch.zeros_like(reference) if gradient is None else gradient
        if name == "x":
            size: Any = G * largest
        elif name == "bias":
            size = G * max(g.numel() / max(len(twin.bias), 1), 1) ** 0.5
        elif name == "sigma":
            size = X * G * slope_of(twin)
        else:
            gradient, reference = without_guard(gradient, reference, like)
            size = X * G * largest * 2 / _shortest(twin, like)
        check(f"gradient of {name}", gradient, reference, size * _patch(layer), relative)


def slope_of(twin: Any) -> float:
    """The largest slope of σ in the parameter sigma; for ``normalized``, with the length of its sum."""
    if twin.spectrum == spectrum.normalized():
        raw = twin.sigma.detach().abs().max()
        return (1 + len(twin.sigma)) / max(float(raw), 1e-30)
    return 1.0


def _shortest(twin: Any, like: Tensor) -> float:
    """The length of the shortest reflector. Compact ones have a 1."""
    if twin.form == "compact" or not like.numel():
        return 1.0
    return float(torch.linalg.vector_norm(like.detach(), dim=-1).clamp(min=1e-300).min())


def without_guard(gradient: Tensor, reference: Tensor, parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Drops the diagonal entries close to zero, whose gradient is ``sign_guard``'s and no derivative."""
    p = parameter.detach()
    if p.ndim < 2:
        return gradient, reference
    close = torch.zeros(p.shape, dtype=torch.bool)
    close.diagonal(dim1=-2, dim2=-1).copy_(p.diagonal(dim1=-2, dim2=-1).abs() < 0.25)
    if not close.any():
        return gradient, reference
    return gradient.detach().masked_fill(close, 0), reference.masked_fill(close, 0)
