"""The paper's algorithms against the definition, and every method that is timed against its own reference."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fasth.reflections import definition
from fasth.tools.problems import assert_all_close, from_definition, with_gradients, zero_rows
from fasth.tools.reproduce import baselines, methods, printed
from fasth.tools.reproduce.timing import verify

ALGORITHMS = {
    "sequential": baselines.sequential,
    "parallel": baselines.parallel,
    "FastH": baselines.fasth,
    "FastH, k = 1": partial(baselines.fasth, k=1),
    "FastH, k = 5": partial(baselines.fasth, k=5),
    "FastH, k above r": partial(baselines.fasth, k=100),
    "FastH, as printed": printed.fasth,
    "FastH, as printed, k = 5": partial(printed.fasth, k=5),
    "FastH++": baselines.fasthpp,
    "FastH++, width 1": partial(baselines.fasthpp, width=1),
    "FastH++, width 4": partial(baselines.fasthpp, width=4),
    "FastH++, width 5 is 8": partial(baselines.fasthpp, width=5),
    "FastH++, merged to one": partial(baselines.fasthpp, width=None),
}

SHAPES = {  # rows, r, d
    "d = 1": (3, 1, 1),
    "one row": (1, 7, 7),
    "odd": (5, 13, 13),
    "r < d": (4, 6, 11),
    "r > d": (4, 11, 6),
    "more rows than d": (20, 9, 9),
    "d = 64": (32, 64, 64),
    "ragged": (32, 70, 70),
}


def draw(shape: str) -> tuple[torch.Tensor, torch.Tensor]:
    rows, r, d = SHAPES[shape]
    x, V = (torch.randn(n, d, dtype=torch.float64) for n in (rows, r))
    return x.requires_grad_(), V.requires_grad_()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_follows_the_definition(algorithm, shape):
    x, V = draw(shape)
    assert_all_close(with_gradients(ALGORITHMS[algorithm], x, V), with_gradients(from_definition, x, V), V)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_zero_reflector_is_the_identity(algorithm):
    x, V = draw("odd")
    V = zero_rows(V.detach()).requires_grad_()
    actual = with_gradients(ALGORITHMS[algorithm], x, V)
    assert_all_close(actual, with_gradients(from_definition, x, V), V)
    assert not actual[2][::3].any()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_backward_pass_leaves_its_inputs_as_they_were(algorithm):
    x, V = draw("odd")
    out = ALGORITHMS[algorithm](x, V)
    g = torch.randn_like(out)
    before = [t.detach().clone() for t in (x, V, out, g)]
    first, second = (torch.autograd.grad(out, (x, V), g, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, (x, V, out, g), strict=True))


@pytest.mark.parametrize("size", [(1, 3), (2, 1), (7, 5), (16, 40), (64, 32)], ids="d={0[0]}, rows={0[1]}".format)
@pytest.mark.parametrize("name", methods.METHODS)
def test_every_method_gives_its_reference(name, size, precise, device):
    method = methods.METHODS[name]
    if not method.installed:
        pytest.skip(f"{method.requires} is not installed; `make bench` installs it")
    verify(method.build(*size, precise, device, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("map", [methods.exponential, methods.cayley])
def test_the_maps_are_orthogonal_and_near_the_identity_as_they_should_be(map):
    A = baselines.skew(torch.randn(9, 9, dtype=torch.float64) / 3)
    torch.testing.assert_close(map(A) @ map(A).mT, torch.eye(9, dtype=torch.float64))
    slope = {methods.exponential: 1, methods.cayley: -2}[map]
    torch.testing.assert_close((map(1e-6 * A) - map(-1e-6 * A)) / 2e-6, slope * A)


@pytest.mark.parametrize("triangular", [False, True], ids=["full", "triangular"])
@pytest.mark.parametrize("transpose", [False, True], ids=["Q", "transpose"])
@pytest.mark.parametrize("rows", [4, 30])
def test_the_reference_is_the_definition_at_every_size(rows, transpose, triangular, monkeypatch):
    x, V = (torch.randn(n, 9, dtype=torch.float64, requires_grad=True) for n in (rows, 9))
    direction = dict(transpose=transpose, triangular=triangular)
    expected = with_gradients(definition.householder, x, V, **direction)
    for few in (10**9, 0):
        monkeypatch.setattr(methods, "_FEW", few)
        for actual, reference in zip(with_gradients(methods.product, x, V, **direction), expected, strict=True):
            torch.testing.assert_close(actual, reference)


def test_triangular_reflectors_are_as_lapack_stores_them():
    V = methods.triangular(torch.randn(20, 20))
    assert torch.equal(V, V.triu())
    assert torch.equal(V.diagonal(), torch.ones(20))
    assert V.abs().max() <= 1


def test_one_seed_is_one_problem_for_all():
    cases = [
        method.build(6, 4, torch.float32, "cpu", torch.Generator().manual_seed(3))
        for method in methods.METHODS.values()
        if method.installed
    ]
    for case in cases:
        assert torch.equal(case.tensors[0], cases[0].tensors[0])
        assert torch.equal(case.gradient, cases[0].gradient)


def test_building_leaves_the_global_generator_as_it_was():
    before = torch.get_rng_state()
    for method in methods.METHODS.values():
        if method.installed:
            method.build(4, 3, torch.float32, "cpu", torch.Generator().manual_seed(3))
    assert torch.equal(before, torch.get_rng_state())
