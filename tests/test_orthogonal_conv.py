"""Orthogonal convolutions, and SVDs of convolutions as maps of images, against their matrices on small images."""

from __future__ import annotations

import copy
import io
import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from dense import assert_within
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import fasth
from fasth import (
    Conv1dMapSVD,
    Conv1dOrthogonal,
    Conv2dMapSVD,
    Conv2dOrthogonal,
    ConvTranspose1dOrthogonal,
    ConvTranspose2dOrthogonal,
    spectrum,
)
from fasth.nn import image_map
from fasth.nn.shift_chain import Chain, add_a_tap, orthonormal_rows
from fasth.reflections import definition

SAME: dict[str, Any] = {"padding": "same", "padding_mode": "circular"}
CIRCULAR: dict[str, Any] = {"padding_mode": "circular"}

# The layer, and the size of an image. With circular padding all of these maps are exact.
EXACT: dict[str, tuple[type, tuple[Any, ...], dict[str, Any], tuple[int, ...]]] = {
    "1×1": (Conv2dOrthogonal, (5, 5, 1), {}, (3, 4)),
    **{f"{k}×{k}, {c} channels": (Conv2dOrthogonal, (c, c, k), SAME, (4, 5)) for c in (2, 5) for k in (2, 3, 4, 5)},
    "3×2": (Conv2dOrthogonal, (4, 4, (3, 2)), SAME, (4, 3)),
    "larger than the image": (Conv2dOrthogonal, (3, 3, 5), SAME, (2, 3)),
    "more outputs": (Conv2dOrthogonal, (3, 5, 3), SAME, (4, 3)),
    "fewer outputs": (Conv2dOrthogonal, (5, 3, 3), SAME, (4, 3)),
    "from one channel": (Conv2dOrthogonal, (1, 4, 3), SAME, (4, 3)),
    "to one channel": (Conv2dOrthogonal, (4, 1, 3), SAME, (4, 3)),
    "dilation": (Conv2dOrthogonal, (4, 4, 3), dict(SAME, dilation=(2, 1)), (5, 4)),
    "groups": (Conv2dOrthogonal, (4, 6, 3), dict(SAME, groups=2), (4, 3)),
    "patches": (Conv2dOrthogonal, (2, 8, 2, 2), {}, (4, 6)),
    "patches to fewer": (Conv2dOrthogonal, (2, 5, 3, 3), {}, (3, 6)),
    "stride, square": (Conv2dOrthogonal, (2, 8, 3, 2, 1), CIRCULAR, (4, 6)),
    "stride, more outputs": (Conv2dOrthogonal, (2, 13, 4, 2, 1), CIRCULAR, (4, 6)),
    "stride, fewer outputs": (Conv2dOrthogonal, (3, 5, 5, 2, 2), CIRCULAR, (4, 6)),
    "stride along one axis": (Conv2dOrthogonal, (3, 5, 3, (2, 1), 1), CIRCULAR, (4, 3)),
    "stride and dilation": (Conv2dOrthogonal, (2, 8, 3, 2, 3, 3), CIRCULAR, (8, 6)),
    "stride and groups": (Conv2dOrthogonal, (4, 8, 3, 2, 1), dict(CIRCULAR, groups=2), (4, 4)),
    "1-d": (Conv1dOrthogonal, (4, 4, 4), SAME, (7,)),
    "1-d, stride": (Conv1dOrthogonal, (3, 9, 5, 3, 2), CIRCULAR, (9,)),
    "transposed": (ConvTranspose2dOrthogonal, (3, 5, 3, 1, 1), CIRCULAR, (4, 3)),
    "transposed, stride": (ConvTranspose2dOrthogonal, (8, 2, 3, 2, 1, 1), CIRCULAR, (3, 4)),
    "transposed, even": (ConvTranspose2dOrthogonal, (8, 3, 4, 2, 1), CIRCULAR, (3, 4)),
    "transposed, groups": (ConvTranspose2dOrthogonal, (8, 4, 3, 2, 1, 1, 2), CIRCULAR, (2, 3)),
    "transposed, patches": (ConvTranspose2dOrthogonal, (8, 2, 2, 2), {}, (3, 2)),
    "transposed, 1-d": (ConvTranspose1dOrthogonal, (6, 2, 5, 3, 1), CIRCULAR, (4,)),
}
WITH_SVD: dict[str, tuple[type, tuple[Any, ...], dict[str, Any], tuple[int, ...]]] = {
    "1×1": (Conv2dMapSVD, (5, 5, 1), {}, (3, 4)),
    **{f"{k}×{k}": (Conv2dMapSVD, (4, 4, k), SAME, (4, 3)) for k in (2, 3, 4)},
    "odd channels": (Conv2dMapSVD, (5, 5, (3, 2)), SAME, (4, 3)),
    "more outputs": (Conv2dMapSVD, (3, 5, 3), SAME, (4, 3)),
    "fewer outputs": (Conv2dMapSVD, (5, 3, 3), SAME, (4, 3)),
    "groups and dilation": (Conv2dMapSVD, (4, 6, 3), dict(SAME, groups=2, dilation=2), (4, 5)),
    "1-d": (Conv1dMapSVD, (4, 4, 5), SAME, (7,)),
}
ALL = {name: case for name, case in EXACT.items()} | {f"SVD, {name}": case for name, case in WITH_SVD.items()}
every_exact = pytest.mark.parametrize("name", EXACT)
every_svd = pytest.mark.parametrize("name", WITH_SVD)


def draw(name: str, dtype: torch.dtype = torch.float64, **more: Any) -> tuple[Any, tuple[int, ...]]:
    """The layer, away from where it began, and the shape of one image."""
    kind, arguments, options, size = ALL[name]
    layer = moved(kind(*arguments, **options | more, dtype=dtype))
    return layer, (layer.in_channels, *size)


def moved(layer: nn.Module) -> Any:
    """Adds numbers to all parameters, as training would; the diagonals, which have signs, keep theirs."""
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.where(p.abs() == 1, p, p + 0.3 * torch.randn_like(p)))
            if p is getattr(layer, "sigma", None):
                p.uniform_(0.4, 1.6)
    return layer


def matrix(layer: Any, shape: tuple[int, ...]) -> Tensor:
    """The layer without its bias as a map of one image of this shape."""
    images = torch.eye(math.prod(shape), dtype=layer._first().dtype).reshape(-1, *shape)
    return (layer(images) - layer(torch.zeros_like(images[:1]))).flatten(1).mT


def singular_values(layer: Any, shape: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        return torch.linalg.svdvals(matrix(layer, shape).double())


@every_exact
def test_exact_maps_are_orthogonal_to_rounding(name: str) -> None:
    assert (singular_values(*draw(name)) - 1).abs().max() < 1e-14
    layer, shape = draw(name, torch.float32)
    assert (singular_values(layer, shape) - 1).abs().max() < 2e-6
    with fasth.cached():  # by its kernel
        assert (singular_values(layer, shape) - 1).abs().max() < 2e-6


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@every_exact
def test_with_zero_padding_the_norm_is_at_most_1(name: str) -> None:
    layer, shape = draw(name, padding_mode="zeros")
    assert 0.3 < singular_values(layer, shape).max() < 1 + 1e-14


@pytest.mark.parametrize("padding", [0, 1, 2, 5])
def test_any_zero_padding(padding: int) -> None:
    layer = moved(Conv2dOrthogonal(3, 4, 4, 2, padding, dtype=torch.float64))
    assert singular_values(layer, (3, 5, 6)).max() < 1 + 1e-14
    layer = moved(ConvTranspose2dOrthogonal(4, 3, 4, 2, min(padding, 2), 1, dtype=torch.float64))
    assert singular_values(layer, (4, 4, 3)).max() < 1 + 1e-14


def test_circular_padding_that_drops_outputs_has_orthonormal_rows() -> None:
    layer = moved(Conv2dOrthogonal(4, 4, 4, padding=1, padding_mode="circular", dtype=torch.float64))
    values = singular_values(layer, (4, 5, 6))
    assert len(values) == 4 * 4 * 5 and (values - 1).abs().max() < 1e-14


# Few pixels are multiplied by rotations and shifts, many by the kernel.

MODES = {"circular": {}, "zeros": {"padding_mode": "zeros"}, "valid": {"padding": 0}}


def called(layer: Any, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    return [y, *torch.autograd.grad((weights * y).sum(), [x, *layer.parameters()])]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name",
    ["2×2, 5 channels", "4×4, 2 channels", "3×2", "more outputs", "fewer outputs", "to one channel", "dilation", "1-d",
     "SVD, 3×3", "SVD, odd channels", "SVD, more outputs", "SVD, fewer outputs", "SVD, 1-d"],
)  # fmt: skip
def test_few_pixels_are_multiplied_without_the_kernel(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, shape = draw(name, **MODES[mode])
    shape = shape[0], *(size + 3 for size in shape[1:])
    for x in (torch.randn(3, *shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)):
        found = {}
        for most in (0, math.inf):
            monkeypatch.setattr(image_map, "MOST_PIXELS", most)
            with monkeypatch.context() as only:
                refused = "_form" if most else "_multiply_pixels"
                only.setattr(type(layer), refused, lambda *_: pytest.fail("took the other path"))
                found[most] = called(layer, x)
        assert found[0][0].is_contiguous() and found[math.inf][0].is_contiguous()
        for actual, expected in zip(found[math.inf], found[0], strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_how_many_pixels_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Conv2dOrthogonal(4, 6, 3, padding=1)
    formed = []
    monkeypatch.setattr(layer, "_kernel", lambda sigma, form=layer._kernel: formed.append(1) or form(sigma))
    layer(torch.randn(12, 4, 4, 4))  # 32·6 pixels
    assert not formed
    layer(torch.randn(193, 4, 1, 1))
    assert len(formed) == 1
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.randn(1, 4, 2, 2))
    assert len(formed) == 2


def test_what_a_convolution_refuses_is_refused_for_few_pixels() -> None:
    for layer in (Conv2dOrthogonal(4, 4, 3), Conv2dOrthogonal(4, 4, 5, **SAME)):
        with pytest.raises(RuntimeError, match=r"size|wrapping around"):
            layer(torch.randn(1, 4, 1, 1))
    for shape in ((1, 3, 4, 4), (4, 4)):
        with pytest.raises(RuntimeError, match=r"channels|3D|dimension"):
            Conv2dOrthogonal(4, 4, 3, padding=1)(torch.randn(shape))


# The definition.


def from_definition(layer: Any, chain: Chain, reflectors: Tensor, z: list[Tensor]) -> Tensor:
    """A₀ S₁ A₁ ⋯ S_n A_n at one frequency: (c, r), complex. z: one number of modulus 1 for each axis."""
    c, h = chain.channels, chain.half
    inner, last = chain.split(reflectors)
    product = rotation(last)[:, : chain.rank] * signs(last)
    product = product.to(torch.complex128)
    for i, step in enumerate(chain.steps):
        delay = z[step.dim + 2]
        moving = torch.arange(c) < h if step.of_first_half else torch.arange(c) >= h
        product = torch.where(moving, delay, 1).unsqueeze(-1) * product
        if i < len(inner):
            product = rotation(inner[i]).to(torch.complex128) @ product
    return product


def rotation(V: Tensor) -> Tensor:
    k, c = V.shape
    full = V.triu(1) + torch.eye(k, c, dtype=V.dtype)
    return definition.householder(torch.eye(c, dtype=V.dtype), full).mT


def signs(V: Tensor) -> Tensor:
    return torch.where(V.detach().diagonal() < 0, -1.0, 1.0)


def response(layer: Any, z: list[Tensor]) -> Tensor:
    """Σ over taps of the kernel times powers of z: (out, in), complex."""
    kernel = layer.weight.to(torch.complex128)
    for number in reversed(z):
        kernel = (kernel * number ** torch.arange(kernel.shape[-1])).sum(-1)
    return kernel


@pytest.mark.parametrize("name", ["3×3, 5 channels", "4×4, 2 channels", "3×2", "more outputs", "fewer outputs", "1-d"])
def test_kernel_and_gradients_are_those_of_the_definition(name: str) -> None:
    layer, _ = draw(name)
    z = [
        torch.polar(torch.ones((), dtype=torch.float64), 6 * torch.rand((), dtype=torch.float64))
        for _ in layer.kernel_size
    ]

    def defined() -> Tensor:
        product = from_definition(layer, layer._chain, layer.reflectors, z)
        return product if layer.out_channels > layer.in_channels else product.mT

    compare(layer, lambda: response(layer, z), defined)


@pytest.mark.parametrize(
    "name", ["SVD, 3×3", "SVD, odd channels", "SVD, more outputs", "SVD, fewer outputs", "SVD, 1-d"]
)
def test_kernel_with_svd_is_that_of_the_definition(name: str) -> None:
    layer, _ = draw(name)
    z = [
        torch.polar(torch.ones((), dtype=torch.float64), 6 * torch.rand((), dtype=torch.float64))
        for _ in layer.kernel_size
    ]

    def defined() -> Tensor:
        U = from_definition(layer, layer._of_U, layer.reflectors_U, z)
        V = from_definition(layer, layer._of_V, layer.reflectors_V, z)
        return U @ torch.diag(layer.sigma).to(U) @ V.mT

    compare(layer, lambda: response(layer, z), defined)


def compare(layer: Any, *functions: Any) -> None:
    found = []
    for function in functions:
        value = torch.view_as_real(function())
        parameters = [p for name, p in layer.named_parameters() if name != "bias"]
        weights = torch.linspace(-1, 1, value.numel(), dtype=torch.float64).reshape(value.shape)
        gradients = torch.autograd.grad(value, parameters, weights)
        # The diagonal holds signs; its gradient only keeps them.
        found.append([value, *(g * (p.detach().abs() != 1) for g, p in zip(gradients, parameters, strict=True))])
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13)


def test_a_strided_kernel_is_the_patch_matrix_after_the_chain() -> None:
    layer, _ = draw("stride, more outputs")
    inner, last = layer._chain.split(layer.reflectors)
    M = layer._chain.multiply(orthonormal_rows(last)[None, None], inner, add_a_tap)
    first, patches = M.permute(3, 2, 0, 1), layer._patches()
    kernel = torch.zeros_like(layer.weight)
    for i, j in itertools.product(range(2), repeat=2):
        kernel[:, :, i : i + 3, j : j + 3] += torch.einsum("om,mcij->ocij", patches[:, :, i, j], first)
    torch.testing.assert_close(layer.weight, kernel)


# Singular values of the map.


@every_svd
def test_singular_values_are_those_of_the_map(name: str) -> None:
    layer, shape = draw(f"SVD, {name}")
    pixels = math.prod(shape[1:])
    expected = layer.singular_values.detach().flatten().repeat(pixels).sort(descending=True).values
    assert (singular_values(layer, shape) - expected).abs().max() < 1e-14 * expected.max()
    torch.testing.assert_close(layer.norm(), expected[0])
    torch.testing.assert_close(layer.cond(), expected[0] / expected[-1])


@pytest.mark.parametrize("name", ["3×3", "odd channels", "1-d"])
def test_log_determinant_and_its_gradients(name: str) -> None:
    layer, shape = draw(f"SVD, {name}")
    actual, expected = layer.logabsdet(*shape[1:]), torch.linalg.slogdet(matrix(layer, shape)).logabsdet
    torch.testing.assert_close(actual, expected)
    gradient = torch.autograd.grad(actual, layer.sigma)[0]
    found = torch.autograd.grad(expected, [layer.sigma, layer.reflectors_U, layer.reflectors_V])
    torch.testing.assert_close(gradient, found[0])
    off_diagonal = [
        g * (p.detach().abs() != 1) for g, p in zip(found[1:], (layer.reflectors_U, layer.reflectors_V), strict=True)
    ]
    assert max(g.abs().max() for g in off_diagonal) < 1e-11  # the determinant does not depend on the rotations
    x = torch.randn(2, *shape, dtype=torch.float64)
    torch.testing.assert_close(layer.forward_and_logabsdet(x), (layer(x), actual))


@pytest.mark.parametrize("name", ["3×3", "odd channels", "1-d"])
def test_gradients_of_norm_condition_and_inverse_are_those_through_the_matrix(name: str) -> None:
    layer, shape = draw(f"SVD, {name}")
    y = torch.randn(shape, dtype=torch.float64)
    A, weights = matrix(layer, shape), torch.linspace(-1, 1, y.numel(), dtype=torch.float64)
    bias = layer.bias.reshape(-1, *(1 for _ in shape[1:]))
    pairs = [
        (layer.norm(), torch.linalg.matrix_norm(A, 2)),
        (layer.cond(), torch.linalg.cond(A)),
        ((layer.inverse(y).flatten() * weights).sum(), torch.linalg.solve(A, (y - bias).flatten()) @ weights),
    ]
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected)
        for p in (layer.sigma, layer.reflectors_U, layer.reflectors_V):
            found, wanted = (
                torch.autograd.grad(value, p, retain_graph=True, allow_unused=True)[0] for value in (actual, expected)
            )
            found = torch.zeros_like(p) if found is None else found
            off_signs = p.detach().abs() != 1
            torch.testing.assert_close(found * off_signs, wanted * off_signs, rtol=1e-9, atol=1e-9)


SQUARE = ["1×1", "4×4, 2 channels", "3×3, 5 channels", "3×2", "dilation", "patches", "stride, square", "1-d, stride",
          "stride and dilation", "transposed, stride", "transposed, patches", "SVD, 1×1", "SVD, 2×2", "SVD, 3×3",
          "SVD, 1-d"]  # fmt: skip


@pytest.mark.parametrize("name", SQUARE)
def test_inverse(name: str) -> None:
    layer, shape = draw(name)
    for x in (torch.randn(2, *shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)):
        torch.testing.assert_close(layer.inverse(layer(x)), x, rtol=0, atol=1e-13)
        with fasth.cached():
            torch.testing.assert_close(layer.inverse(layer(x)), x, rtol=0, atol=1e-13)
    expected = torch.linalg.slogdet(matrix(layer, shape)).logabsdet
    torch.testing.assert_close(layer.logabsdet(*shape[1:]), expected, rtol=1e-12, atol=1e-11)


@every_exact
def test_adjoint_is_the_transposed_matrix(name: str) -> None:
    layer, shape = draw(name)
    A = matrix(layer, shape)
    y = layer(torch.zeros(shape, dtype=torch.float64))
    outputs = torch.randn(y.shape, dtype=torch.float64)
    expected = (A.mT @ outputs.flatten()).reshape(shape)
    torch.testing.assert_close(layer.adjoint(outputs + y), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("mode", ["zeros", "circular"])
@pytest.mark.parametrize(
    ("k", "s", "p", "extra"), [(3, 1, 1, 0), (3, 2, 1, 1), (4, 2, 1, 0), (2, 2, 0, 0), (5, 3, 1, 0)]
)
def test_transposed_layers_are_the_adjoint(mode: str, k: int, s: int, p: int, extra: int) -> None:
    options: dict[str, Any] = {"padding_mode": mode, "groups": 2, "dtype": torch.float64, "bias": False}
    conv = moved(Conv2dOrthogonal(4, 6, k, s, p, **options))
    transposed = ConvTranspose2dOrthogonal(6, 4, k, s, p, extra, **options)
    transposed.load_state_dict(conv.state_dict())
    size = 2 * s
    A, B = matrix(conv, (4, size, size)), matrix(transposed, (6, 2, 2))
    torch.testing.assert_close(A.mT, B, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["3×2", "stride and groups", "transposed, stride", "SVD, 3×3"])
def test_gradients_by_finite_differences(name: str) -> None:
    layer, shape = draw(name)
    x = torch.randn(1, *shape, dtype=torch.float64)
    names = [n for n, _ in layer.named_parameters() if n != "bias"]
    tensors = [getattr(layer, n).detach() for n in names]
    free = [t.abs() != 1 for t in tensors]  # the diagonal of the last reflectors has signs, and is left as it is

    def call(*moves: Tensor) -> Tensor:
        state = {n: t + f * m for n, t, f, m in zip(names, tensors, free, moves, strict=True)}
        return torch.func.functional_call(layer, state, (x,))[..., :1]

    moves = [torch.zeros_like(t, requires_grad=True) for t in tensors]
    assert gradcheck(call, moves, fast_mode=True)
    assert gradgradcheck(call, moves, fast_mode=True)


# Starts.


@pytest.mark.parametrize("init", ["1x1", "identity"])
@pytest.mark.parametrize("channels", [(4, 4), (5, 5), (3, 7), (7, 2)])
@pytest.mark.parametrize("k", [1, 3, 5, (1, 3)])
def test_starts_as_one_tap(init: str, channels: tuple[int, int], k: Any) -> None:
    for kind in (Conv2dOrthogonal, Conv2dMapSVD):
        if kind is Conv2dMapSVD and channels[0] != channels[1]:
            continue
        weight = kind(*channels, k, init=init, dtype=torch.float64).weight
        middle = weight[..., weight.shape[-2] // 2, weight.shape[-1] // 2]
        torch.testing.assert_close(weight.square().sum(), middle.square().sum())
        if init == "identity":
            torch.testing.assert_close(middle, torch.eye(channels[1], channels[0], dtype=torch.float64))
        else:
            assert (middle - torch.eye(channels[1], channels[0], dtype=torch.float64)).abs().max() > 0.05


def test_starts_are_uniformly_distributed() -> None:
    torch.manual_seed(1)
    for init in ("haar", "1x1"):
        kernels = torch.stack([Conv2dOrthogonal(3, 3, 3, init=init).weight.detach().sum((-1, -2)) for _ in range(400)])
        assert kernels.mean(0).abs().max() < 0.15 and (kernels.square().mean(0) - 1 / 3).abs().max() < 0.12


@pytest.mark.parametrize("s", [spectrum.positive(), spectrum.between(0.5, 2.0), spectrum.around(1.0, 0.1)], ids=repr)
def test_spectra_bound_the_map_whatever_is_trained(s: spectrum.Spectrum) -> None:
    layer = Conv2dMapSVD(3, 3, 3, bias=False, spectrum=s, **SAME)
    optimizer = torch.optim.SGD(layer.parameters(), lr=10.0)
    for _ in range(3):
        for p in layer.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    values = singular_values(layer, (3, 4, 3))
    torch.testing.assert_close(values.max(), layer.norm().double(), rtol=2e-6, atol=0)
    if s.bounded:
        assert s.low * (1 - 2e-6) <= values.min() <= values.max() <= s.high * (1 + 2e-6)  # type: ignore[attr-defined]


def test_stays_orthogonal_whatever_is_trained() -> None:
    layer = Conv2dOrthogonal(6, 6, 3, bias=False, **SAME)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e4)
    for _ in range(3):
        for p in layer.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    assert (singular_values(layer, (6, 4, 4)) - 1).abs().max() < 2e-6


@pytest.mark.parametrize("name", ["3×2", "stride and groups", "SVD, 3×3"])
def test_training_with_decay_leaves_the_signs_alone(name: str) -> None:
    layer, shape = draw(name, torch.float32)
    layer.reset_parameters()
    chains = [c for c in (getattr(layer, a, None) for a in ("_chain", "_of_U", "_of_V")) if c is not None]
    held = [getattr(layer, n) for n in ("reflectors", "reflectors_U", "reflectors_V") if hasattr(layer, n)]

    def signs_now() -> list[Tensor]:
        last = [chain.split(p.detach())[1] for chain, p in zip(chains, held, strict=True)]
        return [t.diagonal(dim1=-2, dim2=-1).signbit() for t in last]

    before = signs_now()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(60):
        optimizer.zero_grad()
        layer(torch.randn(2, *shape)).square().mean().backward()
        optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(signs_now(), before, strict=True))


# Errors.


@pytest.mark.parametrize(
    ("kind", "arguments", "options", "message"),
    [
        (Conv2dOrthogonal, (4, 4, 2, 3), {}, "`kernel_size` should be at least `stride`"),
        (Conv2dOrthogonal, (4, 4, 3, 2, 1, 2), {}, "no common divisor"),
        (Conv2dOrthogonal, (1, 1, 3), {}, "one channel alone can only be shifted"),
        (Conv2dOrthogonal, (4, 4, 3), {"groups": 4}, "one channel alone can only be shifted"),
        (Conv2dOrthogonal, (1, 3, 3, 2), {}, "one channel alone can only be shifted"),
        (Conv2dOrthogonal, (4, 4, 3, 1, 2), CIRCULAR, "should be at most 1 for a kernel of 3"),
        (Conv2dOrthogonal, (4, 4, 3, 1, 1), {"padding_mode": "reflect"}, "'zeros' or 'circular'; got 'reflect'"),
        (Conv2dOrthogonal, (4, 4, 3), {"init": "dirac"}, "`init` should be"),
        (Conv2dOrthogonal, (0, 4, 3), {}, "`in_channels` should be at least 1"),
        (Conv2dOrthogonal, (3, 4, 3), {"groups": 2}, "in_channels must be divisible by groups"),
        (ConvTranspose2dOrthogonal, (8, 2, 3, 2, 1), CIRCULAR, "2p = 1 . output_padding"),
        (ConvTranspose2dOrthogonal, (8, 2, 2, 3), {}, "`kernel_size` should be at least `stride`"),
        (Conv2dMapSVD, (4, 4, 3, 2), {}, "`stride` should be 1"),
        (Conv2dMapSVD, (1, 4, 3), {}, "one channel alone can only be shifted"),
    ],
)
def test_what_cannot_be_orthogonal_is_an_error(kind: Any, arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(*arguments, **options)


def test_errors_of_calls() -> None:
    layer = Conv2dOrthogonal(4, 4, 3, padding=1)
    for what in ("inverse", "adjoint"):
        with pytest.raises(ValueError, match=f"`{what}` needs padding_mode='circular'"):
            getattr(layer, what)(torch.randn(1, 4, 3, 3))
    with pytest.raises(ValueError, match="`logabsdet` needs a square map"):
        Conv2dOrthogonal(4, 3, 3, **SAME).logabsdet(2, 2)
    with pytest.raises(ValueError, match="multiples of the stride"):
        Conv2dOrthogonal(2, 8, 3, 2, 1, **CIRCULAR)(torch.randn(1, 2, 5, 4))
    with pytest.raises(ValueError, match="takes no given kernel"):
        layer.set_weight_(torch.randn(4, 4, 3, 3))
    with pytest.raises(AttributeError, match="`weight` cannot be set"):
        layer.weight = nn.Parameter(torch.randn(4, 4, 3, 3))
    with pytest.raises(TypeError, match="`input` should be a tensor"):
        layer([1.0])
    with pytest.raises(RuntimeError, match="takes no given kernel"):
        layer.load_state_dict(nn.Conv2d(4, 4, 3).state_dict())
    singular = Conv2dMapSVD(3, 3, 3, **SAME)
    with torch.no_grad():
        singular.sigma[0] = 0
    with pytest.raises(torch.linalg.LinAlgError, match="singular value that is 0"):  # type: ignore[attr-defined]
        singular.inverse(torch.randn(1, 3, 3, 3))
    assert singular.logabsdet(2, 2) == -math.inf and singular.cond() == math.inf


# Features of every layer.

SMALL = ["3×2", "groups", "stride and groups", "transposed, stride", "SVD, 3×3", "SVD, groups and dilation", "1-d"]
every_small = pytest.mark.parametrize("name", SMALL)


@every_small
def test_copies_checkpoints_and_pickles(name: str) -> None:
    layer, shape = draw(name, torch.float32)
    x = torch.randn(2, *shape)
    other, _ = draw(name, torch.float32)
    assert not torch.equal(other(x), layer(x))
    other.load_state_dict(layer.state_dict())
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for twin in (other, copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert torch.equal(twin(x), layer(x))
    assert "_layout" not in layer.state_dict()


@every_small
def test_cached(name: str) -> None:
    layer, shape = draw(name, torch.float32)
    x = torch.randn(2, *shape)
    expected = layer(x)
    with torch.no_grad(), fasth.cached():
        assert layer.weight.data_ptr() == layer.weight.data_ptr()
        torch.testing.assert_close(layer(x), expected)
    with fasth.cached():
        (layer(x) + layer(x)).sum().backward()
    found = [p.grad for p in layer.parameters()]
    expected_gradients = torch.autograd.grad(2 * layer(x).sum(), list(layer.parameters()))
    for g, e in zip(found, expected_gradients, strict=True):
        assert_within(g, e.double(), e.abs().max().item(), 500)


@every_small
def test_dense_twin(name: str) -> None:
    layer, shape = draw(name, torch.float32)
    x = torch.randn(2, *shape)
    report: list[Any] = []
    dense = fasth.to_dense(nn.Sequential(layer), report=report)[0]
    if layer._transposed and layer.padding_mode == "circular":
        assert "has no circular padding" in report[0].reason
        return
    assert type(dense) is layer._dense
    torch.testing.assert_close(dense(x), layer(x))
    # The bias starts as that of the dense layer: within the same bounds.
    layer.reset_parameters()
    bound = 1 / math.sqrt(dense.weight[0].numel())
    assert layer.bias.abs().max() <= bound and layer.bias.abs().max() > bound / 4


def test_zero_padded_transposed_layer_has_a_dense_twin() -> None:
    layer = ConvTranspose2dOrthogonal(8, 2, 3, 2, 1, 1)
    x = torch.randn(2, 8, 3, 4)
    dense = fasth.to_dense(layer)
    assert type(dense) is nn.ConvTranspose2d
    torch.testing.assert_close(dense(x), layer(x))


def test_to_svd_leaves_them_and_makes_none() -> None:
    model = nn.Sequential(
        Conv2dOrthogonal(4, 4, 3), nn.Conv2d(4, 4, 3), Conv2dMapSVD(4, 4, 3), nn.Conv2d(4, 4, 3, groups=2)
    )
    converted = fasth.to_svd(model)
    assert [type(m) for m in converted[:3]] == [Conv2dOrthogonal, fasth.Conv2dSVD, Conv2dMapSVD]


def test_spectra_and_groups_of_parameters() -> None:
    model = nn.Sequential(
        Conv2dOrthogonal(4, 8, 3, 2, 1),
        Conv2dMapSVD(8, 8, 3, groups=2),
        ConvTranspose2dOrthogonal(8, 4, 2, 2),
    )
    found = fasth.spectra(model)
    assert [found[name].shape for name in "012"] == [(8, 16), (2, 4, 4), (16, 8)]
    assert all(layer.norm == layer.cond == 1 for layer in found.values())
    assert "2×4×4" in repr(found)
    kinds = [group["name"] for group in fasth.param_groups(model, lr=1e-3) for _ in group["params"]]
    assert Counter(kinds) == {"sigma": 1, "reflectors": 5, "vectors": 3}
    assert fasth.nuclear_norm(model) == 8


@pytest.mark.parametrize("name", ["3×2", "stride and groups", "transposed, stride", "SVD, 3×3"])
def test_compiled(name: str) -> None:
    layer, shape = draw(name, torch.float32)
    x = torch.randn(2, *shape)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))
    gradients = [torch.autograd.grad(f(x).square().sum(), list(layer.parameters())) for f in (compiled, layer)]
    for g, e in zip(*gradients, strict=True):
        assert_within(g, e.double(), max(e.abs().max().item(), 1), 500)


def test_memory_format() -> None:
    layer = Conv2dOrthogonal(4, 4, 3).to(memory_format=torch.channels_last)
    assert layer.weight.is_contiguous(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 5, 5).to(memory_format=torch.channels_last)
    assert layer(x).is_contiguous(memory_format=torch.channels_last)


@every_small
def test_autocast_and_half_precision(name: str) -> None:
    layer, shape = draw(name, torch.float32)
    x = torch.randn(2, *shape)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        assert torch.equal(layer.weight, layer.weight) and layer.weight.dtype == torch.float32
    torch.testing.assert_close(layer.weight, layer.double().weight.float())  # as exact as without autocast
    half = layer.to(torch.bfloat16)
    torch.testing.assert_close(half(x.bfloat16()).float(), layer.float()(x), rtol=0.1, atol=0.1)


def test_meta_device_and_transforms() -> None:
    layer = Conv2dOrthogonal(4, 8, 3, 2, 1, device="meta")
    assert layer(torch.empty(2, 4, 6, 6, device="meta")).shape == (2, 8, 3, 3)
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    x = torch.randn(3, 2, 4, 6, 6)
    torch.testing.assert_close(torch.vmap(layer)(x), torch.stack([layer(t) for t in x]))
    assert repr(layer) == "Conv2dOrthogonal(4, 8, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), bias=True)"


@pytest.mark.parametrize("name", ["3×3, 5 channels", "SVD, 3×3"])
def test_as_a_transform_of_distributions(name: str) -> None:
    layer, shape = draw(name)
    transform = fasth.SVDTransform(layer)
    x = torch.randn(2, *shape, dtype=torch.float64)
    y = transform(x)
    torch.testing.assert_close(transform.inv(y), x)
    expected = torch.linalg.slogdet(matrix(layer, shape)).logabsdet
    torch.testing.assert_close(transform.log_abs_det_jacobian(x, y), expected.expand(2), rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="as many output as input channels"):
        fasth.SVDTransform(Conv2dOrthogonal(2, 8, 2, 2))
