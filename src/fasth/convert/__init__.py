"""Whole models: their layers held as SVDs, or dense again, or truncated."""

from fasth.convert.lowrank import LowRank
from fasth.convert.models import compress, to_dense, to_svd
from fasth.convert.replace import Conversion

__all__ = ["Conversion", "LowRank", "compress", "to_dense", "to_svd"]
