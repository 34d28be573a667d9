"""Programs that set, prune or fuse the weight of a layer, which is computed: what they are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import fusion, prune

from fasth import GRUSVD, LSTMSVD, RNNSVD, Conv2dSVD, LinearOrthogonal, LinearSVD, LinearSymmetric, to_dense


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
