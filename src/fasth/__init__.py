"""Neural networks that have SVDs: orthogonal and SVD-parametrised weights, exact and fast."""

import sys

from fasth import adapters, parametrizations, spectrum
from fasth.adapters import peft
from fasth.convert import compress, to_dense, to_svd
from fasth.flows import SVDTransform
from fasth.functional import householder
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
from fasth.spectra import nuclear_norm, spectra
from fasth.tools.hidden_gradients import hidden_gradients
from fasth.tools.tune import tune

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
    "adapters",
    "cached",
    "compress",
    "hidden_gradients",
    "householder",
    "lipschitz",
    "nuclear_norm",
    "param_groups",
    "parametrizations",
    "peft",
    "spectra",
    "spectrum",
    "to_dense",
    "to_svd",
    "tune",
]

__version__ = "0.2.0"

# ``import fasth.spectra as s`` binds the function, which hides the module of its name. So each of these functions has
# the public names of its module as attributes, ``s.LayerSpectrum``. Two of the modules are in tools/.
for _function in (hidden_gradients, spectra, tune):
    _module = sys.modules[_function.__module__]
    sys.modules[f"fasth.{_function.__name__}"] = _module
    vars(_function).update({name: getattr(_module, name) for name in _module.__all__})

# Modules that users know by another name: ``from fasth.peft import enable``.
sys.modules |= {"fasth.peft": peft, "fasth.lipschitz": lipschitz}
