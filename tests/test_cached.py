"""``fasth.cached()``: within it every layer forms its weight once; outside of it no layer holds a weight at all."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from dense import assert_close, assert_within, value_and_gradients
from layers import ALL, BY_KERNELS, CASES, RECURRENT, Case, of_every, output
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.checkpoint import checkpoint

import fasth
from fasth import LinearSVD
from fasth.tools.problems import gradient_of
from fasth.tools.twins import perturbed

ROUNDINGS = 100


def draw(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Any, Tensor]:
    return perturbed(case.make(dtype=dtype)), case.input(dtype)


def results(layer: nn.Module, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The layer's output, and the gradients of x and of all parameters."""
    return value_and_gradients(lambda x: output(layer, x), [x], list(layer.parameters()))


def count_formed(layer: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list that every weight is added to, or the thin factors of it, as the layer forms it to be cached."""
    form, formed = layer._form, []
    monkeypatch.setattr(layer, "_form", lambda *sigma: formed.append(form(*sigma)) or formed[-1])
    return formed


def tensors_of(weight: Any) -> list[Tensor]:
    """A cached weight is one tensor; of an RNN there are several, and a layer of low rank has two thin factors."""
    return [weight] if isinstance(weight, Tensor) else list(weight)


# Within it


@of_every(CASES)
def test_values_and_gradients_are_those_outside(case: Case, path: str) -> None:
    layer, x = draw(case)
    for training in (True, False):
        layer.train(training)
        expected = results(layer, x)
        with fasth.cached():
            for _ in range(2):
                actual = results(layer, x)
                layer._cache.entry = None  # what was differentiated once cannot be again
                assert_close(actual, expected, ROUNDINGS)
        with torch.no_grad(), fasth.cached():
            for _ in range(2):
                assert_close(([output(layer, x)], [x]), (expected[0], [x]), ROUNDINGS)


@of_every(CASES)
def test_a_step_forms_the_weight_once_and_differentiates_it_once(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, _ = draw(case)
    inputs = [case.input(torch.float64) for _ in range(4)]

    def step() -> tuple[list[Tensor], list[Tensor]]:
        return value_and_gradients(lambda *inputs: [output(layer, x) for x in inputs], inputs, list(layer.parameters()))

    expected = step()
    formed, differentiated = count_formed(layer, monkeypatch), []

    def watched(*inputs: Tensor) -> list[Tensor]:
        outputs = [output(layer, x) for x in inputs]
        for t in tensors_of(formed[0]):
            t.register_hook(lambda _, t=t: differentiated.append(id(t)))
        return outputs

    with fasth.cached():
        actual = value_and_gradients(watched, inputs, list(layer.parameters()))
    assert len(formed) == 1
    assert sorted(differentiated) == sorted(map(id, tensors_of(formed[0])))
    assert_close(actual, expected, ROUNDINGS)


@of_every(CASES)
def test_inference_forms_it_once(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = draw(case)
    formed = count_formed(layer, monkeypatch)
    for mode in (torch.no_grad, torch.inference_mode):
        formed.clear()
        with mode(), fasth.cached():
            first, second = output(layer, x), output(layer.eval(), x)
        assert len(formed) == 1 and torch.equal(first, second)
        assert not any(t.requires_grad for t in tensors_of(formed[0]))


def test_a_loop_over_time() -> None:
    layer, h = perturbed(LinearSVD(5, 5, dtype=torch.float64), 0.1), torch.randn(2, 5, dtype=torch.float64)

    def unrolled(h: Tensor) -> Tensor:
        for _ in range(6):
            h = layer(h).tanh()
        return h

    expected = value_and_gradients(unrolled, [h], list(layer.parameters()))
    with fasth.cached():
        assert_close(value_and_gradients(unrolled, [h], list(layer.parameters())), expected, ROUNDINGS)


def same_memory(a: Tensor, b: Tensor) -> bool:
    """True if two weights, which a layer returns as views, share memory."""
    return a.data_ptr() == b.data_ptr() and torch.equal(a, b)


def test_the_weight_is_the_cached_one() -> None:
    for name in ("LinearSVD", "LinearSVD, full", "LinearSymmetric", "LinearOrthogonal", "Conv1dSVD", "Conv2dSVD"):
        layer, x = draw(CASES[name])
        with fasth.cached():
            first = layer.weight
            assert same_memory(first, layer.weight) and same_memory(first, layer._cache.entry.weight)
            assert_within(layer.weight, copy.deepcopy(layer).weight, 1, ROUNDINGS)
            output(layer, x).sum().backward()
        assert not same_memory(first, layer.weight) and torch.equal(first, layer.weight)
    rnn, x = draw(CASES["RNNSVD"])
    with fasth.cached():
        assert same_memory(rnn.weight_hh_l0, rnn.weight_hh_l0)
        assert torch.equal(rnn.weight, torch.stack([rnn.weight_hh_l0, rnn.weight_hh_l0_reverse]))
        assert_within(rnn.weight, copy.deepcopy(rnn).weight, 1, ROUNDINGS)


@of_every(CASES)
def test_first_without_gradients_and_then_with(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = draw(case)
    expected = results(layer, x)
    formed = count_formed(layer, monkeypatch)
    for mode in (torch.no_grad, torch.inference_mode):
        formed.clear()
        with fasth.cached():
            with mode():
                output(layer, x)
            assert_close(results(layer, x), expected, ROUNDINGS)
            assert len(formed) == 2
            with mode():  # one with a graph serves both
                assert not output(layer, x).requires_grad
            assert len(formed) == 2


def test_a_graph_that_is_retained_goes_backward_twice() -> None:
    layer, x = draw(CASES["LinearSVD"])
    with fasth.cached():
        first = torch.autograd.grad(layer(x).sum(), layer.reflectors, retain_graph=True)[0]
        second = torch.autograd.grad(layer(x).sum(), layer.reflectors, retain_graph=True)[0]
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            for _ in range(2):
                layer(x).sum().backward()
    assert torch.equal(first, second)


@of_every(CASES)
def test_transforms(case: Case) -> None:
    """Transforms pass other tensors than the layer's own, so they use no cached weight."""
    layer, x = draw(case)
    own = {name: p.detach() for name, p in layer.named_parameters()}
    trained = {name: own[name] for name, p in layer.named_parameters() if p.requires_grad}
    others = {name: torch.stack([p, 1.5 * p]) for name, p in own.items()}

    def call(tensors: dict[str, Tensor]) -> Tensor:
        out = functional_call(layer, tensors, (x,))
        return out if isinstance(out, Tensor) else out[0]

    def transformed() -> list[Tensor]:
        gradients = grad(lambda tensors: call(tensors).sin().sum())(trained).values()
        return [*gradients, *([] if case in [CASES[name] for name in BY_KERNELS] else [vmap(call)(others)])]

    expected = transformed()
    with fasth.cached():
        output(layer, x)
        for actual, reference in zip(transformed(), expected, strict=True):
            assert_within(actual, reference, 10, ROUNDINGS)


def test_precision(dtype: torch.dtype) -> None:
    """Layers of lower precision, and autocast, which casts the cached weight as it casts nn.Linear's."""
    for case in CASES.values():
        layer, x = draw(case, dtype)
        with torch.no_grad(), fasth.cached():
            out = output(layer, x)
            expected = output(copy.deepcopy(layer).double(), x.double())
        assert out.dtype == dtype
        assert_within(out, expected, max(1.0, expected.abs().max().item()), ROUNDINGS if dtype.itemsize > 2 else 20)
    layer, linear, x = LinearSVD(6, 4), nn.Linear(6, 4), torch.randn(3, 6)
    with fasth.cached(), torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == linear(x).dtype == torch.bfloat16
        assert layer.weight.dtype == torch.float32


def test_wrong_inputs_are_the_same_errors() -> None:
    layer = LinearSVD(3, 4)
    for training in (True, False):
        layer.train(training)
        for context in (torch.enable_grad, fasth.cached):
            with context():
                with pytest.raises(ValueError, match="`input` should have last dimension 3"):
                    layer(torch.ones(2, 4))
                with pytest.raises(TypeError, match="`input` should be a tensor; got list"):
                    layer([1.0, 2.0, 3.0])


# Whose weight it is


def with_values_of(case: Case, tensors: dict[str, Tensor]) -> nn.Module:
    """A layer of its own with these values."""
    layer = case.make(dtype=torch.float64)
    layer.load_state_dict(tensors, strict=False)
    return layer


def replica_of(layer: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    """A replica as ``torch.nn.DataParallel`` makes it: tensors as attributes in place of parameters."""
    replica: Any = layer._replicate_for_data_parallel()
    for name, t in tensors.items():
        setattr(replica, name, t)
    return replica


def shallow_copy_of(layer: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    other = copy.copy(layer)
    other._parameters = {name: nn.Parameter(t, requires_grad=False) for name, t in tensors.items()}
    return other


def called_functionally(layer: nn.Module, tensors: dict[str, Tensor]) -> Callable[..., Any]:
    return lambda x: functional_call(layer, tensors, (x,))


OTHERS = {"replica": replica_of, "copy.copy": shallow_copy_of, "functional_call": called_functionally}


@of_every(CASES)
@pytest.mark.parametrize("kind", OTHERS)
def test_other_tensors_have_another_weight(case: Case, kind: str) -> None:
    """The same layer with other tensors in place of its parameters, within one context."""
    layer, x = draw(case)
    own = {name: p.detach() for name, p in layer.named_parameters()}
    others = {name: p.detach() for name, p in perturbed(copy.deepcopy(layer)).named_parameters()}
    with torch.no_grad():
        expected = [output(with_values_of(case, tensors), x) for tensors in (own, others)]
        assert not torch.allclose(*expected)
        with fasth.cached():
            for _ in range(2):
                assert_within(output(layer, x), expected[0], 10, ROUNDINGS)
                assert_within(output(OTHERS[kind](layer, others), x), expected[1], 10, ROUNDINGS)


def _assigns(layer: nn.Module, other: nn.Module) -> None:
    for name, p in other.named_parameters():
        setattr(layer, name, nn.Parameter(p.detach(), p.requires_grad))


@of_every(CASES)
@pytest.mark.parametrize("change", ["load_state_dict", "load_state_dict, assign", "set_weight_", "new parameters"])
def test_what_replaces_all_values_takes_effect_within_it(case: Case, change: str) -> None:
    layer, x = draw(case)
    other = perturbed(copy.deepcopy(layer))
    changes = CHANGES | {
        "set_weight_": lambda layer, other: layer.set_weight_(other.weight),
        "new parameters": _assigns,
    }
    with torch.no_grad(), fasth.cached():
        output(layer, x)
        changes[change](layer, other)
        after = output(layer, x)
    assert_within(after, output(layer, x), 10, ROUNDINGS)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_with_other_parameters() -> None:
    layer, x = draw(CASES["LinearSVD"])
    call = compiled(layer, "aot_eager")
    with torch.no_grad(), fasth.cached():
        for scale in (1, 2, 3):
            layer.sigma = nn.Parameter(layer.sigma * scale)
            for _ in range(2):
                assert_within(call(x), copy.deepcopy(layer)(x), 100, ROUNDINGS)


def test_no_fake_tensor_is_cached() -> None:
    layer, x = draw(CASES["LinearSVD"])
    expected = layer(x)
    with torch.no_grad(), fasth.cached():
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            layer(mode.from_tensor(x))
        assert_within(layer(x), expected, 10, ROUNDINGS)


@of_every(CASES)
@pytest.mark.parametrize("cached_before", [False, True], ids=["", "cached before"])
@pytest.mark.parametrize("where", ["within, within", "within, outside", "outside, within"])
def test_checkpoint(case: Case, cached_before: bool, where: str) -> None:
    """A region, and the backward pass through it, each within the context or outside of it."""
    layer, _ = draw(case)
    # With as many rows as features, reflectors and x have the same shape and must not be confused.
    x = torch.randn(6, 6, dtype=torch.float64) if case is CASES["LinearSVD"] else case.input(torch.float64)
    layer.bias = None if case is CASES["LinearSVD"] else getattr(layer, "bias", None)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    expected = results(layer, x)[1]
    x = x.requires_grad_()
    forward, backward = where.split(", ")
    with fasth.cached() if "within" in forward else nullcontext():
        if cached_before:
            output(layer, x)
        out = checkpoint(lambda x: output(layer, x), x, use_reentrant=False)
        if backward == "within":
            with fasth.cached():
                found = torch.autograd.grad(out, [x, *parameters], gradient_of(out))
    if backward == "outside":
        found = torch.autograd.grad(out, [x, *parameters], gradient_of(out))
    assert_close(([out], list(found)), ([out], expected), ROUNDINGS)


# Compiled


def compiled(layer: nn.Module, backend: str) -> Any:
    torch._dynamo.reset()
    return torch.compile(layer, backend=backend, fullgraph=True)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "aot_eager") for name in CASES), ("LinearSVD", "inductor"), ("LinearSVD, thin", "inductor")],
)
def test_compiled(name: str, backend: str) -> None:
    layer, x = draw(CASES[name])
    x = x[:2] if name in RECURRENT else x  # the graph has every time step
    expected = results(layer, x)
    call = compiled(layer, backend)
    for _ in range(2):
        with torch.no_grad(), fasth.cached():
            for _ in range(3):
                assert_close(([output(call, x)], [x]), (expected[0], [x]), ROUNDINGS)
        assert layer._cache.entry is None
        with fasth.cached():
            assert_close(results(call, x), expected, ROUNDINGS)
        assert_close(results(call, x), expected, ROUNDINGS)
        perturbed(layer)
        expected = results(layer, x)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_loops_and_steps(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of the compiled function after another, and many in one graph: the weight is formed once."""
    layer, inputs = perturbed(LinearSVD(6, 4, dtype=torch.float64)), list(torch.randn(4, 3, 6, dtype=torch.float64))
    parameters = list(layer.parameters())
    expected = value_and_gradients(lambda *inputs: [layer(x) for x in inputs], inputs, parameters)

    call = compiled(layer, backend)
    for _ in range(2):
        with fasth.cached():
            assert_close(value_and_gradients(lambda *t: [call(x) for x in t], inputs, parameters), expected, ROUNDINGS)

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, *inputs: Tensor) -> list[Tensor]:
            return [self.layer(x) for x in inputs]

    formed = count_formed(layer, monkeypatch)
    call = compiled(Loop(), "eager")
    with fasth.cached():
        call(*inputs)
    assert len(formed) <= 1
    monkeypatch.undo()
    call = compiled(Loop(), backend)
    for _ in range(2):
        with fasth.cached():
            assert_close(value_and_gradients(call, inputs, parameters), expected, ROUNDINGS)


# At its end


class Oops(Exception):
    pass


@of_every(CASES)
@pytest.mark.parametrize("fails", [False, True])
def test_dropped_at_the_end(case: Case, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = draw(case)
    formed = count_formed(layer, monkeypatch)
    try:
        with torch.no_grad(), fasth.cached():
            before = output(layer, x)
            if fails:
                raise Oops
    except Oops:
        pass
    cached = [weakref.ref(t) for t in tensors_of(formed.pop())]
    gc.collect()
    assert all(t() is None for t in cached)  # no memory is held
    with torch.no_grad():
        perturbed(layer)
        after = output(layer, x)
        assert not torch.allclose(after, before)
        with fasth.cached():
            assert_within(output(layer, x), after, max(1.0, after.abs().max().item()), ROUNDINGS)


def test_an_error_while_forming_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = draw(CASES["LinearSVD"])

    def fails() -> Tensor:
        raise Oops

    with fasth.cached():
        monkeypatch.setattr(layer, "_form", fails)
        with pytest.raises(Oops):
            layer(x)
        monkeypatch.undo()
        out = layer(x)
    assert_within(out, layer(x), 10, ROUNDINGS)


def test_nested(monkeypatch: pytest.MonkeyPatch) -> None:
    (layer, x), (other, y) = draw(CASES["LinearSVD"]), draw(CASES["Conv2dSVD"])
    formed, formed_other = count_formed(layer, monkeypatch), count_formed(other, monkeypatch)
    with torch.no_grad(), fasth.cached():
        layer(x)
        with fasth.cached():
            layer(x), other(y)
        with pytest.raises(Oops), fasth.cached():
            raise Oops
        layer(x), other(y)
        assert (len(formed), len(formed_other)) == (1, 1)
    with torch.no_grad(), fasth.cached():
        layer(x)
    assert len(formed) == 2
    layer(x)
    assert len(formed) == 2


@fasth.cached()
def _decorated(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    return layer.weight, layer.weight


def test_as_a_decorator() -> None:
    layer, x = draw(CASES["LinearSVD"])
    first, second = _decorated(layer, x)
    assert same_memory(first, second) and not same_memory(_decorated(layer, x)[0], first)


@of_every(CASES)
def test_not_in_states_copies_and_pickles(case: Case) -> None:
    layer, x = draw(case)

    def saved(layer: nn.Module) -> int:
        file = io.BytesIO()
        torch.save(layer, file)
        return len(file.getvalue())

    keys, size, pickled = layer.state_dict().keys(), saved(layer), len(pickle.dumps(layer))
    with torch.no_grad(), fasth.cached():
        expected = output(layer, x)
        assert layer._cache.entry is not None
        assert layer.state_dict().keys() == keys
        assert saved(layer) == size and len(pickle.dumps(layer)) == pickled
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(output(other, x), expected)
            other = perturbed(copy.deepcopy(other))
            assert not torch.allclose(output(other, x), expected)
        assert torch.equal(output(layer, x), expected)


# Outside of it


def _writes_data(layer: nn.Module, other: nn.Module) -> None:
    """Stores the parameters, copies averages into them, and restores them later, as torch_ema does."""
    for p, q in zip(layer.parameters(), other.parameters(), strict=True):
        p.data.copy_(q.data)


def _soft_update(layer: nn.Module, other: nn.Module) -> None:
    for p, q in zip(layer.parameters(), other.parameters(), strict=True):
        p.data.lerp_(q.data, 0.25)


def _soft_update_by_products(layer: nn.Module, other: nn.Module) -> None:
    for p, q in zip(layer.parameters(), other.parameters(), strict=True):
        p.data.mul_(0.75).add_(0.25 * q.data)


def _replaces_data(layer: nn.Module, other: nn.Module) -> None:
    for p, q in zip(layer.parameters(), other.parameters(), strict=True):
        p.data = q.data.clone()


def _by_numpy(layer: nn.Module, other: nn.Module) -> None:
    for p, q in zip(layer.parameters(), other.parameters(), strict=True):
        p.detach().numpy()[...] = q.detach().numpy()


def _step(layer: nn.Module, **options: Any) -> None:
    trained = [p for p in layer.parameters() if p.requires_grad]
    for p in trained:
        p.grad = torch.randn_like(p)
    torch.optim.SGD(trained, lr=0.3, **options).step()


def _in_inference_mode(layer: nn.Module, other: nn.Module) -> None:
    with torch.inference_mode():
        for p, q in zip(layer.parameters(), other.parameters(), strict=True):
            p.copy_(q)


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "p.data.copy_": _writes_data,
    "p.data.lerp_": _soft_update,
    "p.data.mul_, add_": _soft_update_by_products,
    "p.data =": _replaces_data,
    "numpy": _by_numpy,
    "in inference mode": _in_inference_mode,
    "optimizer step": lambda layer, _: _step(layer),
    "optimizer step, foreach": lambda layer, _: _step(layer, foreach=True),
    "optimizer step, fused": lambda layer, _: _step(layer, fused=True),
    "load_state_dict": lambda layer, other: layer.load_state_dict(other.state_dict()),
    "load_state_dict, assign": lambda layer, other: layer.load_state_dict(other.state_dict(), assign=True),
    "vector_to_parameters": lambda layer, other: vector_to_parameters(
        parameters_to_vector(other.parameters()).detach(), layer.parameters()
    ),
}


@of_every(ALL)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_take_effect_at_once(case: Case, training: bool, change: str) -> None:
    layer, x = draw(case)
    layer.train(training)
    for _ in range(2):
        with torch.no_grad():
            before = output(layer, x)
            with fasth.cached():
                output(layer, x)
        CHANGES[change](layer, perturbed(copy.deepcopy(layer)))
        fresh = case.make(dtype=torch.float64).train(training)
        fresh.load_state_dict(layer.state_dict())
        with torch.no_grad():
            after = output(layer, x)
            assert not torch.allclose(after, before)
            assert torch.equal(after, output(fresh, x))
