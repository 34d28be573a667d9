"""Convolutions that hold their kernel, flattened to a matrix, as its singular value decomposition."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasth.functional import check_tensor, svd_thin
from fasth.nn.factored import Factors, at_least_one
from fasth.nn.factors import DEFAULT_INIT, SVDFactors
from fasth.operators.svd import log_abs_product
from fasth.spectrum import Spectrum

Self = TypeVar("Self", bound="_ConvSVD")


class _ConvSVD(SVDFactors):
    """A convolution of any number of dimensions. Its dense twin checks and completes the options."""

    _dense: ClassVar[type[nn.Conv1d] | type[nn.Conv2d]]
    _convolve: ClassVar[Callable[..., Tensor]]

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
        reflectors: str = "compact",
        spectrum: Spectrum | None = None,
        init: str = DEFAULT_INIT,
        rank: int | None = None,
    ) -> None:
        super().__init__()
        smallest = kernel_size if isinstance(kernel_size, int) else min(kernel_size)
        at_least_one(in_channels=in_channels, out_channels=out_channels, kernel_size=smallest)
        if groups != 1:
            raise ValueError(f"`groups` should be 1, since groups make the kernel several matrices; got {groups}")
        geometry: Any = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation}
        options: Any = {"padding_mode": padding_mode, "device": "meta"}
        twin = self._dense(in_channels, out_channels, **geometry, **options)
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride, self.dilation = twin.kernel_size, twin.stride, twin.dilation
        self.padding, self.padding_mode = twin.padding, padding_mode
        self._fan_in = in_channels * math.prod(self.kernel_size)
        self._add_factors(out_channels, self._fan_in, rank, reflectors, spectrum, init, device, dtype)
        self._add_bias(bias, out_channels, device, dtype)
        self._add_layout(device)
        self.reset_parameters()

    def _add_layout(self, device: Any) -> None:
        """Registers the memory-format buffer (2-d convolutions only)."""

    def reset_parameters(self) -> None:
        """U, V and σ as ``init`` says, the bias as in the dense convolution."""
        self._reset_factors()
        self._reset_bias(self._fan_in)

    def forward(self, input: Tensor) -> Tensor:
        """The convolution of ``input`` with the kernel, plus the bias; shapes as in ``torch.nn``, batched or not."""
        return self._run(input, None)

    def forward_and_logabsdet(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """``forward(input)``, and log |det| of the layer as a map of one sample, a scalar: σ is computed once for both.

        For 1×1 kernels with equal channels, stride 1 and no padding.
        """
        self._check_invertible("forward_and_logabsdet")
        sigma = self._sigma()
        return self._run(input, sigma), self._log_abs_det(input.shape[-len(self.kernel_size) :], sigma)

    def _run(self, input: Tensor, sigma: Tensor | None) -> Tensor:
        """``forward``. ``sigma``: the singular values, if they are known."""
        check_tensor("input", input)
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            input, padding = F.pad(input, self._padding_on_all_sides(), mode=self.padding_mode), 0
        cached = self._cached_weight()
        kernel = self._form(sigma) if cached is None else cached
        if self._is_thin:
            A, B = kernel
            return self._convolve(self._convolve(input, A, None, self.stride, padding, self.dilation), B, self.bias)
        return self._convolve(input, kernel, self.bias, self.stride, padding, self.dilation)

    def _padding_on_all_sides(self) -> list[int]:
        """The padding for ``F.pad``: last dimension first, before and after. An odd amount of "same" goes after."""
        sides = []
        for i in reversed(range(len(self.kernel_size))):
            if isinstance(self.padding, str):
                both = self.dilation[i] * (self.kernel_size[i] - 1) if self.padding == "same" else 0
                sides += [both // 2, both - both // 2]
            else:
                sides += [int(self.padding[i])] * 2
        return sides

    def _weight(self) -> Tensor:
        return self._kernel()

    def _kernel(self, sigma: Tensor | None = None) -> Tensor:
        return self._matrix(sigma).reshape(self._kernel_shape())

    def _form(self, sigma: Tensor | None = None) -> Any:
        """The kernel; of rank r, A: (r, in, *kernel_size) and B: (out, r, 1, …), two convolutions in sequence."""
        if not self._is_thin:
            return self._kernel(sigma).contiguous()
        A, B = svd_thin(*self._factors(sigma), form=self.form)
        one = [1 for _ in self.kernel_size]
        return A.reshape(-1, self.in_channels, *self.kernel_size), B.reshape(self.out_channels, -1, *one)

    def set_weight_(self: Self, weight: Tensor) -> Self:
        """Makes ``weight``: (out, in, *kernel_size) the kernel, to rounding, as ``LinearSVD.set_weight_`` does."""
        return super().set_weight_(weight)

    def _decompose(self, weight: Tensor) -> Factors:
        return self._decompose_matrix(self._matching(weight, self._kernel_shape()).flatten(1))

    def _kernel_shape(self) -> tuple[int, ...]:
        return (self.out_channels, self.in_channels, *self.kernel_size)

    def inverse(self, y: Tensor) -> Tensor:
        """x with ``forward(x)`` = y, for 1×1 kernels with equal channels, stride 1 and no padding. Shapes as there.

        A singular value of exactly zero raises ``torch.linalg.LinAlgError``.
        """
        self._check_invertible("inverse")
        return self._solve(y, self._sigma())

    def inverse_and_logabsdet(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """``inverse(y)``, and log |det| of it as a map of one sample, a scalar: σ is computed once for both."""
        self._check_invertible("inverse_and_logabsdet")
        sigma = self._sigma()
        return self._solve(y, sigma), -self._log_abs_det(y.shape[-len(self.kernel_size) :], sigma)

    def _solve(self, y: Tensor, sigma: Tensor) -> Tensor:
        """W⁻¹ (y − bias) at every position."""
        if self.bias is not None:
            y = y - self.bias.reshape(-1, *(1 for _ in self.kernel_size))
        return self._convolve(y, self._svd(sigma).inverse().dense().reshape(self._kernel_shape()))

    def _logabsdet(self, *positions: int) -> Tensor:
        self._check_invertible("logabsdet")
        return self._log_abs_det(positions, self._sigma())

    def _log_abs_det(self, positions: Sequence[int], sigma: Tensor) -> Tensor:
        zeros = self.in_channels - sigma.shape[-1]  # zero singular values, which are not stored
        return math.prod(positions) * log_abs_product(F.pad(sigma, (0, zeros)) if zeros else sigma)

    def _check_invertible(self, what: str) -> None:
        no_padding = isinstance(self.padding, str) or not any(self.padding)  # "same" and "valid" add none to 1×1
        if self.in_channels != self.out_channels or set((*self.kernel_size, *self.stride)) != {1} or not no_padding:
            raise ValueError(f"`{what}` needs a 1×1 kernel, equal channels, stride 1 and no padding; got {self}")

    @classmethod
    def _why_not(cls, dense: Any) -> str:
        return "" if dense.groups == 1 else "with groups its weight is several matrices"

    @classmethod
    def _from_dense(cls: type[Self], dense: Any, **options: Any) -> Self:
        if not isinstance(dense, cls._dense):
            raise TypeError(f"`conv` should be an nn.{cls._dense.__name__}; got {type(dense).__name__}")
        layer: Self = nn.utils.skip_init(cls, **_options_of(dense, dense.weight), **options)
        return layer._take(dense)

    def _to_dense(self) -> Any:
        return self._give(nn.utils.skip_init(self._dense, **_options_of(self, self.sigma)))

    def extra_repr(self) -> str:
        options = [f"kernel_size={self.kernel_size}", f"stride={self.stride}"]
        for name, default in (("padding", (0,) * len(self.kernel_size)), ("dilation", (1,) * len(self.kernel_size))):
            if getattr(self, name) != default:
                options.append(f"{name}={getattr(self, name)!r}")
        if self.padding_mode != "zeros":
            options.append(f"padding_mode={self.padding_mode!r}")
        options += [f"bias={self.bias is not None}", f"reflectors={self.form!r}", f"spectrum={self.spectrum}"]
        if self._is_thin:
            options.append(f"rank={self.rank}")
        return f"{self.in_channels}, {self.out_channels}, {', '.join(options)}"


class Conv2dSVD(_ConvSVD, converts=nn.Conv2d):
    """``nn.Conv2d`` whose kernel, as the matrix W: (out, in·kh·kw), is held as W = U diag(σ) Vᵀ.

    ``nn.Conv2d``'s signature and shapes, with ``groups`` = 1; ``reflectors``, ``spectrum``, ``init`` and ``rank`` as in
    ``LinearSVD``. W is formed once a call, or once within ``fasth.cached()``. Of rank r < min(out, in·kh·kw) it is
    never formed: two convolutions do the work, kh × kw to r channels, then 1×1 to ``out``.

    W maps a patch of the input, all channels of kh × kw pixels flattened as by ``F.unfold``, to the output channels at
    one position. With 1×1 kernels it is the whole layer at each position: Glow's invertible 1×1 convolution, with
    ``inverse`` and ``logabsdet`` if the numbers of channels are equal. For larger kernels σ are not the singular values
    of the convolution as a map of images. The norm of that map is at most
    √(kh·kw) · max |σ| with zero padding, since a pixel is in at most kh·kw patches; with stride = kh = kw and no
    padding, where patches do not overlap, its singular values are |σ|, each once for every position, and zeros.
    """

    _dense = nn.Conv2d
    _convolve = staticmethod(F.conv2d)
    _layout: Tensor

    def _add_layout(self, device: Any) -> None:
        # model.to(memory_format=torch.channels_last) changes tensors of four dimensions, which no parameter here has.
        self.register_buffer("_layout", torch.zeros(2, 2, 2, 2, dtype=torch.bool, device=device), persistent=False)

    def _kernel(self, sigma: Tensor | None = None) -> Tensor:
        return super()._kernel(sigma).contiguous(memory_format=self._memory_format())

    def _form(self, sigma: Tensor | None = None) -> Any:
        if not self._is_thin:
            return self._kernel(sigma)
        return tuple(t.contiguous(memory_format=self._memory_format()) for t in super()._form(sigma))

    def _memory_format(self) -> torch.memory_format:
        last = self._layout.stride(1) == 1  # vmap cannot answer is_contiguous for other formats
        return torch.channels_last if last else torch.contiguous_format

    def logabsdet(self, height: int, width: int) -> Tensor:
        """log |det| of the layer as a map of one height × width image: height · width · Σ log |σ|, a scalar.

        For 1×1 kernels with equal channels, stride 1 and no padding.
        """
        return self._logabsdet(height, width)

    @classmethod
    def from_conv(cls, conv: nn.Conv2d, **options: Any) -> Conv2dSVD:
        """The layer with the kernel, bias and all options of an ``nn.Conv2d``; see ``LinearSVD.from_linear``."""
        return cls._from_dense(conv, **options)

    def to_conv(self) -> nn.Conv2d:
        """An ``nn.Conv2d`` with this layer's kernel, bias and options. They share no memory."""
        return self._to_dense()


class Conv1dSVD(_ConvSVD, converts=nn.Conv1d):
    """``nn.Conv1d`` whose kernel, as the matrix W: (out, in·k), is held as W = U diag(σ) Vᵀ. See ``Conv2dSVD``."""

    _dense = nn.Conv1d
    _convolve = staticmethod(F.conv1d)

    def logabsdet(self, length: int) -> Tensor:
        """log |det| of the layer as a map of one sequence: length · Σ log |σ|, a scalar, as in ``Conv2dSVD``."""
        return self._logabsdet(length)

    @classmethod
    def from_conv(cls, conv: nn.Conv1d, **options: Any) -> Conv1dSVD:
        """The layer with the kernel, bias and all options of an ``nn.Conv1d``; see ``LinearSVD.from_linear``."""
        return cls._from_dense(conv, **options)

    def to_conv(self) -> nn.Conv1d:
        """An ``nn.Conv1d`` with this layer's kernel, bias and options. They share no memory."""
        return self._to_dense()


def _options_of(conv: Any, like: Tensor) -> dict[str, Any]:
    names = (
        "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode",
    )  # fmt: skip
    return {name: getattr(conv, name) for name in names} | {
        "bias": conv.bias is not None,
        "device": like.device,
        "dtype": like.dtype,
    }
