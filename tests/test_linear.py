from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dense import assert_layer_matches_dense, assert_within, value_and_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import FORMS, SPECTRA, holds
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils import parametrize, prune

from fasth import cached, spectrum
from fasth.nn import LinearOrthogonal, LinearSVD, LinearSymmetric
from fasth.operators import Orthogonal
from fasth.tools.twins import definition_weight, orthogonality, perturbed

KINDS = [LinearSVD, LinearSymmetric, LinearOrthogonal]
SHAPES = [(1, 1), (1, 5), (5, 1), (6, 6), (4, 9), (9, 4), (40, 40), (70, 33), (33, 70)]
SMALL = [(1, 1), (6, 6), (4, 9), (9, 4)]
ROWS = [(3,), (), (0,), (2, 3), (2, 0, 3), (200,)]


def make(kind: type, in_features: int, out_features: int | None = None, **options: Any) -> Any:
    """A layer of any kind. A symmetric one has as many output features as input features."""
    if kind is LinearSymmetric:
        return kind(in_features, **options)
    return kind(in_features, in_features if out_features is None else out_features, **options)


def of_every_kind(shapes: list[tuple[int, int]], kinds: list[type] = KINDS) -> Any:
    cases = [(kind, shape) for kind in kinds for shape in shapes if kind is not LinearSymmetric or len({*shape}) == 1]
    ids = [f"{kind.__name__}-{in_features}-{out_features}" for kind, (in_features, out_features) in cases]
    return pytest.mark.parametrize(("kind", "shape"), cases, ids=ids)


def twin(layer: Any, x: Tensor) -> Tensor:
    return F.linear(x, definition_weight(layer), layer.bias)


def factors(layer: Any) -> list[Tensor]:
    """The orthogonal factors of the layer, dense."""
    if isinstance(layer, LinearOrthogonal):
        return [layer.orthogonal.dense()]
    return [layer.eig.U.dense()] if isinstance(layer, LinearSymmetric) else [layer.svd.U.dense(), layer.svd.V.dense()]


def assert_same(actual: Tensor, expected: Tensor, roundings: float) -> None:
    assert_within(actual, expected.detach().double(), expected.abs().max().item(), roundings)


def assert_matches_twin(layer: Any, x: Tensor) -> None:
    """Compares with the dense twin. The terms of the gradient of a reflector with one number cancel, to zero."""
    numbers = [
        p.detach().abs().min().item()
        for p in layer.parameters()
        if layer.form == "full" and p.ndim == 2 and p.shape[1] == 1
    ]
    outputs = x.numel() // layer.in_features * layer.out_features
    scale = max(1.0, x.norm().item() * math.sqrt(outputs) / min(numbers)) if numbers else 1.0
    assert_layer_matches_dense(layer, twin, x, size=layer.in_features + layer.out_features + 10, scale=scale)


# Values and gradients of a layer


@pytest.mark.parametrize("form", FORMS)
@of_every_kind(SHAPES)
def test_value_and_gradients_are_those_of_the_dense_twin(
    kind: type, shape: tuple[int, int], form: str, precise: torch.dtype, device: str
) -> None:
    for bias in (True, False):
        layer = perturbed(make(kind, *shape, bias=bias, reflectors=form, dtype=precise, device=device))
        for rows in ROWS if max(shape) < 40 else [ROWS[bias]]:
            x = torch.randn(*rows, shape[0], dtype=precise, device=device)
            assert_matches_twin(layer, x)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("s", SPECTRA, ids=repr)
@of_every_kind(SMALL, [LinearSVD, LinearSymmetric])
def test_any_spectrum(
    kind: type, shape: tuple[int, int], s: spectrum.Spectrum, form: str, precise: torch.dtype
) -> None:
    layer = perturbed(make(kind, *shape, spectrum=s, reflectors=form, dtype=precise))
    assert_matches_twin(layer, torch.randn(5, shape[0], dtype=precise))
    assert holds(layer.spectrum(layer.sigma), s)


@pytest.mark.parametrize("form", FORMS)
@of_every_kind(SMALL)
def test_weight_is_the_dense_matrix_and_differentiable(kind: type, shape: tuple[int, int], form: str) -> None:
    layer = perturbed(make(kind, *shape, reflectors=form, dtype=torch.float64))
    parameters = [p for name, p in layer.named_parameters() if name != "bias"]
    actual, expected = (
        value_and_gradients(weight, [], parameters)
        for weight in (lambda: layer.weight, lambda: definition_weight(layer))
    )
    for t, reference in zip(actual[0] + actual[1], expected[0] + expected[1], strict=True):
        assert_within(t, reference, 1 + math.prod(shape) ** 0.5, sum(shape))


@settings(deadline=None)
@given(
    in_features=st.integers(1, 20),
    out_features=st.integers(1, 20),
    rows=st.lists(st.integers(0, 5), max_size=3),
    form=st.sampled_from(FORMS),
    kind=st.sampled_from([LinearSVD, LinearOrthogonal]),
    bias=st.booleans(),
)
def test_any_shape(in_features: int, out_features: int, rows: list[int], form: str, kind: type, bias: bool) -> None:
    layer = perturbed(kind(in_features, out_features, bias, reflectors=form, dtype=torch.float64))
    x = torch.randn(*rows, in_features, dtype=torch.float64)
    assert_matches_twin(layer, x)


@of_every_kind(SMALL)
def test_low_precision_stores_and_float32_computes(kind: type, shape: tuple[int, int], dtype: torch.dtype) -> None:
    layer = make(kind, *shape, dtype=dtype)
    x = torch.randn(5, shape[0], dtype=dtype)
    assert layer(x).dtype == dtype
    assert_same(layer(x), twin(copy.deepcopy(layer).double(), x.double()), sum(shape))
    assert all(orthogonality(Q) < 30 for Q in factors(layer))


@of_every_kind(SMALL)
def test_parameters_are_as_many_as_those_of_linear_and_sigma(kind: type, shape: tuple[int, int]) -> None:
    linear, layer = nn.Linear(*shape), make(kind, *shape)
    sizes = [sum(p.numel() for p in module.parameters()) for module in (linear, layer)]
    assert sizes[1] == sizes[0] + (0 if kind is LinearOrthogonal else min(shape))
    assert all(p.grad is not None for p in _after_backward(layer).parameters())


def _after_backward(layer: Any) -> Any:
    layer(torch.randn(3, layer.in_features)).sum().backward()
    return layer


@pytest.mark.parametrize("form", FORMS)
def test_factors_are_those_of_the_weight(form: str) -> None:
    layer = perturbed(LinearSVD(9, 4, reflectors=form, dtype=torch.float64))
    assert_same(layer.svd.dense(), definition_weight(layer), 13)
    assert_same(layer.svd.sigma.abs().sort(descending=True).values, torch.linalg.svdvals(definition_weight(layer)), 13)
    layer = perturbed(LinearSymmetric(6, reflectors=form, dtype=torch.float64))
    assert_same(layer.eig.sigma.sort().values, torch.linalg.eigvalsh(definition_weight(layer)), 13)
    layer = perturbed(LinearOrthogonal(9, 4, reflectors=form, dtype=torch.float64))
    assert_same(layer.orthogonal.dense()[:, :4].mT, definition_weight(layer), 13)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_inverse_undoes_forward(kind: type, form: str, precise: torch.dtype) -> None:
    for d, bias in ((1, True), (6, False), (40, True)):
        layer = make(kind, d, bias=bias, reflectors=form, dtype=precise)
        for rows in ROWS:
            x = torch.randn(*rows, d, dtype=precise)
            assert_within(layer.inverse(layer(x)), x.double(), 3, 2 * d)
        layer = perturbed(layer, 0.1)
        y = torch.randn(5, d, dtype=precise)
        assert_layer_matches_dense(
            _Inverse(layer),
            lambda inverse, y: torch.linalg.solve(definition_weight(inverse.layer), (y - _bias(inverse.layer)).mT).mT,
            y,
            size=2 * d + 10,
            condition=10,
        )


class _Inverse(nn.Module):
    """``layer.inverse`` as a forward pass."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, y: Tensor) -> Tensor:
        return self.layer.inverse(y)


def _bias(layer: Any) -> Tensor | float:
    return 0.0 if layer.bias is None else layer.bias


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_logabsdet(kind: type, form: str) -> None:
    layer = perturbed(make(kind, 6, bias=False, reflectors=form, dtype=torch.float64))
    actual, expected = (
        value_and_gradients(function, [], list(layer.parameters()))
        for function in (layer.logabsdet, lambda: torch.linalg.slogdet(definition_weight(layer)).logabsdet)
    )
    for t, reference in zip(actual[0] + actual[1], expected[0] + expected[1], strict=True):
        assert_within(t, reference, 10, 12)


def test_a_singular_layer_has_no_inverse() -> None:
    for layer in (LinearSVD(4, 4), LinearSymmetric(4)):
        with torch.no_grad():
            layer.sigma[2] = 0
        assert layer.logabsdet() == -torch.inf
        with pytest.raises(torch.linalg.LinAlgError, match="singular"):
            layer.inverse(torch.randn(4))


# Initialization


@pytest.mark.parametrize("kind", [LinearSVD, LinearSymmetric])
def test_normalized_starts_where_it_is_differentiable(kind: type) -> None:
    """The gradient is that of a difference, and a loss that treats all singular values alike has one."""
    layer, x = make(kind, 6, spectrum=spectrum.normalized(), dtype=torch.float64), torch.randn(3, 6).double()
    losses: list[Callable[[Any], Tensor]] = [
        lambda layer: layer(x).square().sum(),
        lambda layer: layer.spectrum(layer.sigma).sum(),
    ]
    for loss in losses:
        (gradient,) = torch.autograd.grad(loss(layer), layer.sigma)
        assert gradient.abs().min() > 1e-3
        direction = torch.randn(6, dtype=torch.float64)
        with torch.no_grad():
            ends = []
            for step in (1e-4, -2e-4):
                layer.sigma.add_(step * direction)
                ends.append(loss(layer))
            layer.sigma.add_(1e-4 * direction)
        difference = (ends[0] - ends[1]) / 2e-4
        torch.testing.assert_close(gradient @ direction, difference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@of_every_kind(SMALL)
def test_identity(kind: type, shape: tuple[int, int], form: str) -> None:
    layer = make(kind, *shape, init="identity", reflectors=form)
    assert torch.equal(layer.weight, torch.eye(shape[1], shape[0]))
    trained = [p for p in layer.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(layer(torch.randn(9, shape[0])).square().sum(), trained)
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("init", ["haar", "identity"])
@pytest.mark.parametrize("s", SPECTRA, ids=repr)
@of_every_kind(SMALL, [LinearSVD, LinearSymmetric])
def test_sigma_is_one_at_first(kind: type, shape: tuple[int, int], s: spectrum.Spectrum, init: str) -> None:
    layer = make(kind, *shape, spectrum=s, init=init)
    expected = torch.ones(min(shape), dtype=torch.float64)
    if s == spectrum.normalized():
        expected[1:] = 0.99  # not on the kink, where several are the largest
    assert_within(layer.spectrum(layer.sigma), expected, 1, 1)


def test_sigma_is_what_the_spectrum_has_nearest_to_one_at_first() -> None:
    sigma = LinearSVD(3, 3, spectrum=spectrum.between(2, 4)).svd.sigma
    assert ((sigma >= 2) & (sigma < 2.01)).all()


@pytest.mark.parametrize("form", FORMS)
def test_factors_are_haar_distributed_at_first(form: str) -> None:
    """Moments of a uniformly random orthogonal Q: tr Q has mean 0, its square 1, q₁₁⁴ has 3/(d(d + 2)), det Q has 0."""
    d, n = 3, 600
    layers = [LinearSVD(d, d, False, reflectors=form, dtype=torch.float64) for _ in range(n)]
    U, V = (_stacked([getattr(layer.svd, side) for layer in layers]) for side in "UV")
    if form == "compact":  # which has the signs of both as their product, and leaves open whose they are
        signs = torch.randint(2, (n, 1, d)) * 2 - 1
        U, V = U * signs, V * signs
    W = _stacked([LinearOrthogonal(d, d, False, reflectors=form, dtype=torch.float64).orthogonal for _ in range(n)])
    for Q in (U, V, W, U @ V.mT):
        trace, q = Q.diagonal(dim1=1, dim2=2).sum(1), Q[:, 0, 0]
        for samples, mean in ((trace, 0), (trace**2, 1), (q**2, 1 / d), (q**4, 3 / (d * (d + 2)))):
            assert_mean(samples, mean)
        for entry in Q.flatten(1).unbind(1):
            assert_mean(entry, 0)
        assert_mean(torch.linalg.det(Q), 0)
    assert_mean((U * V).sum((1, 2)), 0)


def _stacked(operators: list[Orthogonal]) -> Tensor:
    """All operators as dense matrices: (n, d, d)."""
    V = torch.stack([Q.V for Q in operators]).detach()
    signs = [V.new_ones(V.shape[-1]) if Q.signs is None else Q.signs for Q in operators]
    return Orthogonal(V, form=operators[0].form, signs=torch.stack(signs)).dense()


@pytest.mark.parametrize("shape", [(2, 4), (4, 2)])
def test_orthonormal_columns_are_uniform_at_first(shape: tuple[int, int]) -> None:
    for kind in (LinearOrthogonal, LinearSVD):
        with torch.no_grad():
            W = torch.stack([kind(*shape, False, dtype=torch.float64).weight for _ in range(600)])
        for entry in W.flatten(1).unbind(1):
            assert_mean(entry, 0)
            assert_mean(entry**2, 1 / 4)
            assert_mean(entry**4, 3 / (4 * 6))


@pytest.mark.parametrize("shape", [(1, 9), (9, 1), (6, 6), (8, 20), (64, 64), (48, 128), (128, 48), (300, 250)])
def test_init_linear_has_the_singular_values_of_linear(shape: tuple[int, int]) -> None:
    n = max(4, 40_000 // math.prod(shape))
    drawn = torch.stack([torch.linalg.svdvals(nn.Linear(*shape).weight.detach()) for _ in range(n)]).mean(0).double()
    layer = LinearSVD(*shape, init="linear", dtype=torch.float64)
    sigma = layer.svd.sigma.detach()
    assert (sigma - drawn).abs().max() <= 0.03 * drawn.max()
    assert sigma.equal(sigma.sort(descending=True).values)
    assert sigma.square().sum().item() == pytest.approx(shape[1] / 3, rel=0.01 if min(shape) > 20 else 0.05)
    thin = LinearSVD(*shape, init="linear", rank=max(1, min(shape) // 2), dtype=torch.float64)
    assert torch.equal(thin.sigma, layer.sigma[: thin.rank])
    positive = LinearSVD(*shape, init="linear", spectrum=spectrum.positive(), dtype=torch.float64)
    torch.testing.assert_close(positive.svd.sigma, layer.svd.sigma)


@pytest.mark.parametrize("form", FORMS)
def test_init_linear_has_the_factors_of_haar(form: str, dtype: torch.dtype) -> None:
    for rank in (None, 2):
        layers = []
        for init in ("haar", "linear"):
            torch.manual_seed(5)
            layers.append(LinearSVD(6, 4, init=init, reflectors=form, rank=rank, dtype=dtype))
        haar, linear = (layer.state_dict() for layer in layers)
        assert not torch.equal(haar.pop("sigma"), linear.pop("sigma"))
        assert all(torch.equal(t, linear[name]) for name, t in haar.items())


def assert_mean(samples: Tensor, mean: float) -> None:
    """Within 4.5 standard errors: a seeded run that passes always passes, and a wrong mean is far outside."""
    assert abs(samples.mean() - mean) <= 4.5 * samples.std() / len(samples) ** 0.5


def test_bias_is_drawn_as_in_linear() -> None:
    for layer in (make(kind, 64) for kind in KINDS):
        assert layer.bias.abs().max() <= 1 / 8
        assert layer.bias.std().item() == pytest.approx(1 / 8 / 3**0.5, rel=0.3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_made_on_meta_and_reset_later(kind: type, form: str) -> None:
    torch.manual_seed(1)
    expected = make(kind, 5, reflectors=form)
    with torch.device("meta"):
        layer = make(kind, 5, reflectors=form)
    assert all(t.is_meta for t in (*layer.parameters(), *layer.buffers()))
    assert layer(torch.empty(3, 5, device="meta")).shape == (3, 5)
    layer = layer.to_empty(device="cpu")
    torch.manual_seed(1)
    layer.reset_parameters()
    assert all(map(torch.equal, layer.state_dict().values(), expected.state_dict().values()))
    skipped = nn.utils.skip_init(kind, *([5] if kind is LinearSymmetric else [5, 5]), reflectors=form)
    skipped.load_state_dict(expected.state_dict())
    assert torch.equal(skipped(torch.ones(5)), expected(torch.ones(5)))


@pytest.mark.parametrize("form", FORMS)
@of_every_kind(SMALL)
def test_state_dict_round_trip(kind: type, shape: tuple[int, int], form: str) -> None:
    layer, other = (perturbed(make(kind, *shape, reflectors=form)) for _ in range(2))
    x = torch.randn(3, shape[0])
    assert not torch.equal(layer(x), other(x)) or shape == (1, 1)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), other(x))


# Conversion from and to a dense matrix


MATRICES: dict[str, Callable[[int, int], Tensor]] = {
    "gaussian": lambda n, m: torch.randn(n, m),
    "orthogonal": lambda n, m: nn.init.orthogonal_(torch.empty(n, m)),
    "identity": lambda n, m: torch.eye(n, m),
    "zero": lambda n, m: torch.zeros(n, m),
    "rank one": lambda n, m: torch.ones(n, m),
    "large": lambda n, m: 1e30 * torch.randn(n, m),
    "small": lambda n, m: 1e-30 * torch.randn(n, m),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("matrix", MATRICES)
@of_every_kind(SMALL)
def test_from_linear_and_back(kind: type, shape: tuple[int, int], matrix: str, form: str, precise: torch.dtype) -> None:
    linear = nn.Linear(*shape, dtype=precise)
    W = MATRICES[matrix](shape[1], shape[0]).to(precise)
    if kind is LinearSymmetric:
        W = W + W.mT
    if kind is LinearOrthogonal:
        U, _, Vh = torch.linalg.svd(W.double(), full_matrices=False)
        W = (U @ Vh).to(precise)
    linear.weight.data.copy_(W)
    layer = kind.from_linear(linear, reflectors=form)
    assert_same(layer.weight, W, sum(shape))
    back = layer.to_linear()
    assert type(back) is nn.Linear and back.weight.dtype == precise
    assert_same(back.weight, W, sum(shape))
    assert torch.equal(back.bias, linear.bias)
    x = torch.randn(3, shape[0], dtype=precise)
    assert_within(layer(x), linear(x).double(), W.abs().max().item() * 10 + 1, sum(shape))
    if kind is LinearSVD:
        assert (layer.svd.sigma >= 0).all() and layer.svd.sigma.equal(layer.svd.sigma.sort(descending=True).values)


@pytest.mark.parametrize("kind", KINDS)
def test_from_linear_keeps_everything_else(kind: type, dtype: torch.dtype) -> None:
    linear = nn.Linear(4, 4, bias=False, dtype=dtype).eval().requires_grad_(False)
    linear.weight.copy_(torch.eye(4))
    state = torch.get_rng_state()
    layer = kind.from_linear(linear)
    assert torch.equal(torch.get_rng_state(), state)
    assert not layer.training and layer.bias is None and not any(p.requires_grad for p in layer.parameters())
    assert {p.dtype for p in (*layer.parameters(), *layer.buffers())} == {dtype}
    back = layer.to_linear()
    assert not back.training and back.bias is None and not back.weight.requires_grad and back.weight.dtype == dtype
    assert_same(back.weight, torch.eye(4), 4)


def test_orthogonal_from_any_matrix_is_the_nearest_one() -> None:
    for shape in SHAPES:
        linear = nn.Linear(*shape, dtype=torch.float64)
        U, _, Vh = torch.linalg.svd(linear.weight.detach(), full_matrices=False)
        assert_same(LinearOrthogonal.from_linear(linear).weight, U @ Vh, 10 * sum(shape))


def test_singular_values_outside_the_spectrum_become_the_nearest() -> None:
    linear = nn.Linear(3, 3, dtype=torch.float64)
    linear.weight.data.copy_(torch.diag(torch.tensor([5.0, 1.5, 0.25])))
    layer = LinearSVD.from_linear(linear, spectrum=spectrum.between(0.5, 2.0))
    assert_within(layer.weight, torch.diag(torch.tensor([2.0, 1.5, 0.5])).double(), 1, 0.002 / 8 / 2e-16)
    layer.weight.sum().backward()
    assert layer.sigma.grad is not None and layer.sigma.grad.abs().min() > 0


def test_set_weight() -> None:
    layer = LinearSVD(5, 3)
    W = torch.randn(3, 5, dtype=torch.float64)
    assert layer.set_weight_(W) is layer
    assert_same(layer.weight, W, 8)
    with pytest.raises(ValueError, match=r"`weight` should have shape \(3, 5\); got \(5, 3\)"):
        layer.set_weight_(W.mT)
    assert_same(layer.weight, W, 8)


# Training


@pytest.mark.parametrize("form", FORMS)
@of_every_kind([(16, 16), (24, 10), (10, 24)])
def test_training_lowers_the_loss_and_stays_orthogonal(kind: type, shape: tuple[int, int], form: str) -> None:
    layer = make(kind, *shape, reflectors=form)
    x = torch.randn(64, shape[0])
    target = x @ make(kind, *shape).weight.detach().mT
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.03)
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = F.mse_loss(layer(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert all(orthogonality(Q) < 30 for Q in factors(layer))
    assert_matches_twin(layer, x[:5])


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("learning_rate", [1e-2, 1e4, 1e18, 1e36])
@pytest.mark.parametrize("s", SPECTRA, ids=repr)
def test_spectrum_and_orthogonality_hold_whatever_the_learning_rate(
    s: spectrum.Spectrum, learning_rate: float, optimizer: type[torch.optim.Optimizer]
) -> None:
    layers = [
        LinearSVD(12, 8, spectrum=s),
        LinearSVD(8, 12, spectrum=s, reflectors="full"),
        LinearSymmetric(8, spectrum=s),
    ]
    for layer in layers:
        steps = optimizer(layer.parameters(), lr=learning_rate)
        for _ in range(20):
            for p in layer.parameters():
                p.grad = torch.randn_like(p)
            steps.step()
            assert holds(layer.spectrum(layer.sigma), s)
        assert all(orthogonality(Q) < 30 for Q in factors(layer))
        if s not in (spectrum.free(), spectrum.positive()):
            out = layer(torch.randn(3, layer.in_features)) - layer.bias
            assert out.isfinite().all()


# Inference, and parameters that are computed or given for one call


def test_inference_mode() -> None:
    layer, x = LinearSVD(6, 6).eval(), torch.randn(3, 6)
    with torch.no_grad():
        expected = layer(x)
    with torch.inference_mode():
        assert torch.equal(layer(x), expected)
        made_inside = LinearSVD(6, 6)
        assert_same(made_inside(x), twin(made_inside, x), 24)
    x.requires_grad_()
    layer(x).sum().backward()
    assert all(p.grad is not None for p in (x, *layer.parameters()))


def test_computed_parameters() -> None:
    """Pruned and parametrized ones are computed when read."""
    layer = perturbed(LinearSVD(6, 6)).eval()
    prune.l1_unstructured(layer, "sigma", 2)
    prune.l1_unstructured(layer, "bias", 2)
    assert (layer.sigma == 0).sum() == 2
    x = torch.randn(3, 6)
    with torch.no_grad():
        once = layer(x) - layer.bias
        assert_same(layer(x), twin(layer, x), 12)
        layer.sigma_orig.mul_(2)
        assert_same(layer(x) - layer.bias, 2 * once, 24)

    class Twice(nn.Module):
        def forward(self, t: Tensor) -> Tensor:
            return 2 * t

    layer = LinearSVD(6, 6, bias=False).eval()
    with torch.no_grad():
        once = layer(x)
        parametrize.register_parametrization(layer, "sigma", Twice())
        assert_same(layer(x), 2 * once, 12)


def test_other_parameters_for_one_call() -> None:
    layer = perturbed(LinearSVD(6, 6)).eval()
    other = perturbed(copy.deepcopy(layer))
    x = torch.randn(3, 6)
    with torch.no_grad():
        mine, theirs = layer(x), other(x)
        called = functional_call(layer, dict(other.named_parameters()), (x,))
        assert_same(called, theirs, 12)
        assert_same(layer(x), mine, 12)


# Transforms and precision


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_transforms(kind: type, form: str) -> None:
    layers = [perturbed(make(kind, 5, reflectors=form, dtype=torch.float64)) for _ in range(3)]
    x = torch.randn(2, 5, dtype=torch.float64)
    base = layers[0]

    def call(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(base, tensors, (x,))

    def twin_call(tensors: dict[str, Tensor]) -> Tensor:
        return functional_call(_Twin(base), {f"layer.{name}": t for name, t in tensors.items()}, (x,))

    with torch.no_grad():
        for out, layer in zip(vmap(call, in_dims=(0, None))(_stacked_parameters(layers), x), layers, strict=True):
            assert_same(out, twin(layer, x), 10)
        own = dict(base.named_parameters())
        tangents = {name: torch.randn_like(t) * t.requires_grad for name, t in own.items()}
        _, out = jvp(lambda tensors: call(tensors, x), (own,), (tangents,))
        _, expected = jvp(twin_call, (own,), (tangents,))
        assert_within(out, expected, 10, 10)
    trained = {name: p for name, p in base.named_parameters() if p.requires_grad}
    gradients = grad(lambda tensors: call(tensors, x).sum())(trained)
    expected = torch.autograd.grad(twin(base, x).sum(), list(trained.values()))
    for gradient, reference in zip(gradients.values(), expected, strict=True):
        assert_within(gradient, reference, 10, 10)


def _stacked_parameters(layers: list[Any]) -> dict[str, Tensor]:
    parameters = [dict(layer.named_parameters()) for layer in layers]
    return {name: torch.stack([own[name] for own in parameters]) for name in parameters[0]}


class _Twin(nn.Module):
    """The dense twin of a layer, with the layer's own parameters, for ``functional_call``."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return twin(self.layer, x)


def test_export() -> None:
    layer = perturbed(LinearSVD(6, 4)).eval()
    x = torch.randn(3, 6)
    with torch.no_grad():
        program = torch.export.export(layer, (x,))
    assert set(program.state_dict) == set(layer.state_dict())
    assert_same(program.module()(x), layer(x), 24)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_gives_the_dtype_that_linear_gives(kind: type) -> None:
    layer, linear, x = make(kind, 6), nn.Linear(6, 6), torch.randn(3, 6)
    for training in (True, False):
        layer.train(training)
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(training):
            assert layer(x).dtype == linear(x).dtype == torch.bfloat16
            assert layer(x.bfloat16()).dtype == torch.bfloat16
            assert_same(layer(x), F.linear(x.double(), layer.weight.double(), layer.bias.double()), 6)
        assert layer(x).dtype == torch.float32
    for double in (layer.double(), linear.double()):
        with torch.autocast("cpu", torch.bfloat16):
            assert double(x.double()).dtype == torch.float64


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
def test_jagged_nested_tensors(kind: type) -> None:
    """All rows of all parts, in training, in inference and within ``cached()``."""
    layer = perturbed(make(kind, 5, dtype=torch.float64))
    parts = [torch.randn(n, 5, dtype=torch.float64, requires_grad=True) for n in (2, 0, 3)]
    tensors = [*parts, *(p for p in layer.parameters() if p.requires_grad)]
    weights = [torch.randn(len(part), 5, dtype=torch.float64) for part in parts]
    for context in (torch.enable_grad, cached):
        with context():
            nested = layer(torch.nested.as_nested_tensor(parts, layout=torch.jagged))
            assert nested.is_nested and nested.layout is torch.jagged
            outputs = nested.unbind()
            for out, part in zip(outputs, parts, strict=True):
                assert_within(out, twin(layer, part), 10, 20)
            loss = sum((out * w).sum() for out, w in zip(outputs, weights, strict=True))
            expected = sum((twin(layer, part) * w).sum() for part, w in zip(parts, weights, strict=True))
            for g, reference in zip(*(torch.autograd.grad(t, tensors) for t in (loss, expected)), strict=True):
                assert_within(g, reference, 10, 20)
    with pytest.raises(TypeError, match=r"should have the layout torch\.jagged; got torch\.strided"):
        layer(torch.nested.nested_tensor([part.detach() for part in parts]))


# repr and errors


def test_repr() -> None:
    assert repr(LinearSVD(3, 4, False, spectrum=spectrum.positive())) == (
        "LinearSVD(in_features=3, out_features=4, bias=False, reflectors='compact', spectrum=positive())"
    )
    assert repr(LinearSymmetric(3, reflectors="full")) == (
        "LinearSymmetric(features=3, bias=True, reflectors='full', spectrum=free())"
    )
    assert repr(LinearOrthogonal(3, 4)) == (
        "LinearOrthogonal(in_features=3, out_features=4, bias=True, reflectors='compact')"
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: LinearSVD(0, 3), ValueError, "`in_features` should be at least 1; got 0"),
        (lambda: LinearOrthogonal(3, -1), ValueError, "`out_features` should be at least 1; got -1"),
        (
            lambda: LinearSVD(3, 3, reflectors="thin"),
            ValueError,
            "`reflectors` should be 'compact' or 'full'; got 'thin'",
        ),
        (
            lambda: LinearSVD(3, 3, init="zeros"),
            ValueError,
            "`init` should be 'haar' or 'identity' or 'linear'; got 'zeros'",
        ),
        (
            lambda: LinearOrthogonal(3, 3, init="linear"),
            ValueError,
            "`init` should be 'haar' or 'identity'; got 'linear'",
        ),
        (lambda: LinearSVD(3, 3, spectrum=spectrum.positive), TypeError, "`spectrum` should be one of fasth.spectrum"),
        (lambda: LinearSymmetric(3, spectrum=torch.exp), TypeError, "`spectrum` should be one of fasth.spectrum"),
        (
            lambda: LinearSVD(3, 4).inverse(torch.ones(4)),
            ValueError,
            "`inverse` needs a square layer; got 3 input and 4",
        ),
        (lambda: LinearOrthogonal(3, 4).inverse(torch.ones(4)), ValueError, "`inverse` needs a square layer"),
        (lambda: LinearSVD(3, 4).logabsdet(), ValueError, "`logabsdet` needs a square layer"),
        (
            lambda: LinearSVD(3, 4)(torch.ones(2, 4)),
            ValueError,
            r"`input` should have last dimension 3; got shape \(2, 4\)",
        ),
        (
            lambda: LinearOrthogonal(3, 4)(torch.ones(2, 4)),
            ValueError,
            r"`input` should have last dimension 3; got shape \(2, 4\)",
        ),
        (lambda: LinearSVD(2, 2)([1.0, 2.0]), TypeError, "`input` should be a tensor; got list"),
        (
            lambda: LinearSVD(3, 4)(torch.ones(3).double()),
            TypeError,
            "should have one dtype and device; got torch.float64",
        ),
        (
            lambda: LinearSVD(3, 4, dtype=torch.cfloat),
            TypeError,
            "float32, float64, bfloat16 or float16; got torch.complex64",
        ),
        (lambda: LinearSymmetric(3, dtype=torch.cfloat), TypeError, "got torch.complex64"),
        (lambda: LinearOrthogonal(3, 4, dtype=torch.int64), TypeError, "got torch.int64"),
        (lambda: LinearSVD.from_linear(nn.Conv2d(1, 1, 1)), TypeError, "`linear` should be an nn.Linear; got Conv2d"),
        (lambda: LinearSymmetric.from_linear(nn.Linear(3, 4)), ValueError, "`linear` should be square"),
        (lambda: LinearSymmetric.from_linear(nn.Linear(3, 3)), ValueError, "symmetric"),
    ],
)
def test_errors_say_what_was_expected(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("layer", [LinearSVD(4, 4), LinearSymmetric(4), LinearOrthogonal(4, 4)])
def test_inverse_of_a_wrong_shape(layer: Any) -> None:
    for shape in ((2, 5), (2, 1), ()):
        with pytest.raises(ValueError, match="`y` should have last dimension 4"):
            layer.inverse(torch.randn(shape))
