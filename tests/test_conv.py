from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dense import assert_close, assert_layer_matches_dense, assert_within, value_and_gradients
from layers import FORMS, SPECTRA, holds
from torch import Tensor, nn
from torch.func import functional_call

from fasth import cached, spectrum
from fasth.nn import Conv1dSVD, Conv2dSVD
from fasth.tools.twins import definition_weight, orthogonality, perturbed

# The arguments of nn.Conv1d or nn.Conv2d, and the shape of an input.
PROBLEMS: dict[str, tuple[type, dict[str, Any], tuple[int, ...]]] = {
    "1×1": (Conv2dSVD, dict(in_channels=5, out_channels=5, kernel_size=1), (2, 5, 3, 4)),
    "one channel": (Conv2dSVD, dict(in_channels=1, out_channels=1, kernel_size=1), (2, 1, 3, 4)),
    "unbatched": (Conv2dSVD, dict(in_channels=3, out_channels=4, kernel_size=2), (3, 5, 4)),
    "no images": (Conv2dSVD, dict(in_channels=3, out_channels=4, kernel_size=2), (0, 3, 5, 4)),
    "more outputs than patch": (Conv2dSVD, dict(in_channels=1, out_channels=9, kernel_size=2), (2, 1, 4, 4)),
    "stride and padding": (
        Conv2dSVD,
        dict(in_channels=3, out_channels=4, kernel_size=(3, 2), stride=(2, 1), padding=(1, 0)),
        (2, 3, 6, 5),
    ),
    "dilation": (Conv2dSVD, dict(in_channels=2, out_channels=3, kernel_size=2, dilation=(2, 1)), (2, 2, 6, 5)),
    "same": (Conv2dSVD, dict(in_channels=2, out_channels=3, kernel_size=(3, 5), padding="same"), (2, 2, 6, 5)),
    "no bias": (Conv2dSVD, dict(in_channels=2, out_channels=3, kernel_size=3, bias=False), (2, 2, 6, 5)),
    **{
        mode: (
            Conv2dSVD,
            dict(in_channels=2, out_channels=3, kernel_size=3, padding=(1, 2), padding_mode=mode),
            (2, 2, 6, 5),
        )
        for mode in ("reflect", "replicate", "circular")
    },
    "same, circular": (
        Conv2dSVD,
        dict(in_channels=2, out_channels=3, kernel_size=(3, 2), padding="same", padding_mode="circular"),
        (2, 2, 6, 5),
    ),
    "1-D": (Conv1dSVD, dict(in_channels=3, out_channels=4, kernel_size=3, stride=2, padding=1), (2, 3, 9)),
    "1-D, 1×1": (Conv1dSVD, dict(in_channels=4, out_channels=4, kernel_size=1), (2, 4, 9)),
    "1-D, unbatched, circular": (
        Conv1dSVD,
        dict(in_channels=3, out_channels=4, kernel_size=3, padding=1, padding_mode="circular"),
        (3, 9),
    ),
}
every_problem = pytest.mark.parametrize("name", PROBLEMS)


def dense_class(kind: type) -> Any:
    return {Conv1dSVD: nn.Conv1d, Conv2dSVD: nn.Conv2d}[kind]


def draw(name: str, **more: Any) -> tuple[Any, Callable[[Any, Tensor], Tensor], Tensor]:
    """The layer, not where it began, what it computes as torch.nn has it, and an input."""
    kind, options, shape = PROBLEMS[name]
    conv = dense_class(kind)(**options, device="meta")

    def twin(layer: Any, x: Tensor) -> Tensor:
        tensors = {"weight": definition_weight(layer).reshape(conv.weight.shape), "bias": layer.bias}
        return functional_call(conv, {name: t for name, t in tensors.items() if t is not None}, (x,))

    return perturbed(kind(**options, **more)), twin, torch.randn(shape, dtype=more.get("dtype"))


def assert_same(actual: Tensor, expected: Tensor, roundings: float) -> None:
    assert_within(actual, expected.detach().double(), expected.abs().max().item(), roundings)


@pytest.mark.parametrize("form", FORMS)
@every_problem
def test_value_and_gradients_are_those_of_the_dense_twin(name: str, form: str, precise: torch.dtype) -> None:
    layer, twin, x = draw(name, reflectors=form, dtype=precise)
    assert_layer_matches_dense(layer, twin, x, size=50)
    parameters = [p for key, p in layer.named_parameters() if key != "bias"]
    actual, expected = (
        value_and_gradients(weight, [], parameters)
        for weight in (lambda: layer.weight, lambda: definition_weight(layer).reshape(layer.weight.shape))
    )
    for t, reference in zip(actual[0] + actual[1], expected[0] + expected[1], strict=True):
        assert_within(t, reference.double(), 10, 50)


@pytest.mark.parametrize("s", SPECTRA, ids=repr)
def test_any_spectrum(s: spectrum.Spectrum) -> None:
    layer, twin, x = draw("stride and padding", spectrum=s, dtype=torch.float64)
    assert_layer_matches_dense(layer, twin, x, size=50)
    assert holds(layer.svd.sigma, s)
    layer = Conv2dSVD(3, 4, 2, spectrum=s)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e30)
    for _ in range(5):
        for p in layer.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        assert holds(layer.svd.sigma, s)
    assert orthogonality(layer.svd.U.dense()) < 30 and orthogonality(layer.svd.V.dense()) < 30


@every_problem
def test_parameters_are_as_many_as_those_of_conv_and_sigma(name: str) -> None:
    layer, *_ = draw(name)
    kind, options, _ = PROBLEMS[name]
    conv = dense_class(kind)(**options)
    assert layer.weight.shape == conv.weight.shape
    sizes = [sum(p.numel() for p in module.parameters()) for module in (conv, layer)]
    assert sizes[1] == sizes[0] + min(len(conv.weight), conv.weight[0].numel())


@every_problem
def test_from_conv_and_back(name: str, precise: torch.dtype) -> None:
    kind, options, shape = PROBLEMS[name]
    conv = dense_class(kind)(**options, dtype=precise).eval()
    layer = kind.from_conv(conv)
    x = torch.randn(shape, dtype=precise)
    if x.numel():
        assert_within(layer(x), conv(x).double(), 10, 20)
    assert not layer.training and (layer.svd.sigma >= 0).all()
    back = layer.to_conv()
    assert type(back) is type(conv) and repr(back) == repr(conv) and not back.training
    assert_within(back.weight, conv.weight.double(), conv.weight.abs().max().item(), 40)
    assert (back.bias is None) if conv.bias is None else torch.equal(back.bias, conv.bias)


def test_from_conv_keeps_what_is_frozen() -> None:
    conv = nn.Conv2d(3, 4, 2)
    conv.weight.requires_grad_(False)
    state = torch.get_rng_state()
    layer = Conv2dSVD.from_conv(conv, reflectors="full", spectrum=spectrum.positive())
    assert torch.equal(torch.get_rng_state(), state)
    assert [name for name, p in layer.named_parameters() if p.requires_grad] == ["bias"]
    assert layer.form == "full" and not layer.to_conv().weight.requires_grad and layer.to_conv().bias.requires_grad


@pytest.mark.parametrize("form", FORMS)
def test_begins_orthogonal_or_as_the_identity(form: str) -> None:
    W = Conv2dSVD(3, 4, 2, reflectors=form).weight.flatten(1)
    assert orthogonality(W.mT) < 30
    identity = Conv2dSVD(3, 3, 1, bias=False, init="identity", reflectors=form)
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(identity(x), x)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["1×1", "one channel", "1-D, 1×1"])
def test_inverse_and_logabsdet(name: str, form: str) -> None:
    """Both from the Jacobian of the layer as a map of one image."""
    layer, _, x = draw(name, reflectors=form, dtype=torch.float64)
    assert_same(layer.inverse(layer(x)), x, 100)
    assert_same(layer.inverse(layer(x[0])), x[0], 100)
    image = x[0]
    jacobian = torch.autograd.functional.jacobian(layer, image).reshape(image.numel(), image.numel())
    expected = torch.linalg.slogdet(jacobian).logabsdet
    actual = layer.logabsdet(*image.shape[1:])
    assert actual.shape == () and abs(actual - expected) < 1e-11
    (gradient,) = torch.autograd.grad(actual, layer.sigma)
    assert_same(gradient, image[0].numel() / layer.sigma, 10)


def test_inverse_without_bias_and_padding_that_adds_nothing() -> None:
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    for padding in ("same", "valid"):
        layer = Conv2dSVD(3, 3, 1, padding=padding, bias=False, dtype=torch.float64)
        assert_same(layer.inverse(layer(x)), x, 20)


def test_the_norm_of_a_larger_kernel_is_bounded() -> None:
    """‖conv‖ ≤ √(kh·kw) max |σ|, and where patches do not overlap its singular values are those of the matrix."""
    shape = (2, 6, 6)
    for options in (dict(kernel_size=3, padding=1), dict(kernel_size=(2, 3)), dict(kernel_size=3, stride=2)):
        layer = perturbed(Conv2dSVD(2, 3, bias=False, dtype=torch.float64, **options))
        norm = torch.linalg.matrix_norm(_as_matrix(layer, shape), 2)
        assert norm <= layer.kernel_size[0] ** 0.5 * layer.kernel_size[1] ** 0.5 * layer.svd.norm(2)
    layer = perturbed(Conv2dSVD(2, 3, 2, stride=2, bias=False, dtype=torch.float64))
    values = torch.linalg.svdvals(_as_matrix(layer, shape))
    assert_same(values, layer.svd.sigma.abs().repeat(9).sort(descending=True).values, 50)


def _as_matrix(layer: Any, shape: tuple[int, ...]) -> Tensor:
    """The convolution as a map of images: (numbers out, numbers in)."""
    jacobian = torch.autograd.functional.jacobian(layer, torch.zeros(shape, dtype=torch.float64))
    return jacobian.flatten(3).flatten(0, 2)


# Memory format


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("batch", [torch.contiguous_format, torch.channels_last])
def test_channels_last(rank: int | None, batch: torch.memory_format) -> None:
    """``model.to(memory_format=…)`` reaches the kernel, as in nn.Conv2d, and changes no number."""
    layer, conv = (nn.Sequential(m) for m in (perturbed(Conv2dSVD(4, 6, 3, rank=rank)), nn.Conv2d(4, 6, 3)))
    x = torch.randn(2, 4, 7, 7).contiguous(memory_format=batch)
    expected = value_and_gradients(layer, [x], list(layer.parameters()))
    keys = layer.state_dict().keys()
    for memory_format in (torch.channels_last, torch.contiguous_format):
        for model in (layer, conv):
            model.to(memory_format=memory_format)
        for model in (layer, copy.deepcopy(layer)):
            out = model(x)
            assert out.is_contiguous(memory_format=torch.channels_last) == conv(x).is_contiguous(
                memory_format=torch.channels_last
            )
            with torch.no_grad(), cached():
                assert model(x).stride() == out.stride()
        if rank is None:
            assert layer[0].weight.is_contiguous(memory_format=memory_format)
        assert_close(value_and_gradients(layer, [x], list(layer.parameters())), expected, 50)
        assert layer.state_dict().keys() == keys


def test_made_on_meta_and_reset_later() -> None:
    torch.manual_seed(1)
    expected = Conv2dSVD(3, 4, 2)
    layer = Conv2dSVD(3, 4, 2, device="meta")
    assert layer(torch.empty(2, 3, 5, 5, device="meta")).shape == (2, 4, 4, 4)
    layer = layer.to_empty(device="cpu")
    torch.manual_seed(1)
    layer.reset_parameters()
    assert all(map(torch.equal, layer.state_dict().values(), expected.state_dict().values()))
    skipped = nn.utils.skip_init(Conv2dSVD, 3, 4, 2)
    skipped.load_state_dict(expected.state_dict())
    x = torch.randn(2, 3, 5, 5)
    assert torch.equal(skipped(x), expected(x))


def test_bias_is_drawn_as_in_conv() -> None:
    layer = Conv2dSVD(4, 500, 2)
    assert layer.bias.abs().max() <= 1 / 4
    assert layer.bias.std().item() == pytest.approx(1 / 4 / 3**0.5, rel=0.1)


def test_autocast_gives_the_dtype_that_conv_gives() -> None:
    layer, conv, x = Conv2dSVD(3, 3, 1), nn.Conv2d(3, 3, 1), torch.randn(2, 3, 4, 4)
    for training in (True, False):
        layer.train(training)
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(training):
            assert layer(x).dtype == conv(x).dtype == torch.bfloat16
            assert layer.weight.dtype == torch.float32
        assert layer(x).dtype == torch.float32


def test_training_lowers_the_loss() -> None:
    layer, target, x = Conv2dSVD(3, 8, 3, padding=1), nn.Conv2d(3, 8, 3, padding=1), torch.randn(8, 3, 8, 8)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.03)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.mse_loss(layer(x), target(x).detach())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    assert orthogonality(layer.svd.U.dense()) < 30 and orthogonality(layer.svd.V.dense()) < 30


def test_repr() -> None:
    assert repr(Conv2dSVD(3, 4, 2)) == (
        "Conv2dSVD(3, 4, kernel_size=(2, 2), stride=(1, 1), bias=True, reflectors='compact', spectrum=free())"
    )
    layer = Conv1dSVD(3, 4, 2, padding="same", dilation=2, padding_mode="circular", bias=False)
    assert repr(layer) == (
        "Conv1dSVD(3, 4, kernel_size=(2,), stride=(1,), padding='same', dilation=(2,), padding_mode='circular', "
        "bias=False, reflectors='compact', spectrum=free())"
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Conv2dSVD(4, 4, 3, groups=2), ValueError, "`groups` should be 1.*; got 2"),
        (lambda: Conv2dSVD.from_conv(nn.Conv2d(4, 4, 3, groups=4)), ValueError, "`groups` should be 1.*; got 4"),
        (lambda: Conv2dSVD(0, 4, 3), ValueError, "`in_channels` should be at least 1; got 0"),
        (lambda: Conv2dSVD(4, 4, 0), ValueError, "kernel_size"),
        (lambda: Conv2dSVD(4, 4, 3, padding_mode="mirror"), ValueError, "padding_mode"),
        (lambda: Conv2dSVD(4, 4, 3, padding="full"), ValueError, "full"),
        (lambda: Conv2dSVD(4, 4, 3, reflectors="thin"), ValueError, "`reflectors` should be 'compact' or 'full'"),
        (lambda: Conv2dSVD.from_conv(nn.Conv1d(4, 4, 3)), TypeError, "`conv` should be an nn.Conv2d; got Conv1d"),
        (lambda: Conv1dSVD.from_conv(nn.Linear(4, 4)), TypeError, "`conv` should be an nn.Conv1d; got Linear"),
        (lambda: Conv2dSVD(4, 4, 3).inverse(torch.ones(1, 4, 5, 5)), ValueError, "`inverse` needs a 1×1 kernel"),
        (lambda: Conv2dSVD(4, 5, 1).inverse(torch.ones(1, 5, 5, 5)), ValueError, "equal channels"),
        (lambda: Conv2dSVD(4, 4, 1, stride=2).logabsdet(4, 4), ValueError, "stride 1"),
        (lambda: Conv2dSVD(4, 4, 1, padding=1).logabsdet(4, 4), ValueError, "no padding"),
        (lambda: Conv2dSVD(4, 5, 1).set_weight_(torch.ones(5, 4)), ValueError, r"shape \(5, 4, 1, 1\); got \(5, 4\)"),
    ],
)
def test_errors_say_what_was_expected(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
