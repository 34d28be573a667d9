"""In-place operations on outputs: gradients are those of the operation on a copy, as with the layers of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fasth
from fasth import RNNSVD, Conv1dSVD, Conv2dSVD, LinearOrthogonal, LinearSVD, LinearSymmetric, householder, to_svd
from fasth.functional import reflect, svd_linear

D = 24
Function = Callable[[Tensor], Tensor]


class Product(nn.Module):
    """x Qᵀ, or a batch of such products."""

    def __init__(self, *batch: int, **options: Any) -> None:
        super().__init__()
        self.V, self.options = nn.Parameter(torch.randn(*batch, D, D)), options

    def forward(self, x: Tensor) -> Tensor:
        return householder(x, self.V, **self.options)


class Compact(Product):
    def forward(self, x: Tensor) -> Tensor:
        return reflect(x, self.V, "compact")


class Factors(Product):
    """U Σ Vᵀ with separate reflectors."""

    def forward(self, x: Tensor) -> Tensor:
        return svd_linear(x, self.V, None, self.V.mT, form="full")


class First(nn.Module):
    """The output of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)[0]
        return out


MODULES: dict[str, Callable[[], nn.Module]] = {
    "householder": Product,
    "householder, transposed": lambda: Product(transpose=True),
    "householder, triangular": lambda: Product(triangular=True),
    "householder, batched": lambda: Product(3),
    "compact": Compact,
    "svd_linear": Factors,
    "LinearSVD": lambda: LinearSVD(D, D, bias=False),
    "LinearSVD with bias": lambda: LinearSVD(D, D),
    "LinearSVD, full": lambda: LinearSVD(D, D, bias=False, reflectors="full"),
    "LinearSVD, low rank": lambda: LinearSVD(D, D, bias=False, rank=3),
    "LinearSymmetric": lambda: LinearSymmetric(D, bias=False),
    "LinearOrthogonal": lambda: LinearOrthogonal(D, D, bias=False),
    "LinearOrthogonal, wide": lambda: LinearOrthogonal(D, D // 2, bias=False),
    "Conv1dSVD": lambda: nn.Sequential(nn.Unflatten(-1, (D // 2, 2)), Conv1dSVD(D // 2, 5, 1, bias=False)),
    "Conv2dSVD": lambda: nn.Sequential(nn.Unflatten(-1, (6, 2, 2)), Conv2dSVD(6, 5, 2, bias=False)),
    "RNNSVD": lambda: First(RNNSVD(D, 5, bias=False)),
    "RNNSVD, tanh": lambda: First(RNNSVD(D, 5, bias=False, nonlinearity="tanh")),
    "LSTMSVD": lambda: First(fasth.LSTMSVD(D, 5, bias=False)),
}
OPERATIONS: dict[str, Function] = {
    "relu_": torch.relu_,
    "mul_": lambda out: out.mul_(1.5),
    "add_": lambda out: out.add_(out.detach().sin()),
    "entries": lambda out: out.index_fill_(-1, torch.tensor([0]), 2.0),
    "view": lambda out: out[..., 1:].neg_(),
}


def gradients(module: nn.Module, x: Tensor, operation: Function) -> list[Tensor]:
    """The output and the gradients of the input and of all parameters."""
    x = x.detach().requires_grad_()
    parameters = [p for p in module.parameters() if p.requires_grad]
    out = operation(module(x))
    found = torch.autograd.grad(out.square().sum(), [x, *parameters], allow_unused=True, materialize_grads=True)
    return [out.detach(), *found]


@pytest.mark.parametrize("rows", [1, 4, 40, 200])
@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_those_of_the_operation_on_a_copy(name: str, rows: int, path: str) -> None:
    module = MODULES[name]().double()
    shape = (3, rows, D) if "batched" in name else (rows, D)
    x = torch.randn(shape, dtype=torch.float64)
    for operation in OPERATIONS.values():
        expected = gradients(module, x, lambda out, f=operation: f(out.clone()))  # type: ignore[misc]
        torch.testing.assert_close(gradients(module, x, operation), expected)


def test_every_dtype(dtype: torch.dtype) -> None:
    module, x = LinearSVD(D, D, bias=False).to(dtype), torch.randn(4, D).to(dtype)
    expected = gradients(module, x, lambda out: out.clone().relu_())
    torch.testing.assert_close(gradients(module, x, torch.relu_), expected)


def test_second_derivatives() -> None:
    module, x = LinearOrthogonal(D, D, bias=False).double(), torch.randn(4, D, dtype=torch.float64, requires_grad=True)

    def penalty(operation: Function) -> list[Tensor]:
        (dx,) = torch.autograd.grad(operation(module(x)).square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(dx.pow(3).sum(), [x, module.reflectors]))

    torch.testing.assert_close(penalty(lambda out: out.mul_(1.5)), penalty(lambda out: out.clone().mul_(1.5)))


def test_a_converted_network_with_activations_in_place() -> None:
    """``nn.ReLU(inplace=True)`` follows layers without bias in residual networks and others."""
    layers = [nn.Linear(D, D, bias=False), nn.ReLU(inplace=True), nn.Linear(D, D, bias=False), nn.SiLU(inplace=True)]
    model = nn.Sequential(*layers).double()
    x = torch.randn(4, D, dtype=torch.float64)
    svd = to_svd(model)
    torch.testing.assert_close(gradients(svd, x, lambda out: out)[:2], gradients(model, x, lambda out: out)[:2])


@pytest.mark.parametrize("name", ["householder", "LinearSVD", "LinearOrthogonal"])
def test_compiled(name: str) -> None:
    module, x = MODULES[name](), torch.randn(4, D)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    expected = gradients(module, x, lambda out: out.clone().relu_())
    for found, wanted in zip(gradients(compiled, x, torch.relu_), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_changed_input_is_noticed() -> None:
    """The input is saved as it is: changing it in place is an error of autograd, as with ``nn.Linear``."""
    x = torch.randn(4, D, requires_grad=True)
    rows = x * 1
    out = LinearSVD(D, D)(rows)
    rows.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
