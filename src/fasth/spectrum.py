"""Spectrum maps: from a free parameter to singular values within exact bounds, for every value of the parameter.

sigma = between(0.5, 2.0)(raw),    raw = between(0.5, 2.0).inverse(sigma)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from numbers import Real

import torch
import torch.nn.functional as F
from torch import Tensor

from fasth.reflections.plan import DTYPES

__all__ = ["Spectrum", "around", "between", "free", "normalized", "positive"]


class Spectrum(ABC):
    """A map of (*, k) → (*, k), raw to sigma, with finite gradients everywhere."""

    bounded = False  # True if sigma has a lower and an upper bound

    @abstractmethod
    def __call__(self, raw: Tensor) -> Tensor:
        """sigma = s(raw).  (*, k) → (*, k)."""

    @abstractmethod
    def inverse(self, sigma: Tensor) -> Tensor:
        """Returns raw with s(raw) = sigma to rounding, or close to sigma if sigma is outside the map's range."""

    def start(self, sigma: Tensor) -> Tensor:
        """Returns the raw of a new layer: ``inverse``, or a point close to it where the map is differentiable."""
        return self.inverse(sigma)


def free() -> Spectrum:
    """sigma = raw."""
    return _Free()


def positive() -> Spectrum:
    """sigma = log(1 + e^raw), softplus: positive and finite, even where the formula underflows."""
    return _Positive()


def between(low: float, high: float) -> Spectrum:
    """sigma = low + (high − low) / (1 + e^−raw), low ≤ sigma ≤ high, with both bounds rounded inward to raw's dtype."""
    for name, value in (("low", low), ("high", high)):
        _check_finite(name, value)
    if not low < high:
        raise ValueError(f"`low` should be below `high`; got {low} and {high}")
    return _Between(float(low), float(high))


def around(center: float, eps: float) -> Spectrum:
    """``between(center − eps, center + eps)``: sigma = center + eps · tanh(raw / 2). raw = 0 gives the center."""
    for name, value in (("center", center), ("eps", eps)):
        _check_finite(name, value)
    if not eps > 0:
        raise ValueError(f"`eps` should be positive; got {eps}")
    center, eps = float(center), float(eps)
    _check_finite("center ± eps", abs(center) + eps)
    return _Around(center - eps, center + eps, center, eps)


def normalized() -> Spectrum:
    """sigma = raw / max|raw|, over the last dimension: the largest is exactly ±1. All zeros stay zeros.

    Where several are the largest the map has a kink, at which a loss that treats them alike has no gradient: so one
    singular value of a new layer is 1, and the others are at most 0.99.
    """
    return _Normalized()


@dataclass(frozen=True)
class _Free(Spectrum):
    def __call__(self, raw: Tensor) -> Tensor:
        return raw

    def inverse(self, sigma: Tensor) -> Tensor:
        return sigma

    def __repr__(self) -> str:
        return "free()"


@dataclass(frozen=True)
class _Positive(Spectrum):
    def __call__(self, raw: Tensor) -> Tensor:
        # Above 40, log(1 + e^raw) is raw to the rounding of float64. Below, e^raw may underflow.
        return F.softplus(raw, threshold=40).clamp(min=torch.finfo(raw.dtype).tiny)

    def inverse(self, sigma: Tensor) -> Tensor:
        """log(e^sigma − 1). Values that are not positive become eps of the largest: the gradient there is sigma."""
        info = torch.finfo(sigma.dtype)
        largest = sigma.amax(-1, keepdim=True)
        smallest = (info.eps * torch.where(largest > 0, largest, 1)).clamp(min=info.tiny)
        sigma = torch.where(sigma > 0, sigma.clamp(min=info.tiny), smallest)
        return sigma + torch.log(-torch.expm1(-sigma))

    def __repr__(self) -> str:
        return "positive()"


# `inverse` moves values outside the bounds to this distance inside them, in widths, and the raw there. Closer to the
# bounds the map is so flat that no gradient would bring a value back.
_OFF_THE_END = 1e-3
_STEEP = math.log1p(-_OFF_THE_END) - math.log(_OFF_THE_END)


@dataclass(frozen=True)
class _Between(Spectrum):
    bounded = True

    low: float
    high: float
    center: float | None = None
    # For each dtype its lowest and highest number inside the bounds, and half their distance; None if fewer than two.
    bounds: dict[torch.dtype, tuple[float, float, float] | None] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", {dtype: _inside(self.low, self.high, dtype) for dtype in DTYPES})

    def __call__(self, raw: Tensor) -> Tensor:
        low, high, half, center = self._of(raw)
        # From the nearest of both ends and the middle: each is exact close to where it starts. By halves, since the
        # width itself may overflow, in the value or in the gradient.
        below = low + half * raw.sigmoid() + half * raw.sigmoid()
        above = high - half * (-raw).sigmoid() - half * (-raw).sigmoid()
        inner = center + half * (raw / 2).tanh()
        return torch.where(raw < -1, below, torch.where(raw > 1, above, inner)).clamp(low, high)

    def inverse(self, sigma: Tensor) -> Tensor:
        """log((sigma − low) / (high − sigma)).

        A value outside the bounds goes a thousandth of the width inside the nearer bound, where the gradient has not
        vanished; to the bound itself if it is no further outside than that, which may be rounding.
        """
        low, high, half, center = self._of(sigma)
        position = (sigma / 2 - center / 2) / half * 2  # −1 at the lower bound, 1 at the upper
        inner = 2 * position.clamp(-0.5, 0.5).atanh()
        eps = torch.finfo(sigma.dtype).eps
        from_low, from_high = (sigma / 2 - low / 2) / half, (high / 2 - sigma / 2) / half
        outer = from_low.clamp(eps, 1).log() - from_high.clamp(eps, 1).log()
        outside = position.abs() > 1 + 2 * _OFF_THE_END
        outer = torch.where(outside, outer.clamp(-_STEEP, _STEEP), outer)
        return torch.where(position.abs() < 0.5, inner, outer)

    def start(self, sigma: Tensor) -> Tensor:
        """``inverse``, at least a thousandth of the width inside the bounds: at the bounds the gradient is zero."""
        return self.inverse(sigma).clamp(-_STEEP, _STEEP)

    def _of(self, t: Tensor) -> tuple[float, float, float, float]:
        bounds = self.bounds.get(t.dtype)
        if bounds is None:
            raise ValueError(f"{self!r} should contain at least two numbers of the dtype; got {t.dtype}")
        low, high, half = bounds
        return low, high, half, low + half if self.center is None else self.center

    def __repr__(self) -> str:
        return f"between({self.low}, {self.high})"


@dataclass(frozen=True)
class _Around(_Between):
    eps: float = 0.0

    def __repr__(self) -> str:
        return f"around({self.center}, {self.eps})"


_BELOW_THE_LARGEST = 0.99  # small enough that the first steps of training do not cross the kink


@dataclass(frozen=True)
class _Normalized(Spectrum):
    def __call__(self, raw: Tensor) -> Tensor:
        value = raw.detach()
        scale = value.abs().amax(-1, keepdim=True)
        scale = torch.where(scale == 0, 1, scale)
        # The gradient is that of raw / scale, except that it stays finite for the smallest of scales.
        sigma = value / scale + (raw - value) / scale.clamp(min=torch.finfo(raw.dtype).max ** -0.5)
        largest = sigma.abs().amax(-1, keepdim=True)
        return sigma / torch.where(largest == 0, 1, largest)

    def inverse(self, sigma: Tensor) -> Tensor:
        return self(sigma)

    def start(self, sigma: Tensor) -> Tensor:
        raw = self(sigma)
        first = raw.abs().argmax(-1, keepdim=True)
        return raw.clamp(-_BELOW_THE_LARGEST, _BELOW_THE_LARGEST).scatter(-1, first, raw.gather(-1, first))

    def __repr__(self) -> str:
        return "normalized()"


def _inside(low: float, high: float, dtype: torch.dtype) -> tuple[float, float, float] | None:
    """Returns the lowest and the highest number of the dtype in [low, high], and half their distance."""
    info = torch.finfo(dtype)
    lowest = max(math.ceil(low / _spacing(low, info)) * _spacing(low, info), info.min)
    highest = min(math.floor(high / _spacing(high, info)) * _spacing(high, info), info.max)
    return (lowest, highest, highest / 2 - lowest / 2) if lowest < highest else None


def _spacing(value: float, info: torch.finfo) -> float:
    """Returns the distance between neighbouring numbers of the dtype at this value."""
    return max(math.ldexp(info.eps, math.frexp(value)[1] - 1), info.smallest_normal * info.eps)


def _check_finite(name: str, value: float) -> None:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"`{name}` should be a finite number; got {value!r}")
