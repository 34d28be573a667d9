"""The case that every operator and every layer is tested with: it is what its dense twin is, gradients included."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fasth.tools.problems import gradient_of


def assert_matches_dense(
    function: Callable[..., Any],
    twin: Callable[..., Any],
    *tensors: Tensor,
    size: int,
    condition: float = 1.0,
    scale: float = 1.0,
) -> None:
    """``function(*tensors)`` is ``twin`` of the same tensors in float64, in value and in the gradient of each tensor.

    Both may return one tensor or several. They agree within ``size`` roundings of the dtype, times ``condition``, which
    is how much the function magnifies a change of its arguments, and ``scale``, which is how large the numbers are that
    it adds and may cancel; results that are larger are compared by their own size.
    """
    actual = value_and_gradients(function, tensors)
    expected = value_and_gradients(twin, [t.detach().double() for t in tensors])
    assert_close(actual, expected, size * condition, scale)


def assert_layer_matches_dense(
    layer: nn.Module,
    twin: Callable[[Any, Tensor], Any],
    x: Tensor,
    *,
    size: int,
    condition: float = 1.0,
    scale: float = 1.0,
) -> None:
    """``layer(x)`` is ``twin(layer, x)``, which computes it from ``layer.weight``, on copies of both in float64.

    In value and in the gradients of x and of every parameter.

    Example:
        >>> assert_layer_matches_dense(layer, lambda layer, x: F.linear(x, layer.weight, layer.bias), x, size=64)
    """
    reference = copy.deepcopy(layer).double()
    actual = value_and_gradients(layer, [x], list(layer.parameters()))
    expected = value_and_gradients(lambda x: twin(reference, x), [x.detach().double()], list(reference.parameters()))
    assert_close(actual, expected, size * condition, scale)


def value_and_gradients(
    function: Callable[..., Any], arguments: Sequence[Tensor], parameters: Sequence[Tensor] = ()
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the function's value, and the gradients of its arguments and parameters for a fixed random cotangent.

    The gradient is zero for a tensor that the function does not depend on. Frozen parameters, such as signs, have none.
    """
    arguments = [t.detach().requires_grad_() for t in arguments]
    tensors = [*arguments, *(p for p in parameters if p.requires_grad)]
    out = function(*arguments)
    values = [out] if isinstance(out, Tensor) else list(out)
    differentiable = [value for value in values if value.requires_grad]
    gradients = [gradient_of(value).to(value) for value in differentiable]
    found = torch.autograd.grad(differentiable, tensors, gradients, allow_unused=True) if differentiable else ()
    zeros = [torch.zeros_like(t) for t in tensors]
    return values, [zero if g is None else g for g, zero in zip(found or zeros, zeros, strict=True)]


def assert_close(
    actual: tuple[list[Tensor], list[Tensor]],
    expected: tuple[list[Tensor], list[Tensor]],
    roundings: float,
    scale: float = 1.0,
) -> None:
    """Asserts that each value and each gradient is within ``roundings`` of the largest entry of its reference.

    A reference below ``scale`` may have cancelled, as the gradient of an orthogonal factor in a norm does: its error is
    relative to ``scale``.
    """
    for t, reference in zip((*actual[0], *actual[1]), (*expected[0], *expected[1]), strict=True):
        assert_within(t, reference, max(_largest(reference), scale), roundings)


def assert_within(actual: Tensor, expected: Tensor, scale: float, roundings: float) -> None:
    """Asserts an error within this many roundings of numbers of size ``scale``, in both dtypes."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)}, not {tuple(expected.shape)}"
    if not actual.is_floating_point():
        assert torch.equal(actual, expected)
        return
    actual, eps = actual.detach().double(), torch.finfo(actual.dtype).eps
    error = torch.where(actual == expected, 0, (actual - expected.detach()).abs())  # inf is equal to inf
    tolerance = 8 * roundings * (eps + torch.finfo(torch.float64).eps)
    worst = error.max().item() if error.numel() else 0.0
    assert worst <= tolerance * scale, f"error {worst / scale if scale else worst:.2e}, tolerance {tolerance:.2e}"


def _largest(t: Tensor) -> float:
    finite = t.detach()[t.isfinite()] if t.is_floating_point() else t
    return float(finite.abs().max()) if finite.numel() else 0.0
