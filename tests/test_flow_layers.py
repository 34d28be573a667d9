"""Flows made of reflectors for each sample, against their definitions and autograd's Jacobian."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.distributions import Independent, MultivariateNormal, Normal, TransformedDistribution

from fasth.flows import HouseholderTransform, QRTransform, SylvesterTransform
from fasth.flows.sylvester import solve_increasing

BATCHES = [(), (3,), (2, 3), (0,)]
batches = pytest.mark.parametrize("batch", BATCHES, ids=str)
D = 5


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def sylvester(
    batch: tuple[int, ...] = (), r: int = 3, M: int = 3, d: int = D, dtype: torch.dtype = torch.float64
) -> SylvesterTransform:
    R1, R2, bias = (randn(*batch, *shape, dtype=dtype) for shape in ((M, M), (M, M), (M,)))
    return SylvesterTransform.from_unconstrained(randn(*batch, r, d, dtype=dtype), R1, R2, bias)


def qr(batch: tuple[int, ...] = (), r: int = 3, event_dim: int = 1) -> QRTransform:
    return QRTransform(randn(*batch, r, D), randn(*batch, D, D), event_dim)


def product(V: Tensor) -> Tensor:
    """Q = H₁H₂⋯H_r, (*b, d, d), one H = I − 2vvᵀ/vᵀv at a time."""
    eye = torch.eye(V.shape[-1], dtype=V.dtype)
    Q = eye.expand(*V.shape[:-2], *eye.shape)
    for v in V.unsqueeze(-1).unbind(-3):  # (*b, d, 1)
        squared = v.mT @ v
        Q = Q @ torch.where(squared == 0, eye, eye - 2 * v @ v.mT / torch.where(squared == 0, 1, squared))
    return Q


def times(A: Tensor, x: Tensor) -> Tensor:
    return (A @ x.unsqueeze(-1)).squeeze(-1)


def by_definition(transform: Any, x: Tensor) -> Tensor:
    """y of one of the three transforms, with vectors as events."""
    Q = product(transform.V)
    if isinstance(transform, HouseholderTransform):
        return times(Q, x)
    if isinstance(transform, SylvesterTransform):
        R1, R2 = transform.R1, transform.R2
        Q = Q[..., : R1.shape[-1]]
        return x + times(Q @ R1.triu(), torch.tanh(times(R2.triu() @ Q.mT, x) + transform.bias))
    R = transform.R.triu(1) + torch.diag_embed(transform.R.diagonal(dim1=-2, dim2=-1).exp())
    return times(Q @ R, x)


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "householder": lambda batch: HouseholderTransform(randn(*batch, 3, D)),
    "householder, r = 1": lambda batch: HouseholderTransform(randn(*batch, 1, D)),
    "householder, r = d": lambda batch: HouseholderTransform(randn(*batch, D, D)),
    "householder, r > d": lambda batch: HouseholderTransform(randn(*batch, 2 * D, D)),
    "householder, r = 0": lambda batch: HouseholderTransform(randn(*batch, 0, D)),
    "householder, zeros": lambda batch: HouseholderTransform(randn(*batch, 3, D) * torch.tensor([[1.0], [0], [1]])),
    "householder, d = 1": lambda batch: HouseholderTransform(randn(*batch, 2, 1)),
    "sylvester": sylvester,
    "sylvester, M = 1": lambda batch: sylvester(batch, M=1),
    "sylvester, M = d": lambda batch: sylvester(batch, r=D, M=D),
    "sylvester, d = 1": lambda batch: sylvester(batch, r=1, M=1, d=1),
    "qr": qr,
    "qr, r = 1": lambda batch: qr(batch, r=1),
    "qr, r = d": lambda batch: qr(batch, r=D),
}
every = pytest.mark.parametrize("make", TRANSFORMS.values(), ids=TRANSFORMS.keys())


@every
@batches
def test_value_inverse_and_determinant(make: Any, batch: tuple[int, ...]) -> None:
    transform = make(batch)
    x = randn(*batch, transform.V.shape[-1])
    y = transform(x)
    torch.testing.assert_close(y, by_definition(transform, x))
    torch.testing.assert_close(transform.inv(y), x, rtol=1e-10, atol=1e-10)
    logabsdet = transform.log_abs_det_jacobian(x, y)
    assert logabsdet.shape == batch
    torch.testing.assert_close(transform.inv.log_abs_det_jacobian(y, x), -logabsdet)
    for function, at, expected in ((transform, x, logabsdet), (transform.inv, y, -logabsdet)):
        torch.testing.assert_close(torch.linalg.slogdet(own_jacobians(function, at)).logabsdet, expected)


def own_jacobians(function: Any, x: Tensor) -> Tensor:
    """(*b, d, d). The sum over the batch has the Jacobian of each sample, as no sample depends on another."""
    if not x.numel():
        return x.new_ones(*x.shape, x.shape[-1])
    J = jacobian(lambda x: function(x).reshape(-1, x.shape[-1]).sum(0), x)  # (d, *b, d)
    return J.movedim(0, -2)


@every
@pytest.mark.parametrize("samples", [(4,), (2, 4)], ids=str)
def test_samples_share_the_map_of_their_entry(make: Any, samples: tuple[int, ...]) -> None:
    transform = make((3,))
    x = randn(*samples, 3, transform.V.shape[-1])
    y = transform(x)
    torch.testing.assert_close(y, by_definition(transform, x))
    torch.testing.assert_close(transform.inv(y), x, rtol=1e-10, atol=1e-10)
    logabsdet = transform.log_abs_det_jacobian(x, y)
    torch.testing.assert_close(torch.linalg.slogdet(own_jacobians(transform, x)).logabsdet, logabsdet)


@every
@pytest.mark.parametrize("batch", [(), (7,), (2, 3)], ids=str)
def test_one_map_for_all(make: Any, batch: tuple[int, ...]) -> None:
    transform = make(())
    x = randn(*batch, transform.V.shape[-1])
    y = transform(x)
    torch.testing.assert_close(y, by_definition(transform, x))
    torch.testing.assert_close(transform.inv(y), x, rtol=1e-10, atol=1e-10)
    assert transform.log_abs_det_jacobian(x, y).shape == batch


@every
def test_one_vector_for_a_batch_of_maps(make: Any) -> None:
    transform = make((2, 3))
    d = transform.V.shape[-1]
    for x in (randn(d), randn(1, d), randn(4, 1, 1, d)):
        y = transform(x)
        torch.testing.assert_close(y, by_definition(transform, x))
        assert y.shape == transform.forward_shape(x.shape)
        expanded = x.expand(y.shape)
        torch.testing.assert_close(transform.inv(y), expanded)
        torch.testing.assert_close(transform.inv(x), transform.inv(expanded))
        ladj = transform.log_abs_det_jacobian(x, y)
        torch.testing.assert_close(ladj, transform.log_abs_det_jacobian(expanded, y))


def test_tensors_with_batches_of_their_own() -> None:
    R1, R2, bias = randn(3, 4, 4) / 2, randn(4, 4) / 2, randn(2, 1, 4)
    x = randn(5, 2, 3, D)
    for V in (randn(3, D), randn(3, 3, D), randn(2, 1, 3, D)):
        for transform in (SylvesterTransform.from_unconstrained(V, R1, R2, bias), QRTransform(V, randn(3, D, D))):
            y = transform(x)
            torch.testing.assert_close(y, by_definition(transform, x))
            torch.testing.assert_close(transform.inv(y), x)
            assert transform.log_abs_det_jacobian(x, y).shape == (5, 2, 3)


# Gradients.


@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
@pytest.mark.parametrize("name", ["householder", "sylvester", "qr"])
def test_gradients_of_all_inputs(name: str, inverse: bool, batch: tuple[int, ...]) -> None:
    shapes = {"householder": [], "sylvester": [(2, 2), (2, 2), (2,)], "qr": [(3, 3)]}[name]
    kind: Any = {
        "householder": HouseholderTransform, "sylvester": SylvesterTransform.from_unconstrained, "qr": QRTransform,
    }[name]  # fmt: skip
    tensors = [randn(*batch, *shape).requires_grad_() for shape in ((3,), (2, 3), *shapes)]

    def both(x: Tensor, *factors: Tensor) -> tuple[Tensor, Tensor]:
        transform = kind(*factors)
        y = transform.inv(x) if inverse else transform(x)
        return y, transform.log_abs_det_jacobian(*((y, x) if inverse else (x, y)))

    assert torch.autograd.gradcheck(both, tensors)


def test_gradient_of_an_encoder() -> None:
    """The gradient is the definition's, through the network that makes V, R₁, R₂ and b; zero for a zero reflector."""
    context, x = randn(6, 4), randn(6, D)
    encoder = nn.Linear(4, 2 * D + 9 + 9 + 3, dtype=torch.float64)

    def transform() -> SylvesterTransform:
        V, R1, R2, bias = encoder(context).split([2 * D, 9, 9, 3], dim=-1)
        V, R1, R2 = V.unflatten(-1, (2, D)), R1.unflatten(-1, (3, 3)), R2.unflatten(-1, (3, 3))
        return SylvesterTransform.from_unconstrained(V, R1, R2, bias)

    weights = list(encoder.parameters())
    y, ladj = transform().call_and_ladj(x)
    found = torch.autograd.grad(y.square().sum() - ladj.sum(), weights)
    y = by_definition(transform(), x)
    R1, R2, bias = transform().R1, transform().R2, transform().bias
    hidden = torch.tanh(times(R2 @ product(transform().V)[..., :3].mT, x) + bias)
    J = torch.eye(3, dtype=torch.float64) + R2 @ R1 * (1 - hidden.square()).unsqueeze(-1)  # Sylvester's identity
    expected = torch.autograd.grad(y.square().sum() - torch.linalg.slogdet(J).logabsdet.sum(), weights)
    torch.testing.assert_close(found, expected)

    V = (randn(6, 3, D) * torch.tensor([[1.0], [0], [1]])).requires_grad_()
    (gradient,) = torch.autograd.grad(HouseholderTransform(V)(x)[..., 0].sum(), V)
    assert (gradient[:, 1] == 0).all() and gradient[:, 0].abs().min() > 0


# Each of them.


def test_call_and_ladj_is_both() -> None:
    transform, x = sylvester((3,)), randn(3, D)
    y, ladj = transform.call_and_ladj(x)
    torch.testing.assert_close(y, transform(x), rtol=0, atol=0)
    torch.testing.assert_close(ladj, transform.log_abs_det_jacobian(x, y), rtol=0, atol=0)


def test_only_triangles_are_read() -> None:
    V, R1, R2, bias, x = randn(3, D), randn(3, 3), randn(3, 3), randn(3), randn(4, D)
    for kind in (SylvesterTransform, SylvesterTransform.from_unconstrained):
        options = {"validate_args": False} if kind is SylvesterTransform else {}
        whole, triangles = kind(V, R1, R2, bias, **options), kind(V, R1.triu(), R2.triu(), bias, **options)
        torch.testing.assert_close(whole(x), triangles(x), rtol=0, atol=0)
        torch.testing.assert_close(whole(x), by_definition(triangles, x))
    R = randn(D, D)
    torch.testing.assert_close(QRTransform(V, R)(x), QRTransform(V, R.triu())(x), rtol=0, atol=0)


@pytest.mark.parametrize("size", [0.0, 1.0, 30.0])
def test_inverse_of_sylvester(precise: torch.dtype, size: float) -> None:
    """Diagonals of size 0 leave R₁ and R₂ strictly triangular; those of size 30 are ±1, and here of one sign."""
    M, batch = 16, (50,)
    R1, R2 = (randn(*batch, M, M, dtype=precise).triu(1) / M for _ in range(2))
    first, second = size * randn(2, *batch, M, dtype=precise)
    if size == 30:  # −1 · 1 makes a map whose inverse has no bounded slope
        second = second.copysign(first)
    V, bias = randn(*batch, 4, 20, dtype=precise), randn(*batch, M, dtype=precise)
    transform = SylvesterTransform.from_unconstrained(V, R1 + first.diag_embed(), R2 + second.diag_embed(), bias)
    x = randn(*batch, 20, dtype=precise)
    torch.testing.assert_close(transform.inv(transform(x)), x, rtol=0, atol=1e-10 if precise == torch.float64 else 5e-6)


def test_increasing_equations_of_any_size() -> None:
    """Flat, steep, of any shift, exact and with a = 0: all at once. The left side meets the target to rounding."""
    n = 20000
    a = 10 ** (6 * torch.rand(n, dtype=torch.float64) - 3) * randn(n).sign()
    steep = 10 ** (6 * torch.rand(n, dtype=torch.float64) - 3) * a.sign()
    b = torch.where(torch.rand(n) < 0.5, -torch.rand(n, dtype=torch.float64) / a, steep)
    b[: n // 10] = -1 / a[: n // 10]  # a·b = −1, where the slope is zero at b·w + c = 0
    a[-10:] = 0
    c, target = 10 * randn(n), 10 ** (4 * torch.rand(n, dtype=torch.float64) - 2) * randn(n)
    c[::7], target[::7] = 0, 0  # at the start
    w = solve_increasing(a, b, c, target)
    error = w + a * torch.tanh(b * w + c) - target
    slope = 1 + (a * b).abs()  # a neighbouring number may be off by so much
    assert (error.abs() <= 4 * torch.finfo(w.dtype).eps * slope * (target.abs() + a.abs()) + 1e-300).all()
    assert (w[-10:] == target[-10:]).all()
    assert solve_increasing(*(t[:0] for t in (a, b, c, target))).shape == (0,)
    assert solve_increasing(*(torch.tensor(v) for v in (1.0, 1.0, 0.0, torch.nan))).isnan()


def test_diagonals_without_an_inverse() -> None:
    V, R, bias = randn(2, 3), torch.eye(2, dtype=torch.float64), randn(2)
    with pytest.raises(ValueError, match=r"above −1, or there is no inverse; got -1\.2"):
        SylvesterTransform(V, 1.2 * R, -R, bias)
    SylvesterTransform(V, 1.2 * R, -R / 2, bias)
    flat, zero = SylvesterTransform(V, R, -R, 0 * bias, validate_args=False), torch.zeros(3, dtype=torch.float64)
    assert (flat.inv(zero) == 0).all()  # x − tanh x = 0, where the slope is zero
    transform, x = SylvesterTransform.from_unconstrained(V, 1.2 * R, -3 * R, bias), randn(4, 3)
    torch.testing.assert_close(transform.R1, 0.999 * (1.2 * R).tanh())
    torch.testing.assert_close(transform.inv(transform(x)), x)


@pytest.mark.parametrize("event", [(4,), (2, 3), (8, 8)], ids=str)
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_images(event: tuple[int, ...], batch: tuple[int, ...]) -> None:
    """A 1×1 convolution with few positions and many, where W is formed."""
    transform = qr(batch, event_dim=1 + len(event))
    x = randn(2, *(batch or (3,)), D, *event).requires_grad_()
    y = transform(x)
    vectors = QRTransform(transform.V.reshape(*batch, *(1 for _ in event), 3, D), transform.R.reshape(
        *batch, *(1 for _ in event), D, D
    ))  # fmt: skip
    channels_last = x.movedim(-1 - len(event), -1)
    torch.testing.assert_close(y.movedim(-1 - len(event), -1), by_definition(vectors, channels_last))
    torch.testing.assert_close(transform.inv(y), x)
    logabsdet = transform.log_abs_det_jacobian(x, y)
    expected = vectors.log_abs_det_jacobian(channels_last, y.movedim(-1 - len(event), -1))
    torch.testing.assert_close(logabsdet, expected.flatten(-len(event)).sum(-1))
    assert logabsdet.shape == (2, 3)


def test_determinant_of_an_image() -> None:
    transform, x = qr(event_dim=3), randn(D, 2, 3)
    J = jacobian(transform, x).reshape(x.numel(), x.numel())
    torch.testing.assert_close(torch.linalg.slogdet(J).logabsdet, transform.log_abs_det_jacobian(x, transform(x)))


# With torch.distributions.


def test_density_is_that_of_the_normal_distribution_with_this_covariance() -> None:
    base = Independent(Normal(torch.zeros(D, dtype=torch.float64), torch.rand(3, D, dtype=torch.float64) + 0.5), 1)
    S = base.base_dist.scale.square().diag_embed()
    y = randn(3, D)
    for transform in (HouseholderTransform(randn(3, 4, D)), qr((3,))):
        W = own_jacobians(transform, y)
        expected = MultivariateNormal(torch.zeros(D, dtype=torch.float64), W @ S @ W.mT)
        torch.testing.assert_close(TransformedDistribution(base, transform).log_prob(y), expected.log_prob(y))


@pytest.mark.parametrize("make", [TRANSFORMS[name] for name in ("householder", "sylvester", "qr")])
def test_in_a_transformed_distribution(make: Any) -> None:
    """A batch of transforms makes one base a batch; sampled values get their density back, from the cache or not."""
    base = Independent(Normal(torch.zeros(D, dtype=torch.float64), 1.0), 1)
    transforms = [make((3,)), make(()), make((3,))]
    flow = TransformedDistribution(base, transforms)
    assert flow.batch_shape == (3,) and flow.event_shape == (D,)
    y = flow.rsample((4,))
    assert y.shape == (4, 3, D)
    x, total = y, torch.zeros(4, 3, dtype=torch.float64)
    for transform in reversed(transforms):
        x, y_after = transform.inv(x), x
        total += transform.log_abs_det_jacobian(x, y_after)
    torch.testing.assert_close(flow.log_prob(y), base.log_prob(x) - total)
    cached = TransformedDistribution(base, [transform.with_cache() for transform in transforms])
    y = cached.rsample((4,))
    torch.testing.assert_close(cached.log_prob(y), flow.log_prob(y))


def test_density_of_sylvester_has_integral_one() -> None:
    flow = TransformedDistribution(Normal(torch.zeros(2, dtype=torch.float64), 1.0), sylvester(M=2, d=2))
    grid = torch.linspace(-9, 9, 361, dtype=torch.float64)
    points = torch.cartesian_prod(grid, grid)
    total = flow.log_prob(points).exp().sum() * (grid[1] - grid[0]) ** 2
    torch.testing.assert_close(total, torch.ones_like(total), rtol=1e-3, atol=0)


def test_cache() -> None:
    for make in (TRANSFORMS["householder"], sylvester, qr):
        transform = make((3,)).with_cache()
        x = randn(3, D)
        assert transform.inv(transform(x)) is x
        again = transform.with_cache(0)
        torch.testing.assert_close(again(x), transform(x), rtol=0, atol=0)
        assert type(again) is type(transform) and again.inv(again(x)) is not x
    assert qr(event_dim=3).with_cache().event_dim == 3


# Arguments.

V, R, BIAS = torch.randn(4, 5), torch.zeros(3, 3), torch.zeros(3)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: HouseholderTransform(V[0]), ValueError, r"`V` should have shape .* got \(5,\)"),
        (lambda: HouseholderTransform([1.0]), TypeError, "`V` should be a tensor; got list"),
        (lambda: SylvesterTransform(V, R[:2], R, BIAS), ValueError, r"`R1` should .* 1 ≤ m ≤ 5.*got \(2, 3\)"),
        (lambda: SylvesterTransform(V, torch.zeros(6, 6), R, BIAS), ValueError, r"`R1` should .* got \(6, 6\)"),
        (lambda: SylvesterTransform(V, R, R[:2, :2], BIAS), ValueError, r"`R2` .* \(\*b, 3, 3\).* got \(2, 2\)"),
        (lambda: SylvesterTransform(V, R, R, BIAS[:2]), ValueError, r"`bias` .* \(\*b, 3\) .* got \(2,\)"),
        (lambda: SylvesterTransform(V, R, R, None), TypeError, "`bias` should be a tensor; got NoneType"),
        (lambda: SylvesterTransform(V, None, R, BIAS), TypeError, "`R1` should be a tensor; got NoneType"),
        (lambda: SylvesterTransform(V, R, R.double(), BIAS), TypeError, "`R2` should be torch.float32 on cpu.*float64"),
        (lambda: SylvesterTransform(V.expand(2, 4, 5), R, R.expand(3, 3, 3), BIAS), ValueError, "should broadcast"),
        (lambda: QRTransform(V, R), ValueError, r"`R` should have shape \(\*b, 5, 5\) .* got \(3, 3\)"),
        (lambda: QRTransform(V, torch.zeros(5, 4)), ValueError, r"`R` should .* got \(5, 4\)"),
        (lambda: QRTransform(V, torch.zeros(5, 5), 4), ValueError, "`event_dim` should be 1, 2 or 3; got 4"),
    ],
)  # fmt: skip
def test_errors_say_what_was_expected(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("name", ["householder", "sylvester", "qr"])
def test_wrong_input(name: str) -> None:
    transform = TRANSFORMS[name]((3,))
    for function in (transform, transform.inv, lambda x: transform.log_abs_det_jacobian(x, x)):
        with pytest.raises(ValueError, match=r"size 5 in dimension -1 to match `V` of shape .* got shape \(3, 4\)"):
            function(randn(3, 4))
        with pytest.raises(ValueError, match="batches of `x` and `V` should broadcast"):
            function(randn(2, 5))
    with pytest.raises(ValueError, match="size 5 in dimension -3"):
        qr(event_dim=3)(randn(5, 5))


@pytest.mark.parametrize("kind", [HouseholderTransform, SylvesterTransform, QRTransform])
def test_examples(kind: Any) -> None:
    names = {"torch": torch, "nn": nn, kind.__name__: kind}
    (example,) = doctest.DocTestFinder(recurse=False).find(kind, kind.__name__, globs=names)
    result = doctest.DocTestRunner().run(example)
    assert result.attempted > 3 and not result.failed
