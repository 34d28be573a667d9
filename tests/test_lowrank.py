"""Layers of low rank, from the start, from a dense model and from a compressed one: what their dense twins are."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dense import assert_layer_matches_dense, assert_within
from layers import FORMS, SPECTRA, holds
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fasth import cached, spectrum
from fasth.convert import Conversion, compress, to_dense, to_svd
from fasth.functional import svd_linear
from fasth.nn import RNNSVD, Conv1dSVD, Conv2dSVD, LinearOrthogonal, LinearSVD, LinearSymmetric
from fasth.reflections import planner
from fasth.tools.twins import definition_weight, orthogonality, perturbed

SIZES = [(6, 6, 1), (6, 6, 5), (9, 4, 2), (4, 9, 3), (70, 33, 20), (130, 140, 33)]  # in, out, rank
each_size = pytest.mark.parametrize(("m", "n", "r"), SIZES)
each_form = pytest.mark.parametrize("form", FORMS)


def twin(layer: Any, x: Tensor) -> Tensor:
    return F.linear(x, definition_weight(layer), layer.bias)


def nearest(W: Tensor, r: int) -> Tensor:
    """The matrix of rank r that is nearest to W."""
    U, sigma, Vh = torch.linalg.svd(W.detach().flatten(1), full_matrices=False)
    return ((U[:, :r] * sigma[:r]) @ Vh[:r]).view_as(W)


def assert_same(actual: Tensor, expected: Tensor, roundings: float = 200) -> None:
    assert_within(actual, expected.detach().double(), max(1.0, expected.abs().max().item()), roundings)


# A layer of low rank from the start


@each_form
@each_size
@pytest.mark.parametrize("many", [False, True], ids=["applied", "formed"])
def test_value_and_gradients_are_those_of_the_dense_twin(
    path: str, m: int, n: int, r: int, form: str, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner.forget_plans()
    monkeypatch.setattr(planner, "thin_crossover_by_rule", lambda *_: -1 if many else math.inf)
    for dtype in (torch.float64, torch.float32):
        layer = perturbed(LinearSVD(m, n, rank=r, reflectors=form, dtype=dtype))
        for rows in ((3,), (), (0,), (2, 3)):
            assert_layer_matches_dense(layer, twin, torch.randn(*rows, m, dtype=dtype), size=n + m + 10)


@each_form
def test_many_rows_are_multiplied_by_two_thin_matrices(form: str) -> None:
    n, m, r = 90, 100, 7
    rows = math.ceil(planner.thin_crossover_by_rule(n, m, r, r, r)) + 1
    layer, x = LinearSVD(m, n, rank=r, reflectors=form), torch.randn(rows, m)
    with FlopCounterMode(display=False) as flops:  # which the core's products do not show in
        out = layer(x)
    assert 2 * r * (n + m) * rows <= flops.get_total_flops() <= 2.5 * r * (n + m) * rows
    assert_same(out, twin(layer, x), n + m)
    assert_layer_matches_dense(layer, twin, x, size=n + m)


def test_from_how_many_rows_on_the_columns_are_formed() -> None:
    assert 2 * 64 < planner.thin_crossover_by_rule(1024, 1024, 64, 64, 64) < 2.2 * 64
    assert planner.thin_crossover_by_rule(64, 64, 8, 8, 8) > 64  # where a call takes as long as the product
    # Square U and V of which a few columns are used: applying all of the reflections to each row is worse still.
    assert planner.thin_crossover_by_rule(64, 64, 64, 64, 8) < planner.thin_crossover_by_rule(64, 64, 8, 8, 8)
    assert planner.thin_crossover_by_rule(64, 64, 0, 8, 8) == math.inf
    assert planner.forming_svd_pays(140, 1024, 1024, 64, 64, 64, True, planner.Where())
    assert not planner.forming_svd_pays(128, 1024, 1024, 64, 64, 64, True, planner.Where())
    # All singular values: W is formed, as before.
    for rows in (50, 400):
        pays = planner.forming_svd_pays(rows, 64, 64, 64, 64, 64, True, planner.Where())
        assert pays == planner.forming_pays(rows, 64, 64, True, planner.Where(), sides=2)


@pytest.mark.parametrize("form", ["full", "triangular", "compact", "shared"])
def test_fewer_singular_values_than_reflectors(path: str, form: str) -> None:
    """The columns that are formed are those of all reflections, also where there are more of them."""
    n, m, k = 12, 10, 3
    U, V = torch.randn(n, n).double(), torch.randn(m, m).double()
    U, V = (U[:, :m], None) if form == "shared" else (U, V)
    kind = "compact" if form == "shared" else form
    sigma, x = torch.randn(k).double(), torch.randn(200_000, m).double()
    assert planner.forming_svd_pays(len(x), n, m, n, m, k, form != "full", planner.Where())
    torch.testing.assert_close(
        svd_linear(x, U, sigma, V, form=kind)[:5], svd_linear(x[:5], U, sigma, V, form=kind), rtol=1e-10, atol=1e-12
    )


@each_form
def test_the_weight_is_not_formed(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to train nor for inference, of few rows and of many."""

    def fails(*_: Any, **__: Any) -> Tensor:
        pytest.fail("the weight was formed")

    monkeypatch.setattr("fasth.nn.factors.svd_dense", fails)
    monkeypatch.setattr("fasth.functional.svd_dense", fails)
    layers = (
        (LinearSVD(20, 30, rank=3, reflectors=form), (20_000, 20)),
        (Conv2dSVD(4, 12, 3, rank=3, reflectors=form), (2, 4, 6, 6)),
        (Conv1dSVD(4, 12, 3, rank=3, reflectors=form), (2, 4, 6)),
    )
    for layer, shape in layers:
        x = torch.randn(shape)
        layer(x).sum().backward()
        with torch.no_grad():
            layer(x), layer(x[:1])
            with cached():
                layer(x), layer(x[:1])


@each_form
@each_size
def test_parameters(m: int, n: int, r: int, form: str) -> None:
    layer = LinearSVD(m, n, rank=r, reflectors=form)
    shapes = {name: tuple(t.shape) for name, t in layer.state_dict().items()}
    U, V = ("U", "V") if form == "full" else ("reflectors_U", "reflectors_V")
    expected = {U: (r, n), V: (r, m), "sigma": (r,), "bias": (n,)}
    assert shapes == expected | ({"signs": (2, r)} if form == "full" else {})
    other = LinearSVD(m, n, rank=r, reflectors="full" if form == "compact" else "compact")
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(layer.state_dict())
    assert layer.rank == r and LinearSVD(m, n).rank == min(n, m)
    layer(torch.randn(3, m)).sum().backward()
    assert all(p.grad is not None for name, p in layer.named_parameters() if name != "signs")


@each_form
def test_full_rank_is_the_ordinary_layer(form: str) -> None:
    for shape in ((6, 4), (4, 6), (5, 5)):
        torch.manual_seed(1)
        expected = LinearSVD(*shape, reflectors=form)
        torch.manual_seed(1)
        layer = LinearSVD(*shape, reflectors=form, rank=min(shape))
        assert layer.state_dict().keys() == expected.state_dict().keys() and repr(layer) == repr(expected)
        assert all(torch.equal(t, expected.state_dict()[name]) for name, t in layer.state_dict().items())


@each_form
@pytest.mark.parametrize("s", SPECTRA, ids=repr)
def test_any_spectrum(s: spectrum.Spectrum, form: str) -> None:
    layer = perturbed(LinearSVD(7, 6, rank=3, spectrum=s, reflectors=form, dtype=torch.float64))
    assert_layer_matches_dense(layer, twin, torch.randn(4, 7, dtype=torch.float64), size=30)
    assert holds(layer.svd.sigma, s)
    assert_same(layer.svd.sigma.abs().sort(descending=True).values, torch.linalg.svdvals(layer.weight)[:3])


@each_form
def test_at_the_start(form: str) -> None:
    layer = LinearSVD(7, 6, rank=3, reflectors=form, init="identity", dtype=torch.float64)
    assert_same(layer.weight, torch.diag(torch.tensor([1.0, 1, 1, 0, 0, 0, 0]))[:6].double())
    layers = [LinearSVD(4, 4, rank=2, reflectors=form, dtype=torch.float64) for _ in range(600)]
    with torch.no_grad():
        columns = torch.stack([layer.svd.U.dense()[:, :2] for layer in layers])
    for entry in columns.flatten(1).unbind(1):  # uniform on the sphere
        for samples, mean in ((entry, 0), (entry**2, 1 / 4), (entry**4, 3 / 24)):
            assert abs(samples.mean() - mean) <= 4.5 * samples.std() / len(samples) ** 0.5


@each_form
@each_size
def test_set_weight_takes_the_nearest_of_the_rank(m: int, n: int, r: int, form: str, dtype: torch.dtype) -> None:
    linear = nn.Linear(m, n, dtype=dtype)
    layer = LinearSVD.from_linear(linear, rank=r, reflectors=form)
    expected = nearest(linear.weight.double(), r)
    assert layer.rank == r and {t.dtype for t in layer.state_dict().values()} == {dtype}
    assert_same(layer.weight, expected, n + m)
    dense = layer.to_linear()
    assert dense.weight.shape == (n, m) and torch.equal(dense.bias, linear.bias)
    assert_same(dense.weight, expected, n + m)
    other = LinearSVD(m, n, rank=r, reflectors=form, dtype=dtype)
    with pytest.warns(UserWarning, match="nearest weight"):
        other.load_state_dict(linear.state_dict())
    assert_same(other.weight, expected, n + m)
    assert torch.equal(other.bias, linear.bias)


@each_form
@pytest.mark.parametrize("mode", ["zeros", "reflect", "circular"])
def test_convolutions(path: str, form: str, mode: str) -> None:
    options: Any = {"rank": 3, "reflectors": form, "dtype": torch.float64}
    two = Conv2dSVD(3, 8, (3, 2), (2, 1), 1, (1, 2), padding_mode=mode, **options)
    one = Conv1dSVD(3, 8, 3, padding="same", padding_mode=mode, bias=False, **options)
    for layer, shape in ((two, (2, 3, 9, 8)), (two, (3, 9, 8)), (one, (2, 3, 9))):
        x = torch.randn(shape, dtype=torch.float64)
        assert_layer_matches_dense(perturbed(layer), _dense_convolution, x, size=60)
        assert_same(layer.to_conv()(x), layer(x))
        assert_same(type(layer).from_conv(layer.to_conv(), rank=3, reflectors=form)(x), layer(x))
    conv = nn.Conv2d(3, 8, 3)
    assert_same(Conv2dSVD.from_conv(conv, rank=2).weight, nearest(conv.weight.double(), 2))


def _dense_convolution(layer: Any, x: Tensor) -> Tensor:
    dense = layer.to_conv()
    kernel = definition_weight(layer).reshape(dense.weight.shape)
    tensors = {"weight": kernel} | ({} if layer.bias is None else {"bias": layer.bias})
    return torch.func.functional_call(dense, tensors, (x,))


def test_it_is_singular() -> None:
    layer = LinearSVD(5, 5, rank=3)
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        layer.inverse(torch.randn(2, 5))
    assert layer.logabsdet() == -math.inf
    conv = Conv2dSVD(5, 5, 1, rank=3)
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        conv.inverse(torch.randn(1, 5, 2, 2))
    assert conv.logabsdet(2, 2) == -math.inf


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_are_of_low_rank(duplicate: Callable[[Any], Any]) -> None:
    layer, x = LinearSVD(7, 6, rank=3), torch.randn(2, 7)
    other = duplicate(layer.eval())
    with torch.no_grad():
        assert other.rank == 3 and torch.equal(other(x), layer(x))


@each_form
def test_training_lowers_the_loss_and_stays_orthogonal(form: str) -> None:
    layer, x = LinearSVD(20, 16, rank=4, reflectors=form), torch.randn(64, 20)
    target = x @ LinearSVD(20, 16, rank=4).weight.detach().mT
    optimizer, losses = torch.optim.Adam(layer.parameters(), lr=0.03), []
    for _ in range(100):
        loss = F.mse_loss(layer(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert orthogonality(layer.svd.U.dense()) < 30 and orthogonality(layer.svd.V.dense()) < 30


@pytest.mark.filterwarnings("ignore::UserWarning")
@each_form
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(form: str, backend: str) -> None:
    layers = (
        (LinearSVD(20, 16, rank=3, reflectors=form, dtype=torch.float64), (5, 20)),
        (Conv2dSVD(3, 8, 3, rank=3, reflectors=form, dtype=torch.float64), (2, 3, 6, 6)),
    )
    for layer, shape in layers:
        torch._dynamo.reset()
        compiled = torch.compile(perturbed(layer), backend=backend, fullgraph=True)
        for rows in (shape[0], 3000 if layer is layers[0][0] else 4):  # many: W would be formed at full rank
            x = torch.randn(rows, *shape[1:], dtype=torch.float64)
            expected, out = layer(x), compiled(x)
            assert_same(out, expected)
            gradients, references = (
                torch.autograd.grad(t.sin().sum(), [p for p in layer.parameters() if p.requires_grad])
                for t in (out, expected)
            )
            for gradient, reference in zip(gradients, references, strict=True):
                assert_same(gradient, reference, 2000)
            with torch.no_grad():
                assert_same(compiled(x), expected)


def test_repr() -> None:
    assert repr(LinearSVD(3, 4, rank=2)).endswith("reflectors='compact', spectrum=free(), rank=2)")
    assert repr(Conv2dSVD(3, 4, 2, rank=2)).endswith("reflectors='compact', spectrum=free(), rank=2)")
    assert "rank" not in repr(LinearSVD(3, 4, rank=3))


@pytest.mark.parametrize("rank", [0, -1, 4, 2.0, True, "2"])
def test_a_wrong_rank_is_explained(rank: Any) -> None:
    message = f"`rank` should be an int from 1 to 3 for a weight of 3×5; got {rank!r}"
    for make in (lambda: LinearSVD(5, 3, rank=rank), lambda: Conv1dSVD(5, 3, 1, rank=rank)):
        with pytest.raises(ValueError, match=message):
            make()


# Whole models


def model_and_input() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(96, 20), nn.Tanh(), nn.Linear(20, 2)
    )
    return model.double(), torch.randn(5, 3, 4, 4, dtype=torch.float64)


def truncated_twin(model: nn.Module, rank: int) -> nn.Module:
    expected = copy.deepcopy(model)
    for module in expected.modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            module.weight.data = nearest(module.weight, rank)
    return expected


@each_form
@pytest.mark.parametrize("rank", [1, 4, 1000])
def test_to_svd_of_a_rank(rank: int, form: str) -> None:
    model, x = model_and_input()
    report: list[Conversion] = []
    small = to_svd(model, rank=rank, reflectors=form, report=report)
    assert [layer.rank for layer in (small[0], small[3], small[5])] == [min(rank, k) for k in (6, 20, 2)]
    assert [c.reason for c in report] == [f"rank {rank} of {k}" if rank < k else "" for k in (6, 20, 2)]
    expected = truncated_twin(model, rank)
    assert_same(small(x), expected(x))
    for name in ("0", "3", "5"):
        assert_same(small.get_submodule(name).weight, expected.get_submodule(name).weight)
    assert_same(to_dense(small)(x), expected(x))


def test_to_svd_of_a_rank_leaves_rnns_as_they_would_be() -> None:
    model = nn.ModuleList([nn.RNN(3, 5), nn.Linear(5, 5)])
    small = to_svd(model, rank=2)
    assert isinstance(small[0], RNNSVD) and small[0].sigma_l0.shape == (5,) and small[1].rank == 2


@pytest.mark.parametrize("rank", [0, 2.0, True])
def test_to_svd_explains_a_wrong_rank(rank: Any) -> None:
    with pytest.raises(ValueError, match=f"`rank` should be an int of at least 1; got {rank!r}"):
        to_svd(nn.Linear(3, 3), rank=rank)


@pytest.mark.parametrize("rank", [1, 4, 6])
@pytest.mark.parametrize("first", [lambda model: model, to_svd], ids=["dense", "svd"])
def test_compress_to_train_on(rank: int, first: Callable[[nn.Module], nn.Module], monkeypatch: Any) -> None:
    model, x = model_and_input()
    model[5].weight.requires_grad_(False)
    expected, source = truncated_twin(model, rank), first(model)
    if first is to_svd:
        monkeypatch.setattr(torch.linalg, "svd", None)
    small = compress(source, rank=rank, trainable=True, report=[])
    assert [type(layer) for layer in (small[0], small[3], small[5])] == [Conv2dSVD, LinearSVD, LinearSVD]
    assert [layer.rank for layer in (small[0], small[3], small[5])] == [min(rank, k) for k in (6, 20, 2)]
    assert_same(small(x), expected(x))
    assert {name: p.requires_grad for name, p in small.named_parameters() if name.startswith("5.")} == {
        name: name == "5.bias" for name, _ in small.named_parameters() if name.startswith("5.")
    }
    small(x).square().sum().backward()
    assert all(p.grad is not None for p in small.parameters() if p.requires_grad)


def test_compress_in_place_keeps_the_biases() -> None:
    model, _ = model_and_input()
    biases = [model[i].bias for i in (0, 3, 5)]
    compress(model, rank=1, trainable=True, inplace=True)
    assert all(model[i].bias is bias for i, bias in zip((0, 3, 5), biases, strict=True))


@each_form
def test_compress_keeps_spectrum_and_reflectors(form: str) -> None:
    layer = LinearSVD(9, 8, spectrum=spectrum.between(0.5, 2), reflectors=form, dtype=torch.float64)
    perturbed(layer, 1.0)
    small: Any = compress(layer, rank=3, trainable=True)
    assert small.spectrum == layer.spectrum and small.form == form and small.rank == 3
    assert_same(small.weight, nearest(layer.weight, 3))
    assert_same(small.svd.sigma, layer.svd.sigma[layer.svd.sigma.topk(3).indices.sort().values])
    again: Any = compress(small, rank=2, trainable=True)  # of a layer of low rank
    assert again.rank == 2
    assert_same(again.weight, nearest(layer.weight, 2))
    assert_same(compress(small, rank=2).weight, again.weight)
    report: list[Conversion] = []
    assert compress(small, rank=5, trainable=True, inplace=True, report=report) is small
    assert report == [("", "LinearSVD", None, "it needs all its singular values, 3")]


def test_compress_special_layers_to_train_on() -> None:
    symmetric = LinearSymmetric(8, dtype=torch.float64)
    with torch.no_grad():
        symmetric.sigma.copy_(torch.linspace(-3, 2.9, 8))
    small: Any = compress(symmetric, rank=2, trainable=True)
    assert type(small) is LinearSVD and small.rank == 2
    assert_same(small.weight, nearest(symmetric.weight, 2))
    zero = nn.Linear(8, 8)
    nn.init.zeros_(zero.weight)
    for layer in (zero, to_svd(zero)):
        small = compress(layer, energy=0.5, trainable=True)
        assert small.rank == 1 and torch.equal(small(torch.randn(3, 8)), zero.bias.expand(3, 8))
    full: Any = compress(nn.Linear(4, 5), energy=1.0, trainable=True)
    assert type(full) is LinearSVD and full.rank == 4 and hasattr(full, "reflectors")
    with pytest.raises(ValueError, match="can be truncated"):
        compress(LinearOrthogonal(3, 3), rank=1, trainable=True)


def test_compressed_weights_stay_shared() -> None:
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    model[1].weight = model[0].weight
    for source in (model, to_svd(model), to_svd(model, rank=5)):
        for small in (compress(source, rank=2, trainable=True), to_svd(model, rank=2)):
            for name in ("reflectors_U", "reflectors_V", "sigma"):
                assert getattr(small[0], name) is getattr(small[1], name)
            assert small[0].bias is not small[1].bias
            dense = to_dense(small)
            assert dense[0].weight is dense[1].weight


def test_compress_in_low_precision(dtype: torch.dtype) -> None:
    for layer in (nn.Linear(20, 16, dtype=dtype), LinearSVD(20, 16, dtype=dtype)):
        small: Any = compress(layer, rank=3, trainable=True)
        assert {t.dtype for t in small.state_dict().values()} == {dtype}
        assert orthogonality(small.svd.U.dense()) < 1
        expected = nearest(layer.weight.double(), 3)
        if isinstance(layer, nn.Linear):  # the singular values of the other are equal, and any three are the largest
            assert_same(small.weight, expected, 4)


@pytest.mark.parametrize("trained", ["sigma", "reflectors"])
def test_compress_keeps_frozen_what_was_frozen(trained: str) -> None:
    layer = LinearSVD(8, 6, init="linear")
    layer.reflectors.requires_grad_(trained == "reflectors")
    layer.sigma.requires_grad_(trained == "sigma")
    small: Any = compress(layer, rank=2, trainable=True)
    assert small.sigma.requires_grad == (trained == "sigma") and small.init == "linear"
    assert small.reflectors_U.requires_grad == small.reflectors_V.requires_grad == (trained == "reflectors")
    frozen: Any = compress(nn.Linear(8, 6).requires_grad_(False), rank=2, trainable=True)
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
