"""The definition itself, against reflections written out as matrices."""

import torch

from fasth.reflections import definition


def test_is_the_product_of_the_reflections():
    x, V = torch.randn(3, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    Q = torch.eye(5, dtype=torch.float64)
    for v in V:
        Q = Q @ (torch.eye(5, dtype=torch.float64) - 2 * torch.outer(v, v) / v.dot(v))
    torch.testing.assert_close(definition.householder(x, V), torch.nn.functional.linear(x, Q))
    torch.testing.assert_close(definition.householder(x, V, transpose=True), torch.nn.functional.linear(x, Q.mT))


def test_a_zero_reflector_is_the_identity():
    x, V = torch.randn(3, 5), torch.zeros(2, 5, requires_grad=True)
    out = definition.householder(x, V)
    out.square().sum().backward()
    assert torch.equal(out, x)
    assert torch.equal(V.grad, torch.zeros(2, 5))


def test_triangular_ignores_what_is_left_of_the_diagonal():
    x, V = torch.randn(3, 5), torch.randn(5, 5)
    out = definition.householder(x, V, triangular=True)
    assert torch.equal(out, definition.householder(x, V.triu()))
