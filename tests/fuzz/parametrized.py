"""Weights that are parametrized, by ``fasth.parametrizations`` and by ``to_svd``, through sequences of changes."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from fasth import parametrizations, to_svd
from fasth.nn.held_weight import HeldWeight
from fasth.parametrizations import OrthogonalWeight
from fasth.tools.twins import definition_weight
from fuzz.changes import change, nearby, trained
from fuzz.compare import check, norm, tolerance
from fuzz.draws import PRECISE, Draw
from fuzz.layers import SPECTRA, slope_of, without_guard


class Subject(NamedTuple):
    """A layer of torch.nn, and the shapes of what it is called with."""

    plain: Any
    shapes: list[tuple[int, ...]]


def parametrized_case(draw: Draw) -> None:
    """A tensor of a layer that is parametrized by hand."""
    dtype = draw.dtype(PRECISE)
    if draw.chance(0.2):  # a convolution, whose kernel is a batch of matrices of 3×2 or 2×3
        kernel = draw.choice([(3, 2), (2, 3), (1, 2)])
        plain: Any = nn.Conv2d(draw.between(1, 3), draw.between(1, 3), kernel, bias=False, dtype=dtype)
        shape: tuple[int, ...] = (2, plain.in_channels, 5, 5)
    else:
        plain = nn.Linear(draw.size(20), draw.size(20), bias=False, dtype=dtype)
        shape = (draw.size(8), plain.in_features)
    module = copy.deepcopy(plain)
    if draw.chance(0.5):
        parametrizations.orthogonal(module)
    else:
        parametrizations.svd(module, spectrum=draw.choice(SPECTRA))
    _through_changes(draw, module, Subject(plain, [shape]))


def converted_case(draw: Draw) -> None:
    """A layer that ``to_svd`` parametrizes, since fasth has no class for it."""
    dtype = draw.dtype(PRECISE)
    kind = draw.weighted({_attention: 3, _convolution: 4, _bilinear: 1})
    subject = kind(draw, dtype)
    spectrum = draw.choice([None, *SPECTRA])
    module = to_svd(subject.plain, spectrum=spectrum, report=[])
    if spectrum is None:
        _check_conversion(draw, module, subject, dtype)
    _through_changes(draw, module, subject)


def _check_conversion(draw: Draw, module: Any, subject: Subject, dtype: torch.dtype) -> None:
    """Compares with the plain layer, in a function of its own: no graph may be alive when parameters are swapped."""
    x = [draw.numbers(*shape, dtype=dtype) for shape in subject.shapes]
    out, expected = _output(module, x), _output(subject.plain, x)
    check("converted", out, expected.double(), _size(subject, module, x), _relative(subject, dtype, out))


def _attention(draw: Draw, dtype: torch.dtype) -> Subject:
    heads = draw.between(1, 3)
    width, batch = heads * draw.between(1, 4), draw.between(1, 3)
    sizes = {} if draw.chance(0.6) else {"kdim": draw.size(8), "vdim": draw.size(8)}
    options: dict[str, Any] = {"bias": draw.chance(0.7), "batch_first": True, "dtype": dtype}
    plain = nn.MultiheadAttention(width, heads, **sizes, **options)
    target, source = draw.between(1, 5), draw.between(1, 5)
    return Subject(plain, [(batch, target, width), (batch, source, plain.kdim), (batch, source, plain.vdim)])


def _convolution(draw: Draw, dtype: torch.dtype) -> Subject:
    """Draws a convolution: 3-d, transposed or with groups."""
    dims, transposed, groups = draw.between(1, 3), draw.chance(0.5), draw.choice([1, 2, 3])
    groups = 2 if dims < 3 and not transposed and groups == 1 else groups  # those without have a class of their own
    kinds = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d) if transposed else (
        nn.Conv1d, nn.Conv2d, nn.Conv3d)  # fmt: skip
    channels = groups * draw.between(1, 3), groups * draw.between(1, 3)
    options: dict[str, Any] = {"stride": draw.choice([1, 2]), "padding": draw.choice([0, 1]), "bias": draw.chance(0.7)}
    kernel = tuple(draw.between(1, 3) for _ in range(dims))
    plain = kinds[dims - 1](*channels, kernel, groups=groups, dtype=dtype, **options)
    return Subject(plain, [(draw.between(1, 2), channels[0], *(draw.between(3, 5) for _ in range(dims)))])


def _bilinear(draw: Draw, dtype: torch.dtype) -> Subject:
    n, m, rows = draw.size(8), draw.size(8), draw.size(8)
    plain = nn.Bilinear(n, m, draw.between(1, 5), bias=draw.chance(0.7), dtype=dtype)
    return Subject(plain, [(rows, n), (rows, m)])


def _through_changes(draw: Draw, module: Any, subject: Subject) -> None:
    draw.note(module)
    with torch.no_grad():
        for p in trained(module).values():
            p.copy_(nearby(draw, p, 0.3))
    subject = subject._replace(plain=copy.deepcopy(subject.plain).double())
    for again in range(draw.between(1, 3)):
        x = [draw.rows(*shape, dtype=next(module.parameters()).dtype) for shape in subject.shapes]
        if len(x) > 1:  # functions that are not linear in x are compared for moderate x
            x = [t / max(1.0, float(t.abs().max())) for t in x]
        if again:
            module = change(draw, module, lambda module, x=x: _output(module, x))
        if draw.chance(0.3):
            with parametrize.cached():
                _compare(draw, module, subject, x)
        _compare(draw, module, subject, x)


def _output(module: Any, x: list[Tensor]) -> Tensor:
    out = module(*x)
    return out if isinstance(out, Tensor) else out[0]


def _compare(draw: Draw, module: Any, subject: Subject, x: list[Tensor]) -> None:
    """The output, and the gradients of the parameters, for the weights that the definition makes of them."""
    draw.actions["parametrized"] += 1
    params = dict(module.named_parameters())
    copies = {name: p.detach().double().requires_grad_(p.requires_grad) for name, p in params.items()}
    held = {path: _held(module, path, copies) for path in _parametrized(module)}
    plain = {name: t for name, t in copies.items() if "parametrizations." not in name}
    for path, weights in held.items():
        W = torch.stack([definition_weight(one) for one in weights])
        plain[path] = W.reshape(subject.plain.get_parameter(path).shape)
    out = _output(module, x)
    # PyTorch's fast path of attention is not differentiable, and its parameters want gradients.
    expected = functional_call(subject.plain, plain, tuple(t.double() for t in x))
    expected = expected if isinstance(expected, Tensor) else expected[0]
    relative = _relative(subject, x[0].dtype, out)
    size = _size(subject, module, x)
    check("output", out, expected, size, relative)
    wanted = [name for name, p in params.items() if p.requires_grad]
    if not wanted or not out.requires_grad:
        return
    g = draw.numbers(*out.shape, dtype=out.dtype)
    found = torch.autograd.grad(out, [params[name] for name in wanted], g, allow_unused=True)
    references = torch.autograd.grad(expected, [copies[name] for name in wanted], g.double(), allow_unused=True)
    for name, gradient, reference in zip(wanted, found, references, strict=True):
        reference = torch.zeros_like(copies[name]) if reference is None else reference
        gradient = torch.zeros_like(reference) if gradient is None else gradient
        slope = 1.0
        if name.endswith("original1"):
            slope = max(1.0, *(slope_of(one) for weights in held.values() for one in weights if one.trained))
        elif "parametrizations." in name:
            gradient, reference = without_guard(gradient, reference, copies[name])
        check(f"gradient of {name}", gradient, reference, 2 * slope * size * max(norm(g), 1), relative)


def _parametrized(module: Any) -> list[str]:
    """The names of the parametrized tensors, as the plain layer has them."""
    return [
        f"{path}.{name}" if path else name
        for path, part in module.named_modules()
        if parametrize.is_parametrized(part)
        for name in part.parametrizations
    ]


def _held(module: Any, path: str, copies: dict[str, Tensor]) -> list[HeldWeight]:
    """The matrices of a parametrized tensor, one after another, from the copies of what it is stored as."""
    owner, _, name = path.rpartition(".")
    parametrization = module.get_submodule(owner).parametrizations[name][0]
    prefix = f"{owner}.parametrizations.{name}." if owner else f"parametrizations.{name}."
    first = copies[prefix + parametrization.stored[0]]
    n, m = shape = first.shape[-2:]
    matrices = first.reshape(-1, n, m).unbind()
    if isinstance(parametrization, OrthogonalWeight):
        return [HeldWeight("", shape, X if n < m else X.mT, None, None, "compact", None) for X in matrices]
    sigma = copies[prefix + parametrization.stored[1]].reshape(len(matrices), -1).unbind()
    return [
        HeldWeight("", shape, X, s, None, "compact", parametrization.spectrum)
        for X, s in zip(matrices, sigma, strict=True)
    ]


# Rounding errors that are allowed.


def _relative(subject: Subject, dtype: torch.dtype, out: Tensor) -> float:
    widest = max(sum(p.flatten(1).shape) for p in subject.plain.parameters() if p.ndim > 1)
    return tolerance(dtype, 2 * widest + out[..., 0].numel() + 10)


def _size(subject: Subject, module: Any, x: list[Tensor]) -> float:
    """A bound of the output, and of its slopes. In attention errors of queries and keys multiply what is averaged."""
    largest = 1.0
    for path in _parametrized(module):
        W = getattr(module.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2])
        largest = max(largest, norm(W))
    biases = sum(norm(p) for name, p in module.named_parameters() if "bias" in name)
    rows = [1 + norm(t) for t in x]
    if isinstance(subject.plain, nn.MultiheadAttention):
        return (largest * (1 + biases)) ** 4 * rows[0] * rows[1] * rows[2]
    product = 1.0
    for row in (norm(t) for t in x) if len(x) == 1 else rows:
        product *= row
    return 2 * largest * product + biases + float(len(x) > 1)
