"""Truncates one layer to its largest singular values: to two thin layers if these are smaller, otherwise to a dense
layer; or, for further training, to an SVD."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from fasth.convert.replace import weight_parameters
from fasth.nn import Conv1dSVD, Conv2dSVD, LinearSVD, LinearSymmetric
from fasth.nn.factored import Factored
from fasth.nn.factors import SVDFactors
from fasth.operators import SVD
from fasth.operators.orthogonal import compact_from_dense
from fasth.spectrum import free

DENSE = (nn.Linear, nn.Conv1d, nn.Conv2d)
FACTORED = (LinearSVD, LinearSymmetric, Conv1dSVD, Conv2dSVD)
GEOMETRY = ("kernel_size", "stride", "padding", "dilation", "padding_mode")  # of a convolution


class LowRank(nn.Sequential):
    """x ↦ B (A x) + bias: two thin layers in place of one with W = B A.  A: (r, m), B: (n, r), where r·(n + m) < n·m.

    For a convolution, A is its kernel with r output channels, and B is 1×1.
    """

    @property
    def weight(self) -> Tensor:
        """W, for modules that read the weights of their layers, as ``nn.TransformerEncoderLayer`` does."""
        A, B = self.get_parameter("0.weight"), self.get_parameter("1.weight")
        return (B.flatten(1) @ A.flatten(1)).reshape(B.shape[0], *A.shape[1:])

    @property
    def bias(self) -> Tensor | None:
        bias: Any = self[1].bias
        return bias

    def __getattr__(self, name: str) -> Any:
        """The sizes of the replaced layer, for modules that read them, as Whisper reads ``conv1.stride``."""
        if name in ("out_features", "out_channels"):
            return getattr(self[1], name)
        if name in ("in_features", "in_channels", *GEOMETRY):
            return getattr(self[0], name)
        return super().__getattr__(name)


def matrix_shape(layer: Any) -> tuple[int, int]:
    """(n, m) of the matrix of a Linear or Conv layer, or of its factored twin."""
    n, m = layer.weight.flatten(1).shape if isinstance(layer, DENSE) else _svd(layer).shape
    return n, m


@torch.no_grad()
def truncated(
    layer: Any, rank: int | None, energy: float | None, trainable: bool = False
) -> tuple[nn.Module | None, str]:
    """Returns the truncated layer, or None if it would equal ``layer``, and the reason, for the report.

    The result is two thin layers or a dense one; if ``trainable``, a layer of fasth with the kept singular values.
    """
    n, m = matrix_shape(layer)
    full = min(n, m)
    if rank is not None and rank >= full and isinstance(layer, DENSE) and not trainable:
        return None, f"its rank is at most {full}"
    svd = _svd(layer)
    svd = svd.truncate(energy=energy) if rank is None else svd.truncate(rank=min(rank, full))
    kept = svd.sigma.nonzero().squeeze(-1)
    kept = kept if kept.numel() else kept.new_zeros(1)
    r = kept.numel()
    if trainable:
        if isinstance(layer, SVDFactors) and r == layer.rank:
            return None, f"it needs all its singular values, {r}"
        return _of_low_rank(layer, svd, kept), f"rank {r} of {full}"
    if r * (n + m) < n * m:
        return _two_thin(layer, svd, kept), f"rank {r} of {full}"
    if r == full and isinstance(layer, DENSE):
        return None, f"it needs its full rank, {full}"
    dense = copy.deepcopy(layer) if isinstance(layer, DENSE) else layer._to_dense()
    dense.weight.copy_(svd.dense().reshape(dense.weight.shape))
    return dense, f"rank {r} of {full}: two thin layers would be larger"


def _svd(layer: Any) -> SVD:
    if isinstance(layer, DENSE):
        weight = layer.weight.detach().flatten(1)
        return SVD.from_dense(weight.float() if weight.dtype in (torch.bfloat16, torch.float16) else weight)
    return layer.eig if isinstance(layer, LinearSymmetric) else layer.svd


def _two_thin(layer: Any, svd: SVD, kept: Tensor) -> LowRank:
    """W = (U √Σ)(√Σ Vᵀ) over the singular values ``kept``: balanced, so that training treats both alike."""
    U, sigma, V = _kept_factors(svd, kept)
    A, B = (sigma.abs().sqrt() * V).mT, sigma.sign() * sigma.abs().sqrt() * U
    r, weight = kept.numel(), weight_parameters(layer)[0]
    options = {"device": weight.device, "dtype": weight.dtype}
    if isinstance(layer, (nn.Linear, LinearSVD, LinearSymmetric)):
        first = skip_init(nn.Linear, layer.in_features, r, bias=False, **options)
        second = skip_init(nn.Linear, r, layer.out_features, bias=layer.bias is not None, **options)
    else:
        kind = nn.Conv1d if isinstance(layer, (nn.Conv1d, Conv1dSVD)) else nn.Conv2d
        geometry = {name: getattr(layer, name) for name in GEOMETRY[1:]}
        first = skip_init(kind, layer.in_channels, r, layer.kernel_size, bias=False, **geometry, **options)
        second = skip_init(kind, r, layer.out_channels, 1, bias=layer.bias is not None, **options)
    for thin, matrix in ((first, A), (second, B)):
        thin.weight.copy_(matrix.reshape(thin.weight.shape))
        thin.weight.requires_grad_(any(p.requires_grad for p in weight_parameters(layer)))
    return LowRank(first, second)


def _of_low_rank(layer: Any, svd: SVD, kept: Tensor) -> SVDFactors:
    """W = U Σ Vᵀ over the singular values ``kept``: a layer of fasth of this rank, with the spectrum of ``layer``."""
    U, sigma, V = _kept_factors(svd, kept)
    like: Any = weight_parameters(layer)[0]
    options = {
        "bias": layer.bias is not None,
        "device": like.device,
        "dtype": like.dtype,
        "reflectors": getattr(layer, "form", "compact"),
        "spectrum": getattr(layer, "spectrum", free()),
        "rank": kept.numel(),
    }
    new: SVDFactors
    if isinstance(layer, (nn.Linear, LinearSVD, LinearSymmetric)):
        new = skip_init(LinearSVD, layer.in_features, layer.out_features, **options)
    else:
        kind = Conv1dSVD if isinstance(layer, (nn.Conv1d, Conv1dSVD)) else Conv2dSVD
        geometry = {name: getattr(layer, name) for name in GEOMETRY[1:]}
        sizes = layer.in_channels, layer.out_channels, layer.kernel_size
        new = skip_init(kind, *sizes, **geometry, **options)
    new._write(**new._as_parameters(compact_from_dense(U), sigma, compact_from_dense(V)))
    trained = layer._trained_factors() if isinstance(layer, Factored) else weight_parameters(layer)
    was_trained = {factor is getattr(layer, "sigma", None): factor.requires_grad for factor in trained}
    # sigma as sigma was, and the reflectors as the reflectors were; of a dense layer all as its weight
    for factor in new._trained_factors():
        factor.requires_grad_(was_trained.get(factor is new.sigma, was_trained[False]))
    new.init = getattr(layer, "init", new.init)
    return new


def _kept_factors(svd: SVD, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U: (n, r), σ: (r,) and V: (m, r) of the singular values ``kept``."""
    U, V = (Q @ F.one_hot(kept, Q.shape[-1]).mT.to(svd.dtype) for Q in (svd.U, svd.V))
    return U, svd.sigma[kept], V
