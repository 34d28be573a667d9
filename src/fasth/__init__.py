"""Neural networks that have SVDs: orthogonal and SVD-parametrised weights, exact and fast."""

from fasth import parametrizations, spectrum
from fasth.convert import compress, to_dense, to_svd
from fasth.flows import SVDTransform
from fasth.nn import RNNSVD, Conv1dSVD, Conv2dSVD, LinearOrthogonal, LinearSVD, LinearSymmetric
from fasth.operators import SVD, Orthogonal, Symmetric
from fasth.optim import param_groups
from fasth.penalties import nuclear_norm
from fasth.reflections import householder
from fasth.tuner import tune
from fasth.watch import spectra

__all__ = [
    "RNNSVD",
    "SVD",
    "Conv1dSVD",
    "Conv2dSVD",
    "LinearOrthogonal",
    "LinearSVD",
    "LinearSymmetric",
    "Orthogonal",
    "SVDTransform",
    "Symmetric",
    "compress",
    "householder",
    "nuclear_norm",
    "param_groups",
    "parametrizations",
    "spectra",
    "spectrum",
    "to_dense",
    "to_svd",
    "tune",
]

__version__ = "0.1.0"
