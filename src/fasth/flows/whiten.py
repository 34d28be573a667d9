"""Initializes a flow's layer from data."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from fasth.flows.layer import check_batch, invertible
from fasth.nn import LinearOrthogonal, LinearSymmetric

Layer = TypeVar("Layer", bound=nn.Module)


@torch.no_grad()
def whiten_(layer: Layer, x: Tensor, eps: float = 1e-4) -> Layer:
    """Makes W = U Vᵀ C^(−½), with C the covariance of x: then ``layer(x)`` has covariance I, and mean 0 with a bias.

    For layers that map data to noise: x is the layer's input in the first batch. U Vᵀ is the layer's current orthogonal
    matrix, which is kept: a rotation after ``init="haar"``, the identity after ``init="identity"`` and in
    ``LinearSymmetric``. The singular values become 1/√λ for the eigenvalues λ of C, each along its direction in the
    data, which training from equal singular values would have to find first. ``docs/flows.md`` shows where this helps,
    images, and where it does not. Costs an eigendecomposition of C and an SVD.

    Args:
        layer: as ``fasth.SVDTransform`` takes it, but not ``LinearOrthogonal``, which has no scale to learn.
        x: (batch, d) for a linear layer; (batch, channels, length) or (batch, channels, height, width) for a
            convolution, whose covariance is over the channels at all positions. A thousand rows or more: with few rows
            C overfits.
        eps: eigenvalues below ``eps`` times the largest are replaced by it, so cond(W) is at most 1/√eps.

    Returns:
        The layer. Singular values outside its spectrum are replaced as in ``set_weight_``.
    """
    checked = invertible(layer)
    if isinstance(layer, LinearOrthogonal):
        raise TypeError("`layer` should have singular values; got LinearOrthogonal, whose weight has no scale")
    if not 0 < eps <= 1:
        raise ValueError(f"`eps` should be above 0 and at most 1; got {eps}")
    if checked._cached_weight() is not None:
        raise RuntimeError("`whiten_` should be called outside of `fasth.cached()`, whose weights it would leave stale")
    check_batch(checked, x)
    rows = x.movedim(1, -1).reshape(-1, x.shape[1]).double()
    d = rows.shape[1]
    C = rows.mT.cov(correction=0).reshape(d, d)
    if not 0 < C.trace() < torch.inf:
        raise ValueError(f"`x` should be finite, and not the same in all rows; got shape {tuple(x.shape)}")
    values, axes = torch.linalg.eigh(C)
    scales = values.clamp(min=eps * values[-1]).rsqrt()
    weight = checked.weight
    W = (axes * scales) @ axes.mT
    if not isinstance(layer, LinearSymmetric):
        U, _, Vh = torch.linalg.svd(weight.double().reshape(d, d))
        W = U @ Vh @ W
    checked.set_weight_(W.to(weight.dtype).reshape(weight.shape))
    if checked.bias is not None:
        checked.bias.copy_(-(checked.weight.double().reshape(W.shape) @ rows.mean(0)))
    return layer
