"""Linear layers that hold their weight as its factors: U Σ Vᵀ, U Σ Uᵀ, or an orthogonal matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasth.functional import check_tensor, svd_dense, svd_linear, svd_thin
from fasth.nn.cache import state
from fasth.nn.factored import Factored, Factors, at_least_one, check_dtype, one_of, relative_change
from fasth.nn.factors import (
    DEFAULT_INIT,
    INITS,
    REFLECTORS,
    SVDFactors,
    expanded,
    one_side,
    spectrum_or_free,
)
from fasth.nn.held_weight import HeldWeight
from fasth.operators import SVD, Orthogonal, Symmetric
from fasth.operators.orthogonal import compact_from_dense, haar_compact
from fasth.operators.svd import log_abs_product
from fasth.reflections.autograd import diagonal_signs, signs_of
from fasth.spectrum import Spectrum

Self = TypeVar("Self", bound="_Linear")


class _Linear(Factored):
    """x Wᵀ + bias with any factored weight W: (out_features, in_features)."""

    in_features: int
    out_features: int
    form: str
    _sigma: Callable[[], Tensor]  # the singular values, or the eigenvalues: (k,)

    def _add_features(self, in_features: int, out_features: int) -> None:
        at_least_one(in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features

    def forward(self, input: Tensor) -> Tensor:
        """input · Wᵀ + bias.  input: (*, in) → (*, out)."""
        return self._run(input, None)

    def forward_and_logabsdet(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """``forward(input)``, and log |det W|, a scalar, for square W: σ is computed once for both.

        input: (*, d) → (*, d) and ().
        """
        self._check_square("forward_and_logabsdet")
        sigma = self._sigma()
        return self._run(input, sigma), self._log_abs_det(sigma)

    def _run(self, input: Tensor, sigma: Tensor | None) -> Tensor:
        """``forward``. ``sigma``: the singular values, if they are known."""
        if not isinstance(input, Tensor):
            check_tensor("input", input)
        if input.is_nested:
            return _of_nested(self.forward, input)
        if input.ndim < 1 or input.shape[-1] != self.in_features:
            raise ValueError(f"`input` should have last dimension {self.in_features}; got shape {tuple(input.shape)}")
        weight = self._cached_weight() if state.enabled else None
        return self._multiply(input, sigma) if weight is None else self._multiply_by(weight, input)

    def _multiply_by(self, weight: Tensor, x: Tensor) -> Tensor:
        """x Wᵀ + bias with the cached weight."""
        return F.linear(x, weight, self.bias)

    def _multiply(self, x: Tensor, sigma: Tensor | None) -> Tensor:
        """x Wᵀ + bias from the factors."""
        raise NotImplementedError

    def _inverse(self, sigma: Tensor) -> SVD | Orthogonal:
        """W⁻¹ as its factors, from the singular values or the eigenvalues."""
        raise NotImplementedError

    def inverse(self, y: Tensor) -> Tensor:
        """x with ``forward(x)`` = y: W⁻¹ (y − bias), for square W, from the factors.  y: (*, d) → (*, d).

        About the cost of the forward pass. A singular value of exactly zero raises ``torch.linalg.LinAlgError``.
        """
        self._check_square("inverse")
        return self._solve(y, self._sigma())

    def inverse_and_logabsdet(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """``inverse(y)``, and log |det W⁻¹|, a scalar: σ is computed once for both.  y: (*, d) → (*, d) and ()."""
        self._check_square("inverse_and_logabsdet")
        sigma = self._sigma()
        return self._solve(y, sigma), -self._log_abs_det(sigma)

    def logabsdet(self) -> Tensor:
        """log |det W| = Σ log |σ|: a scalar, −inf where W is singular, for square W. O(d)."""
        self._check_square("logabsdet")
        return self._log_abs_det(self._sigma())

    def _solve(self, y: Tensor, sigma: Tensor) -> Tensor:
        """W⁻¹ (y − bias)."""
        check_tensor("y", y)
        if y.ndim < 1 or y.shape[-1] != self.out_features:
            raise ValueError(f"`y` should have last dimension {self.out_features}; got shape {tuple(y.shape)}")
        y = y if self.bias is None else y - self.bias
        return y @ self._inverse(sigma).mT

    def _log_abs_det(self, sigma: Tensor) -> Tensor:
        zeros = self.in_features - sigma.shape[-1]  # zero singular values, which are not stored
        return log_abs_product(F.pad(sigma, (0, zeros)) if zeros else sigma)

    def _check_square(self, what: str) -> None:
        if self.in_features != self.out_features:
            raise ValueError(
                f"`{what}` needs a square layer; got {self.in_features} input and {self.out_features} output features"
            )

    @classmethod
    def from_linear(cls: type[Self], linear: nn.Linear, **options: Any) -> Self:
        """Makes a layer with the weight, bias, dtype, device and mode of an ``nn.Linear``, and default options.

        A weight that this kind of layer cannot have is replaced as in ``set_weight_``. Costs a decomposition of the
        weight; draws no random numbers.
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"`linear` should be an nn.Linear; got {type(linear).__name__}")
        sizes = cls._sizes_of(linear)
        like = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        layer: Self = nn.utils.skip_init(cls, *sizes, bias=linear.bias is not None, **like, **options)
        return layer._take(linear)

    @classmethod
    def _from_dense(cls, dense: Any, **options: Any) -> Any:
        return cls.from_linear(dense, **options)

    def _to_dense(self) -> nn.Linear:
        return self.to_linear()

    @staticmethod
    def _sizes_of(linear: nn.Linear) -> tuple[int, ...]:
        return linear.in_features, linear.out_features

    def to_linear(self) -> nn.Linear:
        """An ``nn.Linear`` with this layer's weight, bias, dtype, device and mode. They share no memory."""
        sizes, first = (self.in_features, self.out_features), self._first()
        like = {"device": first.device, "dtype": first.dtype}
        return self._give(nn.utils.skip_init(nn.Linear, *sizes, bias=self.bias is not None, **like))

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"reflectors={self.form!r}"
        )


class LinearSVD(_Linear, SVDFactors, converts=nn.Linear):
    """x Wᵀ + bias with W = U diag(σ) Vᵀ held, and trained, as its singular value decomposition.  x: (*, in) → (*, out).

    ``nn.Linear``'s signature and shapes. U and V are products of reflections, which stay orthogonal to rounding for
    all values of the parameters, and σ stays in its spectrum.

    Args:
        in_features: at least 1.
        out_features: at least 1.
        bias: whether to add a bias.
        reflectors: "compact": one matrix of W's own shape, (out, in), holds the reflectors of both sides, so the layer
            has the parameters of ``nn.Linear`` and σ. "full": every entry free, as in the paper, U: (out, out) and
            V: (in, in).
        spectrum: the map from the parameter ``sigma`` to σ, of ``fasth.spectrum``. The default is ``free()``: the
            identity, where σ may have any sign.
        init: "haar": uniformly distributed U and V. "identity": W is the identity, padded with zeros to its shape. In
            both σ is 1. "linear": U and V as in "haar", and σ as in a new ``nn.Linear``: see ``fasth.nn.init``. Each σ
            outside the spectrum is replaced by the nearest inside. ``set_weight_`` starts from a matrix.
        rank: the number of singular values, r, from 1 to min(in, out), which is the default. With fewer the layer has
            ``reflectors_U``: (r, out) and ``reflectors_V``: (r, in), one a row, so that parameters, work and the
            optimizer's state are r·(in + out), and W is never formed.

    Few rows are multiplied by the reflections, with twice the operations of ``nn.Linear``, four times if they are full;
    for many rows W is formed first. Within ``fasth.cached()`` W is formed once, and a call costs as much as
    ``nn.Linear``'s. With rank r < min(in, out), a row takes 4·r·(in + out) operations by the reflections and half of
    that by r columns of U and V, which are formed for many rows, and within ``fasth.cached()``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        reflectors: str = "compact",
        spectrum: Spectrum | None = None,
        init: str = DEFAULT_INIT,
        rank: int | None = None,
    ) -> None:
        super().__init__()
        self._add_features(in_features, out_features)
        self._add_factors(out_features, in_features, rank, reflectors, spectrum, init, device, dtype)
        self._add_bias(bias, out_features, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """U, V and σ as ``init`` says, the bias as in ``nn.Linear``."""
        self._reset_factors()
        self._reset_bias(self.in_features)

    def _multiply(self, x: Tensor, sigma: Tensor | None) -> Tensor:
        if self.form == "full":  # the GPU kernels multiply sigma by the signs as they read it
            sigma = self.spectrum(self.sigma) if sigma is None else sigma
            return svd_linear(x, self.U, sigma, self.V, self.bias, form="full", signs=self.signs)
        U, sigma, V = self._factors(sigma)
        return svd_linear(x, U, sigma, V, self.bias, form=self.form)

    def _weight(self) -> Tensor:
        return self._matrix()

    def _form(self) -> Any:
        return svd_thin(*self._factors(), form=self.form) if self._is_thin else super()._form()

    def _multiply_by(self, weight: Any, x: Tensor) -> Tensor:
        if self._is_thin:
            A, B = weight
            return F.linear(F.linear(x, A), B, self.bias)
        return F.linear(x, weight, self.bias)

    def set_weight_(self, weight: Tensor) -> LinearSVD:
        """Makes W = ``weight``: (out, in), to rounding, with σ ≥ 0 in descending order.

        A layer of lower rank gets the nearest matrix of its rank: ``weight`` with only its largest singular values.
        Singular values outside the spectrum are replaced by the nearest inside. Costs an SVD.
        """
        return super().set_weight_(weight)

    def _decompose(self, weight: Tensor) -> Factors:
        return self._decompose_matrix(self._matching(weight, (self.out_features, self.in_features)))

    def _inverse(self, sigma: Tensor) -> SVD:
        return self._svd(sigma).inverse()

    def extra_repr(self) -> str:
        rank = f", rank={self.rank}" if self._is_thin else ""
        return f"{super().extra_repr()}, spectrum={self.spectrum}{rank}"


class LinearSymmetric(_Linear):
    """x W + bias with W = U diag(λ) Uᵀ, symmetric, held as its eigendecomposition.  x: (*, features) → (*, features).

    Parameters: ``reflectors``: (features, features), the reflectors of U as rows; ``sigma``: (features,) with
    λ = spectrum(sigma). With ``reflectors="compact"`` only the entries right of the diagonal are used. The signs of U's
    columns cancel in W and are not stored. Otherwise like ``LinearSVD``; ``spectrum.positive()`` makes W positive
    definite.
    """

    reflectors: nn.Parameter
    sigma: nn.Parameter

    def __init__(
        self,
        features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        reflectors: str = "compact",
        spectrum: Spectrum | None = None,
        init: str = "haar",
    ) -> None:
        super().__init__()
        self._add_features(features, features)
        check_dtype(dtype)
        self.form, self.init = one_of("reflectors", reflectors, REFLECTORS), one_of("init", init, INITS)
        self.spectrum = spectrum_or_free(spectrum)
        self.reflectors = nn.Parameter(torch.empty(features, features, device=device, dtype=dtype))
        self.sigma = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        self._factor_names = ("reflectors", "sigma")
        self._add_bias(bias, features, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """U uniformly distributed up to signs, or the identity; λ = 1; the bias as in ``nn.Linear``."""
        if not self.sigma.is_meta:
            U = _initial(self.reflectors, self.init)
            sigma = torch.ones_like(self.sigma)
            self._write(**self._as_parameters(U, sigma) | {"sigma": self.spectrum.start(sigma)})
        self._reset_bias(self.in_features)

    def _as_parameters(self, U: Tensor, sigma: Tensor) -> dict[str, Tensor]:
        U = U if self.form == "compact" else expanded(U)
        return {"reflectors": U, "sigma": self.spectrum.inverse(sigma)}

    def _sigma(self) -> Tensor:
        """The eigenvalues: (features,)."""
        return self.spectrum(self.sigma)

    def _multiply(self, x: Tensor, sigma: Tensor | None) -> Tensor:
        sigma = self._sigma() if sigma is None else sigma
        return svd_linear(x, self.reflectors, sigma, self.reflectors, self.bias, form=self.form)

    def held_weights(self) -> Iterator[HeldWeight]:
        """W, whose eigenvalues stand for its singular values."""
        shape = self.out_features, self.in_features
        yield HeldWeight("", shape, self.reflectors, self.sigma, self.reflectors, self.form, self.spectrum)

    @property
    def eig(self) -> Symmetric:
        """The factors of W = U Λ Uᵀ, differentiable."""
        return self._eig(self._sigma())

    def _eig(self, sigma: Tensor) -> Symmetric:
        U = Orthogonal.of_stored(self.reflectors) if self.form == "compact" else Orthogonal(self.reflectors)
        return Symmetric(U, sigma)

    def _weight(self) -> Tensor:
        return self.eig.dense()

    def set_weight_(self, weight: Tensor) -> LinearSymmetric:
        """Makes W = ``weight``, symmetric, to rounding; eigenvalues outside the spectrum as in ``LinearSVD``."""
        return super().set_weight_(weight)

    def _decompose(self, weight: Tensor) -> Factors:
        eig = Symmetric.from_dense(self._matching(weight, (self.out_features, self.in_features)), form="compact")
        tensors = self._as_parameters(eig.U.V, eig.sigma)
        return Factors(tensors, relative_change(eig.sigma, self.spectrum(tensors["sigma"])))

    def _inverse(self, sigma: Tensor) -> SVD:
        return self._eig(sigma).inverse()

    @staticmethod
    def _sizes_of(linear: nn.Linear) -> tuple[int, ...]:
        if linear.in_features != linear.out_features:
            raise ValueError(
                f"`linear` should be square to be symmetric; "
                f"got {linear.in_features} input and {linear.out_features} output features"
            )
        return (linear.in_features,)

    def extra_repr(self) -> str:
        _, _, options = super().extra_repr().split(", ", 2)
        return f"features={self.in_features}, {options}, spectrum={self.spectrum}"


class LinearOrthogonal(_Linear):
    """x Wᵀ + bias where W has orthonormal columns (out ≥ in), rows (out ≤ in), or both.  x: (*, in) → (*, out).

    W, or Wᵀ where out < in, is the first k = min(in, out) columns of H₁⋯H_k diag(signs), with reflections of
    d = max(in, out) dimensions. ``reflectors``: (k, d), a parameter, one a row: as many numbers as ``nn.Linear`` has.
    Compact reflectors have the signs on the diagonal, full ones in ``signs``: (k,), a parameter that is not trained.
    The arguments ``reflectors`` and ``init`` are as in ``LinearSVD``.
    """

    reflectors: nn.Parameter
    signs: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        reflectors: str = "compact",
        init: str = "haar",
    ) -> None:
        super().__init__()
        self._add_features(in_features, out_features)
        check_dtype(dtype)
        self.form, self.init = one_of("reflectors", reflectors, REFLECTORS), one_of("init", init, INITS)
        k, d = sorted((in_features, out_features))
        self.reflectors = nn.Parameter(torch.empty(k, d, device=device, dtype=dtype))
        self._factor_names = ("reflectors",)
        if self.form == "full":
            self.signs = nn.Parameter(torch.empty(k, device=device, dtype=dtype), requires_grad=False)
            self._factor_names += ("signs",)
        self._add_bias(bias, out_features, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """W uniformly distributed, or the identity, padded with zeros; the bias as in ``nn.Linear``."""
        if not self.reflectors.is_meta:
            self._write(**self._as_parameters(_initial(self.reflectors, self.init)))
        self._reset_bias(self.in_features)

    def _as_parameters(self, V: Tensor) -> dict[str, Tensor]:
        """Makes the parameters from compact reflectors with the signs of their columns."""
        if self.form == "compact":
            return {"reflectors": V}
        return {"reflectors": expanded(V)[: len(V)], "signs": diagonal_signs(V, len(V))}

    def _factors(self) -> tuple[Tensor, Tensor | None, Tensor]:
        signs = signs_of(self.signs).to(self.reflectors.dtype) if self.form == "full" else None
        return one_side(self.reflectors, signs, self.out_features < self.in_features)

    def _sigma(self) -> Tensor:
        """The singular values, all 1: (k,)."""
        return self.reflectors.new_ones(len(self.reflectors))

    def _multiply(self, x: Tensor, sigma: Tensor | None) -> Tensor:
        U, signs, V = self._factors()
        return svd_linear(x, U, signs, V, self.bias, form=self.form)

    def held_weights(self) -> Iterator[HeldWeight]:
        """W, an orthogonal weight without singular values to train."""
        shape, signs = (self.out_features, self.in_features), self.signs if self.form == "full" else None
        yield HeldWeight("", shape, self.reflectors, None, None, self.form, None, signs)

    @property
    def orthogonal(self) -> Orthogonal:
        """H₁⋯H_k diag(signs): (d, d). W is its first columns, transposed where out < in."""
        V = self.reflectors
        if self.form == "compact":
            return Orthogonal.of_stored(V)
        return Orthogonal(V, signs=signs_of(self.signs).to(V.dtype))

    def _weight(self) -> Tensor:
        return svd_dense(*self._factors(), form=self.form)

    def set_weight_(self, weight: Tensor) -> LinearOrthogonal:
        """Makes W the matrix with orthonormal rows or columns that is nearest to ``weight``: (out, in).

        The nearest is the polar factor: ``weight`` itself, to rounding, if it is orthogonal. Costs an SVD.
        """
        return super().set_weight_(weight)

    def _decompose(self, weight: Tensor) -> Factors:
        weight = self._matching(weight, (self.out_features, self.in_features))
        U, sigma, Vh = torch.linalg.svd(weight, full_matrices=False)
        W = U @ Vh
        V = compact_from_dense(W.mT if self.out_features < self.in_features else W)
        return Factors(self._as_parameters(V), relative_change(sigma, torch.ones_like(sigma)))

    def _inverse(self, sigma: Tensor) -> Orthogonal:
        return self.orthogonal.mT


def _initial(like: Tensor, init: str) -> Tensor:
    """Compact reflectors of the shape, dtype and device of ``like``."""
    k, d = like.shape
    if init == "haar":
        return haar_compact(k, d, dtype=like.dtype, device=like.device)
    return -torch.eye(k, d, dtype=like.dtype, device=like.device)


def _of_nested(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies ``forward`` to all rows of a nested tensor, and restores its shape."""
    if x.layout is not torch.jagged:
        raise TypeError(f"a nested `input` should have the layout torch.jagged; got {x.layout}")
    offsets = x.offsets()  # type: ignore[attr-defined]  # missing in torch's types
    return torch.nested.nested_tensor_from_jagged(forward(x.values()), offsets)
