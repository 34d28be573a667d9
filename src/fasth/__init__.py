"""Neural networks that have SVDs: orthogonal and SVD-parametrised weights at about the cost of ``nn.Linear``."""

from fasth import spectrum
from fasth.convert import compress, to_dense, to_svd
from fasth.nn import RNNSVD, Conv1dSVD, Conv2dSVD, LinearOrthogonal, LinearSVD, LinearSymmetric
from fasth.operators import SVD, Orthogonal, Symmetric
from fasth.optim import param_groups
from fasth.reflections import householder

__all__ = [
    "RNNSVD",
    "SVD",
    "Conv1dSVD",
    "Conv2dSVD",
    "LinearOrthogonal",
    "LinearSVD",
    "LinearSymmetric",
    "Orthogonal",
    "Symmetric",
    "compress",
    "householder",
    "param_groups",
    "spectrum",
    "to_dense",
    "to_svd",
]

__version__ = "0.1.0"
