"""Compiled graphs: the core's operators in them, every layer, and the same results as in eager mode."""

from __future__ import annotations

import pytest
import torch
from processes import script
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import fasth
import fasth.nn as fnn
from fasth import spectrum
from fasth.functional import householder, svd_linear
from fasth.reflections import core
from fasth.reflections.plan import COMPACT, CORE, FORMS, FULL, SAVE_A, SAVE_NOTHING, SAVE_Z, TRIANGULAR, Plan
from fasth.tools.problems import with_gradients

has_core = pytest.mark.skipif(core.core() is None, reason="no compiled core is built, or it is switched off")

BATCHES = (3, 5, 8, 40, 100)  # the last are so many that the weights are formed


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# The operators.


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.randn(shape, dtype=dtype) / max(shape[-1], 1) ** 0.5).requires_grad_()


def detached(*arguments: object) -> tuple:
    return tuple(t.detach() if isinstance(t, Tensor) else t for t in arguments)


LEVELS = range(SAVE_A + 1)  # of what is saved for backward
ops = torch.ops.fasth


def entries(form: int, save: int, block_size: int = 16, **options: bool) -> tuple[object, ...]:
    """The entries of a plan that operators take as arguments."""
    return Plan(CORE, form, block_size=block_size, save=save, **options)[1:8]


def column_major(t: Tensor | None) -> Tensor | None:
    return t if t is None or t.ndim < 2 else t.mT.contiguous().mT


def both_ways(operator, *arguments) -> list[Tensor]:
    """The results, after a comparison with the fake ones."""
    with FakeTensorMode() as mode:

        def fake(argument):
            if isinstance(argument, list):
                return [fake(t) for t in argument]
            return mode.from_tensor(argument) if isinstance(argument, Tensor) else argument

        fakes = operator(*map(fake, arguments))
    results = operator(*arguments)
    assert [(t.shape, t.dtype, t.stride()) for t in fakes] == [(t.shape, t.dtype, t.stride()) for t in results]
    return results


def householder_both_ways(x: Tensor, V: Tensor, plan: tuple[object, ...], copied: bool) -> None:
    out, *saved = both_ways(ops.householder.default, x, V, *plan)
    for needs in ([True, True], [True, False], [False, True]):
        arguments = torch.randn_like(out), out if needs[1] and not copied else None, V, saved, needs
        assert len(both_ways(ops.householder_backward.default, *arguments, *plan)) == sum(needs)


@has_core
@pytest.mark.parametrize("shape", [(5,), (2, 20), ()], ids=str)
@pytest.mark.parametrize("form", range(len(FORMS)), ids=FORMS)
def test_fake_results_are_those_of_the_core(shape, form):
    """Shapes, strides and dtypes: graphs rely on them."""
    for save in LEVELS:
        for copied in (False, True):
            plan = entries(form, save, transpose=copied, copy_output=copied)
            for x, V in ((drawn(*shape, 70), drawn(40, 70)), (drawn(3, 5, 70), drawn(3, 40, 70))):
                x, V = detached(x, V)
                householder_both_ways(x, V, plan, copied)
                householder_both_ways(column_major(x), column_major(V), plan, copied)


@has_core
@pytest.mark.parametrize(
    ("x_shape", "V_shape"),
    [((4, 8), (0, 8)), ((0, 8), (6, 8)), ((2, 0, 8), (2, 6, 8)), ((2, 4, 8), (2, 0, 8)), ((0, 4, 8), (0, 6, 8))],
    ids=["no reflectors", "no rows", "no rows in a batch", "no reflectors in a batch", "empty batch"],
)
def test_fake_results_of_empty_ones_are_those_of_the_core(x_shape, V_shape):
    for save in LEVELS:
        for copied in (False, True):
            plan = entries(FULL, save, 1, copy_output=copied)
            householder_both_ways(torch.randn(x_shape), torch.randn(V_shape), plan, copied)


def weight(name: str) -> tuple[list[Tensor | None], int]:
    """U, sigma, V and bias, as the operators take them, and the form."""
    tensors, form = {
        "shared": ((drawn(48, 64), drawn(48), None, drawn(48)), COMPACT),
        "full": ((drawn(48, 48), drawn(32), drawn(80, 64), None), FULL),
        "one side": ((drawn(0, 48), None, drawn(48, 64), None), COMPACT),
        "symmetric": ((drawn(48, 64), drawn(64), None, drawn(64)), TRIANGULAR),
    }[name]
    U, sigma, V, bias = detached(*tensors)
    return [U, sigma, U if name == "symmetric" else V, bias], form


WEIGHTS = "shared", "full", "one side", "symmetric"


@has_core
@pytest.mark.parametrize("save", LEVELS[1:])
@pytest.mark.parametrize("name", WEIGHTS)
def test_fake_results_of_a_weight_are_those_of_the_core(save, name):
    for rows in ((5,), (2, 20), ()):
        for lay_out, copied in ((lambda t: t, False), (column_major, True)):
            (U, sigma, V, bias), form = weight(name)
            U, V, x = lay_out(U), lay_out(V), lay_out(drawn(*rows, 64).detach())
            V = U if name == "symmetric" else V
            plan = entries(form, save, copy_output=copied, symmetric=name == "symmetric")
            out, *saved = both_ways(ops.svd_linear.default, x, U, sigma, V, bias, *plan)
            all_of_them = [True, True, sigma is not None, V is not None and V is not U, bias is not None]
            for needs in (all_of_them, [True, *[False] * 4], [False, True, False, False, False]):
                rest = torch.randn_like(out), None if copied else out, U, sigma, V, saved, needs
                found = both_ways(ops.svd_linear_backward.default, *rest, *plan)
                assert len(found) == sum(needs)
    (U, sigma, V, bias), form = weight(name)
    plan = entries(form, SAVE_NOTHING, symmetric=name == "symmetric")
    assert len(both_ways(ops.svd_linear.default, torch.randn(5, 64).double(), U, sigma, V, bias, *plan)) == 1


@has_core
@pytest.mark.parametrize("name", WEIGHTS)
def test_opcheck_of_a_weight(name):
    (U, sigma, V, bias), form = weight(name)
    x = torch.randn(16, 64, dtype=torch.float64)  # whole registers: what fills them up is never written nor read
    plan = entries(form, SAVE_Z, copy_output=True, symmetric=name == "symmetric")
    torch.library.opcheck(ops.svd_linear, (x, U, sigma, V, bias, *plan))
    out, *saved = ops.svd_linear(x, U, sigma, V, bias, *plan)
    needs = [True, len(U) > 0, sigma is not None, V is not None and V is not U, bias is not None]
    torch.library.opcheck(ops.svd_linear_backward, (torch.randn_like(out), None, U, sigma, V, saved, needs, *plan))


@has_core
@pytest.mark.parametrize("form", [FULL, COMPACT], ids=["full", "compact"])
def test_opcheck_of_a_product(form):
    x, V = torch.randn(16, 64), torch.randn(48, 64)
    plan = entries(form, SAVE_Z)
    torch.library.opcheck(ops.householder, (x, V, *plan))
    out, *saved = ops.householder(x, V, *plan)
    torch.library.opcheck(ops.householder_backward, (x, out, V, saved, [True, True], *plan))
    # Some entries of A are never written nor read, so that values cannot be compared.
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.householder, (x, V, *entries(form, SAVE_A, copy_output=True)), test_utils=tests)


@has_core
def test_wrong_arguments_of_an_operator_are_errors():
    x, V, good = torch.randn(3, 4), torch.randn(4, 4), entries(FULL, SAVE_Z, 4)
    for wrong in ((x.half(), V.half()), (x, V.double()), (x, torch.randn(4, 5)), (x, V[0]), (x[None], V[None, None])):
        with pytest.raises((TypeError, ValueError), match=r"should .*; got"):
            ops.householder(*wrong, *good)
    for block_size in (0, -1, 5, 10**9, 2**63 - 1):
        with pytest.raises(ValueError, match=f"block_size should be from 1 to 4; got {block_size}"):
            ops.householder(x, V, *entries(FULL, SAVE_Z, block_size))
    for form, save in ((3, SAVE_Z), (FULL, SAVE_A + 1)):
        with pytest.raises(ValueError, match=r"should be .*; got"):
            ops.householder(x, V, *entries(form, save, 4))
    with pytest.raises(RuntimeError, match=r"`saved` should have .* numbers; got 0"):
        ops.householder_backward(x, x, V, [], [True, True], *good)


# The layers.

LAYERS = {
    "compact": lambda: fnn.LinearSVD(12, 10),
    "full, positive": lambda: fnn.LinearSVD(12, 10, reflectors="full", spectrum=spectrum.positive()),
    "between": lambda: fnn.LinearSVD(12, 12, bias=False, spectrum=spectrum.between(0.5, 2)),
    "around": lambda: fnn.LinearSVD(12, 14, spectrum=spectrum.around(1, 0.1)),
    "normalized": lambda: fnn.LinearSVD(12, 12, spectrum=spectrum.normalized()),
    "thin": lambda: fnn.LinearSVD(12, 10, rank=3),
    "symmetric": lambda: fnn.LinearSymmetric(12),
    "symmetric, full": lambda: fnn.LinearSymmetric(12, reflectors="full"),
    "orthogonal": lambda: fnn.LinearOrthogonal(12, 10),
    "orthogonal, full": lambda: fnn.LinearOrthogonal(12, 14, reflectors="full"),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (3, 4)), fnn.Conv1dSVD(3, 5, 3, padding=1)),
    "images": lambda: nn.Sequential(nn.Unflatten(1, (1, 3, 4)), fnn.Conv2dSVD(1, 5, 3, padding=1)),
    "recurrent": lambda: nn.Sequential(nn.Unflatten(1, (3, 4)), fnn.RNNSVD(4, 6, batch_first=True)),
}


def count_of_core(counter: CompileCounterWithBackend) -> int:
    """Counts the operators of fasth in the graphs, including those of autograd Functions."""
    graphs = [module.graph for graph in counter.graphs for module in graph.modules() if hasattr(module, "graph")]
    return sum("fasth" in str(node.target) for graph in graphs for node in graph.nodes)


def output(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return out[0] if isinstance(out, tuple) else out


def check(model: nn.Module, counter: CompileCounterWithBackend, batches: tuple[int, ...] = BATCHES) -> None:
    """The compiled model has the values and gradients of the eager one, in one graph for each call."""
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    parameters = [p for p in model.parameters() if p.requires_grad]
    for rows in batches:
        x = torch.randn(rows, 12, dtype=parameters[0].dtype)
        actual, expected = output(compiled, x), output(model, x)
        torch.testing.assert_close(actual, expected)
        actual, expected = (torch.autograd.grad(out.pow(2).sum(), parameters) for out in (actual, expected))
        torch.testing.assert_close(actual, expected)


SIZES = dict.fromkeys(("compact", "recurrent"), BATCHES) | dict.fromkeys(
    ("thin", "symmetric", "orthogonal", "images"), BATCHES[::4]
)  # others are, but for sigma or the form, like one of these


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_in_one_graph(name):
    counter = CompileCounterWithBackend("aot_eager")
    model = LAYERS[name]().double()
    check(model, counter, SIZES.get(name, BATCHES[:2]))
    # The first batch; and, of any size: few rows, more, and so many that the weight is formed.
    assert counter.frame_count <= 4
    assert (count_of_core(counter) > 0) == (core.core() is not None)
    model.eval()
    compiled = torch.compile(model, fullgraph=True, backend=CompileCounterWithBackend("aot_eager"))
    with torch.no_grad():
        for rows in (4, 70) if name in SIZES else (4,):
            x = torch.randn(rows, 12, dtype=torch.float64)
            torch.testing.assert_close(output(compiled, x), output(model, x))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_every_change_of_a_parameter_takes_effect(training):
    model, x = nn.Sequential(*(make() for name, make in LAYERS.items() if name == "between")), torch.randn(5, 12)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model.train(training), fullgraph=True, backend=counter)
    with torch.no_grad():
        for change in (lambda p: p, lambda p: p.mul_(0.9), lambda p: p.data.mul_(0.9)):
            for p in model.parameters():
                change(p)
            torch.testing.assert_close(compiled(x), model(x))
    assert counter.frame_count == 1


def test_many_rows_are_multiplied_by_the_formed_weight():
    """The graph has F.linear and reflections of the identity, as in eager mode."""
    counter = CompileCounterWithBackend("eager")
    torch.compile(fnn.LinearSVD(12, 12), fullgraph=True, backend=counter)(torch.randn(1000, 12))
    assert any("linear" in str(node.target) for node in counter.graphs[0].graph.nodes)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_cached_weights(backend):
    """A graph that forms the weights, and one that uses them; nothing is stale in the next context."""
    layers = [fnn.LinearSVD(12, 12), nn.Tanh(), fnn.LinearOrthogonal(12, 12), fnn.LinearSVD(12, 12, rank=3)]
    model = nn.Sequential(*(layers[:1] if backend == "inductor" else layers))  # which takes seconds to compile one
    counter, x = CompileCounterWithBackend(backend), torch.randn(5, 12)
    compiled = torch.compile(model.eval(), fullgraph=True, backend=counter)
    for _ in range(3):
        with torch.no_grad():
            for p in model.parameters():
                p.data.mul_(0.9)
            expected = model(x)
            with fasth.cached():
                for _ in range(3):
                    torch.testing.assert_close(compiled(x), expected)
    assert counter.frame_count == 2
    operators = [count_of_core(CountOf(graph)) for graph in counter.graphs]
    assert operators[1] == 0 and (operators[0] > 0) == (core.core() is not None)


class CountOf:
    def __init__(self, *graphs):
        self.graphs = graphs


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_cached_weight_is_differentiated_once(backend):
    layer, x = fnn.LinearSVD(12, 12, dtype=torch.float64), torch.randn(5, 12, dtype=torch.float64)
    parameters = list(layer.parameters())

    def loss(x: Tensor) -> Tensor:
        for _ in range(4):
            x = layer(x).tanh()
        return x.square().sum()

    expected = torch.autograd.grad(loss(x), parameters)
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    for _ in range(2):
        with fasth.cached():
            torch.testing.assert_close(torch.autograd.grad(compiled(x), parameters), expected)


def test_inductor():
    model = nn.Sequential(
        fnn.LinearSVD(12, 16), nn.Tanh(), fnn.LinearSymmetric(16, reflectors="full"), fnn.LinearOrthogonal(16, 5)
    ).double()
    counter = CompileCounterWithBackend("inductor")
    check(model, counter, (3, 5))
    assert (count_of_core(counter) > 0) == (core.core() is not None)


def test_without_the_core():
    done = script(
        """
from test_compile import LAYERS, check, count_of_core, CompileCounterWithBackend

counter = CompileCounterWithBackend("aot_eager")
check(LAYERS["compact"]().double(), counter, (3, 100))
print(count_of_core(counter))
""",
        FASTH_BACKEND="torch",
    )
    assert done.split() == ["0"]


def test_other_dtypes_and_transforms_take_the_traced_path():
    counter = CompileCounterWithBackend("aot_eager")
    layer = fnn.LinearSVD(4, 4)
    half = fnn.LinearSVD(4, 4, dtype=torch.bfloat16)
    x = torch.randn(3, 4)
    torch.compile(half, fullgraph=True, backend=counter)(x.bfloat16())
    ensemble = torch.compile(torch.func.vmap(lambda x: layer(x)), fullgraph=True, backend=counter)
    torch.testing.assert_close(ensemble(x.unsqueeze(0)), layer(x).unsqueeze(0))
    total = torch.compile(torch.func.grad(lambda x: layer(x).pow(2).sum()), fullgraph=True, backend=counter)
    torch.testing.assert_close(total(x), torch.func.grad(lambda x: layer(x).pow(2).sum())(x))
    assert count_of_core(counter) == 0


def test_the_output_may_be_changed_in_place():
    """Inside the graph and after it: what backward needs is a copy, or not the output."""

    def changed(x: Tensor, V: Tensor, U: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return householder(x, V).mul_(2), svd_linear(x, U, None, bias=bias).mul_(2)

    def unchanged(*tensors: Tensor) -> Tensor:
        x, V, U, bias = tensors
        return 4 * householder(x, V).sum() ** 2 + 4 * svd_linear(x, U, None, bias=bias).sum() ** 2

    tensors = drawn(5, 12), drawn(12, 12), drawn(10, 12), drawn(10)
    expected = torch.autograd.grad(unchanged(*tensors), tensors)
    compiled = torch.compile(changed, fullgraph=True, backend="aot_eager")
    loss = sum(out.div_(2).sum() ** 2 * 4 for out in compiled(*tensors))
    torch.testing.assert_close(torch.autograd.grad(loss, tensors), expected)


def test_all_sizes_symbolic():
    compiled = torch.compile(householder, fullgraph=True, dynamic=True, backend="aot_eager")
    for x_shape, V_shape in (((3, 8), (8, 8)), ((100, 9), (4, 9)), ((2, 3, 5), (2, 7, 5)), ((3, 5), (2, 7, 5))):
        x, V = drawn(*x_shape), drawn(*V_shape)
        torch.testing.assert_close(with_gradients(compiled, x, V), with_gradients(householder, x, V))


def test_the_number_of_rows_may_be_marked_as_dynamic():
    layer, x = fnn.LinearSVD(12, 12), torch.randn(5, 12)
    torch._dynamo.mark_dynamic(x, 0)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


def test_a_second_derivative_outside_of_the_graph():
    """PyTorch does not differentiate a compiled backward pass, and says so."""
    layer, x = fnn.LinearSVD(4, 4, dtype=torch.float64), drawn(3, 4)
    out = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    (g,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        g.sum().backward()


def test_under_autocast():
    layer, x = fnn.LinearSVD(12, 12), torch.randn(3, 12)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(x), layer(x))
        torch.testing.assert_close(compiled(x.bfloat16()), layer(x.bfloat16()))


def test_a_function_of_factors():
    U, sigma, bias, x = drawn(8, 12), drawn(8), drawn(8), drawn(3, 12)
    compiled = torch.compile(lambda x, U, s, b: svd_linear(x, U, s, bias=b, form="compact"), fullgraph=True)
    actual, expected = compiled(x, U, sigma, bias), svd_linear(x, U, sigma, bias=bias, form="compact")
    torch.testing.assert_close(actual, expected)
    for found in zip(*(torch.autograd.grad(out.sum(), (x, U, sigma, bias)) for out in (actual, expected)), strict=True):
        torch.testing.assert_close(*found)
