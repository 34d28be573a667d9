"""Penalties on the singular values of a whole model, to be added to its loss."""

from __future__ import annotations

from torch import Tensor, nn

from fasth.nn.held_weight import named_held_weights
from fasth.operators.matrix import computing_dtype

__all__ = ["nuclear_norm"]


def nuclear_norm(model: nn.Module) -> Tensor:
    """Σ|σ|, the sum of ‖W‖_* over the weights W = U diag(σ) Vᵀ of ``model``: a scalar, differentiable.  O(Σ min(n, m)).

    It is to the rank what Σ|w| is to the number of nonzero weights: as a penalty it takes singular values to zero that
    the loss has little use for, and ``compress`` then leaves them out. Nothing is decomposed.

    Counted are ``LinearSVD``, ``LinearSymmetric``, the convolutions, the recurrent layers and the tensors under
    ``fasth.parametrizations.svd``; a weight that is shared once. Orthogonal ones are constants, and dense ones are left
    out. The sum is in float32 at least.

    Example:
        >>> model, x, y = fasth.LinearSVD(64, 10), torch.randn(32, 64), torch.randint(10, (32,))
        >>> loss = F.cross_entropy(model(x), y) + 1e-3 * nuclear_norm(model)
    """
    held = [weight for _, weight in named_held_weights(model) if weight.trained and not weight.is_changed]
    weights = {tuple(map(id, weight.factors)): weight for weight in held}
    if not weights:
        raise ValueError(
            "`model` should hold a weight as its SVD, as LinearSVD does and to_svd makes them; "
            f"got {type(model).__name__} without one"
        )
    values = [weight.singular_values for weight in weights.values()]
    norms = [sigma.abs().sum(dtype=computing_dtype(sigma.dtype)) for sigma in values]
    return sum((norm.to(norms[0].device) for norm in norms[1:]), norms[0])
