"""Whole models, converted: they compute the same, they share what they shared, and if it fails nothing has happened."""

from __future__ import annotations

import copy
import itertools
import logging

import pytest
import torch
import torch.nn.functional as F
from dense import assert_within
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from fasth import spectrum
from fasth.convert import Conversion, LowRank, compress, to_dense, to_svd
from fasth.nn import GRUSVD, LSTMSVD, RNNSVD, Conv1dSVD, Conv2dSVD, LinearOrthogonal, LinearSVD, LinearSymmetric

DENSE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.RNN, nn.LSTM, nn.GRU)
FACTORED = (LinearSVD, LinearSymmetric, LinearOrthogonal, Conv1dSVD, Conv2dSVD, GRUSVD, LSTMSVD, RNNSVD)


class Residual(nn.Module):
    """A layer that is used twice under two names, in nested containers, with a module that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6, bias=False)])})
        self.again = self.layers["a"][0]
        self.norm = None

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layers["a"]
        return x + self.again(torch.tanh(second(torch.tanh(first(x)))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(5, 7, 2, bidirectional=True, batch_first=True)
        self.lstm, self.gru = nn.LSTM(14, 6, proj_size=4), nn.GRU(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.lstm(self.rnn(x)[0])[0])[0])


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Language(nn.Module):
    """An embedding and an output layer with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle, self.head = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(x.long() % 9))))


def image_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, padding_mode="reflect"),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 4, (3, 1), padding="same", dilation=2, bias=False),
        nn.Conv2d(4, 4, 1),
        nn.Flatten(),
        nn.Linear(4 * 16, 5),
    )


# Each with the shape of its input.
MODELS = {
    "linear": (lambda: nn.Linear(6, 4), (3, 6)),
    "conv": (lambda: nn.Conv2d(3, 8, 3), (2, 3, 8, 8)),
    "rnn": (lambda: nn.Sequential(nn.RNN(5, 7)), (4, 2, 5)),
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 1), nn.LayerNorm(1)), (3, 6)),
    "images": (image_model, (2, 3, 8, 8)),
    "sequences": (lambda: nn.Sequential(nn.Conv1d(3, 5, 3, padding=1, padding_mode="circular"), nn.Tanh()), (2, 3, 9)),
    "recurrent": (Recurrent, (2, 4, 5)),
    "used twice": (Residual, (3, 6)),
    "tied": (Tied, (3, 8)),
    "language": (Language, (2, 5)),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0), (2, 5, 8)),
}
each_model = pytest.mark.parametrize("name", MODELS)


def build(name: str) -> tuple[nn.Module, Tensor]:
    make, shape = MODELS[name]
    return make().double(), torch.randn(shape, dtype=torch.float64).mul(4)


def outputs_and_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    out = model(x)
    out = out[0] if isinstance(out, tuple) else out
    found = torch.autograd.grad(out.sin().sum(), [x, *_biases(model).values()], allow_unused=True)
    return [out, *(g for g in found if g is not None)]


def _biases(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if "bias" in name and p.requires_grad}


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for t, reference in zip(actual, expected, strict=True):
        assert_within(t, reference, max(1.0, reference.abs().max().item()), 200)


def fingerprint(model: nn.Module) -> list[object]:
    """The parts of a model that must not change: the modules, the parameters themselves, and their values."""
    return [
        [(name, id(module), type(module), module.training) for name, module in model.named_modules()],
        [(name, id(p), p.requires_grad, p.detach().tolist()) for name, p in model.named_parameters()],
        {name: t.tolist() for name, t in model.state_dict().items()},
    ]


@each_model
@pytest.mark.parametrize("reflectors", ["compact", "full"])
def test_to_svd_and_back_compute_the_same(name, reflectors):
    model, x = build(name)
    expected = outputs_and_gradients(model, x)
    before = fingerprint(model)
    report: list[Conversion] = []
    svd = to_svd(model, reflectors=reflectors, report=report)
    left = {c.name for c in report if c.after is None}
    for module_name, module in svd.named_modules():
        assert type(module) not in DENSE or module_name in left
    dense = to_dense(svd, report=[])
    assert not any(isinstance(module, FACTORED) for module in dense.modules())
    assert [(n, type(m)) for n, m in dense.named_modules()] == [(n, type(m)) for n, m in model.named_modules()]
    assert repr(dense) == repr(model)
    for (key, ours), (other, theirs) in zip(dense.state_dict().items(), model.state_dict().items(), strict=True):
        assert key == other
        assert_within(ours, theirs, 1.0, 200)
    for other in (svd, dense):
        assert_same(outputs_and_gradients(other, x), expected)
    assert fingerprint(model) == before


@each_model
def test_inference_computes_the_same(name):
    model, x = build(name)
    model.eval()
    svd, small = to_svd(model, report=[]), compress(model, energy=1.0, report=[]) if name != "rnn" else model
    with torch.no_grad():
        expected = model(x)[0] if name == "rnn" else model(x)
        for other in (svd, to_dense(svd), small):
            assert_within(other(x)[0] if name == "rnn" else other(x), expected, expected.abs().max().item(), 200)


def test_in_place():
    model, x = build("images")
    expected, biases, bottom = outputs_and_gradients(model, x), _biases(model), model[1]
    assert to_svd(model, inplace=True) is model
    assert model[1] is bottom and isinstance(model[0], Conv2dSVD) and isinstance(model[6], LinearSVD)
    assert all(p is biases[name] for name, p in _biases(model).items())
    assert_same(outputs_and_gradients(model, x), expected)
    assert to_dense(model, inplace=True) is model
    assert_same(outputs_and_gradients(model, x), expected)
    linear = nn.Linear(3, 3)
    assert isinstance(to_svd(linear, inplace=True), LinearSVD)


def test_what_is_used_twice_stays_one_module():
    svd = to_svd(build("used twice")[0])
    assert svd.again is svd.layers["a"][0] and isinstance(svd.again, LinearSVD)
    dense = to_dense(svd)
    assert dense.again is dense.layers["a"][0]


def test_shared_weights_stay_shared():
    model, x = build("tied")
    svd = to_svd(model)
    assert svd.first.reflectors is svd.second.reflectors and svd.first.sigma is svd.second.sigma
    assert svd.first.bias is not svd.second.bias
    assert len(list(svd.parameters())) == 4
    optimizer = torch.optim.SGD(svd.parameters(), lr=0.1)
    svd(x).square().sum().backward()
    optimizer.step()
    assert torch.equal(svd.first.weight, svd.second.weight)
    # A change of dtype gives each layer its own copy of the signs, with equal values.
    for other in (svd, svd.float()):
        dense = to_dense(other)
        assert dense.first.weight is dense.second.weight and dense.first.bias is not dense.second.bias
    small = compress(svd, rank=2)
    assert small.first[0].weight is small.second[0].weight and small.first[1].weight is small.second[1].weight
    assert small.first.bias is not small.second.bias


def test_weights_that_cannot_stay_shared_are_left_alone():
    model, _ = build("language")
    report: list[Conversion] = []
    svd = to_svd(model, report=report)
    assert svd.head.weight is svd.embedding.weight
    assert isinstance(svd.middle, LinearSVD) and type(svd.head) is nn.Linear
    reasons = {c.name: c.reason for c in report if c.after is None}
    assert reasons["head"] == "it shares a weight with Embedding `embedding`, which would not share its factors"
    # Nor is one of two converted if the filter wants the other left alone.
    tied, _ = build("tied")
    report = []
    svd = to_svd(tied, filter=lambda name, _: name == "first", report=report)
    assert svd.first.weight is svd.second.weight
    assert [c.after for c in report] == [None, None]
    # Factors of which only some are shared have no dense form in which these are.
    pair = nn.ModuleList([LinearSVD(4, 4), LinearSVD(4, 4)])
    pair[1].reflectors = pair[0].reflectors
    assert all(isinstance(layer, LinearSVD) for layer in to_dense(pair, report=[]))
    rnn = nn.RNN(6, 6, 2)
    rnn.weight_hh_l1 = rnn.weight_hh_l0
    report = []
    to_svd(nn.ModuleList([rnn, nn.Linear(2, 2)]), report=report)
    assert report[0] == ("0", "RNN", None, "two of its weights are one parameter")


class MyLinear(nn.Linear):
    pass


class Product(nn.Module):
    """A layer of a class that is not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))


def hooked() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda *_: None)
    return layer


def patched() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: x
    return layer


def extended() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.adapter = nn.Identity()
    return layer


# Each with what is said about it.
LEFT_ALONE = {
    "subclass": (lambda: MyLinear(4, 4), "a subclass of Linear may compute something else"),
    "lazy": (lambda: nn.LazyLinear(4), "its size is not known before a first batch"),
    "parametrized": (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), "it is parametrized"),
    "hooked": (hooked, "its hooks would be lost"),
    "patched": (patched, "its forward method is not that of its class"),
    "extended": (extended, "it holds weight, bias, adapter, not what its class holds"),
    "complex": (lambda: nn.Linear(4, 4, dtype=torch.complex64), "it is torch.complex64"),
    "meta": (lambda: nn.Linear(4, 4, device="meta"), "it has no values"),
    "unknown": (lambda: Product(), "its class, test_convert.Product, is none that"),
}


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_what_cannot_be_converted_is_left_alone_and_named(kind, caplog):
    make, reason = LEFT_ALONE[kind]
    other = make()
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(other), nn.LayerNorm(4))
    for convert in (lambda model, **options: compress(model, rank=2, **options), to_svd):
        report: list[Conversion] = []
        converted = convert(model, report=report)
        assert type(converted[1][0]) is type(other)
        assert [c.name for c in report] == ["0", "1.0"]
        assert report[1].before == type(other).__name__ and report[1].after is None and reason in report[1].reason
        assert not caplog.records
    to_svd(model)
    (record,) = caplog.records
    assert record.name == "fasth" and record.levelno == logging.WARNING
    assert record.getMessage() == f"to_svd left alone\n  1.0 ({type(other).__name__}): {report[1].reason}"
    with pytest.raises(
        ValueError, match=r"`model` should have a Linear, Conv1d, Conv2d, RNN, LSTM or GRU layer that can be conv"
    ):
        to_svd(other, inplace=True)


def test_pruned_layers_are_left_alone():
    model = nn.Sequential(nn.Linear(4, 4), prune.l1_unstructured(nn.Linear(4, 4), "weight", 2))
    report: list[Conversion] = []
    to_svd(model, inplace=True, report=report)  # PyTorch does not copy a pruned layer
    assert [c.after for c in report] == ["LinearSVD", None]
    prune.remove(model[1], "weight")
    assert isinstance(to_svd(model)[1], LinearSVD)


def test_compiled_models():
    linear = torch.compile(nn.Linear(4, 4), backend="eager")
    with pytest.raises(
        ValueError, match=r"_orig_mod \(Linear\): it was compiled as it is: convert before torch\.compile"
    ):
        to_svd(linear)
    model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="eager")
    assert [type(module) for module in to_svd(model)._orig_mod] == [LinearSVD, nn.ReLU]


def test_many_of_a_kind_are_named_once(caplog):
    to_svd(nn.Sequential(nn.Linear(2, 2), *[Product() for _ in range(12)]))
    why = "its class, test_convert.Product, is none that to_svd converts"
    assert caplog.messages == [f"to_svd left alone\n  1 and 11 more (Product): {why}"]


def test_a_class_of_the_same_name_is_named_with_its_module(caplog):
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(2))

    Linear.__module__, Linear.__qualname__ = "mypkg.layers", "Linear"
    to_svd(nn.Sequential(nn.Linear(2, 2), Linear()))
    assert "1 (Linear): its class, mypkg.layers.Linear, is none that to_svd converts" in caplog.messages[0]


class Words(nn.Module):
    """The parts of a language model besides its layers: embeddings, which are not multiplied by."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.bags = nn.EmbeddingBag(10, 4)
        self.positions = nn.Parameter(torch.zeros(1, 7, 4))
        self.norm = nn.LayerNorm((7, 4))
        self.table = Product()
        self.head = nn.Linear(4, 10)


def test_tables_of_words_and_positions_are_not_logged(caplog):
    to_svd(Words())
    assert caplog.messages == [
        "to_svd left alone\n  table (Product): its class, test_convert.Product, is none that to_svd converts"
    ]
    report: list[Conversion] = []
    to_svd(Words(), report=report)
    assert {c.name for c in report} == {"", "words", "bags", "norm", "table", "head"}


class Adapter(nn.Module):
    """Adds a low-rank update to a layer, and writes the update into the weight of the layer, as PEFT's LoRA does."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.up = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up["default"](self.down["default"](x))

    def merge(self) -> nn.Linear:
        self.base.weight.data += self.up["default"].weight.data @ self.down["default"].weight.data
        return self.base


def test_layers_whose_weight_a_wrapper_presents_as_its_own_are_left_alone():
    model, x = nn.Sequential(nn.Linear(6, 6), Adapter(nn.Linear(6, 6))).double(), torch.randn(3, 6).double()
    expected = model(x)
    for convert in (to_svd, lambda model, **options: compress(model, rank=6, trainable=True, **options)):
        report: list[Conversion] = []
        converted = convert(model, report=report)
        assert [c.name for c in report if c.after is None] == ["1.base", "1.down.default", "1.up.default"]
        reason = "it is part of a test_convert.Adapter, which may read and write its weight"
        assert {c.reason for c in report if c.after is None} == {reason}
        converted[1] = converted[1].merge()
        assert_within(converted(x), expected, 1.0, 200)
    # There is nothing to lose on the way back, nor below a LowRank, which writes into none of its layers.
    model[1].base = to_svd(model[1].base)
    assert type(to_dense(model)[1].base) is nn.Linear
    low = compress(nn.Sequential(nn.Linear(9, 9)), rank=1)
    assert [type(layer) for layer in to_svd(low)[0]] == [LinearSVD, LinearSVD]


def test_low_rank_has_the_sizes_of_the_layer_that_it_replaced():
    """Whisper's encoder reads ``conv1.stride``, other models ``out_features``."""
    layers = (
        nn.Linear(9, 7),
        nn.Conv1d(9, 8, 3, stride=2, padding=1),
        nn.Conv2d(4, 8, (3, 1), dilation=2, padding="same"),
    )
    for layer in layers:
        small = compress(layer, rank=1)
        assert isinstance(small, LowRank)
        sizes = {"in_features", "out_features", "in_channels", "out_channels", "kernel_size", "stride", "padding"}
        for name in (sizes | {"dilation", "padding_mode"}) & vars(layer).keys():
            assert getattr(small, name) == getattr(layer, name)
        assert not hasattr(small, "out_channels" if isinstance(layer, nn.Linear) else "out_features")
        assert not hasattr(small, "groups_of_something")


def excludable() -> nn.Module:
    model = nn.Sequential()
    for name in ("encoder", "decoder"):
        block = nn.ModuleDict({"up": nn.Linear(3, 4), "myhead": nn.Linear(4, 4), "head": nn.Linear(4, 2)})
        model.add_module(name, block)
    model.add_module("head", nn.Linear(2, 2))
    return model


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        ("head", ["decoder.head", "encoder.head", "head"]),
        ("decoder.head", ["decoder.head"]),
        ("decoder", ["decoder.head", "decoder.myhead", "decoder.up"]),
        (["encoder", "decoder.up"], ["decoder.up", "encoder.head", "encoder.myhead", "encoder.up"]),
        (iter(["myhead"]), ["decoder.myhead", "encoder.myhead"]),
        ([], []),
    ],
)
def test_exclude_leaves_alone_what_it_names_and_what_is_below(exclude, left, caplog):
    exclude = exclude if isinstance(exclude, str) else list(exclude)
    report: list[Conversion] = []
    svd = to_svd(excludable(), exclude=exclude, report=report)
    assert sorted(c.name for c in report if c.after is None) == left
    assert {c.reason for c in report if c.after is None} <= {"`exclude` names it"}
    assert sorted(name for name, module in svd.named_modules() if type(module) is nn.Linear) == left
    to_svd(excludable(), exclude=exclude)
    assert not caplog.records  # it was asked for
    small = compress(excludable(), energy=0.9, trainable=True, exclude=exclude)
    assert sorted(name for name, module in small.named_modules() if type(module) is nn.Linear) == left
    dense = to_dense(to_svd(excludable()), exclude=exclude)
    assert sorted(name for name, module in dense.named_modules() if type(module) is LinearSVD) == left


def test_exclude_knows_every_name_of_a_module_and_what_shares_its_weight():
    for name in ("again", "a.0"):
        svd = to_svd(build("used twice")[0], exclude=name)
        assert type(svd.again) is nn.Linear and isinstance(svd.layers["a"][1], LinearSVD)
    report: list[Conversion] = []
    tied = to_svd(build("tied")[0], exclude="first", report=report)
    assert tied.first.weight is tied.second.weight
    assert report[1].reason == "it shares a weight with Linear `first`, which would not share its factors"


@pytest.mark.parametrize("name", ["haed", "ead", "encoder.", "", "coder.head"])
def test_a_name_that_excludes_nothing_is_an_error(name):
    there = "encoder, encoder.up, encoder.myhead, encoder.head, decoder, .*, head"
    for convert in (to_svd, to_dense, lambda model, **options: compress(model, rank=1, **options)):
        model = excludable()
        before = fingerprint(model)
        with pytest.raises(ValueError, match=f"`exclude` should name modules of `model`; got '{name}', .* {there}$"):
            convert(model, exclude=["up", name], inplace=True)
        assert fingerprint(model) == before
    with pytest.raises(ValueError, match=r"got 'x', and there are none$"):
        to_svd(nn.Linear(2, 2), exclude="x")
    with pytest.raises(ValueError, match=r"there are 0, 1, .*, 49 and 10 more$"):
        to_svd(nn.Sequential(*[nn.Linear(1, 1) for _ in range(60)]), exclude="x")
    for wrong in (3, [nn.Linear(2, 2)], None):
        with pytest.raises(TypeError, match="`exclude` should be a name or several names, as in named_modules"):
            to_svd(excludable(), exclude=wrong)


@pytest.mark.filterwarnings("ignore")
def test_quantized_layers_are_left_alone():
    quantized = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear})
    model = nn.Sequential(nn.Linear(4, 4), quantized)
    report: list[Conversion] = []
    converted = to_svd(model, report=report)
    assert [(c.name, c.after) for c in report] == [("0", "LinearSVD"), ("1.0", None)]
    x = torch.randn(3, 4)
    assert_within(converted(x), model(x).detach(), 1.0, 1e5)  # the activations are quantized


def test_attention_keeps_working():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False)
    report: list[Conversion] = []
    svd = to_svd(model, report=report).eval()
    assert {c.name.split(".", 2)[-1]: c.after for c in report} == {
        "self_attn": "ParametrizedMultiheadAttention",
        "self_attn.out_proj": "ParametrizedNonDynamicallyQuantizableLinear",
        "linear1": "LinearSVD",
        "linear2": "LinearSVD",
    }
    small = compress(svd, rank=3, report=[])
    assert isinstance(small.layers[0].linear1, LowRank)
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        fast = small(x)
    assert_within(fast, small(x).detach(), 1.0, 100)  # with gradients, the layers themselves are called


def test_device_dtype_mode_and_what_is_trained_stay(dtype):
    model = nn.Sequential(nn.Linear(6, 5), nn.Sequential(nn.Conv1d(3, 4, 2), nn.RNN(4, 4))).to(dtype)
    model[1].eval()
    model[0].weight.requires_grad_(False)
    model[1][0].bias.requires_grad_(False)
    state = torch.get_rng_state()
    svd = to_svd(model)
    small = compress(svd, rank=1, report=[])
    dense = to_dense(svd)
    assert torch.equal(torch.get_rng_state(), state)
    for other in (svd, small, dense):
        assert {p.dtype for p in other.parameters()} == {dtype}
        assert other[0].training and not other[1].training and not any(m.training for m in other[1].modules())
    assert {n for n, p in svd.named_parameters() if not p.requires_grad} == {"0.reflectors", "0.sigma", "1.0.bias"}
    assert {n for n, p in dense.named_parameters() if not p.requires_grad} == {"0.weight", "1.0.bias"}
    assert {n for n, p in small.named_parameters() if not p.requires_grad} == {"0.0.weight", "0.1.weight", "1.0.1.bias"}
    for (_, p), (_, q) in zip(dense.named_parameters(), model.named_parameters(), strict=True):
        assert_within(p, q.double(), 1.0, 10)


def test_a_filter_chooses():
    model, x = build("images")
    report: list[Conversion] = []
    svd = to_svd(model, filter=lambda name, module: isinstance(module, nn.Conv2d) and name != "3", report=report)
    assert [type(module) for module in svd] == [
        Conv2dSVD, nn.BatchNorm2d, nn.ReLU, nn.Conv2d, Conv2dSVD, nn.Flatten, nn.Linear,
    ]  # fmt: skip
    assert {c.name for c in report if c.reason == "the filter leaves it alone"} == {"3", "6"}
    assert_same([svd(x)], [model(x)])
    dense = to_dense(svd, filter=lambda name, _: name == "0")
    assert type(dense[0]) is nn.Conv2d and type(dense[4]) is Conv2dSVD
    none = to_svd(model, filter=lambda *_: False, report=[])
    assert not any(isinstance(module, FACTORED) for module in none.modules())


def test_converting_again_changes_nothing(caplog):
    svd = to_svd(build("mlp")[0])
    again = to_svd(svd)
    assert [type(m) for m in again] == [type(m) for m in svd]
    assert [type(m) for m in to_dense(to_dense(svd))] == [nn.Linear, nn.Tanh, nn.Linear, nn.LayerNorm]
    assert not caplog.records


def test_a_spectrum_is_imposed():
    svd = to_svd(build("recurrent")[0], spectrum=spectrum.between(0.5, 0.7))
    for matrix in (*svd.rnn.svds.values(), svd.head.svd):
        assert ((matrix.sigma >= 0.5) & (matrix.sigma <= 0.7)).all()


def test_every_layer_of_fasth_becomes_dense():
    model = nn.Sequential(
        LinearSVD(6, 6, reflectors="full", spectrum=spectrum.positive()),
        LinearSymmetric(6),
        LinearOrthogonal(6, 4),
        LinearOrthogonal(4, 6, bias=False),
    ).double()
    x = torch.randn(3, 6, dtype=torch.float64)
    dense = to_dense(model)
    assert all(type(layer) is nn.Linear for layer in dense)
    assert_same(outputs_and_gradients(dense, x), outputs_and_gradients(model, x))


def test_a_failure_leaves_the_model_as_it_was(monkeypatch):
    def fails(name: str, _: nn.Module) -> bool:
        if name == "2":
            raise KeyError("stop")
        return True

    model, _ = build("mlp")
    with torch.no_grad():
        model[2].weight[0, 0] = torch.nan
    before = str(fingerprint(model))
    with pytest.raises(ValueError, match="`model` should have finite weights; got nan or infinity in 2"):
        to_svd(model, inplace=True)
    assert str(fingerprint(model)) == before
    with pytest.raises(ValueError, match="finite"):
        compress(model, rank=1, inplace=True)
    assert str(fingerprint(model)) == before
    with pytest.raises(KeyError, match="stop"):
        to_svd(model, inplace=True, filter=fails)
    assert str(fingerprint(model)) == before
    with torch.no_grad():
        model[2].weight[0, 0] = 1
    svd = to_svd(model)
    before = str(fingerprint(svd))
    calls = itertools.count()
    to_linear = LinearSVD.to_linear
    monkeypatch.setattr(LinearSVD, "to_linear", lambda self: to_linear(self) if next(calls) == 0 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        to_dense(svd, inplace=True)
    assert str(fingerprint(svd)) == before


@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("name", ["linear", "mlp", "images", "sequences", "recurrent", "used twice"])
@pytest.mark.parametrize("first", [lambda model: model, to_svd], ids=["dense", "svd"])
def test_compress_is_the_best_approximation(name, rank, first, monkeypatch):
    model, x = build(name)
    expected = copy.deepcopy(model)
    for module in expected.modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            U, sigma, Vh = torch.linalg.svd(module.weight.detach().flatten(1), full_matrices=False)
            W = (U[:, :rank] * sigma[:rank]) @ Vh[:rank]
            module.weight.data = W.view_as(module.weight)
    source = first(model)
    if first is to_svd:
        monkeypatch.setattr(torch.linalg, "svd", None)
    largest = max(
        min(m.weight.flatten(1).shape) for m in expected.modules() if hasattr(m, "weight") and m.weight.ndim > 1
    )
    if rank > largest:
        with pytest.raises(ValueError, match=f"`rank` should be at most {largest}"):
            compress(source, rank=rank)
        return
    before = fingerprint(source)
    small = compress(source, rank=rank, report=[])
    assert fingerprint(source) == before
    assert not any(isinstance(m, FACTORED) and not isinstance(m, (GRUSVD, LSTMSVD, RNNSVD)) for m in small.modules())
    assert_same([small(x)], [expected(x)])
    for module, twin in zip(_layers(small), _layers(expected), strict=True):
        n, m = twin.weight.flatten(1).shape
        thin = min(rank, n, m) * (n + m)
        assert isinstance(module, LowRank) == (thin < n * m)
        assert sum(p.numel() for k, p in module.named_parameters() if "bias" not in k) == min(thin, n * m)
        assert_within(module.weight, twin.weight.detach(), 1.0, 200)


def _layers(model: nn.Module) -> list[nn.Module]:
    """The compressible layers, where two thin ones count as one."""
    if isinstance(model, (LowRank, nn.Linear, nn.Conv1d, nn.Conv2d)):
        return [model]
    return [layer for child in dict.fromkeys(model.children()) for layer in _layers(child)]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.floats(0.01, 1.0), st.booleans())
def test_energy(n, m, energy, factored):
    layer = nn.Linear(m, n, dtype=torch.float64)
    report: list[Conversion] = []
    small = compress(to_svd(layer) if factored else layer, energy=energy, report=report)
    sigma = torch.linalg.svdvals(layer.weight.detach())
    kept = int(torch.linalg.matrix_rank(small.weight.detach()))
    fraction = sigma.square().cumsum(0) / sigma.square().sum()
    assert fraction[kept - 1] >= energy - 1e-9
    assert kept == 1 or fraction[kept - 2] < energy
    error = (small.weight - layer.weight).norm() / layer.weight.norm()
    assert error.square() <= 1 - energy + 1e-9
    if isinstance(small, LowRank):
        assert report[0].reason == f"rank {kept} of {min(n, m)}"
        assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in layer.parameters())


def test_compress_after_training():
    """Two layers of fasth learn a map of rank 2; its weights then need no more than that."""
    torch.manual_seed(0)
    layer = LinearSVD(16, 16)
    target = torch.randn(16, 2) @ torch.randn(2, 16) / 4
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    for _ in range(300):
        x = torch.randn(64, 16)
        loss = F.mse_loss(layer(x), x @ target.mT)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    small = compress(nn.Sequential(layer), energy=0.99)
    assert isinstance(small[0], LowRank) and small[0][0].out_features <= 4
    assert_within(small[0].weight, layer.weight.detach().double(), 0.1 * target.norm().item(), 1e6)


def test_compress_some_special_layers():
    symmetric = LinearSymmetric(8, dtype=torch.float64)
    with torch.no_grad():
        symmetric.sigma.copy_(torch.linspace(-3, 3, 8))
    small = compress(symmetric, rank=2)
    expected = symmetric.eig.truncate(rank=2).dense()
    assert isinstance(small, LowRank)
    assert_within(small.weight, expected.detach(), 3.0, 8)
    zero = nn.Linear(8, 8)
    nn.init.zeros_(zero.weight)
    for layer in (zero, to_svd(zero)):
        small = compress(layer, energy=0.5)
        assert torch.equal(small(torch.randn(3, 8)), zero.bias.expand(3, 8))
    report: list[Conversion] = []
    compress(
        nn.ModuleList([LinearOrthogonal(4, 4), RNNSVD(3, 4), nn.RNN(3, 4), nn.Linear(4, 4)]), rank=4, report=report
    )
    assert [c.after for c in report] == [None] * 4
    assert [c.reason for c in report] == [
        "its singular values are all 1",
        *["an RNN's kernel takes no thin weights"] * 2,
        "its rank is at most 4",
    ]
    assert type(compress(LinearSVD(4, 4), rank=4)) is nn.Linear


def test_a_mistake_is_explained():
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    for options, message in [
        ({}, "exactly one of `rank` and `energy`"),
        ({"rank": 2, "energy": 0.5}, "exactly one of `rank` and `energy`"),
        ({"rank": 0}, "`rank` should be an int of at least 1; got 0"),
        ({"rank": 2.0}, "`rank` should be an int of at least 1; got 2.0"),
        ({"rank": 5}, "`rank` should be at most 4, the largest of a layer of `model`; got 5"),
        ({"energy": 0.0}, r"`energy` should be above 0 and at most 1; got 0\.0"),
        ({"energy": 1.5}, r"`energy` should be above 0 and at most 1; got 1\.5"),
        ({"energy": float("nan")}, "`energy` should be above 0 and at most 1; got nan"),
    ]:
        with pytest.raises(ValueError, match=message):
            compress(model, **options)
    with pytest.raises(ValueError, match="`reflectors` should be 'compact' or 'full'; got 'dense'"):
        to_svd(model, reflectors="dense")
    with pytest.raises(TypeError, match=r"`spectrum` should be one of fasth\.spectrum; got 'free'"):
        to_svd(model, spectrum="free")
    with pytest.raises(TypeError, match="`filter` should be a function of a name and a module; got str"):
        to_svd(model, filter="0")
    for convert in (to_svd, to_dense, lambda model: compress(model, rank=1)):
        with pytest.raises(TypeError, match=r"`model` should be a torch\.nn\.Module; got dict"):
            convert({})
    with pytest.raises(
        ValueError, match=r"that can be truncated; got RNN\n  the model itself \(RNN\): an RNN's kernel"
    ):
        compress(nn.RNN(3, 3), rank=1)
