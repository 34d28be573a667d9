"""Adapters that add U diag(σ) Vᵀ x to a layer's output: a thin SVD, or a change of the weight's own singular values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasth.adapters.kinds import Adapter, Layer, check_rank
from fasth.adapters.layers import CONVOLUTIONS, features_of, matrices_of
from fasth.nn import Conv1dSVD, Conv2dSVD, LinearSVD
from fasth.nn.held_weight import HeldWeight
from fasth.spectrum import free

CONVOLUTION_OPTIONS = ("kernel_size", "stride", "padding", "dilation", "padding_mode")


class Beside(Adapter):
    """y = layer(x) + D x with D = U diag(σ) Vᵀ: (n, m), which has r singular values, initially zero."""

    def forward(self, layer: Layer, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """layer(x) + D x."""
        y = layer(x, *args, **kwargs)
        return y + self._added(x).to(y.dtype)

    def _added(self, x: Tensor) -> Tensor:
        """D x."""
        raise NotImplementedError

    def _matrices(self) -> Tensor:
        """D: (*p, n, m), one matrix for each position of a kernel."""
        raise NotImplementedError

    def merged(self, W: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """W + D."""
        return W + self._matrices().to(W.dtype), bias

    def unmerged(self, W: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """W − D."""
        return W - self._matrices().to(W.dtype), bias


class ThinSVD(Beside):
    """D is a ``LinearSVD``, ``Conv1dSVD`` or ``Conv2dSVD`` of rank r, whose U, V and σ are trained."""

    def __init__(self, options: dict[str, Any], layer: Any, r: int, device: Any, dtype: Any) -> None:
        super().__init__("thin SVD", options)
        self.svd = _like(layer, {nn.Conv1d: Conv1dSVD, nn.Conv2d: Conv2dSVD}, LinearSVD, r, device, dtype)
        nn.init.zeros_(self.svd.sigma)

    def restart(self) -> None:
        """Initializes U and V anew, and sets σ = 0."""
        self.svd.reset_parameters()
        nn.init.zeros_(self.svd.sigma)

    def _added(self, x: Tensor) -> Tensor:
        return self.svd(x.to(next(self.svd.parameters()).dtype))

    def _matrices(self) -> Tensor:
        return self.svd.weight.movedim((0, 1), (-2, -1))


class SingularValues(Beside):
    """D = U diag(δ) Vᵀ with the r largest singular directions of the layer's own weight, frozen: σ becomes σ + δ."""

    U: Tensor
    sigma: Tensor

    def __init__(self, options: dict[str, Any], layer: Any, r: int | None, device: Any, dtype: Any) -> None:
        super().__init__("singular values", options)
        W = _kernel(layer)
        U, sigma, Vh = torch.linalg.svd(W.flatten(1).to(device, torch.promote_types(W.dtype, torch.float32)), False)
        k = len(sigma) if r is None else min(r, len(sigma))
        self.axis = features_of(layer).axis  # type: ignore[union-attr]
        self.delta = nn.Parameter(torch.zeros(k, device=device, dtype=dtype))
        self.register_buffer("sigma", sigma[:k].to(dtype))
        self.register_buffer("U", U[:, :k].to(dtype).contiguous(), persistent=False)
        self.directions = _like(layer, dict(zip(CONVOLUTIONS, CONVOLUTIONS, strict=True)), nn.Linear, k, device, dtype)
        shape = self.directions.weight.shape
        del self.directions.weight  # replaced by a buffer, since it is constant
        self.directions.register_buffer("weight", Vh[:k].to(dtype).reshape(shape), persistent=False)

    def held_weights(self) -> Iterator[HeldWeight]:
        """Yields D, whose singular values are the change of the layer's singular values."""
        shape = len(self.U), self.directions.weight[0].numel()
        yield HeldWeight("", shape, self.U, self.delta, None, "full", free())

    def restart(self) -> None:
        """Makes the changed singular values the initial ones: σ ← σ + δ, δ ← 0."""
        with torch.no_grad():
            self.sigma.add_(self.delta)
            self.delta.zero_()

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Loads δ. Raises ValueError if the adapter was saved for a weight with other singular values."""
        expected = self.sigma.cpu().double()
        if not torch.allclose(tensors["sigma"].cpu().double(), expected, rtol=1e-2, atol=1e-3 * expected.max().item()):
            raise ValueError("the adapter was saved for a weight with other singular values")
        with torch.no_grad():
            self.delta.copy_(tensors["delta"])

    def _added(self, x: Tensor) -> Tensor:
        along = self.directions(x.to(self.delta.dtype)).movedim(self.axis, -1)
        return F.linear(along, self.U * self.delta).movedim(-1, self.axis)

    def _matrices(self) -> Tensor:
        Vh = self.directions.weight
        D = (self.U * self.delta) @ Vh.flatten(1)
        return D.reshape(-1, *Vh.shape[1:]).movedim((0, 1), (-2, -1))


def thin_svd(layer: Any, *, r: int = 8, device: Any, dtype: Any) -> ThinSVD:
    """Makes an adapter with a thin SVD of rank r."""
    return ThinSVD({"r": check_rank(r)}, layer, r, device, dtype)


def singular_values(layer: Any, *, r: int | None = None, device: Any, dtype: Any) -> SingularValues:
    """Makes an adapter of the r largest singular values, by default all."""
    return SingularValues({"r": None if r is None else check_rank(r)}, layer, r, device, dtype)


def _like(layer: Any, convolutions: dict[Any, Any], linear: Any, r: int, device: Any, dtype: Any) -> Any:
    """Makes a layer like ``layer``: for a convolution, of the class in ``convolutions``; else of the class ``linear``.

    An SVD layer has the sizes of ``layer`` and the rank r. A dense layer has r outputs. Neither has a bias.
    """
    features = features_of(layer)
    like: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
    for dense, kind in convolutions.items():
        if isinstance(layer, dense):
            if layer.groups != 1:
                raise ValueError(f"{layer} cannot have this adapter: with groups its weight is several matrices")
            like |= {name: getattr(layer, name) for name in CONVOLUTION_OPTIONS}
            return _of_rank(kind, kind is dense, features, r, layer.weight[0].numel(), like)
    if features is None or features.axis != -1:
        raise ValueError(f"{type(layer).__name__} cannot have this adapter, but linear layers and convolutions can")
    return _of_rank(linear, linear is nn.Linear, features, r, features.inputs, like)


def _of_rank(kind: Any, thin_output: bool, features: Any, r: int, patch: int, like: dict[str, Any]) -> Any:
    if thin_output:
        return nn.utils.skip_init(kind, features.inputs, r, **like)
    return kind(features.inputs, features.outputs, rank=min(r, features.outputs, patch), **like)


def _kernel(layer: Any) -> Tensor:
    """The weight of a layer: (n, m), or (n, m, *kernel_size)."""
    matrices = matrices_of(layer)
    if isinstance(matrices, str):
        raise ValueError(f"the singular values of this layer are not known: {matrices}")
    M = matrices.read(layer.weight.detach())
    return M.movedim((-2, -1), (0, 1))
