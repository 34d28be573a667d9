"""Convolutions that are orthogonal, or hold an SVD, as maps of images: through sequences of changes.

With circular padding that keeps every pixel each map multiplies lengths by its singular values, which the parameters
tell. The output and the gradients are compared with a copy of the layer in float64 on the PyTorch path.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

import fasth
from fasth import cached
from fasth.reflections import core
from fuzz.changes import change, nearby, trained
from fuzz.compare import check, norm, tolerance
from fuzz.draws import LOW, PRECISE, Draw
from fuzz.layers import SPECTRA

KINDS = {
    1: (fasth.Conv1dOrthogonal, fasth.ConvTranspose1dOrthogonal, fasth.Conv1dMapSVD),
    2: (fasth.Conv2dOrthogonal, fasth.ConvTranspose2dOrthogonal, fasth.Conv2dMapSVD),
}


def map_case(draw: Draw) -> None:
    dtype = draw.dtype(PRECISE)
    dims = draw.between(1, 2)
    kind: Any = draw.choice(KINDS[dims])
    layer, exact = _drawn(draw, kind, dims, dtype)
    with torch.no_grad():
        for p in trained(layer).values():  # signs on a diagonal, ±1 in a new layer, stay
            p.copy_(torch.where(p.abs() == 1, p, nearby(draw, p, 0.3)))
    smallest = 2 if layer.padding_mode == "circular" else max(layer.kernel_size)
    sizes = [draw.between(smallest, 5) if s == 1 else s * draw.between(2, 4) for s in layer.stride]
    shape = (draw.between(1, 3), layer.in_channels, *sizes)
    draw.note(layer, f"x {shape}")
    for again in range(draw.between(1, 3)):
        x = draw.rows(*shape, dtype=dtype)
        if again:
            layer = change(draw, layer, lambda layer, x=x: layer(x.to(layer.weight.dtype)))
            if layer.weight.dtype in LOW:
                layer = layer.to(dtype)
            x = x.to(layer.weight.dtype)
        if draw.chance(0.3):
            with cached():
                _compare(draw, layer, x, exact)
        _compare(draw, layer, x, exact)


def _drawn(draw: Draw, kind: Any, dims: int, dtype: torch.dtype) -> tuple[Any, bool]:
    """A layer, and whether all singular values of its map of images are parameters."""
    groups, transposed = draw.choice([1, 1, 2]), "Transpose" in kind.__name__
    channels = [groups * draw.between(2, 4) for _ in range(2)]
    taps, circular = draw.between(1, 4), draw.chance(0.7)
    options: dict[str, Any] = {"bias": draw.chance(0.6), "groups": groups, "dtype": dtype}
    if circular:
        options |= {"padding_mode": "circular", "padding": (taps - 1) // 2 if transposed else "same"}
    if "SVD" in kind.__name__:
        options["spectrum"] = draw.choice(SPECTRA)
    elif taps > 1 and draw.chance(0.4):  # patches that do not overlap
        options |= {"stride": taps, "padding": 0, "padding_mode": "zeros"}
        channels[0 if transposed else 1] *= draw.choice([1, taps**dims])
        return kind(*channels, taps, **options), True
    if transposed and circular and taps % 2 == 0:
        taps += 1
        options["padding"] = (taps - 1) // 2
    return kind(*channels, taps, **options), circular


def _compare(draw: Draw, layer: Any, x: Tensor, exact: bool) -> None:
    draw.actions["map of images"] += 1
    x = x.detach().requires_grad_()
    twin = copy.deepcopy(layer).double()
    out = layer(x)
    used, core._core = core._core, None
    try:
        x64 = x.detach().double().requires_grad_()
        expected = twin(x64)
        sigma = twin.singular_values.detach().abs() if hasattr(twin, "singular_values") else torch.ones(1)
        g = draw.numbers(*out.shape, dtype=out.dtype)
        wanted = {name: p for name, p in twin.named_parameters() if p.requires_grad}
        references = torch.autograd.grad(expected, [x64, *wanted.values()], g.double())
    finally:
        core._core = used
    largest = float(sigma.max())
    own = dict(layer.named_parameters())
    found = torch.autograd.grad(out, [x, *(own[name] for name in wanted)], g)
    # Each of the taps' rotations rounds, and an entry of a gradient is a sum over all pixels.
    relative = tolerance(x.dtype, (layer.in_channels + layer.out_channels) * layer.weight[0, 0].numel() + 10)
    bias = 0.0 if layer.bias is None else float(twin.bias.detach().abs().max())
    check("output", out, expected, largest * norm(x) + bias, relative)
    check("gradient of x", found[0], references[0], largest * norm(g), relative)
    for name, actual, reference in zip(wanted, found[1:], references[1:], strict=True):
        slope = max(1.0, _slope(twin)) if name == "sigma" else largest
        size = norm(g) * (g[0, 0].numel() * len(g)) ** 0.5 if name == "bias" else 2 * slope * norm(x) * norm(g)
        check(f"gradient of {name}", actual, reference, size, relative * g[0, 0].numel() ** 0.5)
    if layer.bias is not None:
        out = out - layer.bias.reshape(-1, *(1 for _ in layer.kernel_size))
    _check_lengths(layer, x, out, g, found[0], sigma, relative, exact, bias)


def _check_lengths(
    layer: Any,
    x: Tensor,
    out: Tensor,
    g: Tensor,
    back: Tensor,
    sigma: Tensor,
    relative: float,
    exact: bool,
    bias: float,
) -> None:
    """‖K x‖ ≤ max σ ‖x‖; if K keeps all of x, or Kᵀ all of g, also min σ ‖x‖ ≤ ‖K x‖."""
    largest, smallest = float(sigma.max()), float(sigma.min())
    for what, start, end in (("K x", x, out), ("Kᵀ g", g, back)):
        size = norm(start) + bias * end.numel() ** 0.5
        assert norm(end) <= largest * norm(start) + relative * largest * size + relative * bias * end.numel() ** 0.5, (
            f"‖{what}‖ = {norm(end):.6g}, more than {largest:.6g} · {norm(start):.6g}"
        )
        if exact and end.numel() >= start.numel() and not (what == "K x" and bias > norm(start)):
            assert norm(end) >= smallest * norm(start) - relative * largest * size, (
                f"‖{what}‖ = {norm(end):.6g}, less than {smallest:.6g} · {norm(start):.6g}"
            )


def _slope(twin: Any) -> float:
    """The largest change of a singular value for a change of the parameter sigma."""
    if twin.spectrum == fasth.spectrum.normalized():
        return (1 + twin.sigma.numel()) / max(float(twin.sigma.detach().abs().max()), 1e-30)
    return 1.0
