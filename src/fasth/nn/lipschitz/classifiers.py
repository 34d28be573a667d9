"""The loss and the certified radius of 1-Lipschitz classifiers."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor


def margin_loss(scores: Tensor, labels: Tensor, *, margin: float = 1.0, temperature: float = 0.25) -> Tensor:
    """τ · cross entropy((scores − margin · onehot(labels)) / τ), the mean over the batch: a scalar.

    As τ → 0 the loss is max(0, margin − (the label's score − the largest other score)). The scores of a 1-Lipschitz
    network are bounded, so the loss asks for a difference of scores of ``margin``, softened by τ. A larger margin
    raises the certified radius and lowers the accuracy.

    Args:
        scores: (batch, classes).
        labels: (batch,), integers.
        margin: in the units of the scores. For a last layer with orthonormal rows, √2 times the desired radius.
        temperature: τ, above 0.
    """
    if not temperature > 0:
        raise ValueError(f"`temperature` should be above 0; got {temperature}")
    moved = scores - margin * F.one_hot(labels, scores.shape[-1]).to(scores.dtype)
    return temperature * F.cross_entropy(moved / temperature, labels)


def certified_radius(
    scores: Tensor, labels: Tensor | None = None, *, lipschitz: float = 1.0, rows: Tensor | None = None
) -> Tensor:
    """The radius within which no change of an input changes its class: (batch,), in the Euclidean norm.

    min over j ≠ y of (score_y − score_j) / (L · ‖w_y − w_j‖), with y the label, or the largest score if no labels are
    given; negative where the label is not the largest.

    Args:
        scores: (batch, classes).
        labels: (batch,).
        lipschitz: L, a Lipschitz constant of the map to all scores, or, with ``rows``, of the layers before the last
            one.
        rows: (classes, features), the weight of the last layer, ``LinearUnitRows.rows`` for example. Without
            ``rows``, ‖w_y − w_j‖ is √2, as for orthonormal rows and for the scores themselves.
    """
    y = scores.argmax(-1) if labels is None else labels
    distances: Tensor | float = math.sqrt(2)
    if rows is not None:
        distances = (rows[y].unsqueeze(1) - rows).norm(dim=-1)
    margins = scores.gather(-1, y.unsqueeze(-1)) - scores
    radii = (margins / distances / lipschitz).scatter(-1, y.unsqueeze(-1), math.inf)
    return radii.amin(-1)
