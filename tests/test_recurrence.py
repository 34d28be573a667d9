"""h_t = f(x_t + W h_{t−1}) on every backend against one sequence at a time, one time step at a time."""

from __future__ import annotations

import pytest
import torch
from dense import assert_close, value_and_gradients
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from fasth.nn.recurrence import NONLINEARITIES, Recurrence, Times, last_states, recurrence
from fasth.reflections import core

RAGGED = [7, 4, 4, 2, 1]
PROBLEMS = {  # the lengths of the sequences, h, and whether they are packed
    "one number": ([1], 1, False),
    "one step": ([1] * 4, 5, False),
    "one sequence": ([6], 16, False),
    "a panel and a number": ([5] * 3, 33, False),
    "many": ([4] * 37, 20, False),
    "several panels": ([3] * 8, 96, False),
    "packed, one": ([6], 5, True),
    "packed, ragged": (RAGGED, 17, True),
    "packed, many": ([6] * 20 + [3] * 17, 5, True),
}
each_nonlinearity = pytest.mark.parametrize("nonlinearity", NONLINEARITIES)


def activated(z: Tensor, bias: Tensor, nonlinearity: str) -> Tensor:
    if nonlinearity == "modrelu":
        return torch.where(z.abs() + bias > 0, z.sign() * (z.abs() + bias), 0)
    return torch.tanh(z) if nonlinearity == "tanh" else torch.relu(z)


def of_sequence(x: Tensor, W: Tensor, h: Tensor, bias: Tensor, nonlinearity: str, reverse: bool) -> Tensor:
    """The definition, for one sequence: x: (time, h) → (time, h)."""
    states = [h] * len(x)
    for t in reversed(range(len(x))) if reverse else range(len(x)):
        h = activated(x[t] + W @ h, bias, nonlinearity)
        states[t] = h
    return torch.stack(states)


def definition(x: Tensor, W: Tensor, h0: Tensor, bias: Tensor, nonlinearity: str, times: Times) -> Tensor:
    if times.sizes is None:
        sequences = zip(x.unbind(1), h0, strict=True)
        return torch.stack([of_sequence(s, W, h, bias, nonlinearity, times.reverse) for s, h in sequences], 1)
    packed = torch.nn.utils.rnn.PackedSequence(x, torch.tensor(times.sizes))
    sequences = zip(unpack_sequence(packed), h0, strict=True)
    return pack_sequence([of_sequence(s, W, h, bias, nonlinearity, times.reverse) for s, h in sequences]).data


def draw(lengths: list[int], h: int, packed: bool, dtype: torch.dtype) -> tuple[list[Tensor], list[int] | None]:
    sequences = [torch.randn(length, h, dtype=torch.float64) for length in lengths]
    sizes = pack_sequence(sequences).batch_sizes.tolist() if packed else None
    x = pack_sequence(sequences).data if packed else torch.stack(sequences, 1)
    W, h0 = torch.randn(h, h, dtype=torch.float64) / h**0.5, torch.randn(len(lengths), h, dtype=torch.float64)
    bias = 0.5 * torch.randn(h, dtype=torch.float64)
    return [t.to(dtype) for t in (x, W, h0, bias)], sizes


def function(nonlinearity: str, times: Times, implementation=recurrence):
    """A function of x, W, h0 and bias that returns all states and the last ones."""

    def states(x: Tensor, W: Tensor, h0: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        of_modrelu = bias if nonlinearity == "modrelu" or implementation is definition else None
        out = implementation(x, W, h0, of_modrelu, nonlinearity, times)
        return out, last_states(out, times)

    return states


@pytest.mark.every_level
@each_nonlinearity
@pytest.mark.parametrize(("lengths", "h", "packed"), PROBLEMS.values(), ids=PROBLEMS.keys())
def test_is_the_definition(nonlinearity, lengths, h, packed, path, precise):
    tensors, sizes = draw(lengths, h, packed, precise)
    doubles = [t.double() for t in tensors]
    for times in (Times(sizes, False), Times(sizes, True)):
        actual = value_and_gradients(function(nonlinearity, times), tensors)
        expected = value_and_gradients(function(nonlinearity, times, definition), doubles)
        assert_close(actual, expected, 20 * h * max(lengths))


def test_last_states_are_those_of_each_sequence():
    (x, W, h0, bias), sizes = draw(RAGGED, 5, True, torch.float64)
    out = recurrence(x, W, h0, bias, "modrelu", Times(sizes, False))
    sequences = unpack_sequence(torch.nn.utils.rnn.PackedSequence(out, torch.tensor(sizes)))
    assert torch.equal(last_states(out, Times(sizes, False)), torch.stack([s[-1] for s in sequences]))
    assert torch.equal(last_states(out, Times(sizes, True)), torch.stack([s[0] for s in sequences]))


@each_nonlinearity
@pytest.mark.parametrize("packed", [False, True])
def test_second_derivatives(nonlinearity, packed, path):
    tensors, sizes = draw([4, 4, 4] if not packed else [4, 2, 1], 3, packed, torch.float64)
    tensors = [t.requires_grad_() for t in (tensors if nonlinearity == "modrelu" else tensors[:3])]
    for reverse in (False, True):

        def states(x, W, h0, bias=None, reverse=reverse):
            return recurrence(x, W, h0, bias, nonlinearity, Times(sizes, reverse))

        assert torch.autograd.gradcheck(states, tensors)
        assert torch.autograd.gradgradcheck(states, tensors)


@each_nonlinearity
def test_batched_gradients_and_transforms(nonlinearity, path):
    tensors, _ = draw([4, 4], 3, False, torch.float64)
    x, W, h0, bias = (t.requires_grad_() for t in tensors)
    bias = bias if nonlinearity == "modrelu" else None
    wanted = [t for t in (x, W, h0, bias) if t is not None]
    out = recurrence(x, W, h0, bias, nonlinearity, Times(None, False))
    g = torch.randn(3, *out.shape, dtype=torch.float64)
    batched = torch.autograd.grad(out, wanted, g, is_grads_batched=True, retain_graph=True)
    for i, one in enumerate(g):
        for ours, theirs in zip(batched, torch.autograd.grad(out, wanted, one, retain_graph=True), strict=True):
            torch.testing.assert_close(ours[i], theirs)
    mapped = torch.func.vmap(lambda W: recurrence(x, W, h0, bias, nonlinearity, Times(None, False)))(
        torch.stack((W, 2 * W))
    )
    torch.testing.assert_close(mapped[0], out)


@each_nonlinearity
def test_nan_and_infinity_pass_through(nonlinearity, path):
    (x, W, h0, bias), _ = draw([3, 3], 5, False, torch.float32)
    x[0, 0, 1], x[0, 1, 1] = torch.nan, torch.inf
    out = recurrence(x, W, h0, bias if nonlinearity == "modrelu" else None, nonlinearity, Times(None, False))
    assert out[0, 0].isnan().tolist() == [False, True, False, False, False]
    assert out[1:, 0].isnan().all() and not out[:, 1].isnan()[0].any()
    assert out[0, 1, 1] == (1 if nonlinearity == "tanh" else torch.inf)


def test_tanh_is_exact_where_it_saturates_and_close_to_zero():
    x = torch.tensor([1e-30, -1e-6, 3e-4, 5e-4, 0.1, 7.9, -8.1, 30.0, -torch.inf]).reshape(9, 1, 1)
    zero = torch.zeros(1, 1)
    out = recurrence(x, zero, zero, None, "tanh", Times(None, False)).flatten()
    assert (
        (out - x.flatten().double().tanh()).abs() <= 8 * torch.finfo(torch.float32).eps * x.flatten().tanh().abs()
    ).all()


def test_strides_do_not_matter(path):
    tensors, _ = draw([6] * 4, 10, False, torch.float64)
    strided = [torch.stack((t, t), -1)[..., 0] for t in tensors]
    strided[1] = tensors[1].mT.contiguous().mT
    times = Times(None, True)
    assert_close(
        value_and_gradients(function("modrelu", times), strided),
        value_and_gradients(function("modrelu", times), tensors),
        100,
    )


@pytest.mark.parametrize("lengths", [[9] * 33, [12] * 9 + [7] * 20 + [2]])
@pytest.mark.parametrize("reverse", [False, True])
def test_the_number_of_threads_changes_rounding_only(lengths, reverse, set_threads):
    tensors, sizes = draw(lengths, 70, len(set(lengths)) > 1, torch.float64)
    found = []
    for threads in (1, 2, 5):
        set_threads(threads)
        found.append(value_and_gradients(function("modrelu", Times(sizes, reverse)), tensors))
    for other in found[1:]:
        assert_close(other, found[0], 10)


@pytest.mark.skipif(core.core() is None, reason="it is about the compiled core, and there is none")
def test_the_core_refuses_what_does_not_fit():
    (x, W, h0, bias), _ = draw([4, 4], 3, False, torch.float64)
    out = core.core().recurrence(x, None, W, h0, bias, 2, False, 1)
    for arguments, message in (
        ((x, [3, 4], W, h0, bias, 2, False, 1), "rows should be"),
        ((x[0], [1, 2], W, h0, bias, 2, False, 1), "sizes should not increase"),
        ((x[0], [1, 0], W, h0, bias, 2, False, 1), "sizes should add up"),
        ((x, None, W[:2], h0, bias, 2, False, 1), r"`W` should have shape \(3, 3\)"),
        ((x, None, W, h0[:1], bias, 2, False, 1), r"`h0` should have shape \(2, 3\)"),
        ((x, None, W, h0, None, 2, False, 1), "modReLU should have a bias"),
        ((x, None, W, h0, bias[:2], 2, False, 1), "modReLU should have a bias"),
        ((x, None, W, h0, bias, 3, False, 1), "f should be"),
        ((x, None, W, h0, bias, 2, False, 0), "threads"),
    ):
        with pytest.raises(ValueError, match=message):
            core.core().recurrence(*arguments)
    with pytest.raises(TypeError, match="`W` should be a float64 tensor"):
        core.core().recurrence(x, None, W.float(), h0, bias, 2, False, 1)
    with pytest.raises(RuntimeError, match="a saved tensor should come back as it was: the states"):
        core.core().recurrence_backward(out, None, W, out[:2], h0, 2, False, True, True, 1)


@pytest.mark.skipif(core.core() is None, reason="operators call the compiled core, and there is none")
def test_operators():
    (x, W, h0, bias), _ = draw([4, 4], 3, False, torch.float64)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.fasth.recurrence.default, (x, None, W, h0, bias, 2, True), test_utils=checks)
    out = torch.ops.fasth.recurrence(x, None, W, h0, bias, 2, True)
    arguments = (x, None, W, out, h0, 2, True, True, True)
    torch.library.opcheck(torch.ops.fasth.recurrence_backward.default, arguments, test_utils=checks)


@pytest.mark.skipif(core.core() is None, reason="without the core there is nothing to compile by operators")
def test_compiled():
    tensors, _ = draw([6] * 3, 5, False, torch.float64)
    compiled = torch.compile(function("modrelu", Times(None, False)), backend="aot_eager", fullgraph=True)
    assert_close(
        value_and_gradients(compiled, tensors), value_and_gradients(function("modrelu", Times(None, False)), tensors), 1
    )


@pytest.mark.skipif(core.core() is None, reason="the loop in PyTorch saves every step")
def test_what_is_saved_is_the_output():
    (x, W, h0, bias), _ = draw([50] * 8, 16, False, torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        Recurrence.apply(x.requires_grad_(), W, h0, bias, 2, Times(None, False))
    assert sum(saved) == x.numel() + W.numel() + h0.numel()
