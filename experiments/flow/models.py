"""A normalizing flow like Glow, for images and for vectors, and the linear maps that may mix its channels.

A step of the flow is Glow's: a scale and a shift of each channel, a linear map of the channels, and an affine
coupling. The experiment compares linear maps, the mixers. A mixer takes rows, (rows, d): a 1×1 convolution is a linear
map of the channels of every pixel. Every mixer starts as the same matrix W, except nflows' QR.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fasth
from fasth.spectrum import Spectrum, between, free, positive

MixerOf = Callable[[Tensor], nn.Module]


class Fixed(nn.Module):
    """y = W x, with nothing to learn."""

    W: Tensor
    W_inverse: Tensor
    logabsdet: Tensor

    def __init__(self, W: Tensor) -> None:
        super().__init__()
        self.register_buffer("W", W)
        self.register_buffer("W_inverse", torch.linalg.inv(W))
        self.register_buffer("logabsdet", torch.linalg.slogdet(W).logabsdet)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, self.W), self.logabsdet

    def inverse(self, y: Tensor) -> Tensor:
        return F.linear(y, self.W_inverse)


class Dense(nn.Module):
    """y = W x, with a determinant computed in every step: Glow's first form."""

    def __init__(self, W: Tensor) -> None:
        super().__init__()
        self.W = nn.Parameter(W)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, self.W), torch.linalg.slogdet(self.W).logabsdet

    def inverse(self, y: Tensor) -> Tensor:
        return torch.linalg.solve(self.W, y.mT).mT


class PLU(nn.Module):
    """y = P L (U + diag(s)) x, with P and the signs of s fixed: Glow's final form. log |det| = Σ log |s|."""

    P: Tensor
    signs: Tensor

    def __init__(self, W: Tensor) -> None:
        super().__init__()
        P, L, U = torch.linalg.lu(W)
        self.register_buffer("P", P)
        self.register_buffer("signs", U.diagonal().sign())
        self.L, self.U = nn.Parameter(L.tril(-1)), nn.Parameter(U.triu(1))
        self.log_s = nn.Parameter(U.diagonal().abs().log())

    def factors(self) -> tuple[Tensor, Tensor]:
        L = self.L.tril(-1) + torch.eye(len(self.P), dtype=self.L.dtype)
        return L, self.U.triu(1) + (self.signs * self.log_s.exp()).diag()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        L, U = self.factors()
        return F.linear(x, self.P @ L @ U), self.log_s.sum()

    def inverse(self, y: Tensor) -> Tensor:
        L, U = self.factors()
        x = torch.linalg.solve_triangular(L, self.P.mT @ y.mT, upper=False, unitriangular=True)
        return torch.linalg.solve_triangular(U, x, upper=True).mT


class NFlows(nn.Module):
    """One of nflows' linear transforms. All start as the identity, except "QRLinear"."""

    def __init__(self, kind: str, d: int, **options: Any) -> None:
        super().__init__()
        from nflows import transforms

        self.transform = getattr(transforms, kind)(d, **options)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, logabsdet = self.transform(x)
        return y, logabsdet[0]

    def inverse(self, y: Tensor) -> Tensor:
        return self.transform.inverse(y)[0]


class Chain(nn.Module):
    """Applies several mixers in sequence."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, first = self.first(x)
        y, second = self.second(x)
        return y, first + second

    def inverse(self, y: Tensor) -> Tensor:
        return self.first.inverse(self.second.inverse(y))


class Ours(nn.Module):
    """A layer of fasth: determinant and inverse come from its factors."""

    def __init__(self, W: Tensor, layer: fasth.LinearSVD | fasth.LinearOrthogonal) -> None:
        super().__init__()
        self.layer = layer.set_weight_(W)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.layer.logabsdet()

    def inverse(self, y: Tensor) -> Tensor:
        return self.layer.inverse(y)


class OfImages(nn.Module):
    """A convolution with an SVD as a map of images, circular, which starts as the identity, after a fixed W."""

    def __init__(self, W: Tensor, kernel_size: int | tuple[int, int]) -> None:
        super().__init__()
        d = len(W)
        self.fixed = Fixed(W)
        self.layer = fasth.Conv2dMapSVD(
            *(d, d, kernel_size, 1, "same"), bias=False, padding_mode="circular", spectrum=positive(), init="identity"
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows, logabsdet = self.fixed(rows_of(x))
        return self.layer(like(rows, x)), logabsdet + self.layer.logabsdet(1, 1)  # for each pixel

    def inverse(self, y: Tensor) -> Tensor:
        return like(self.fixed.inverse(rows_of(self.layer.inverse(y))), y)


def svd(spectrum: Spectrum) -> MixerOf:
    return lambda W: Ours(W, fasth.LinearSVD(len(W), len(W), bias=False, spectrum=spectrum))


def orthogonal(W: Tensor) -> nn.Module:
    """Learns the orthogonal factor of W = Q P; the symmetric factor P stays fixed."""
    U, sigma, Vh = torch.linalg.svd(W)
    mixer = Ours(U @ Vh, fasth.LinearOrthogonal(len(W), len(W), bias=False))
    is_orthogonal = torch.allclose(sigma, torch.ones_like(sigma), atol=1e-4)
    return mixer if is_orthogonal else Chain(Fixed(Vh.mT @ (sigma.unsqueeze(1) * Vh)), mixer)


def nflows_after(W: Tensor, kind: str, **options: Any) -> nn.Module:
    return Chain(Fixed(W), NFlows(kind, len(W), **options))


MIXERS: dict[str, MixerOf] = {
    "fixed": Fixed,
    "dense": Dense,
    "PLU": PLU,
    "nflows LU": lambda W: nflows_after(W, "LULinear", identity_init=True),
    "nflows QR": lambda W: nflows_after(W, "QRLinear", num_householder=len(W)),
    "nflows Householder": lambda W: nflows_after(W, "HouseholderSequence", num_transforms=len(W)),
    "nflows SVD": lambda W: nflows_after(W, "SVDLinear", num_householder=len(W)),
    "orthogonal": orthogonal,
    "free": svd(free()),
    "positive": svd(positive()),
    "between": svd(between(0.1, 10)),
}
IMAGE_MIXERS: dict[str, MixerOf] = {  # for images alone, and not among the mixers by default
    "positive 3×3": lambda W: OfImages(W, 3),
    "positive 1×3": lambda W: OfImages(W, (1, 3)),
}
OURS = ("orthogonal", "free", "positive", "between", *IMAGE_MIXERS)


def installed() -> list[str]:
    """The mixers whose libraries are installed."""
    return [name for name in MIXERS if find_spec("nflows") or not name.startswith("nflows")]


STARTS = ("rotation", "permutation", "whitening")


def start_matrix(start: str, d: int) -> Tensor:
    """A random rotation or permutation. Whitening, which needs data, starts from a rotation."""
    return torch.eye(d)[torch.randperm(d)] if start == "permutation" else nn.init.orthogonal_(torch.empty(d, d))


def whitening(rows: Tensor, smallest: float = 1e-4) -> Tensor:
    """C^(−½), with C the covariance of the rows: ``fasth.flows.whiten_`` for any mixer."""
    values, axes = torch.linalg.eigh(rows.mT.double().cov())
    return ((axes * values.clamp(min=smallest * values[-1]).rsqrt()) @ axes.mT).to(rows.dtype)


class Step(nn.Module):
    """x ↦ coupling(mixer(scale · x + shift)) and log |det| of each sample.  x: (n, d) or (n, d, height, width)."""

    def __init__(self, d: int, mixer_of: MixerOf, start: str, net: nn.Module) -> None:
        super().__init__()
        self.mixer_of, self.start, self.W, self.net = mixer_of, start, start_matrix(start, d), net
        with torch.random.fork_rng(devices=[]):  # its random numbers should not change the nets of other steps
            self.mixer: Any = mixer_of(self.W)
        self.log_scale, self.shift = nn.Parameter(torch.zeros(d)), nn.Parameter(torch.zeros(d))

    @torch.no_grad()
    def normalize_(self, x: Tensor) -> None:
        """Chooses scale and shift so that this batch has mean 0 and variance 1, as Glow does; then the mixer."""
        mean, deviation = rows_of(x).mean(0), rows_of(x).std(0).clamp(min=1e-3)
        self.log_scale.copy_(-deviation.log())
        self.shift.copy_(-mean / deviation)
        if self.start == "whitening":
            self.mixer = self.mixer_of(self.W @ whitening((rows_of(x) - mean) / deviation))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = rows_of(x) * self.log_scale.exp() + self.shift
        if isinstance(self.mixer, OfImages):
            mixed, logabsdet = self.mixer(like(rows, x))
        else:
            rows, logabsdet = self.mixer(rows)
            mixed = like(rows, x)
        a, b, log_scale, shift = self._halves(mixed)
        everywhere = x[0, 0].numel() * (self.log_scale.sum() + logabsdet)
        return torch.cat((a, b * log_scale.exp() + shift), 1), everywhere + log_scale.flatten(1).sum(1)

    def inverse(self, y: Tensor) -> Tensor:
        a, b, log_scale, shift = self._halves(y)
        mixed = torch.cat((a, (b - shift) * (-log_scale).exp()), 1)
        if isinstance(self.mixer, OfImages):
            rows = rows_of(self.mixer.inverse(mixed))
        else:
            rows = self.mixer.inverse(rows_of(mixed))
        return like((rows - self.shift) * (-self.log_scale).exp(), y)

    def _halves(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Both halves of the channels, and the log scale and the shift of the second, computed from the first."""
        a, b = x.chunk(2, 1)
        log_scale, shift = self.net(a).chunk(2, 1)
        return a, b, 2 * torch.tanh(log_scale / 2), shift  # a scale from e⁻² to e²


def rows_of(x: Tensor) -> Tensor:
    """(n, d, *positions) → (n·positions, d)."""
    return x.movedim(1, -1).reshape(-1, x.shape[1])


def like(rows: Tensor, x: Tensor) -> Tensor:
    """(n·positions, d) → (n, d, *positions), the shape of x."""
    return rows.view(len(x), *x.shape[2:], -1).movedim(-1, 1)


class Flow(nn.Module):
    """Steps to a standard normal distribution. Images have two levels, each of which turns 2×2 pixels into channels."""

    def __init__(self, shape: tuple[int, ...], mixer: MixerOf, start: str, steps: int = 4, width: int = 32) -> None:
        super().__init__()
        self.is_image = len(shape) == 3
        d, *positions = shape
        self.levels = nn.ModuleList()
        for _ in range(2 if self.is_image else 1):
            if self.is_image:
                d, positions = 4 * d, [side // 2 for side in positions]
            net = convolutions if self.is_image else layers
            self.levels.append(nn.ModuleList(Step(d, mixer, start, net(d, width)) for _ in range(steps)))
        self.latent_shape = d, *positions
        if self.is_image:
            # Then the channels of a pixel are contiguous.
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor, normalize: bool = False) -> tuple[Tensor, Tensor]:
        """z and log |det ∂z/∂x|: (n,)."""
        total = x.new_zeros(len(x))
        for level in self.levels:
            x = F.pixel_unshuffle(x, 2) if self.is_image else x
            for step in _steps(level):
                if normalize:
                    step.normalize_(x)
                x, logabsdet = step(x)
                total = total + logabsdet
        return x, total

    def inverse(self, z: Tensor) -> Tensor:
        for level in reversed(self.levels):
            for step in reversed(_steps(level)):
                z = step.inverse(z)
            z = F.pixel_shuffle(z, 2) if self.is_image else z
        return z

    def nats(self, x: Tensor) -> Tensor:
        """−log p(x): (n,)."""
        z, logabsdet = self(x)
        return (0.5 * z.square() + 0.5 * math.log(2 * math.pi)).flatten(1).sum(1) - logabsdet

    @torch.no_grad()
    def sample(self, n: int, temperature: float = 1.0) -> Tensor:
        return self.inverse(temperature * torch.randn(n, *self.latent_shape))


def _steps(level: Any) -> list[Step]:
    return list(level)


def convolutions(d: int, width: int) -> nn.Module:
    first, last = nn.Conv2d(d // 2, width, 3, padding=1), nn.Conv2d(width, d, 3, padding=1)
    return zero_at_first(nn.Sequential(first, nn.ReLU(), nn.Conv2d(width, width, 1), nn.ReLU(), last))


def layers(d: int, width: int) -> nn.Module:
    first, last = nn.Linear(d // 2, 4 * width), nn.Linear(4 * width, d)
    return zero_at_first(nn.Sequential(first, nn.ReLU(), nn.Linear(4 * width, 4 * width), nn.ReLU(), last))


def zero_at_first(net: nn.Sequential) -> nn.Module:
    """Makes the output of the net zero before training: the coupling starts as the identity."""
    for parameter in net[-1].parameters():
        nn.init.zeros_(parameter)
    return net
