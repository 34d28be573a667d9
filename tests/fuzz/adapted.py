"""Adapters of linear layers, through sequences of changes, merged and restarted, against the weight that they make."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasth import adapters
from fasth.adapters.turns import BlocksTurn, ReflectionsTurn, Turn
from fasth.nn.held_weight import HeldWeight
from fasth.reflections import definition
from fasth.tools.twins import definition_weight
from fuzz.changes import copied, data, in_place, load, nearby, step
from fuzz.compare import check, norm, tolerance
from fuzz.draws import PRECISE, Draw
from fuzz.layers import without_guard

KINDS = ("reflections", "reflections", "orthogonal", "singular values", "thin SVD")


def adapter_case(draw: Draw) -> None:
    dtype = draw.dtype(PRECISE)
    n, m = draw.size(30), draw.size(30)
    options = _options(draw, n, m)
    plain = nn.Linear(m, n, bias=draw.chance(0.7), dtype=dtype)
    shape = (*draw.choice([(), (0,), (1,), (3,), (2, 3), (40,)]), m)
    draw.note(plain, options, f"x {shape}")
    model = adapters.add(nn.Sequential(plain), **options)
    with torch.no_grad():
        for p in _trained(model).values():
            p.copy_(nearby(draw, p, 0.3))
    for again in range(draw.between(1, 4)):
        x = draw.rows(*shape, dtype=dtype)
        if again:
            action = draw.weighted(CHANGES)
            draw.note(action.__name__)
            draw.actions[action.__name__] += 1
            model = action(draw, model, lambda model, x=x: model(x))
        _compare(draw, model, x)


def _options(draw: Draw, n: int, m: int) -> dict[str, Any]:
    kind = draw.choice(KINDS)
    options: dict[str, Any] = {"kind": kind}
    if kind in ("reflections", "thin SVD") or (kind == "singular values" and draw.chance(0.5)):
        options["r"] = draw.size(12)
    if kind in ("reflections", "orthogonal"):
        options["side"] = side = draw.choice(["input", "output", "both"])
        sizes = {"input": (m,), "output": (n,), "both": (n, m)}[side]
        if kind == "orthogonal" and draw.chance(0.5):
            options["block_size"] = draw.choice([b for b in range(1, min(sizes) + 1) if all(d % b == 0 for d in sizes)])
    return options


def merged_and_unmerged(draw: Draw, model: Any, run: Any) -> Any:
    _keeps_the_weight(adapters.merge, model)
    if draw.chance(0.3):
        model = copy.deepcopy(model)
    return adapters.unmerge(model)


def restarted(draw: Draw, model: Any, run: Any) -> Any:
    return _keeps_the_weight(adapters.merge_and_restart, model)


def _keeps_the_weight(action: Callable[[Any], Any], model: Any) -> Any:
    """Merges; afterwards the layer's own weight is the one that it had with its adapter."""
    (adapted,) = model
    with torch.no_grad():
        W, bias = _definition(copy.deepcopy(adapted).double())
    size, relative = _size(adapted), _relative(adapted)
    model = action(model)
    check("merged weight", adapted.base.weight, W, size, relative)
    if bias is not None:
        check("merged bias", adapted.base.bias, bias, norm(bias), relative)
    return model


CHANGES: dict[Callable[..., Any], int] = {
    in_place: 4, data: 4, step: 4, load: 3, copied: 2, merged_and_unmerged: 3, restarted: 3,
}  # fmt: skip


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _compare(draw: Draw, model: Any, x: Tensor) -> None:
    """The output and all gradients, with those of the weight that the definition makes in float64."""
    draw.actions["adapter"] += 1
    (adapted,) = model
    twin = copy.deepcopy(adapted).double()
    x = x.detach().requires_grad_()
    x64 = x.detach().double().requires_grad_()
    out, expected = model(x), F.linear(x64, *_definition(twin))
    relative, size = _relative(adapted, x), _size(adapted)
    check("output", out, expected, size * norm(x) + _bias(adapted), relative)
    g = draw.numbers(*out.shape, dtype=out.dtype)
    own, copies = _trained(adapted), _trained(twin)
    found = torch.autograd.grad(out, [x, *own.values()], g)
    references = torch.autograd.grad(expected, [x64, *copies.values()], g.double())
    check("gradient of x", found[0], references[0], size * norm(g), relative)
    for name, gradient, reference in zip(copies, found[1:], references[1:], strict=True):
        p = copies[name]
        shortest = 1.0
        if name.endswith(".V"):
            shortest = float(torch.linalg.vector_norm(p.detach(), dim=-1).min())
        else:
            gradient, reference = without_guard(gradient, reference, p)
        parameter_size = (1 + size) * (norm(x) + _bias(adapted)) * norm(g) * 2 / max(shortest, 1e-300)
        check(f"gradient of {name}", gradient, reference, parameter_size, relative)


# The definition.


def _definition(adapted: Any) -> tuple[Tensor, Tensor | None]:
    """The weight and the bias of the adapted layer, in float64 and differentiable."""
    (adapter,) = adapted.adapters.values()
    W, bias = adapted.base.weight, adapted.base.bias
    if adapter.kind == "thin SVD":
        return W + definition_weight(adapter.svd), bias
    if adapter.kind == "singular values":
        return W + adapter.U @ adapter.delta.diag() @ adapter.directions.weight, bias
    if adapter.input is not None:
        W = W @ _orthogonal(adapter.input)
    if adapter.output is not None:
        Q = _orthogonal(adapter.output)
        W, bias = Q @ W, None if bias is None else Q @ bias
    return W, bias


def _orthogonal(turn: Turn) -> Tensor:
    """Q: (d, d), one reflection at a time."""
    if isinstance(turn, ReflectionsTurn):
        identity = torch.eye(turn.features, dtype=turn.V.dtype)
        return definition.householder(identity, turn.V).mT * turn.signs
    if isinstance(turn, BlocksTurn):
        shape = turn.reflectors.shape[1:]
        blocks = (HeldWeight("", shape, block, None, None, "compact", None) for block in turn.reflectors)
        return torch.block_diag(*map(definition_weight, blocks))
    return definition_weight(turn.layer)


# Rounding errors that are allowed.


def _relative(adapted: Any, x: Tensor | None = None) -> float:
    W = adapted.base.weight
    rows = 0 if x is None else x.numel() // W.shape[1]
    return tolerance(W.dtype, 4 * sum(W.shape) + rows + 10)


def _size(adapted: Any) -> float:
    """A bound of the weight: its own norm, and the norm of what an adapter adds."""
    (adapter,) = adapted.adapters.values()
    added = adapter.svd.sigma if adapter.kind == "thin SVD" else getattr(adapter, "delta", torch.zeros(0))
    return norm(adapted.base.weight) + norm(added)


def _bias(adapted: Any) -> float:
    return 0.0 if adapted.base.bias is None else norm(adapted.base.bias)
