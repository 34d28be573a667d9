"""Layers that hold their weight as its factors, with the signatures of those of ``torch.nn``."""

from fasth.nn.cache import cached
from fasth.nn.conv import Conv1dSVD, Conv2dSVD
from fasth.nn.gated import GRUSVD, LSTMSVD
from fasth.nn.linear import LinearOrthogonal, LinearSVD, LinearSymmetric
from fasth.nn.rnn import RNNSVD

__all__ = [
    "GRUSVD",
    "LSTMSVD",
    "RNNSVD",
    "Conv1dSVD",
    "Conv2dSVD",
    "LinearOrthogonal",
    "LinearSVD",
    "LinearSymmetric",
    "cached",
]
