"""The Triton kernels in their interpreter, as the rest of the library uses them. ``make test-kernels`` runs this file.

The table of problems runs through them too, in test_householder.py, and the weights U Σ Vᵀ of test_svd_linear.py. Here
is what those files leave out: buffers full of NaN, the fused step of every layer, graphs, and how much is launched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from dense import assert_layer_matches_dense
from layers import CASES, PARAMETRIZED, Case, of_every, output, trained
from torch import Tensor, nn
from torch.nn import functional as F

import fasth
from fasth import RNNSVD, LinearOrthogonal, LinearSVD, LinearSymmetric
from fasth.functional import reflect, svd_linear
from fasth.nn.recurrence import Times, recurrence
from fasth.reflections import planner
from fasth.reflections.autograd import with_sign_guard
from fasth.reflections.plan import COMPACT, FULL, TORCH, TRIANGULAR, TRITON
from fasth.reflections.planner import backend_for
from fasth.reflections.triton import launch, launching
from fasth.tools.cli import main
from fasth.tools.problems import PROBLEMS, Problem, assert_all_close, assert_close, from_definition, with_gradients
from fasth.tools.twins import orthogonality, perturbed


@pytest.fixture(autouse=True)
def poisoned(request: pytest.FixtureRequest) -> Iterator[None]:
    """New buffers are full of NaN, so that whatever is read before it is written shows. Not while graphs are traced."""
    if "fresh" in request.fixturenames:
        yield
        return

    def nan(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*arguments: Any, **options: Any) -> Tensor:
            t = make(*arguments, **options)
            return t.fill_(torch.nan) if t.is_floating_point() and not t.is_meta else t

        return made

    with (
        patch.object(torch, "empty", nan(torch.empty)),
        patch.object(torch, "empty_like", nan(torch.empty_like)),
        patch.object(Tensor, "new_empty", nan(Tensor.new_empty)),
    ):
        yield


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing is compiled."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def launched() -> Iterator[list[str]]:
    """The names of the kernels that are launched."""
    names: list[str] = []

    def observe(kernel: Any, *_: Any) -> None:
        names.append(kernel.__name__)

    launching.observers.append(observe)
    yield names
    launching.observers.remove(observe)


def test_this_process_interprets_the_kernels() -> None:
    assert backend_for(torch.ones(1)) == TRITON
    assert backend_for(torch.ones(1, dtype=torch.float64)) == TORCH


SMALL = [p for p in PROBLEMS if p.name not in ("many rows", "more rows than d", "several default blocks", "wide")]


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("problem", SMALL, ids=lambda problem: problem.name)
def test_half_precision_stores(problem: Problem, stored: torch.dtype, launched: list[str]) -> None:
    x, V = problem.draw(stored, "cpu")
    actual = with_gradients(fasth.householder, x, V)
    assert all(t.dtype == stored for t in actual)
    assert_all_close(actual, with_gradients(from_definition, x, V), V)
    assert "sweep" in launched


LONG = {"many rows": "transpose", "more rows than d": "triangular"}


@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p.name in LONG], ids=["nine columns", "seventy columns"])
def test_the_problems_that_take_long(problem: Problem) -> None:
    """``make test-kernels`` leaves them out of test_householder.py. Here each is in one direction."""
    direction = {LONG[problem.name]: True}
    x, V = problem.draw(torch.float32, "cpu")
    actual = with_gradients(fasth.householder, x, V, **direction)
    assert_all_close(actual, with_gradients(from_definition, x, V, **direction), V)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (9, 9), (5, 20), (20, 5), (34, 33)])
def test_compact_reflectors_are_read_in_place(
    shape: tuple[int, int], lower: bool, transpose: bool, launched: list[str]
) -> None:
    matrix = torch.randn(shape).clamp(-1, 1).requires_grad_()
    x = torch.randn(3, shape[0 if lower else 1], requires_grad=True)

    def side(m: Tensor) -> Tensor:
        return m.mT if lower else m

    def definition(x: Tensor, m: Tensor) -> Tensor:
        V = side(m).triu(1) + torch.eye(*side(m).shape, dtype=m.dtype)
        return from_definition(x, V, transpose=transpose, triangular=True)

    actual = with_gradients(lambda x, m: reflect(x, side(m), "compact", transpose=transpose), x, matrix)
    expected = with_gradients(definition, x, matrix)
    assert_all_close(actual[:2], expected[:2], matrix)
    guard = with_sign_guard(torch.zeros(shape), matrix)
    torch.testing.assert_close(actual[2].diagonal(), guard.diagonal())
    actual[2].fill_diagonal_(0)
    assert_close(actual[2], expected[2], expected[0].norm() * expected[1].norm(), max(shape))
    assert "gradient" in launched


@of_every(CASES | PARAMETRIZED)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_every_layer(case: Case, stored: torch.dtype, launched: list[str]) -> None:
    """Output and gradients are those of the same layer in float64, which computes in PyTorch."""
    layer = perturbed(case.make()).to(stored)
    reference = copy.deepcopy(layer).double()
    x = case.input(stored).requires_grad_()
    exact = x.detach().double().requires_grad_()
    out, expected = output(layer, x), output(reference, exact)
    g = torch.randn_like(expected)
    found = torch.autograd.grad(out, (x, *trained(layer)), g.to(stored))
    wanted = torch.autograd.grad(expected, (exact, *trained(reference)), g.to(stored).double())
    assert "sweep" in launched
    scale = max(t.abs().max() for t in wanted)
    for actual, of_reference in zip((out, *found), (expected, *wanted), strict=True):
        error = (actual.double() - of_reference).abs().max() / torch.maximum(scale, of_reference.abs().max())
        assert error <= 64 * torch.finfo(stored).eps


SVDS = [
    ("compact", lambda: LinearSVD(40, 24)),
    ("wide", lambda: LinearSVD(20, 37)),
    ("without bias", lambda: LinearSVD(33, 33, bias=False)),
    ("full", lambda: LinearSVD(18, 12, reflectors="full")),
    ("thin", lambda: LinearSVD(30, 20, rank=5)),
    ("one number", lambda: LinearSVD(1, 1)),
    ("orthogonal", lambda: LinearOrthogonal(20, 12)),
    ("orthogonal, tall", lambda: LinearOrthogonal(12, 20)),
    ("symmetric", lambda: LinearSymmetric(17)),
]


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("make", [make for _, make in SVDS], ids=[name for name, _ in SVDS])
def test_a_layers_step_is_fused(make: Callable[[], Any], rows: int, launched: list[str]) -> None:
    layer = perturbed(make())
    x = torch.randn(rows, layer.in_features)
    assert_layer_matches_dense(layer, lambda layer, x: F.linear(x, layer.weight, layer.bias), x, size=64)
    # Two sides: T, rows, rows back and the gradient of each, and the sums over rows.
    assert len(launched) <= 9 and set(launched) <= {"factors", "sweep", "gradient", "sums_over_rows"}


@pytest.mark.parametrize("frozen", [{"reflectors"}, {"sigma"}, {"bias"}, {"sigma", "bias"}, {"reflectors", "sigma"}])
def test_frozen_parameters(frozen: set[str]) -> None:
    layer = perturbed(LinearSVD(20, 12))
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name not in frozen)
    x = torch.randn(4, 20)
    assert_layer_matches_dense(layer, lambda layer, x: F.linear(x, layer.weight, layer.bias), x, size=64)


@pytest.mark.parametrize("frozen", ["x", "V"])
def test_only_what_is_needed_is_launched(frozen: str, launched: list[str]) -> None:
    x, V = Problem("", (3, 40), (40, 40)).draw(torch.float32, "cpu")
    (x if frozen == "x" else V).requires_grad_(False)
    fasth.householder(x, V).sum().backward()
    assert launched == ["factors", "sweep", "sweep"] + (["gradient"] if frozen == "x" else [])


def test_no_saved_t_is_computed_again(launched: list[str]) -> None:
    """More than the memory of x and V is not saved: T of many short reflectors is computed again."""
    x, V = Problem("", (3, 4), (40, 4)).draw(torch.float32, "cpu")
    expected = with_gradients(from_definition, x, V)
    assert_all_close(with_gradients(fasth.householder, x, V), expected, V)
    assert launched == ["factors", "sweep", "factors", "sweep", "gradient"]


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_extreme_scales(scale: float) -> None:
    x, V = Problem("", (3, 20), (20, 20)).draw(torch.float32, "cpu")
    V = (V.detach() * scale).requires_grad_()
    assert_all_close(with_gradients(fasth.householder, x, V), with_gradients(from_definition, x, V), V)


@pytest.mark.parametrize("kind", ["repeated", "nearly parallel"])
def test_reflectors_that_depend_on_one_another(kind: str) -> None:
    V = torch.randn(1, 64) + (0 if kind == "repeated" else torch.finfo(torch.float32).eps ** 0.5) * torch.randn(64, 64)
    assert orthogonality(fasth.householder(torch.eye(64), V)) < 30


def test_many_batches() -> None:
    """More than 65,535 of them would not fit into a second dimension of a grid; these show the order."""
    x, V = Problem("", (70, 1, 3), (70, 2, 3)).draw(torch.float32, "cpu")
    assert_all_close(with_gradients(fasth.householder, x, V), with_gradients(from_definition, x, V), V)


def test_numbers_that_are_stored_negated() -> None:
    """The imaginary part of a conjugate is a view with a bit that says so; its memory has the other sign."""
    x, V = torch.randn(3, 9), torch.randn(9, 9, dtype=torch.complex64).conj().imag
    assert V.is_neg()
    torch.testing.assert_close(reflect(x, V, "compact"), reflect(x, V.resolve_neg(), "compact"))
    g = torch._neg_view(torch.randn(3, 9))  # contiguous, so nothing copies it
    V = torch.randn(9, 9, requires_grad=True)
    gradients = [torch.autograd.grad(fasth.householder(x, V), V, t)[0] for t in (g, g.resolve_neg())]
    torch.testing.assert_close(*gradients)


def test_double_backward_and_batched_gradients_take_pytorch() -> None:
    x, V = Problem("", (3, 6), (6, 6)).draw(torch.float32, "cpu")
    out = fasth.householder(x, V)
    (once,) = torch.autograd.grad(out.square().sum(), V, create_graph=True)
    once.square().sum().backward()
    assert V.grad.isfinite().all()
    basis = torch.eye(18).reshape(18, 3, 6)
    out = fasth.householder(x, V)
    (jacobian,) = torch.autograd.grad(out, V, basis, is_grads_batched=True)
    expected = torch.autograd.functional.jacobian(lambda V: from_definition(x, V), V.double())
    torch.testing.assert_close(jacobian.double(), expected.reshape(18, 6, 6), rtol=1e-4, atol=1e-5)


def test_transforms_take_pytorch(launched: list[str]) -> None:
    x, V = torch.randn(3, 6), torch.randn(6, 6)
    jacobian = torch.func.jacrev(fasth.householder, argnums=1)(x, V)
    expected = torch.func.jacrev(from_definition, argnums=1)(x.double(), V.double())
    torch.testing.assert_close(jacobian.double(), expected, rtol=1e-4, atol=1e-5)
    assert not launched


# Recurrences: test_recurrence.py compares them with the definition.


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_recurrent_layer(stored: torch.dtype, launched: list[str]) -> None:
    """33 numbers in a state, 17 sequences: more than one program, and slices that end within."""
    layer = RNNSVD(5, 33, nonlinearity="modrelu", bidirectional=True)
    for name, parameter in layer.named_parameters():
        if name.startswith("bias_modrelu"):
            torch.nn.init.constant_(parameter, -0.1)
    reference, layer = copy.deepcopy(layer).double(), layer.to(stored)
    reference.load_state_dict({name: t.double() for name, t in layer.state_dict().items()})
    x = torch.randn(4, 17, 5).to(stored).requires_grad_()
    exact = x.detach().double().requires_grad_()
    (out, _), (expected, _) = layer(x), reference(exact)
    g = torch.randn_like(expected)
    found = torch.autograd.grad(out, (x, *trained(layer)), g.to(stored))
    wanted = torch.autograd.grad(expected, (exact, *trained(reference)), g.to(stored).double())
    assert launched.count("recurrence") == launched.count("recurrence_backward") == 2
    for actual, right in zip((out, *found), (expected, *wanted), strict=True):
        assert (actual.double() - right).abs().max() <= 32 * torch.finfo(stored).eps * right.abs().max()


def test_a_second_derivative_of_a_recurrence_takes_pytorch() -> None:
    x, W, h0 = (torch.randn(shape, requires_grad=True) for shape in ((3, 2, 5), (5, 5), (2, 5)))
    once = torch.autograd.grad(recurrence(x, W, h0, None, "tanh", Times(None, False)).sum(), W, create_graph=True)[0]
    assert torch.autograd.grad(once.square().sum(), x)[0].isfinite().all()


# Graphs.


def operator_calls() -> list[tuple[Any, tuple[Any, ...]]]:
    """Calls with a plan's entries: form, transpose, block size, what is saved, a copy, of the identity, symmetric."""
    ops = torch.ops.fasth
    x, V, g = torch.randn(3, 20), torch.randn(20, 20), torch.randn(3, 20)
    U, sigma, bias = torch.randn(12, 20), torch.randn(12), torch.randn(12)
    states, W, h0 = torch.randn(4, 3, 12), torch.randn(12, 12), torch.randn(3, 12)
    of_Q = FULL, False, 1, 1, True, False, False
    of_W = COMPACT, False, 1, 1, True, False, False
    _, *saved = ops.householder(x, V, *of_Q)
    product, *saved_of_W = ops.svd_linear(x, U, sigma, None, bias, *of_W)
    needs = [True] * 3 + [False, True]
    return [
        (ops.householder, (x, V, *of_Q)),
        (ops.householder, (x.bfloat16(), V.bfloat16(), TRIANGULAR, True, 1, 0, False, False, False)),
        (ops.householder, (x.expand(2, 3, 20), torch.randn(2, 5, 20), COMPACT, False, 1, 1, True, False, False)),
        (ops.householder_backward, (g, None, V, saved, [True, True], *of_Q)),
        (ops.householder_backward, (g, None, V, saved, [True, False], *of_Q)),
        (ops.svd_linear, (x, U, sigma, None, bias, *of_W)),
        (
            ops.svd_linear,
            (x, torch.randn(9, 20), None, torch.randn(7, 20), None, FULL, False, 1, 1, False, False, False),
        ),
        (ops.svd_linear, (x, torch.randn(9, 20), sigma, None, None, COMPACT, False, 1, 1, True, False, True)),
        (ops.svd_linear_backward, (product, None, U, sigma, None, saved_of_W, needs, *of_W)),
        (ops.recurrence, (states, None, W, h0, bias, 2, True)),
        (ops.recurrence_backward, (states, None, W, states, h0, 2, True, True, True)),
    ]


def test_operators_are_what_their_fake_implementations_say() -> None:
    for operator, arguments in operator_calls():
        torch.library.opcheck(operator.default, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.usefixtures("fresh")
def test_a_compiled_graph_has_the_operators_and_no_break(launched: list[str]) -> None:
    model = nn.Sequential(LinearSVD(20, 12), nn.Tanh(), LinearOrthogonal(12, 9))
    x = torch.randn(4, 20)
    expected = model(x)
    names: list[str] = []

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    compiled = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=record, bw_compiler=record))
    launched.clear()
    out = compiled(x)
    out.sum().backward()
    torch.testing.assert_close(out, expected)
    assert sum("svd_linear_backward" in name for name in names) == 2
    assert launched.count("gradient") == 3  # both sides of one, one of the other


@pytest.mark.usefixtures("fresh")
def test_inductor_gives_the_same_gradients() -> None:
    layer = LinearSVD(20, 12)
    x = torch.randn(4, 20, requires_grad=True)
    eager = torch.autograd.grad(layer(x).square().sum(), (x, *layer.parameters()))
    compiled = torch.compile(layer, fullgraph=True)
    found = torch.autograd.grad(compiled(x).square().sum(), (x, *layer.parameters()))
    for actual, expected in zip(found, eager, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.usefixtures("fresh")
def test_another_number_of_rows_does_not_compile_again() -> None:
    layer = LinearSVD(20, 12)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    with patch.object(torch._dynamo.config, "error_on_recompile", True):
        for rows in (3, 4, 5):
            x = torch.randn(rows, 20)
            torch.testing.assert_close(compiled(x), F.linear(x, layer.weight, layer.bias), rtol=1e-4, atol=1e-5)


# Commands.


def test_info_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    assert "Triton kernels, in Triton's interpreter" in capsys.readouterr().out


def test_tune_measures_the_kernels(launched: list[str]) -> None:
    assert fasth.tune(4, 2).entry.kernel_rows >= 0
    assert "gradient" in launched


def test_kernels_that_are_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler may be wrong for one GPU: what is used was compared before."""
    right = launch.householder

    def wrong(*arguments: Any) -> Any:
        out, *saved = right(*arguments)
        return out + 1, *saved

    monkeypatch.setattr(launch, "householder", wrong)
    with pytest.warns(RuntimeWarning, match="another answer than PyTorch for d = 5"):
        assert fasth.tune(5, 2).entry.kernel_rows == 0


def test_many_rows_are_not_a_matter_of_the_kernels_alone() -> None:
    where = planner.Where(TRITON, "cuda")
    assert planner.kernels_pay(10**6, 2048, 2048, where)  # forced, in this process
    assert not planner.kernels_pay(1, 4096, 4096, where)  # longer than a program holds


def test_sigma_of_one_side_alone() -> None:
    x, sigma, U = torch.randn(3, 9), torch.randn(9), torch.randn(9, 9)
    out = svd_linear(x, U, sigma, torch.empty(0, 9), form="full")
    torch.testing.assert_close(out, fasth.householder(x * sigma, U))
