"""Neural networks that have SVDs: orthogonal and SVD-parametrised weights at about the cost of ``nn.Linear``."""

from fasth.reflections import householder

__all__ = ["householder"]

__version__ = "0.1.0"
