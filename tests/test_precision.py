"""The policy of docs/precision.md: what is stored in a dtype is orthogonal to that dtype's rounding, at any size."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layers import ALL, CASES, Case, of_every, output, trained
from torch import Tensor, nn

from fasth import LinearOrthogonal, LinearSVD, LinearSymmetric, spectrum
from fasth.functional import svd_thin
from fasth.tools.twins import orthogonality, perturbed

LOW = [torch.bfloat16, torch.float16]
SIZES = [64, 256, 1024]


def eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def relative(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return ((actual - expected).norm() / expected.norm()).item()


def in_double(layer: Any) -> Any:
    """The layer with the numbers that this one stores, computing in float64."""
    return copy.deepcopy(layer).double()


@pytest.mark.parametrize("d", SIZES)
def test_orthogonal_to_the_rounding_of_the_dtype(d: int, dtype: torch.dtype) -> None:
    layer = LinearOrthogonal(d, d, bias=False, dtype=dtype)
    assert layer.weight.dtype == dtype
    assert orthogonality(layer.weight) < 1
    x = torch.randn(8, d, dtype=torch.float64).to(dtype)
    # Products of rows are rounded once for each side in low precision, and once for each block otherwise.
    assert relative(layer(x), in_double(layer)(x.double())) <= (1 if dtype in LOW else 32) * eps(dtype)


@pytest.mark.parametrize("d", SIZES)
@pytest.mark.parametrize("kind", [LinearSVD, LinearSymmetric])
def test_both_factors_at_any_size(kind: Any, d: int, dtype: torch.dtype) -> None:
    layer = kind(d, dtype=dtype) if kind is LinearSymmetric else kind(d, d, dtype=dtype)
    with torch.no_grad():
        layer.sigma.uniform_(0.5, 2)
    matrix = layer.eig if kind is LinearSymmetric else layer.svd
    for Q in {id(Q): Q for Q in (matrix.U, matrix.V)}.values():
        assert orthogonality(Q.dense()) < 1
    x = torch.randn(8, d, dtype=torch.float64).to(dtype)
    assert relative(layer(x), in_double(layer)(x.double())) <= (1 if dtype in LOW else 64) * eps(dtype)


@pytest.mark.parametrize("d", SIZES)
def test_a_matrix_is_held_to_the_rounding_of_the_dtype(d: int, dtype: torch.dtype) -> None:
    W = torch.randn(d, d, dtype=torch.float64)
    layer = LinearSVD(d, d, dtype=dtype).set_weight_(W)
    assert relative(layer.weight, W) <= (1 if dtype in LOW else 64) * eps(dtype)


@pytest.mark.parametrize("to", LOW)
def test_orthogonal_after_training_in_low_precision(to: torch.dtype) -> None:
    layer = LinearSVD(256, 256, spectrum=spectrum.around(1, 0.1)).to(to)
    x, y = torch.randn(2, 16, 256).to(to)
    optimizer, losses = torch.optim.SGD(layer.parameters(), lr=0.02), []
    for _ in range(10):
        loss = (layer(x) - y).float().square().sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert orthogonality(layer.svd.U.dense()) < 1 and orthogonality(layer.svd.V.dense()) < 1
    assert 0.9 <= layer.svd.sigma.min() and layer.svd.sigma.max() <= 1.1


@of_every(ALL)
@pytest.mark.parametrize("to", [torch.float64, *LOW])
def test_to_a_dtype(case: Case, to: torch.dtype) -> None:
    layer = perturbed(case.make()).to(to)
    assert {t.dtype for t in layer.state_dict().values()} == {to}
    x = case.input(to).requires_grad_()
    out = output(layer, x)
    out.float().square().sum().backward()
    assert out.dtype == x.grad.dtype == to and x.grad.isfinite().all()
    assert all(p.grad.dtype == to and p.grad.isfinite().all() for p in trained(layer))
    assert relative(out, output(in_double(layer), x.double())) <= 8 * eps(to)
    with torch.no_grad():  # in eval the weight itself is rounded to the dtype, as a dense layer's is
        assert relative(output(layer.eval(), x), output(in_double(layer), x.double())) <= 8 * eps(to)


@of_every(ALL)
@pytest.mark.parametrize("to", LOW)
def test_autocast(case: Case, to: torch.dtype) -> None:
    layer, dense, x = perturbed(case.make()), case.dense(), case.input()
    if to == torch.float16 and isinstance(dense, nn.LSTM):
        pytest.skip("nn.LSTM itself raises an error under float16 autocast on a CPU")
    expected = output(in_double(layer), x.double())
    for training in (True, False):
        layer.train(training)
        for inputs in (x, x.to(to)):
            with torch.autocast("cpu", to), torch.set_grad_enabled(training):
                out = output(layer, inputs)
                assert out.dtype == output(dense, inputs).dtype
            assert relative(out, expected) <= 16 * eps(to)
    layer.train()
    with torch.autocast("cpu", to):
        loss = output(layer, x).float().square().sum()
    loss.backward()
    reference = in_double(layer)
    reference.zero_grad()
    output(reference, x.double()).square().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in trained(layer))
    gradients, references = (torch.cat([p.grad.double().flatten() for p in trained(m)]) for m in (layer, reference))
    assert relative(gradients, references) <= 16 * eps(to)


@pytest.mark.parametrize("d", SIZES)
def test_factors_are_formed_in_full_under_autocast(d: int) -> None:
    layer = LinearOrthogonal(d, d)
    svd = LinearSVD(d, d, init="haar").svd
    with torch.autocast("cpu", torch.bfloat16):
        W, U = layer.weight, svd.U.dense()
        x = torch.randn(8, d)
        error = relative(layer(x), in_double(layer)(x.double()))
    assert W.dtype == U.dtype == torch.float32
    assert orthogonality(W) < 1 and orthogonality(U) < 1
    assert error <= eps(torch.bfloat16)


@pytest.mark.parametrize("to", LOW)
@pytest.mark.parametrize("rank", [None, 4])
def test_many_rows_under_autocast_are_multiplied_as_those_of_a_dense_layer(to: torch.dtype, rank: int | None) -> None:
    """W is formed in float32; its product with the rows, and the gradient of W, have autocast's dtype."""
    layer, x = perturbed(LinearSVD(16, 24, rank=rank)), torch.randn(10_000, 16, requires_grad=True)
    g = torch.randn(10_000, 24).to(to)
    with torch.autocast("cpu", to):
        out = layer(x)
        if rank is None:
            expected = F.linear(x, layer.weight, layer.bias)
        else:
            A, B = svd_thin(layer.reflectors_U, layer.sigma, layer.reflectors_V)
            expected = F.linear(F.linear(x, A), B, layer.bias)
    assert out.dtype == to and torch.equal(out, expected)
    tensors = (x, *trained(layer))
    for found, reference in zip(*(torch.autograd.grad(y, tensors, g) for y in (out, expected)), strict=True):
        assert found.dtype == torch.float32
        assert relative(found, reference) <= 64 * eps(torch.float32)


def test_a_product_of_an_operator_is_as_precise_under_autocast_for_many_rows() -> None:
    W, X = LinearSVD(8, 8, init="haar").svd, torch.randn(8, 4000)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(W @ X, W @ X.double().float()) and (W @ X).dtype == torch.float32
    assert relative(W @ X, W.dense().double() @ X.double()) < 100 * eps(torch.float32)


def test_a_scaled_loss() -> None:
    """float16 with ``GradScaler``, as on a GPU."""
    model = nn.Sequential(*(case.make() for name, case in CASES.items() if name == "LinearSVD"), nn.Linear(4, 1))
    scaler = torch.amp.GradScaler("cpu")
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.05), []
    x, y = torch.randn(32, 6), torch.randn(32, 1)
    for _ in range(20):
        with torch.autocast("cpu", torch.float16):
            loss = (model(x).float() - y).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@of_every(CASES)
@pytest.mark.parametrize("to", LOW)
def test_autocast_on_a_gpu(case: Case, to: torch.dtype) -> None:
    layer, dense, x = perturbed(case.make(device="cuda")), case.dense().cuda(), case.input().cuda()
    with torch.autocast("cuda", to):
        out = output(layer, x)
        assert out.dtype == output(dense, x).dtype
    out.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in trained(layer))
    assert relative(out, output(in_double(layer), x.double())) <= 16 * eps(to)
