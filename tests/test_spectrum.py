"""Spectrum maps keep their promise exactly, whatever the parameter, and come with an inverse and finite gradients."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fasth import LinearSVD, spectrum
from fasth.spectrum import Spectrum, around, between, free, normalized, positive

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

BOUNDED = [
    between(0.1, 0.3),
    between(-1, 1),
    between(0, 1),
    between(1e-6, 1e6),
    between(-3, -2.9),
    between(-1e39, 3.3e38),
    between(-1e308, 1.7e308),
    between(0.1, 0.1 + 1e-2),
    between(0, 1e-4),
    around(1, 0.1),
    around(0.3, 0.2),
    around(0, 2),
    around(1e4, 1e3),
]
MAPS = [free(), positive(), normalized(), *BOUNDED]

each = pytest.mark.parametrize("s", MAPS, ids=repr)


def extremes(dtype: torch.dtype) -> Tensor:
    """Numbers of both signs from the smallest to the largest of the dtype."""
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    middle = [-1.0001, -1.0, -0.9999, 1e-3, 0.5, 1.5, 5.0, 9.0, 15.0, 17.0, 20.0, 40.0, 41.0, 88.0, 90.0, 104.0, 710.0]
    sizes = torch.tensor([0.0, smallest, info.tiny, *middle, info.max**0.5, info.max / 2, info.max], dtype=dtype)
    return torch.cat((sizes, -sizes))


def assert_promise(s: Any, sigma: Tensor) -> None:
    assert sigma.isfinite().all()
    if s == positive():
        assert (sigma > 0).all()
    elif s == normalized():
        largest = sigma.abs().amax(-1)
        assert ((largest == 1) | (largest == 0)).all()
    elif s != free():
        info = torch.finfo(sigma.dtype)
        assert (sigma.double() >= max(s.low, info.min)).all() and (sigma.double() <= min(s.high, info.max)).all()


@each
def test_promise_holds_at_the_extremes(s: Spectrum, dtype: torch.dtype, device: str) -> None:
    for raw in (extremes(dtype), extremes(dtype).unsqueeze(-1)):
        raw = raw.to(device).requires_grad_()
        sigma = s(raw)
        assert sigma.dtype == dtype and sigma.shape == raw.shape
        assert_promise(s, sigma)
        (gradient,) = torch.autograd.grad(sigma.sum(), raw)
        assert gradient.isfinite().all()


@each
def test_promise_holds_through_optimisation(s: Any) -> None:
    """Large steps of either sign, as an optimizer might take after a bad batch."""
    raw = torch.zeros(8, requires_grad=True)
    steepest = max(abs(s.low), abs(s.high)) if s in BOUNDED else 1.0
    optimizer = torch.optim.SGD([raw], lr=1e30 / max(1.0, min(steepest, 1e38)))
    for step in range(20):
        optimizer.zero_grad()
        (s(raw) * (-1.0) ** torch.arange(8) * (step % 3 - 1)).sum().backward()
        optimizer.step()
        assert_promise(s, s(raw))


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5),
    st.floats(-1e300, 1e300),
    st.floats(1e-3, 1e3),
)
def test_promise_holds_for_any_number(dtype: torch.dtype, numbers: list[float], low: float, width: float) -> None:
    info = torch.finfo(dtype)
    raw = torch.tensor([min(max(x, info.min), info.max) for x in numbers], dtype=dtype)
    high = low + width * max(abs(low), 1.0)
    for s in (positive(), normalized(), between(low, high), around(low, high - low)):
        try:
            assert_promise(s, s(raw))
        except ValueError as error:  # out of the range of the dtype, or between two of its numbers
            assert "at least two numbers" in str(error)


@pytest.mark.parametrize("s", BOUNDED, ids=repr)
def test_bounded_maps_are_monotone_and_reach_their_bounds(s: Any, precise: torch.dtype) -> None:
    if math.isinf(torch.tensor(max(-s.low, s.high), dtype=precise).item()):
        return
    raw = torch.linspace(-12, 12, 4001, dtype=torch.float64).to(precise)
    sigma = s(raw)
    rounding = 4 * torch.finfo(precise).eps * max(abs(s.low), abs(s.high))
    assert (sigma.double().diff() >= -rounding).all()
    ends = s(torch.tensor([-800.0, 800.0], dtype=precise)).double()
    assert abs(ends[0] - s.low) <= rounding and abs(ends[1] - s.high) <= rounding


@pytest.mark.parametrize("s", BOUNDED, ids=repr)
def test_bounded_maps_are_their_formula(s: Any) -> None:
    raw = torch.linspace(-20, 20, 401, dtype=torch.float64)
    expected = s.low * torch.sigmoid(-raw) + s.high * torch.sigmoid(raw)
    assert torch.allclose(s(raw), expected, rtol=1e-14, atol=1e-15 * max(abs(s.low), abs(s.high)))


def test_small_singular_values_of_a_wide_interval_are_exact() -> None:
    s = between(1e-6, 1e6)
    raw = torch.linspace(-30, -2, 100)
    expected = 1e-6 + (1e6 - 1e-6) * torch.sigmoid(raw.double())
    assert torch.allclose(s(raw).double(), expected, rtol=1e-5, atol=0)


def test_around_starts_at_its_center(dtype: torch.dtype) -> None:
    for center, eps in ((1, 0.1), (0.3, 0.2), (-0.7, 0.1), (0, 3), (1e4, 1e3)):
        assert around(center, eps)(torch.zeros(2, dtype=dtype)).tolist() == [torch.tensor(center, dtype=dtype)] * 2


def test_positive_is_softplus() -> None:
    raw = torch.linspace(-300, 300, 2001, dtype=torch.float64)
    assert torch.allclose(positive()(raw), torch.logaddexp(raw, torch.zeros_like(raw)), rtol=1e-14, atol=0)


@each
def test_gradients_are_those_of_the_formula(s: Any) -> None:
    raw = (torch.randn(6, dtype=torch.float64) * 3).requires_grad_()
    if s in BOUNDED and max(abs(s.low), abs(s.high)) > 1e10:
        return  # finite differences would overflow, or lose everything
    assert torch.autograd.gradcheck(s, raw, rtol=1e-4) and torch.autograd.gradgradcheck(s, raw, rtol=1e-4)


def reached(s: Any, dtype: torch.dtype) -> Tensor:
    return s(torch.linspace(-6, 6, 49, dtype=torch.float64).to(dtype))


@each
def test_inverse_gives_back_what_the_map_reaches(s: Any, dtype: torch.dtype) -> None:
    sigma = reached(s, dtype)
    again = s(s.inverse(sigma))
    assert s.inverse(sigma).dtype == dtype
    scale = sigma.double().abs() if s == positive() else sigma.double().abs().max()
    assert ((again.double() - sigma.double()).abs() <= 32 * torch.finfo(dtype).eps * scale).all()


def test_inverse_of_positive_over_all_magnitudes(precise: torch.dtype) -> None:
    sigma = torch.logspace(-30, 30, 121, dtype=torch.float64).to(precise)
    again = positive()(positive().inverse(sigma))
    # raw = log sigma is up to 70, and its rounding is a relative one of sigma.
    assert ((again - sigma).abs() <= 80 * torch.finfo(precise).eps * sigma).all()


@each
def test_inverse_projects_and_leaves_a_gradient(s: Any, precise: torch.dtype) -> None:
    """Any sigma, zeros and negative ones too: what it becomes keeps the promise and can still be trained."""
    if s in BOUNDED and max(abs(s.low), abs(s.high)) > 1e30:
        return
    for sigma in (torch.tensor([3.0, 1.0, 0.0, -2.0]), torch.zeros(3), torch.tensor([-1e30, 1e30]), torch.ones(1)):
        raw = s.inverse(sigma.to(precise))
        assert raw.isfinite().all()
        raw.requires_grad_()
        projected = s(raw)
        assert_promise(s, projected)
        steepest = torch.stack([torch.autograd.grad(x, raw, retain_graph=True)[0].abs() for x in projected]).amax(0)
        if s != normalized() or len(sigma) > 1:  # one number over its own size is constant
            assert (steepest > 0).all()
        if s in BOUNDED:
            nearest = sigma.double().clamp(s.low, s.high)
            assert ((projected.double() - nearest).abs() <= 1.1e-3 * (s.high - s.low)).all()
            outside = (sigma < s.low - (s.high - s.low)) | (sigma > s.high + (s.high - s.low))
            assert (steepest[outside] > 9e-4 * (s.high - s.low)).all()


def test_inverse_keeps_the_rounding_of_a_bound() -> None:
    """The singular values of an orthogonal matrix, 1 ± rounding, stay that under between(0, 1)."""
    s, sigma = between(0, 1), 1 + torch.tensor([-3e-7, 0.0, 3e-7, 1e-6])
    assert ((s(s.inverse(sigma)) - 1).abs() < 4e-7).all()


def test_zero_becomes_the_rounding_of_the_largest() -> None:
    sigma = positive()(positive().inverse(torch.tensor([[200.0, 0.0], [0.0, 0.0]])))
    eps = torch.finfo(torch.float32).eps
    assert torch.allclose(sigma, torch.tensor([[200.0, 200 * eps], [eps, eps]]), rtol=1e-5, atol=0)


def test_normalized_starts_with_one_largest(dtype: torch.dtype) -> None:
    sigma = torch.tensor([[0.5, -2.0, 2.0, 1.999, 0.0], [1.0] * 5, [0.0] * 5], dtype=dtype)
    expected = torch.tensor([[0.25, -1.0, 0.99, 0.99, 0.0], [1.0] + [0.99] * 4, [0.0] * 5], dtype=dtype)
    raw = normalized().start(sigma)
    assert torch.equal(raw, expected)
    assert torch.equal(normalized()(raw), raw)
    assert torch.equal(normalized().start(raw), raw)
    for s in (free(), positive()):  # which are differentiable everywhere
        assert torch.equal(s.start(sigma.abs()), s.inverse(sigma.abs()))


def test_normalized_keeps_directions_and_batches(precise: torch.dtype) -> None:
    raw = torch.tensor([[3.0, -4.0, 0.0], [1e-40, 0.0, 1e-41], [0.0, 0.0, 0.0]], dtype=precise)
    sigma = normalized()(raw)
    assert sigma[0].tolist() == [0.75, -1.0, 0.0] and sigma[1, 0] == 1 and sigma[2].tolist() == [0.0, 0.0, 0.0]
    assert torch.equal(normalized()(8 * raw[:1]), sigma[:1])


@each
def test_maps_are_values(s: Spectrum) -> None:
    for other in (copy.deepcopy(s), pickle.loads(pickle.dumps(s))):
        assert other == s and hash(other) == hash(s) and repr(other) == repr(s)
        assert torch.equal(other(torch.ones(2)), s(torch.ones(2)))


def test_repr_is_how_to_make_it() -> None:
    for text in ("free()", "positive()", "between(0.5, 2.0)", "around(1.0, 0.1)", "normalized()"):
        s = eval(text, vars(spectrum))
        assert repr(s) == text and isinstance(s, Spectrum)
    assert between(0.9, 1.1) != around(1, 0.1)


@each
def test_maps_compile_and_batch(s: Spectrum) -> None:
    raw = torch.randn(3, 4, dtype=torch.float64)
    assert torch.equal(torch.compile(s.__call__, backend="eager", fullgraph=True)(raw), s(raw))
    assert torch.equal(torch.func.vmap(s)(raw), s(raw))


ERRORS: list[tuple[Callable[[], Any], str]] = [
    (lambda: between(1, 1), "`low` should be below `high`; got 1 and 1"),
    (lambda: between(2, 1), "`low` should be below `high`; got 2 and 1"),
    (lambda: between(0, math.inf), "`high` should be a finite number; got inf"),
    (lambda: between(math.nan, 1), "`low` should be a finite number; got nan"),
    (lambda: between("0", 1), "`low` should be a finite number; got '0'"),
    (lambda: around(1, 0), "`eps` should be positive; got 0"),
    (lambda: around(1, -0.1), "`eps` should be positive; got -0.1"),
    (lambda: around(math.inf, 1), "`center` should be a finite number; got inf"),
    (lambda: around("1", 1), "`center` should be a finite number; got '1'"),
    (lambda: around(1e308, 1e308), "`center ± eps` should be a finite number; got inf"),
    (lambda: around(1, 1e-9)(torch.zeros(2)), r"around\(1.0, 1e-09\) should contain at least two numbers.*float32"),
    (lambda: around(0.1, 1e-10)(torch.zeros(2)), "should contain at least two numbers"),
    (lambda: between(1e39, 1e40)(torch.zeros(2)), "should contain at least two numbers"),
    (lambda: between(0, 1)(torch.zeros(2, dtype=torch.int64)), "got torch.int64"),
]


@pytest.mark.parametrize("call, message", ERRORS, ids=[str(i) for i in range(len(ERRORS))])
def test_errors_say_what_was_expected(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("s", [spectrum.between(0, 1), spectrum.between(1, 2), spectrum.around(1, 0.1)], ids=str)
def test_a_new_layer_is_not_stuck_at_a_bound(s):
    """Where σ = 1 is a bound itself, the map is flat, and no gradient would come through."""
    layer = LinearSVD(6, 6, spectrum=s)
    assert ((layer.svd.sigma - 1).abs() <= 1.1e-3).all()
    layer.svd.sigma.sum().backward()
    assert (layer.sigma.grad > 5e-4).all()
