"""``fasth.parametrizations`` on layers of torch.nn, through sequences of changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fasth import parametrizations, spectrum
from fasth.tools.twins import definition_weight
from fuzz.changes import change, nearby, trained
from fuzz.compare import check, norm, tolerance
from fuzz.draws import PRECISE, Draw
from fuzz.layers import SPECTRA, slope_of, without_guard


def parametrized_case(draw: Draw) -> None:
    dtype = draw.dtype(PRECISE)
    n, m = draw.size(20), draw.size(20)
    conv, orthogonal = draw.chance(0.2), draw.chance(0.5)
    if conv:  # whose kernel is a batch of matrices of 3×2 or 2×3
        kernel = draw.choice([(3, 2), (2, 3), (1, 2)])
        module: Any = nn.Conv2d(draw.between(1, 3), draw.between(1, 3), kernel, bias=False, dtype=dtype)
        shape: tuple[int, ...] = (2, module.in_channels, 5, 5)
    else:
        module, shape = nn.Linear(m, n, bias=False, dtype=dtype), (draw.size(8), m)
    if orthogonal:
        parametrizations.orthogonal(module)
    else:
        parametrizations.svd(module, spectrum=draw.choice(SPECTRA))
    draw.note("orthogonal" if orthogonal else "svd", module)
    with torch.no_grad():
        for p in trained(module).values():
            p.copy_(nearby(draw, p, 0.3))
    for again in range(draw.between(1, 3)):
        x = draw.rows(*shape, dtype=dtype)
        if again:
            module = change(draw, module, lambda module, x=x: module(x))
        if draw.chance(0.3):
            with parametrize.cached():
                _compare(draw, module, x, orthogonal)
        _compare(draw, module, x, orthogonal)


def _compare(draw: Draw, module: Any, x: Tensor, orthogonal: bool) -> None:
    """The module's output, and the gradients of its parameters, for the weight that the definition makes of them."""
    draw.actions["parametrized"] += 1
    params = dict(module.named_parameters())
    copies = {name: p.detach().double().requires_grad_(p.requires_grad) for name, p in params.items()}
    W, twins = _weight(module, copies, orthogonal)
    size = 1.0 if orthogonal else max(float(t.spectrum(t.sigma.detach()).abs().max()) for t in twins)
    call = nn.functional.conv2d if isinstance(module, nn.Conv2d) else nn.functional.linear
    out, expected = module(x), call(x.double(), W)
    patch = module.weight.shape[1:].numel() if isinstance(module, nn.Conv2d) else 1
    relative = tolerance(x.dtype, sum(module.weight.shape[-2:]) + patch + out[..., 0].numel() + 10)
    check("output", out, expected, size * norm(x), relative)
    wanted = [name for name, p in params.items() if p.requires_grad]
    if not wanted:
        return
    g = draw.numbers(*out.shape, dtype=out.dtype)
    found = torch.autograd.grad(out, [params[name] for name in wanted], g)
    references = torch.autograd.grad(expected, [copies[name] for name in wanted], g.double())
    for name, gradient, reference in zip(wanted, found, references, strict=True):
        slope = 1.0
        if name.endswith("original1"):
            slope = max(1.0, *(slope_of(t) for t in twins))
        else:
            gradient, reference = without_guard(gradient, reference, copies[name])
        check(f"gradient of {name}", gradient, reference, 2 * slope * max(size, 1) * norm(x) * norm(g), relative)


def _weight(module: Any, copies: dict[str, Tensor], orthogonal: bool) -> tuple[Tensor, list[Any]]:
    """W: (*b, n, m) one matrix of the batch at a time."""
    first = copies["parametrizations.weight.original" + ("" if orthogonal else "0")]
    n, m = first.shape[-2:]
    matrices = first.reshape(-1, n, m).unbind()
    if orthogonal:
        twins = [
            SimpleNamespace(reflectors=X if n < m else X.mT, form="compact", in_features=m, out_features=n)
            for X in matrices
        ]
    else:
        held: spectrum.Spectrum = module.parametrizations.weight[0].spectrum
        sigma = copies["parametrizations.weight.original1"].reshape(len(matrices), -1).unbind()
        twins = [
            SimpleNamespace(reflectors=X, sigma=s, form="compact", spectrum=held)
            for X, s in zip(matrices, sigma, strict=True)
        ]
    return torch.stack([definition_weight(twin) for twin in twins]).reshape(first.shape), twins
