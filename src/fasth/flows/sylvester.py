"""The Sylvester flow: a residual layer whose determinant and inverse reduce to triangular matrices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fasth.flows.reflectors import ReflectorTransform, by_matrix, check_reflectors, check_triangle, reflect_each
from fasth.operators.matrix import broadcast_batches, values_known

__all__ = ["SylvesterTransform"]

LARGEST = 0.999  # the largest diagonal entry that ``from_unconstrained`` makes


class SylvesterTransform(ReflectorTransform):
    """y = x + Q R₁ tanh(R₂ Qᵀ x + b), with log |det| = Σ log(1 + (R₁)ᵢᵢ (R₂)ᵢᵢ tanh′(·)ᵢ) in O(M).

    Q is the first M columns of H₁H₂⋯H_r, so orthonormal; R₁ and R₂ are upper triangular. There is an inverse if
    (R₁)ᵢᵢ (R₂)ᵢᵢ > −1 for every i: ``from_unconstrained`` makes such triangles of any numbers.

    Args:
        V: (*b, r, d), the reflectors, as in ``HouseholderTransform``.
        R1, R2: (*b, M, M) with 1 ≤ M ≤ d. Only the upper triangles are read.
        bias: (*b, M).
        cache_size: as in every Transform: with 1, the inverse of the last result is the argument that it came from.
        validate_args: whether to check the diagonals, as distributions do. That reads their values, so a GPU has to
            finish them first.

    x is (*, d), with * broadcast against the batches b of the tensors. ``call_and_ladj(x)`` computes y and log |det|
    together: about 8·r·d + 4·M² operations a row, and twice the cost of ``HouseholderTransform`` for each Q. Alone,
    ``log_abs_det_jacobian`` has to compute Qᵀx again.

    The inverse is exact to rounding. It solves M equations of one unknown, from the last coordinate of Qᵀx to the
    first, all samples at once: about a hundred small operations in sequence for each equation, and O(M³) a row for its
    derivative. It has a first derivative, and no second. It reads values, which ``torch.func.vmap`` does not allow.

    Example:
        >>> encoder = nn.Linear(10, 4 * 8 + 2 * 3 * 3 + 3)  # for M = 3: 4 reflectors, two triangles and a bias
        >>> V, R1, R2, bias = encoder(torch.randn(5, 10)).split([32, 9, 9, 3], dim=-1)
        >>> V, R1, R2 = V.unflatten(-1, (4, 8)), R1.unflatten(-1, (3, 3)), R2.unflatten(-1, (3, 3))
        >>> flow = SylvesterTransform.from_unconstrained(V, R1, R2, bias)
        >>> z, ladj = flow.call_and_ladj(torch.randn(5, 8))
        >>> z.shape, ladj.shape
        (torch.Size([5, 8]), torch.Size([5]))

    Van den Berg, Hasenclever, Tomczak and Welling, *Sylvester Normalizing Flows for Variational Inference*, 2018.
    """

    def __init__(
        self, V: Tensor, R1: Tensor, R2: Tensor, bias: Tensor, cache_size: int = 0, *, validate_args: bool = True
    ) -> None:
        _check_shapes(V, R1, R2, bias)
        tensors = {"V": V, "R1": R1, "R2": R2, "bias": bias}
        shapes = {name: tuple(t.shape[: -1 if name == "bias" else -2]) for name, t in tensors.items()}
        super().__init__(tensors, broadcast_batches(**shapes), 1, cache_size)
        self.R1, self.R2, self.bias = R1.triu(), R2.triu(), bias
        if validate_args and values_known(V):
            _check_diagonals(_diagonal(self.R1) * _diagonal(self.R2))

    @classmethod
    def from_unconstrained(
        cls, V: Tensor, R1: Tensor, R2: Tensor, bias: Tensor, cache_size: int = 0
    ) -> SylvesterTransform:
        """The transform whose R₁ and R₂ have 0.999 tanh of these diagonals: invertible for any numbers.

        Without the factor the tanh of a large number is rounded to 1, and a product of diagonals to −1.
        """
        _check_shapes(V, R1, R2, bias)
        R1, R2 = (torch.diagonal_scatter(R, LARGEST * _diagonal(R).tanh(), dim1=-2, dim2=-1) for R in (R1, R2))
        return cls(V, R1, R2, bias, cache_size, validate_args=False)

    def with_cache(self, cache_size: int = 1) -> SylvesterTransform:
        return SylvesterTransform(self.V, self.R1, self.R2, self.bias, cache_size, validate_args=False)

    def call_and_ladj(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Computes y and log |det ∂y/∂x| together, in less time than separately: (*, d) and (*)."""
        self.forward_shape(x.shape)
        hidden = self._hidden(self._coordinates(x))
        return x + self._embed(_times(self.R1, hidden)), self._logabsdet(hidden)

    def _call(self, x: Tensor) -> Tensor:
        self.forward_shape(x.shape)
        return x + self._embed(_times(self.R1, self._hidden(self._coordinates(x))))

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """log |det ∂y/∂x|: (*), the shape of the batch. Computes Qᵀx again: see ``call_and_ladj``."""
        self.forward_shape(x.shape)
        return self._logabsdet(self._hidden(self._coordinates(x)))

    def _inverse(self, y: Tensor) -> Tensor:
        """With w = Qᵀx, Qᵀy = w + R₁ tanh(R₂ w + b), M equations; and x = y − Q (Qᵀy − w)."""
        self.forward_shape(y.shape)
        target = self._coordinates(y)
        with torch.no_grad():
            w = self._solve(target)
        # A Newton step from w, a constant: its size is zero, and its derivative is that of the solution.
        hidden = self._hidden(w)
        residual = w + _times(self.R1, hidden) - target
        w = w - self._newton_step(hidden.detach(), residual - residual.detach())
        return y - self._embed(target - w)

    @property
    def _M(self) -> int:
        return self.R1.shape[-1]

    def _coordinates(self, x: Tensor) -> Tensor:
        """Qᵀx: (*, M)."""
        return reflect_each(x, self.V, transpose=True)[..., : self._M]

    def _embed(self, w: Tensor) -> Tensor:
        """Q w: (*, d)."""
        return reflect_each(F.pad(w, (0, self.V.shape[-1] - self._M)), self.V)

    def _hidden(self, w: Tensor) -> Tensor:
        return torch.tanh(_times(self.R2, w) + self.bias)

    def _logabsdet(self, hidden: Tensor) -> Tensor:
        products = _diagonal(self.R1) * _diagonal(self.R2)
        return torch.log1p(products * (1 - hidden.square())).sum(-1)  # tanh′ = 1 − tanh²

    def _newton_step(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """J⁻¹ residual with J = I + R₁ diag(tanh′) R₂, upper triangular and constant to autograd."""
        R1, R2 = self.R1.detach(), self.R2.detach()
        eye = torch.eye(self._M, dtype=R1.dtype, device=R1.device) * (
            1 + torch.finfo(R1.dtype).eps
        )  # keeps J without zeros
        J = eye + (R1 * (1 - hidden.square()).unsqueeze(-2)) @ R2
        return torch.linalg.solve_triangular(J, residual.unsqueeze(-1), upper=True).squeeze(-1)

    def _solve(self, target: Tensor) -> Tensor:
        """Solves w + R₁ tanh(R₂ w + b) = target, from the last coordinate, which does not depend on the others."""
        target = target.expand((*broadcast_batches(x=tuple(target.shape[:-1]), V=self.batch), self._M))
        w, hidden = torch.zeros_like(target), torch.zeros_like(target)
        for i in reversed(range(self._M)):
            later = slice(i + 1, None)
            shift = self.bias[..., i] + (self.R2[..., i, later] * w[..., later]).sum(-1)
            left = target[..., i] - (self.R1[..., i, later] * hidden[..., later]).sum(-1)
            a, b = self.R1[..., i, i], self.R2[..., i, i]
            w[..., i] = solve_increasing(a, b, shift, left)
            hidden[..., i] = torch.tanh(b * w[..., i] + shift)
        return w


def solve_increasing(a: Tensor, b: Tensor, c: Tensor, target: Tensor) -> Tensor:
    """Solves w + a·tanh(b·w + c) = target, entry by entry, for a·b ≥ −1.

    The left side increases and differs from w by at most |a|, which brackets w. Each iteration is a step of Newton's
    method, or a bisection if that step is more than half of the previous one, so the iteration always converges.
    """
    low, high = target - a.abs(), target + a.abs()
    w, step = target, high - low
    tolerance = torch.finfo(w.dtype).eps * (target.abs() + a.abs())
    while (step > tolerance).any():
        tanh = torch.tanh(b * w + c)
        error = w + a * tanh - target
        error = torch.where(error.abs() <= tolerance, 0, error)  # rounding: the bracket closes at w
        low, high = torch.where(error <= 0, w, low), torch.where(error >= 0, w, high)
        newton = error / (1 + a * b * (1 - tanh.square()))
        before, w = w, torch.where(newton.abs() < step / 2, w - newton, (low + high) / 2)
        step = (w - before).abs()
    return w


def _times(R: Tensor, w: Tensor) -> Tensor:
    """R w of each vector with the R of its sample.  w: (*, M)."""
    return by_matrix(lambda rows: rows @ R.mT, w.unsqueeze(-2), R.ndim - 2).squeeze(-2)


def _diagonal(R: Tensor) -> Tensor:
    return R.diagonal(dim1=-2, dim2=-1)


def _check_shapes(V: Tensor, R1: Tensor, R2: Tensor, bias: Tensor) -> None:
    check_reflectors(V)
    check_triangle("R1", R1, V.shape[-1])
    check_triangle("R2", R2, V.shape[-1])
    M = R1.shape[-1]
    if R2.shape[-1] != M:
        raise ValueError(f"`R2` should have shape (*b, {M}, {M}), as `R1` has; got {tuple(R2.shape)}")
    if not isinstance(bias, Tensor):
        raise TypeError(f"`bias` should be a tensor; got {type(bias).__name__}")
    if bias.ndim < 1 or bias.shape[-1] != M:
        raise ValueError(
            f"`bias` should have shape (*b, {M}) to match `R1` of shape {tuple(R1.shape)}; got {tuple(bias.shape)}"
        )


def _check_diagonals(products: Tensor) -> None:
    if not (products > -1).all():
        raise ValueError(
            "the products of the diagonals of `R1` and `R2` should be above −1, or there is no inverse; "
            f"got {products.detach().min().item():.3g}; `from_unconstrained` keeps them within ±1"
        )
