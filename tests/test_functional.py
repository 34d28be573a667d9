"""Transforms of torch.func, checkpoints, hooks, optimizers: what works with layers of torch.nn works with ours."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from layers import ALL, BY_KERNELS, CASES, PARAMETRIZED, RECURRENT, Case, of_every, output, trained
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, stack_module_state, vmap
from torch.utils.checkpoint import checkpoint

from fasth import LinearSVD
from fasth.tools.twins import perturbed

DOUBLE = torch.float64
VMAPPED = {name: case for name, case in ALL.items() if name not in BY_KERNELS}
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, **CLOSE)


def call(layer: nn.Module, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
    out = functional_call(layer, tensors, (x,))
    return out if isinstance(out, Tensor) else out[0]


def loss(layer: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    return call(layer, {**parameters, **constants_of(layer)}, x).tanh().square().sum()


def parameters_of(layer: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in layer.named_parameters() if p.requires_grad}


def constants_of(layer: nn.Module) -> dict[str, Tensor]:
    """The buffers and the parameters that are not trained: signs."""
    return {**dict(layer.named_buffers()), **{name: p for name, p in layer.named_parameters() if not p.requires_grad}}


@of_every(ALL)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_functional_call(case: Case, training: bool) -> None:
    layer, other = (perturbed(case.make(dtype=DOUBLE)).train(training) for _ in range(2))
    x = case.input(DOUBLE)
    with torch.no_grad():
        mine, theirs = output(layer, x), output(other, x)
        close(call(layer, dict(other.state_dict()), x), theirs)
        close(output(layer, x), mine)


@of_every(VMAPPED)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_vmap_over_an_ensemble(case: Case, training: bool) -> None:
    # Parametrized modules are tested inside a model: alone, each has its own class, which stack_module_state rejects.
    layers = [nn.Sequential(perturbed(case.make(dtype=DOUBLE))).train(training) for _ in range(3)]
    x = case.input(DOUBLE)
    base = copy.deepcopy(layers[0]).to("meta")
    parameters, buffers = stack_module_state(layers)
    out = vmap(lambda p, b: call(base, {**p, **b}, x))(parameters, buffers)
    close(out, torch.stack([output(layer, x) for layer in layers]))
    parameters = {name: p for name, p in parameters.items() if p.requires_grad}
    gradients = torch.autograd.grad(out.sum(), list(parameters.values()))
    for name, gradient in zip(parameters, gradients, strict=True):
        for i, layer in enumerate(layers):
            close(gradient[i], torch.autograd.grad(output(layer, x).sum(), layer.get_parameter(name))[0])


@of_every(ALL)
def test_jacobians(case: Case) -> None:
    layer, x = perturbed(case.make(dtype=DOUBLE)), case.input(DOUBLE)
    buffers, parameters = constants_of(layer), parameters_of(layer)
    by_x = jacrev(lambda x: call(layer, {**parameters, **buffers}, x))(x)
    close(by_x, torch.autograd.functional.jacobian(lambda x: output(layer, x), x))
    close(by_x, torch.autograd.functional.jacobian(lambda x: output(layer, x), x, vectorize=True))
    by_parameters = jacrev(lambda p: call(layer, {**p, **buffers}, x))(parameters)
    out = output(layer, x)
    for name, jacobian in by_parameters.items():
        rows = [torch.autograd.grad(y, layer.get_parameter(name), retain_graph=True)[0] for y in out.flatten()]
        close(jacobian, torch.stack(rows).reshape(jacobian.shape))
    if case in VMAPPED.values():
        close(jacfwd(lambda p: call(layer, {**p, **buffers}, x))(parameters), by_parameters)


@of_every(ALL)
def test_hessian(case: Case) -> None:
    layer, x = perturbed(case.make(dtype=DOUBLE)), case.input(DOUBLE)
    parameters = parameters_of(layer)
    blocks = hessian(lambda p: loss(layer, p, x))(parameters)
    names = tuple(parameters)

    def of_tensors(*tensors: Tensor) -> Tensor:
        return loss(layer, dict(zip(names, tensors, strict=True)), x)

    expected = torch.autograd.functional.hessian(of_tensors, tuple(parameters.values()))
    for i, first in enumerate(names):
        for j, second in enumerate(names):
            close(blocks[first][second], expected[i][j])
            close(blocks[first][second].flatten(0, parameters[first].ndim - 1).flatten(1).mT,
                  blocks[second][first].flatten(0, parameters[second].ndim - 1).flatten(1))  # fmt: skip


@of_every(ALL)
def test_gradients_of_each_sample(case: Case) -> None:
    layer, x = perturbed(case.make(dtype=DOUBLE)), case.input(DOUBLE)
    sample_dim = 1 if case in [CASES[name] for name in RECURRENT] else 0
    each = vmap(grad(lambda p, x: loss(layer, p, x)), in_dims=(None, sample_dim))(parameters_of(layer), x)
    for i, sample in enumerate(x.unbind(sample_dim)):
        layer.zero_grad()
        output(layer, sample).tanh().square().sum().backward()
        for name in each:
            close(each[name][i], layer.get_parameter(name).grad)


@of_every(ALL)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint(case: Case, use_reentrant: bool, path: str) -> None:
    layer, x = perturbed(case.make()), case.input().requires_grad_()
    tensors = [x, *trained(layer)]
    expected = torch.autograd.grad(output(layer, x).square().sum(), tensors)
    layer.zero_grad()
    checkpoint(lambda x: output(layer, x), x, use_reentrant=use_reentrant).square().sum().backward()
    for t, reference in zip(tensors, expected, strict=True):
        assert torch.equal(t.grad, reference)


@of_every(ALL)
def test_gradient_hooks(case: Case, path: str) -> None:
    layer, x = perturbed(case.make()), case.input().requires_grad_()
    expected = torch.autograd.grad(output(layer, x).sum(), trained(layer))
    named = [(name, p) for name, p in layer.named_parameters() if p.requires_grad]
    seen: dict[str, Any] = {}
    for name, p in named:
        p.register_hook(lambda g: 2 * g)
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.update({name: p.grad.clone()}))
    layer.register_forward_hook(lambda module, args, out: seen.update(forward=True))
    layer.register_full_backward_hook(lambda module, to_input, to_output: seen.update(backward=to_input[0]))
    output(layer, x).sum().backward()
    for (name, p), gradient in zip(named, expected, strict=True):
        assert torch.equal(p.grad, 2 * gradient) and torch.equal(seen[name], p.grad)
    assert seen["forward"] and torch.equal(seen["backward"], x.grad)


@of_every(ALL)
@pytest.mark.parametrize("foreach", [True, False])
def test_clip_grad_norm(case: Case, foreach: bool) -> None:
    layer = perturbed(case.make())
    output(layer, case.input()).square().sum().backward()
    gradients = torch.cat([p.grad.flatten() for p in trained(layer)])
    norm = nn.utils.clip_grad_norm_(layer.parameters(), 0.1, foreach=foreach)
    torch.testing.assert_close(norm, gradients.norm())
    clipped = torch.cat([p.grad.flatten() for p in trained(layer)])
    torch.testing.assert_close(clipped, gradients * (0.1 / gradients.norm()))
    nn.utils.clip_grad_value_(layer.parameters(), 1e-3, foreach=foreach)
    assert all(p.grad.abs().max() <= 1e-3 for p in trained(layer))


# Optimizers

OPTIMIZERS = [
    getattr(torch.optim, name)
    for name in torch.optim.__all__ + ["Muon"] * ("Muon" not in torch.optim.__all__ and hasattr(torch.optim, "Muon"))
    if inspect.isclass(getattr(torch.optim, name)) and name not in ("Optimizer", "SparseAdam")
]
VARIANTS = [
    (kind, dict(zip([option] * bool(option), [True], strict=False)))
    for kind in OPTIMIZERS
    for option in ("", "foreach", "fused")
    if not option or option in inspect.signature(kind).parameters
]


@pytest.mark.parametrize(
    ("kind", "options"), VARIANTS, ids=["-".join((kind.__name__, *options)) for kind, options in VARIANTS]
)
def test_every_optimizer_lowers_the_loss_and_leaves_the_signs_alone(kind: Any, options: dict[str, bool]) -> None:
    layers = nn.ModuleDict({name: perturbed(case.make()) for name, case in ALL.items()})
    x, y = {}, {}
    for name, case in ALL.items():
        x[name] = case.input()
        y[name] = output(perturbed(case.make()), x[name]).detach()
    parameters = [p for p in layers.parameters() if kind.__name__ != "Muon" or p.ndim == 2]  # it takes matrices alone
    options = options | ({"lr": 0.01} if kind.__name__ != "Adadelta" else {"lr": 1.0})
    optimizer = kind(parameters, **options)

    def losses() -> dict[str, Tensor]:
        return {name: (output(layers[name], x[name]) - y[name]).square().mean() for name in ALL}

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = sum(losses().values(), torch.zeros(()))
        total.backward()
        return total

    before, signs = sum(value.item() for value in losses().values()), signs_of(layers)
    for _ in range(1 if kind is torch.optim.LBFGS else 5):
        optimizer.step(closure)
    assert sum(value.item() for value in losses().values()) < before
    assert signs and all(torch.equal(t, after) for t, after in zip(signs, signs_of(layers), strict=True))


def signs_of(layers: nn.Module) -> list[Tensor]:
    """Signs of full reflectors, and those on the diagonals of compact ones, whose size may decay."""
    signs = [p.detach().clone() for name, p in layers.named_parameters() if name.endswith("signs")]
    compact = [p for name, p in layers.named_parameters() if name.split(".")[-1].startswith(("reflectors", "original"))]
    return signs + [p.detach().diagonal(dim1=-2, dim2=-1).signbit() for p in compact if p.ndim > 1]


def test_the_table_of_optimizers_is_that_of_torch() -> None:
    names = {kind.__name__ for kind in OPTIMIZERS}
    assert {"SGD", "Adam", "AdamW", "Adagrad", "LBFGS", "Rprop", "NAdam", "ASGD"} <= names
    assert {("SGD", "fused"), ("AdamW", "fused"), ("AdamW", "foreach")} <= {(k.__name__, *o) for k, o in VARIANTS}
    assert set(PARAMETRIZED) <= set(ALL)


def test_a_gradient_through_a_step_of_training() -> None:
    """Meta-learning: the gradient of a loss after a step, by the parameters before it, against a difference."""
    layer, x = perturbed(LinearSVD(4, 4, dtype=DOUBLE)), torch.randn(3, 4, dtype=DOUBLE)

    def after_a_step(parameters: dict[str, Tensor]) -> Tensor:
        gradients = grad(lambda p: loss(layer, p, x))(parameters)
        return loss(layer, {name: p - 0.1 * gradients[name] for name, p in parameters.items()}, x)

    parameters = parameters_of(layer)
    direction = {name: torch.randn_like(p) for name, p in parameters.items()}
    exact = sum((g * direction[name]).sum() for name, g in grad(after_a_step)(parameters).items())
    ends = [{name: p + h * direction[name] for name, p in parameters.items()} for h in (1e-5, -1e-5)]
    difference = (after_a_step(ends[0]) - after_a_step(ends[1])) / 2e-5
    torch.testing.assert_close(exact, difference, rtol=1e-6, atol=1e-8)
