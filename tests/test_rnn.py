"""The recurrent layers against those of ``torch.nn`` with the same weights, and modReLU against one step at a time: in
values and gradients; and that training keeps what it promises."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dense import assert_close, assert_within, value_and_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from fasth import GRUSVD, LSTMSVD, RNNSVD, cached, spectrum, to_dense, to_svd
from fasth.nn import rnn as rnn_module
from fasth.nn.held_weight import HeldWeight
from fasth.nn.recurrent import Recurrent
from fasth.reflections.plan import TORCH
from fasth.tools.twins import definition_weight, perturbed

KINDS = {
    "modrelu": RNNSVD,
    "tanh": lambda *sizes, **o: RNNSVD(*sizes, nonlinearity="tanh", **o),
    "relu": lambda *sizes, **o: RNNSVD(*sizes, nonlinearity="relu", **o),
    "LSTM": LSTMSVD,
    "GRU": GRUSVD,
}
OPTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "layers": {"num_layers": 3},
    "directions": {"bidirectional": True, "num_layers": 2},
    "batch first": {"batch_first": True, "bidirectional": True},
    "spectrum": {"spectrum": spectrum.positive()},
    "identity": {"init": "identity"},
}
OF_ONE = {
    "modrelu": {"orthogonal": {"eps": 0}},
    "LSTM": {"projections": {"proj_size": 4, "num_layers": 2, "init": "haar"}},
}
CASES = [(kind, name, options) for kind in KINDS for name, options in (OPTIONS | OF_ONE.get(kind, {})).items()]
each_case = pytest.mark.parametrize(
    ("kind", "options"), [(k, o) for k, _, o in CASES], ids=[f"{kind}, {name}" for kind, name, _ in CASES]
)
each_kind = pytest.mark.parametrize("kind", KINDS)
DENSE = {"tanh": nn.RNN, "relu": lambda *s, **o: nn.RNN(*s, nonlinearity="relu", **o), "LSTM": nn.LSTM, "GRU": nn.GRU}
each_dense_kind = pytest.mark.parametrize("kind", DENSE)
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


def make(kind: str = "modrelu", input_size: int = 3, hidden_size: int = 6, **options: Any) -> Any:
    return KINDS[kind](input_size, hidden_size, dtype=torch.float64, **options)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def states(rnn: Recurrent, batch: int) -> list[Tensor]:
    return [numbers(len(rnn.svds), batch, size) for size in rnn._state_names().values()]


def as_hx(tensors: tuple[Tensor, ...]) -> Any:
    return tensors if len(tensors) > 1 else tensors[0] if tensors else None


def hidden_weight(rnn: Recurrent, where: str) -> Tensor:
    """The hidden weight from the parameters, one reflection at a time; the gates' matrices are stacked."""
    reflectors = getattr(rnn, f"reflectors_{where}").chunk(rnn._gates)
    sigma = [None] * rnn._gates
    if rnn.spectrum is not None:
        sigma = getattr(rnn, f"sigma_{where}").chunk(rnn._gates)
    shape = (rnn.hidden_size, rnn.hidden_size)
    gates = [HeldWeight("", shape, R, s, None, "compact", rnn.spectrum) for R, s in zip(reflectors, sigma, strict=True)]
    return torch.cat([definition_weight(gate) for gate in gates])


def twin(rnn: Recurrent) -> Callable[..., Any]:
    """The layer of ``torch.nn`` with the parameters of ``rnn``; with modReLU, a loop."""
    if getattr(rnn, "nonlinearity", "") == "modrelu":
        return lambda *arguments: by_loop(rnn, *arguments)
    dense, parameters = rnn._to_dense(), {}
    for name, _ in dense.named_parameters():
        is_hidden = name.startswith("weight_hh_")
        parameters[name] = hidden_weight(rnn, name.removeprefix("weight_hh_")) if is_hidden else rnn.get_parameter(name)
    return lambda *arguments: torch.func.functional_call(dense, parameters, arguments)


def by_loop(rnn: RNNSVD, input: Any, hx: Tensor | None = None) -> Any:
    """An RNN with modReLU, one sequence after the other, one step after the other."""
    if isinstance(input, PackedSequence):
        found = [
            by_loop(rnn, x.unsqueeze(0 if rnn.batch_first else 1), None if hx is None else hx[:, i : i + 1])
            for i, x in enumerate(unpack_sequence(input))
        ]
        outputs = [out.squeeze(0 if rnn.batch_first else 1) for out, _ in found]
        return pack_sequence(outputs, enforce_sorted=False), torch.cat([h for _, h in found], 1)
    if input.ndim == 2:
        out, h = by_loop(rnn, input.unsqueeze(0 if rnn.batch_first else 1), None if hx is None else hx.unsqueeze(1))
        return out.squeeze(0 if rnn.batch_first else 1), h.squeeze(1)
    x = input.transpose(0, 1) if rnn.batch_first else input
    hx = x.new_zeros(len(rnn._places()), x.shape[1], rnn.hidden_size) if hx is None else hx
    directions, last = 1 + rnn.bidirectional, []
    for layer in range(rnn.num_layers):
        if layer and rnn.dropout:
            x = nn.functional.dropout(x, rnn.dropout, rnn.training)
        outputs = []
        for where in rnn._places()[layer * directions : (layer + 1) * directions]:
            h, steps = hx[len(last)], [x[0]] * len(x)
            for t in reversed(range(len(x))) if where.endswith("reverse") else range(len(x)):
                z = x[t] @ getattr(rnn, f"weight_ih_{where}").mT + h @ hidden_weight(rnn, where).mT
                if rnn.bias:
                    z = z + getattr(rnn, f"bias_ih_{where}") + getattr(rnn, f"bias_hh_{where}")
                size = z.abs() + getattr(rnn, f"bias_modrelu_{where}")
                h = steps[t] = torch.where(size > 0, z.sign() * size, 0)
            outputs.append(torch.stack(steps))
            last.append(h)
        x = torch.cat(outputs, -1)
    return x.transpose(0, 1) if rnn.batch_first else x, torch.stack(last)


def flat(result: Any) -> list[Tensor]:
    """The output, and one or two states."""
    output, hidden = result
    return [output, *(hidden if isinstance(hidden, tuple) else (hidden,))]


def assert_matches_twin(
    rnn: Recurrent,
    *tensors: Tensor,
    call: Callable[..., Any] = lambda module, x, *hx: flat(module(x, as_hx(hx)) if hx else module(x)),
) -> None:
    """Asserts that ``call(rnn, *tensors)`` and the gradients of all tensors and parameters are the twin's."""
    results = []
    for prepare in (lambda rnn: rnn, twin):
        torch.manual_seed(1)  # for dropout
        results.append(
            value_and_gradients(lambda *t, prepare=prepare: call(prepare(rnn), *t), tensors, list(rnn.parameters()))
        )
    assert_close(*results, 30 * rnn.hidden_size)


@each_case
def test_is_its_dense_twin(kind, options, path):
    rnn = perturbed(make(kind, **options))
    x, hx = numbers(4, 5, 3), states(rnn, 4 if rnn.batch_first else 5)
    assert_matches_twin(rnn, x)
    assert_matches_twin(rnn, x, *hx)
    assert_matches_twin(rnn, x[0])
    assert_matches_twin(rnn, x[0], *(h[:, 0] for h in hx))


@each_case
@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_packed(kind, options, enforce_sorted):
    rnn = perturbed(make(kind, **options))
    lengths = [5, 3, 3, 1] if enforce_sorted else [3, 5, 1, 3]

    def call(module, data, *hx):
        packed = pack_sequence(data.split(lengths), enforce_sorted=enforce_sorted)
        packed, *hidden = flat(module(packed, as_hx(hx)) if hx else module(packed))
        outputs = unpack_sequence(packed)
        assert [len(output) for output in outputs] == lengths
        return *outputs, *hidden

    x, hx = numbers(sum(lengths), 3), states(rnn, len(lengths))
    assert_matches_twin(rnn, x, call=call)
    assert_matches_twin(rnn, x, *hx, call=call)


@each_kind
def test_dropout_is_that_of_torch(kind):
    rnn, x = make(kind, num_layers=3, dropout=0.5), numbers(4, 5, 3)
    assert_matches_twin(rnn, x)
    dropped = rnn(x)[0]
    assert not torch.equal(dropped, rnn.eval()(x)[0])
    assert_matches_twin(rnn, x)


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(list(KINDS)),
    sizes=st.tuples(*[st.integers(1, 9)] * 4),
    num_layers=st.integers(1, 3),
    bidirectional=st.booleans(),
    bias=st.booleans(),
)
def test_any_shape(kind, sizes, num_layers, bidirectional, bias):
    time, batch, input_size, hidden_size = sizes
    rnn = make(kind, input_size, hidden_size, num_layers=num_layers, bidirectional=bidirectional, bias=bias)
    assert_matches_twin(rnn, numbers(time, batch, input_size))


@each_dense_kind
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"num_layers": 2, "bidirectional": True}])
def test_conversion_reproduces_the_dense_layer(kind, options, precise):
    dense = DENSE[kind](3, 6, dtype=precise, **options)
    rnn = to_svd(dense)
    assert isinstance(rnn, Recurrent) and rnn.spectrum == spectrum.free()
    assert all((svd.sigma >= 0).all() for svd in rnn.svds.values())
    x = torch.randn(4, 5, 3, dtype=precise)
    for ours, theirs in zip(flat(rnn(x)), flat(dense(x)), strict=True):
        assert_within(ours, theirs, 1.0, 30 * 6)
    back = to_dense(rnn)
    assert repr(back) == repr(dense)
    for name, parameter in dense.named_parameters():
        assert_within(back.get_parameter(name), parameter, 1.0, 6)


def test_conversion_of_projections():
    dense = nn.LSTM(3, 6, 2, proj_size=2)
    assert repr(to_dense(to_svd(dense))) == repr(dense)
    assert to_svd(dense).weight_hr_l1.shape == (2, 6)


def test_each_class_has_its_own_names_for_conversion():
    for kind, dense, there, back in (
        (RNNSVD, nn.RNN(3, 6), "from_rnn", "to_rnn"),
        (LSTMSVD, nn.LSTM(3, 6), "from_lstm", "to_lstm"),
        (GRUSVD, nn.GRU(3, 6), "from_gru", "to_gru"),
    ):
        rnn = getattr(kind, there)(dense)
        assert repr(getattr(rnn, back)()) == repr(dense)
        bounded = getattr(kind, there)(dense, spectrum=spectrum.around(1, 0.1))
        singular = torch.linalg.svdvals(bounded.weight_hh_l0.double().reshape(-1, 6, 6))
        assert ((singular - 1).abs() <= 0.1 + 1e-6).all()


def test_the_checkpoint_of_a_dense_layer_becomes_the_nearest_orthogonal_one():
    dense, rnn = nn.RNN(3, 6, dtype=torch.float64), make("tanh", eps=0)
    with pytest.warns(UserWarning, match="was replaced by the nearest weight that RNNSVD can have"):
        rnn.load_state_dict(dense.state_dict())
    U, _, Vh = torch.linalg.svd(dense.weight_hh_l0)
    assert_within(rnn.weight_hh_l0, U @ Vh, 1.0, 60)
    with pytest.raises(RuntimeError, match="bias_modrelu_l0"), pytest.warns(UserWarning):
        make("modrelu").load_state_dict(dense.state_dict())


def test_conversion_keeps_what_is_trained_and_the_mode_and_draws_nothing():
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


@pytest.mark.parametrize(("kind", "options"), [*((kind, {}) for kind in KINDS), ("modrelu", {"eps": 0})])
@pytest.mark.parametrize("init", ["haar", "identity", "henaff", "cayley"])
def test_starts_orthogonal(kind, options, init):
    rnn = make(kind, hidden_size=9, num_layers=2, init=init, **options)
    assert rnn.svds.keys() == {"weight_hh_l0", "weight_hh_l1"}
    for name in rnn.svds:
        for W in getattr(rnn, name).chunk(rnn._gates):
            eye = torch.eye(9, dtype=torch.float64)
            assert_within(W.mT @ W, eye, 1.0, 9)
            if init == "identity":
                assert_within(W, eye, 1.0, 9)
            if init in ("henaff", "cayley"):
                pairs = torch.block_diag(*[W[i : i + 2, i : i + 2] for i in range(0, 9, 2)])
                assert_within(W, pairs, 1.0, 9)
    assert torch.equal(rnn.weight, torch.stack([rnn.weight_hh_l0, rnn.weight_hh_l1]))
    bound = 1 / 3
    drawn = {name: p.abs().max() for name, p in rnn.named_parameters() if name.startswith(("weight", "bias"))}
    assert all(0 < p <= bound for name, p in drawn.items() if "modrelu" not in name)
    assert all(p == 0 for name, p in drawn.items() if "modrelu" in name)


def test_angles():
    """Angles of "henaff" are uniform in [−π, π], those of "cayley" −tan(t/2), with t uniform in [0, π/2]."""
    for init, low, high, median in (("henaff", -math.pi, math.pi, 0.0), ("cayley", -1.0, 0.0, -math.tan(math.pi / 8))):
        W = RNNSVD(1, 1000, init=init, dtype=torch.float64, eps=0).weight_hh_l0.detach()
        angles = torch.atan2(W.diagonal(1)[::2], W.diagonal()[::2])
        assert low <= angles.min() < low + 0.1 * (high - low) and high - 0.1 * (high - low) < angles.max() <= high
        assert abs(angles.median() - median) < 0.1 * (high - low)


@pytest.mark.parametrize("eps", [0, 0.1])
def test_trained_it_stays_orthogonal_and_in_its_spectrum(eps):
    rnn = RNNSVD(2, 16, eps=eps)
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
    if eps == 0:
        assert "sigma_l0" not in dict(rnn.named_parameters()) and (svd.sigma == 1).all()
        assert_within(rnn.weight_hh_l0.mT @ rnn.weight_hh_l0, torch.eye(16), 1.0, 16)
        return
    assert svd.sigma.std() > 1e-3  # they are trained
    with torch.no_grad():
        rnn.sigma_l0.mul_(1e30)
    assert ((rnn.svds["weight_hh_l0"].sigma.double() - 1).abs() <= 0.1).all()


@each_kind
def test_the_svds_are_those_of_the_weights(kind):
    rnn = perturbed(make(kind, num_layers=2))
    for name, svd in rnn.svds.items():
        W = getattr(rnn, name)
        assert_within(svd.dense().reshape(W.shape), W, 1.0, 60)
        singular = torch.linalg.svdvals(W.reshape(-1, 6, 6)).flatten().sort().values
        assert_within(svd.sigma.abs().flatten().sort().values, singular, 1.0, 60)


@each_kind
def test_the_weight_is_formed_once_per_call_and_once_within_cached(kind, monkeypatch):
    formed, dense = [], Recurrent._dense
    monkeypatch.setattr(Recurrent, "_dense", lambda self, where: formed.append(where) or dense(self, where))
    rnn, x = make(kind, bidirectional=True), numbers(20, 5, 3)
    rnn(x)
    assert len(formed) == 2
    with cached():
        for _ in range(3):
            rnn(x)
    assert len(formed) == 4


@each_kind
def test_copies_and_saves(kind):
    rnn, x = make(kind, num_layers=2, bidirectional=True).eval(), numbers(4, 5, 3)
    with torch.no_grad():
        expected = rnn(x)[0]
    empty = make(kind, num_layers=2, bidirectional=True, device="meta").to_empty(device="cpu")
    empty.load_state_dict(rnn.state_dict())
    for other in (copy.deepcopy(rnn), pickle.loads(pickle.dumps(rnn)), empty.eval()):
        with torch.no_grad():
            assert torch.equal(other(x)[0], expected)
        assert repr(other) == repr(rnn)
    empty.reset_parameters()
    assert empty(x)[0].isfinite().all()


@each_kind
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_transforms(kind):
    rnn, x = make(kind, num_layers=2), numbers(4, 5, 3)
    expected = rnn(x)[0]
    compiled = torch.compile(rnn, backend="aot_eager", fullgraph=True)
    assert_within(compiled(x)[0], expected, 1.0, 100)
    parameters = {name: p.detach() for name, p in rnn.named_parameters()}
    assert_within(torch.func.functional_call(rnn, parameters, (x,))[0], expected, 1.0, 100)


@each_kind
def test_autocast(kind):
    rnn, x = make(kind).float(), numbers(4, 5, 3).float()
    with torch.autocast("cpu", torch.bfloat16):
        out = rnn(x)[0]
        if kind != "modrelu":
            assert out.dtype == rnn._to_dense()(x)[0].dtype
    out.float().sum().backward()
    torch.testing.assert_close(out.float(), rnn(x)[0], rtol=0, atol=16 * torch.finfo(torch.bfloat16).eps)
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in rnn.parameters())


@each_kind
def test_half_precision(kind):
    for dtype in (torch.bfloat16, torch.float16):
        rnn = KINDS[kind](3, 6, dtype=dtype)
        rnn(torch.randn(4, 5, 3, dtype=dtype))[0].float().sum().backward()
        assert all(p.grad.isfinite().all() for p in rnn.parameters())


@each_kind
def test_set_weight(kind):
    rnn = make(kind, num_layers=2, bidirectional=True, spectrum=spectrum.free())
    weight = numbers(4, 6 * rnn._gates, 6)
    assert rnn.set_weight_(weight) is rnn
    assert_within(rnn.weight, weight, 5.0, 60)
    orthogonal = torch.linalg.qr(numbers(1, 6, 6)).Q
    assert_within(make(eps=0).set_weight_(orthogonal).weight, orthogonal, 1.0, 60)


def test_one_step_at_a_time_is_all_at_once():
    """A loop that calls the layer with each input gives the same as one call."""
    for kind in KINDS:
        rnn, x, hx = make(kind, num_layers=2), numbers(4, 5, 3), None
        with torch.no_grad(), cached():
            outputs = []
            for step in x.split(1):
                output, hx = rnn(step, hx)
                outputs.append(output)
            assert_within(torch.cat(outputs), rnn(x)[0], 1.0, 100)


def test_the_default_device_does_not_matter():
    """The start is computed on the CPU, wherever tensors are made by default."""
    torch.manual_seed(0)
    with torch.device("meta"):
        rnn = RNNSVD(3, 6, device="cpu")
    torch.manual_seed(0)
    assert torch.equal(rnn.weight_hh_l0, RNNSVD(3, 6).weight_hh_l0)


def test_to_dense_in_inference_mode():
    with torch.inference_mode():
        dense = to_dense(make("GRU"))
    assert all(p.requires_grad for p in dense.parameters())


def test_tanh_and_relu_take_torchs_kernel_where_there_is_no_core(monkeypatch):
    rnn, x = make("tanh"), numbers(4, 5, 3)
    expected = rnn(x)[0]
    monkeypatch.setattr(rnn_module, "backend_for", lambda *tensors: TORCH)
    monkeypatch.setattr(rnn_module, "recurrence", None)
    assert_within(rnn(x)[0], expected, 1.0, 100)


def test_as_many_numbers_as_torchs_and_sigma():
    for kind, dense in ((RNNSVD, nn.RNN), (LSTMSVD, nn.LSTM), (GRUSVD, nn.GRU)):
        rnn, plain = (layer(3, 6, 2, bidirectional=True) for layer in (kind, dense))
        count = sum(p.numel() for p in rnn.parameters())
        extra = 6 * rnn._gates + 6 * (kind is RNNSVD)  # modReLU's bias
        assert count == sum(p.numel() for p in plain.parameters()) + 4 * extra
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
        ((x, torch.randn(1, 5, 6).double()), "`hx` should have the dtype of `input`, torch.float32; got torch.float64"),
    ]:
        with pytest.raises(ValueError, match=message):
            rnn(*arguments)
    with pytest.raises(TypeError, match="`input` should be a tensor; got list"):
        rnn([1.0, 2.0, 3.0])
    with pytest.raises(TypeError, match=r"`dtype` should be float32, .* got torch\.complex64"):
        RNNSVD(3, 6, dtype=torch.complex64)
    with pytest.raises(TypeError, match=r"`rnn` should be an nn\.RNN; got GRU"):
        RNNSVD.from_rnn(nn.GRU(3, 6))
    with pytest.raises(TypeError, match=r"`lstm` should be an nn\.LSTM; got GRU"):
        LSTMSVD.from_lstm(nn.GRU(3, 6))
    with pytest.raises(ValueError, match=r"`nonlinearity` should be one that nn\.RNN has"):
        rnn.to_rnn()
    with pytest.raises(ValueError, match="`input` should have at least one time step"):
        rnn(x[:0])
    with pytest.raises(TypeError, match="`hx` should be a tuple of two tensors"):
        LSTMSVD(3, 6)(x, torch.randn(1, 5, 6))
    for wrong in ((torch.randn(1, 5, 6),) * 2, [torch.randn(1, 5, 6)]):
        with pytest.raises(TypeError, match="`hx` should be a tensor; got"):
            rnn(x, wrong)
    with pytest.raises(TypeError, match="`hx` should be a tensor; got NoneType"):
        LSTMSVD(3, 6)(x, (torch.randn(1, 5, 6), None))
    with pytest.raises(TypeError, match=r"`spectrum` should be one of fasth\.spectrum"):
        RNNSVD(3, 6, spectrum="free", device="meta")
    with pytest.raises(ValueError, match=r"`weight` should have shape \(1, 6, 6\); got \(6, 6\)"):
        rnn.set_weight_(torch.eye(6))
    with pytest.raises(ValueError, match=r"`hx\[1\]` should have shape \(1, 5, 6\)"):
        LSTMSVD(3, 6)(x, (torch.randn(1, 5, 6), torch.randn(1, 4, 6)))
    with pytest.raises(ValueError, match="`init` should be 'haar' or 'identity' for weights of 6×2; got 'henaff'"):
        LSTMSVD(3, 6, proj_size=2, init="henaff")
    for options, message in [
        ({"nonlinearity": "sigmoid"}, "`nonlinearity` should be 'tanh' or 'relu' or 'modrelu'; got 'sigmoid'"),
        ({"init": "zeros"}, "`init` should be"),
        ({"num_layers": 0}, "num_layers"),
        ({"eps": -1.0}, "`eps` should be at least 0; got -1.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            RNNSVD(3, 6, **options)
    with pytest.raises(AttributeError, match="weight_hh_l1"):
        _ = rnn.weight_hh_l1


def test_modrelu_is_left_alone_by_to_dense(caplog):
    model = nn.Sequential(RNNSVD(3, 4))
    assert isinstance(to_dense(model)[0], RNNSVD)
    assert caplog.messages == ["to_dense left alone\n  0 (RNNSVD): nn.RNN has no modReLU"]
