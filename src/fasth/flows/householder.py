"""The Householder flow: one product of reflections for each sample."""

from __future__ import annotations

from torch import Tensor

from fasth.flows.reflectors import ReflectorTransform, check_reflectors, reflect_each

__all__ = ["HouseholderTransform"]


class HouseholderTransform(ReflectorTransform):
    """y = Q x with Q = H₁H₂⋯H_r, H = I − 2vvᵀ/‖v‖², where every sample has reflectors of its own; log |det| = 0.

    The Householder flow turns the diagonal covariance of a Gaussian posterior into a full one, by reflectors that the
    encoder makes for each input. A zero reflector is the identity. The inverse is x = Qᵀ y.

    Args:
        V: (*b, r, d), the reflectors, any numbers, one a row; H_r acts first. (r, d): one Q for all samples.
        cache_size: as in every Transform: with 1, the inverse of the last result is the argument that it came from.

    x is (*, d), with * broadcast against b: (*b, d) has one Q a sample, and in (samples, *b, d) the samples share it.
    About 4·r·d operations for each row of x, and O(r·k·d) for each Q, with k ≤ 32 reflections handled as one.

    Example:
        >>> encoder = nn.Linear(10, 4 * 8)  # 4 reflectors of 8 entries from a context of 10 numbers
        >>> V = encoder(torch.randn(5, 10)).unflatten(-1, (4, 8))
        >>> base = torch.distributions.Normal(torch.zeros(5, 8), torch.rand(5, 8))
        >>> posterior = torch.distributions.TransformedDistribution(base, [HouseholderTransform(V, cache_size=1)])
        >>> z = posterior.rsample()
        >>> posterior.log_prob(z).shape
        torch.Size([5])

    Tomczak and Welling, *Improving Variational Auto-Encoders using Householder Flow*, 2016.
    """

    def __init__(self, V: Tensor, cache_size: int = 0) -> None:
        check_reflectors(V)
        super().__init__({"V": V}, tuple(V.shape[:-2]), 1, cache_size)

    def with_cache(self, cache_size: int = 1) -> HouseholderTransform:
        return HouseholderTransform(self.V, cache_size)

    def _call(self, x: Tensor) -> Tensor:
        self.forward_shape(x.shape)
        return reflect_each(x, self.V)

    def _inverse(self, y: Tensor) -> Tensor:
        self.forward_shape(y.shape)
        return reflect_each(y, self.V, transpose=True)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Zeros: (*), the shape of the batch."""
        return x.new_zeros(self.forward_shape(x.shape)[:-1])
