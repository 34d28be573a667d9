"""The initial singular values of layers, and the initial rotations of recurrent nets."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

GRID = 4096  # points in [0, π]: the quantiles are then right to 1e-6


def singular_values_of_linear(n: int, m: int) -> Tensor:
    """The singular values to expect of a new ``nn.Linear`` weight: (min(n, m),), descending, in float64.  O(n + m).

    W: (n, m) is drawn uniformly from ±1/√m, as that of a convolution with m = in·kh·kw is: with variance 1/(3m). With
    k = min(n, m), N = max(n, m) and c = k/N its singular values are

        σ² = N/(3m) · x,    x = 1 + c + 2√c · cos θ,    θ in [0, π] with density 2 sin²θ / (π x),

    the law of Marchenko and Pastur, of which these are the quantiles (i + ½)/k. Σσ² is n/3, the mean of ‖W‖², but for
    the smallest of sizes.
    """
    k, N = sorted((n, m))
    c = k / N
    edges = torch.linspace(0, math.pi, GRID + 1, dtype=torch.float64, device="cpu")
    middles = (edges[1:] + edges[:-1]) / 2
    mass = middles.sin().square() / (1 + c + 2 * math.sqrt(c) * middles.cos())
    below = torch.cat((mass.new_zeros(1), mass.cumsum(0)))  # of θ: the larger θ, the smaller σ
    wanted = (torch.arange(k, dtype=torch.float64, device="cpu") + 0.5) / k * below[-1]
    right = torch.searchsorted(below, wanted)
    theta = edges[right] - (below[right] - wanted) / mass[right - 1] * (math.pi / GRID)
    return (N / (3 * m) * (1 + c + 2 * math.sqrt(c) * theta.cos())).clamp(min=0).sqrt()


def rotations(h: int, kind: str, *, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
    """The (h, h) matrix that rotates units 2i and 2i + 1, each pair by an angle of its own; of an odd h the last is 1.

    "henaff": angles uniform in [−π, π], so that a state comes back to where it was after no common number of steps.
    "cayley": −tan(t/2) with t uniform in [0, π/2], at most a radian: slow rotations, close to the identity.
    """
    uniform = torch.rand(h // 2, dtype=torch.float64, device="cpu")
    angles = (2 * uniform - 1) * math.pi if kind == "henaff" else -(uniform * math.pi / 4).tan()
    first = torch.arange(0, h - 1, 2, device="cpu")
    W = torch.eye(h, dtype=torch.float64, device="cpu")
    W[first, first] = W[first + 1, first + 1] = angles.cos()
    W[first, first + 1], W[first + 1, first] = angles.sin(), -angles.sin()
    return W.to(device=device, dtype=dtype)
