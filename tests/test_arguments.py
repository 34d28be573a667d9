"""Bad input: an error says what was expected and what arrived."""

from __future__ import annotations

import pytest
import torch

from fasth import householder

x, V = torch.randn(4, 6), torch.randn(6, 6)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((torch.randn(4, 5), V), {}, ValueError, ["last dimension 6", "(6, 6)", "(4, 5)"]),
        ((torch.tensor(1.0), V), {}, ValueError, ["last dimension 6", "got ()"]),
        ((x, V[0]), {}, ValueError, ["(r, d)", "got (6,)"]),
        ((x, torch.tensor(1.0)), {}, ValueError, ["(r, d)", "got ()"]),
        ((torch.randn(4, 0), torch.randn(3, 0)), {}, ValueError, ["at least one entry", "(3, 0)"]),
        ((x.int(), V), {}, TypeError, ["`x`", "float32", "int32"]),
        ((x, V.long()), {}, TypeError, ["`V`", "float32", "int64"]),
        ((x.to(torch.complex64), V.to(torch.complex64)), {}, TypeError, ["float32", "complex64"]),
        ((x, V.double()), {}, TypeError, ["one dtype", "float32", "float64"]),
        ((x, V.to("meta")), {}, ValueError, ["one device", "cpu", "meta"]),
        ((x.numpy(), V), {}, TypeError, ["`x` should be a tensor", "ndarray"]),
        ((x, [1.0]), {}, TypeError, ["`V` should be a tensor", "list"]),
        ((torch.randn(2, 4, 6), torch.randn(3, 6, 6)), {}, ValueError, ["broadcast", "(2, 4, 6)", "(3, 6, 6)"]),
        ((x, V), {"block_size": 0}, ValueError, ["at least 1", "got 0"]),
        ((x, V), {"block_size": -3}, ValueError, ["at least 1", "got -3"]),
        ((x, V), {"block_size": 2.5}, TypeError, ["int", "float"]),
        ((x, V), {"block_size": True}, TypeError, ["int", "bool"]),
    ],
)
def test_says_what_was_expected_and_what_arrived(arguments, options, error, words):
    with pytest.raises(error) as caught:
        householder(*arguments, **options)
    for word in words:
        assert word in str(caught.value)


def test_the_signature_is_the_documented_one():
    import inspect

    parameters = inspect.signature(householder).parameters
    assert list(parameters) == ["x", "V", "transpose", "triangular", "block_size"]
    assert all(parameters[p].kind is inspect.Parameter.KEYWORD_ONLY for p in ("transpose", "triangular", "block_size"))
