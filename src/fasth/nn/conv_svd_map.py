"""Convolutions that hold their SVD as maps of images: K = U Σ Vᵀ with orthogonal convolutions U and V.

Not to be confused with ``conv.py``, whose layers decompose the kernel as a matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fasth.nn.factored import check_dtype, one_of
from fasth.nn.factors import spectrum_or_free
from fasth.nn.held_weight import HeldWeight
from fasth.nn.image_map import ImageMap, twin_of
from fasth.nn.shift_chain import INITS, Chain, Move, add_a_tap, orthonormal_rows, shifts
from fasth.operators.matrix import LinAlgError, has_entry
from fasth.spectrum import Spectrum


class _ConvMapSVD(ImageMap):
    """K = U Σ Vᵀ. Parameters, with groups as a batch:

    reflectors_U: (*b, ·, out), reflectors_V: (*b, ·, in): compact reflectors of the chains of U and V. The chain with
        more channels is restricted to k = min(out, in) columns.
    sigma: (*b, k), which the spectrum maps to σ.
    """

    reflectors_U: nn.Parameter
    reflectors_V: nn.Parameter
    sigma: nn.Parameter

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: str | int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        spectrum: Spectrum | None = None,
        init: str = "haar",
    ) -> None:
        super().__init__()
        check_dtype(dtype)
        twin = twin_of(self._dense, in_channels, out_channels, kernel_size, stride, padding, dilation, groups)
        self._add_geometry(twin, padding_mode)
        if set(self.stride) != {1}:
            raise ValueError(
                f"`stride` should be 1, since then each frequency has one matrix: for stride s put "
                f"nn.PixelUnshuffle(s) before a layer of s² times the channels; got {self.stride}"
            )
        self.init, self.spectrum = one_of("init", init, INITS), spectrum_or_free(spectrum)
        self._add_chains()
        shapes = {
            "reflectors_U": (self._of_U.rows, self._of_U.channels),
            "reflectors_V": (self._of_V.rows, self._of_V.channels),
            "sigma": (self._of_U.rank,),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(*self._batch, *shape, device=device, dtype=dtype)))
        self._factor_names = tuple(shapes)
        self._add_bias(bias, self.out_channels, device, dtype)
        self._add_layout(device)
        self.reset_parameters()

    def _add_chains(self) -> None:
        """Makes the chains: the side with fewer channels gets the first half of the shifts, the other side the rest."""
        low, high = sorted((self._source, self._target))
        steps = shifts(self.kernel_size)
        if low < 2 and steps:
            raise ValueError(
                f"`kernel_size` should be 1 for so few channels, since one channel alone can only be shifted; got "
                f"{self.kernel_size} for {self.in_channels} to {self.out_channels} channels in {self.groups} group(s)"
            )
        split = len(steps) // 2
        small = Chain(steps[:split], split, low, low)
        large = Chain(steps[split:], len(steps) - split, high, low)
        self._of_U, self._of_V = (large, small) if self._source < self._target else (small, large)

    def reset_parameters(self) -> None:
        """Initializes U and V by ``init``, σ = 1 or the spectrum's nearest value, and the bias as in ``torch.nn``."""
        if not self.sigma.is_meta:
            options: dict[str, Any] = {"dtype": self.sigma.dtype, "device": self.sigma.device}
            inits = (self.init, self.init)
            if self.init == "1x1":
                inits = ("1x1", "identity")
            for name, chain, init in zip(
                ("reflectors_U", "reflectors_V"), (self._of_U, self._of_V), inits, strict=True
            ):
                made = [chain.initial(init, **options) for _ in range(self.groups)]
                self._write(**{name: torch.stack(made) if self.groups > 1 else made[0]})
            self._write(sigma=self.spectrum.start(torch.ones_like(self.sigma)))
        self._reset_bias(self._fan_in)

    def _sigma(self) -> Tensor:
        return self.spectrum(self.sigma)

    @property
    def singular_values(self) -> Tensor:
        """σ, differentiable: (min(in, out),), or (groups, ·). Every frequency of an image is multiplied by these."""
        return self._sigma()

    def _kernel(self, sigma: Tensor | None) -> Tensor:
        sigma = self._sigma() if sigma is None else sigma
        V, U = (self._of_V, self.reflectors_V), (self._of_U, self.reflectors_U)
        wide = self._source < self._target
        (small, reflectors_small), (large, reflectors_large) = (V, U) if wide else (U, V)
        inner, last = small.split(reflectors_small)
        inner_large, last_large = large.split(reflectors_large)
        M, scaled = orthonormal_rows(last), sigma.unsqueeze(-1) * orthonormal_rows(last_large)
        for _ in self.kernel_size:
            M, scaled = M.unsqueeze(-3), scaled.unsqueeze(-3)
        M = torch.matmul(
            small.multiply(M, inner, add_a_tap).mT, scaled
        )  # V Σ A_nᵀ, or U Σ A_nᵀ: (*b, *taps, low, high)
        return self._from_taps(large.multiply(M, inner_large, add_a_tap), wide).flatten(0, len(self._batch))

    def _has_chain_alone(self) -> bool:
        return bool(self._of_U.steps or self._of_V.steps)

    def _multiply_pixels(self, x: Tensor, sigma: Tensor | None, move: Move) -> Tensor:
        sigma = self._sigma() if sigma is None else sigma
        inner_U, last_U = self._of_U.split(self.reflectors_U)
        inner_V, last_V = self._of_V.split(self.reflectors_V)
        x = self._of_V.multiply_transposed(x, inner_V, move) @ orthonormal_rows(last_V).mT
        return self._of_U.multiply((x * sigma) @ orthonormal_rows(last_U), inner_U, move)

    def _inverse_kernel(self) -> Tensor:
        sigma = self._sigma()
        if has_entry(sigma, 0):
            raise LinAlgError(f"inverse: {self!r} is singular, it has a singular value that is 0")
        return self._kernel(sigma.reciprocal())  # U Σ⁻¹ Vᵀ, whose adjoint is V Σ⁻¹ Uᵀ

    def held_weights(self) -> Iterator[HeldWeight]:
        """Yields the map of images, whose matrix at every frequency has the singular values σ."""
        factors = self.reflectors_U, self.sigma, self.reflectors_V
        yield HeldWeight("", self._matrix_shape, *factors, "compact", self.spectrum)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, spectrum={self.spectrum}"


class Conv2dMapSVD(_ConvMapSVD):
    """``nn.Conv2d`` that is held as its singular value decomposition as a map of images, K = U Σ Vᵀ.

    U and V are orthogonal convolutions, as in ``Conv2dOrthogonal``, and Σ multiplies the channels between them. So with
    circular padding that keeps the number of pixels, as ``padding="same"`` does, each σ is a singular value of the map
    of images, once for each pixel, and there are no others: ``norm()``, ``cond()``, ``inverse(y)``, which is a
    convolution too, and ``logabsdet(height, width)`` = pixels · Σ log |σ| are exact, and nothing is decomposed. With
    zero padding the norm is at most max |σ|.

    This class holds the SVD of the map. ``Conv2dSVD`` holds the SVD of the kernel as a matrix, which equals the map's
    for 1×1 kernels only, and represents any kernel. This class does not: all frequencies have the same singular values.

    Args:
        in_channels, out_channels, kernel_size, padding, dilation, groups, bias, padding_mode: as in
            ``Conv2dOrthogonal``.
        stride: 1. For a stride of s put ``nn.PixelUnshuffle(s)`` before a layer of s² times the channels.
        spectrum: the map from the parameter ``sigma`` to σ, of ``fasth.spectrum``; ``free()`` by default.
        init: as in ``Conv2dOrthogonal``; with "1x1" and "identity" the kernel is one tap if its size is odd and
            in_channels = out_channels. σ is 1, or the spectrum's nearest value.

    The kernel is formed once a call, or once within ``fasth.cached()``; this costs about 4/3 of an orthogonal
    kernel.
    """

    _dense = nn.Conv2d

    def logabsdet(self, height: int, width: int) -> Tensor:
        """log |det| of the layer as a map of one height × width image, a scalar. Invertible maps only."""
        self._check_invertible("logabsdet")
        return self._logabsdet((height, width), self._sigma())


class Conv1dMapSVD(_ConvMapSVD):
    """``nn.Conv1d`` that is held as its SVD as a map of sequences, K = U Σ Vᵀ. See ``Conv2dMapSVD``."""

    _dense = nn.Conv1d

    def logabsdet(self, length: int) -> Tensor:
        """log |det| of the layer as a map of one sequence, a scalar. Invertible maps only."""
        self._check_invertible("logabsdet")
        return self._logabsdet((length,), self._sigma())
