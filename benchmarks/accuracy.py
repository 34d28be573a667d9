"""Measures how orthogonal Q is: ‖QᵀQ − I‖₁ / (d·eps), LAPACK's own measure, whose test threshold is 30.

LAPACK's Q, for the same reflectors, stands beside ours. Run: python benchmarks/accuracy.py
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from scipy.linalg import lapack

from fasth import householder
from fasth.tools.twins import orthogonality


def lapack_reflectors(d: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The triangular reflectors V: (d, d) of a Gaussian matrix's QR factorisation, and LAPACK's Q made of them."""
    matrix = torch.randn(d, d, dtype=torch.float64).to(dtype).numpy()
    geqrf, orgqr = lapack.get_lapack_funcs(("geqrf", "orgqr"), (matrix,))
    qr, tau, _, info = geqrf(matrix, lwork=64 * d)
    assert info == 0
    V = np.triu(qr.T, 1) + np.diag(tau != 0)  # tau = 0 stands for the identity, as a zero reflector does here
    Q, _, info = orgqr(qr, tau, lwork=64 * d)
    assert info == 0
    return torch.from_numpy(V.astype(matrix.dtype)), torch.from_numpy(Q)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64, 256, 1024, 2048])
    sizes = parser.parse_args().sizes
    torch.manual_seed(0)
    print(f"{'dtype':>8} {'d':>5} {'full':>8} {'triangular':>11} {'LAPACK':>8} {'‖Q − Q_LAPACK‖/(d·eps)':>24}")
    for dtype in (torch.float32, torch.float64):
        for d in sizes:
            V, reference = lapack_reflectors(d, dtype)
            eye = torch.eye(d, dtype=dtype)
            Q = householder(eye, V, triangular=True).mT
            full = householder(eye, torch.randn(d, d, dtype=dtype))
            apart = torch.linalg.matrix_norm((Q - reference).double(), 1) / (d * torch.finfo(dtype).eps)
            print(
                f"{str(dtype).removeprefix('torch.'):>8} {d:>5} {orthogonality(full):8.3f} "
                f"{orthogonality(Q):11.3f} {orthogonality(reference):8.3f} {apart:24.3f}"
            )


if __name__ == "__main__":
    main()
