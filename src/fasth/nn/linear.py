"""Linear layers that hold their weight as its factors: U Σ Vᵀ, U Σ Uᵀ, or an orthogonal matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling

from fasth import spectrum as spectra
from fasth.nn import kept
from fasth.nn.factored import Factored, at_least_one, in_dtype_of, made_of_in_graph, one_of
from fasth.nn.factors import (
    DEFAULT_INIT,
    INITS,
    REFLECTORS,
    SVDFactors,
    expanded,
    factors_of,
    of_orthogonal,
    spectrum_or_free,
)
from fasth.nn.kept import linear as kept_linear
from fasth.operators import SVD, Orthogonal, Symmetric
from fasth.operators.orthogonal import compact_from_dense, haar_compact
from fasth.reflections import autocast_on, svd_dense, svd_linear

Self = TypeVar("Self", bound="_Linear")


class _Linear(Factored):
    """x Wᵀ + bias with any factored weight W: (out_features, in_features)."""

    in_features: int
    out_features: int
    form: str

    def _add_features(self, in_features: int, out_features: int) -> None:
        at_least_one(in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features

    def forward(self, x: Tensor) -> Tensor:
        if is_compiling():
            return self._forward_in_graph(x)
        weight = self._kept_weight()
        if weight is None:
            return _as_autocast(self._multiply(x))
        return F.linear(x, weight, self._parameters["bias"] if "bias" in self._parameters else self.bias)

    def _forward_in_graph(self, x: Tensor) -> Tensor:
        made_of = None if is_grad_enabled() else made_of_in_graph(self)
        if made_of is None or x.dtype != made_of[0].dtype:
            return _as_autocast(self._multiply(x))
        return kept_linear(x, made_of, self.bias, self._number, self.out_features)

    def _for_graphs(self, weight: Tensor, made_of: Sequence[tuple[Tensor, int, int]]) -> Any:
        return kept.packed(weight, self._number, made_of)

    def _multiply(self, x: Tensor) -> Tensor:
        """x Wᵀ + bias from the factors."""
        raise NotImplementedError

    def _inverse(self) -> SVD | Orthogonal:
        """W⁻¹ as its factors."""
        raise NotImplementedError

    def inverse(self, y: Tensor) -> Tensor:
        """x with ``forward(x)`` = y: W⁻¹ (y − bias), for square W, from the factors.  y: (*, d) → (*, d).

        About the cost of the forward pass. A singular value of exactly zero raises ``torch.linalg.LinAlgError``.
        """
        self._check_square("inverse")
        if y.ndim < 1 or y.shape[-1] != self.out_features:
            raise ValueError(f"`y` should have last dimension {self.out_features}; got shape {tuple(y.shape)}")
        y = y if self.bias is None else y - self.bias
        return y @ self._inverse().mT

    def _check_square(self, what: str) -> None:
        if self.in_features != self.out_features:
            raise ValueError(
                f"`{what}` needs a square layer; got {self.in_features} input and {self.out_features} output features"
            )

    @classmethod
    def from_linear(cls: type[Self], linear: nn.Linear, **options: Any) -> Self:
        """The layer with the weight, bias, dtype, device and mode of an ``nn.Linear``; other options as when made new.

        Where this kind of layer cannot have that weight, ``set_weight_`` says what it gets. Costs a decomposition of
        the weight; draws no random numbers.
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"`linear` should be an nn.Linear; got {type(linear).__name__}")
        sizes = cls._sizes_of(linear)
        like = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        layer: Self = nn.utils.skip_init(cls, *sizes, bias=linear.bias is not None, **like, **options)
        return layer._take(linear)

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


class LinearSVD(_Linear, SVDFactors):
    """x Wᵀ + bias with W = U diag(σ) Vᵀ held, and trained, as its singular value decomposition.  x: (*, in) → (*, out).

    ``nn.Linear``'s signature and shapes. U and V are products of reflections: whatever an optimizer does to the
    parameters, they stay orthogonal to rounding, and σ stays in its spectrum.

    Args:
        in_features: at least 1.
        out_features: at least 1.
        bias: whether to add one.
        reflectors: "compact": one matrix of W's own shape, (out, in), holds those of both sides, so the layer has as
            many parameters as ``nn.Linear``, and σ. "full": every entry free, as in the paper, U: (out, out) and
            V: (in, in).
        spectrum: the map from the parameter ``sigma`` to σ, of ``fasth.spectrum``. The default is ``free()``: the
            identity, where σ may have any sign.
        init: "haar": uniformly distributed U and V. "identity": W is the identity, as far as its shape has it. In both
            σ is 1. "linear": U and V as in "haar", and the σ that ``nn.Linear`` would start with: see
            ``fasth.nn.init``. The spectrum replaces each σ by the nearest that it has. For a given matrix, see
            ``set_weight_``.
        rank: how many singular values, r, from 1 to min(in, out), which is the default. With fewer the layer has
            ``reflectors_U``: (r, out) and ``reflectors_V``: (r, in), one a row, so that parameters, work and the
            optimizer's state are r·(in + out), and W is never formed.

    Few rows are multiplied by the reflections, twice the operations of ``nn.Linear``, four times if they are full; for
    many W is formed first. In eval mode without gradients the dense W is kept until a parameter changes, so that only
    F.linear is left to do; ``Factored`` says how a change is noticed. Of rank r < min(in, out), a row takes
    4·r·(in + out) operations by the reflections and half of that by r columns of U and V, which are formed for many
    rows, but not under ``torch.compile``.
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
        spectrum: spectra.Spectrum | None = None,
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

    def _multiply(self, x: Tensor) -> Tensor:
        U, sigma, V = factors_of(self)
        return svd_linear(x, U, sigma, V, self.bias, signs=in_dtype_of(sigma, self.signs), form=self.form)

    @property
    def weight(self) -> Tensor:
        """W: (out, in), dense and differentiable. It is a result: to change it, use ``set_weight_``."""
        return self._matrix()

    def set_weight_(self, weight: Tensor) -> LinearSVD:
        """Makes W = ``weight``: (out, in), to rounding, with σ ≥ 0 in descending order.

        A layer of lower rank gets the nearest matrix of its rank: ``weight`` with its largest singular values alone.
        Singular values that the spectrum does not have are replaced by the nearest ones that it has. Costs an SVD.
        """
        self._set_matrix(self._matching(weight, (self.out_features, self.in_features)))
        return self

    def _inverse(self) -> SVD:
        return self.svd.inverse()

    def logabsdet(self) -> Tensor:
        """log |det W| = Σ log |σ|: a scalar, −inf where W is singular, for square W. O(d)."""
        self._check_square("logabsdet")
        return self.svd.logabsdet()

    def extra_repr(self) -> str:
        rank = f", rank={self.rank}" if self._thin else ""
        return f"{super().extra_repr()}, spectrum={self.spectrum}{rank}"


class LinearSymmetric(_Linear):
    """x W + bias with W = U diag(λ) Uᵀ, symmetric, held as its eigendecomposition.  x: (*, features) → (*, features).

    Parameters: ``reflectors``: (features, features), those of U as rows; ``sigma``: (features,) with
    λ = spectrum(sigma). With ``reflectors="compact"`` only what stands right of its diagonal is used. The signs of U's
    columns cancel in W, and are left to the reflections. Otherwise like ``LinearSVD``; ``spectrum.positive()`` makes W
    positive definite.
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
        spectrum: spectra.Spectrum | None = None,
        init: str = "haar",
    ) -> None:
        super().__init__()
        self._add_features(features, features)
        self.form, self.init = one_of("reflectors", reflectors, REFLECTORS), one_of("init", init, INITS)
        self.spectrum = spectrum_or_free(spectrum)
        self.reflectors = nn.Parameter(torch.empty(features, features, device=device, dtype=dtype))
        self.sigma = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        self._made_of = ("reflectors", "sigma")
        self._add_bias(bias, features, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """U uniformly distributed up to signs, or the identity; λ = 1; the bias as in ``nn.Linear``."""
        if not self.sigma.is_meta:
            U, signs = _initial(self.reflectors, self.init)
            self._set_factors(U, torch.ones_like(signs))
        self._reset_bias(self.in_features)

    def _set_factors(self, U: Tensor, sigma: Tensor) -> None:
        U = U if self.form == "compact" else expanded(U)
        self._write(reflectors=U, sigma=self.spectrum.inverse(sigma))

    def _multiply(self, x: Tensor) -> Tensor:
        sigma = self.spectrum(self.sigma)
        return svd_linear(x, self.reflectors, sigma, self.reflectors, self.bias, form=self.form)

    @property
    def eig(self) -> Symmetric:
        """W = U Λ Uᵀ as its factors, differentiable."""
        return Symmetric(Orthogonal(self.reflectors, form=self.form), self.spectrum(self.sigma))

    @property
    def weight(self) -> Tensor:
        """W: (features, features), dense and differentiable. It is a result: to change it, use ``set_weight_``."""
        return self.eig.dense()

    def set_weight_(self, weight: Tensor) -> LinearSymmetric:
        """Makes W = ``weight``, symmetric, to rounding; eigenvalues outside the spectrum as in ``LinearSVD``."""
        eig = Symmetric.from_dense(self._matching(weight, (self.out_features, self.in_features)), form="compact")
        self._set_factors(eig.U.V, eig.sigma)
        return self

    def _inverse(self) -> SVD:
        return self.eig.inverse()

    def logabsdet(self) -> Tensor:
        """log |det W| = Σ log |λ|: a scalar, −inf where W is singular. O(d)."""
        return self.eig.logabsdet()

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
    d = max(in, out) dimensions. ``reflectors``: (k, d), a parameter, one a row: as many as ``nn.Linear`` has.
    ``signs``: (k,), a buffer of ±1. ``reflectors`` and ``init`` are those of ``LinearSVD``.
    """

    reflectors: nn.Parameter
    signs: Tensor

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
        self.form, self.init = one_of("reflectors", reflectors, REFLECTORS), one_of("init", init, INITS)
        k, d = sorted((in_features, out_features))
        self.reflectors = nn.Parameter(torch.empty(k, d, device=device, dtype=dtype))
        self.register_buffer("signs", torch.empty(k, device=device, dtype=dtype))
        self._made_of = ("reflectors", "signs")
        self._add_bias(bias, out_features, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """W uniformly distributed, or the identity as far as its shape has it; the bias as in ``nn.Linear``."""
        if not self.reflectors.is_meta:
            self._set_factors(*_initial(self.reflectors, self.init))
        self._reset_bias(self.in_features)

    def _set_factors(self, V: Tensor, signs: Tensor) -> None:
        self._write(reflectors=V if self.form == "compact" else expanded(V)[: len(V)], signs=signs)

    def _factors(self) -> tuple[Tensor, Tensor, Tensor]:
        return of_orthogonal(self.reflectors, self.signs, self.out_features < self.in_features)

    def _multiply(self, x: Tensor) -> Tensor:
        U, signs, V = self._factors()
        return svd_linear(x, U, signs, V, self.bias, form=self.form)

    @property
    def orthogonal(self) -> Orthogonal:
        """The whole of H₁⋯H_k diag(signs): (d, d), of which W is the first columns, transposed where out < in."""
        V = self.reflectors
        return Orthogonal(V, form=self.form, signs=in_dtype_of(V, self.signs))

    @property
    def weight(self) -> Tensor:
        """W: (out, in), dense and differentiable. It is a result: to change it, use ``set_weight_``."""
        U, signs, V = self._factors()
        return svd_dense(U, signs, V, form=self.form)

    def set_weight_(self, weight: Tensor) -> LinearOrthogonal:
        """Makes W the matrix with orthonormal rows or columns that is nearest to ``weight``: (out, in).

        That is its polar factor: ``weight`` itself, to rounding, if it is orthogonal. Costs an SVD.
        """
        U, _, Vh = torch.linalg.svd(self._matching(weight, (self.out_features, self.in_features)), full_matrices=False)
        W = U @ Vh
        self._set_factors(*compact_from_dense(W.mT if self.out_features < self.in_features else W))
        return self

    def _inverse(self) -> Orthogonal:
        return self.orthogonal.mT

    def logabsdet(self) -> Tensor:
        """log |det W| = 0: a scalar, for square W."""
        self._check_square("logabsdet")
        return self.reflectors.new_zeros(())


def _initial(like: Tensor, init: str) -> tuple[Tensor, Tensor]:
    """Compact reflectors of the shape, dtype and device of ``like`` and the signs of the first columns."""
    k, d = like.shape
    if init == "haar":
        return haar_compact(k, d, dtype=like.dtype, device=like.device)
    V = torch.zeros(k, d, dtype=like.dtype, device=like.device)
    return V, -V.new_ones(k)


def _as_autocast(out: Tensor) -> Tensor:
    """``out`` in the dtype that autocast gives to F.linear's. The reflections are computed without it."""
    device = out.device.type
    if autocast_on(device) and out.dtype != torch.float64:
        return out.to(torch.get_autocast_dtype(device))
    return out
