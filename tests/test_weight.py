"""Programs that set, prune, fuse or write into the weight of a layer, which is computed: the errors that they get."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import fusion, prune

from fasth import GRUSVD, LSTMSVD, RNNSVD, Conv2dSVD, LinearOrthogonal, LinearSVD, LinearSymmetric, cached, to_dense


def assigned(layer: Any, name: str, value: Any) -> None:
    setattr(layer, name, value)


@pytest.mark.parametrize(
    ("call", "made_of"),
    [
        (lambda: assigned(LinearSVD(4, 4), "weight", torch.eye(4)), "`weight` .* `reflectors`, `sigma`"),
        (lambda: assigned(LinearSVD(4, 4), "weight", nn.Parameter(torch.eye(4))), "`weight` .* `reflectors`, `sigma`"),
        (lambda: assigned(LinearSVD(4, 4, rank=2), "weight", None), "`reflectors_U`, `reflectors_V`, `sigma`"),
        (lambda: assigned(LinearSVD(4, 4, reflectors="full"), "weight", None), "`U`, `V`, `sigma`, `signs`"),
        (lambda: assigned(LinearSymmetric(4), "weight", torch.eye(4)), "LinearSymmetric .* `reflectors`, `sigma`"),
        (lambda: assigned(LinearOrthogonal(4, 4), "weight", torch.eye(4)), "LinearOrthogonal .* `reflectors`. Call"),
        (lambda: assigned(LSTMSVD(4, 4), "weight_hh_l0", torch.eye(4)), "`weight_hh_l0` .* `sigma_l0`"),
        (lambda: LinearSVD(4, 4).register_parameter("weight", None), "`weight`"),
        (lambda: prune.l1_unstructured(LinearSVD(4, 4), "weight", 0.5), "`weight_orig` .* LinearSVD"),
        (lambda: prune.random_structured(Conv2dSVD(4, 4, 3), "weight", 0.5, dim=0), "`weight_orig` .* Conv2dSVD"),
        (lambda: prune.l1_unstructured(GRUSVD(4, 4), "weight_hh_l0", 0.5), "`weight_hh_l0_orig` .* `sigma_l0`"),
        (lambda: fusion.fuse_conv_bn_eval(Conv2dSVD(3, 4, 3).eval(), nn.BatchNorm2d(4).eval()), "Conv2dSVD"),
        (lambda: fusion.fuse_linear_bn_eval(LinearSVD(3, 4).eval(), nn.BatchNorm1d(4).eval()), "LinearSVD"),
    ],
)
def test_what_sets_the_weight_is_told_what_to_do(call: Callable[[], Any], made_of: str) -> None:
    with pytest.raises(AttributeError, match=made_of) as caught:
        call()
    for word in ("`set_weight_`", "`fasth.to_dense`", "cannot be set"):
        assert word in str(caught.value)


def test_what_the_message_recommends_works() -> None:
    model = nn.Sequential(Conv2dSVD(3, 4, 3), nn.BatchNorm2d(4)).eval()
    x = torch.randn(2, 3, 5, 5)
    dense = to_dense(model)
    torch.testing.assert_close(fusion.fuse_conv_bn_eval(dense[0], dense[1])(x), model(x), rtol=1e-5, atol=1e-5)
    prune.l1_unstructured(model[0], "sigma", 0.5)
    assert torch.linalg.matrix_rank(model[0].weight.flatten(1)) == 2
    rnn = RNNSVD(3, 4)
    prune.l1_unstructured(rnn, "weight_ih_l0", 0.5)  # a parameter like any other
    assert (rnn.weight_ih_l0 == 0).sum() == 6


LAYERS: dict[str, Callable[[], Any]] = {
    "linear": lambda: LinearSVD(4, 4),
    "low rank": lambda: LinearSVD(4, 4, rank=2),
    "symmetric": lambda: LinearSymmetric(4),
    "orthogonal": lambda: LinearOrthogonal(4, 4),
    "convolution": lambda: Conv2dSVD(4, 4, 1),
    "recurrent": lambda: RNNSVD(4, 4),
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "copy_": lambda layer: layer.weight.copy_(torch.eye(4)),
    "data =": lambda layer: setattr(layer.weight, "data", torch.eye(4)),
    "data +=": lambda layer: setattr(layer.weight, "data", layer.weight.data + 1),
    "data.add_": lambda layer: layer.weight.data.add_(1),
    "nn.init": lambda layer: nn.init.xavier_uniform_(layer.weight),
    "nn.init by name": lambda layer: nn.init.zeros_(tensor=layer.weight),
    "entries": lambda layer: layer.weight.__setitem__(0, 1.0),
    "+=": lambda layer: layer.weight.__iadd__(1),
    "out=": lambda layer: torch.add(layer.weight.detach(), 1, out=layer.weight),
    "function": lambda layer: torch.relu_(layer.weight),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("caching", [False, True], ids=["", "cached"])
def test_writing_into_a_weight_is_an_error(make: Callable[[], Any], write: Callable[[Any], Any], caching: bool) -> None:
    """A write would change a temporary tensor, or, within ``cached()``, the weight of all later calls."""
    layer = make()
    before = copy.deepcopy(layer.state_dict())
    with contextlib.nullcontext() if not caching else cached(), torch.no_grad():
        expected = layer.weight.clone()
        with pytest.raises(RuntimeError, match=r"`set_weight_`.*`fasth\.to_dense`"):
            write(layer)
        torch.testing.assert_close(layer.weight.clone(), expected)
    assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())


def test_each_weight_of_a_recurrent_layer_is_read_only() -> None:
    with pytest.raises(RuntimeError, match="set_weight_"):
        nn.init.orthogonal_(LSTMSVD(3, 4).weight_hh_l0)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_a_weight_is_read_as_any_tensor(make: Callable[[], Any]) -> None:
    """Results are plain tensors, with gradients; copies and files have plain tensors, too."""
    layer = make()
    W = layer.weight
    plain = (W + 0, W.detach(), W.clone(), torch.stack([W, W]), W.reshape(-1), W.to(torch.float64), W[0])
    assert all(type(t) is torch.Tensor for t in plain) and isinstance(W, torch.Tensor)
    assert torch.equal(torch.ones(4, 4).copy_(W.detach().reshape(-1, 4)[:4]), W.detach().reshape(-1, 4)[:4])
    W.square().sum().backward()
    assert all(getattr(layer, name).grad is not None for name in layer._factor_names)
    with torch.no_grad():
        W = layer.weight
        file = io.BytesIO()
        torch.save(W, file)
        file.seek(0)
        for t in (copy.deepcopy(W), torch.load(file)):
            assert type(t) is torch.Tensor and torch.equal(t, W)
            t.zero_()
    assert "Tensor" in repr(W) and W.numpy().shape == W.shape


def test_a_graph_and_a_transform_get_a_plain_weight() -> None:
    layer, x = LinearSVD(4, 4), torch.randn(3, 4)
    compiled = torch.compile(lambda x: x @ layer.weight.mT, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), x @ layer.weight.mT)
    weights = torch.func.vmap(lambda scale: scale * layer.weight)(torch.ones(2))
    torch.testing.assert_close(weights[0], layer.weight.clone())
