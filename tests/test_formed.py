"""W of both sides at once, as a GPU forms it, against the definition: the same operations on the CPU."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from dense import assert_close, value_and_gradients
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fasth import functional
from fasth.functional import svd_dense
from fasth.reflections import definition, formed
from fasth.reflections.autograd import diagonal_signs, with_sign_guard
from fasth.reflections.formed import columns_at_once, svd_at_once
from fasth.reflections.plan import COMPACT, FORMS
from fasth.tools.problems import nearly_parallel

SHAPES = [(1, 1), (20, 20), (7, 20), (20, 7), (70, 65)]


def expected(R: Tensor, sigma: Tensor | None = None) -> Tensor:
    """U diag(sigma) Vᵀ from the definition."""
    k = min(R.shape)
    sigma = R.new_ones(k) if sigma is None else sigma
    U, V = ((side.triu(1) + torch.eye(*side.shape, dtype=R.dtype))[:k] for side in (R.mT, R))
    first = (definition.householder(torch.eye(k, side.shape[1], dtype=R.dtype), side) for side in (U, V))
    U_columns, V_columns = (rows.mT for rows in first)
    return (U_columns * (sigma * diagonal_signs(R, k))) @ V_columns.mT


def drawn(shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    R, sigma = torch.randn(shape, dtype=torch.float64), torch.randn(min(shape), dtype=torch.float64)
    return [R.to(dtype), sigma.to(dtype)]


def at_once(R: Tensor, sigma: Tensor | None = None) -> Tensor:
    return svd_at_once(R, sigma, None, COMPACT)


@pytest.mark.parametrize("with_sigma", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_the_definition(shape, with_sigma, dtype):
    """Compares all but the diagonal, whose gradient only keeps its sign."""
    tensors = drawn(shape, dtype)[: 1 + with_sigma]
    (value,), (dR, *dsigma) = value_and_gradients(at_once, tensors)
    (right,), (of_R, *of_sigma) = value_and_gradients(expected, [t.double() for t in tensors])
    guard = with_sign_guard(torch.zeros(shape), tensors[0].float())
    torch.testing.assert_close(dR.diagonal().float(), guard.diagonal(), rtol=1e-2, atol=0)
    assert {t.dtype for t in (value, dR, *dsigma)} == {dtype}
    found = [value], [dR.fill_diagonal_(0), *dsigma]
    assert_close(found, ([right], [of_R.fill_diagonal_(0), *of_sigma]), roundings=16 if dtype.itemsize > 2 else 4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("r", "d", "k"), [(1, 1, 1), (20, 20, 20), (7, 20, 7), (30, 20, 5), (20, 20, 12)])
def test_columns_are_those_of_the_definition(r, d, k, form, dtype):
    V = torch.randn(r, d, dtype=torch.float64).to(dtype)
    if form == "full":
        V[r // 2] = 0

    def by_definition(V: Tensor) -> Tensor:
        Y = {"full": V, "triangular": V[:d].triu(), "compact": V[:d].triu(1) + torch.eye(min(r, d), d, dtype=V.dtype)}
        return definition.householder(torch.eye(k, d, dtype=V.dtype), Y[form]).mT

    found = value_and_gradients(lambda V: columns_at_once(V, k, FORMS.index(form)), [V])
    right = value_and_gradients(by_definition, [V.double()])
    if form == "compact":
        for gradient in (found[1][0], right[1][0]):
            gradient.fill_diagonal_(0)
    if form == "full":
        assert not found[1][0][r // 2].any(), "a zero reflector has a zero gradient"
    assert_close(found, right, roundings=16 if dtype.itemsize > 2 else 4)


@pytest.mark.parametrize(("n", "m"), [(20, 20), (9, 20), (20, 9)])
def test_full_reflectors_of_two_sides(n, m):
    U, V, sigma = (torch.randn(shape, dtype=torch.float64) for shape in ((n, n), (m, m), (min(n, m),)))

    def by_definition(U: Tensor, V: Tensor, sigma: Tensor) -> Tensor:
        Q_U, Q_V = (definition.householder(torch.eye(len(t), dtype=t.dtype), t).mT[:, : len(sigma)] for t in (U, V))
        return Q_U * sigma @ Q_V.mT

    found = value_and_gradients(lambda U, V, sigma: svd_at_once(U, sigma, V, FORMS.index("full")), [U, V, sigma])
    assert_close(found, value_and_gradients(by_definition, [U, V, sigma]), roundings=64)


@pytest.mark.parametrize("form", ["full", "compact"])
def test_a_symmetric_weight(form):
    Q, sigma = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((12, 12), (12,)))
    W = svd_at_once(Q, sigma, Q, FORMS.index(form))
    on_cpu = svd_dense(Q, sigma, Q, form=form)
    torch.testing.assert_close(W, on_cpu)
    g = torch.randn_like(W)
    for found, right in zip(*(torch.autograd.grad(one, (Q, sigma), g) for one in (W, on_cpu)), strict=True):
        torch.testing.assert_close(found, right)


def test_a_symmetric_weight_in_bfloat16_is_rounded_once():
    Q, sigma = torch.randn(40, 40).bfloat16(), torch.rand(40).bfloat16() + 1
    W = svd_at_once(Q, sigma, Q, COMPACT)
    exact = svd_at_once(Q.double(), sigma.double(), Q.double(), COMPACT)
    assert W.dtype == torch.bfloat16
    torch.testing.assert_close(W.double(), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_one_gradient_at_a_time(needs):
    R, sigma = (t.requires_grad_(need) for t, need in zip(drawn((9, 12), torch.float64), needs, strict=True))
    at_once(R, sigma).sum().backward()
    assert (R.grad is not None, sigma.grad is not None) == needs


def test_second_derivatives():
    R, sigma = (t.requires_grad_() for t in drawn((5, 7), torch.float64))

    def twice(form) -> Tensor:
        (once,) = torch.autograd.grad(form(R, sigma).sin().sum(), sigma, create_graph=True)
        return torch.autograd.grad(once.square().sum(), R)[0].fill_diagonal_(0)

    torch.testing.assert_close(twice(at_once), twice(expected))


@pytest.mark.parametrize("under_autocast", [True, False])
def test_products_may_be_tf32_under_autocast_alone(under_autocast, monkeypatch):
    """There W is rounded to half precision before it multiplies. Everywhere else they are IEEE float32."""
    entered = []

    @contextmanager
    def recorded(t: Tensor):
        entered.append(t.shape)
        yield

    monkeypatch.setattr(functional, "forms_at_once", lambda *tensors: True)  # as on a GPU
    monkeypatch.setattr(formed, "ieee_products", recorded)
    R, sigma = (t.requires_grad_() for t in drawn((20, 20), torch.float32))
    with torch.autocast("cpu", torch.bfloat16, enabled=under_autocast):
        W = svd_dense(R, sigma)
    W.sum().backward()
    assert W.dtype == torch.float32 and len(entered) == (0 if under_autocast else 3)  # A, W, and the gradient of A


def test_every_product_that_makes_W_is_ieee(monkeypatch):
    """Also where the user allows TF32: only gradients may use it."""
    inside, outside = [], []

    @contextmanager
    def recorded(t: Tensor):
        inside.append(t)
        yield
        inside.pop()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            if operation.overloadpacket.__name__ in ("mm", "bmm", "baddbmm", "addmm") and not inside:
                outside.append(operation)
            return operation(*args, **(kwargs or {}))

    monkeypatch.setattr(formed, "ieee_products", recorded)
    U, V, sigma = (torch.randn(shape) for shape in ((9, 9), (9, 9), (9,)))
    with Products():
        for sides in ((U, None), (U, V), (U, U)):
            svd_at_once(sides[0], sigma, sides[1], COMPACT)
        columns_at_once(U, 5, COMPACT)
    assert not outside


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_length_of_reflectors(scale):
    R, sigma = (t.requires_grad_() for t in drawn((20, 20), torch.float32))
    far = (R.detach() * scale).requires_grad_()
    W = at_once(far, sigma)
    right = expected(far.detach().double(), sigma.detach().double())
    torch.testing.assert_close(W.double(), right, rtol=1e-5, atol=1e-5)
    W.sum().backward()
    assert far.grad.isfinite().all()


@pytest.mark.parametrize("reflectors", ["gaussian", "repeated", "nearly parallel", "drifting"])
@pytest.mark.parametrize("d", [512, 1024])
def test_one_block_keeps_Q_orthogonal(reflectors, d):
    """In float32, for reflectors that make B ill-conditioned: ‖QᵀQ − I‖₁ / (d·eps) below 30, as LAPACK's tests ask."""
    V = torch.randn(d, d)
    V = {"repeated": V[:1].expand_as(V), "nearly parallel": nearly_parallel(V), "drifting": V.cumsum(0)}.get(
        reflectors, V
    )
    Q = at_once(V.clamp(-3, 3).triu(1) + torch.eye(d)).double()  # of U there are only signs
    assert torch.linalg.matrix_norm(Q @ Q.mT - torch.eye(d), 1) < 30 * d * torch.finfo(torch.float32).eps


def test_cpus_form_it_by_the_core_and_gpus_at_once(monkeypatch):
    formed_at_once = []
    monkeypatch.setattr(functional, "svd_at_once", lambda *arguments: formed_at_once.append(arguments))
    svd_dense(torch.randn(20, 20), None)
    assert not formed_at_once
    svd_dense(torch.empty(600, 600, device="meta"), None)
    assert formed_at_once


def test_in_one_compiled_graph(monkeypatch):
    monkeypatch.setattr(functional, "forms_at_once", lambda *tensors: True)
    R, sigma = (t.requires_grad_() for t in drawn((12, 9), torch.float64))
    expected_W = svd_dense(R, sigma)
    W = torch.compile(svd_dense, fullgraph=True, backend="aot_eager")(R, sigma)
    torch.testing.assert_close(W, expected_W)
    g = torch.randn_like(W)
    for found, right in zip(*(torch.autograd.grad(one, (R, sigma), g) for one in (W, expected_W)), strict=True):
        torch.testing.assert_close(found, right)
