"""benchmarks/precision_policies.py: its roundings from their definitions, and what each policy leaves of Q."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fasth.reflections.definition import householder

EPS = 2.0**-10  # from 1 to the next TF32 number
SPECIAL = [0.0, -0.0, math.inf, -math.inf]


@pytest.fixture(scope="module")
def policies() -> Iterator[Any]:
    """benchmarks/precision_policies.py, imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
        import precision_policies

        yield precision_policies


def by_definition(value: float, bits: int, whole: Callable[[Fraction], int]) -> float:
    """``value`` as a whole number of units in the last of ``bits`` places after the binary point, in exact fractions.

    ``whole`` makes a whole number of a nonnegative fraction. Below 2⁻¹²⁶ the unit no longer shrinks, as in float32.
    """
    exponent = max(math.frexp(value)[1] - 1, -126)
    unit = Fraction(2) ** (exponent - bits)
    return math.copysign(float(whole(abs(Fraction(value)) / unit) * unit), value)


def nearest_or_away(units: Fraction) -> int:
    return math.floor(units + Fraction(1, 2))


def samples() -> list[float]:
    """float32 numbers of all sizes, all bits random; subnormal ones; the largest that stay finite in 10 bits."""
    ordinary = torch.randn(1000) * torch.exp2(torch.randint(-120, 120, (1000,)))
    subnormal = torch.randn(100) * 2.0**-130
    edges = torch.tensor([2.0**-149, -(2.0**-126), 2.0**127, (2 - EPS) * 2.0**127, -1e38])
    return torch.cat((ordinary, subnormal, edges)).tolist()


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    return torch.equal(actual.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize(
    ("name", "bits", "whole"),
    [("tf32", 10, nearest_or_away), ("tf32_truncated", 10, math.floor), ("bf16", 7, round)],  # round: ties to even
)
def test_keeps_the_leading_bits(policies: Any, name: str, bits: int, whole: Callable[[Fraction], int]) -> None:
    values = samples()
    expected = torch.tensor([by_definition(value, bits, whole) for value in values])
    assert same_bits(getattr(policies, name)(torch.tensor(values)), expected)


def test_ties_and_what_lies_beside_them(policies: Any) -> None:
    tie = 1 + EPS / 2
    values = torch.tensor([tie, -tie, tie + 2.0**-23, tie - 2.0**-23, 1 + 3 * EPS / 2, 2 - EPS / 2])
    assert policies.tf32(values).tolist() == [1 + EPS, -1 - EPS, 1 + EPS, 1, 1 + 2 * EPS, 2]
    assert policies.tf32_truncated(values).tolist() == [1, -1, 1, 1, 1 + EPS, 2 - EPS]


def test_the_largest_number(policies: Any) -> None:
    largest = torch.tensor([torch.finfo(torch.float32).max])
    assert policies.tf32(largest).item() == math.inf
    assert policies.tf32_truncated(largest).item() == (2 - EPS) * 2.0**127


@pytest.mark.parametrize("name", ["tf32", "tf32_truncated", "bf16"])
def test_what_has_few_bits_stays(policies: Any, name: str) -> None:
    values = torch.cat((torch.tensor(SPECIAL), torch.exp2(torch.arange(-126, 128)), -torch.arange(128.0)))
    assert same_bits(getattr(policies, name)(values), values)


@pytest.mark.parametrize("name", ["tf32", "tf32_truncated", "bf16"])
def test_every_nan_stays_one(policies: Any, name: str) -> None:
    bits = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, -0x7FFFFF, -1])  # the last two have their sign bit set
    nans = bits.to(torch.int32).view(torch.float32)
    assert nans.isnan().all()
    assert getattr(policies, name)(nans).isnan().all()


def test_rounds_strided_tensors(policies: Any) -> None:
    A = torch.randn(8, 6)
    assert torch.equal(policies.tf32(A.mT), policies.tf32(A).mT)


@pytest.mark.parametrize(("rounding", "count", "bits"), [("tf32x3", 2, 22), ("bf16x3", 2, 16), ("bf16x6", 3, 24)])
def test_parts_add_up(policies: Any, rounding: str, count: int, bits: int) -> None:
    """A part with p bits after the binary point leaves at most 2⁻ᵖ⁻¹ of the number to the next."""
    x = torch.randn(1000)
    found = policies.parts(x, rounding)
    assert len(found) == count
    left = (x.double() - sum(part.double() for part in found)).abs()
    assert (left <= 2.0**-bits * x.double().abs()).all()


def test_ieee_is_the_plain_product(policies: Any) -> None:
    A, B = torch.randn(20, 300), torch.randn(300, 30)
    assert torch.equal(policies.product(A, B, "ieee"), A @ B)


@pytest.mark.parametrize(
    ("rounding", "low", "high"),
    [
        ("tf32x3", 0, 2.0**-21),
        ("bf16x6", 0, 2.0**-21),
        ("bf16x3", 2.0**-19, 2.0**-15),
        ("tf32", 2.0**-13, 2.0**-10),
        ("tf32 truncated", 2.0**-12, 2.0**-9),
        ("bf16", 2.0**-10, 2.0**-7),
    ],
)
def test_error_of_a_product(policies: Any, rounding: str, low: float, high: float) -> None:
    """At most what the dropped bits and the left out products allow, entry by entry, and in the norm not much less."""
    A, B = torch.randn(20, 300), torch.randn(300, 30)
    exact = A.double() @ B.double()
    error = policies.product(A, B, rounding).double() - exact
    assert (error.abs() <= high * (A.double().abs() @ B.double().abs())).all()
    assert error.norm() >= low * exact.norm()


def test_leaves_out_the_product_of_the_low_parts(policies: Any) -> None:
    """(1 + ε)² − (1 + 2ε) = ε², and ε is the low part of 1 + ε."""
    e = 2.0**-12
    A, B = torch.tensor([[1 + e, -1]]), torch.tensor([[1 + e], [1 + 2 * e]])
    assert policies.product(A, B, "tf32x3").item() == 0
    assert policies.product(A, B, "bf16x6").item() == e**2  # where it is one of the six


def test_products_of_whole_numbers_are_exact(policies: Any) -> None:
    A, B = torch.randint(-100, 100, (9, 50)).float(), torch.randint(-100, 100, (50, 9)).float()
    for rounding in policies.ROUNDINGS:
        assert torch.equal(policies.product(A, B, rounding), A @ B)


@pytest.mark.parametrize(("r", "d", "k"), [(12, 12, 4), (10, 12, 4), (7, 5, 3), (1, 3, 16)])
def test_simulates_the_algorithm(policies: Any, r: int, d: int, k: int) -> None:
    """In float64, x Qᵀ and ∂V are those of the definition."""
    x, V, g = (torch.randn(n, d, dtype=torch.float64) for n in (6, r, 6))
    blocks = policies.blocks_of(V, k, policies.Policy())
    out = policies.multiply(x, blocks, policies.Policy())
    V.requires_grad_()
    expected = householder(x, V)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        policies.gradient(g, out, blocks, policies.Policy()), torch.autograd.grad(expected, V, g)[0]
    )


@pytest.fixture(scope="module")
def found(policies: Any) -> dict[str, Any]:
    """The figures of every policy at d = 64."""
    problem = policies.problem(64)
    return {name: policies.figures(problem, policy, 16) for name, policy in policies.POLICIES.items()}


@pytest.mark.parametrize("name", ["all ieee", "all tf32x3", "all bf16x6"])
def test_orthogonal_to_float32(found: dict[str, Any], name: str) -> None:
    measure, largest, *errors = found[name]
    assert measure < 3
    assert largest < 1e-5
    assert max(errors) < 1e-5


@pytest.mark.parametrize("group", ["gram", "T", "sweep"])
def test_one_group_that_decides_Q_is_enough_to_lose_it(found: dict[str, Any], group: str) -> None:
    assert found[f"tf32 in {group} alone"].measure > 30


@pytest.mark.parametrize("name", ["all tf32", "all tf32 truncated", "all bf16"])
def test_nothing_is_left_of_orthogonality(found: dict[str, Any], name: str) -> None:
    assert found[name].measure > 300


@pytest.mark.parametrize("name", ["speed: tf32 in gradient, formed", "speed, truncated"])
def test_speed_leaves_Q_as_it_is(found: dict[str, Any], name: str) -> None:
    ieee, speed = found["all ieee"], found[name]
    assert speed[:3] == ieee[:3]  # Q, and x Qᵀ by the sweep
    assert 1e-5 < speed.formed < 2e-3
    assert 1e-5 < speed.dV < 2e-3


def test_truncating_is_worse_than_rounding(found: dict[str, Any]) -> None:
    for rounded, truncated in zip(found["all tf32"], found["all tf32 truncated"], strict=True):
        assert truncated > 2 * rounded


def test_prints_a_markdown_table(
    policies: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["command", "--sizes", "6", "17", "--block-size", "4", "--parallel"])
    policies.main()
    header, rule, *lines = capsys.readouterr().out.splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 * len(policies.POLICIES)
    assert {line.count("|") for line in (header, rule, *table)} == {len(policies.COLUMNS) + 1}
    assert "nan" not in "".join(table)
    for words in (torch.__version__, "nearly parallel", "blocks of 4", "not simulated"):
        assert words in lines[-1]


def test_products_of_the_formed_weight_are_rounded(policies: Any) -> None:
    """IEEE products pass LAPACK's test, TF32 ones do not, and leave W as exact as bfloat16 has to be."""
    ieee, tf32 = (policies.formed_figures(64, False, rounding) for rounding in ("ieee", "tf32"))
    assert ieee.measure < 30 < tf32.measure
    assert ieee.W < 1e-5 and 1e-4 < tf32.W < 2**-8
    assert tf32.rounded < 1.5 * ieee.rounded and 1e-4 < tf32.dR < 2**-8
