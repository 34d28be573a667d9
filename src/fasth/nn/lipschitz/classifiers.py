"""What a 1-Lipschitz classifier is trained with, and what it is then certain of."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor


def margin_loss(scores: Tensor, labels: Tensor, *, margin: float = 1.0, temperature: float = 0.25) -> Tensor:
    """τ · cross entropy((scores − margin · onehot(labels)) / τ), the mean over the batch: a scalar.

    As τ → 0 that is max(0, margin − (the label's score − the largest other)): scores of a 1-Lipschitz network cannot
    grow without bound, and what is to grow is their distance, up to ``margin`` and, with τ, softly beyond. A larger
    margin buys certified radius with accuracy.

    Args:
        scores: (batch, classes).
        labels: (batch,), integers.
        margin: in the units of the scores: √2 times the radius that is wanted, for a last layer with orthonormal rows.
        temperature: τ, above 0.
    """
    if not temperature > 0:
        raise ValueError(f"`temperature` should be above 0; got {temperature}")
    moved = scores - margin * F.one_hot(labels, scores.shape[-1]).to(scores.dtype)
    return temperature * F.cross_entropy(moved / temperature, labels)


def certified_radius(
    scores: Tensor, labels: Tensor | None = None, *, lipschitz: float = 1.0, rows: Tensor | None = None
) -> Tensor:
    """How far an input can be moved without the class changing: (batch,), in the Euclidean norm.

    min over j ≠ y of (score_y − score_j) / (L · ‖w_y − w_j‖), with y the label, or the largest score if no labels are
    given; negative where the label is not the largest.

    Args:
        scores: (batch, classes).
        labels: (batch,).
        lipschitz: L, a Lipschitz constant of the map to all scores, or, with ``rows``, of what is before the last
            layer.
        rows: (classes, features), the weight of the last layer, ``LinearUnitRows.rows`` for example. Without it
            ‖w_y − w_j‖ is √2, as for the scores themselves, and for orthonormal rows.
    """
    y = scores.argmax(-1) if labels is None else labels
    distances: Tensor | float = math.sqrt(2)
    if rows is not None:
        distances = (rows[y].unsqueeze(1) - rows).norm(dim=-1)
    margins = scores.gather(-1, y.unsqueeze(-1)) - scores
    radii = (margins / distances / lipschitz).scatter(-1, y.unsqueeze(-1), math.inf)
    return radii.amin(-1)
