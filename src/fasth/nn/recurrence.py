"""h_t = f(x_t + W h_{t−1}) for all times: by the compiled core, by a kernel, or by PyTorch's operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from fasth.reflections.autograd import has_to_compose, kernels
from fasth.reflections.core import core
from fasth.reflections.operators_for_compile import in_place
from fasth.reflections.plan import CORE, TRITON
from fasth.reflections.planner import backend_for
from fasth.reflections.triton.configurations import LARGEST_STATE

NONLINEARITIES = ("tanh", "relu", "modrelu")  # Activation in native/recurrence.hpp


class Times(NamedTuple):
    """The rows of each time, and the direction of time."""

    sizes: list[int] | None  # of a packed sequence: how many rows each time has; None: x is (time, batch, h)
    reverse: bool


def recurrence(x: Tensor, W: Tensor, h0: Tensor, bias: Tensor | None, nonlinearity: str, times: Times) -> Tensor:
    """h_t = f(x_t + W h_{t−1}) for all times, of x's shape.

    Args:
        x: (time, batch, h), or (rows, h), as in a ``PackedSequence``.
        W: (h, h).
        h0: (batch, h), the states before the first time; in reverse, after the last.
        bias: (h,), the bias of modReLU, f(z) = sign(z) · relu(|z| + bias).

    In the compiled core each thread computes all times for its part of the batch; on a GPU each program of one kernel,
    for sequences of equal length with h up to 256. Only the output is saved for backward, and the gradient of W is one
    product over all times.
    """
    f = NONLINEARITIES.index(nonlinearity)
    one_step = len(x) == 1 if times.sizes is None else len(times.sizes) == 1  # for which W need not be packed
    backend = backend_for(x, W, h0, bias)
    by_kernel = backend == TRITON and times.sizes is None and len(W) <= LARGEST_STATE
    if one_step or not (backend == CORE or by_kernel):
        return _in_torch(x, W, h0, bias, f, times)
    return Recurrence.apply(x, W, h0, bias, f, times, backend)


def last_states(out: Tensor, times: Times) -> Tensor:
    """The states after the last step: (batch, h). In a packed sequence each row ends at its own time."""
    sizes, reverse = times
    if sizes is None:
        return out[0 if reverse else -1]
    if reverse:
        return out[: sizes[0]]
    rows, start = list(range(sizes[0])), 0
    for size in sizes:
        rows[:size] = range(start, start + size)
        start += size
    return out[torch.tensor(rows, device=out.device)]


def modrelu(z: Tensor, bias: Tensor) -> Tensor:
    """sign(z) · relu(|z| + bias), which changes the size of a state, not its sign."""
    return z.sign() * F.relu(z.abs() + bias.to(z.dtype))


def _in_torch(x: Tensor, W: Tensor, h0: Tensor, bias: Tensor | None, f: int, times: Times) -> Tensor:
    h, states = h0[:0], []
    for step in _steps(x, times):
        size = len(step)
        h = h[:size] if len(h) >= size else torch.cat((h, h0[len(h) : size]))  # sequences end, or start
        z = step + F.linear(h, W)
        h = z.tanh() if f == 0 else z.relu() if bias is None else modrelu(z, bias)
        states.append(h)
    states = states[::-1] if times.reverse else states
    return torch.stack(states) if times.sizes is None else torch.cat(states)


class Recurrence(torch.autograd.Function):
    """``recurrence`` on the compiled core, or by the kernels."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, W: Tensor, h0: Tensor, bias: Tensor | None, f: int, times: Times, backend: str = CORE
    ) -> Tensor:
        sizes, reverse = times
        if is_compiling():
            out = torch.ops.fasth.recurrence(x, sizes, W, h0, bias, f, reverse)
        else:
            out = _on_backend(backend, "recurrence", x, sizes, W, h0, bias, f, reverse)
        ctx.f, ctx.times, ctx.backend = f, times, backend
        ctx.save_for_backward(W, h0, out)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        W, h0, out = ctx.saved_tensors
        f, times, (_, needs_W, *needs) = ctx.f, ctx.times, ctx.needs_input_grad[:4]
        sizes, reverse = times
        found: Any
        if has_to_compose(g, ctx.backend):
            # A second derivative is to follow, or g is a batch of gradients.
            found = _gradients_in_torch(g, W, out, f, times)
        elif is_compiling():
            gradients = torch.ops.fasth.recurrence_backward(g, sizes, W, out, h0, f, reverse, *needs)
            found = in_place(gradients, (True, *needs))
        else:
            found = _on_backend(ctx.backend, "recurrence_backward", g, sizes, W, out, h0, f, reverse, *needs)
        dx, dh0, dbias = found
        dW = _gradient_of_weight(dx, out, h0, times) if needs_W else None
        return dx, dW, *(d if need else None for d, need in zip((dh0, dbias), needs, strict=True)), None, None, None


def _on_backend(backend: str, name: str, *arguments: Any) -> Any:
    if backend == TRITON:
        return getattr(kernels(), name)(*arguments)
    return getattr(core(), name)(*arguments, torch.get_num_threads())


def _gradients_in_torch(g: Tensor, W: Tensor, out: Tensor, f: int, times: Times) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, e_t = f′ · (g_t + e_{t+1} W), of h0 and of the bias; differentiable in g, W and out."""
    slopes = _steps(1 - out.square() if f == 0 else (out != 0).to(out.dtype), times)
    e, starts, found = g[0, :0] if times.sizes is None else g[:0], [], []
    for slope, direct in zip(reversed(slopes), reversed(_steps(g, times)), strict=True):
        size = len(slope)
        if len(e) > size:  # sequences start at the step after this one
            starts.append(e[size:] @ W)
        e = slope * (direct + F.pad(e[:size] @ W, (0, 0, 0, max(size - len(e), 0))))
        found.append(e)
    starts.append(e @ W)
    found = found if times.reverse else found[::-1]
    dx = torch.stack(found) if times.sizes is None else torch.cat(found)
    return dx, torch.cat(starts[::-1]), (dx * out.sign()).sum(tuple(range(out.ndim - 1)))


def _steps(rows: Tensor, times: Times) -> Sequence[Tensor]:
    """The rows of each time, in the order of the recurrence."""
    steps: Sequence[Tensor] = rows.unbind(0) if times.sizes is None else rows.split(times.sizes)
    return steps[::-1] if times.reverse else steps


def _gradient_of_weight(dx: Tensor, out: Tensor, h0: Tensor, times: Times) -> Tensor:
    """Σ over all times of dx_tᵀ h_{t−1}."""
    if times.sizes is None:
        later, before, first = (dx[:-1], out[1:], dx[-1]) if times.reverse else (dx[1:], out[:-1], dx[0])
        return later.reshape(-1, h0.shape[1]).mT @ before.reshape(-1, h0.shape[1]) + first.mT @ h0
    h, states = h0[:0], []
    for step in _steps(out, times):
        states.append(torch.cat((h[: len(step)], h0[len(h) : len(step)])))
        h = step
    return dx.mT @ torch.cat(states[::-1] if times.reverse else states)
