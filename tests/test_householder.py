"""``householder`` against the definition: values, gradients, memory, over the whole table of problems."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fasth import householder
from fasth.functional import reflect
from fasth.reflections import planner
from fasth.reflections.autograd import with_sign_guard
from fasth.tools.problems import (
    DIRECTIONS,
    PROBLEMS,
    Problem,
    assert_all_close,
    assert_close,
    from_definition,
    gradient_of,
    with_gradients,
)

by_name = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
pytestmark = pytest.mark.usefixtures("path")
each_direction = pytest.mark.parametrize("direction", DIRECTIONS, ids=lambda d: "-".join(k for k in d if d[k]) or "Q")


@pytest.mark.every_level
@by_name
@each_direction
def test_values_and_gradients(problem: Problem, direction, dtype, device):
    x, V = problem.draw(dtype, device)
    expected = with_gradients(from_definition, x, V, **direction)
    actual = with_gradients(householder, x, V, block_size=problem.block_size, **direction)
    assert all(t.dtype == dtype for t in actual)
    assert_all_close(actual, expected, V.triu() if direction["triangular"] else V)


@pytest.mark.every_level
@pytest.mark.parametrize("problem", [p for p in PROBLEMS if len(p.V_shape) == 2], ids=lambda problem: problem.name)
@each_direction
def test_more_rows(problem: Problem, direction, precise, device):
    """The core has two ways with rows, and the problems have few."""
    _, V = problem.draw(precise, device)
    x = torch.randn(40, V.shape[1], dtype=precise, device=device, requires_grad=True)
    expected = with_gradients(from_definition, x, V, **direction)
    actual = with_gradients(householder, x, V, block_size=problem.block_size, **direction)
    assert_all_close(actual, expected, V.triu() if direction["triangular"] else V)


@by_name
@each_direction
def test_transpose_is_the_inverse(problem: Problem, direction, device):
    x, V = problem.draw(torch.float64, device)
    x = torch.atleast_2d(x)
    there = householder(x, V, block_size=problem.block_size, **direction)
    direction = {**direction, "transpose": not direction["transpose"]}
    back = householder(there, V, block_size=2, **direction)
    assert_close(back, x.expand(back.shape), x.norm(), V.shape[-2])


@by_name
@each_direction
@pytest.mark.parametrize("frozen", ["x", "V"])
def test_a_frozen_argument_changes_nothing_for_the_other(problem: Problem, direction, frozen, device):
    x, V = problem.draw(torch.float64, device)
    out = householder(x, V, **direction)
    g = torch.randn_like(out)
    of_x, of_V = torch.autograd.grad(out, (x, V), g)
    (V if frozen == "V" else x).requires_grad_(False)
    wanted, expected = (x, of_x) if frozen == "V" else (V, of_V)
    (gradient,) = torch.autograd.grad(householder(x, V, **direction), wanted, g)
    torch.testing.assert_close(gradient, expected)


def test_a_block_is_no_larger_than_there_are_reflections(device):
    """All but 10 of 10⁵ triangular reflectors of length 10 are zero: a block of 10⁵ would take 40 GB for its T."""
    r = 10**5
    x, V = Problem("", (3, 10), (r, 10)).draw(torch.float32, device)
    expected = with_gradients(householder, x, V[:10], triangular=True)
    out, dx, dV = with_gradients(householder, x, V, triangular=True, block_size=r)
    assert_all_close((out, dx, dV[:10]), expected, V[:10].triu())
    assert not dV[10:].any()


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("block_size", [None, 64])
def test_q_of_many_short_reflectors_is_orthogonal(d, block_size, device):
    """In one block of 64 dependent reflectors, the largest error was 300 roundings."""
    torch.manual_seed(0)
    for V in torch.randn(100, 64, d, device=device):
        Q = householder(torch.eye(d, device=device), V, block_size=block_size).double()
        assert (Q.mT @ Q - torch.eye(d, device=device)).abs().max() < 64 * torch.finfo(V.dtype).eps


def test_no_reflections_on_the_meta_device():
    x, V = torch.empty(3, 5, device="meta"), torch.empty(0, 5, device="meta")
    assert householder(x, V).shape == (3, 5)


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 8, 31, 32, 33, 100, 1000])
@each_direction
def test_every_block_size_gives_the_same(block_size, direction, device):
    x, V = Problem("", (4, 33), (33, 33)).draw(torch.float64, device)
    expected = with_gradients(from_definition, x, V, **direction)
    actual = with_gradients(householder, x, V, block_size=block_size, **direction)
    assert_all_close(actual, expected, V)


@pytest.mark.parametrize("shape", [(1, 1), (8, 8), (5, 12), (12, 5), (70, 70), (150, 100), (100, 150)], ids=str)
@pytest.mark.parametrize("lower", [False, True], ids=["upper", "lower"])
@pytest.mark.parametrize("transpose", [False, True], ids=["Q", "transpose"])
def test_compact_reflectors_on_one_side_of_a_matrix(shape, lower, transpose, precise, device):
    matrix = torch.randn(shape, dtype=precise, device=device).div_(shape[0] ** 0.5)
    matrix.diagonal().sign_()  # signs have no gradient unless they are close to zero
    matrix.requires_grad_()
    x = torch.randn(7, shape[0 if lower else 1], dtype=precise, device=device, requires_grad=True)

    def definition(x, matrix):
        V = (matrix.mT if lower else matrix).triu(1)
        V = V + torch.eye(*V.shape, dtype=V.dtype, device=V.device)
        return from_definition(x, V, transpose=transpose, triangular=True)

    expected = with_gradients(definition, x, matrix)
    actual = with_gradients(lambda x, m: reflect(x, m.mT if lower else m, "compact", transpose=transpose), x, matrix)
    assert_all_close(actual[:2], expected[:2], matrix)
    assert_close(actual[2], expected[2], expected[0].norm() * expected[1].norm(), max(shape))
    other_side = actual[2].triu() if lower else actual[2].tril()
    assert not other_side.any()


def test_compact_reflectors_have_second_derivatives(device):
    matrix = torch.randn(6, 6, dtype=torch.float64, device=device, requires_grad=True)
    x = torch.randn(3, 6, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x, m: reflect(x, m.mT, "compact"), (x, matrix), fast_mode=True)


def test_the_push_of_signs_away_from_zero_has_the_precision_of_its_dtype(dtype):
    reflectors = torch.tensor([0.2, -0.2, 0.0, -0.0, 0.3, -1.0], dtype=dtype).diag_embed()
    pushes = with_sign_guard(torch.ones(6, 6, dtype=dtype), reflectors).diagonal()
    assert pushes.tolist() == torch.tensor([-0.1, 0.1, -0.1, 0.1, 0.0, 0.0], dtype=dtype).tolist()


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("negated", [False, True], ids=["plain", "negated"])
def test_no_reflectors_that_want_a_gradient_of_a_constant_input(create_graph, negated, device):
    """x Qᵀ is then x, which requires no gradient, and the gradient of V is empty."""
    x, V = torch.randn(5, 12, device=device), torch.zeros(0, 12, device=device, requires_grad=True)
    out = householder(x, torch._neg_view(V) if negated else V)
    g = torch._neg_view(torch.randn_like(out)) if negated else torch.randn_like(out)
    (dV,) = torch.autograd.grad(out, V, g, create_graph=create_graph)
    assert dV.shape == V.shape


def saved_bytes(function) -> int:
    """The memory of all tensors that autograd saves for the backward pass, each storage once."""
    saved: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = function()
    assert out.requires_grad
    return sum(saved.values())


@pytest.mark.parametrize("rows", [1, 8, 32, 100, 1000, 5000])
@pytest.mark.parametrize(("r", "d"), [(64, 64), (256, 256), (33, 33), (600, 600), (7, 200), (200, 7), (1500, 50)])
@each_direction
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_saves_at_most_twice_the_memory_of_its_inputs_and_the_output(rows, r, d, direction, stored, device):
    x, V = Problem("", (rows, d), (r, d)).draw(stored, device)
    scales = 4 * (2 * planner.padded(r) + 16)  # of r reflectors in blocks that are padded, and a flag
    output = planner.padded(x.numel()) * x.itemsize
    assert saved_bytes(lambda: householder(x, V, **direction)) <= 2 * (x.nbytes + V.nbytes) + output + scales


def test_saves_nothing_without_gradients(device):
    x, V = Problem("", (8, 64), (64, 64)).draw(torch.float32, device)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            out = householder(x, V)
        assert not out.requires_grad
        assert_close(out, from_definition(x, V), x.norm(), 64)


@each_direction
@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize(("r", "d"), [(96, 96), (40, 70), (70, 40)])
@pytest.mark.parametrize("rows", [3, 40])
def test_gradients_are_the_same_whatever_was_saved(
    nothing_remembered, monkeypatch, level, rows, r, d, direction, precise, device
):
    x, V = Problem("", (rows, d), (r, d)).draw(precise, device)
    expected = with_gradients(from_definition, x, V, **direction)
    monkeypatch.setattr(planner, "_level", lambda *_: level)
    actual = with_gradients(householder, x, V, block_size=24, **direction)
    assert_all_close(actual, expected, V.triu() if direction["triangular"] else V)


def test_the_rows_after_every_block_are_saved_of_as_many_rows_as_a_block_has(device):
    for d in (64, 256, 1024):
        for rows, level in ((32, planner.SAVE_A), (48, planner.SAVE_Z)):
            x, V = torch.randn(rows, d, device=device), torch.randn(d, d, device=device, requires_grad=True)
            found = planner.plan_householder(x, V, planner.FULL)
            assert (found.block_size, found.save) == (32, level)


@pytest.mark.every_level
@each_direction
@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (2, 1), (3, 1)])
@pytest.mark.parametrize("rows", [8, 20, 32])
def test_backward_may_run_on_another_number_of_threads(forward, backward, rows, direction, set_threads):
    """The layout of the saved rows depends on the number of threads."""
    x, V = Problem("", (rows, 128), (128, 128)).draw(torch.float32, "cpu")
    expected = with_gradients(from_definition, x, V, **direction)
    set_threads(forward)
    out = householder(x, V, **direction)
    set_threads(backward)
    found = torch.autograd.grad(out, (x, V), gradient_of(out).to(out))
    assert_all_close((out, *found), expected, V.triu() if direction["triangular"] else V)


def test_no_loop_over_single_reflections(device):
    """The number of operations depends on the number of blocks, not of reflections."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    def calls(r: int) -> int:
        x, V = torch.randn(8, 512, requires_grad=True, device=device), torch.randn(r, 512, device=device)
        with Count() as count:
            householder(x, V.requires_grad_(), block_size=r // 4).sum().backward()
        return count.calls

    assert calls(512) - calls(128) <= 2 * 12  # two more halvings, of a handful of operations each


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape_stride_scale_and_dtype(data, device):
    draw = data.draw
    m, r, d = (draw(st.integers(low, 40), name) for low, name in ((0, "m"), (0, "r"), (1, "d")))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]), "dtype")
    batches = [((), ()), ((2,), ()), ((2,), (2,)), ((1,), (3,)), ((3, 1), (2,)), ((), (2,))]
    batch_x, batch_V = draw(st.sampled_from(batches), "batches")
    largest = 3 if dtype == torch.float16 else 30
    scale = 10.0 ** draw(st.integers(-largest, largest), "log₁₀ of the scale")
    lay_out = draw(st.sampled_from([lambda t: t, lambda t: t.mT.contiguous().mT, lambda t: t[..., ::2, ::2]]))
    problem = Problem(
        "", (*batch_x, m, d), (*batch_V, r, d), change_x=lay_out, change_V=lambda V: lay_out((V * scale).to(V.dtype))
    )
    x, V = problem.draw(dtype, device)
    direction = draw(st.sampled_from(DIRECTIONS), "direction")
    block_size = draw(st.one_of(st.none(), st.integers(1, 50)), "block size")
    expected = with_gradients(from_definition, x, V, **direction)
    actual = with_gradients(householder, x, V, block_size=block_size, **direction)
    assert_all_close(actual, expected, V.triu() if direction["triangular"] else V)


def test_problems_of_different_names_have_different_numbers():
    drawn = {Problem(problem.name, (2, 3), (2, 3)).draw(torch.float64, "cpu")[0][0, 0].item() for problem in PROBLEMS}
    assert len(drawn) == len(PROBLEMS)


def test_second_derivatives_with_frozen_reflectors(path, device):
    """A gradient penalty through a network with frozen weights needs these."""
    x, V = Problem("", (5, 9), (9, 9)).draw(torch.float64, device)
    V = V.detach()
    found, expected = [], []
    for multiply, results in ((householder, found), (from_definition, expected)):
        (dx,) = torch.autograd.grad(multiply(x, V).pow(3).sum(), x, create_graph=True)
        results += torch.autograd.grad(dx.pow(2).sum(), x)
    torch.testing.assert_close(found, expected)
