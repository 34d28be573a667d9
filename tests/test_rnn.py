"""``RNNSVD`` against ``nn.RNN`` with the same weights: values, gradients, and that training keeps what it promises."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dense import assert_close, assert_within, value_and_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence
from twins import definition_weight, perturbed

from fasth import cached, spectrum
from fasth.nn.rnn import FACTORS, RNNSVD
from fasth.operators import SVD

OPTIONS = {
    "plain": {},
    "relu": {"nonlinearity": "relu"},
    "no bias": {"bias": False},
    "layers": {"num_layers": 3},
    "directions": {"bidirectional": True, "num_layers": 2},
    "batch first": {"batch_first": True, "bidirectional": True},
    "spectrum": {"spectrum": spectrum.positive()},
    "identity": {"init": "identity", "nonlinearity": "relu"},
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


def make(input_size: int = 3, hidden_size: int = 6, **options) -> RNNSVD:
    return RNNSVD(input_size, hidden_size, dtype=torch.float64, **options)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def twin(rnn: RNNSVD) -> Callable[..., Any]:
    """``nn.RNN`` with the parameters of ``rnn``, and hidden-to-hidden weights from them, one reflection at a time."""
    dense, parameters = rnn.to_rnn(), {}
    for name, _ in dense.named_parameters():
        if name.startswith("weight_hh_"):
            factors = {factor: getattr(rnn, name.replace("weight_hh", factor)) for factor in FACTORS}
            parameters[name] = definition_weight(SimpleNamespace(**factors, form="compact", spectrum=rnn.spectrum))
        else:
            parameters[name] = rnn.get_parameter(name)
    return lambda *arguments: torch.func.functional_call(dense, parameters, arguments)


def assert_matches_twin(
    rnn: RNNSVD, *tensors: Tensor, call: Callable[..., Any] = lambda module, *tensors: module(*tensors)
) -> None:
    """``call(rnn, *tensors)``, and the gradients of all tensors and parameters, as with ``nn.RNN``."""
    results = []
    for of in (lambda rnn: rnn, twin):
        torch.manual_seed(1)  # for dropout
        results.append(value_and_gradients(lambda *t, of=of: call(of(rnn), *t), tensors, list(rnn.parameters())))
    assert_close(*results, 10 * rnn.hidden_size)


@each_option
def test_is_its_dense_twin(options):
    rnn = perturbed(make(**options))
    x, hx = numbers(4, 5, 3), numbers(len(rnn.svds), 4 if rnn.batch_first else 5, 6)
    assert_matches_twin(rnn, x)
    assert_matches_twin(rnn, x, hx)
    assert_matches_twin(rnn, x[0])
    assert_matches_twin(rnn, x[0], hx[:, 0])


@each_option
@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_packed(options, enforce_sorted):
    rnn = perturbed(make(**options))
    lengths = [5, 3, 3, 1] if enforce_sorted else [3, 5, 1, 3]

    def call(module, data, *hx):
        packed, hidden = module(pack_sequence(data.split(lengths), enforce_sorted=enforce_sorted), *hx)
        outputs = unpack_sequence(packed)
        assert [len(output) for output in outputs] == lengths
        return *outputs, hidden

    x, hx = numbers(sum(lengths), 3), numbers(len(rnn.svds), len(lengths), 6)
    assert_matches_twin(rnn, x, call=call)
    assert_matches_twin(rnn, x, hx, call=call)


def test_dropout_is_that_of_nn_rnn():
    rnn, x = make(num_layers=3, dropout=0.5), numbers(4, 5, 3)
    assert_matches_twin(rnn, x)
    dropped = rnn(x)[0]
    assert not torch.equal(dropped, rnn.eval()(x)[0])
    assert_matches_twin(rnn, x)


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 9)] * 4),
    num_layers=st.integers(1, 3),
    bidirectional=st.booleans(),
    bias=st.booleans(),
)
def test_any_shape(sizes, num_layers, bidirectional, bias):
    time, batch, input_size, hidden_size = sizes
    rnn = make(input_size, hidden_size, num_layers=num_layers, bidirectional=bidirectional, bias=bias)
    assert_matches_twin(rnn, numbers(time, batch, input_size))


@each_option
def test_from_rnn_reproduces_it(options, precise):
    dense_options = {name: value for name, value in options.items() if name not in ("spectrum", "init")}
    dense = nn.RNN(3, 6, dtype=precise, **dense_options)
    rnn = RNNSVD.from_rnn(dense)
    assert rnn.spectrum == spectrum.free() and all((svd.sigma >= 0).all() for svd in rnn.svds.values())
    x = torch.randn(4, 5, 3, dtype=precise)
    for ours, theirs in zip(rnn(x), dense(x), strict=True):
        assert_within(ours, theirs, 1.0, 30 * 6)
    back = rnn.to_rnn()
    assert repr(back) == repr(dense)
    for name, parameter in dense.named_parameters():
        assert_within(back.get_parameter(name), parameter, 1.0, 6)


def test_from_rnn_keeps_what_is_trained_and_the_mode_and_draws_nothing():
    dense = nn.RNN(3, 6, 2, dtype=torch.bfloat16).eval()
    dense.weight_hh_l0.requires_grad_(False)
    dense.bias_ih_l1.requires_grad_(False)
    before = torch.get_rng_state()
    rnn = RNNSVD.from_rnn(dense)
    assert torch.equal(torch.get_rng_state(), before)
    assert not rnn.training and rnn.sigma_l0.dtype == torch.bfloat16
    frozen = {name for name, parameter in rnn.named_parameters() if not parameter.requires_grad}
    assert frozen == {"reflectors_l0", "sigma_l0", "bias_ih_l1"}
    with torch.no_grad():
        back = rnn.to_rnn()
    assert not back.training
    assert {name for name, p in back.named_parameters() if not p.requires_grad} == {"weight_hh_l0", "bias_ih_l1"}


def test_from_rnn_with_a_spectrum_moves_the_singular_values_into_it():
    rnn = RNNSVD.from_rnn(nn.RNN(3, 6), spectrum=spectrum.around(1, 0.1))
    singular = torch.linalg.svdvals(rnn.weight_hh_l0.double())
    assert ((singular - 1).abs() <= 0.1 + 1e-6).all()


@pytest.mark.parametrize("init", ["haar", "identity"])
def test_starts_orthogonal(init):
    rnn = make(hidden_size=9, num_layers=2, init=init)
    for name in rnn.svds:
        W, eye = getattr(rnn, name), torch.eye(9, dtype=torch.float64)
        assert_within(W.mT @ W, eye, 1.0, 9)
        if init == "identity":
            assert_within(W, eye, 1.0, 9)
    assert rnn.svds.keys() == {"weight_hh_l0", "weight_hh_l1"}
    assert torch.equal(rnn.weight, torch.stack([rnn.weight_hh_l0, rnn.weight_hh_l1]))
    bound = 1 / 3
    assert all(0 < p.abs().max() <= bound for name, p in rnn.named_parameters() if name.startswith(("weight", "bias")))


def test_trained_it_stays_orthogonal_and_in_its_spectrum():
    rnn = RNNSVD(2, 16, eps=0.1)
    head = nn.Linear(16, 1)
    optimizer = torch.optim.Adam([*rnn.parameters(), *head.parameters()], lr=0.02)
    # The first of ten numbers is to be remembered.
    first = last = None
    for _ in range(60):
        x = torch.randn(10, 32, 2)
        loss = (head(rnn(x)[1][0]) - x[0, :, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        first, last = loss.item() if first is None else first, loss.item()
    assert last < 0.5 * first
    svd = rnn.svds["weight_hh_l0"]
    for Q in (svd.U.dense(), svd.V.dense()):
        assert_within(Q.mT @ Q, torch.eye(16), 1.0, 16)
    assert svd.sigma.std() > 0.01
    with torch.no_grad():
        rnn.sigma_l0.mul_(1e30)
    assert ((rnn.svds["weight_hh_l0"].sigma.double() - 1).abs() <= 0.1).all()


def test_the_weight_is_formed_once_per_call_and_once_within_cached(monkeypatch):
    formed = []
    dense = SVD.dense
    monkeypatch.setattr(SVD, "dense", lambda self: formed.append(self) or dense(self))
    rnn, x = make(bidirectional=True), numbers(20, 5, 3)
    rnn(x)
    assert len(formed) == 2
    with cached():
        for _ in range(3):
            rnn(x)
    assert len(formed) == 4


def test_copies_and_saves():
    rnn, x = make(num_layers=2, bidirectional=True).eval(), numbers(4, 5, 3)
    with torch.no_grad():
        expected = rnn(x)[0]
    empty = make(num_layers=2, bidirectional=True, device="meta").to_empty(device="cpu")
    empty.load_state_dict(rnn.state_dict())
    for other in (copy.deepcopy(rnn), pickle.loads(pickle.dumps(rnn)), empty.eval()):
        with torch.no_grad():
            assert torch.equal(other(x)[0], expected)
        assert repr(other) == repr(rnn)
    empty.reset_parameters()
    assert empty(x)[0].isfinite().all()


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_transforms():
    rnn, x = make(num_layers=2), numbers(4, 5, 3)
    expected = rnn(x)[0]
    compiled = torch.compile(rnn, backend="aot_eager", fullgraph=True)
    assert_within(compiled(x)[0], expected, 1.0, 100)
    parameters = {name: p.detach() for name, p in rnn.named_parameters()}
    assert_within(torch.func.functional_call(rnn, parameters, (x,))[0], expected, 1.0, 100)
    with torch.autocast("cpu", torch.bfloat16):
        assert rnn.float()(x.float())[0].dtype == rnn.to_rnn()(x.float())[0].dtype


def test_half_precision():
    for dtype in (torch.bfloat16, torch.float16):
        rnn = RNNSVD(3, 6, dtype=dtype)
        rnn(torch.randn(4, 5, 3, dtype=dtype))[0].float().sum().backward()
        assert all(p.grad.isfinite().all() for p in rnn.parameters())


def test_as_many_numbers_as_nn_rnn_and_sigma():
    rnn, dense = RNNSVD(3, 6, 2, bidirectional=True), nn.RNN(3, 6, 2, bidirectional=True)
    count = sum(p.numel() for p in rnn.parameters())
    assert count == sum(p.numel() for p in dense.parameters()) + 4 * 6
    rnn.flatten_parameters()


def test_a_mistake_is_explained():
    rnn = RNNSVD(3, 6)
    x = torch.randn(4, 5, 3)
    for arguments, message in [
        ((torch.randn(4, 5, 2),), "`input` should have last dimension 3; got shape"),
        ((torch.randn(3),), "`input` should have two or three dimensions"),
        ((x.double(),), "`input` should have the layer's dtype"),
        ((x, torch.randn(1, 4, 6)), r"`hx` should have shape \(1, 5, 6\)"),
        ((x[0], torch.randn(1, 5, 6)), "`hx` should have as many dimensions as `input`"),
    ]:
        with pytest.raises(ValueError, match=message):
            rnn(*arguments)
    with pytest.raises(TypeError, match="`input` should be a tensor; got list"):
        rnn([1.0, 2.0, 3.0])
    with pytest.raises(TypeError, match=r"`dtype` should be float32, .* got torch\.complex64"):
        RNNSVD(3, 6, dtype=torch.complex64)
    with pytest.raises(TypeError, match=r"`rnn` should be an nn\.RNN; got GRU"):
        RNNSVD.from_rnn(nn.GRU(3, 6))
    for options, message in [
        ({"nonlinearity": "sigmoid"}, "nonlinearity"),
        ({"init": "zeros"}, "`init` should be"),
        ({"num_layers": 0}, "num_layers"),
        ({"eps": -1.0}, "`eps` should be"),
    ]:
        with pytest.raises(ValueError, match=message):
            RNNSVD(3, 6, **options)
    with pytest.raises(AttributeError, match="weight_hh_l1"):
        _ = rnn.weight_hh_l1
