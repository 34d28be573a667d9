"""Numbers: scales, angles, LAPACK as the referee, NaN and infinity."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.linalg import lapack

from fasth import householder
from fasth.tools.problems import DIRECTIONS, assert_close, from_definition, with_gradients
from fasth.tools.twins import orthogonality

pytestmark = pytest.mark.usefixtures("path")
each_direction = pytest.mark.parametrize("direction", DIRECTIONS, ids=lambda d: "-".join(k for k in d if d[k]) or "Q")


@pytest.mark.every_level
@pytest.mark.parametrize("d", [1, 16, 100, 512, 2048])
@pytest.mark.parametrize("triangular", [False, True], ids=["full", "triangular"])
def test_orthogonal_to_rounding(d, triangular, precise, device, record_property):
    V = torch.randn(d, d, dtype=precise, device=device)
    measure = orthogonality(householder(torch.eye(d, dtype=precise, device=device), V, triangular=triangular))
    record_property("orthogonality", measure)
    assert measure < 3


@pytest.mark.every_level
@pytest.mark.parametrize(
    "make",
    [
        lambda V: V[:1].expand_as(V),
        lambda V: V[:1] + torch.finfo(V.dtype).eps ** 0.5 * V,
        lambda V: V[:1] + torch.finfo(V.dtype).eps * V,
        lambda V: V * torch.logspace(-30, 30, len(V), dtype=V.dtype, device=V.device)[:, None],
        lambda V: V * torch.logspace(-12, 12, V.shape[1], dtype=V.dtype, device=V.device),
        lambda V: V.cumsum(0),
    ],
    ids=["repeated", "nearly parallel", "an ulp apart", "rows of all scales", "columns of all scales", "drifting"],
)
@each_direction
def test_hard_reflectors(make, precise, direction, device):
    V = make(torch.randn(128, 128, dtype=precise, device=device))
    eye = torch.eye(128, dtype=precise, device=device)
    Q = householder(eye, V, block_size=32, **direction)
    assert orthogonality(Q) < 30
    assert_close(Q, from_definition(eye, V, **direction), 1.0, 128)


@pytest.mark.every_level
@pytest.mark.parametrize("log2_scale", [-140, -126, -100, -50, 50, 100, 120])
@each_direction
def test_scale_does_not_matter(log2_scale, direction, device):
    """In float32, down to subnormal numbers and up to the largest: the same Q, and gradients in proportion."""
    x = torch.randn(4, 20, device=device, requires_grad=True)
    V = torch.randint(-8, 9, (20, 20), device=device).float().requires_grad_()  # exact at any scale
    scaled = (V.detach().double() * 2.0**log2_scale).float().requires_grad_()
    expected = with_gradients(householder, x, V, block_size=8, **direction)
    actual = with_gradients(householder, x, scaled, block_size=8, **direction)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])
    if log2_scale > -120:  # beyond, the gradient itself is too large for float32
        assert torch.isfinite(actual[2]).all()
        smallest = 2.0 ** (log2_scale - 149)  # what a gradient below float32's normal range is rounded to
        torch.testing.assert_close(actual[2].double() * 2.0**log2_scale, expected[2].double(), rtol=1e-6, atol=smallest)


@pytest.mark.parametrize("log10_scale", [-30, 30])
def test_gradients_are_finite_at_extreme_scales(log10_scale, device):
    x = torch.randn(4, 20, device=device, requires_grad=True)
    V = (torch.randn(20, 20, device=device).double() * 10.0**log10_scale).float().requires_grad_()
    out, _, of_V = with_gradients(householder, x, V)
    reference = with_gradients(from_definition, x, V.detach().double().requires_grad_())
    assert_close(out, reference[0], x.norm(), 20)
    torch.testing.assert_close(
        of_V.double() * 10.0**log10_scale, reference[2] * 10.0**log10_scale, rtol=1e-3, atol=1e-4
    )


def test_a_zero_reflector_gets_a_zero_gradient(device):
    x, V = torch.randn(4, 8, device=device), torch.randn(8, 8, device=device)
    V[[0, 3, 7]] = 0
    V.requires_grad_()
    householder(x, V, block_size=3).pow(3).sum().backward()
    assert torch.equal(V.grad[[0, 3, 7]], torch.zeros(3, 8, device=device))
    assert V.grad[[1, 2, 4, 5, 6]].abs().amin(0).min() > 0


@pytest.mark.every_level
@pytest.mark.parametrize(("d", "r"), [(1, 1), (7, 7), (64, 64), (100, 60), (513, 513)])
def test_lapack_is_the_referee(d, r, precise, device):
    """Reflectors from geqrf; their product with a matrix from ormqr."""
    matrix = torch.randn(d, r, dtype=precise).numpy()
    geqrf, ormqr = lapack.get_lapack_funcs(("geqrf", "ormqr"), (matrix,))
    qr, tau, _, info = geqrf(matrix, lwork=64 * d)
    assert info == 0
    V = np.triu(qr.T, 1) + np.eye(r, d) * (tau != 0)[:, None]  # tau = 0 is LAPACK's identity
    V = torch.from_numpy(V.astype(matrix.dtype)).to(device)
    columns = torch.randn(d, 5, dtype=precise)
    for transpose in (False, True):
        expected, _, info = ormqr("L", "T" if transpose else "N", qr, tau, columns.numpy(), lwork=64 * d)
        assert info == 0
        for block_size in (None, 1, 5, 64):
            actual = householder(columns.mT.to(device), V, transpose=transpose, triangular=True, block_size=block_size)
            assert_close(actual.mT.cpu(), torch.from_numpy(expected), columns.norm(), r)


@pytest.mark.every_level
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["x", "V", "g"])
@each_direction
def test_nan_and_infinity_pass_through(bad, where, direction, device):
    x = torch.randn(4, 10, device=device)
    V, g = torch.randn(10, 10, device=device), torch.randn(4, 10, device=device)
    {"x": x, "V": V, "g": g}[where][1, 5] = bad
    x.requires_grad_(), V.requires_grad_()
    out = householder(x, V, block_size=4, **direction)
    of_x, of_V = torch.autograd.grad(out, (x, V), g)
    assert out.isfinite().all() == (where == "g")
    if where == "x":
        assert out[[0, 2, 3]].isfinite().all(), "other rows are untouched"
    assert of_x.isfinite().all() == (where == "x")
    assert not of_V.isfinite().all()


def test_what_is_left_of_the_diagonal_is_ignored_even_if_it_is_nan(device):
    x, V = torch.randn(4, 10, device=device), torch.randn(10, 10, device=device)
    expected = householder(x, V, triangular=True)
    below = torch.ones(10, 10, device=device).tril(-1).bool()
    assert torch.equal(householder(x, V.masked_fill(below, float("nan")), triangular=True), expected)
