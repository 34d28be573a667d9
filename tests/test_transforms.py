"""Every PyTorch transform of ``householder``, against the same transform of the definition."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from fasth import householder
from fasth.reflections import definition
from fasth.tools.problems import DIRECTIONS, PROBLEMS, Problem, from_definition

each_direction = pytest.mark.parametrize("direction", DIRECTIONS, ids=lambda d: "-".join(k for k in d if d[k]) or "Q")
# Q jumps at a zero reflector: by symmetry it has a first derivative there, but no second. Finite differences cannot
# move one entry of an expanded tensor, and large problems take them long.
SMALL = [p for p in PROBLEMS if max(*p.x_shape, *p.V_shape) <= 12 and "zero" not in p.name and p.name != "expanded"]
by_name = pytest.mark.parametrize("problem", SMALL, ids=lambda problem: problem.name)


@by_name
@each_direction
def test_gradcheck(problem: Problem, direction, device):
    x, V = problem.draw(torch.float64, device)
    assert torch.autograd.gradcheck(
        lambda x, V: householder(x, V, block_size=problem.block_size, **direction),
        (x, V),
        fast_mode=True,
        check_forward_ad=True,
    )


@by_name
@each_direction
def test_gradgradcheck(problem: Problem, direction, device):
    x, V = problem.draw(torch.float64, device)
    assert torch.autograd.gradgradcheck(
        lambda x, V: householder(x, V, block_size=problem.block_size, **direction),
        (x, V),
        fast_mode=True,
        check_fwd_over_rev=True,
    )


def ours_and_definition(direction):
    return (
        lambda x, V: householder(x, V, block_size=3, **direction),
        lambda x, V: definition.householder(x, V, **direction),
    )


@pytest.fixture
def x(device):
    return torch.randn(4, 6, dtype=torch.float64, device=device)


@pytest.fixture
def V(device):
    return torch.randn(7, 6, dtype=torch.float64, device=device)


@each_direction
@pytest.mark.parametrize("transform", [jacrev, jacfwd], ids=["jacrev", "jacfwd"])
def test_jacobians(direction, transform, x, V):
    ours, theirs = (transform(f, (0, 1))(x, V) for f in ours_and_definition(direction))
    torch.testing.assert_close(ours, theirs)


@each_direction
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
def test_many_gradients_at_once(direction, size, again, x, V, path):
    gradients = torch.randn(size, *x.shape, dtype=x.dtype, device=x.device, requires_grad=again)

    def derived(f):
        leaves = x.clone().requires_grad_(), V.clone().requires_grad_()
        found = torch.autograd.grad(f(*leaves), leaves, gradients, is_grads_batched=True, create_graph=again)
        if not again:
            return found
        return torch.autograd.grad(sum(t.pow(3).sum() for t in found), (*leaves, gradients))

    ours, theirs = map(derived, ours_and_definition(direction))
    torch.testing.assert_close(ours, theirs)


@each_direction
def test_hessian(direction, x, V):
    ours, theirs = (
        hessian(lambda x, V, f=f: f(x, V).pow(3).sum(), (0, 1))(x, V) for f in ours_and_definition(direction)
    )
    torch.testing.assert_close(ours, theirs)


@each_direction
def test_third_derivative_along_a_line(direction, x, V):
    dx, dV = torch.randn_like(x), torch.randn_like(V)

    def third(f):
        value = lambda t: f(x + t * dx, V + t * dV).pow(2).mul(x).sum()  # noqa: E731
        return grad(grad(grad(value)))(torch.zeros((), dtype=x.dtype, device=x.device))

    ours, theirs = map(third, ours_and_definition(direction))
    torch.testing.assert_close(ours, theirs)


@each_direction
def test_jvp(direction, x, V):
    tangents = torch.randn_like(x), torch.randn_like(V)
    ours, theirs = (jvp(f, (x, V), tangents) for f in ours_and_definition(direction))
    torch.testing.assert_close(ours, theirs)


@each_direction
@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (0, 0), (1, 2)], ids=str)
@pytest.mark.parametrize("inside", ["value", "grad", "jacrev", "jvp"])
def test_vmap(direction, in_dims, inside, device):
    def derived(f):
        if inside == "grad":
            return grad(lambda x, V: f(x, V).pow(3).sum(), (0, 1))
        if inside == "jacrev":
            return jacrev(f, (0, 1))
        if inside == "jvp":
            return lambda x, V: jvp(f, (x, V), (x, V.flip(0)))
        return f

    shapes = ((4, 6), (7, 6))
    arguments = [
        torch.randn(3, *shape, dtype=torch.float64, device=device).movedim(0, dim)
        if dim is not None
        else torch.randn(shape, dtype=torch.float64, device=device)
        for shape, dim in zip(shapes, in_dims, strict=True)
    ]
    ours, theirs = (vmap(derived(f), in_dims)(*arguments) for f in ours_and_definition(direction))
    torch.testing.assert_close(ours, theirs)
    # The reverse order: a gradient taken through vmap.
    ours, theirs = (
        grad(lambda x, V, f=f: vmap(f, in_dims)(x, V).pow(3).sum(), (0, 1))(*arguments)
        for f in ours_and_definition(direction)
    )
    torch.testing.assert_close(ours, theirs)


def test_a_tensor_that_outlived_its_transform(x, V):
    escaped = []

    def loss(x):
        escaped.append(x * 2)
        return x.sum()

    grad(loss)(x)
    torch.testing.assert_close(householder(escaped[0], V), definition.householder(2 * x, V))


def test_vmap_twice(device):
    x, V = (torch.randn(s, dtype=torch.float64, device=device) for s in ((2, 4, 6), (3, 7, 6)))
    every_pair = lambda f: vmap(vmap(f, (None, 0)), (0, None))(x, V)  # noqa: E731
    ours, theirs = map(every_pair, ours_and_definition({}))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("triangular", [False, True], ids=["full", "triangular"])
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_compile(triangular, backend, device):
    """One graph for each way to compute: the first batch size, and few, more and many rows of any size."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(lambda x, V: householder(x, V, triangular=triangular), fullgraph=True, backend=counter)
    V = torch.randn(40, 40, device=device, requires_grad=True)
    for rows in (5, 8, 33, 64, 100, 257):
        x = torch.randn(rows, 40, device=device, requires_grad=True)
        actual, expected = compiled(x, V), from_definition(x, V, triangular=triangular)
        torch.testing.assert_close(actual, expected.float(), rtol=1e-4, atol=1e-4)
        for t, reference in zip(
            torch.autograd.grad(actual.pow(2).mul(x.detach()).sum(), (x, V)),
            torch.autograd.grad(expected.pow(2).mul(x.detach()).sum(), (x, V)),
            strict=True,
        ):
            torch.testing.assert_close(t, reference, rtol=1e-4, atol=1e-3)
    assert counter.frame_count <= 4


def test_under_autocast(device):
    """Autocast never reaches the products inside: Q stays orthogonal to the precision of V."""
    x = torch.randn(4, 64, device=device, requires_grad=True)
    V = torch.randn(64, 64, device=device, requires_grad=True)
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        out = householder(x, V)
        half = householder(x.bfloat16(), V)
    torch.testing.assert_close(out, householder(x, V))
    torch.testing.assert_close(half, householder(x.bfloat16().float(), V))
