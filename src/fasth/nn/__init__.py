"""Layers that hold their weight as its factors, with the signatures of those of ``torch.nn``."""

from fasth.nn import lipschitz
from fasth.nn.cache import cached
from fasth.nn.conv import Conv1dSVD, Conv2dSVD
from fasth.nn.conv_svd_map import Conv1dMapSVD, Conv2dMapSVD
from fasth.nn.gated import GRUSVD, LSTMSVD
from fasth.nn.linear import LinearOrthogonal, LinearSVD, LinearSymmetric
from fasth.nn.orthogonal_conv import (
    Conv1dOrthogonal,
    Conv2dOrthogonal,
    ConvTranspose1dOrthogonal,
    ConvTranspose2dOrthogonal,
)
from fasth.nn.rnn import RNNSVD

__all__ = [
    "GRUSVD",
    "LSTMSVD",
    "RNNSVD",
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
    "cached",
    "lipschitz",
]
