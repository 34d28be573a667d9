"""Neural networks that have SVDs: orthogonal and SVD-parametrised weights, exact and fast."""

import sys

from fasth import parametrizations, spectrum
from fasth.convert import compress, to_dense, to_svd
from fasth.flows import SVDTransform
from fasth.functional import householder
from fasth.hidden_gradients import hidden_gradients
from fasth.nn import (
    GRUSVD,
    LSTMSVD,
    RNNSVD,
    Conv1dMapSVD,
    Conv1dOrthogonal,
    Conv1dSVD,
    Conv2dMapSVD,
    Conv2dOrthogonal,
    Conv2dSVD,
    ConvTranspose1dOrthogonal,
    ConvTranspose2dOrthogonal,
    LinearOrthogonal,
    LinearSVD,
    LinearSymmetric,
    cached,
    lipschitz,
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
    "Conv1dMapSVD",
    "Conv1dOrthogonal",
    "Conv1dSVD",
    "Conv2dMapSVD",
    "Conv2dOrthogonal",
    "Conv2dSVD",
    "ConvTranspose1dOrthogonal",
    "ConvTranspose2dOrthogonal",
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
    "lipschitz",
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

# Each of these functions hides the module of its name: ``import fasth.spectra as s`` binds the function. So it has the
# module's public names as attributes, ``s.LayerSpectrum``.
for _function in (hidden_gradients, spectra, tune):
    _module = sys.modules[_function.__module__]
    vars(_function).update({name: getattr(_module, name) for name in _module.__all__})
