"""Compiled graphs: the core's operators in them, every layer, and one graph for all batch sizes."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from problems import PROBLEMS, with_gradients
from processes import script
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fasth.nn as fnn
from fasth import spectrum
from fasth.nn.factored import tensors_of
from fasth.reflections import FORMS, SVD_COMPOSED, blocked, householder, native, ops

has_core = pytest.mark.skipif(native.core() is None, reason="no compiled core is built, or FASTH_CORE is off")

BATCHES = (3, 5, 8, 40, 100)  # the last are so many that the weights are formed


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# The operators.


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (torch.randn(shape, dtype=dtype) / max(shape[-1], 1) ** 0.5).requires_grad_()


def svd_arguments(rows: tuple[int, ...], n: int, m: int, form: str, dtype: torch.dtype = torch.float64) -> tuple:
    k, shared = min(n, m), form == "compact"
    U, V = (drawn(n, m, dtype=dtype), None) if shared else (drawn(n, n, dtype=dtype), drawn(m + 1, m, dtype=dtype))
    signs = torch.randn(2, k, dtype=dtype).sign()
    x, sigma, bias = (drawn(*shape, dtype=dtype) for shape in ((*rows, m), (k,), (n,)))
    r_U, r_V = (m, n) if shared else (n, m + 1)
    kind, blocks = FORMS.index(form), [16, 32]
    return (
        x,
        U,
        sigma,
        V,
        bias,
        signs,
        kind,
        blocks,
        ops.svd_sizes(dtype, n, m, r_U, r_V, k, kind, *blocks, shared, torch.get_num_threads()),
    )


def householder_arguments(x: torch.Tensor, V: torch.Tensor, transpose: bool, kind: int, k: int) -> tuple:
    sizes = ops.householder_sizes(V.dtype, *V.shape[-2:], kind, k, V.ndim == 3, torch.get_num_threads())
    return x, V, transpose, kind, k, sizes


def detached(arguments: tuple) -> tuple:
    return tuple(t.detach() if isinstance(t, torch.Tensor) else t for t in arguments)


def gradients(out: torch.Tensor, inputs: tuple) -> tuple[torch.Tensor, ...]:
    wanted = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
    generator = torch.Generator().manual_seed(1)
    return torch.autograd.grad(out, wanted, torch.randn(out.shape, dtype=out.dtype, generator=generator))


@has_core
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
@pytest.mark.parametrize("kind", range(3), ids=FORMS)
@pytest.mark.parametrize("transpose", [False, True], ids=["Q", "transpose"])
def test_the_operator_is_householder(problem, kind, transpose):
    x, V = problem.draw(torch.float64, "cpu")
    if V.ndim > 3 or (V.ndim == 3 and x.shape[:1] != V.shape[:1]):
        pytest.skip("the operator takes one V, or one for each matrix of x")
    k = problem.block_size or 32
    actual = with_gradients(
        lambda *xV: torch.ops.fasth.householder(*householder_arguments(*xV, transpose, kind, k)), x, V
    )
    expected = with_gradients(
        lambda x, V: householder(
            x, blocked.expand_compact(V) if kind == 2 else V, transpose=transpose, triangular=kind > 0
        ),
        x,
        V,
    )
    torch.testing.assert_close(actual, expected)


@has_core
@pytest.mark.parametrize("rows", [(3,), (2, 5), (), (300,)], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "m"), [(24, 24), (24, 40), (40, 24), (4, 4), (8, 6), (6, 8)], ids=str)
def test_the_operator_is_svd_linear(rows, form, n, m):
    arguments = svd_arguments(rows, n, m, form)
    actual = torch.ops.fasth.svd_linear(*arguments)
    expected = SVD_COMPOSED[FORMS.index(form)](*arguments[:6])
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(gradients(actual, arguments), gradients(expected, arguments))


@has_core
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [5, 2000], ids=["applied", "formed"])
@pytest.mark.parametrize("form", ["compact", "full"])
def test_opcheck(rows, form, threads, set_threads):
    set_threads(threads)
    n, m = (40, 170) if rows == 5 else (24, 20)
    *tensors, kind, blocks, sizes = arguments = svd_arguments((rows,), n, m, form, torch.float32)
    torch.library.opcheck(torch.ops.fasth.svd_linear, arguments)
    torch.library.opcheck(torch.ops.fasth.svd_linear_forward, (*detached(arguments), True))
    reflect = householder_arguments(tensors[0], drawn(m, m, dtype=torch.float32), False, kind, 16)
    torch.library.opcheck(torch.ops.fasth.householder, reflect)
    torch.library.opcheck(torch.ops.fasth.householder_forward, (*detached(reflect), True))
    with torch.no_grad():
        out, kept = torch.ops.fasth.svd_linear_forward(*arguments, True)
        plain = detached((out, *tensors, kept))
        rest = kind, blocks, sizes, [True] * 3 + [kind == 0, True]
        torch.library.opcheck(torch.ops.fasth.svd_linear_backward, (*plain, *rest))
        out, kept = torch.ops.fasth.householder_forward(*reflect, True)
        plain = detached((out, out, reflect[1], kept))
        torch.library.opcheck(torch.ops.fasth.householder_backward, (*plain, *reflect[2:], True, True))


@has_core
def test_a_second_derivative_of_the_operators():
    x, U, sigma, *_ = arguments = svd_arguments((3,), 5, 4, "compact")
    rest = arguments[3:]
    assert torch.autograd.gradgradcheck(
        lambda x, U, sigma: torch.ops.fasth.svd_linear(x, U, sigma, *rest), (x, U, sigma), fast_mode=True
    )
    assert torch.autograd.gradgradcheck(
        lambda x, V: torch.ops.fasth.householder(*householder_arguments(x, V, False, 0, 2)),
        (x, drawn(3, 4)),
        fast_mode=True,
    )


@has_core
@pytest.mark.parametrize(("forward", "backward"), [(1, 3), (3, 1)])
def test_backward_may_run_on_more_or_fewer_threads(forward, backward, set_threads):
    arguments = svd_arguments((5,), 200, 200, "compact")
    expected = gradients(SVD_COMPOSED[2](*arguments[:6]), arguments)
    set_threads(forward)
    out = torch.ops.fasth.svd_linear(*arguments)
    set_threads(backward)
    torch.testing.assert_close(gradients(out, arguments), expected)


@has_core
def test_wrong_arguments_are_errors():
    x, V = torch.randn(3, 4), torch.randn(4, 4)
    *_, sizes = householder_arguments(x, V, False, 0, 32)
    for wrong in (
        (x.half(), V.half()),
        (x, V.double()),
        (x, torch.randn(4, 5)),
        (x, V[0]),
        (x.unsqueeze(0), V[None, None]),
    ):
        with pytest.raises((TypeError, ValueError), match="should"):
            torch.ops.fasth.householder(*wrong, False, 0, 32, sizes)
    *tensors, kind, blocks, sizes_of_svd = svd_arguments((3,), 6, 5, "compact")
    with pytest.raises(ValueError, match="shape"):
        torch.ops.fasth.svd_linear(tensors[0][:, 1:], *tensors[1:], kind, blocks, sizes_of_svd)
    for wrong in ([1, 1], [1] * 10 + [2**62]):
        with pytest.raises(ValueError, match="`sizes` should be"):
            torch.ops.fasth.svd_linear(*tensors, kind, blocks, wrong)


# The last number that is kept says for how many threads the rows are, or −3 for any, or −2 where there is Z in place of
# them: native/run.hpp. Those of any need registers of some width.
wide = native.core() is not None and native.core().isa != "baseline"
of_two_threads_or_any = pytest.mark.parametrize(("rows", "kept"), [(4, -3 if wide else 2), (34, 2), (200, -2)])


@has_core
@of_two_threads_or_any
@pytest.mark.parametrize("kind", range(3))
def test_the_rows_after_every_block_or_z_are_kept_where_there_is_room(rows, kept, kind, set_threads):
    set_threads(2)
    x, V = torch.randn(rows, 512), torch.randn(512, 512)
    for transpose in (False, True):
        arguments = householder_arguments(x, V, transpose, kind, 64)
        assert torch.ops.fasth.householder_forward(*arguments, True)[1][-1] == kept
        assert native.core().householder(x, V, transpose, kind, 64, 2, True)[1][-1] == kept


@has_core
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", range(3))
def test_there_is_room_for_as_many_rows_as_a_block_has_reflections(kind, threads, set_threads):
    """With full reflectors there is just enough, however the rows are shared out."""
    set_threads(threads)
    x, V = torch.randn(32, 256), torch.randn(256, 256)
    for transpose in (False, True):
        arguments = householder_arguments(x, V, transpose, kind, 32)
        assert torch.ops.fasth.householder_forward(*arguments, True)[1][-1] in (threads, -3)
        assert native.core().householder(x, V, transpose, kind, 32, threads, True)[1][-1] in (threads, -3)


@has_core
@of_two_threads_or_any
@pytest.mark.parametrize("reflectors", ["full", "compact"])
def test_the_rows_after_every_block_or_z_of_a_weight_are_kept(rows, kept, reflectors, set_threads):
    set_threads(2)
    arguments = svd_arguments((rows,), 256, 192, reflectors, torch.float32)
    kept = 1 if rows == 4 and kept == 2 else kept  # so few are left to one thread
    if reflectors == "full" and rows == 34 and native.core().isa == "avx512":
        kept = -2  # in registers of 16 they take the room of 48, and there is none for that
    assert torch.ops.fasth.svd_linear_forward(*arguments, True)[1][-1] == kept


@has_core
@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [16, 48, 100, 200])
@pytest.mark.parametrize(("n", "m"), [(256, 256), (128, 400), (400, 128)], ids=str)
def test_a_graph_keeps_as_much_as_eager_mode(n, m, rows, form):
    *tensors, kind, blocks, sizes = detached(svd_arguments((rows,), n, m, form, torch.float32))
    assert rows < sizes[-1]
    _, kept = torch.ops.fasth.svd_linear_forward(*tensors, kind, blocks, sizes, True)
    threads = torch.get_num_threads()
    _, expected = native.core().svd_linear(*tensors, False, kind, *blocks, threads, True)
    assert kept[-1] == expected[-1]
    assert len(expected) <= len(kept) <= 1.3 * len(expected)

    x, V = torch.randn(rows, n), torch.randn(n, n)
    _, kept = torch.ops.fasth.householder_forward(*householder_arguments(x, V, True, kind, 32), True)
    _, expected = native.core().householder(x, V, True, kind, 32, threads, True)  # x Q, of which a little more is kept
    assert kept[-1] == expected[-1]
    assert len(expected) <= len(kept) <= 1.3 * len(expected)


@has_core
@torch.no_grad()
def test_a_graph_keeps_no_more_of_a_weight_that_it_forms():
    *tensors, kind, blocks, sizes = detached(svd_arguments((3000,), 48, 32, "compact", torch.float32))
    assert sizes[-1] <= 3000
    _, kept = torch.ops.fasth.svd_linear_forward(*tensors, kind, blocks, sizes, True)
    _, more = torch.ops.fasth.svd_linear_forward(tensors[0].repeat(2, 1), *tensors[1:], kind, blocks, sizes, True)
    assert len(kept) == len(more) < 10 * 48 * 32


# The shorter way to a kernel.


class Subclass(torch.Tensor):
    pass


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def way_of(*arguments, **named) -> str:
    """Which way an operator takes: to the core, or to PyTorch's dispatcher."""
    operator = native.core().Operator("householder_forward", lambda *arguments, **named: "dispatched")
    out = operator(*arguments, **named)
    return out if out == "dispatched" else "at once"


WATCHERS = {
    "gradients": torch.enable_grad,
    "function mode": BaseTorchFunctionMode,
    "dispatch mode": DispatchMode,
    "profiler": torch.profiler.profile,
    "forward mode": fwAD.dual_level,
}


@has_core
@torch.no_grad()
def test_a_kernel_is_called_at_once_where_nobody_watches():
    x, V, *options = householder_arguments(torch.randn(3, 8), torch.randn(4, 8), False, 0, 4)
    arguments = x, V, *options, False
    assert way_of(*arguments) == "at once"
    assert way_of(*arguments[:-1], keep=False) == way_of(*arguments[:-1]) == way_of() == "dispatched"
    for name, watcher in WATCHERS.items():
        with watcher():
            assert way_of(*arguments) == "dispatched", name
    ways = torch.func.vmap(lambda x: torch.full((), way_of(x, *arguments[1:]) == "dispatched"))(x.expand(2, 3, 8))
    assert ways.all()
    with pytest.raises(ValueError, match="no operator"):
        native.core().Operator("another", print)


@has_core
@torch.no_grad()
def test_arguments_that_are_not_the_commonest_are_left_to_the_dispatcher():
    x, V, *options, sizes = householder_arguments(torch.randn(3, 8), torch.randn(4, 8), False, 0, 4)
    for wrong in (sizes[:-1], "abc", [*sizes[:7], 0, *sizes[8:]], [0.5] * 11):
        assert way_of(x, V, *options, wrong, False) == "dispatched"
    assert way_of(x, V, *options, sizes, 1) == "dispatched"
    assert way_of(x, V, "no", *options[1:], sizes, False) == "dispatched"
    tensors = detached(svd_arguments((5,), 24, 40, "compact"))
    operator = native.core().Operator("svd_linear_forward", lambda *arguments: "dispatched")
    for i, wrong in ((6, "no"), (7, [1]), (8, None), (9, None)):
        arguments = [*tensors, True]
        arguments[i] = wrong
        assert operator(*arguments) == "dispatched"


def dispatched(operator, *arguments):
    """Its result, by way of the dispatcher, which arguments with names always take."""
    return operator(
        **{argument.name: value for argument, value in zip(operator._schema.arguments, arguments, strict=True)}
    )


@has_core
@torch.no_grad()
def test_pytorch_asks_the_core_first(monkeypatch):
    arguments = *householder_arguments(torch.randn(3, 8), torch.randn(4, 8), False, 0, 4), False
    core = type("Core", (), {"Operator": staticmethod(lambda name, dispatched: lambda *arguments: name)})
    monkeypatch.setattr(native, "core", lambda: core)
    assert torch.ops.fasth.householder_forward.default(*arguments) == "householder_forward"


LAYOUTS = {
    "rows": lambda t: t,
    "columns": lambda t: t.mT.contiguous().mT,
    "sliced": lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]],
    "every other": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda t: t[:1].expand_as(t),
}


def assert_same_both_ways(operator, arguments) -> tuple[torch.Tensor, ...]:
    """The results of the shorter way are those of the dispatcher, strides included: graphs rely on them."""
    at_once, expected = operator(*arguments), dispatched(operator, *arguments)
    compared = 1 if "forward" in str(operator) else None  # what is kept is not filled to its end
    for one, other in zip(at_once[:compared], expected[:compared], strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()
    return at_once


@has_core
@torch.no_grad()
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("of_x", LAYOUTS)
@pytest.mark.parametrize("of_V", LAYOUTS)
@pytest.mark.parametrize("rows", [(5,), (2, 3), (300,)])
def test_both_ways_to_a_kernel_give_the_same(rows, of_V, of_x, needs):
    x, U, sigma, V, bias, signs, *options = detached(svd_arguments(rows, 24, 40, "full"))
    x, g, U, V = LAYOUTS[of_x](x), LAYOUTS[of_x](torch.randn(*rows, 24, dtype=x.dtype)), *map(LAYOUTS[of_V], (U, V))
    tensors = x, U, sigma, V, bias, signs
    _, kept = assert_same_both_ways(torch.ops.fasth.svd_linear_forward.default, (*tensors, *options, True))
    backward = torch.ops.fasth.svd_linear_backward.default
    assert_same_both_ways(backward, (g, *tensors, kept, *options, [*needs, True, needs[1], True]))

    arguments = householder_arguments(x, V, False, 0, 16)
    out, kept = assert_same_both_ways(torch.ops.fasth.householder_forward.default, (*arguments, True))
    g = LAYOUTS[of_x](torch.randn_like(out))
    backward = torch.ops.fasth.householder_backward.default
    assert_same_both_ways(backward, (g, out, V, kept, *arguments[2:], *needs))


fake_mode = FakeTensorMode()

ALL_BUT_PLAIN = {
    "negative": lambda t: torch.complex(t, -t).conj().imag,
    "subclass": lambda t: t.as_subclass(Subclass),
    "meta": lambda t: t.to("meta"),
    "fake": fake_mode.from_tensor,
}


@has_core
@torch.no_grad()
@pytest.mark.parametrize("kind", ALL_BUT_PLAIN)
def test_operators_of_other_tensors(kind):
    arguments = detached(svd_arguments((5,), 24, 40, "compact"))
    reflect = detached(householder_arguments(drawn(5, 40), drawn(24, 40), False, 0, 16))
    for operator, (x, *rest) in (
        (torch.ops.fasth.svd_linear_forward.default, (*arguments, True)),
        (torch.ops.fasth.householder_forward.default, (*reflect, True)),
    ):
        expected, _ = dispatched(operator, x, *rest)
        alike = ALL_BUT_PLAIN[kind]
        no_numbers = kind in ("meta", "fake")
        out, _ = operator(alike(x), *(alike(t) if no_numbers and isinstance(t, torch.Tensor) else t for t in rest))
        assert out.shape == expected.shape
        assert no_numbers or torch.equal(out, expected)


# The layers.

LAYERS = {
    "compact": lambda: fnn.LinearSVD(12, 10),
    "full, positive": lambda: fnn.LinearSVD(12, 10, reflectors="full", spectrum=spectrum.positive()),
    "between": lambda: fnn.LinearSVD(12, 12, bias=False, spectrum=spectrum.between(0.5, 2)),
    "around": lambda: fnn.LinearSVD(12, 14, spectrum=spectrum.around(1, 0.1)),
    "normalized": lambda: fnn.LinearSVD(12, 12, spectrum=spectrum.normalized()),
    "symmetric": lambda: fnn.LinearSymmetric(12),
    "symmetric, full": lambda: fnn.LinearSymmetric(12, reflectors="full"),
    "orthogonal": lambda: fnn.LinearOrthogonal(12, 10),
    "orthogonal, full": lambda: fnn.LinearOrthogonal(12, 14, reflectors="full"),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (3, 4)), fnn.Conv1dSVD(3, 5, 3, padding=1)),
    "images": lambda: nn.Sequential(nn.Unflatten(1, (1, 3, 4)), fnn.Conv2dSVD(1, 5, 3, padding=1)),
    "recurrent": lambda: nn.Sequential(nn.Unflatten(1, (3, 4)), fnn.RNNSVD(4, 6, batch_first=True)),
}


def count_of_core(counter: CompileCounterWithBackend) -> int:
    return sum("fasth" in str(node.target) for graph in counter.graphs for node in graph.graph.nodes)


def output(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    return out[0] if isinstance(out, tuple) else out


def check(model: nn.Module, counter: CompileCounterWithBackend, batches: tuple[int, ...] = BATCHES) -> None:
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    parameters = list(model.parameters())
    for rows in batches:
        x = torch.randn(rows, 12, dtype=parameters[0].dtype)
        actual, expected = output(compiled, x), output(model, x)
        torch.testing.assert_close(actual, expected)
        actual, expected = (torch.autograd.grad(out.pow(2).sum(), parameters) for out in (actual, expected))
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", LAYERS)
def test_one_graph_for_all_batch_sizes(name):
    counter = CompileCounterWithBackend("aot_eager")
    model = LAYERS[name]().double()
    check(model, counter)
    # One for the first batch and one for all others; PyTorch's own convolutions have another from 16 on.
    assert counter.frame_count <= (3 if name in ("convolution", "images") else 2)
    assert (count_of_core(counter) > 0) == (native.core() is not None)
    model.eval()
    compiled = torch.compile(model, fullgraph=True, backend=CompileCounterWithBackend("aot_eager"))
    with torch.no_grad():
        for rows in (4, 70):
            x = torch.randn(rows, 12, dtype=torch.float64)
            torch.testing.assert_close(output(compiled, x), output(model, x))


# Inference.


@pytest.mark.parametrize("name", LAYERS)
def test_a_graph_for_inference_follows_every_change_of_the_parameters(name):
    model, x = LAYERS[name]().eval(), torch.randn(5, 12)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, fullgraph=True, backend=counter)

    def check():
        with torch.no_grad():
            torch.testing.assert_close(output(compiled, x), output(copy.deepcopy(model), x))

    check()
    check()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    check()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    output(model, x).sum().backward()
    optimizer.step()
    check()
    model.load_state_dict({key: value * 0.9 for key, value in model.state_dict().items()})
    check()
    assert counter.frame_count == 1


def test_a_graph_for_inference_asks_for_the_kept_weight(monkeypatch):
    model, x = fnn.LinearSVD(12, 10).eval(), torch.randn(5, 12)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    made = []
    weight = type(model).weight
    monkeypatch.setattr(type(model), "weight", property(lambda layer: made.append(layer) or weight.fget(layer)))
    with torch.no_grad():
        for _ in range(4):
            compiled(x)
    assert len(made) == 2  # kept from the second on


def test_one_graph_for_inference_serves_all_layers_of_a_kind():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda layer, x: layer(x), fullgraph=True, backend=counter)
    layer, x = fnn.LinearSVD(12, 10).eval(), torch.randn(5, 12)
    other = fnn.LinearSVD(12, 10).eval()
    with torch.no_grad():
        for one in (layer, other, copy.deepcopy(layer), pickle.loads(pickle.dumps(other))):
            torch.testing.assert_close(compiled(one, x), one(x))
    assert counter.frame_count <= 2  # as with nn.Linear: the second has other values


def test_a_graph_for_inference_takes_other_tensors_for_the_parameters():
    layer, x = fnn.LinearSVD(12, 10).eval(), torch.randn(5, 12)
    given = {name: torch.randn_like(p) for name, p in layer.named_parameters()}

    def call(given):
        return torch.func.functional_call(layer, given, (x,))

    with torch.no_grad():
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(given), call(given))


def test_a_graph_for_inference_takes_another_view_of_its_parameters():
    layer, x = fnn.LinearSVD(8, 8).eval(), torch.randn(3, 8)
    given = {"reflectors": layer.reflectors.detach().t()}

    def call(given):
        return torch.func.functional_call(layer, given, (x,))

    with torch.no_grad():
        layer(x)
        torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(given), call(given))


def test_the_weight_that_a_graph_keeps_is_found_by_its_tensors():
    layers = fnn.LinearSVD(12, 10), fnn.LinearOrthogonal(12, 10), fnn.RNNSVD(4, 6, num_layers=2)
    for layer in layers:
        layer.eval()
        made_of = tensors_of(layer)
        with torch.no_grad():
            for _ in range(2):
                layer.kept_weight_of(made_of)
            assert layer._kept_for_graphs.is_made_of(made_of)
            made_of[0].add_(1)
            assert not layer._kept_for_graphs.is_made_of(made_of)


def kept_by(layer: nn.Module) -> object:
    with torch.no_grad():
        for _ in range(2):
            weight = layer.kept_weight_of(tensors_of(layer))
    return weight


packs = pytest.mark.skipif(
    native.core() is None or native.core().isa == "baseline", reason="weights are packed for a core with AVX2 at least"
)


@packs
@pytest.mark.parametrize("shape", [(12, 10), (1, 1), (3, 70), (130, 64), (65, 33)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_weight_is_packed_for_graphs(shape, bias, precise):
    m, n = shape
    layer = fnn.LinearSVD(m, n, bias=bias, dtype=precise).eval()

    def linear(x):
        return torch.ops.fasth.kept_linear.default(x, tensors_of(layer), layer.bias, layer._number, n)

    rows = [torch.randn(m), torch.randn(0, m), torch.randn(1, m), torch.randn(2, 3, m), torch.randn(m, 40).mT]
    for x in (*rows, torch.randn(1, m).expand(5, m), torch.randn(300, m), torch.randn(7, 2 * m)[:, ::2]):
        x = x.to(precise)
        for _ in range(3):
            out = linear(x)
            torch.testing.assert_close(out, layer(x))
            assert out.is_contiguous()
    assert isinstance(layer._kept_for_graphs.weight, native.core().KeptWeight)
    weight = torch.ops.fasth.kept_weight(tensors_of(layer), layer._number, [n, m])
    torch.testing.assert_close(weight, layer.weight)


@packs
@torch.no_grad()
def test_what_does_not_fit_a_packed_weight_is_as_with_f_linear():
    layer, x = fnn.LinearOrthogonal(12, 10).eval(), torch.randn(7, 12)
    linear = torch.ops.fasth.kept_linear.default
    arguments = tensors_of(layer), layer.bias, layer._number, 10
    for _ in range(3):
        expected = linear(x, *arguments)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(x[:, 1:], *arguments)
    with pytest.raises(RuntimeError, match="dtype"):
        linear(x.double(), *arguments)
    torch.testing.assert_close(
        linear(x, tensors_of(layer), layer.bias[:1], layer._number, 10),
        linear(x, *arguments) - layer.bias + layer.bias[0],
    )
    for alike in (ALL_BUT_PLAIN["negative"], ALL_BUT_PLAIN["subclass"]):
        torch.testing.assert_close(torch.as_tensor(linear(alike(x), *arguments)).as_subclass(torch.Tensor), expected)


@packs
@torch.no_grad()
def test_a_packed_weight_is_found_without_its_layer_until_it_changes(monkeypatch):
    layer, x = fnn.LinearSVD(12, 10).eval(), torch.randn(7, 12)
    arguments = x, tensors_of(layer), layer.bias, layer._number, 10
    expected = [torch.ops.fasth.kept_linear.default(*arguments) for _ in range(3)][-1]
    asked = []
    of = type(layer).kept_weight_of
    monkeypatch.setattr(type(layer), "kept_weight_of", lambda *arguments: asked.append(1) or of(*arguments))
    torch.testing.assert_close(torch.ops.fasth.kept_linear.default(*arguments), expected)
    assert not asked
    for change in (
        lambda: layer.sigma.mul_(2),
        lambda: layer.sigma.__setattr__("data", layer.sigma * 2),
        layer.eval,
        lambda: setattr(layer, "sigma", nn.Parameter(layer.sigma * 2)),
    ):
        change()
        asked.clear()
        arguments = x, tensors_of(layer), layer.bias, layer._number, 10
        for _ in range(3):
            torch.testing.assert_close(torch.ops.fasth.kept_linear.default(*arguments), layer(x))
        assert 1 <= len(asked) <= 2  # kept then
    others = [p.clone() for p in tensors_of(layer)]
    asked.clear()
    torch.testing.assert_close(torch.ops.fasth.kept_linear.default(x, others, *arguments[2:]), layer(x))
    assert asked


@packs
@torch.no_grad()
def test_a_packed_weight_that_somebody_holds_is_forgotten_with_the_others():
    layer, x = fnn.LinearSVD(12, 10).eval(), torch.randn(7, 12)
    arguments = x, tensors_of(layer), layer.bias, layer._number, 10
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, fused=True)
    for change in (lambda: (layer.sigma.data.mul_(2), layer.eval()), optimizer.step):  # which no version shows
        held = kept_by(layer)
        change()
        torch.testing.assert_close(torch.ops.fasth.kept_linear.default(*arguments), layer._multiply(x))
        assert not isinstance(held, torch.Tensor)


@packs
@torch.no_grad()
def test_a_layer_that_its_parameters_refer_to_is_collected():
    layer = fnn.LinearSVD(12, 10).eval()
    kept_by(layer)
    layer.sigma.owner = layer
    gone = weakref.ref(layer)
    del layer
    gc.collect()
    assert gone() is None


@packs
@torch.no_grad()
def test_forward_mode_passes_a_packed_weight():
    layer, x, t = fnn.LinearSVD(12, 10).eval(), torch.randn(7, 12), torch.randn(7, 12)
    kept_by(layer)
    with fwAD.dual_level():
        dual = fwAD.make_dual(x, t)
        out = torch.ops.fasth.kept_linear.default(dual, tensors_of(layer), layer.bias, layer._number, 10)
        torch.testing.assert_close(fwAD.unpack_dual(out).tangent, t @ layer.weight.mT)


@packs
def test_threads_multiply_by_a_packed_weight(set_threads):
    layer, x = fnn.LinearSVD(300, 200).eval(), torch.randn(300, 300)
    arguments = x, tensors_of(layer), layer.bias, layer._number, 200
    with torch.no_grad():
        expected = layer(x)
        for threads in (1, 2, 3, 7):
            set_threads(threads)
            for _ in range(3):
                torch.testing.assert_close(torch.ops.fasth.kept_linear.default(*arguments), expected)


def test_a_weight_is_not_packed_where_that_would_not_serve():
    assert isinstance(kept_by(fnn.LinearSVD(12, 10, dtype=torch.bfloat16).eval()), torch.Tensor)
    assert isinstance(kept_by(fnn.RNNSVD(4, 6).eval()), torch.Tensor)
    torch.set_float32_matmul_precision("medium")
    try:
        assert isinstance(kept_by(fnn.LinearSVD(12, 10).eval()), torch.Tensor)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_precision_for_each_backend_is_no_error():
    was = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        assert isinstance(kept_by(fnn.LinearSVD(12, 10).eval()), torch.Tensor)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = was


def test_a_graph_that_changes_its_parameters_leaves_nothing_behind():
    layer, x = fnn.LinearSVD(8, 8, bias=False).eval(), torch.randn(3, 8)

    def call(x):
        y = layer(x)
        layer.sigma.mul_(2)
        return y

    with torch.no_grad():
        compiled, other = torch.compile(call), torch.compile(layer)
        for _ in range(3):
            y = compiled(x)
            torch.testing.assert_close(layer(x), 2 * y)
            for _ in range(3):
                torch.testing.assert_close(other(x), 2 * y)


@has_core
@pytest.mark.parametrize("form", FORMS)
def test_no_singular_values(form):
    arguments = svd_arguments((5,), 24, 40, form)
    arguments = tuple(t[:0].detach() if i == 2 else t[:, :0] if i == 5 else t for i, t in enumerate(arguments))
    out = torch.ops.fasth.svd_linear(*arguments)
    expected = SVD_COMPOSED[FORMS.index(form)](*arguments[:6])
    wanted = [t for t in arguments[:5] if isinstance(t, torch.Tensor) and t.requires_grad]
    found = [torch.autograd.grad(t.square().sum(), wanted, allow_unused=True) for t in (out, expected)]
    for a, b, t in zip(*found, wanted, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(t) if b is None else b)


def test_opcheck_of_what_is_kept():
    layer, x = fnn.LinearSVD(12, 10).eval().requires_grad_(False), torch.randn(5, 12)
    made_of = [getattr(layer, name).detach() for name in layer._made_of]
    torch.library.opcheck(torch.ops.fasth.kept_weight, (made_of, layer._number, [10, 12]))
    torch.library.opcheck(torch.ops.fasth.kept_linear, (x, made_of, layer.bias, layer._number, 10))


def test_inductor():
    model = nn.Sequential(
        fnn.LinearSVD(12, 16), nn.Tanh(), fnn.LinearSymmetric(16, reflectors="full"), fnn.LinearOrthogonal(16, 5)
    ).double()
    counter = CompileCounterWithBackend("inductor")
    check(model, counter)
    assert counter.frame_count <= 2
    assert (count_of_core(counter) > 0) == (native.core() is not None)


def test_without_the_core():
    done = script(
        """
import torch
import fasth.nn as fnn
from test_compile import LAYERS, check, count_of_core, CompileCounterWithBackend

counter = CompileCounterWithBackend("aot_eager")
check(LAYERS["compact"]().double(), counter, (3, 5, 100))
print(counter.frame_count, count_of_core(counter))
""",
        FASTH_CORE="off",
    )
    assert done.split() == ["2", "0"]


def test_other_dtypes_and_transforms_take_the_traced_path():
    counter = CompileCounterWithBackend("aot_eager")
    layer = fnn.LinearSVD(12, 12)
    half = fnn.LinearSVD(12, 12, dtype=torch.bfloat16)
    x = torch.randn(3, 12)
    torch.compile(half, fullgraph=True, backend=counter)(x.bfloat16())
    ensemble = torch.compile(torch.func.vmap(lambda x: layer(x)), fullgraph=True, backend=counter)
    torch.testing.assert_close(ensemble(x.unsqueeze(0)), layer(x).unsqueeze(0))
    total = torch.compile(torch.func.grad(lambda x: layer(x).pow(2).sum()), fullgraph=True, backend=counter)
    torch.testing.assert_close(total(x), torch.func.grad(lambda x: layer(x).pow(2).sum())(x))
    assert count_of_core(counter) == 0


def test_all_sizes_symbolic():
    compiled = torch.compile(householder, fullgraph=True, dynamic=True, backend="aot_eager")
    for x_shape, V_shape in (((3, 8), (8, 8)), ((100, 9), (4, 9)), ((2, 3, 5), (2, 7, 5)), ((3, 5), (2, 7, 5))):
        x, V = drawn(*x_shape), drawn(*V_shape)
        torch.testing.assert_close(with_gradients(compiled, x, V), with_gradients(householder, x, V))


def test_under_autocast():
    counter = CompileCounterWithBackend("aot_eager")
    layer, x = fnn.LinearSVD(12, 12), torch.randn(3, 12)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(x), layer(x))
        torch.testing.assert_close(compiled(x.bfloat16()), layer(x.bfloat16()))
