"""A matrix as its factors: ``Orthogonal``, ``SVD`` and ``Symmetric``."""

from fasth.operators.orthogonal import Orthogonal
from fasth.operators.svd import SVD
from fasth.operators.symmetric import Symmetric

__all__ = ["SVD", "Orthogonal", "Symmetric"]
