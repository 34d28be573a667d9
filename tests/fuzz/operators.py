"""``Orthogonal``, ``SVD`` and ``Symmetric``: every method against dense float64 matrices made by the definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fasth import SVD, Orthogonal, Symmetric
from fasth.tools.problems import from_definition
from fuzz.compare import check, doubled, lengths, norm, tolerance, values_and_gradients, wanting
from fuzz.draws import PRECISE, Draw

FORMS = ("full", "triangular", "compact")
BATCHES: list[tuple[int, ...]] = [(), (), (), (), (), (2,), (3, 2)]


class Factor:
    """An orthogonal factor: its form and signs are drawn, and what it is made of is one tensor V."""

    def __init__(self, draw: Draw, d: int, k: int, batch: tuple[int, ...], dtype: torch.dtype) -> None:
        self.form, self.d = draw.choice(FORMS), d
        r = draw.choice([d, d, k, draw.between(0, d + 3)])
        self.V = draw.reflectors(*batch, r, d, dtype=dtype)
        if self.form == "compact":  # as they are trained: entries of about 1
            self.V = draw.arranged(draw.numbers(*batch, r, d, dtype=dtype) / 2)
        self.signs: Tensor | None = None
        if draw.chance(0.6):
            self.signs = torch.where(torch.rand(draw.choice([k, d, 1])) < 0.5, -1.0, 1.0).to(dtype)
        self.transposed = draw.chance(0.2)
        draw.note(self.form, f"r {r}", "signs" if self.signs is not None else "", "transposed" * self.transposed)

    def build(self, V: Tensor) -> Orthogonal:
        signs = None if self.signs is None else self.signs.to(V.dtype)
        Q = Orthogonal(V, form=self.form, signs=signs)
        return Q.mT if self.transposed else Q

    def reflectors(self, V: Tensor) -> Tensor:
        """Returns the reflectors in full form."""
        if self.form == "compact":
            return V.triu(1) + torch.eye(*V.shape[-2:], dtype=V.dtype)
        return V.triu() if self.form == "triangular" else V

    def dense(self, V: Tensor) -> Tensor:
        """Q from one reflection at a time, in float64."""
        Q = from_definition(torch.eye(self.d, dtype=V.dtype), self.reflectors(V)).mT
        if self.signs is not None:
            Q = Q * F.pad(self.signs.to(V.dtype), (0, self.d - len(self.signs)), value=1)
        return Q.mT if self.transposed else Q

    def shortest(self) -> Tensor:
        return lengths(self.reflectors(self.V)).min() if self.V.numel() else torch.ones(())


def orthogonal_case(draw: Draw) -> None:
    dtype, d, batch = draw.dtype(), draw.size(rare=150), draw.choice(BATCHES)
    batch = batch if d <= 40 else ()
    factor = Factor(draw, d, d, batch, dtype)
    sizes = lengths(factor.reflectors(factor.V)) if factor.form != "compact" else 1.0
    operations = factor.V.shape[-2] + d
    for _ in range(draw.between(1, 2)):
        name = draw.choice(list(PRODUCTS))
        X = _argument(draw, name, (d, d), batch, dtype)
        V, *more = wanting(draw, factor.V, *X)
        draw.actions[f"Orthogonal.{name}"] += 1
        actual = values_and_gradients(draw, lambda *t, n=name: PRODUCTS[n](factor.build(t[0]), *t[1:]), (V, *more))
        expected = values_and_gradients(
            draw, lambda *t, n=name: DENSE_PRODUCTS[n](factor.dense(t[0]), *t[1:]), doubled((V, *more)), actual[2]
        )
        x_size = norm(X[0]) if X else d**0.5
        gradient_sizes = [x_size * sum(map(norm, actual[2])) / sizes, *(sum(map(norm, actual[2])) for _ in X)]
        relative = tolerance(dtype, operations + _columns(X, d), 2)
        _check(name, actual, expected, [V, *more], x_size, gradient_sizes, relative)
    det = factor.build(factor.V).det()
    reference = torch.linalg.det(factor.dense(factor.V.double()))
    check("det", det, reference.expand(det.shape), 1.0, tolerance(torch.float64, 10 * operations))


PRODUCTS: dict[str, Callable[..., Any]] = {
    "dense": lambda A: A.dense(),
    "mT.dense": lambda A: A.mT.dense(),
    "@ X": lambda A, X: A @ X,
    "mT @ X": lambda A, X: A.mT @ X,
    "X @": lambda A, X: X @ A,
}
DENSE_PRODUCTS = PRODUCTS | {"dense": lambda A: A, "mT.dense": lambda A: A.mT}


def _argument(
    draw: Draw, name: str, shape: tuple[int, int], batch: tuple[int, ...], dtype: torch.dtype
) -> list[Tensor]:
    if "X" not in name:
        return []
    m = shape[1] if name == "@ X" else shape[0]  # X @ A takes rows of n, as Aᵀ takes columns
    columns = draw.choice([0, 1, 2, 5, draw.size()])
    kind = draw.weighted({"vector": 1, "matrix": 4, "batch": 2 if batch else 0})
    own = batch if kind == "batch" else ()
    X_shape = (m,) if kind == "vector" else (*own, columns, m) if name == "X @" else (*own, m, columns)
    draw.note(name, X_shape)
    return [draw.rows(*X_shape, dtype=dtype)]


def _columns(X: list[Tensor], d: int) -> int:
    """Number of columns of X, or d for the identity: gradients of factors are sums over the columns."""
    return X[0].numel() // min(X[0].shape[-2:]) if X and X[0].numel() else d


def _check(
    what: str,
    actual: tuple[list[Tensor], ...],
    expected: tuple[list[Tensor], ...],
    tensors: Sequence[Tensor],
    size: float,
    gradient_sizes: Sequence[Tensor | float],
    relative: float,
) -> None:
    for value, reference in zip(actual[0], expected[0], strict=True):
        check(what, value, reference, size, relative)
    if not actual[2]:
        return
    wanted = [
        (i, gradient_size)
        for i, (t, gradient_size) in enumerate(zip(tensors, gradient_sizes, strict=True))
        if t.requires_grad
    ]
    for (i, gradient_size), gradient, reference in zip(wanted, actual[1], expected[1], strict=True):
        assert gradient.dtype == tensors[i].dtype
        check(f"{what}: gradient of argument {i}", gradient, reference, gradient_size, relative)


class Matrices:
    """An SVD or a Symmetric: its factors are drawn; |σ| is within 0.5 and 2, of both signs, times a scale."""

    def __init__(self, draw: Draw, symmetric: bool, square: bool, dtype: torch.dtype) -> None:
        self.symmetric = symmetric
        self.n = draw.size(24, rare=100)
        self.m = self.n if symmetric or square else draw.size(24)
        smaller = min(self.n, self.m)
        self.k = smaller if square or draw.chance(0.7) else draw.between(1, smaller)
        batch = draw.choice(BATCHES) if smaller < 12 else ()
        self.batch = batch
        self.U = Factor(draw, self.n, self.k, batch if draw.chance(0.7) else (), dtype)
        self.V = self.U if symmetric else Factor(draw, self.m, self.k, batch if draw.chance(0.5) else (), dtype)
        self.scale = draw.choice([1.0, 1.0, 0.125, 8.0])
        sigma = torch.empty(*batch, self.k, dtype=torch.float64).uniform_(0.5, 2) * self.scale
        sigma = sigma * torch.where(torch.rand(sigma.shape) < 0.3, -1, 1)
        self.sigma = draw.arranged(sigma.to(dtype))
        draw.note(f"{self.n}×{self.m}", f"σ {tuple(self.sigma.shape)} of {self.scale}")

    @property
    def tensors(self) -> list[Tensor]:
        return [self.U.V, self.sigma] if self.symmetric else [self.U.V, self.sigma, self.V.V]

    def build(self, U: Tensor, sigma: Tensor, V: Tensor | None = None) -> SVD:
        if self.symmetric:
            return Symmetric(self.U.build(U), sigma)
        assert V is not None
        return SVD(self.U.build(U), sigma, self.V.build(V))

    def dense(self, U: Tensor, sigma: Tensor, V: Tensor | None = None, f: Any = lambda sigma: sigma) -> Tensor:
        """W in float64 by the definition, or f(W): (*b, n, m)."""
        values = f(F.pad(sigma, (0, min(self.n, self.m) - self.k)))
        left = self.U.dense(U)
        right = left if V is None else self.V.dense(V)
        k = values.shape[-1]
        return left[..., :k] * values.unsqueeze(-2) @ right[..., :k].mT

    @property
    def operations(self) -> int:
        return self.n + self.m + self.U.V.shape[-2] + self.V.V.shape[-2] + 10


def svd_case(draw: Draw) -> None:
    symmetric, square = draw.chance(0.3), draw.chance(0.5)
    name = draw.choice([*PRODUCTS, "inverse", "pinv", "solve", "values", "truncate", "from_dense", "function"])
    if name in ("inverse", "solve"):
        square = True
    if name == "function":
        symmetric = True
    dtype = draw.dtype() if name in PRODUCTS else draw.dtype(PRECISE)
    matrices = Matrices(draw, symmetric, square, dtype)
    draw.note(name)
    draw.actions[f"{'Symmetric' if symmetric else 'SVD'}.{name}"] += 1
    if name in ("values", "truncate", "from_dense"):
        {"values": _values, "truncate": _truncate, "from_dense": _from_dense}[name](draw, matrices)
        return
    function, twin, shape, size = _method(draw, name, matrices)
    X = _argument(draw, "@ X" if name == "solve" else name, shape, matrices.batch, dtype)
    tensors = wanting(draw, *matrices.tensors, *X)
    count = len(matrices.tensors)
    actual = values_and_gradients(draw, lambda *t: function(matrices.build(*t[:count]), *t[count:]), tensors)
    expected = values_and_gradients(draw, lambda *t: twin(t[:count], *t[count:]), doubled(tensors), actual[2])
    x_size = norm(X[0]) if X else min(matrices.n, matrices.m) ** 0.5
    g = sum(map(norm, actual[2]))
    times = x_size * g * size
    batches = max(len(matrices.sigma.reshape(-1, matrices.k)), 1) ** 0.5  # a gradient may be a sum over the batch
    of_U, of_V = times * batches / matrices.U.shortest(), times * batches / matrices.V.shortest()
    # |σ| ≤ 2·scale and ≥ scale/2: what each method's derivative by σ is bounded by, relative to its own size.
    sizes = [
        of_U,
        times * batches * 4 / matrices.scale,
        *([] if symmetric else [of_V]),
        *(g * size * batches for _ in X),
    ]
    relative = tolerance(dtype, 4 * matrices.operations + _columns(X, max(shape)), 2)
    _check(name, actual, expected, tensors, x_size * size, sizes, relative)


def _method(draw: Draw, name: str, matrices: Matrices) -> tuple[Any, Any, tuple[int, int], float]:
    """The method, its twin from the tensors, the shape of the matrix that takes X, and the norm of that matrix."""
    shape, largest = (matrices.n, matrices.m), 2 * matrices.scale
    if name in PRODUCTS:
        return PRODUCTS[name], lambda t, *X: DENSE_PRODUCTS[name](matrices.dense(*t), *X), shape, largest
    if name == "inverse":
        return lambda A: A.inverse().dense(), lambda t: torch.linalg.inv(matrices.dense(*t)), shape, 2 / matrices.scale
    if name == "solve":
        twin = lambda t, B: torch.linalg.inv(matrices.dense(*t)) @ B  # noqa: E731
        return lambda A, B: A.solve(B), twin, shape, 2 / matrices.scale
    if name == "pinv":
        inverse = lambda s: torch.where(s == 0, 0, 1 / torch.where(s == 0, 1, s))  # noqa: E731
        return lambda A: A.pinv().dense(), lambda t: _transposed(matrices, t, inverse), shape, 2 / matrices.scale
    f = draw.choice([torch.exp, torch.tanh, lambda s: (1 - s) / (1 + s)])
    if f is torch.exp:
        return lambda A: A.expm().dense(), lambda t: matrices.dense(*t, f=f), shape, float(torch.tensor(largest).exp())
    if f is torch.tanh:
        return lambda A: A.apply(f).dense(), lambda t: matrices.dense(*t, f=f), shape, 1.0
    nearest = float((1 + matrices.sigma.double()).abs().min())  # how close I + W is to singular
    return lambda A: A.cayley().dense(), lambda t: matrices.dense(*t, f=f), shape, (1 + largest) / nearest**2


def _transposed(matrices: Matrices, tensors: Sequence[Tensor], f: Any) -> Tensor:
    return matrices.dense(*tensors, f=f).mT


def _values(draw: Draw, matrices: Matrices) -> None:
    """Norms, the condition number, the rank and the determinant, against ``torch.linalg`` of the dense matrix."""
    A = matrices.build(*matrices.tensors)
    W = matrices.dense(*(t.double() for t in matrices.tensors))
    relative, size = tolerance(matrices.sigma.dtype, matrices.operations), 2 * matrices.scale
    smaller = min(matrices.n, matrices.m)
    for ord in ("fro", "nuc", 2, -2):
        check(f"norm({ord!r})", A.norm(ord), torch.linalg.matrix_norm(W, ord), size * smaller, relative)
    if matrices.k == smaller:
        check("cond", A.cond(), torch.linalg.cond(W), 4.0, 16 * relative)
    assert bool((A.rank() == matrices.k).all()), f"rank: {A.rank()}, not {matrices.k}"
    if matrices.n == matrices.m and matrices.k == matrices.n:
        sign, logabsdet = A.slogdet()
        reference = torch.linalg.slogdet(W)
        assert torch.equal(sign.double(), reference.sign), f"slogdet: sign {sign}, not {reference.sign}"
        check("slogdet", logabsdet, reference.logabsdet, smaller * 3.0, relative)
    _gradient_of_sigma(matrices, relative)


def _gradient_of_sigma(matrices: Matrices, relative: float) -> None:
    """Bound of the gradient of ‖W‖ in two norms and of log |det W|, which are functions of σ alone."""
    determinant = matrices.n == matrices.m == matrices.k
    tensors, sigma = matrices.tensors, matrices.sigma.detach().requires_grad_()
    tensors[1] = sigma
    A = matrices.build(*tensors)
    total = A.norm("nuc").sum() + A.norm("fro").sum() + (A.logabsdet().sum() if determinant else 0)
    sigma64 = sigma.detach().double().requires_grad_()
    logs = sigma64.abs().log().sum() if determinant else 0
    twin = sigma64.abs().sum() + sigma64.square().sum(-1).sqrt().sum() + logs
    (gradient,), (reference,) = torch.autograd.grad(total, [sigma]), torch.autograd.grad(twin, [sigma64])
    repeats = A.norm().numel() * matrices.k / sigma.numel()  # in a larger batch of U and V
    check("gradient of σ", gradient, reference * repeats, 4 / min(matrices.scale, 1.0) * repeats, relative)


def _truncate(draw: Draw, matrices: Matrices) -> None:
    """The nearest matrix of lower rank, by the SVD of the dense one. Where two σ are close, it is not determined."""
    A = matrices.build(*matrices.tensors)
    values = matrices.sigma.detach().double().abs().sort(-1, descending=True).values
    rank = draw.between(1, matrices.k)
    gap = float((values[..., rank - 1] - values[..., rank]).min()) if rank < matrices.k else 1.0
    W = matrices.dense(*(t.double() for t in matrices.tensors))
    if gap < 1e-3 * matrices.scale:
        return
    U, S, Vh = torch.linalg.svd(W, full_matrices=False)
    nearest = U[..., :rank] * S[..., None, :rank] @ Vh[..., :rank, :]
    relative = tolerance(matrices.sigma.dtype, matrices.operations) + 1e-12 / gap * matrices.scale
    check("truncate", A.truncate(rank=rank).dense(), nearest, 2 * matrices.scale, relative)
    kept = A.truncate(energy=draw.random.uniform(0.1, 1.0)).sigma
    assert bool(((kept == 0) | (kept == A.sigma)).all()), "truncate: some σ is neither kept nor zero"


def _from_dense(draw: Draw, matrices: Matrices) -> None:
    """The decomposition of a matrix is that matrix."""
    W = matrices.dense(*(t.double() for t in matrices.tensors))
    W = ((W + W.mT) / 2 if matrices.symmetric else W).to(matrices.sigma.dtype)
    W = W if matrices.symmetric else draw.arranged(W)
    form = draw.choice(FORMS)
    found = Symmetric.from_dense(W, form) if matrices.symmetric else SVD.from_dense(W, form)
    relative = tolerance(W.dtype, 4 * matrices.operations)
    largest = float(torch.linalg.matrix_norm(W.double(), 2).max())
    check("from_dense", found.dense(), W.double(), largest, relative)
    Q = found.U.dense().double()
    eye = torch.eye(matrices.n, dtype=torch.float64).expand(Q.shape)
    check("U of from_dense", Q.mT @ Q, eye, 1.0, relative)
