"""The four matrix operations of Table 1: by standard methods on a dense W, and by the factors of W.

The operation, the forward pass and all gradients are timed, as in section 4.2 of the paper and its supplement, "Using
the SVD to Compute Matrix Operations". The exponential and the Cayley map are of U Σ Uᵀ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import fasth
from fasth.tools.reproduce import baselines
from fasth.tools.reproduce.methods import (
    EXPONENTIAL_SLACK,
    Function,
    Method,
    compact,
    exponential,
    from_function,
    full,
    product,
    unit,
)

SLACK = 8.0  # for the condition number of W, about three


@dataclass(frozen=True)
class Operation:
    """One line of Table 1. Rows are multiplied by W⁻¹, e^W or the Cayley map of W; for the determinant, by W itself."""

    name: str
    symmetric: bool  # W = U Σ Uᵀ if True, U Σ Vᵀ otherwise
    standard_name: str
    standard: Function  # (x, W), by torch
    obvious: Function  # (x, W), in the simplest way
    ours: Function  # (x, operator)
    map_sigma: Callable[[Tensor], Tensor]  # Σ to the diagonal matrix between the two orthogonal matrices
    spectrum: tuple[float, float]
    slack: float = SLACK

    @property
    def standard_method(self) -> Method:
        """The operation by torch, on a dense W."""
        return from_function(self.standard_name, self.standard, self._dense, self.obvious, slack=self.slack)

    @property
    def our_method(self) -> Method:
        """The operation by ``fasth.SVD`` or ``fasth.Symmetric``, with compact reflectors."""

        def function(x: Tensor, sigma: Tensor, *reflectors: Tensor) -> Tensor:
            factors = [fasth.Orthogonal(V, form="compact") for V in reflectors]
            U, V = factors[0], factors[-1]
            return self.ours(x, fasth.Symmetric(U, sigma) if self.symmetric else fasth.SVD(U, sigma, V))

        def obvious(x: Tensor, sigma: Tensor, *reflectors: Tensor) -> Tensor:
            return self._by_factors(_definition)(x, sigma, *map(unit, reflectors))

        return from_function("fasth", function, lambda N: self._factors(N, compact), obvious, slack=self.slack)

    def method_by(self, name: str, algorithm: Function) -> Method:
        """The operation by an algorithm for x Qᵀ, with full reflectors as in the paper."""

        def multiply(x: Tensor, V: Tensor, transpose: bool) -> Tensor:
            return algorithm(x, V.flip(0) if transpose else V)

        obvious = self._by_factors(_definition)
        return from_function(
            name, self._by_factors(multiply), lambda N: self._factors(N, full), obvious, slack=self.slack
        )

    def _by_factors(self, multiply: Callable[[Tensor, Tensor, bool], Tensor]) -> Function:
        """x times the right column of Table 1. ``multiply`` multiplies rows by an orthogonal matrix."""

        def function(x: Tensor, sigma: Tensor, U: Tensor, V: Tensor | None = None) -> Tensor:
            first, last = (U, U) if V is None else (U, V) if self.name == "inverse" else (V, U)
            out = multiply(multiply(x, first, True) * self.map_sigma(sigma), last, False)
            return out + sigma.log().sum() if self.name == "determinant" else out

        return function

    def _factors(self, N: Tensor, reflectors: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        """Makes sigma, evenly spaced over the spectrum, the reflectors of U, and, unless symmetric, of V."""
        sigma = torch.linspace(*self.spectrum, len(N))
        return (sigma, reflectors(N)) if self.symmetric else (sigma, reflectors(N), reflectors(N.mT.contiguous()))

    def _dense(self, N: Tensor) -> Tensor:
        """Makes a dense W with nearly the same spectrum: the singular values of I + N/√16d are within 1/2 of 1.

        The eigenvalues of N + Nᵀ fill [−√8d, √8d].
        """
        d = len(N)
        if self.symmetric:
            return (N + N.mT) * (self.spectrum[1] / math.sqrt(8 * d))
        return torch.eye(d) + N / math.sqrt(16 * d)


def _definition(x: Tensor, V: Tensor, transpose: bool) -> Tensor:
    return product(x, V, transpose=transpose)


def _cayley(W: Tensor) -> Tensor:
    I = torch.eye(len(W), dtype=W.dtype, device=W.device)
    return torch.linalg.solve(I + W, I - W)


def _obvious_cayley(W: Tensor) -> Tensor:
    I = torch.eye(len(W), dtype=W.dtype)
    return (I - W) @ torch.linalg.inv(I + W)


OPERATIONS = [
    Operation(
        "inverse",
        symmetric=False,
        standard_name="torch.inverse",
        standard=lambda x, W: F.linear(x, torch.inverse(W)),
        obvious=lambda x, W: torch.linalg.solve(W, x.mT).mT,
        ours=lambda x, W: x @ W.inverse().mT,
        map_sigma=torch.reciprocal,
        spectrum=(0.5, 1.5),
    ),
    # The output is x Wᵀ + log|det W|, which has the gradients of both.
    Operation(
        "determinant",
        symmetric=False,
        standard_name="torch.slogdet",
        standard=lambda x, W: F.linear(x, W) + torch.slogdet(W).logabsdet,
        obvious=lambda x, W: x @ W.mT + torch.linalg.cholesky(W @ W.mT).diagonal().log().sum(),
        ours=lambda x, W: x @ W.mT + W.logabsdet(),
        map_sigma=lambda sigma: sigma,
        spectrum=(0.5, 1.5),
    ),
    Operation(
        "exponential",
        symmetric=True,
        standard_name="torch.matrix_exp",
        standard=lambda x, W: F.linear(x, torch.matrix_exp(W)),
        obvious=lambda x, W: F.linear(x, exponential(W)),
        ours=lambda x, W: x @ W.expm().mT,
        map_sigma=torch.exp,
        spectrum=(-1.0, 1.0),
        slack=EXPONENTIAL_SLACK,
    ),
    Operation(
        "Cayley map",
        symmetric=True,
        standard_name="torch.linalg.solve",
        standard=lambda x, W: F.linear(x, _cayley(W)),
        obvious=lambda x, W: F.linear(x, _obvious_cayley(W)),
        ours=lambda x, W: x @ W.cayley().mT,
        map_sigma=lambda sigma: (1 - sigma) / (1 + sigma),
        spectrum=(-0.5, 0.5),
    ),
]

ALGORITHMS = {"sequential": baselines.sequential, "parallel": baselines.parallel, "FastH": baselines.fasth}


def methods(operation: Operation) -> list[Method]:
    """All ways to compute one operation: the standard one, ours, and the three algorithms of the paper's figure."""
    by_algorithm = [operation.method_by(name, algorithm) for name, algorithm in ALGORITHMS.items()]
    return [operation.standard_method, operation.our_method, *by_algorithm]
