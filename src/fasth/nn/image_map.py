"""The base class of convolutions with known singular values as maps of images: geometry, forward, norm, inverse."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasth._private import is_exporting
from fasth.functional import autocast_enabled, check_tensor
from fasth.nn.factored import Factored, Factors, at_least_one, one_of
from fasth.nn.shift_chain import Move, move_pixels
from fasth.operators.svd import log_abs_product

MOST_PIXELS = 32  # per channel: up to these, rotations and shifts are applied to images
PADDING_MODES = ("zeros", "circular")

_CONVOLVE: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d}
CONVOLVE_TRANSPOSED: dict[int, Callable[..., Tensor]] = {1: F.conv_transpose1d, 2: F.conv_transpose2d}


def twin_of(
    dense: Any,
    in_channels: int,
    out_channels: int,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    **options: Any,
) -> Any:
    """The dense layer on the meta device, which checks and completes the options."""
    smallest = kernel_size if isinstance(kernel_size, int) else min(kernel_size)
    at_least_one(in_channels=in_channels, out_channels=out_channels, kernel_size=smallest)
    geometry: Any = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return dense(in_channels, out_channels, kernel_size, **geometry, **options, bias=False, device="meta")


class ImageMap(Factored):
    """A convolution, or the transpose of one, whose singular values as a map of images are known.

    All attributes describe the convolution, which maps ``_source`` to ``_target`` channels in each group and has the
    kernel (groups · target, source, *taps). A transposed layer is the adjoint of this convolution.
    """

    _dense: ClassVar[Any]
    _transposed: ClassVar[bool] = False
    _layout: Tensor
    output_padding: tuple[int, ...] = ()

    def _add_geometry(self, twin: Any, padding_mode: str) -> None:
        """``twin``: the layer of ``torch.nn`` on the meta device, which has checked and completed the options."""
        self.in_channels, self.out_channels, self.groups = twin.in_channels, twin.out_channels, twin.groups
        self.kernel_size, self.stride, self.dilation = twin.kernel_size, twin.stride, twin.dilation
        self.padding, self.padding_mode = twin.padding, one_of("padding_mode", padding_mode, PADDING_MODES)
        sizes = self.in_channels // self.groups, self.out_channels // self.groups
        self._source, self._target = reversed(sizes) if self._transposed else sizes
        self._pads = self._padding_of_axes()
        if self._transposed:
            self.output_padding = twin.output_padding
        self._check_geometry()

    def _padding_of_axes(self) -> list[tuple[int, int]]:
        """Padding (before, after) of each axis. If "same" padding is odd, the extra pixel comes after."""
        if self.padding == "same":
            both = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
            return [(total // 2, total - total // 2) for total in both]
        return [(0, 0) if self.padding == "valid" else (int(p), int(p)) for p in self.padding]

    def _check_geometry(self) -> None:
        """Raises ValueError if no kernel can be orthogonal, or if circular padding would repeat outputs."""
        if any(k < s for k, s in zip(self.kernel_size, self.stride, strict=True)):
            raise ValueError(
                f"`kernel_size` should be at least `stride`, since pixels between the patches would be lost; "
                f"got {self.kernel_size} and {self.stride}"
            )
        if any(math.gcd(s, d) > 1 for s, d in zip(self.stride, self.dilation, strict=True)):
            raise ValueError(
                f"`stride` and `dilation` should have no common divisor, since some pixels would be in several patches "
                f"and others in none; got {self.stride} and {self.dilation}"
            )
        circular = self.padding_mode == "circular"
        whole = [self._keeps_pixels(axis, circular) for axis in range(len(self.kernel_size))]
        spans = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
        self._least_sizes = [
            max(span + 1 - sum(pads), *(pads if circular else (1, 1)))
            for span, pads in zip(spans, self._pads, strict=True)
        ]
        self._exact = all(whole) and (circular or not any(sum(pads) for pads in self._pads))

    def _keeps_pixels(self, axis: int, circular: bool) -> bool:
        """True if circular padding gives size / stride outputs along this axis (inputs, for a transposed layer)."""
        k, s, d, total = self.kernel_size[axis], self.stride[axis], self.dilation[axis], sum(self._pads[axis])
        most = d * (k - 1)
        least = most - s + 1
        if not self._transposed:
            if circular and total > most:
                raise ValueError(
                    f"circular `padding` should be at most {most // 2} for a kernel of {k} with dilation {d}, since "
                    f"outputs would repeat; got {self.padding}"
                )
            return least <= total
        if circular and total != least + self.output_padding[axis]:
            raise ValueError(
                f"circular `padding` p and `output_padding` should be such that the output has {s} times the input's "
                f"size, 2p = {least} + output_padding for a kernel of {k} with stride {s} and dilation {d}; "
                f"got {self.padding} and {self.output_padding}"
            )
        return total == least + self.output_padding[axis]

    def _add_layout(self, device: Any) -> None:
        # Records the memory format: model.to(memory_format=torch.channels_last) changes 4-d tensors only, and no
        # parameter here has four dimensions.
        if len(self.kernel_size) == 2:
            layout = torch.zeros(2, 2, 2, 2, dtype=torch.bool, device=device)
            self.register_buffer("_layout", layout, persistent=False)

    def _memory_format(self) -> torch.memory_format:
        last = len(self.kernel_size) == 2 and self._layout.stride(1) == 1
        return torch.channels_last if last else torch.contiguous_format

    @property
    def _batch(self) -> tuple[int, ...]:
        """Batch dimensions of the factors: (groups,), or () for one group."""
        return () if self.groups == 1 else (self.groups,)

    @property
    def _fan_in(self) -> int:
        return self._source * math.prod(self.kernel_size)

    @property
    def _matrix_shape(self) -> tuple[int, ...]:
        """Shape of the map's matrix per output pixel of the convolution."""
        n, m = self._target, self._source * math.prod(self.stride)
        return (*self._batch, m, n) if self._transposed else (*self._batch, n, m)

    # Forward.

    def forward(self, input: Tensor) -> Tensor:
        """The convolution of ``input`` with the kernel, plus the bias; shapes as in ``torch.nn``, batched or not."""
        return self._run(input, None)

    def forward_and_logabsdet(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """``forward(input)``, and log |det| of the layer as a map of one sample, a scalar. σ is computed once."""
        self._check_invertible("forward_and_logabsdet")
        sigma = self._sigma()
        return self._run(input, sigma), self._logabsdet(input.shape[-len(self.kernel_size) :], sigma)

    def _run(self, input: Tensor, sigma: Tensor | None) -> Tensor:
        check_tensor("input", input)
        cached = self._cached_weight()
        if cached is None and self._few_pixels(input):
            return self._on_pixels(input, sigma)
        kernel = self._form(sigma) if cached is None else cached
        multiply = self._convolve_transposed if self._transposed else self._convolve
        return multiply(input, kernel, self.bias)

    def _weight(self) -> Tensor:
        return self._form()

    def _kernel_now(self) -> Tensor:
        """The kernel for one call: the cached kernel within ``fasth.cached()``, else a new one."""
        cached = self._cached_weight()
        return self._form() if cached is None else cached

    def _form(self, sigma: Tensor | None = None) -> Tensor:
        first = self._first()
        if autocast_enabled(first):  # products in half precision would not be orthogonal
            with torch.autocast(first.device.type, enabled=False):
                return self._form(sigma)
        return self._kernel(sigma).contiguous(memory_format=self._memory_format())

    def _kernel(self, sigma: Tensor | None) -> Tensor:
        """The kernel: (groups · target, source, *taps). ``sigma``: the singular values, if already computed."""
        raise NotImplementedError

    def _few_pixels(self, x: Tensor) -> bool:
        """True if rotations and shifts are applied to the pixels of x instead of forming the kernel.

        This takes (2k − 1) products of channels per pixel instead of k², but passes over x between the products.
        ``benchmarks/orthogonal_conv.py --rule`` measures where the two costs are equal.
        """
        dims, channels = len(self.kernel_size), max(self._source, self._target)
        if self._transposed or self.groups > 1 or not self._has_chain_alone():
            return False
        if x.ndim not in (dims + 1, dims + 2) or x.numel() > MOST_PIXELS * channels * self._source:
            return False
        if not x.is_cpu or x.dtype not in (torch.float32, torch.float64) or x.dtype != self._first().dtype:
            return False
        if autocast_enabled(x) or is_exporting():
            return False
        # Images that are too small for the convolution go to the convolution, which raises the error.
        large_enough = (n >= least for n, least in zip(x.shape[-dims:], self._least_sizes, strict=True))
        return x.shape[-dims - 1] == self._source and all(large_enough)

    def _on_pixels(self, x: Tensor, sigma: Tensor | None) -> Tensor:
        """The convolution, by rotations and shifts of the pixels.

        All shifts are circular: with zero padding, pixels that wrap around the padded image are never in the output.
        """
        dims = len(self.kernel_size)
        sizes = [n + sum(pads) - d * (k - 1) for n, pads, d, k in self._axes(x)]
        if self.padding_mode == "zeros":
            x = F.pad(x, _flat(self._pads))
        pixels = x.movedim(-dims - 1, -1).unsqueeze(-2).contiguous()  # (…, *pixels, 1, channels)
        y = self._multiply_pixels(pixels, sigma, move_pixels(self.dilation)).squeeze(-2)
        if self.bias is not None:
            y = y + self.bias
        axes = tuple(range(-dims - 1, -1))
        before = [pads[0] for pads in self._pads]
        if self.padding_mode == "circular" and any(before):
            y = y.roll(before, axes)
        for axis, size in zip(axes, sizes, strict=True):
            y = y.narrow(axis, 0, size)
        y = y.movedim(-1, -dims - 1)
        last = dims == 2 and x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
        return y.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)

    def _axes(self, x: Tensor) -> Iterator[tuple[int, tuple[int, int], int, int]]:
        """Yields the size, padding, dilation and number of taps of each axis of an image."""
        sizes = x.shape[-len(self.kernel_size) :]
        return zip(sizes, self._pads, self.dilation, self.kernel_size, strict=True)

    def _multiply_pixels(self, x: Tensor, sigma: Tensor | None, move: Move) -> Tensor:
        """Applies the map to the pixels of x: (…, *pixels, 1, source) → (…, *pixels, 1, target)."""
        raise NotImplementedError

    def _has_chain_alone(self) -> bool:
        """True if the map consists of rotations and shifts only."""
        raise NotImplementedError

    def _sigma(self) -> Tensor:
        """The singular values, which are the same at every frequency: (*b, k)."""
        raise NotImplementedError

    def _from_taps(self, M: Tensor, columns_are_target: bool) -> Tensor:
        """The kernel (*b, target, source, *taps) from its taps M: (*b, *taps, rows, columns).

        The columns of M are the target channels if ``columns_are_target``, else the rows are. For equal numbers of
        channels callers choose rows, since the kernel is then made contiguous faster.
        """
        first = len(self._batch)
        order = (-1, -2) if columns_are_target else (-2, -1)
        return M.movedim(order, (first, first + 1))

    def _convolve(self, x: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        padding: Any = self.padding
        if self.padding_mode == "circular":
            dims = len(self.kernel_size)
            for size, stride in zip(x.shape[-dims:], self.stride, strict=True):
                if size % stride:
                    raise ValueError(
                        f"with circular padding the sizes of `input` should be multiples of the stride, "
                        f"{self.stride}; got shape {tuple(x.shape)}"
                    )
            x, padding = F.pad(x, _flat(self._pads), mode="circular"), 0
        return _CONVOLVE[len(self.kernel_size)](x, kernel, bias, self.stride, padding, self.dilation, self.groups)

    def _convolve_transposed(self, y: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        """The adjoint. For circular padding, y is padded circularly and the middle of the result is returned."""
        dims = len(self.kernel_size)
        transposed = CONVOLVE_TRANSPOSED[dims]
        if self.padding_mode == "zeros":
            padding, extra = (self.padding, self.output_padding) if self._transposed else (0, 0)
            return transposed(y, kernel, bias, self.stride, padding, extra, self.groups, self.dilation)
        geometry = list(zip(self.kernel_size, self.stride, self.dilation, self._pads, strict=True))
        continued = [(-((p - d * (k - 1)) // s), -(-p // s)) for k, s, d, (p, _) in geometry]
        full = F.pad(y, _flat(continued), mode="circular")
        full = transposed(full, kernel, bias, self.stride, 0, 0, self.groups, self.dilation)
        for axis, (_, s, _, (p, _)) in enumerate(geometry):
            full = full.narrow(axis - dims, p + s * continued[axis][0], s * y.shape[axis - dims])
        return full

    # Properties of the map of images.

    def norm(self) -> Tensor:
        """The largest singular value of the map of images, max |σ|, a scalar. A bound of it for zero padding."""
        return self._sigma().abs().max()

    def cond(self) -> Tensor:
        """The condition number of the map of images, max |σ| / min |σ|, a scalar. Exact maps only: see ``inverse``."""
        self._check_exact("cond")
        sigma = self._sigma().abs()
        return sigma.max() / sigma.min()

    def inverse(self, y: Tensor) -> Tensor:
        """x with ``forward(x)`` = y, by a convolution of the same size. Shapes as in ``forward``.

        The map has to be exact (circular padding that keeps the number of pixels, or no padding and patches that do
        not overlap) and square (as many output channels as input channels times the strides).
        """
        self._check_invertible("inverse")
        return self._back(y, self._inverse_kernel())

    def inverse_and_logabsdet(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """``inverse(y)``, and log |det| of the inverse as a map of one sample, a scalar."""
        x = self.inverse(y)
        return x, -self._logabsdet(x.shape[-len(self.kernel_size) :], self._sigma())

    def _inverse_kernel(self) -> Tensor:
        """The kernel whose adjoint is the inverse map."""
        raise NotImplementedError

    def _back(self, y: Tensor, kernel: Tensor) -> Tensor:
        check_tensor("y", y)
        if self.bias is not None:
            y = y - self.bias.reshape(-1, *(1 for _ in self.kernel_size))
        return (self._convolve if self._transposed else self._convolve_transposed)(y, kernel, None)

    def _logabsdet(self, positions: Sequence[int], sigma: Tensor) -> Tensor:
        """log |det| of the map of one sample. ``positions``: the sizes of an input's axes."""
        own = math.prod(positions) // (1 if self._transposed else math.prod(self.stride))
        return own * log_abs_product(sigma).sum()

    def _check_exact(self, what: str) -> None:
        if not self._exact:
            raise ValueError(
                f"`{what}` needs padding_mode='circular' with padding that keeps every pixel, such as padding='same', "
                f"or no padding with kernel_size = stride; got {self}"
            )

    def _check_invertible(self, what: str) -> None:
        self._check_exact(what)
        n, m = self._matrix_shape[-2:]
        if n != m:
            raise ValueError(f"`{what}` needs a square map, out_channels = in_channels · strides; got {self}")

    # Methods that every layer of fasth has.

    @classmethod
    def _why_not(cls, dense: Any) -> str:
        return "its kernel is no product of rotations and shifts"

    def _decompose(self, weight: Tensor) -> Factors:
        raise ValueError(f"{type(self).__name__} takes no given kernel, which is no product of rotations and shifts")

    def _to_dense(self) -> Any:
        first = self._first()
        options = {name: getattr(self, name) for name in _OPTIONS} | {"bias": self.bias is not None}
        if self._transposed:
            options["output_padding"] = self.output_padding
        return self._give(nn.utils.skip_init(self._dense, **options, device=first.device, dtype=first.dtype))

    def _why_not_to_dense(self) -> str:
        if self._transposed and self.padding_mode == "circular":
            return f"nn.{self._dense.__name__} has no circular padding"
        return ""

    def extra_repr(self) -> str:
        options = [f"kernel_size={self.kernel_size}", f"stride={self.stride}"]
        defaults = {"padding": 0, "output_padding": 0, "dilation": 1}
        for name, default in defaults.items():
            if getattr(self, name) not in ((), (default,) * len(self.kernel_size)):
                options.append(f"{name}={getattr(self, name)!r}")
        if self.groups != 1:
            options.append(f"groups={self.groups}")
        if self.padding_mode != "zeros":
            options.append(f"padding_mode={self.padding_mode!r}")
        return f"{self.in_channels}, {self.out_channels}, {', '.join(options)}, bias={self.bias is not None}"


_OPTIONS = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")


def _flat(pads: Sequence[tuple[int, int]]) -> list[int]:
    """The padding in the order of ``F.pad``: last axis first."""
    return [p for pair in reversed(pads) for p in pair]
