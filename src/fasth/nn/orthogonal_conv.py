"""Convolutions that are orthogonal as maps of images, by construction: nothing is iterated, and no size is fixed."""

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
<<<<<<< HEAD
from fasth.operators.svd import log_abs_product

INITS = ("haar", "1x1", "identity")
PADDING_MODES = ("zeros", "circular")

_CONVOLVE: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d}
_CONVOLVE_TRANSPOSED: dict[int, Callable[..., Tensor]] = {1: F.conv_transpose1d, 2: F.conv_transpose2d}


class Shift(NamedTuple):
    """A shift of half of the channels by one tap of the kernel."""

    dim: int  # of the taps in (*taps, rows, channels), negative
    of_first_half: bool


def shifts(taps: Sequence[int]) -> tuple[Shift, ...]:
    """The shifts that make a kernel of these sizes: the last axis first, then axes and halves in turns.

    Two in a row along one axis move both halves, so that without rotations an odd kernel is its middle tap.
    """
    axes = range(-1, -len(taps) - 1, -1)
    return tuple(Shift(axis - 2, i % 2 == 1) for i in range(max(taps) - 1) for axis in axes if i < taps[axis] - 1)


class Chain(NamedTuple):
    """The sizes of A₀ S₁ A₁ ⋯ S_n A_n, an orthogonal convolution, and of its reflectors, which are rows of one tensor.

    A_n: (c, r) has r ≤ c orthonormal columns. Of the other rotations only the first h = ⌊c/2⌋ columns matter: what else
    there is turns each half of the channels in itself, which commutes with the shift. So each is h reflections.
    """

    steps: tuple[Shift, ...]  # S_n first, in the order in which they act on an image
    inner: int  # rotations besides A_n: n, or n − 1 where A₀ would be redundant
    channels: int
    rank: int

    @property
    def half(self) -> int:
        """h, the channels that count as the first half."""
        return self.channels // 2

    @property
    def rows(self) -> int:
        """The number of reflectors."""
        return self.inner * self.half + self.rank

    def split(self, reflectors: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Those of A_{n−1}, …, A₀: (*b, h, c) each, and of A_n: (*b, r, c).  reflectors: (*b, rows, c)."""
        if not self.inner:
            return (), reflectors
        inner, last = reflectors.split([self.inner * self.half, self.rank], -2)
        return inner.unflatten(-2, (self.inner, self.half)).unbind(-3), last

    def apply(self, M: Tensor, inner: Sequence[Tensor]) -> Tensor:
        """Each row of M through S_n, A_{n−1}, S_{n−1}, …, where a shift adds one tap.  M: (*b, *taps, rows, c).

        3c² operations per row and rotation. No rotation is formed: what is multiplied is the kernel, as rows.
        """
        for i, step in enumerate(self.steps):
            M = _shifted(M, step, self.half)
            if i < len(inner):
                M = _reflected(M, inner[i])
        return M

    def initial(self, init: str, **options: Any) -> Tensor:
        """Compact reflectors of a new layer: (rows, c). "1x1" is one tap with A₀ A_n Haar, "identity" one with I."""
        c, h, r = self.channels, self.half, self.rank
        if init == "haar":
            halves = [haar_compact(h, c, **options) for _ in range(self.inner)]
            return torch.cat([*halves, haar_compact(r, c, **options)])
        # Reflections of single coordinates commute with the shifts. Each inner rotation is −1 on the first half: their
        # signs are undone by the signs of A_n's columns, which stand on its diagonal.
        inner, last = [-torch.eye(h, c, **options) for _ in range(self.inner)], -torch.eye(r, c, **options)
        turned = self.inner % 2
        if init == "1x1":
            rotation = haar_compact(r, c, **options)
            if not self.inner:
                return rotation
            k = min(h, r)
            inner[-1][:k], last[k:] = rotation[:k], rotation[k:]  # A₀, and the rest of the reflections
            last.diagonal()[:k] = rotation.diagonal()[:k]
        last.diagonal()[:h] *= -1 if turned else 1
        return torch.cat([*inner, last])


def orthonormal_rows(V: Tensor) -> Tensor:
    """The first k rows of Qᵀ, with their signs: (*b, k, d), from compact reflectors V: (*b, k, d)."""
    if V.ndim == 2:
        return svd_dense(*one_side(V, None, wide=True))
    k, d = V.shape[-2:]
    return Orthogonal.of_stored(V).matmul(torch.eye(d, k, dtype=V.dtype, device=V.device)).mT


def _shifted(M: Tensor, step: Shift, half: int) -> Tensor:
    before, after = [0] * (-2 * step.dim), [0] * (-2 * step.dim)
    before[-2] = after[-1] = 1
    first, second = (before, after) if step.of_first_half else (after, before)
    return torch.cat((F.pad(M[..., :half], first), F.pad(M[..., half:], second)), -1)


def _reflected(M: Tensor, V: Tensor) -> Tensor:
    if V.ndim == 2:
        return reflect(M, V, "compact")
    return reflect(M.flatten(1, -2), V, "compact").reshape(M.shape)


class ImageMap(Factored):
    """A convolution, or the transpose of one, whose singular values as a map of images are known.

    Everything is said of the convolution: from ``_source`` to ``_target`` channels in each group, with the kernel
    (groups · target, source, *taps). A transposed layer is its adjoint.
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
        """Before and after the pixels of each axis. Of "same" the odd one comes after."""
        if self.padding == "same":
            both = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
            return [(total // 2, total - total // 2) for total in both]
        return [(0, 0) if self.padding == "valid" else (int(p), int(p)) for p in self.padding]

    def _check_geometry(self) -> None:
        """Raises where no kernel is orthogonal, and where circular padding would repeat outputs."""
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
        self._exact = all(whole) and (circular or not any(sum(pads) for pads in self._pads))

    def _keeps_pixels(self, axis: int, circular: bool) -> bool:
        """Whether with circular padding size / stride outputs make up this axis: of a transposed layer, inputs."""
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
        # model.to(memory_format=torch.channels_last) changes tensors of four dimensions, which no parameter here has.
        if len(self.kernel_size) == 2:
            layout = torch.zeros(2, 2, 2, 2, dtype=torch.bool, device=device)
            self.register_buffer("_layout", layout, persistent=False)

    def _memory_format(self) -> torch.memory_format:
        last = len(self.kernel_size) == 2 and self._layout.stride(1) == 1
        return torch.channels_last if last else torch.contiguous_format

    @property
    def _batch(self) -> tuple[int, ...]:
        """The batch dimensions of factors: those of several groups."""
        return () if self.groups == 1 else (self.groups,)

    @property
    def _fan_in(self) -> int:
        return self._source * math.prod(self.kernel_size)

    @property
    def _matrix_shape(self) -> tuple[int, ...]:
        """Of the map, per output pixel of the convolution."""
        n, m = self._target, self._source * math.prod(self.stride)
        return (*self._batch, m, n) if self._transposed else (*self._batch, n, m)

    # What the layer computes.

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
        kernel = self._form(sigma) if cached is None else cached
        multiply = self._convolve_transposed if self._transposed else self._convolve
        return multiply(input, kernel, self.bias)

    @property
    def weight(self) -> Tensor:
        """The kernel, shaped as in ``torch.nn``, dense and differentiable. It is a result: writing into it changes
        nothing."""
        cached = self._cached_weight()
        return self._form() if cached is None else cached

    def _form(self, sigma: Tensor | None = None) -> Tensor:
        first = self._first()
        if autocast_enabled(first):  # it would take the precision of the products, and with it the orthogonality
            with torch.autocast(first.device.type, enabled=False):
                return self._form(sigma)
        return self._kernel(sigma).contiguous(memory_format=self._memory_format())

    def _kernel(self, sigma: Tensor | None) -> Tensor:
        """(groups · target, source, *taps). ``sigma``: the singular values, if they are known."""
        raise NotImplementedError

    def _sigma(self) -> Tensor:
        """(*b, k), with which every frequency of an image is multiplied."""
        raise NotImplementedError

    def _from_taps(self, M: Tensor, columns_are_target: bool) -> Tensor:
        """The kernel (*b, target, source, *taps) whose transposed taps, or taps, are M: (*b, *taps, rows, columns).

        Between equal numbers of channels the rows are the target: then the kernel is made contiguous faster.
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
        """The adjoint. With circular padding: y is continued on all sides, and the middle of the result is taken."""
        dims = len(self.kernel_size)
        transposed = _CONVOLVE_TRANSPOSED[dims]
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

    # What is known of the map of images.

    def norm(self) -> Tensor:
        """The largest singular value of the map of images, max |σ|, a scalar; with zero padding, a bound of it."""
        return self._sigma().abs().max()

    def cond(self) -> Tensor:
        """The condition number of the map of images, max |σ| / min |σ|, a scalar. For exact maps: see ``inverse``."""
        self._check_exact("cond")
        sigma = self._sigma().abs()
        return sigma.max() / sigma.min()

    def inverse(self, y: Tensor) -> Tensor:
        """x with ``forward(x)`` = y, by a convolution of the same size. Shapes as there.

        For exact maps, with circular padding that keeps the number of pixels or no padding where patches do not
        overlap,
        that are square: as many output channels as input channels times the strides.
        """
        self._check_invertible("inverse")
        return self._back(y, self._inverse_kernel())

    def inverse_and_logabsdet(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """``inverse(y)``, and log |det| of it as a map of one sample, a scalar."""
        x = self.inverse(y)
        return x, -self._logabsdet(x.shape[-len(self.kernel_size) :], self._sigma())

    def _inverse_kernel(self) -> Tensor:
        """That of which the inverse is the adjoint."""
        raise NotImplementedError

    def _back(self, y: Tensor, kernel: Tensor) -> Tensor:
        check_tensor("y", y)
        if self.bias is not None:
            y = y - self.bias.reshape(-1, *(1 for _ in self.kernel_size))
        return (self._convolve if self._transposed else self._convolve_transposed)(y, kernel, None)

    def _logabsdet(self, positions: Sequence[int], sigma: Tensor) -> Tensor:
        """``positions``: the sizes of an input."""
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

    # What every layer of fasth can.

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
    """As ``F.pad`` takes it: the last axis first."""
    return [p for pair in reversed(pads) for p in pair]
=======
>>>>>>> main


class _Orthogonal(ImageMap):
    """An orthogonal convolution, or its adjoint: the chain, followed by an orthogonal matrix of patches if it is
    strided.

    Parameters, all compact, with the signs of columns on the diagonal of the last r reflectors:
        reflectors: (*b, rows, c), of the chain, with c = max and r = min of the two numbers of channels. Strided: from
            the source to c channels, with kernels of k − s + 1.
        patch_reflectors: (*b, ·, ·), only if strided: of the matrix from patches of s pixels to the target.
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
        """The rotations as ``init`` says, the bias as in ``torch.nn``."""
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
        chain = self._from_taps(self._chain.columns(M, inner, add_a_tap), self._chain_widens)
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
            return self._chain.columns(x @ rows, inner, move)
        return self._chain.rows_of(x, inner, move) @ rows.mT

    def _patches(self) -> Tensor:
        """The orthogonal matrix of patches, as a kernel: (*b, target, middle, *stride)."""
        rows = orthonormal_rows(self.patch_reflectors)
        W = rows if rows.shape[-2] == self._target else rows.mT
        return W.unflatten(-1, (-1, *self.stride))

    def _composed(self, patches: Tensor, chain: Tensor) -> Tensor:
        """Σ_{a+b} patches[a] chain[b]: (groups · target, source, *taps), which is a transposed convolution."""
        if self.groups > 1:
            patches = patches.movedim(1, 0).flatten(1, 2)
            chain = chain.flatten(0, 1)
        composed = CONVOLVE_TRANSPOSED[len(self.kernel_size)](patches, chain, groups=self.groups)
        if self.groups > 1:
            composed = composed.unflatten(1, (self.groups, self._source)).movedim(1, 0).flatten(0, 1)
        return composed

    def _sigma(self) -> Tensor:
        """All 1."""
        return self._first().new_ones(*self._batch, min(self._matrix_shape[-2:]))

    def _inverse_kernel(self) -> Tensor:
        return self._kernel_now()

    def adjoint(self, y: Tensor) -> Tensor:
        """Kᵀ (y − bias), which is the inverse of a square map, a left inverse if there are more outputs than inputs,
        and the shortest x with ``forward(x)`` = y if there are fewer. For exact maps: see ``inverse``."""
        self._check_exact("adjoint")
        return self._back(y, self._kernel_now())

    def held_weights(self) -> Iterator[HeldWeight]:
        """The map of images, of which every frequency has an orthogonal matrix."""
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

    Which images keep their length depends on the channels: all where out ≥ in·s², with s the stride (orthonormal
    columns); where out ≤ in·s² those that the layer does not map to zero (orthonormal rows).

    Args:
        in_channels, out_channels, groups, bias: as in ``nn.Conv2d``. In groups each has a kernel of its own.
        kernel_size: of any size, odd or even, at least the stride. Above it there should be two channels in a group, as
            one channel alone can only be shifted.
        stride: s > 1 is an orthogonal convolution of k − s + 1 taps, followed by an orthogonal matrix that takes
            patches of s×s pixels to the output's channels: one kernel of k taps.
        padding: any with zeros, where the norm is at most 1. With "circular" padding at most that which keeps the
            number of pixels, (k − 1)/2 or "same", with which the map is exact: orthogonal.
        dilation: any, without a common divisor with the stride.
        padding_mode: "zeros" or "circular".
        init: "haar": all rotations are uniformly distributed. "1x1": the kernel is one tap, the middle one if its size
            is odd, with a uniformly distributed matrix. "identity": one tap, with the identity as far as its shape has
            it.

    The kernel is formed once a call, or once within ``fasth.cached()``: see ``docs/convolutions.md`` for what that
    costs.
    """

    _dense = nn.Conv2d

    def logabsdet(self, height: int, width: int) -> Tensor:
        """log |det| of the layer as a map of one height × width image: 0, a scalar. For the maps of ``inverse``."""
        self._check_invertible("logabsdet")
        return self._logabsdet((height, width), self._sigma())


class Conv1dOrthogonal(_OrthogonalConv):
    """``nn.Conv1d`` that is orthogonal as a map of sequences. See ``Conv2dOrthogonal``."""

    _dense = nn.Conv1d

    def logabsdet(self, length: int) -> Tensor:
        """log |det| of the layer as a map of one sequence: 0, a scalar. For the maps of ``inverse``."""
        self._check_invertible("logabsdet")
        return self._logabsdet((length,), self._sigma())


class ConvTranspose2dOrthogonal(_OrthogonalConvTranspose):
    """``nn.ConvTranspose2d`` that is orthogonal as a map of images: the adjoint of ``Conv2dOrthogonal`` from out to in.

    ``nn.ConvTranspose2d``'s signature and shapes. With zero padding the norm is at most 1. It also takes circular
    padding, where the output has the stride times the size of the input, as ``padding`` and ``output_padding`` should
    say, and the map is orthogonal.
    """

    _dense = nn.ConvTranspose2d

    def logabsdet(self, height: int, width: int) -> Tensor:
        """log |det| of the layer as a map of one height × width image: 0, a scalar. For the maps of ``inverse``."""
        self._check_invertible("logabsdet")
        return self._logabsdet((height, width), self._sigma())


class ConvTranspose1dOrthogonal(_OrthogonalConvTranspose):
    """``nn.ConvTranspose1d`` that is orthogonal as a map of sequences. See ``ConvTranspose2dOrthogonal``."""

    _dense = nn.ConvTranspose1d

    def logabsdet(self, length: int) -> Tensor:
        """log |det| of the layer as a map of one sequence: 0, a scalar. For the maps of ``inverse``."""
        self._check_invertible("logabsdet")
        return self._logabsdet((length,), self._sigma())
