"""Layers as transforms of torch.distributions, against autograd's Jacobian and a distribution in closed form."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layers import FORMS
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.distributions import (
    ComposeTransform,
    Independent,
    MultivariateNormal,
    Normal,
    TransformedDistribution,
    constraints,
    transform_to,
)
from torch.distributions.transforms import TanhTransform

from fasth import (
    RNNSVD,
    Conv1dSVD,
    Conv2dSVD,
    LinearOrthogonal,
    LinearSVD,
    LinearSymmetric,
    SVDTransform,
    cached,
    spectrum,
    to_dense,
)
from fasth.flows import whiten_
from fasth.tools.twins import perturbed

POSITIVE = spectrum.positive()
LAYERS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "LinearSVD": (lambda **o: LinearSVD(5, 5, spectrum=POSITIVE, **o), (5,)),
    "LinearSVD, free": (lambda **o: LinearSVD(5, 5, **o), (5,)),
    "LinearSVD, no bias": (lambda **o: LinearSVD(5, 5, False, spectrum=spectrum.between(0.5, 2), **o), (5,)),
    "LinearSVD, 1": (lambda **o: LinearSVD(1, 1, spectrum=POSITIVE, **o), (1,)),
    "LinearSymmetric": (lambda **o: LinearSymmetric(5, spectrum=POSITIVE, **o), (5,)),
    "LinearOrthogonal": (lambda **o: LinearOrthogonal(5, 5, **o), (5,)),
    "Conv1dSVD": (lambda **o: Conv1dSVD(3, 3, 1, spectrum=POSITIVE, **o), (3, 4)),
    "Conv2dSVD": (lambda **o: Conv2dSVD(3, 3, 1, spectrum=POSITIVE, **o), (3, 2, 4)),
}
every_layer = pytest.mark.parametrize(("make", "event"), LAYERS.values(), ids=LAYERS.keys())


def transform_of(make: Any, **options: Any) -> SVDTransform:
    return SVDTransform(perturbed(make(dtype=torch.float64, **options)))


@every_layer
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_the_determinant_is_that_of_the_jacobian(
    make: Any, event: tuple[int, ...], form: str, batch: tuple[int, ...], training: bool
) -> None:
    transform = transform_of(make, reflectors=form)
    transform.train(training)
    x = torch.randn(*batch, *event, dtype=torch.float64)
    y = transform(x)
    assert y.shape == x.shape
    torch.testing.assert_close(transform.inv(y), x)
    logabsdet = transform.log_abs_det_jacobian(x, y)
    assert logabsdet.shape == batch
    torch.testing.assert_close(transform.inv.log_abs_det_jacobian(y, x), -logabsdet)
    for sample, value in zip(x.reshape(-1, *event), logabsdet.reshape(-1), strict=True):
        forward = jacobian(transform, sample).reshape(sample.numel(), -1)
        torch.testing.assert_close(torch.linalg.slogdet(forward).logabsdet, value)
        backward = jacobian(transform.inv, sample).reshape(sample.numel(), -1)
        torch.testing.assert_close(torch.linalg.slogdet(backward).logabsdet, -value)


@every_layer
def test_domain_and_codomain(make: Any, event: tuple[int, ...]) -> None:
    transform = transform_of(make)
    x = torch.randn(7, *event, dtype=torch.float64)
    for constraint in (transform.domain, transform.codomain):
        assert constraint.event_dim == len(event) and not constraint.is_discrete
        assert constraint.check(x).shape == (7,) and constraint.check(x).all()
    assert transform.bijective and transform.event_dim == len(event)
    assert transform.forward_shape(x.shape) == transform.inverse_shape(x.shape) == x.shape


@pytest.mark.parametrize("kind", [LinearSVD, LinearSymmetric, LinearOrthogonal])
def test_density_is_that_of_the_normal_distribution_with_this_covariance(kind: Any) -> None:
    layer = perturbed(kind(4, dtype=torch.float64) if kind is LinearSymmetric else kind(4, 4, dtype=torch.float64))
    base = Independent(Normal(torch.zeros(4, dtype=torch.float64), 1.0), 1)
    flow = TransformedDistribution(base, SVDTransform(layer))
    W, bias = layer.weight, layer.bias
    expected = MultivariateNormal(bias, W @ W.mT)
    y = torch.randn(6, 4, dtype=torch.float64)
    torch.testing.assert_close(flow.log_prob(y), expected.log_prob(y))
    assert flow.batch_shape == () and flow.event_shape == (4,)
    assert flow.sample((3, 2)).shape == (3, 2, 4)
    parameters = list(layer.parameters())
    gradients, references = (
        torch.autograd.grad(distribution.log_prob(y).mean(), parameters) for distribution in (flow, expected)
    )
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, reference)


def test_images() -> None:
    base = Independent(Normal(torch.zeros(3, 2, 4), 1.0), 3)
    flow = TransformedDistribution(base, SVDTransform(perturbed(Conv2dSVD(3, 3, 1, spectrum=POSITIVE))))
    assert flow.rsample((5,)).shape == (5, 3, 2, 4)
    assert flow.log_prob(torch.randn(5, 3, 2, 4)).shape == (5,)


def test_scalars_become_vectors() -> None:
    """A base without events gets those of the transform."""
    flow = TransformedDistribution(Normal(torch.zeros(7, 4), 1.0), SVDTransform(LinearSVD(4, 4)))
    assert flow.batch_shape == (7,) and flow.event_shape == (4,)
    assert flow.log_prob(flow.sample()).shape == (7,)


def test_composed_and_trained() -> None:
    transforms = [
        SVDTransform(LinearSVD(3, 3, spectrum=POSITIVE)),
        TanhTransform(),
        SVDTransform(LinearOrthogonal(3, 3)),
    ]
    x = torch.randn(5, 3)
    composed = ComposeTransform(transforms)
    torch.testing.assert_close(composed.inv(composed(x)), x, rtol=1e-3, atol=1e-3)
    assert composed.log_abs_det_jacobian(x, composed(x)).shape == (5,)
    model = nn.ModuleList([t for t in transforms if isinstance(t, SVDTransform)])
    assert len(list(model.parameters())) == 5
    data = torch.randn(200, 3) @ torch.tensor([[2.0, 1, 0], [0, 0.5, 0], [0, 0, 3]]) + 1
    flow = TransformedDistribution(Normal(torch.zeros(3), 1.0), [transforms[0], transforms[2]])
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.1), []
    for _ in range(150):
        loss = -flow.log_prob(data).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    mean, covariance = data.mean(0), data.mT.cov(correction=0)
    assert losses[-1] < -MultivariateNormal(mean, covariance).log_prob(data).mean() + 0.01


def test_cache() -> None:
    transform = SVDTransform(LinearSVD(4, 4), cache_size=1)
    x = torch.randn(3, 4)
    assert transform.inv(transform(x)) is x
    assert transform.with_cache(1) is transform
    assert transform.with_cache(0)._cache_size == 0 and transform.with_cache(0).layer is transform.layer
    for other in (copy.deepcopy(transform), pickle.loads(pickle.dumps(transform))):
        torch.testing.assert_close(other(x), transform(x))
        assert other.inv.inv is other
    with pytest.raises(ValueError, match="cache_size"):
        SVDTransform(LinearSVD(4, 4), cache_size=2)


def test_is_a_module() -> None:
    transform = SVDTransform(LinearSVD(4, 4))
    assert set(transform.state_dict()) == {f"layer.{name}" for name in transform.layer.state_dict()}
    assert transform == transform and transform != SVDTransform(transform.layer) and len({transform}) == 1
    assert "LinearSVD(in_features=4" in repr(transform)
    transform.double()
    assert transform(torch.randn(2, 4, dtype=torch.float64)).dtype == torch.float64
    assert isinstance(transform_to(transform.domain).domain, constraints.Constraint)


def test_a_singular_layer() -> None:
    layer = LinearSVD(3, 3)
    with torch.no_grad():
        layer.sigma[0] = 0
    transform, x = SVDTransform(layer), torch.randn(2, 3)
    y = transform(x)
    assert (transform.log_abs_det_jacobian(x, y) == -torch.inf).all()
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        transform.inv(y)


WHITENED = {name: case for name, case in LAYERS.items() if name not in ("LinearOrthogonal", "LinearSVD, no bias")}


@pytest.mark.parametrize(("make", "event"), WHITENED.values(), ids=WHITENED.keys())
@pytest.mark.parametrize("form", FORMS)
def test_whitened_layer_gives_uncorrelated_outputs(make: Any, event: tuple[int, ...], form: str) -> None:
    layer = perturbed(make(dtype=torch.float64, reflectors=form))
    d = event[0]
    U, _, Vh = torch.linalg.svd(layer.weight.reshape(d, d))
    channels = torch.randn(d, d, dtype=torch.float64) + 2 * torch.eye(d)
    x = torch.einsum("ij,bj...->bi...", channels, torch.randn(500, *event, dtype=torch.float64)) + 3
    assert whiten_(layer, x) is layer
    y = layer(x).movedim(1, -1).reshape(-1, d)
    torch.testing.assert_close(y.mean(0), torch.zeros(d, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        y.mT.cov(correction=0).reshape(d, d), torch.eye(d, dtype=torch.float64), atol=1e-6, rtol=0
    )
    W = layer.weight.reshape(d, d)
    U_now, _, Vh_now = torch.linalg.svd(W)
    torch.testing.assert_close(U_now @ Vh_now, U @ Vh, atol=1e-6, rtol=0)


def test_whitening_keeps_to_the_spectrum_and_the_condition_number() -> None:
    x = torch.randn(500, 4, dtype=torch.float64) * torch.tensor([1.0, 1e-2, 1e-9, 0])
    layer = whiten_(LinearSVD(4, 4, dtype=torch.float64), x)
    torch.testing.assert_close(layer.svd.cond().item(), 100.0)
    layer = whiten_(LinearSVD(4, 4, dtype=torch.float64, spectrum=spectrum.between(0.5, 2)), x)
    assert 0.5 <= layer.svd.norm(-2) and layer.svd.norm(2) <= 2
    assert whiten_(LinearSVD(4, 4, bias=False), x.float()).bias is None


@pytest.mark.parametrize(
    ("layer", "x", "error", "message"),
    [
        (LinearOrthogonal(4, 4), torch.randn(9, 4), TypeError, "`layer` should have singular values"),
        (nn.Linear(4, 4), torch.randn(9, 4), TypeError, "`layer` should be one of"),
        (LinearSVD(4, 4), torch.randn(9, 5), ValueError, r"the input should have shape \(batch, 4\)"),
        (LinearSVD(4, 4), torch.randn(1, 4), ValueError, "`x` should be finite, and not the same in all rows"),
        (LinearSVD(4, 4), torch.full((9, 4), torch.nan), ValueError, "`x` should be finite"),
    ],
)
def test_errors_of_whitening(layer: nn.Module, x: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        whiten_(layer, x)


def test_a_symmetric_layer_is_whitened_whatever_its_signs() -> None:
    layer = LinearSymmetric(4, dtype=torch.float64)
    with torch.no_grad():
        layer.sigma[:2] = -1
    x = torch.randn(99, 4, dtype=torch.float64) @ (torch.randn(4, 4, dtype=torch.float64) + 2 * torch.eye(4))
    y = whiten_(layer, x)(x)
    torch.testing.assert_close(y.mT.cov(correction=0), torch.eye(4, dtype=torch.float64))


def test_whitening_of_a_cached_layer() -> None:
    layer = LinearSVD(4, 4)
    with cached(), pytest.raises(RuntimeError, match=r"outside of `fasth\.cached"):
        whiten_(layer, torch.randn(9, 4))


@every_layer
def test_a_layer_that_was_replaced(make: Any, event: tuple[int, ...]) -> None:
    flow = to_dense(SVDTransform(make()))
    with pytest.raises(TypeError, match=r"`layer` should be one of LinearSVD, .*; got (Linear|Conv1d|Conv2d)"):
        flow(torch.randn(2, *event))


def test_whitening_takes_an_eps_between_zero_and_one() -> None:
    with pytest.raises(ValueError, match="`eps` should be above 0 and at most 1; got 0"):
        whiten_(LinearSVD(4, 4), torch.randn(9, 4), eps=0)


@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        (lambda: LinearSVD(3, 4), ValueError, "`SVDTransform` needs a square layer; got 3 input and 4 output"),
        (lambda: LinearOrthogonal(3, 4), ValueError, "`SVDTransform` needs a square layer"),
        (lambda: Conv2dSVD(3, 3, 2), ValueError, "`SVDTransform` needs a 1×1 kernel, equal channels, stride 1"),
        (lambda: Conv1dSVD(3, 3, 1, padding=1), ValueError, "`SVDTransform` needs a 1×1 kernel"),
        (lambda: LinearSVD(3, 3, rank=2), ValueError, "`SVDTransform` needs a layer of full rank; got LinearSVD"),
        (lambda: nn.Linear(3, 3), TypeError, "`layer` should be one of LinearSVD, .*; got Linear"),
        (lambda: RNNSVD(3, 3), TypeError, "`layer` should be one of LinearSVD, .*; got RNNSVD"),
    ],
)
def test_errors_say_what_was_expected(layer: Callable[[], nn.Module], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SVDTransform(layer())


def test_wrong_input() -> None:
    flow: Any = TransformedDistribution(Normal(torch.zeros(4), 1.0), SVDTransform(LinearSVD(4, 4)))
    with pytest.raises(ValueError):
        flow.log_prob(torch.randn(2, 5))
    assert isinstance(flow.sample(), Tensor)


ONE_CALL = {
    "LinearSVD": (lambda: LinearSVD(6, 6, spectrum=spectrum.positive(), init="linear"), (5, 6)),
    "full": (lambda: LinearSVD(6, 6, reflectors="full", spectrum=spectrum.between(0.5, 2)), (5, 6)),
    "LinearSymmetric": (lambda: LinearSymmetric(6, spectrum=spectrum.positive()), (5, 6)),
    "LinearOrthogonal": (lambda: LinearOrthogonal(6, 6), (5, 6)),
    "Conv1dSVD": (lambda: Conv1dSVD(3, 3, 1, spectrum=spectrum.positive()), (2, 3, 7)),
    "Conv2dSVD": (lambda: Conv2dSVD(3, 3, 1, spectrum=spectrum.positive()), (2, 3, 4, 5)),
}


@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
@pytest.mark.parametrize("is_cached", [False, True], ids=["", "cached"])
@pytest.mark.parametrize("name", ONE_CALL)
def test_a_result_and_its_logabsdet_are_one_call_that_computes_sigma_once(name, is_cached, inverse, monkeypatch):
    make, shape = ONE_CALL[name]
    layer, x = perturbed(make()).double(), torch.randn(shape, dtype=torch.float64)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    sign = -1 if inverse else 1
    expected = (layer.inverse if inverse else layer)(x), sign * layer.logabsdet(*x.shape[2:])
    wanted = torch.autograd.grad(expected[0].sin().sum() + expected[1], parameters)
    calls = []
    kind = type(getattr(layer, "spectrum", None))
    if hasattr(layer, "spectrum"):
        evaluate = kind.__call__
        monkeypatch.setattr(kind, "__call__", lambda self, raw: calls.append(1) or evaluate(self, raw))
    with cached() if is_cached else contextlib.nullcontext():
        y, logabsdet = (layer.inverse_and_logabsdet if inverse else layer.forward_and_logabsdet)(x)
        found = torch.autograd.grad(y.sin().sum() + logabsdet, parameters)
    for actual, value in zip((y, logabsdet, *found), (*expected, *wanted), strict=True):
        torch.testing.assert_close(actual, value)
    once = 2 if is_cached and not inverse else 1  # a cached weight is formed by itself
    assert len(calls) == hasattr(layer, "spectrum") * once


@pytest.mark.parametrize("make", [lambda: LinearSVD(4, 4, rank=2), lambda: Conv2dSVD(4, 4, 1, rank=2)])
def test_a_layer_of_lower_rank_has_the_determinant_zero(make):
    layer = make()
    x = torch.randn(2, 4, *([1, 1] if isinstance(layer, Conv2dSVD) else []))
    assert layer.logabsdet(*x.shape[2:]).item() == layer.forward_and_logabsdet(x)[1].item() == -torch.inf


def test_call_and_ladj_is_both_of_any_batch():
    for layer, shape in (
        (LinearSVD(4, 4, spectrum=spectrum.positive(), init="linear"), (3, 2, 4)),
        (Conv2dSVD(4, 4, 1, init="linear"), (3, 2, 4, 5, 6)),
        (Conv2dSVD(4, 4, 1, init="linear"), (4, 5, 6)),
    ):
        transform, x = SVDTransform(layer), torch.randn(shape)
        y, ladj = transform.call_and_ladj(x)
        torch.testing.assert_close(y, transform(x))
        torch.testing.assert_close(ladj, transform.log_abs_det_jacobian(x, y))


def test_forward_and_logabsdet_of_a_layer_without_a_determinant():
    with pytest.raises(ValueError, match="`forward_and_logabsdet` needs a square layer; got 3 input and 4 output"):
        LinearSVD(3, 4).forward_and_logabsdet(torch.ones(2, 3))
