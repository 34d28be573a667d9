"""Layers that ``to_svd`` holds as SVDs by parametrizing them, and what reads their weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import fasth
from fasth.convert.parametrized import PARAMETRIZED
from fasth.nn.held_weight import HeldWeight, held_weights
from fasth.nn.registry import converter_for, register
from fasth.parametrizations import svd


class Attention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` of one tensor for queries, keys and values."""


class Conv1D(nn.Module):
    """GPT-2's layer, of transformers: x W + b with W: (in, out)."""

    def __init__(self, n: int, m: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(m, n) / m**0.5), nn.Parameter(torch.zeros(n))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


Conv1D.__module__ = "transformers.pytorch_utils"

# Each with the shapes of its inputs and of the matrices that it holds.
LAYERS = {
    "attention": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        [(2, 5, 8)] * 3,
        {"in_proj_weight": (3, 8, 8), "out_proj.weight": (8, 8)},
    ),
    "attention of other sizes": (
        lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=6, batch_first=True),
        [(2, 5, 8), (2, 5, 4), (2, 5, 6)],
        {"q_proj_weight": (8, 8), "k_proj_weight": (8, 4), "v_proj_weight": (8, 6), "out_proj.weight": (8, 8)},
    ),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.0),
        [(2, 5, 8)],
        {
            "self_attn.in_proj_weight": (3, 8, 8),
            "self_attn.out_proj.weight": (8, 8),
            "linear1": (12, 8),
            "linear2": (8, 12),
        },
    ),
    "Conv3d": (lambda: nn.Conv3d(4, 6, 2), [(2, 4, 4, 4, 4)], {"weight": (6, 32)}),
    "Conv1d with groups": (lambda: nn.Conv1d(4, 4, 3, groups=4), [(2, 4, 6)], {"weight": (4, 1, 3)}),
    "Conv2d with groups": (lambda: nn.Conv2d(4, 8, 3, groups=2, bias=False), [(2, 4, 6, 6)], {"weight": (2, 4, 18)}),
    "Conv3d with groups": (lambda: nn.Conv3d(4, 4, 2, groups=2), [(2, 4, 4, 4, 4)], {"weight": (2, 2, 16)}),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), [(2, 4, 6)], {"weight": (4, 18)}),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), [(2, 4, 5, 5)], {"weight": (2, 2, 27)}),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(2, 3, 2), [(2, 2, 3, 3, 3)], {"weight": (2, 24)}),
    "Bilinear": (lambda: nn.Bilinear(4, 5, 6), [(3, 4), (3, 5)], {"weight": (6, 4, 5)}),
    "GPT-2's Conv1D": (lambda: Conv1D(6, 4), [(3, 4)], {"weight": (4, 6)}),
}
each_layer = pytest.mark.parametrize("name", LAYERS)


def build(name: str) -> tuple[nn.Module, list[Tensor], dict[str, tuple[int, ...]]]:
    make, shapes, held = LAYERS[name]
    return make().double(), [torch.randn(shape, dtype=torch.float64) for shape in shapes], held


def output(model: nn.Module, inputs: list[Tensor]) -> Tensor:
    out = model(*inputs)
    return out[0] if isinstance(out, tuple) else out


@each_layer
def test_to_svd_and_back(name):
    model, inputs, held = build(name)
    report: list[fasth.convert.Conversion] = []
    converted = fasth.to_svd(model, report=report)
    assert all(conversion.after is not None for conversion in report)
    assert {name: weight.shape for name, weight in fasth.spectra(converted).items()} == held
    expected = output(model, inputs)
    torch.testing.assert_close(output(converted, inputs), expected)
    torch.testing.assert_close(output(copy.deepcopy(converted).eval(), inputs), expected)
    dense = fasth.to_dense(converted)
    assert [type(module) for module in dense.modules()] == [type(module) for module in model.modules()]
    assert list(dense.state_dict()) == list(model.state_dict())
    torch.testing.assert_close(output(dense, inputs), expected)
    torch.testing.assert_close(output(converted, inputs), expected)  # which a change of the class would break
    assert not any(True for module in dense.modules() for _ in held_weights(module))


@each_layer
def test_singular_values_are_those_of_the_weight(name):
    model, _, _ = build(name)
    weights, found = dict(model.named_parameters()), fasth.spectra(fasth.to_svd(model))
    for weight_name, layer in found.items():
        weight = weights.get(weight_name, weights.get(f"{weight_name}.weight"))
        expected = torch.linalg.svdvals(weight.detach().reshape(layer.shape))
        torch.testing.assert_close(layer.singular_values, expected)


@each_layer
def test_they_train_and_rates_and_penalties_know_them(name):
    model, inputs, held = build(name)
    converted = fasth.to_svd(model, spectrum=fasth.spectrum.positive())
    groups = fasth.param_groups(converted, lr=1e-2, weight_decay=0.1)
    assert sum(len(group["params"]) for group in groups if group["name"] == "reflectors") == len(held)
    assert sum(len(group["params"]) for group in groups if group["name"] == "sigma") == len(held)
    before = fasth.nuclear_norm(converted).item()
    optimizer = torch.optim.AdamW(groups)
    for _ in range(3):
        optimizer.zero_grad()
        (output(converted, inputs).square().mean() + 0.1 * fasth.nuclear_norm(converted)).backward()
        assert all(p.grad is not None for group in groups for p in group["params"])
        optimizer.step()
    assert fasth.nuclear_norm(converted).item() < before


@each_layer
def test_what_is_trained_and_what_is_shared_stays(name):
    model, inputs, _ = build(name)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" in parameter_name)
    biases = [parameter for parameter in model.parameters() if parameter.requires_grad]
    converted = fasth.to_svd(model, inplace=True)
    assert [p for p in converted.parameters() if p.requires_grad] == biases
    dense = fasth.to_dense(converted, inplace=True)
    assert [p for p in dense.parameters() if p.requires_grad] == biases
    pair = nn.ModuleList([model := LAYERS[name][0]().double(), copy.deepcopy(model)])
    for one, other in zip(pair[0].modules(), pair[1].modules(), strict=True):
        for parameter_name, parameter in one.named_parameters(recurse=False):
            if parameter.ndim > 1:
                setattr(other, parameter_name, parameter)
    count = sum(p.numel() for p in pair.parameters())
    shared = fasth.to_svd(pair)
    sigma = sum(layer.singular_values.numel() for layer in fasth.spectra(shared[0]).values())
    assert sum(p.numel() for p in shared.parameters()) == count + sigma
    assert sum(p.numel() for p in fasth.to_dense(shared).parameters()) == count
    torch.testing.assert_close(output(shared[1], inputs), output(pair[1], inputs))


def test_subclasses_and_single_layers_that_are_excluded_are_left_alone():
    report: list[fasth.convert.Conversion] = []
    model = nn.ModuleList([Attention(8, 2), nn.MultiheadAttention(8, 2), nn.Linear(8, 8)])
    converted = fasth.to_svd(model, exclude="1.out_proj", report=report)
    assert {c.name: c.reason for c in report if c.after is None} == {
        "0": "a subclass of MultiheadAttention may compute something else",
        "1.out_proj": "`exclude` names it",
    }
    assert list(fasth.spectra(converted)) == ["0.out_proj.weight", "1.in_proj_weight", "2"]


def test_messages_name_classes_that_can_be_converted():
    for name in PARAMETRIZED:
        assert converter_for(object.__new__(getattr(nn, name)))[0] is not None


@pytest.mark.parametrize(
    ("shape", "words"),
    [((4,), r"got \(4,\)"), ((3, 2, 4), r"the 32 entries of `weight`, \(4, 2, 4\); got \(3, 2, 4\)")],
)
def test_a_shape_of_matrices_that_does_not_fit(shape, words):
    with pytest.raises(ValueError, match=words):
        svd(nn.Conv1d(2, 4, 4), shape=shape)


def test_the_fast_path_of_a_transformer_takes_parametrized_weights():
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        torch.testing.assert_close(fasth.to_svd(layer)(x), layer(x), rtol=1e-4, atol=1e-5)


# A new layer is one file.


class Scaled(nn.Module):
    """A layer with a weight U Σ of its own, which says what it holds and how it is made."""

    def __init__(self, reflectors: Tensor, sigma: Tensor) -> None:
        super().__init__()
        self.mine, self.scale = nn.Parameter(reflectors), nn.Parameter(sigma)

    def held_weights(self) -> Iterator[HeldWeight]:
        shape = tuple(self.mine.shape)
        yield HeldWeight("", shape, self.mine, self.scale, None, "compact", fasth.spectrum.free())


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.diag(torch.tensor([3.0, 2.0])))


class ToScaled:
    def weights(self, dense):
        return ("weight",)

    def why_not(self, dense):
        return ""

    def to_svd(self, dense, spectrum, reflectors, rank):
        return Scaled(-torch.eye(2), dense.weight.detach().diagonal()), "as an example"


def test_a_new_layer_is_known_to_all_that_read_weights():
    register(Plain, ToScaled())
    report: list[fasth.convert.Conversion] = []
    model = fasth.to_svd(nn.Sequential(Plain()), report=report)
    assert report == [("0", "Plain", "Scaled", "as an example")]
    assert fasth.spectra(model)["0"].singular_values.tolist() == [3.0, 2.0]
    assert fasth.nuclear_norm(model).item() == 5.0
    rates = {group["name"]: group["lr"] for group in fasth.param_groups(model, lr=0.003)}
    assert rates == pytest.approx({"sigma": 0.003 * math.sqrt(2), "reflectors": 0.003})
