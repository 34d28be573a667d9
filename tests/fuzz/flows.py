"""Transforms for normalizing flows: values, inverses and log-determinants against their definitions in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasth import LinearOrthogonal, LinearSVD, LinearSymmetric, SVDTransform, spectrum
from fasth.flows import HouseholderTransform, QRTransform, SylvesterTransform
from fasth.tools.problems import from_definition
from fasth.tools.twins import definition_weight
from fuzz.compare import check, doubled, largest_row, norm, tolerance, values_and_gradients, wanting
from fuzz.draws import PRECISE, Draw
from fuzz.functions import check_product
from fuzz.layers import moved, twin_of


def layer_flow_case(draw: Draw) -> None:
    """``SVDTransform`` of a square layer: y, the inverse of y, and log |det|."""
    dtype, d = draw.dtype(PRECISE), draw.size(20)
    kind = draw.choice([LinearSVD, LinearSymmetric, LinearOrthogonal])
    options: dict[str, Any] = {} if kind is LinearOrthogonal else {"spectrum": spectrum.between(0.5, 2)}
    options["reflectors"] = draw.choice(["compact", "full"])
    layer: Any = moved(draw, kind(*((d,) if kind is LinearSymmetric else (d, d)), dtype=dtype, **options))
    flow = SVDTransform(layer, cache_size=draw.choice([0, 1]))
    x = draw.numbers(*draw.choice([(), (3,), (2, 2)]), d, dtype=dtype)
    draw.note(layer, f"x {tuple(x.shape)}")
    twin = twin_of(layer)
    W, bias = definition_weight(twin).detach(), twin.bias.detach()
    y, relative = flow(x), tolerance(dtype, 4 * d + 10)
    size = 2 * norm(x) + norm(bias)
    check("y", y, x.double() @ W.mT + bias, size, relative)
    y = y.detach().clone()  # a new tensor: the transform's cache does not know its inverse
    inverse = torch.linalg.solve(W, (y.double() - bias).reshape(-1, d).mT).mT.reshape(y.shape)
    check("inverse", flow.inv(y), inverse, 4 * size, relative)
    logabsdet = torch.linalg.slogdet(W).logabsdet.expand(x.shape[:-1])
    check("log |det|", flow.log_abs_det_jacobian(x, y), logabsdet, float(d), relative)
    draw.actions["SVDTransform"] += 1


def reflector_flow_case(draw: Draw) -> None:
    """Flows with reflectors for each sample."""
    dtype, d = draw.dtype(PRECISE), draw.size(20)
    batch: tuple[int, ...] = draw.choice([(), (3,), (2, 2)])
    r = draw.choice([d, draw.between(0, d + 2)])
    samples: tuple[int, ...] = draw.choice([(), (2,), (3, 2)])
    kind = draw.choice([_householder, _sylvester, _qr])
    draw.note(kind.__name__, f"samples {samples}, batch {batch}")
    draw.actions[kind.__name__.removeprefix("_")] += 1
    V = draw.reflectors(*batch, r, d, dtype=dtype)
    kind(draw, V, draw.arranged(draw.numbers(*samples, *batch, d, dtype=dtype)))


def _Q(V: Tensor) -> Tensor:
    """H₁⋯H_r: (*b, d, d)."""
    return from_definition(torch.eye(V.shape[-1], dtype=V.dtype), V).mT


def _times(A: Tensor, x: Tensor) -> Tensor:
    return (A @ x.unsqueeze(-1)).squeeze(-1)


def _householder(draw: Draw, V: Tensor, x: Tensor) -> None:
    x, V = wanting(draw, x, V)
    inverse = draw.chance(0.5)

    def flow(x: Tensor, V: Tensor) -> Tensor:
        transform = HouseholderTransform(V)
        return transform.inv(x) if inverse else transform(x)

    actual = values_and_gradients(draw, flow, (x, V))
    twin = lambda x, V: _times(_Q(V).mT if inverse else _Q(V), x)  # noqa: E731
    check_product(actual, values_and_gradients(draw, twin, doubled((x, V)), actual[2]), x, V)
    zero = HouseholderTransform(V).log_abs_det_jacobian(x, x)
    assert not zero.any() and zero.shape == x.shape[:-1], f"log |det|: {zero}, not zeros"


def _sylvester(draw: Draw, V: Tensor, x: Tensor) -> None:
    dtype, d, batch = V.dtype, V.shape[-1], V.shape[:-2]
    M = draw.between(1, d)
    R1, R2 = (draw.numbers(*batch, M, M, dtype=dtype) for _ in range(2))
    bias = draw.numbers(*batch, M, dtype=dtype)
    flow = SylvesterTransform.from_unconstrained(V, R1, R2, bias)
    Q, R1, R2, bias = _Q(V.double())[..., :M], flow.R1.double(), flow.R2.double(), bias.double()

    def twin(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(_times(R2 @ Q.mT, x) + bias)
        diagonals = R1.diagonal(dim1=-2, dim2=-1) * R2.diagonal(dim1=-2, dim2=-1)
        return x + _times(Q @ R1, hidden), torch.log1p(diagonals * (1 - hidden.square())).sum(-1)

    expected, logabsdet = twin(x.double())
    # The factor by which R₁ tanh(R₂ ·) enlarges the roundings of Qᵀx; log(1 + ·) has a slope of at most 1/(1 − 0.999²).
    a, b = (float(torch.linalg.matrix_norm(R).max()) for R in (R1, R2))
    relative, size = tolerance(dtype, V.shape[-2] + 2 * M + 10), (1 + a * (1 + b)) * (1 + largest_row(x) + norm(bias))
    check("y", flow(x), expected, size, relative)
    slope = float((1 / (1 + R1.diagonal(dim1=-2, dim2=-1) * R2.diagonal(dim1=-2, dim2=-1)).clamp(max=1)).max())
    check(
        "log |det|",
        flow.log_abs_det_jacobian(x, x),
        logabsdet,
        M * slope * (1 + b) * (1 + largest_row(x)) * 4,
        relative,
    )
    back = flow.inv(x)  # the x whose y is given: the residual is small, whatever the condition
    size = (1 + a * (1 + b)) * (1 + largest_row(x) + norm(bias) + a)
    check("y of the inverse", twin(back.double())[0].to(dtype), x.double(), size, relative)


def _qr(draw: Draw, V: Tensor, x: Tensor) -> None:
    dtype, d, batch = V.dtype, V.shape[-1], V.shape[:-2]
    R = draw.numbers(*batch, d, d, dtype=dtype) / 2
    flow = QRTransform(V, R)
    R64 = R.double().triu(1) + R.double().diagonal(dim1=-2, dim2=-1).exp().diag_embed()
    W = _Q(V.double()) @ R64
    relative, largest = tolerance(dtype, V.shape[-2] + 2 * d + 10), float(torch.linalg.matrix_norm(R64).max())
    check("y", flow(x), _times(W, x.double()), largest * largest_row(x), relative)
    sums = R.double().diagonal(dim1=-2, dim2=-1)
    check(
        "log |det|",
        flow.log_abs_det_jacobian(x, x),
        sums.sum(-1).expand(x.shape[:-1]),
        float(sums.abs().sum()),
        relative,
    )
    back = flow.inv(x)
    size = largest * largest_row(back) + largest_row(x)
    check("y of the inverse", _times(W, back.double()).to(dtype), x.double(), size, relative)
