"""Convolutions that are orthogonal as maps of images by construction, without iterations, for images of any size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fasth.nn.factored import check_dtype, one_of
from fasth.nn.held_weight import HeldWeight
from fasth.nn.image_map import CONVOLVE_TRANSPOSED, ImageMap, twin_of
from fasth.nn.shift_chain import INITS, Chain, Move, add_a_tap, orthonormal_rows, shifts
from fasth.operators.orthogonal import haar_compact


class _Orthogonal(ImageMap):
    """An orthogonal convolution, or its adjoint: a chain, and if strided an orthogonal matrix of patches after it.

    Parameters, all compact, with the signs of columns on the diagonal of the last r reflectors:
        reflectors: (*b, rows, c), the chain's, with c = max and r = min of the two numbers of channels. A strided
            layer's chain maps the source to c channels, with kernels of k − s + 1 taps.
        patch_reflectors: (*b, ·, ·), strided layers only: the matrix from patches of s pixels to the target.
    """

    reflectors: nn.Parameter
    patch_reflectors: nn.Parameter

    def _build(self, twin: Any, bias: bool, padding_mode: str, init: str, device: Any, dtype: Any) -> None:
        check_dtype(dtype)
        self._add_geometry(twin, padding_mode)
        self.init = one_of("init", init, INITS)
        source, target, pixels = self._source, self._target, math.prod(self.stride)
        shapes: dict[str, tuple[int, ...]] = {}
        middle = source
        self._chain: Chain | None = None
        if pixels == 1:
            low, high = sorted((source, target))
            self._chain = Chain(steps := shifts(self.kernel_size), len(steps), high, low)
            middle = target
        elif self.kernel_size != self.stride:
            middle = max(source, target // pixels)
            steps = shifts([k - s + 1 for k, s in zip(self.kernel_size, self.stride, strict=True)])
            self._chain = Chain(steps, len(steps) - 1, middle, source)
        if self._chain is not None:
            if self._chain.channels < 2 and self._chain.steps:
                raise ValueError(
                    f"`kernel_size` should be `stride` for so few channels, since one channel alone can only be "
                    f"shifted; got {self.kernel_size} for {self.in_channels} to {self.out_channels} channels "
                    f"in {self.groups} group(s) with stride {self.stride}"
                )
            shapes["reflectors"] = (self._chain.rows, self._chain.channels)
        if pixels > 1:
            low, high = sorted((target, middle * pixels))
            shapes["patch_reflectors"] = (low, high)
        self._chain_widens = source < middle
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(*self._batch, *shape, device=device, dtype=dtype)))
        self._factor_names = tuple(shapes)
        self._add_bias(bias, self.out_channels, device, dtype)
        self._add_layout(device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes the rotations by ``init``, and the bias as in ``torch.nn``."""
        first = self._first()
        if not first.is_meta:
            make = {"reflectors": self._initial_chain, "patch_reflectors": self._initial_patch}
            options = {"dtype": first.dtype, "device": first.device}
            for name in self._factor_names:
                made = [make[name](**options) for _ in range(self.groups)]
                self._write(**{name: torch.stack(made) if self.groups > 1 else made[0]})
        self._reset_bias(self._fan_in)

    def _initial_chain(self, **options: Any) -> Tensor:
        assert self._chain is not None
        strided = "patch_reflectors" in self._factor_names
        return self._chain.initial("identity" if strided and self.init == "1x1" else self.init, **options)

    def _initial_patch(self, **options: Any) -> Tensor:
        k, d = self.patch_reflectors.shape[-2:]
        return -torch.eye(k, d, **options) if self.init == "identity" else haar_compact(k, d, **options)

    def _kernel(self, sigma: Tensor | None) -> Tensor:
        groups = (0, len(self._batch))
        if self._chain is None:
            return self._patches().flatten(*groups)
        inner, last = self._chain.split(self.reflectors)
        M = orthonormal_rows(last)
        for _ in self.kernel_size:
            M = M.unsqueeze(-3)
        chain = self._from_taps(self._chain.multiply(M, inner, add_a_tap), self._chain_widens)
        if "patch_reflectors" not in self._factor_names:
            return chain.flatten(*groups)
        return self._composed(self._patches(), chain)

    def _has_chain_alone(self) -> bool:
        return self._chain is not None and "patch_reflectors" not in self._factor_names

    def _multiply_pixels(self, x: Tensor, sigma: Tensor | None, move: Move) -> Tensor:
        assert self._chain is not None
        inner, last = self._chain.split(self.reflectors)
        rows = orthonormal_rows(last)
        if self._chain_widens:
            return self._chain.multiply(x @ rows, inner, move)
        return self._chain.multiply_transposed(x, inner, move) @ rows.mT

    def _patches(self) -> Tensor:
        """The orthogonal matrix of patches, as a kernel: (*b, target, middle, *stride)."""
        rows = orthonormal_rows(self.patch_reflectors)
        W = rows if rows.shape[-2] == self._target else rows.mT
        return W.unflatten(-1, (-1, *self.stride))

    def _composed(self, patches: Tensor, chain: Tensor) -> Tensor:
        """Σ_{a+b} patches[a] chain[b]: (groups · target, source, *taps), computed as a transposed convolution."""
        if self.groups > 1:
            patches = patches.movedim(1, 0).flatten(1, 2)
            chain = chain.flatten(0, 1)
        composed = CONVOLVE_TRANSPOSED[len(self.kernel_size)](patches, chain, groups=self.groups)
        if self.groups > 1:
            composed = composed.unflatten(1, (self.groups, self._source)).movedim(1, 0).flatten(0, 1)
        return composed

    def _sigma(self) -> Tensor:
        """Ones."""
        return self._first().new_ones(*self._batch, min(self._matrix_shape[-2:]))

    def _inverse_kernel(self) -> Tensor:
        return self._kernel_now()

    def adjoint(self, y: Tensor) -> Tensor:
        """Kᵀ (y − bias). Exact maps only: see ``inverse``.

        It is the inverse of a square map, a left inverse if there are more outputs than inputs, and the shortest x with
        ``forward(x)`` = y if there are fewer.
        """
        self._check_exact("adjoint")
        return self._back(y, self._kernel_now())

    def held_weights(self) -> Iterator[HeldWeight]:
        """Yields the map of images, whose matrix at every frequency is orthogonal."""
        first, *others = (getattr(self, name) for name in self._factor_names)
        yield HeldWeight("", self._matrix_shape, first, None, others[0] if others else None, "compact", None)


class _OrthogonalConv(_Orthogonal):
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
        init: str = "haar",
    ) -> None:
        super().__init__()
        twin = twin_of(self._dense, in_channels, out_channels, kernel_size, stride, padding, dilation, groups)
        self._build(twin, bias, padding_mode, init, device, dtype)


class _OrthogonalConvTranspose(_Orthogonal):
    _transposed = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] = 0,
        output_padding: int | tuple[int, ...] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | tuple[int, ...] = 1,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        init: str = "haar",
    ) -> None:
        super().__init__()
        options = {"output_padding": output_padding}
        twin = twin_of(
            self._dense, in_channels, out_channels, kernel_size, stride, padding, dilation, groups, **options
        )
        self._build(twin, bias, padding_mode, init, device, dtype)


class Conv2dOrthogonal(_OrthogonalConv):
    """``nn.Conv2d`` that is orthogonal as a map of images: it keeps the length of every image, or of as many as it can.

    ``nn.Conv2d``'s signature and shapes. The kernel is a product K = A₀ S₁ A₁ ⋯ S_n A_n of rotations of the channels
    and of shifts of half of them by one pixel, one for each tap more than 1 along each axis. Whatever an optimizer
    does to the parameters, with circular padding K is orthogonal to rounding.

    With s the stride, every image keeps its length if out ≥ in·s² (orthonormal columns). If out ≤ in·s², the images
    orthogonal to the map's null space do (orthonormal rows).

    Args:
        in_channels, out_channels, groups, bias: as in ``nn.Conv2d``. Each group has its own kernel.
        kernel_size: odd or even, at least the stride. A kernel larger than the stride needs two channels in a group,
            since one channel alone can only be shifted.
        stride: for s > 1, an orthogonal convolution of k − s + 1 taps is followed by an orthogonal matrix that maps
            patches of s×s pixels to the output's channels. The two are one kernel of k taps.
        padding: any value with zero padding, where the norm is at most 1. Circular padding is at most (k − 1)/2, or
            "same", which keep the number of pixels; with them the map is exact: orthogonal.
        dilation: any number without a common divisor with the stride.
        padding_mode: "zeros" or "circular".
        init: "haar": all rotations are uniformly distributed. "1x1": the kernel is one tap, the middle one if its size
            is odd, with a uniformly distributed matrix. "identity": one tap, with the (rectangular) identity.

    The kernel is formed once a call, or once within ``fasth.cached()``: ``docs/convolutions.md`` has the cost.
    """

    _dense = nn.Conv2d

    def logabsdet(self, height: int, width: int) -> Tensor:
        """log |det| of the layer as a map of one height × width image: 0, a scalar. Invertible maps only."""
        self._check_invertible("logabsdet")
        return self._logabsdet((height, width), self._sigma())


class Conv1dOrthogonal(_OrthogonalConv):
    """``nn.Conv1d`` that is orthogonal as a map of sequences. See ``Conv2dOrthogonal``."""

    _dense = nn.Conv1d

    def logabsdet(self, length: int) -> Tensor:
        """log |det| of the layer as a map of one sequence: 0, a scalar. Invertible maps only."""
        self._check_invertible("logabsdet")
        return self._logabsdet((length,), self._sigma())


class ConvTranspose2dOrthogonal(_OrthogonalConvTranspose):
    """``nn.ConvTranspose2d`` that is orthogonal as a map of images: the adjoint of ``Conv2dOrthogonal`` from out to in.

    ``nn.ConvTranspose2d``'s signature and shapes. With zero padding the norm is at most 1. With circular padding
    the map is orthogonal; ``padding`` and ``output_padding`` have to make the output the stride times the input's size.
    """

    _dense = nn.ConvTranspose2d

    def logabsdet(self, height: int, width: int) -> Tensor:
        """log |det| of the layer as a map of one height × width image: 0, a scalar. Invertible maps only."""
        self._check_invertible("logabsdet")
        return self._logabsdet((height, width), self._sigma())


class ConvTranspose1dOrthogonal(_OrthogonalConvTranspose):
    """``nn.ConvTranspose1d`` that is orthogonal as a map of sequences. See ``ConvTranspose2dOrthogonal``."""

    _dense = nn.ConvTranspose1d

    def logabsdet(self, length: int) -> Tensor:
        """log |det| of the layer as a map of one sequence: 0, a scalar. Invertible maps only."""
        self._check_invertible("logabsdet")
        return self._logabsdet((length,), self._sigma())
