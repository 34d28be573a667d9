"""Operators against their dense twins: every operation against torch.linalg, values and gradients of the factors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dense import assert_matches_dense, assert_within
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fasth.operators import SVD, Orthogonal, Symmetric
from fasth.operators.matrix import has_entry
from fasth.operators.orthogonal import FORMS, compact_from_dense, haar_compact
from fasth.tools.problems import every_other_column, from_definition, zero_rows

LinAlgError = torch.linalg.LinAlgError


def same(t: Tensor) -> Tensor:
    return t


def transposed_in_memory(t: Tensor) -> Tensor:
    return t.mT.clone().mT


@dataclass(frozen=True)
class Factor:
    """Draws an orthogonal factor: reflectors of shape ``V``, and signs of shape ``signs`` unless None."""

    V: tuple[int, ...]
    form: str = "full"
    signs: tuple[int, ...] | None = None
    transposed: bool = False
    of_V: Callable[[Tensor], Tensor] = same

    def draw(self, dtype: torch.dtype, device: str) -> Tensor:
        V = torch.randn(self.V, dtype=torch.float64)
        V += V.sign() / 2  # a gradient grows as its reflector shrinks, and so does its rounding
        return self.of_V(V.to(device, dtype)).detach()

    def build(self, V: Tensor) -> Orthogonal:
        signs = None
        if self.signs is not None:
            signs = torch.ones(self.signs, dtype=V.dtype, device=V.device)
            signs[..., ::2] = -1
        Q = Orthogonal(V, form=self.form, signs=signs)
        return Q.mT if self.transposed else Q

    def definition(self, V: Tensor) -> Tensor:
        """Q from one reflection at a time, in float64."""
        d = V.shape[-1]
        eye = torch.eye(d, dtype=V.dtype, device=V.device)
        if self.form == "compact":
            V = V.triu(1) + torch.eye(*V.shape[-2:], dtype=V.dtype, device=V.device)
        Q = from_definition(eye, V, triangular=self.form != "full").mT
        signs = self.build(V.detach()).signs
        if signs is not None:
            Q = Q * F.pad(signs, (0, d - signs.shape[-1]), value=1).unsqueeze(-2)
        return Q.mT if self.transposed else Q


FACTORS = {
    "full": Factor((6, 6)),
    "triangular": Factor((6, 6), "triangular"),
    "compact": Factor((6, 6), "compact"),
    "1×1": Factor((1, 1), "compact", (1,)),
    "no reflectors": Factor((0, 4)),
    "few, full": Factor((2, 5)),
    "few, compact": Factor((2, 5), "compact", (2,)),
    "many, full": Factor((8, 5)),
    "many, triangular": Factor((8, 5), "triangular"),
    "many, compact": Factor((8, 5), "compact", (5,)),
    "signs": Factor((5, 5), signs=(5,)),
    "signs of some columns": Factor((5, 5), "triangular", (3,)),
    "transposed": Factor((5, 5), transposed=True),
    "transposed, signs": Factor((5, 5), "compact", (5,), transposed=True),
    "batch": Factor((3, 5, 4)),
    "batch, compact, signs": Factor((2, 3, 4, 4), "compact", (2, 3, 4)),
    "batch of signs": Factor((4, 4), "compact", (3, 4)),
    "batch of signs of some columns, transposed": Factor((4, 4), "triangular", (3, 2), transposed=True),
    "one sign for a batch": Factor((3, 4, 4), "full", (4,)),
    "zero reflectors": Factor((6, 6), of_V=zero_rows),
    "zero reflectors, triangular": Factor((6, 6), "triangular", of_V=zero_rows),
    "strided": Factor((6, 6), "compact", of_V=every_other_column),
    "transposed in memory": Factor((6, 6), "compact", of_V=transposed_in_memory),
    "several blocks": Factor((70, 70), "compact", (70,)),
}


@pytest.fixture(params=FACTORS)
def factor(request: pytest.FixtureRequest) -> Factor:
    return FACTORS[request.param]


def test_orthogonal_is_its_definition(factor: Factor, precise: torch.dtype, device: str) -> None:
    V = factor.draw(precise, device)
    size = 8 + V.shape[-1]
    assert_matches_dense(lambda V: factor.build(V).dense(), factor.definition, V, size=size)
    assert_matches_dense(lambda V: factor.build(V).mT.dense(), lambda V: factor.definition(V).mT, V, size=size)


def products(build: Callable[..., Any], tensors: list[Tensor], size: int) -> None:
    """A @ X, Aᵀ @ X and X @ A, with vectors, no columns, columns transposed in memory, strided and larger batches."""
    *batch, n, m = build(*tensors).shape
    for times, shape, arranged in (
        (lambda A, X: A @ X, (m,), same),
        (lambda A, X: A @ X, (m, 0), same),
        (lambda A, X: A @ X, (m, 3), transposed_in_memory),
        (lambda A, X: A @ X, (*batch, m, 2), every_other_column),
        (lambda A, X: A @ X, (2, *(1 for _ in batch), m, 1), same),
        (lambda A, X: A.mT @ X, (*batch, n, 2), same),
        (lambda A, X: X @ A, (n,), same),
        (lambda A, X: X @ A, (*batch, 2, n), same),
    ):
        X = torch.randn(shape, dtype=torch.float64).to(tensors[0])
        assert_matches_dense(
            lambda *t, times=times: times(build(*t[:-1]), t[-1]),
            lambda *t, times=times: times(build(*t[:-1]).dense(), t[-1]),
            *tensors,
            arranged(X),
            size=size,
        )


def test_products_with_orthogonal(factor: Factor, precise: torch.dtype, device: str) -> None:
    V = factor.draw(precise, device)
    products(factor.build, [V], 8 + V.shape[-1])


def test_determinant(factor: Factor, precise: torch.dtype, device: str) -> None:
    Q = factor.build(factor.draw(precise, device))
    det = Q.det()
    assert det.dtype == precise and det.shape == Q.shape[:-2]
    assert torch.equal(det.double(), torch.linalg.det(Q.dense().double()).round())
    assert torch.equal(Q.mT.det(), det)


def ascending(k: int) -> Tensor:
    """Both signs, and well apart: their sizes are 0.5 to 1.5."""
    return (0.5 + torch.arange(k, dtype=torch.float64) / max(k - 1, 1)) * (-1.0) ** torch.arange(k)


def with_zeros(sigma: Tensor) -> Tensor:
    return torch.where(torch.arange(sigma.shape[-1]) % 2 == 1, 0, sigma)


@dataclass(frozen=True)
class Problem:
    U: Factor
    V: Factor
    sigma: tuple[int, ...]
    of_sigma: Callable[[Tensor], Tensor] = field(default=same)

    def draw(self, dtype: torch.dtype, device: str) -> list[Tensor]:
        sigma = self.of_sigma(ascending(self.sigma[-1]).expand(self.sigma))
        return [self.U.draw(dtype, device), sigma.to(device, dtype), self.V.draw(dtype, device)]

    def build(self, U: Tensor, sigma: Tensor, V: Tensor) -> SVD:
        return SVD(self.U.build(U), sigma, self.V.build(V))

    def definition(self, U: Tensor, sigma: Tensor, V: Tensor) -> Tensor:
        k = sigma.shape[-1]
        left, right = self.U.definition(U)[..., :k], self.V.definition(V)[..., :k]
        return left * sigma.unsqueeze(-2) @ right.mT

    @property
    def size(self) -> int:
        return 8 + max(self.U.V[-1], self.V.V[-1])


def compact(n: int, m: int, **options: Any) -> tuple[Factor, Factor]:
    """The two sides of a layer's matrix of reflectors, with signs."""
    k = min(n, m)
    return Factor((k, n), "compact", (k,), **options), Factor((k, m), "compact", (k,), **options)


INVERTIBLE = {
    "full": Problem(Factor((5, 5)), Factor((5, 5)), (5,)),
    "triangular": Problem(Factor((5, 5), "triangular"), Factor((5, 5), "triangular"), (5,)),
    "compact": Problem(*compact(5, 5), (5,)),
    "1×1": Problem(*compact(1, 1), (1,)),
    "two forms": Problem(Factor((5, 5)), Factor((5, 5), "compact"), (5,)),
    "few reflectors": Problem(Factor((2, 5)), Factor((0, 5)), (5,)),
    "signs on one side": Problem(Factor((5, 5), "compact", (5,)), Factor((5, 5), "compact"), (5,)),
    "transposed factor": Problem(Factor((4, 4), "compact", (4,), transposed=True), Factor((4, 4), "compact"), (4,)),
    "batch": Problem(Factor((3, 4, 4)), Factor((3, 4, 4)), (3, 4)),
    "batch, compact": Problem(Factor((3, 4, 4), "compact", (3, 4)), Factor((3, 4, 4), "compact", (4,)), (3, 4)),
    "batch of sigma": Problem(*compact(4, 4), (3, 4)),
    "batches that broadcast": Problem(Factor((2, 1, 4, 4)), Factor((4, 4)), (3, 4)),
    "several blocks": Problem(*compact(40, 40), (40,)),
}

RECTANGULAR = {
    "tall": Problem(*compact(6, 4), (4,)),
    "wide": Problem(*compact(4, 6), (4,)),
    "wide, full": Problem(Factor((4, 4)), Factor((6, 6)), (4,)),
    "one row": Problem(*compact(1, 5), (1,)),
    "one column": Problem(Factor((5, 5)), Factor((1, 1)), (1,)),
    "batch, tall": Problem(Factor((2, 5, 5)), Factor((3, 3)), (2, 3)),
}

SINGULAR = {
    "fewer singular values than sides": Problem(*compact(5, 5), (3,)),
    "fewer, wide": Problem(*compact(3, 6), (2,)),
    "zeros": Problem(*compact(5, 5), (5,), with_zeros),
    "zeros, full": Problem(Factor((5, 5)), Factor((5, 5)), (5,), with_zeros),
    "zeros, tall": Problem(*compact(6, 4), (4,), with_zeros),
    "batch, zeros": Problem(Factor((2, 4, 4)), Factor((2, 4, 4)), (2, 4), with_zeros),
    "zero": Problem(*compact(4, 4), (4,), torch.zeros_like),
    "zero 1×1": Problem(*compact(1, 1), (1,), torch.zeros_like),
    "no singular values": Problem(*compact(3, 4), (0,)),
}

REPEATED = {
    "identity": Problem(*(Factor((4, 4), "compact", (4,), of_V=torch.zeros_like),) * 2, (4,), torch.ones_like),
    "all equal": Problem(*compact(5, 5), (5,), torch.ones_like),
    "some equal": Problem(*compact(6, 4), (4,), lambda sigma: sigma.abs().clamp(max=1)),
}

PROBLEMS = INVERTIBLE | RECTANGULAR | SINGULAR | REPEATED


def each(problems: dict[str, Problem]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("problem", problems.values(), ids=problems)


@each(PROBLEMS)
def test_svd_is_its_definition(problem: Problem, precise: torch.dtype, device: str) -> None:
    tensors = problem.draw(precise, device)
    assert_matches_dense(lambda *t: problem.build(*t).dense(), problem.definition, *tensors, size=problem.size)


@each(PROBLEMS)
def test_products_with_svd(problem: Problem, precise: torch.dtype, device: str) -> None:
    products(problem.build, problem.draw(precise, device), problem.size)


def check(
    problem: Problem,
    dtype: torch.dtype,
    device: str,
    operation: Callable[[Any], Any],
    twin: Callable[[Tensor], Any],
    condition: float = 1.0,
) -> None:
    """An operation on the factors against one on the dense matrix that they make."""
    assert_matches_dense(
        lambda *t: operation(problem.build(*t)),
        lambda *t: twin(problem.build(*t).dense()),
        *problem.draw(dtype, device),
        size=problem.size,
        condition=condition,
    )


CONDITION = 3.0  # of every problem that has an inverse; derivatives of that have its square


@each({name: p for name, p in (INVERTIBLE | REPEATED).items() if name != "some equal"})
def test_inverse_solve_and_determinant(problem: Problem, precise: torch.dtype, device: str) -> None:
    def run(operation: Callable[[SVD], Any], twin: Callable[[Tensor], Any]) -> None:
        check(problem, precise, device, operation, twin, CONDITION**2)

    run(lambda W: W.inverse().dense(), torch.linalg.inv)
    run(lambda W: W.mT.inverse().dense(), lambda W: torch.linalg.inv(W).mT)
    run(lambda W: W.slogdet(), torch.linalg.slogdet)
    run(lambda W: W.logabsdet(), lambda W: torch.linalg.slogdet(W).logabsdet)
    n = problem.U.V[-1]
    for shape in (n,), (n, 3), (2, 1, 1, n, 2):
        B = torch.randn(shape, dtype=torch.float64, device=device)
        assert_matches_dense(
            lambda *t: problem.build(*t[:-1]).solve(t[-1]),
            lambda *t: torch.linalg.inv(problem.build(*t[:-1]).dense()) @ t[-1],
            *problem.draw(precise, device),
            B.to(precise),
            size=problem.size,
            condition=CONDITION**2,
        )


@each(INVERTIBLE | RECTANGULAR | SINGULAR)
def test_pseudoinverse(problem: Problem, precise: torch.dtype, device: str) -> None:
    check(problem, precise, device, lambda W: W.pinv().dense(), torch.linalg.pinv, CONDITION**2)
    W = problem.build(*problem.draw(precise, device))
    largest = 1.5 * 8 / 3  # of the pseudoinverse, for the values that are left
    assert_within(W.pinv(rtol=0.7).dense(), torch.linalg.pinv(W.dense().double(), rtol=0.7), largest, problem.size)


@each(PROBLEMS)
def test_norms(problem: Problem, precise: torch.dtype, device: str) -> None:
    distinct = problem in (*INVERTIBLE.values(), *RECTANGULAR.values())
    check(problem, precise, device, lambda W: W.norm(), torch.linalg.matrix_norm)
    for ord in ("nuc", 2, -2):
        # These norms have kinks where singular values are equal or zero.
        operation, twin = lambda W, ord=ord: W.norm(ord), lambda W, ord=ord: torch.linalg.matrix_norm(W, ord)
        if distinct:
            check(problem, precise, device, operation, twin)
        else:
            W = problem.build(*problem.draw(precise, device))
            assert_within(operation(W), twin(W.dense().double()), 1.0, problem.size)


@each(INVERTIBLE | RECTANGULAR)
def test_condition_number_and_rank(problem: Problem, precise: torch.dtype, device: str) -> None:
    check(
        problem,
        precise,
        device,
        lambda W: (W.cond(), W.rank()),
        lambda W: (torch.linalg.cond(W), torch.linalg.matrix_rank(W)),
        CONDITION,
    )


@each(SINGULAR)
def test_condition_number_and_rank_of_singular(problem: Problem, precise: torch.dtype, device: str) -> None:
    W = problem.build(*problem.draw(precise, device))
    assert torch.equal(W.cond(), torch.full(W.shape[:-2], math.inf, dtype=precise, device=device))
    assert torch.equal(W.rank(), torch.linalg.matrix_rank(W.dense()))
    assert W.rank().dtype == torch.int64
    for tol in (0.9, torch.tensor(0.9, device=device)):
        assert torch.equal(W.rank(tol), torch.linalg.matrix_rank(W.dense(), tol=0.9))


def best_approximation(W: Tensor, rank: int) -> Tensor:
    U, sigma, Vt = torch.linalg.svd(W, full_matrices=False)
    return U[..., :rank] * sigma[..., None, :rank] @ Vt[..., :rank, :]


@each({name: p for name, p in (INVERTIBLE | RECTANGULAR).items() if name != "several blocks"})
def test_truncation(problem: Problem, precise: torch.dtype, device: str) -> None:
    k = problem.sigma[-1]
    for rank in {1, (k + 1) // 2, k}:
        check(
            problem,
            precise,
            device,
            lambda W, rank=rank: W.truncate(rank=rank).dense(),
            lambda W, rank=rank: best_approximation(W, rank),
            10 * CONDITION**2,  # and of the gap between those kept and those dropped
        )
        energy = ascending(k).square().sort(descending=True).values.cumsum(0)
        for below in (energy[rank - 1] / energy[-1]).item(), ((energy[rank - 1] - 0.05) / energy[-1]).item():
            W = problem.build(*problem.draw(precise, device))
            kept = W.truncate(energy=min(below, 1.0))
            assert torch.equal(kept.sigma, W.truncate(rank=rank).sigma)
            assert kept.U is W.U and kept.V is W.V


def test_gradient_of_a_singular_log_determinant(precise: torch.dtype) -> None:
    """The entry that is zero gets none, and all others theirs: no NaN and no infinity spoils a step or its norm."""
    sigma = torch.tensor([2.0, 0.0, -0.5, -0.0], dtype=precise, requires_grad=True)
    V = torch.randn(4, 4, dtype=precise)
    for matrix in (SVD(V, sigma, V), Symmetric(V, sigma)):
        assert matrix.logabsdet().item() == -torch.inf
        (gradient,) = torch.autograd.grad(matrix.logabsdet(), sigma)
        torch.testing.assert_close(gradient, torch.tensor([0.5, 0, -2, 0], dtype=precise))


def test_truncation_where_singular_values_are_equal(precise: torch.dtype) -> None:
    W = SVD(torch.randn(10, 10, dtype=precise), torch.ones(10, dtype=precise), torch.randn(10, 10, dtype=precise))
    for rank in range(1, 11):
        assert W.truncate(rank=rank).sigma.tolist() == [1.0] * rank + [0.0] * (10 - rank)
        assert int(W.truncate(energy=rank / 10).rank()) == rank


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_all_energy_is_every_singular_value(scale: float) -> None:
    sigma = scale * torch.tensor([1e-7, 1.0, 0.0, 1e-3])
    W = SVD(torch.randn(4, 4), sigma, torch.randn(4, 4))
    assert torch.equal(W.truncate(energy=1.0).sigma, sigma)
    assert torch.equal(W.truncate(energy=0.5).sigma, sigma * torch.tensor([0.0, 1, 0, 0]))
    zero = SVD(torch.randn(4, 4), torch.zeros(4), torch.randn(4, 4))
    assert torch.equal(zero.truncate(energy=0.5).sigma, torch.zeros(4))


@each(SINGULAR)
def test_singular_matrices_behave_as_in_linalg(problem: Problem, precise: torch.dtype, device: str) -> None:
    W = problem.build(*problem.draw(precise, device))
    if W.shape[-1] != W.shape[-2]:
        return
    for operation in (W.inverse, lambda: W.solve(torch.ones(W.shape[-1], dtype=precise, device=device))):
        with pytest.raises(LinAlgError, match="singular"):
            operation()
    sign, logabsdet = W.slogdet()
    assert torch.equal(sign, torch.zeros(W.shape[:-2], dtype=precise, device=device))
    assert torch.equal(logabsdet, torch.full(W.shape[:-2], -math.inf, dtype=precise, device=device))
    assert torch.equal(W.logabsdet(), logabsdet)


# Symmetric


@dataclass(frozen=True)
class Eigen:
    U: Factor
    sigma: tuple[int, ...]

    def draw(self, dtype: torch.dtype, device: str) -> list[Tensor]:
        return [self.U.draw(dtype, device), (ascending(self.sigma[-1]) / 2).expand(self.sigma).to(device, dtype)]

    def build(self, U: Tensor, sigma: Tensor) -> Symmetric:
        return Symmetric(self.U.build(U), sigma)

    @property
    def size(self) -> int:
        return 8 + self.U.V[-1]


SYMMETRIC = {
    "full": Eigen(Factor((5, 5)), (5,)),
    "compact": Eigen(Factor((5, 5), "compact", (5,)), (5,)),
    "transposed factor": Eigen(Factor((5, 5), "compact", (5,), transposed=True), (5,)),
    "1×1": Eigen(Factor((1, 1), "compact"), (1,)),
    "fewer eigenvalues": Eigen(Factor((3, 5), "compact", (3,)), (3,)),
    "batch": Eigen(Factor((2, 4, 4)), (2, 4)),
    "batch of sigma": Eigen(Factor((4, 4)), (2, 4)),
    "several blocks": Eigen(Factor((40, 40), "compact", (40,)), (40,)),
}


def eye_like(W: Tensor) -> Tensor:
    return torch.eye(W.shape[-1], dtype=W.dtype, device=W.device).expand_as(W)


FUNCTIONS: dict[str, tuple[Callable[[Symmetric], Any], Callable[[Tensor], Any]]] = {
    "expm": (lambda W: W.expm().dense(), torch.linalg.matrix_exp),
    "cayley": (lambda W: W.cayley().dense(), lambda W: torch.linalg.solve(eye_like(W) + W, eye_like(W) - W)),
    "square": (lambda W: W.apply(torch.square).dense(), lambda W: W @ W),
    "polynomial": (lambda W: W.apply(lambda s: s**3 - s + 2).dense(), lambda W: W @ W @ W - W + 2 * eye_like(W)),
    "pinv": (lambda W: W.pinv().dense(), torch.linalg.pinv),
    "mT": (lambda W: W.mT.dense(), lambda W: W.mT),
    "fro": (lambda W: W.norm(), torch.linalg.matrix_norm),
    "two in a row": (lambda W: W.expm().inverse().dense(), lambda W: torch.linalg.matrix_exp(-W)),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@each(SYMMETRIC)
def test_functions_of_symmetric(problem: Eigen, function: str, precise: torch.dtype, device: str) -> None:
    operation, twin = FUNCTIONS[function]
    check(problem, precise, device, operation, twin, 16)  # I + W has condition 7 or less


@each({name: p for name, p in SYMMETRIC.items() if name != "fewer eigenvalues"})
def test_inverse_and_determinant_of_symmetric(problem: Eigen, precise: torch.dtype, device: str) -> None:
    check(problem, precise, device, lambda W: W.inverse().dense(), torch.linalg.inv, CONDITION**2)
    check(problem, precise, device, lambda W: W.slogdet(), torch.linalg.slogdet, CONDITION**2)


@each(SYMMETRIC)
def test_products_with_symmetric(problem: Eigen, precise: torch.dtype, device: str) -> None:
    products(problem.build, problem.draw(precise, device), problem.size)


def test_operations_on_symmetric_give_symmetric() -> None:
    W = Symmetric(torch.randn(4, 4), torch.ones(4))
    for result in (W.mT, W.inverse(), W.pinv(), W.truncate(rank=2), W.expm(), W.cayley(), W.apply(torch.sin)):
        assert type(result) is Symmetric and result.U is W.U and result.V is W.U


def test_cayley_of_eigenvalue_minus_one() -> None:
    W = Symmetric(torch.randn(3, 3), torch.tensor([1.0, -1.0, 2.0]))
    with pytest.raises(LinAlgError, match="eigenvalue that is -1"):
        W.cayley()


# From dense


def orthogonal_matrices(dtype: torch.dtype) -> dict[str, Tensor]:
    reflection = torch.eye(4, dtype=torch.float64)
    reflection[2, 2] = -1
    Q = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q
    matrices = {
        "random": Q,
        "of the other determinant": Q * torch.tensor([-1.0, 1, 1, 1, 1], dtype=torch.float64),
        "columns": Q[:, :3],
        "no columns": Q[:, :0],
        "identity": torch.eye(4, dtype=torch.float64),
        "minus identity": -torch.eye(4, dtype=torch.float64),
        "one reflection": reflection,
        "permutation": torch.eye(5, dtype=torch.float64)[[3, 1, 0, 4, 2]],
        "1×1": torch.ones(1, 1, dtype=torch.float64),
        "−1": -torch.ones(1, 1, dtype=torch.float64),
        "batch": torch.linalg.qr(torch.randn(2, 3, 4, 4, dtype=torch.float64)).Q,
        "transposed": Q.mT,
        "several blocks": torch.linalg.qr(torch.randn(70, 70, dtype=torch.float64)).Q,
    }
    return {name: matrix.to(dtype) for name, matrix in matrices.items()}


@pytest.mark.parametrize("name", orthogonal_matrices(torch.float64))
@pytest.mark.parametrize("form", FORMS)
def test_orthogonal_from_dense(name: str, form: str, dtype: torch.dtype) -> None:
    matrix = orthogonal_matrices(dtype)[name]
    Q = Orthogonal.from_dense(matrix, form=form)
    d, k = matrix.shape[-2:]
    assert Q.form == form and Q.shape == (*matrix.shape[:-1], d) and Q.dtype == dtype
    assert Q.signs is not None and Q.signs.shape == (*matrix.shape[:-2], k)
    assert_within(Q.dense()[..., :k], matrix.double(), 1.0, d)
    if k == d:
        assert torch.equal(Q.det().double(), torch.linalg.det(matrix.double()).round())


def test_compact_reflectors_are_small_and_above_the_diagonal(precise: torch.dtype) -> None:
    for matrix in orthogonal_matrices(precise).values():
        V = compact_from_dense(matrix)
        assert torch.equal(V, V.triu()) and (V.abs() <= 1).all()
        assert (V.diagonal(dim1=-2, dim2=-1).abs() == 1).all()


def dense_matrices(dtype: torch.dtype) -> dict[str, Tensor]:
    W = torch.randn(6, 4, dtype=torch.float64)
    matrices = {
        "tall": W,
        "wide": W.mT,
        "square": W[:4],
        "1×1": W[:1, :1],
        "negative 1×1": -W[:1, :1].abs(),
        "one row": W[:1],
        "zero": torch.zeros_like(W),
        "identity": torch.eye(4, dtype=torch.float64),
        "rank one": W[:, :1] * W[:1],
        "repeated singular values": torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q * 3,
        "triangular": W[:4].triu(),
        "batch": torch.randn(2, 3, 4, 5, dtype=torch.float64),
        "small": W * 2.0**-12,
        "large": W * 2.0**10,
        "strided": every_other_column(W),
    }
    return {name: matrix.to(dtype) for name, matrix in matrices.items()}


@pytest.mark.parametrize("name", dense_matrices(torch.float64))
@pytest.mark.parametrize("form", FORMS)
def test_svd_from_dense(name: str, form: str, dtype: torch.dtype) -> None:
    matrix = dense_matrices(dtype)[name]
    W = SVD.from_dense(matrix, form=form)
    assert W.shape == matrix.shape and W.dtype == dtype and W.U.form == W.V.form == form
    assert (W.sigma >= 0).all() and (W.sigma.diff() <= 0).all()
    assert_within(W.dense(), matrix.double(), matrix.double().abs().max().item(), 2 * max(matrix.shape[-2:]))


@pytest.mark.parametrize("form", FORMS)
def test_symmetric_from_dense(form: str, dtype: torch.dtype) -> None:
    for name, matrix in dense_matrices(dtype).items():
        if matrix.shape[-1] != matrix.shape[-2]:
            continue
        symmetric = matrix + matrix.mT
        W = Symmetric.from_dense(symmetric, form=form)
        assert W.shape == matrix.shape and W.U.form == form and (W.sigma.diff() >= 0).all(), name
        assert_within(W.dense(), symmetric.double(), symmetric.double().abs().max().item(), 2 * matrix.shape[-1])


def test_from_dense_gives_constants() -> None:
    W = torch.eye(3, requires_grad=True)
    for operator in (Orthogonal.from_dense(W), SVD.from_dense(W), Symmetric.from_dense(W)):
        assert not operator.dense().requires_grad


# Identity and Haar


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("d", [1, 2, 5])
def test_identity(form: str, d: int, dtype: torch.dtype, device: str) -> None:
    Q = Orthogonal.identity(d, form=form, dtype=dtype, device=device)
    assert torch.equal(Q.dense(), torch.eye(d, dtype=dtype, device=device))
    assert Q.det() == 1
    V = Q.V.clone().requires_grad_()
    Orthogonal(V, form=form, signs=Q.signs).dense().triu(1).sum().backward()
    assert V.grad is not None and (V.grad.triu(1) != 0).sum() == d * (d - 1) // 2  # it can be trained away from here


@pytest.mark.parametrize("form", FORMS)
def test_haar_is_orthogonal_and_repeats_with_its_generator(form: str, dtype: torch.dtype) -> None:
    draws = [
        Orthogonal.haar(7, form=form, dtype=dtype, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    ]
    first, again, other = (Q.dense() for Q in draws)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert_within(first.double().mT.to(dtype) @ first, torch.eye(7, dtype=torch.float64), 1.0, 7)
    assert Orthogonal.haar(2).dtype == torch.get_default_dtype()


def test_haar_is_uniform() -> None:
    """Mean 0 and the covariances of the Haar measure, E q_ij q_kl = δ_ik δ_jl / d, and E tr(Q)² = 1."""
    d, draws = 3, 4000
    generator = torch.Generator().manual_seed(0)
    V = torch.stack([haar_compact(d, d, dtype=torch.float64, generator=generator) for _ in range(draws)])
    Q = Orthogonal.of_stored(V).dense()
    entries = Q.flatten(1)
    deviation = 5 / math.sqrt(draws)
    assert entries.mean(0).abs().max() < deviation * d**-0.5
    assert (entries.mT @ entries / draws - torch.eye(d * d) / d).abs().max() < deviation * 0.5
    trace = Q.diagonal(dim1=-2, dim2=-1).sum(-1)
    assert abs(trace.square().mean() - 1) < deviation * 2
    assert abs(torch.linalg.det(Q).mean()) < deviation
    # The first column is uniform on the sphere: in three dimensions, each of its coordinates is uniform on [−1, 1].
    ranks = torch.linspace(-1, 1, draws, dtype=torch.float64)
    assert (Q[:, 0, 0].sort().values - ranks).abs().max() < 2 * deviation


def test_haar_columns_are_those_of_their_reflectors() -> None:
    V = haar_compact(3, 8, dtype=torch.float64)
    assert V.shape == (3, 8) and torch.equal(V, V.triu()) and (V.abs() <= 1).all()
    columns = Orthogonal.of_stored(V).dense()[:, :3]
    again = compact_from_dense(columns)
    assert torch.equal(V.diagonal(), again.diagonal()) and (V.diagonal().abs() == 1).all()
    assert_within(again, V, 1.0, 8)


# Shapes by hypothesis


sizes, forms, seeds = st.integers(1, 12), st.sampled_from(FORMS), st.integers(0, 2**32 - 1)


@settings(max_examples=25, deadline=None)
@given(sizes, sizes, st.integers(0, 12), forms, st.sampled_from([(), (2,)]), seeds)
def test_any_shape(n: int, m: int, k: int, form: str, batch: tuple[int, ...], seed: int) -> None:
    torch.manual_seed(seed)
    k = min(k, n, m)
    problem = Problem(Factor((*batch, n, n), form, (n,)), Factor((max(k, 1), m), form, (k,)), (*batch, k))
    tensors = problem.draw(torch.float64, "cpu")
    assert_matches_dense(lambda *t: problem.build(*t).dense(), problem.definition, *tensors, size=problem.size)
    W = problem.build(*tensors)
    again = SVD.from_dense(W.dense(), form=form)
    assert_within(again.dense(), W.dense(), 2.0, problem.size)
    assert torch.equal(again.rank(), W.rank())
    check(problem, torch.float64, "cpu", lambda W: W.pinv().dense(), torch.linalg.pinv, CONDITION**2)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(0, 40), seeds)
def test_orthonormal_columns_of_any_shape(d: int, k: int, seed: int) -> None:
    torch.manual_seed(seed)
    k = min(k, d)
    matrix = torch.linalg.qr(torch.randn(d, k, dtype=torch.float64)).Q
    matrix = matrix * (1 - 2 * torch.randint(2, (k,)))
    assert_within(Orthogonal.from_dense(matrix).dense()[:, :k], matrix, 1.0, d)


# repr and errors


def test_shape_dtype_device_and_repr(device: str) -> None:
    Q = Orthogonal(torch.randn(3, 64, 64, device=device), form="compact")
    W = SVD(torch.randn(4, 5, device=device), torch.ones(3, device=device), torch.randn(2, 4, 7, device=device))
    assert Q.shape == (3, 64, 64) and W.shape == (2, 5, 7) and W.mT.shape == (2, 7, 5)
    assert W.dtype == torch.float32 and W.device == torch.randn(1, device=device).device
    assert repr(Q) == "Orthogonal(3×64×64, compact, float32)"
    assert repr(W) == "SVD(2×5×7, full, float32)"
    assert repr(Symmetric.from_dense(torch.eye(2, dtype=torch.float64))) == "Symmetric(2×2, compact, float64)"
    mixed = SVD(torch.randn(2, 2), torch.ones(2), Orthogonal.identity(2))
    assert repr(mixed) == "SVD(2×2, full and compact, float32)"


def test_half_precision_works(device: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        matrix = torch.randn(6, 6, device=device)
        matrix = (matrix + 6 * torch.eye(6, device=device)).to(dtype)
        W = SVD.from_dense(matrix)
        X = torch.randn(6, 2, device=device).to(dtype)
        for actual, expected in (
            (W @ X, matrix.double() @ X.double()),
            (W.solve(X), torch.linalg.solve(matrix.double(), X.double())),
            (W.logabsdet(), torch.linalg.slogdet(matrix.double()).logabsdet),
            (W.norm(2), torch.linalg.matrix_norm(matrix.double(), 2)),
        ):
            assert actual.dtype == dtype
            assert_within(actual, expected, expected.abs().max().item(), 6)
        assert W.rank() == 6 and W.slogdet().sign == torch.linalg.slogdet(matrix.double()).sign


def test_autocast_keeps_the_precision_of_the_factors() -> None:
    W = SVD.from_dense(torch.randn(4, 4))
    X = torch.randn(4, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(W @ X, (W @ X.float()))
        assert (W @ X.bfloat16()).dtype == torch.float32


def matrices_of(t: Tensor, sigma: Tensor) -> tuple[Tensor, ...]:
    """Most of what operators do, as one function of two tensors."""
    W = SVD(Orthogonal(t, form="compact", signs=-torch.ones_like(sigma)), sigma, Orthogonal(t.mT))
    S = Symmetric(t, sigma)
    return (
        W.matmul(t),
        W.solve(sigma),
        W.pinv().sigma,
        *W.slogdet(),
        W.cond(),
        W.rank(),
        W.truncate(energy=0.8).sigma,
        S.cayley().mT.dense(),
    )


def assert_all_equal(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for t, reference in zip(actual, expected, strict=True):
        assert_within(t, reference, 10.0, 100)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_operators_compile_without_a_graph_break() -> None:
    t, sigma = torch.randn(4, 4, dtype=torch.float64), torch.rand(4, dtype=torch.float64) + 0.5
    compiled = torch.compile(matrices_of, backend="eager", fullgraph=True)
    assert_all_equal(compiled(t, sigma), matrices_of(t, sigma))
    zero = torch.compile(lambda s: Symmetric(t, s).inverse().sigma, backend="eager", fullgraph=True)(0 * sigma)
    assert zero.isinf().all()


def test_operators_map_over_a_batch() -> None:
    t, sigma = torch.randn(3, 4, 4, dtype=torch.float64), torch.rand(3, 4, dtype=torch.float64) + 0.5
    mapped = torch.func.vmap(matrices_of)(t, sigma)
    expected = [torch.stack(parts) for parts in zip(*map(matrices_of, t, sigma), strict=True)]
    assert_all_equal(mapped, tuple(expected))


def test_second_derivatives() -> None:
    t = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    sigma = (torch.rand(3, dtype=torch.float64) + 0.5).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda t, s: SVD(t, s, Orthogonal(t, form="compact")).solve(s), (t, sigma))


def test_operators_without_numbers() -> None:
    t, sigma = torch.empty(4, 4, device="meta"), torch.empty(4, device="meta")
    for result in matrices_of(t, sigma):
        assert result.is_meta


E34, E44 = torch.randn(3, 4), torch.randn(4, 4)
WIDE = SVD(torch.randn(3, 3), torch.ones(3), E44)
SQUARE = SVD(E44, torch.ones(4), E44)

ERRORS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: Orthogonal([1.0]), TypeError, "`V` should be a tensor; got list"),
    (lambda: Orthogonal(torch.ones(3)), ValueError, r"`V` should have shape \(r, d\).*got \(3,\)"),
    (lambda: Orthogonal(torch.ones(3, 0)), ValueError, r"got \(3, 0\)"),
    (
        lambda: Orthogonal(E44, form="square"),
        ValueError,
        "`form` should be one of 'full', 'triangular', 'compact'; got",
    ),
    (lambda: Orthogonal(E44, signs=[1]), TypeError, "`signs` should be a tensor or None; got list"),
    (lambda: Orthogonal(E44, signs=torch.ones(5)), ValueError, r"at most 4 entries.*got shape \(5,\)"),
    (lambda: Orthogonal(E44, signs=torch.ones(4).double()), TypeError, "`signs` should be torch.float32"),
    (lambda: Orthogonal(torch.ones(2, 4, 4), signs=torch.ones(3, 4)), ValueError, "batches of `V` and `signs`"),
    (lambda: Orthogonal.from_dense(E44), ValueError, "`Q` should have orthonormal columns"),
    (lambda: Orthogonal.from_dense(torch.zeros(4, 4).bfloat16()), ValueError, "`Q` should have orthonormal columns"),
    (lambda: Orthogonal.from_dense(torch.full((2, 2), math.nan)), ValueError, "`Q` should have orthonormal columns"),
    (lambda: Orthogonal.from_dense(E34), ValueError, r"`Q` should have shape \(\*b, d, k\) with k ≤ d; got \(3, 4\)"),
    (lambda: Orthogonal.from_dense(torch.eye(2), form="no"), ValueError, "`form` should be"),
    (lambda: Orthogonal.identity(0), ValueError, "`d` should be a positive int; got 0"),
    (lambda: Orthogonal.haar(2.0), ValueError, "`d` should be a positive int; got 2.0"),
    (lambda: Orthogonal(E44) @ torch.ones(3), ValueError, r"`X` should have shape \(4,\), \(4, c\).*got \(3,\)"),
    (lambda: Orthogonal(E44) @ torch.ones(()), ValueError, r"got \(\)"),
    (lambda: Orthogonal(E44) @ torch.ones(4).double(), TypeError, "`X` should be torch.float32.*got torch.float64"),
    (lambda: Orthogonal(E44) @ torch.ones(4, device="meta"), ValueError, "`X` should be on cpu"),
    (lambda: Orthogonal(E44) @ 3.0, TypeError, "unsupported operand"),
    (lambda: torch.ones(3) @ Orthogonal(E44), ValueError, r"`X` should have shape \(4,\), \(c, 4\).*got \(3,\)"),
    (lambda: SVD(E44, 3.0, E44), TypeError, "`sigma` should be a tensor; got float"),
    (lambda: SVD(E44, torch.ones(5), E44), ValueError, r"k ≤ 4 for a matrix of 4×4; got \(5,\)"),
    (lambda: SVD(E44, torch.ones(()), E44), ValueError, r"got \(\)"),
    (lambda: SVD(E44, torch.ones(4).double(), E44), TypeError, "`U`, `sigma` and `V` should have one dtype"),
    (lambda: SVD(E44, torch.ones(4, device="meta"), E44), ValueError, "should be on one device"),
    (lambda: SVD(torch.ones(2, 4, 4), torch.ones(3, 4), E44), ValueError, "batches of `U` and `sigma` and `V`"),
    (lambda: SVD.from_dense(torch.ones(3)), ValueError, r"`W` should have shape \(n, m\).*got \(3,\)"),
    (lambda: SVD.from_dense(torch.ones(3, 0)), ValueError, r"got \(3, 0\)"),
    (lambda: SVD.from_dense(E44, form="no"), ValueError, "`form` should be"),
    (WIDE.inverse, ValueError, r"inverse: the matrix should be square; got SVD\(3×4"),
    (lambda: WIDE.solve(torch.ones(3)), ValueError, "should be square"),
    (WIDE.slogdet, ValueError, "slogdet: the matrix should be square"),
    (WIDE.logabsdet, ValueError, "logabsdet: the matrix should be square"),
    (lambda: SQUARE.solve(torch.ones(3)), ValueError, "`X` should have shape"),
    (lambda: WIDE.pinv(rtol=-1), ValueError, "`rtol` should be at least 0; got -1"),
    (lambda: WIDE.norm(3), ValueError, "`ord` should be one of 'fro', 'nuc', 2, -2; got 3"),
    (WIDE.truncate, ValueError, "exactly one of `rank` and `energy` should be set; got rank=None and energy=None"),
    (lambda: WIDE.truncate(rank=1, energy=0.5), ValueError, "got rank=1 and energy=0.5"),
    (lambda: WIDE.truncate(rank=0), ValueError, "`rank` should be an int from 1 to 3 .*got 0"),
    (lambda: WIDE.truncate(rank=4), ValueError, "got 4"),
    (lambda: WIDE.truncate(rank=1.5), ValueError, "got 1.5"),
    (lambda: WIDE.truncate(rank=True), ValueError, "got True"),
    (lambda: WIDE.truncate(energy=0), ValueError, "`energy` should be above 0 and at most 1; got 0"),
    (lambda: WIDE.truncate(energy=1.1), ValueError, "got 1.1"),
    (lambda: WIDE.truncate(energy=math.nan), ValueError, "got nan"),
    (lambda: Symmetric.from_dense(E44), ValueError, "`W` should be symmetric"),
    (lambda: Symmetric.from_dense(E34), ValueError, r"`W` should have shape \(n, n\).*got \(3, 4\)"),
    (lambda: Symmetric(E44, torch.ones(4)).apply(torch.sum), ValueError, r"`f` should keep the shape \(4,\); got \(\)"),
]


@pytest.mark.parametrize("call, error, message", ERRORS, ids=[str(i) for i in range(len(ERRORS))])
def test_errors_say_what_was_expected(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_reflectors_of_each_form_make_the_same_matrix() -> None:
    V = haar_compact(4, 6, dtype=torch.float64)
    matrices = [Orthogonal.of_stored(V, form).dense() for form in FORMS]
    for matrix in matrices[1:]:
        assert_within(matrix, matrices[0], 1.0, 6)


def test_the_diagonal_of_compact_reflectors_that_somebody_gives_is_not_used() -> None:
    """Only ``of_stored`` takes it for signs: values, and gradients, which are zero there."""
    V = torch.randn(4, 6, dtype=torch.float64).requires_grad_()
    for signs in (None, torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0], dtype=torch.float64)):
        Q = Orthogonal(V, form="compact", signs=signs)
        written_out = Orthogonal(V.triu(1) + torch.eye(4, 6).double(), form="triangular", signs=signs)
        for sigma in (torch.rand(3, dtype=torch.float64), torch.rand(5, dtype=torch.float64)):
            dense, expected = (SVD(one, sigma, one).dense() for one in (Q, written_out))
            torch.testing.assert_close(dense, expected)
            (found,), (wanted,) = (torch.autograd.grad(W.sin().sum(), V, retain_graph=True) for W in (dense, expected))
            torch.testing.assert_close(found, wanted)
            assert not found.diagonal().any()


def test_products_by_the_functions_of_torch() -> None:
    X, W = torch.randn(3, 5), SVD.from_dense(torch.randn(5, 4))
    torch.testing.assert_close(torch.matmul(X, W), X @ W.dense())
    torch.testing.assert_close(torch.matmul(W, X[0, :4]), W.dense() @ X[0, :4])
    for wrong in (lambda: torch.add(X, W), lambda: torch.matmul(W, W)):
        with pytest.raises(TypeError):
            wrong()


@pytest.mark.parametrize("value", [0.0, -1.0, 0.1])
def test_has_entry(path: str, value: float) -> None:
    t = torch.tensor([3.0, value, 2.0], dtype=torch.float64)
    for like in (t, t.float(), t.half(), torch.stack((t, t), 1)[:, 0], torch._neg_view(-t)):
        assert has_entry(like, value)
        assert not has_entry(like, 5.0)
    assert not has_entry(t.to("meta"), value)


@pytest.mark.parametrize(("n", "m"), [(6, 6), (7, 4), (4, 7)])
def test_of_shared(path: str, n: int, m: int) -> None:
    """One matrix for U and V is the same as two: values, gradients, and what is made of it."""
    matrix = torch.rand(n, m, dtype=torch.float64) - 0.5
    matrix.diagonal().mul_(4)  # close to zero signs have a gradient
    diagonal = matrix.diagonal()
    diagonal.copy_(diagonal.abs().clamp(min=0.3).copysign(diagonal))
    matrix.requires_grad_()
    sigma = torch.rand(min(n, m), dtype=torch.float64).add(0.5).requires_grad_()
    signs = matrix.detach().diagonal().sign()
    assert len(signs.unique()) == 2
    shared = SVD.of_shared(matrix, sigma)
    two = SVD(Orthogonal(matrix.mT, form="compact"), sigma, Orthogonal(matrix, form="compact", signs=signs))
    X, rows = torch.randn(m, 3, dtype=torch.float64), torch.randn(3, n, dtype=torch.float64)
    functions: list[Callable[[SVD], Tensor]] = [
        lambda W: W @ X,
        lambda W: rows @ W,
        lambda W: W.mT @ rows.mT,
        lambda W: W.pinv() @ rows.mT,
        lambda W: W.mT.pinv() @ X,
        lambda W: W.truncate(rank=2) @ X,
        lambda W: W.dense(),
        lambda W: W.mT.dense(),
        lambda W: W.U @ rows.mT,
        lambda W: W.mT.V @ rows.mT,
    ]
    if n == m:
        functions += [lambda W: W.inverse() @ X, lambda W: W.slogdet().logabsdet, lambda W: W.slogdet().sign * sigma]
    for function in functions:
        actual, expected = function(shared), function(two)
        torch.testing.assert_close(actual, expected)
        g = torch.randn_like(expected)
        torch.testing.assert_close(
            *(torch.autograd.grad(out, (matrix, sigma), g, allow_unused=True) for out in (actual, expected))
        )
    assert repr(shared) == repr(two) and shared.shape == two.shape
    with pytest.raises(AttributeError, match="nothing"):
        _ = shared.nothing
