"""Every method in one form, so that each can be verified and timed in the same way.

A ``Method`` builds a ``Case``: the method at one size, with its input, parameters and the gradient of the output.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fasth
from fasth.functional import reflect
from fasth.reflections import definition
from fasth.tools.reproduce import baselines, printed

Function = Callable[..., Tensor]  # of x: (rows, d) and the method's parameters

_FEW = 2**24  # autograd may save this many numbers for the states of x


@dataclass(frozen=True)
class Case:
    """One method at one size."""

    name: str
    tensors: tuple[Tensor, ...]  # x: (rows, d), then the parameters. All require gradients.
    gradient: Tensor  # gradient of the output, (rows, d): Gaussian, as in the paper's supplement
    function: Function  # called with the tensors
    obvious: Function  # the same function, written in the simplest way
    slack: float = 1.0  # multiplies the tolerance, for methods that round more

    def step(self) -> tuple[Tensor, ...]:
        """Computes the output and the gradients of all tensors. This is timed as a training step."""
        out = self.function(*self.tensors)
        return out, *torch.autograd.grad(out, self.tensors, self.gradient)

    def forward(self) -> Tensor:
        """Computes the output without gradients."""
        with torch.no_grad():
            return self.function(*self.tensors)

    def reference(self) -> tuple[Tensor, ...]:
        """Computes the expected result of ``step`` by the obvious function in float64 on the CPU."""
        tensors = [t.detach().cpu().double().requires_grad_() for t in self.tensors]
        out = self.obvious(*tensors)
        return out.detach(), *torch.autograd.grad(out, tensors, self.gradient.cpu().double())


@dataclass(frozen=True)
class Method:
    name: str
    build: Callable[[int, int, torch.dtype, str, torch.Generator], Case]  # d, rows, dtype, device, generator
    requires: str | None = None  # a module that has to be installed

    @property
    def installed(self) -> bool:
        return self.requires is None or importlib.util.find_spec(self.requires) is not None


def product(x: Tensor, V: Tensor, *, transpose: bool = False, triangular: bool = False) -> Tensor:
    """x Qᵀ, or x Q if ``transpose``, by the definition: one reflection at a time.

    Autograd saves a state of x for each reflection. Where that takes too much memory, ``baselines.sequential`` replaces
    the definition and saves none. With more rows than d, Q is formed the same way, which is less work.
    """
    rows, d = x.shape
    if rows > d:
        Q = product(torch.eye(d, dtype=x.dtype), V, triangular=triangular).mT
        return F.linear(x, Q.mT if transpose else Q)
    if V.numel() * rows <= _FEW:
        return definition.householder(x, V, transpose=transpose, triangular=triangular)
    V = V.triu() if triangular else V
    return baselines.sequential(x, V.flip(0) if transpose else V)


def exponential(A: Tensor) -> Tensor:
    """exp(A) for ‖A‖ of a few units at most, by its series: (Σ Bⁿ/n!)⁶⁴ with B = A/64."""
    term = total = torch.eye(len(A), dtype=A.dtype)
    for n in range(1, 16):
        term = term @ A / (64 * n)
        total = total + term
    return torch.linalg.matrix_power(total, 64)


def cayley(A: Tensor) -> Tensor:
    """(I − A)(I + A)⁻¹."""
    I = torch.eye(len(A), dtype=A.dtype)
    return (I - A) @ torch.linalg.inv(I + A)


# torch's derivative of exp(A) is the exponential of a larger matrix that contains the gradient too. Scaling and
# squaring that matrix rounds more: in float32, four digits of seven are left for d = 64.
EXPONENTIAL_SLACK = 50.0

# Parameters, drawn from a Gaussian matrix N: (d, d).


def full(N: Tensor) -> Tensor:
    """Reflectors with every entry free."""
    return N


def triangular(N: Tensor) -> Tensor:
    """Reflectors v = n + sign(n₁)‖n‖e₁, scaled to v₁ = 1: Haar-distributed, as LAPACK finds and stores them."""
    N = N.triu()
    first = N.diagonal()
    return N.triu(1) / (first + first.sign() * N.norm(dim=-1)).unsqueeze(-1) + torch.eye(len(N))


def compact(N: Tensor) -> Tensor:
    """``triangular`` with ones on the diagonal, which are the signs of columns."""
    return unit(triangular(N))


def unit(V: Tensor) -> Tensor:
    """Converts compact reflectors to triangular ones: ones replace the signs on the diagonal."""
    return V.triu(1) + torch.eye(len(V), dtype=V.dtype, device=V.device)


def rotation(N: Tensor) -> Tensor:
    """Scales N for a skew A with angles up to about two radians: not near the identity, and no full turns."""
    return N / math.sqrt(len(N))


def from_function(
    name: str,
    function: Function,
    parameters: Callable[[Tensor], Tensor | tuple[Tensor, ...]],
    obvious: Function,
    *,
    requires: str | None = None,
    slack: float = 1.0,
) -> Method:
    """Makes a method from a function of x and parameters, which ``parameters`` makes from a Gaussian matrix: (d, d)."""

    def build(d: int, rows: int, dtype: torch.dtype, device: str, generator: torch.Generator) -> Case:
        x, gradient, N = _draw(d, rows, generator)
        made = parameters(N)
        inputs = (x, made) if isinstance(made, Tensor) else (x, *made)
        tensors = tuple(t.to(device, dtype, copy=True).requires_grad_() for t in inputs)
        return Case(name, tensors, gradient.to(device, dtype), function, obvious, slack)

    return Method(name, build, requires)


def from_module(
    name: str,
    make: Callable[[int, Tensor], tuple[nn.Module, Function]],
    *,
    requires: str | None = None,
    slack: float = 1.0,
) -> Method:
    """Makes a method from a module. ``make`` returns the module with its parameters set, and the obvious function."""

    def build(d: int, rows: int, dtype: torch.dtype, device: str, generator: torch.Generator) -> Case:
        x, gradient, N = _draw(d, rows, generator)
        # Modules draw initial values from the global generator, whose state is restored.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(generator.initial_seed())
            module, obvious = make(d, N)
        module = module.to(device, dtype)
        tensors = (x.to(device, dtype).requires_grad_(), *module.parameters())
        return Case(name, tensors, gradient.to(device, dtype), lambda x, *_: module(x), obvious, slack)

    return Method(name, build, requires)


def _draw(d: int, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draws x, the gradient of the output, and N, in the same order for all methods: one problem per seed."""
    x, gradient, N = (torch.randn(n, d, generator=generator) for n in (rows, rows, d))
    return x, gradient, N


# The other libraries, each used as its documentation says.


def _torch(orthogonal_map: str) -> Callable[[int, Tensor], tuple[nn.Module, Function]]:
    def make(d: int, N: Tensor) -> tuple[nn.Module, Function]:
        layer = parametrizations.orthogonal(nn.Linear(d, d, bias=False), orthogonal_map=orthogonal_map)
        weight = _parametrization(layer)
        # The diagonal holds the signs of the Householder parametrization; the others ignore it.
        weight.original.copy_(weight.original.diagonal().diag() + rotation(N).tril(-1))
        base = weight[0].base.double()
        Q = {"matrix_exp": _exponential_of, "cayley": _cayley_of, "householder": _householder_of}[orthogonal_map]
        return layer, lambda x, X: F.linear(x, base @ Q(X))

    return make


def _parametrization(layer: Any) -> Any:
    return layer.parametrizations.weight


def _exponential_of(X: Tensor) -> Tensor:
    return exponential(baselines.skew(-X.mT))  # from the lower half


def _cayley_of(X: Tensor) -> Tensor:
    return cayley(baselines.skew(X.mT) / 2)  # (I + A/2)(I − A/2)⁻¹, from the lower half


def _householder_of(X: Tensor) -> Tensor:
    I = torch.eye(len(X), dtype=X.dtype)
    return product(I, (X.tril(-1) + I).mT).mT * X.detach().diagonal()


def _geotorch(d: int, N: Tensor) -> tuple[nn.Module, Function]:
    layer = nn.Linear(d, d, bias=False)
    importlib.import_module("geotorch").orthogonal(layer, "weight")
    weight = _parametrization(layer)
    weight.original.copy_(rotation(N))
    base = weight[0].base.double()
    return layer, lambda x, X: F.linear(x, base @ _exponential_of(X))


def _torch_householder(x: Tensor, columns: Tensor) -> Tensor:
    return F.linear(x, importlib.import_module("torch_householder").torch_householder_orgqr(columns))


def _product_formed(x: Tensor, V: Tensor) -> Tensor:
    """Q is formed by LAPACK's orgqr, or cuSOLVER's."""
    return F.linear(x, torch.linalg.householder_product(*_columns(V)))


def _product_applied(x: Tensor, V: Tensor) -> Tensor:
    """Q is applied by LAPACK's ormqr, or cuSOLVER's."""
    return torch.ormqr(*_columns(V), x.mT).mT


def _columns(V: Tensor) -> tuple[Tensor, Tensor]:
    """Converts compact reflectors to LAPACK's columns, and computes τ = 2/‖v‖², differentiable."""
    columns = V.triu(1).mT
    return columns, 2 / (1 + columns.square().sum(0))


class _Output(nn.Module):
    """Drops the log-determinant of an nflows transform."""

    def __init__(self, transform: nn.Module) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, x: Tensor) -> Tensor:
        return self.transform(x)[0]


def _nflows_sequence(d: int, N: Tensor) -> tuple[nn.Module, Function]:
    sequence = importlib.import_module("nflows.transforms").HouseholderSequence(d, d)
    sequence.q_vectors.copy_(N)
    return _Output(sequence), lambda x, V: product(x, V, transpose=True)


def _nflows_svd(d: int, N: Tensor) -> tuple[nn.Module, Function]:
    """W = U Σ Vᵀ: two orthogonal matrices, so twice the work. It requires an even number of reflections."""
    layer = importlib.import_module("nflows.transforms").SVDLinear(d, d + d % 2)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)

    def obvious(x: Tensor, *parameters: Tensor) -> Tensor:
        named = dict(zip((name for name, _ in layer.named_parameters()), parameters, strict=True))
        x = product(x, named["orthogonal_2.q_vectors"], transpose=True)
        x = x * (layer.eps + F.softplus(named["unconstrained_diagonal"]))
        return product(x, named["orthogonal_1.q_vectors"], transpose=True) + named["bias"]

    return _Output(layer), obvious


def _triangular(function: Function) -> Function:
    return lambda x, V: function(x, V, triangular=True)


def compact_product(x: Tensor, V: Tensor) -> Tensor:
    return product(x, unit(V), triangular=True)


triangular_product = _triangular(product)

LINEAR = from_function("F.linear", F.linear, full, lambda x, W: x @ W.mT)
COMPACT = from_function("fasth, compact", partial(reflect, form="compact"), compact, compact_product)
TRIANGULAR = from_function("fasth, triangular", _triangular(fasth.householder), triangular, triangular_product)
FULL = from_function("fasth, full", fasth.householder, full, product)

BASELINES = [
    from_function("sequential", baselines.sequential, full, product),
    from_function("parallel", baselines.parallel, full, product),
    from_function("FastH", baselines.fasth, full, product),
    from_function("FastH++", baselines.fasthpp, full, product),
    from_function(
        "exponential",
        baselines.exponential,
        rotation,
        lambda x, V: F.linear(x, exponential(baselines.skew(V))),
        slack=EXPONENTIAL_SLACK,
    ),
    from_function("Cayley", baselines.cayley, rotation, lambda x, V: F.linear(x, cayley(baselines.skew(V)))),
]

PRINTED = from_function("FastH, as printed", printed.fasth, full, product)

PEERS = [
    from_module("torch matrix_exp", _torch("matrix_exp"), slack=EXPONENTIAL_SLACK),
    from_module("torch cayley", _torch("cayley")),
    from_module("torch householder", _torch("householder")),
    from_function("torch.linalg.householder_product", _product_formed, compact, compact_product),
    from_function("torch.ormqr", _product_applied, compact, compact_product),
    from_module("geotorch", _geotorch, requires="geotorch", slack=EXPONENTIAL_SLACK),
    from_function(
        "torch-householder",
        _torch_householder,
        lambda N: triangular(N).mT,
        lambda x, columns: product(x, columns.mT),
        requires="torch_householder",
    ),
    from_module("nflows HouseholderSequence", _nflows_sequence, requires="nflows"),
    from_module("nflows SVDLinear", _nflows_svd, requires="nflows"),
]

METHODS = {method.name: method for method in (LINEAR, COMPACT, TRIANGULAR, FULL, *BASELINES, PRINTED, *PEERS)}
