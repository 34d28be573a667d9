"""Simulates on the CPU the orthogonality that is left when products round their inputs, as tensor cores do.

The products of blocked reflections fall into five groups, and a policy gives each group a rounding. For every policy
the table shows how orthogonal Q is, by LAPACK's measure, whose tests accept 30, and the relative errors of x Qᵀ and ∂V
against float64. src/fasth/reflections/README.md derives the formulas, in the same notation.

Run: python benchmarks/precision_policies.py
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import product as product_of
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fasth import householder
from fasth.reflections.formed import columns_at_once, svd_at_once
from fasth.reflections.plan import COMPACT

aten = torch.ops.aten

ROWS = 32
BLOCK_SIZE = 16  # that of the Triton kernels' factors

# TF32 keeps 10 of float32's 23 bits after the binary point, and its exponents.
DROPPED = 2**13 - 1
HALF = 2**12


def tf32(x: Tensor) -> Tensor:
    """x to the nearest TF32 number, ties away from zero: what the instruction cvt.rna.tf32.f32 does."""
    # Sign and magnitude are apart in the bits of a float32, so adding to them goes away from zero for either sign.
    return _of_bits((x.view(torch.int32) + HALF) & ~DROPPED, x)


def tf32_truncated(x: Tensor) -> Tensor:
    """x to the next TF32 number towards zero: tensor cores do not read the other bits of a float32."""
    return _of_bits(x.view(torch.int32) & ~DROPPED, x)


def _of_bits(bits: Tensor, x: Tensor) -> Tensor:
    """The float32 with these bits, but x where it is infinite or NaN: a NaN may have no bits but those dropped."""
    return torch.where(x.isfinite(), bits.view(torch.float32), x)


def bf16(x: Tensor) -> Tensor:
    """x to the nearest bfloat16 number, ties to even."""
    return x.bfloat16().float()


# The rounding of one number, and how many such numbers represent each float32.
ROUNDINGS = {
    "tf32x3": (tf32, 2),
    "tf32": (tf32, 1),
    "tf32 truncated": (tf32_truncated, 1),
    "bf16x6": (bf16, 3),
    "bf16x3": (bf16, 2),
    "bf16": (bf16, 1),
}


def parts(x: Tensor, rounding: str) -> list[Tensor]:
    """x ≈ x₀ + x₁ + ⋯, each part what the ones before it leave of x, rounded."""
    rounded, count = ROUNDINGS[rounding]
    found = []
    for _ in range(count):
        found.append(rounded(x))
        x = x - found[-1]
    return found


def product(A: Tensor, B: Tensor, rounding: str) -> Tensor:
    """A B = Σ A_i B_j over i + j < n, with A and B in n parts: 1, 3 or 6 products; ``ieee`` is the plain product.

    Products of two parts are exact in float32 and are summed in float32, the small ones first.
    """
    if rounding == "ieee":
        return A @ B
    A_parts, B_parts = parts(A, rounding), parts(B, rounding)
    n = len(A_parts)
    pairs = sorted(((i, j) for i in range(n) for j in range(n - i)), key=sum, reverse=True)
    first, *others = (A_parts[i] @ B_parts[j] for i, j in pairs)
    return sum(others, first)


class Policy(NamedTuple):
    """The rounding of each group of products."""

    gram: str = "ieee"  # G = Y Yᵀ
    T: str = "ieee"  # −T₁₁ B₁₂ T₂₂
    sweep: str = "ieee"  # A Yᵀ, (A Yᵀ) Tᵀ and Z Y, forward and backward
    gradient: str = "ieee"  # the products of ∂V that nothing else depends on
    formed: str = "ieee"  # x Qᵀ, where Q was formed first


def everything(rounding: str) -> Policy:
    return Policy(*[rounding] * len(Policy._fields))


POLICIES = {
    "all ieee": Policy(),
    "all tf32x3": everything("tf32x3"),
    "all bf16x6": everything("bf16x6"),
    **{f"tf32 in {group} alone": Policy(**{group: "tf32"}) for group in Policy._fields},
    "speed: tf32 in gradient, formed": Policy(gradient="tf32", formed="tf32"),
    "speed, truncated": Policy(gradient="tf32 truncated", formed="tf32 truncated"),
    "all bf16x3": everything("bf16x3"),
    "all tf32": everything("tf32"),
    "all tf32 truncated": everything("tf32 truncated"),
    "all bf16": everything("bf16"),
}


class Block(NamedTuple):
    """H₁ ⋯ H_k = I − Yᵀ T Y."""

    Y: Tensor  # (k, d)
    T: Tensor  # (k, k)


def blocks_of(V: Tensor, k: int, policy: Policy) -> list[Block]:
    """The reflectors V: (r, d) in blocks of k: T = B⁻¹ with B = striu(G) + ½ diag(G), G = Y Yᵀ.

    fasth divides rows by powers of two first. No rounding here depends on that, and Gaussian rows do not need it.
    """
    blocks = []
    for Y in V.split(k):
        G = product(Y, Y.mT, policy.gram)
        blocks.append(Block(Y, inverse(G.triu(1) + G.diagonal().diag() / 2, policy.T)))
    return blocks


def inverse(B: Tensor, rounding: str) -> Tensor:
    """B⁻¹ of an upper triangular B, by halves: T₁₁ and T₂₂ are the inverses of B₁₁ and B₂₂, T₁₂ = −T₁₁ B₁₂ T₂₂."""
    k = len(B)
    if k == 1:
        return 1 / B
    h = k // 2
    T = torch.zeros_like(B)
    T[:h, :h], T[h:, h:] = inverse(B[:h, :h], rounding), inverse(B[h:, h:], rounding)
    T[:h, h:] = -product(product(T[:h, :h], B[:h, h:], rounding), T[h:, h:], rounding)
    return T


def step(A: Tensor, Y: Tensor, T: Tensor, rounding: str) -> tuple[Tensor, Tensor]:
    """Rows through one block: O = A − Z Y and Z = A Yᵀ T; with Tᵀ for T, through its transpose."""
    Z = product(product(A, Y.mT, rounding), T, rounding)
    return A - product(Z, Y, rounding), Z


def multiply(x: Tensor, blocks: list[Block], policy: Policy) -> Tensor:
    """x Qᵀ by a sweep over the blocks, the last first.  x: (m, d) → (m, d)."""
    for Y, T in reversed(blocks):
        x, _ = step(x, Y, T.mT, policy.sweep)
    return x


def gradient(g: Tensor, out: Tensor, blocks: list[Block], policy: Policy) -> Tensor:
    """∂V: (r, d) from the gradient g of out = x Qᵀ, with ∂Y = N Y − Zᵀ g − Rᵀ O in each block.

    g and the output go back through the blocks together, as in the kernels, so an error in the sweep is in both.
    """
    rows, dV = torch.cat((g, out)), []
    for Y, T in blocks:
        (g, O), (rows, RZ) = rows.chunk(2), step(rows, Y, T, policy.sweep)
        R, Z = RZ.chunk(2)
        Z = -Z  # the way back finds −Z
        M = product(Z.mT, R, policy.gradient)
        N = (M - M.mT).tril(-1)
        dY = product(N, Y, policy.gradient) - product(Z.mT, g, policy.gradient) - product(R.mT, O, policy.gradient)
        dV.append(dY)
    return torch.cat(dV)


class Problem(NamedTuple):
    """Reflectors, rows and gradients in float32, and what float64 makes of them."""

    V: Tensor  # (d, d)
    x: Tensor  # (ROWS, d)
    g: Tensor  # (ROWS, d)
    out: Tensor  # x Qᵀ
    dV: Tensor


def problem(d: int, parallel: bool = False) -> Problem:
    """Gaussian reflectors, which are nearly orthogonal for large d, or nearly ``parallel`` ones, 8° apart."""
    torch.manual_seed(0)
    V, x, g = torch.randn(d, d), torch.randn(ROWS, d), torch.randn(ROWS, d)
    if parallel:
        V += 10 * torch.randn(d)
    reference = V.double().requires_grad_()
    out = householder(x.double(), reference)
    (dV,) = torch.autograd.grad(out, reference, g.double())
    return Problem(V, x, g, out.detach(), dV)


def residual_of(Q: Tensor) -> Tensor:
    """QᵀQ − I in float64."""
    residual = Q.double().mT @ Q.double()
    residual.diagonal().sub_(1)
    return residual


def measure_of(residual: Tensor) -> float:
    """‖QᵀQ − I‖₁ / (d·eps) with the eps of float32."""
    return (torch.linalg.matrix_norm(residual, 1) / (len(residual) * torch.finfo(torch.float32).eps)).item()


class Figures(NamedTuple):
    measure: float  # ‖QᵀQ − I‖₁/(d·eps)
    largest: float  # of the entries of QᵀQ − I
    swept: float  # the relative error of x Qᵀ by a sweep over the rows of x
    formed: float  # of x Qᵀ by Q, formed first
    dV: float  # of ∂V


def figures(example: Problem, policy: Policy, k: int) -> Figures:
    V, x, g = example.V, example.x, example.g
    blocks = blocks_of(V, k, policy)
    Qt = multiply(torch.eye(len(V)), blocks, policy)
    out = multiply(x, blocks, policy)
    residual = residual_of(Qt.mT)
    return Figures(
        measure_of(residual),
        residual.abs().max().item(),
        relative(out, example.out),
        relative(product(x, Qt, policy.formed), example.out),
        relative(gradient(g, out, blocks, policy), example.dV),
    )


def relative(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖."""
    return ((actual - expected).norm() / expected.norm()).item()


# The places of the factors among a product's arguments.
FACTORS = {aten.mm.default: (0, 1), aten.bmm.default: (0, 1), aten.baddbmm.default: (1, 2)}


class RoundedProducts(TorchDispatchMode):
    """Rounds the factors of every matrix product within it; triangular solves are left alone."""

    def __init__(self, rounding: str) -> None:
        super().__init__()
        self.rounding = rounding

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = () if self.rounding == "ieee" else FACTORS.get(operation, ())
        rounded, _ = ROUNDINGS.get(self.rounding, (None, 0))
        args = [rounded(t.contiguous()) if i in places else t for i, t in enumerate(args)]
        return operation(*args, **(kwargs or {}))


def formed_with_gradient(R: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """W = U Vᵀ of the compact reflectors in R, and the gradient of R."""
    R = R.requires_grad_()
    W = svd_at_once(R, None, None, COMPACT)
    (dR,) = torch.autograd.grad(W, R, g)
    return W.detach(), dR


class FormedFigures(NamedTuple):
    measure: float  # ‖UᵀU − I‖₁/(d·eps)
    stored: float  # the same of U rounded to bfloat16
    largest: float  # of the entries of UᵀU − I
    W: float  # the relative error of W
    rounded: float  # of W after it was rounded to bfloat16
    dR: float  # of the gradient of the reflectors


def formed_figures(d: int, parallel: bool, rounding: str) -> FormedFigures:
    """Measures W = U Vᵀ as ``fasth.reflections.formed`` computes it from one matrix of compact reflectors."""
    torch.manual_seed(0)
    R, g = torch.randn(d, d) + (10 * torch.randn(d) if parallel else 0), torch.randn(d, d)
    with RoundedProducts(rounding):
        U = columns_at_once(R.mT, d, COMPACT)
        W, dR = formed_with_gradient(R, g)
    expected, reference = formed_with_gradient(R.double(), g.double())
    residual, stored = residual_of(U), residual_of(U.bfloat16())
    return FormedFigures(
        measure_of(residual),
        measure_of(stored),
        residual.abs().max().item(),
        relative(W, expected),
        relative(W.bfloat16(), expected),
        relative(dR, reference),
    )


FORMED_COLUMNS = {
    "d": 4,
    "reflectors": 15,
    "products": 14,
    "‖UᵀU − I‖₁/(d·eps)": 18,
    "U in bfloat16": 13,
    "max. abs. of UᵀU − I": 20,
    "W": 7,
    "W, in bfloat16": 14,
    "∂R": 7,
}


def print_formed(sizes: Sequence[int]) -> None:
    print(row(*FORMED_COLUMNS, columns=FORMED_COLUMNS))
    print(row(*("-" * width for width in FORMED_COLUMNS.values()), columns=FORMED_COLUMNS))
    for d, parallel, rounding in product_of(sizes, (False, True), ("ieee", "tf32", "tf32 truncated")):
        measure, stored, *errors = formed_figures(d, parallel, rounding)
        cells = str(d), "nearly parallel" if parallel else "Gaussian", rounding, f"{measure:,.2f}", f"{stored:,.0f}"
        print(row(*cells, *(f"{error:.1e}" for error in errors), columns=FORMED_COLUMNS), flush=True)


COLUMNS = {
    "d": 4,
    "products": 31,
    "‖QᵀQ − I‖₁/(d·eps)": 18,
    "max. abs. of QᵀQ − I": 20,
    "x Qᵀ, swept": 11,
    "x Qᵀ, formed": 12,
    "∂V": 7,
}


def row(*cells: str, columns: Mapping[str, int] = COLUMNS) -> str:
    """A row of a markdown table, in columns of fixed width, so that rows can be printed as they come."""
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, columns.values(), strict=True)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256, 1024, 2048], help="d, of V: (d, d)")
    parser.add_argument("--block-size", type=int, default=BLOCK_SIZE, help="reflections in a block")
    parser.add_argument("--parallel", action="store_true", help="nearly parallel reflectors")
    parser.add_argument("--formed", action="store_true", help="W of both sides, formed at once as on a GPU")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("highest")  # or `ieee` would not be that
    if arguments.formed:
        print_formed(arguments.sizes)
        return
    print(row(*COLUMNS))
    print(row(*("-" * width for width in COLUMNS.values())))
    for d in arguments.sizes:
        example = problem(d, arguments.parallel)
        for name, policy in POLICIES.items():
            measure, *errors = figures(example, policy, arguments.block_size)
            print(row(str(d), name, f"{measure:,.2f}", *(f"{error:.1e}" for error in errors)), flush=True)
    reflectors = f"{'nearly parallel' if arguments.parallel else 'Gaussian'} reflectors"
    print(
        f"\ntorch {torch.__version__}; full {reflectors} in blocks of {arguments.block_size}, {ROWS} rows of x. "
        "A simulation on the CPU: inputs are rounded; how tensor cores round sums is not simulated."
    )


if __name__ == "__main__":
    main()
