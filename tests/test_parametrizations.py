"""Tensors of any module kept orthogonal, or held as SVDs: whatever torch's own parametrization takes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dense import assert_within, value_and_gradients
from layers import holds
from torch import Tensor, nn
from torch.nn.utils import parametrizations as of_torch
from torch.nn.utils import parametrize

from fasth import SVD, parametrizations, spectrum
from fasth.parametrizations import orthogonal, svd
from fasth.tools.twins import orthogonality, perturbed

MODULES: dict[str, tuple[Callable[..., Any], str, tuple[int, ...] | None]] = {
    "square": (lambda **o: nn.Linear(6, 6, **o), "weight", (3, 6)),
    "tall": (lambda **o: nn.Linear(4, 9, **o), "weight", (3, 4)),
    "wide": (lambda **o: nn.Linear(9, 4, **o), "weight", (3, 9)),
    "1×1": (lambda **o: nn.Linear(1, 1, **o), "weight", (3, 1)),
    "a column": (lambda **o: nn.Linear(1, 5, **o), "weight", (3, 1)),
    "a row": (lambda **o: nn.Linear(5, 1, **o), "weight", (3, 5)),
    "several blocks": (lambda **o: nn.Linear(70, 50, **o), "weight", (3, 70)),
    "embedding": (lambda **o: nn.Embedding(12, 5, **o), "weight", None),
    "LSTM, hidden": (lambda **o: nn.LSTM(5, 6, **o), "weight_hh_l0", (4, 2, 5)),
    "LSTM, input": (lambda **o: nn.LSTM(5, 6, **o), "weight_ih_l0", (4, 2, 5)),
    "GRU": (lambda **o: nn.GRU(5, 6, **o), "weight_hh_l0", (4, 2, 5)),
    "LSTM cell": (lambda **o: nn.LSTMCell(5, 6, **o), "weight_ih", (3, 5)),
    "attention": (lambda **o: nn.MultiheadAttention(6, 2, **o), "in_proj_weight", None),
    "Conv1d": (lambda **o: nn.Conv1d(4, 3, 2, **o), "weight", (2, 4, 6)),
    "Conv2d": (lambda **o: nn.Conv2d(2, 3, (3, 2), **o), "weight", (2, 2, 5, 5)),
    "Conv2d, 1×1": (lambda **o: nn.Conv2d(2, 3, 1, **o), "weight", (2, 2, 5, 5)),
    "ConvTranspose2d": (lambda **o: nn.ConvTranspose2d(2, 3, 3, **o), "weight", (2, 2, 5, 5)),
    "Bilinear": (lambda **o: nn.Bilinear(3, 4, 5, **o), "weight", None),
}
every_module = pytest.mark.parametrize(("make", "name", "shape"), MODULES.values(), ids=MODULES.keys())
both = pytest.mark.parametrize("kind", [orthogonal, svd])


def orthogonal_error(W: Tensor) -> float:
    """LAPACK's measure, whose limit is 30, of the worst matrix of a batch, of its rows where it is wide."""
    tall = W if W.shape[-2] >= W.shape[-1] else W.mT
    return max(orthogonality(Q) for Q in tall.reshape(-1, *tall.shape[-2:]))


def close(actual: Tensor, expected: Tensor, roundings: float = 100) -> None:
    assert_within(actual, expected.detach().double(), max(expected.abs().max().item(), 1.0), roundings)


@every_module
def test_orthogonal_starts_where_that_of_torch_does(
    make: Any, name: str, shape: Any, precise: torch.dtype, path: str
) -> None:
    module = make(dtype=precise)
    other = of_torch.orthogonal(copy.deepcopy(module), name)
    original = getattr(module, name)
    cond = torch.linalg.cond(original.detach().double()).max().item()  # how much QR magnifies a change
    assert orthogonal(module, name) is module
    W = getattr(module, name)
    assert W.shape == getattr(other, name).shape and W.dtype == precise and W.requires_grad
    assert orthogonal_error(W) < 30
    close(W, getattr(other, name), max(original.shape) * cond)
    assert module.parametrizations[name].original is original  # known to an optimizer that was there before


@every_module
def test_svd_starts_at_the_weight(make: Any, name: str, shape: Any, dtype: torch.dtype) -> None:
    module = make(dtype=dtype)
    W = getattr(module, name).detach().clone()
    svd(module, name)
    assert getattr(module, name).dtype == dtype and getattr(module, name).requires_grad
    close(getattr(module, name), W, 20)
    sigma = module.parametrizations[name].original1
    expected = torch.linalg.svdvals(W.double())
    assert_within(sigma, expected, max(1.0, expected.max().item()), 20)


@every_module
@both
def test_forward_and_training(make: Any, name: str, shape: Any, kind: Any, path: str) -> None:
    module = make()
    if shape is None:
        return
    s = spectrum.between(0.5, 2)
    kind(module, name, **({"spectrum": s} if kind is svd else {}))
    x = torch.randn(shape)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    losses = []
    for _ in range(10):
        out = module(x)
        loss = (out if isinstance(out, Tensor) else out[0]).square().sum()
        optimizer.zero_grad()
        loss.backward()
        if len(losses) == 0:
            W = getattr(module, name)
            assert min(W.shape[-2:]) == 1 or any(
                p.grad.abs().max() > 0 for n, p in module.named_parameters() if "original" in n
            )
        optimizer.step()
        losses.append(loss.item())
    W = getattr(module, name).detach()
    if kind is orthogonal:
        assert orthogonal_error(W) < 30
    else:
        assert holds(s(module.parametrizations[name].original1), s)
        values = torch.linalg.svdvals(W.double())
        assert 0.5 - 1e-5 <= values.min() and values.max() <= 2 + 1e-5


@both
@pytest.mark.parametrize("shape", [(6, 6), (4, 7), (7, 4), (2, 3, 5, 4), (2, 4, 4), (1, 1), (0, 3, 3)])
def test_gradients_are_those_of_the_definition(kind: Any, shape: tuple[int, ...], path: str) -> None:
    holder = nn.Module()
    holder.weight = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    kind(holder)
    perturbed(holder)
    weight = holder.parametrizations.weight
    originals = [p.detach() for p in weight.parameters()]
    twin = definition_of_orthogonal if kind is orthogonal else definition_of_svd
    for actual, expected in zip(
        value_and_gradients(weight[0], originals), value_and_gradients(twin, originals), strict=True
    ):
        for t, reference in zip(actual, expected, strict=True):
            torch.testing.assert_close(t, reference, rtol=1e-11, atol=1e-11)


def product(V: Tensor, signs: Tensor) -> Tensor:
    """(H₁⋯H_k diag(signs))[:, :k] of compact reflectors, one reflection at a time: (k, d), (k,) → (d, k)."""
    k, d = V.shape
    Q = torch.eye(d, dtype=V.dtype)
    for v in V.triu(1) + torch.eye(k, d, dtype=V.dtype):
        Q = Q - 2 * torch.outer(Q @ v, v) / (v @ v)
    return Q[:, :k] * signs


def signs(X: Tensor) -> Tensor:
    """The signs on the diagonal."""
    return torch.where(X.detach().diagonal() < 0, -1.0, 1.0).to(X)


def definition_of_orthogonal(X: Tensor) -> Tensor:
    wide = X.shape[-2] < X.shape[-1]
    flat = X.reshape(-1, *X.shape[-2:])
    made = [product(M, signs(M)).mT if wide else product(M.mT, signs(M)) for M in flat]
    return torch.stack(made).reshape(X.shape) if made else 1 * X


def definition_of_svd(X: Tensor, sigma: Tensor) -> Tensor:
    k = sigma.shape[-1]
    flat = zip(X.reshape(-1, *X.shape[-2:]), sigma.reshape(-1, k), strict=True)
    made = [product(M.mT[:k], signs(M)) * s @ product(M[:k], torch.ones(k)).mT for M, s in flat]
    return torch.stack(made).reshape(X.shape) if made else X + 0 * sigma.sum()


# Assignment


@every_module
def test_assignment(make: Any, name: str, shape: Any, dtype: torch.dtype) -> None:
    module, other = orthogonal(make(dtype=dtype), name), svd(make(dtype=dtype), name)
    for m in (module, other):
        before = {n: p for n, p in m.named_parameters()}
        W = torch.randn(getattr(m, name).shape).to(dtype)
        if m is module:
            W = torch.linalg.qr(W.double() if W.shape[-2] >= W.shape[-1] else W.double().mT).Q
            W = (W if W.shape == getattr(m, name).shape else W.mT).to(dtype)
        setattr(m, name, W)
        close(getattr(m, name), W, 20)
        assert all(before[n] is p for n, p in m.named_parameters())  # an optimizer still knows them


def test_assigning_what_is_not_orthogonal_and_what_does_not_fit() -> None:
    module, other = orthogonal(nn.Linear(5, 7)), of_torch.orthogonal(nn.Linear(5, 7))
    module.weight = other.weight = torch.randn(7, 5)
    close(module.weight, other.weight)
    before = module.state_dict()
    before = {name: t.clone() for name, t in before.items()}
    with pytest.raises(ValueError, match=r"the assigned tensor should have shape \(7, 5\); got \(5, 7\)"):
        module.weight = torch.randn(5, 7)
    with pytest.raises(ValueError, match=r"dtype torch\.float64 while `original` has dtype torch\.float32"):
        module.weight = torch.randn(7, 5, dtype=torch.float64)
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())


CASTS = [torch.float64, torch.bfloat16, torch.float16]


@both
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("shape", [(3, 4), (4, 3), (2, 5, 4)])
def test_assignment_after_a_change_of_dtype(kind: Any, cast: torch.dtype, shape: tuple[int, ...]) -> None:
    holder = nn.Module()
    holder.weight = nn.Parameter(torch.randn(shape))
    kind(holder).to(cast)
    W = torch.eye(*shape[-2:]).expand(shape).to(cast)
    holder.weight = W
    assert holder.weight.dtype == cast
    close(holder.weight, W, 20)
    with pytest.raises(ValueError, match=rf"dtype torch\.float32 while `original0?` has dtype {cast}"):
        holder.weight = torch.randn(shape)


@both
@pytest.mark.parametrize("cast", CASTS)
def test_transferred_after_a_change_of_dtype(kind: Any, cast: torch.dtype) -> None:
    source, target = kind(nn.Linear(3, 4)).to(cast), nn.Linear(3, 4).to(cast)
    W = source.weight.detach().clone()
    parametrize.transfer_parametrizations_and_params(source, target)
    assert target.weight.dtype == cast and torch.equal(target.weight, W)
    created = nn.Module()
    parametrize.transfer_parametrizations_and_params(source, created, "weight")
    assert torch.equal(created.weight, W)


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("shape", [(5, 5), (7, 4), (4, 7)])
@pytest.mark.parametrize("orthogonal_map", [None, "matrix_exp", "cayley", "householder"])
def test_checkpoints_of_torch_after_a_change_of_dtype(
    cast: torch.dtype, shape: tuple[int, int], orthogonal_map: str | None
) -> None:
    computing = torch.promote_types(cast, torch.float32)
    other = of_torch.orthogonal(nn.Linear(*reversed(shape), dtype=computing), orthogonal_map=orthogonal_map)
    module = orthogonal(nn.Linear(*reversed(shape)), orthogonal_map=orthogonal_map).to(cast)
    module.load_state_dict(copy.deepcopy(other).to(cast).state_dict())
    expected = other.to(cast).to(computing).weight  # of the rounded values
    assert module.weight.dtype == cast
    close(module.weight, expected.to(cast), 20)


def test_singular_values_outside_the_spectrum_become_the_nearest() -> None:
    module = svd(nn.Linear(4, 4, bias=False), spectrum=spectrum.between(0.5, 2))
    module.weight = torch.diag(torch.tensor([10.0, 1.0, 0.7, 0.01]))
    expected = torch.tensor([2 - 1.5e-3, 1.0, 0.7, 0.5 + 1.5e-3])
    torch.testing.assert_close(torch.linalg.svdvals(module.weight), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(5, 5), (7, 5), (5, 7), (3, 5, 5)])
def test_orthogonal_from_special_matrices(shape: tuple[int, ...]) -> None:
    holder = nn.Module()
    holder.weight = nn.Parameter(torch.randn(shape))
    orthogonal(holder)
    for W in (torch.eye(*shape[-2:]).expand(shape), -torch.eye(*shape[-2:]).expand(shape)):
        holder.weight = W
        assert torch.equal(holder.weight, W)
    for W in (torch.zeros(shape), torch.ones(shape)):  # of no full rank: some orthogonal matrix
        holder.weight = W
        assert orthogonal_error(holder.weight) < 30


# Compatibility with torch's parametrizations


@both
def test_cached(kind: Any) -> None:
    module, calls = kind(nn.Linear(5, 5)), []
    module.parametrizations.weight[0].register_forward_hook(lambda *_: calls.append(1))
    with parametrize.cached():
        assert module.weight is module.weight
        module(torch.randn(2, 5)).sum().backward()
    assert len(calls) == 1
    assert module.weight is not module.weight


@both
def test_state_and_copies(kind: Any) -> None:
    module = perturbed(kind(nn.LSTM(4, 6), "weight_hh_l0"))
    with torch.no_grad():
        expected = module.weight_hh_l0.clone()
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = kind(nn.LSTM(4, 6), "weight_hh_l0")
    other.load_state_dict(torch.load(file, weights_only=True))
    for m in (other, copy.deepcopy(module)):
        assert torch.equal(m.weight_hh_l0, expected)
    empty = kind(nn.LSTM(4, 6, device="meta"), "weight_hh_l0")
    empty.load_state_dict(module.state_dict(), assign=True)
    assert torch.equal(empty.weight_hh_l0, expected)
    assert all(t.is_contiguous() for t in module.state_dict().values())


@both
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 0, 3)])
def test_no_elements(kind: Any, shape: tuple[int, ...]) -> None:
    holder = nn.Module()
    holder.weight = nn.Parameter(torch.empty(shape))
    kind(holder)
    assert holder.weight.shape == shape and holder.weight.requires_grad
    holder.weight.sum().backward()
    holder.weight = torch.empty(shape)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_linear_layer_without_inputs() -> None:
    layer = orthogonal(nn.Linear(0, 3))
    assert torch.equal(layer(torch.empty(2, 0)), layer.bias.expand(2, 3))


@pytest.mark.parametrize("shape", [(5, 5), (7, 4), (4, 7), (2, 5, 3)])
@pytest.mark.parametrize("orthogonal_map", [None, "matrix_exp", "cayley", "householder"])
def test_checkpoints_of_torch(shape: tuple[int, ...], orthogonal_map: str | None) -> None:
    if orthogonal_map == "cayley" and shape[-1] != shape[-2]:
        pytest.skip("torch's own fails where it is not square")
    theirs, ours, again = (nn.Module() for _ in range(3))
    for holder in (theirs, ours, again):
        holder.weight = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    of_torch.orthogonal(theirs, "weight", orthogonal_map)
    with torch.no_grad():
        original = theirs.parametrizations.weight.original
        noise = 0.3 * torch.randn_like(original)
        # The signs of torch's own Householder map stand there, too, and have to be exactly 1 or -1.
        noise.diagonal(dim1=-2, dim2=-1).zero_()
        original.add_(noise)
    for holder in (ours, again):
        orthogonal(holder, "weight", orthogonal_map)
    ours.load_state_dict(theirs.state_dict())
    close(ours.weight, theirs.weight)
    assert orthogonal_error(ours.weight) < 30
    again.load_state_dict(ours.state_dict())  # and our own, as before
    assert torch.equal(again.weight, ours.weight)


@both
def test_removed(kind: Any) -> None:
    module = kind(nn.Linear(4, 6))
    W = module.weight.detach().clone()
    parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
    assert type(module) is nn.Linear and isinstance(module.weight, nn.Parameter)
    assert torch.equal(module.weight, W)


def test_with_other_parametrizations() -> None:
    class Twice(nn.Module):
        def forward(self, W: Tensor) -> Tensor:
            return 2 * W

        def right_inverse(self, W: Tensor) -> Tensor:
            return W / 2

    for kind in (orthogonal, svd):
        module = kind(nn.Linear(4, 4))
        W = module.weight.detach()
        parametrize.register_parametrization(module, "weight", Twice())
        close(module.weight, 2 * W)
        module.weight = 2 * torch.eye(4)
        close(module.weight, 2 * torch.eye(4))
    module = orthogonal(parametrize.register_parametrization(nn.Linear(4, 4), "weight", Twice()))
    assert orthogonal_error(module.weight) < 30
    with pytest.raises(ValueError, match="`weight` should not be parametrized yet"):
        svd(module)


def test_buffers_frozen_weights_and_the_mode() -> None:
    holder = nn.Module()
    holder.register_buffer("M", torch.randn(4, 3))
    for kind in (orthogonal, svd):
        h = kind(copy.deepcopy(holder), "M")
        assert not list(h.parameters()) and not h.M.requires_grad
    linear = nn.Linear(3, 4).requires_grad_(False).eval()
    for kind in (orthogonal, svd):
        module = kind(copy.deepcopy(linear))
        assert not module.weight.requires_grad and not module.parametrizations.weight[0].training


def test_under_autocast_and_in_low_precision(dtype: torch.dtype) -> None:
    module = orthogonal(nn.Linear(40, 30, dtype=dtype))
    assert orthogonal_error(module.weight) < 30
    module = orthogonal(nn.Linear(40, 30)).to(dtype)
    assert module.weight.dtype == dtype and orthogonal_error(module.weight) < 30
    module.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert module.weight.dtype == torch.float32 and orthogonal_error(module.weight) < 30
        assert module(torch.randn(3, 40)).dtype == torch.bfloat16


def test_calls_that_work_with_that_of_torch() -> None:
    for options in (
        {"orthogonal_map": "matrix_exp"},
        {"orthogonal_map": "cayley", "use_trivialization": False},
        {"orthogonal_map": "householder"},
        {"name": "weight"},
    ):
        assert orthogonal_error(orthogonal(nn.Linear(5, 4), **options).weight) < 30
    unitary = orthogonal(nn.Linear(4, 4, dtype=torch.complex64)).weight
    torch.testing.assert_close(unitary @ unitary.mH, torch.eye(4, dtype=torch.complex64), rtol=0, atol=1e-5)


def test_no_random_numbers_are_drawn() -> None:
    module, other = nn.Linear(4, 6), nn.Linear(4, 6)
    state = torch.get_rng_state()
    orthogonal(module)
    svd(other)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_factors() -> None:
    module = svd(nn.Linear(6, 4))
    weight = module.parametrizations.weight
    factors = weight[0].svd(weight.original0, weight.original1)
    assert isinstance(factors, SVD) and factors.shape == (4, 6)
    close(factors.dense(), module.weight)
    assert "OrthogonalWeight(3×2×3×3)" in repr(orthogonal(nn.Conv2d(2, 3, 3)))
    assert "SVDWeight(4×6, spectrum=positive())" in repr(svd(nn.Linear(6, 4), spectrum=spectrum.positive()))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: orthogonal(nn.Linear(3, 3), "wait"), ValueError, "`name` should be the name of a parameter"),
        (lambda: orthogonal(nn.Linear(3, 3), "bias"), ValueError, "`bias` should be a matrix or a batch"),
        (lambda: svd(nn.Linear(3, 3), "bias"), ValueError, r"`bias` should be a matrix .* got shape \(3,\)"),
        (lambda: orthogonal(nn.Linear(3, 3), orthogonal_map="exp"), ValueError, "`orthogonal_map` should be"),
        (lambda: svd(nn.Linear(3, 3), spectrum=1.0), TypeError, "`spectrum` should be one of fasth.spectrum"),
        (lambda: svd(nn.Linear(3, 3, dtype=torch.complex64)), ValueError, "`weight` should be real"),
    ],
)
def test_errors_say_what_was_expected(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
    assert parametrizations.orthogonal is orthogonal


@pytest.mark.parametrize("parametrization", [parametrizations.orthogonal, parametrizations.svd])
def test_parameters_may_be_cast(parametrization: Callable[[nn.Module], nn.Module]) -> None:
    """FSDP's mixed precision casts parameters."""
    layer = parametrization(nn.Linear(5, 4))
    for parameter in layer.parameters():
        parameter.data = parameter.data.bfloat16()
    assert layer(torch.randn(3, 5, dtype=torch.bfloat16)).dtype == torch.bfloat16
