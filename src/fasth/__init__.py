"""Neural networks that have SVDs: orthogonal and SVD-parametrised weights, exact and fast."""

from fasth import parametrizations, spectrum
from fasth.convert import compress, to_dense, to_svd
from fasth.flows import SVDTransform
from fasth.functional import householder
from fasth.hidden_gradients import hidden_gradients
from fasth.nn import (
    GRUSVD,
    LSTMSVD,
    RNNSVD,
    Conv1dSVD,
    Conv2dSVD,
    LinearOrthogonal,
    LinearSVD,
    LinearSymmetric,
    cached,
)
from fasth.operators import SVD, Orthogonal, Symmetric
from fasth.optim import param_groups
from fasth.penalties import nuclear_norm
from fasth.spectra import spectra
from fasth.tune import tune

__all__ = [
    "GRUSVD",
    "LSTMSVD",
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
    "cached",
    "compress",
    "hidden_gradients",
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

__version__ = "0.2.0"
