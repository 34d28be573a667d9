"""The parameters of an SVD, which ``LinearSVD`` and the convolutions train instead of a weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasth.functional import svd_dense
from fasth.nn.factored import Factored, Factors, check_dtype, one_of, relative_change
from fasth.nn.held_weight import HeldWeight
from fasth.nn.init import singular_values_of_linear
from fasth.operators import SVD, Orthogonal
from fasth.operators.orthogonal import haar_compact, with_diagonal
from fasth.reflections.autograd import diagonal_signs, signs_of, times_signs
from fasth.reflections.blocked import expand_compact
from fasth.spectrum import Spectrum, free

REFLECTORS = ("compact", "full")
INITS = ("haar", "identity")
SVD_INITS = (*INITS, "linear")
DEFAULT_INIT = "haar"  # of layers that train sigma


class SVDFactors(Factored):
    """A module whose weight, as an (n, m) matrix, is W = U diag(σ) Vᵀ with k singular values, by default min(n, m).

    ``sigma``: (k,), a parameter, and σ = spectrum(sigma).
    The reflectors of U and V, and the signs of their columns, which reflections do not determine:
        compact: one parameter ``reflectors``: (n, m), with U's reflectors as columns below the diagonal and V's as
            rows right of it, each with a 1 on the diagonal that is not stored. The sign of the stored entry (i, i) is
            the product of the signs of column i of U and of V. The entry's gradient only keeps that sign:
            ``sign_guard``.
        full: two parameters ``U``: (n, n) and ``V``: (m, m), one reflector a row, and ``signs``: (2, k), ±1, the signs
            of U's and V's columns, a parameter that is not trained.
        of rank k < min(n, m): two parameters, (k, n) and (k, m), one reflector a row: ``U`` and ``V`` if they are full,
            ``reflectors_U`` and ``reflectors_V`` if compact. Entry i of row i has the sign of column i, and the entries
            left of it are not used.
    """

    reflectors: nn.Parameter
    reflectors_U: nn.Parameter
    reflectors_V: nn.Parameter
    U: nn.Parameter
    V: nn.Parameter
    sigma: nn.Parameter
    signs: nn.Parameter
    _is_thin: bool

    def _add_factors(
        self,
        n: int,
        m: int,
        rank: int | None,
        form: str,
        spectrum: Spectrum | None,
        init: str,
        device: Any,
        dtype: Any,
    ) -> None:
        check_dtype(dtype)
        self.form, self.init = one_of("reflectors", form, REFLECTORS), one_of("init", init, SVD_INITS)
        self.spectrum = spectrum_or_free(spectrum)
        k = min(n, m) if rank is None else rank
        if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= min(n, m):
            raise ValueError(f"`rank` should be an int from 1 to {min(n, m)} for a weight of {n}×{m}; got {rank!r}")
        self._matrix_shape, self._is_thin = (n, m), k < min(n, m)
        if self._is_thin:
            U, V = _thin_names(form)
            shapes: dict[str, tuple[int, ...]] = {U: (k, n), V: (k, m)}
        else:
            shapes = {"reflectors": (n, m)} if form == "compact" else {"U": (n, n), "V": (m, m)}
        shapes["sigma"] = (k,)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self._factor_names = tuple(shapes)
        if form == "full":
            self.signs = nn.Parameter(torch.empty(2, k, device=device, dtype=dtype), requires_grad=False)
            self._factor_names += ("signs",)

    @property
    def rank(self) -> int:
        """The number of singular values, k: W has no larger rank."""
        return len(self.sigma)

    @property
    def svd(self) -> SVD:
        """The factors of W = U Σ Vᵀ, differentiable."""
        return self._svd(self._sigma())

    def _svd(self, sigma: Tensor) -> SVD:
        """The factors of W with these singular values."""
        if self.form == "full":
            U, V, (U_signs, V_signs) = self.U, self.V, signs_of(self.signs).to(sigma.dtype)
            return SVD(Orthogonal(U, signs=U_signs), sigma, Orthogonal(V, signs=V_signs))
        if self._is_thin:
            return SVD(Orthogonal.of_stored(self.reflectors_U), sigma, Orthogonal.of_stored(self.reflectors_V))
        return SVD.of_shared(self.reflectors, sigma)

    def _sigma(self) -> Tensor:
        """σ: (k,)."""
        return self.spectrum(self.sigma)

    def _factors(self, sigma: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the reflectors of U, σ (computed if None), and the reflectors of V, for ``svd_linear``."""
        sigma = self.spectrum(self.sigma) if sigma is None else sigma
        if self.form == "full":
            return self.U, times_signs(sigma, self.signs), self.V
        if self._is_thin:
            return self.reflectors_U, sigma, self.reflectors_V
        return self.reflectors, sigma, None

    @classmethod
    def _convert(cls, dense: Any, spectrum: Spectrum, reflectors: str, rank: int | None) -> tuple[Any, str]:
        """Makes a layer with the weight of a dense one, of full or lower rank."""
        own = min(dense.weight.flatten(1).shape)
        r = own if rank is None else min(rank, own)
        layer = cls._from_dense(dense, spectrum=spectrum, reflectors=reflectors, rank=r)
        return layer, f"rank {r} of {own}" if r < own else ""

    @classmethod
    def _from_dense(cls, dense: Any, **options: Any) -> Any:
        """Makes a layer with the weight, the bias and the mode of a dense one."""
        raise NotImplementedError

    def held_weights(self) -> Iterator[HeldWeight]:
        """The weight of the layer, as an (n, m) matrix."""
        if self.form == "full":
            yield HeldWeight("", self._matrix_shape, self.U, self.sigma, self.V, "full", self.spectrum, self.signs)
        elif self._is_thin:
            factors = self.reflectors_U, self.sigma, self.reflectors_V
            yield HeldWeight("", self._matrix_shape, *factors, "compact", self.spectrum)
        else:
            yield HeldWeight("", self._matrix_shape, self.reflectors, self.sigma, None, "compact", self.spectrum)

    def _matrix(self, sigma: Tensor | None = None) -> Tensor:
        """W: (n, m)."""
        return svd_dense(*self._factors(sigma), form=self.form)

    def _reset_factors(self) -> None:
        if self.sigma.is_meta:
            return
        (n, m), k = self._matrix_shape, self.rank
        options: Any = {"dtype": self.sigma.dtype, "device": self.sigma.device}
        sigma = torch.ones(k, **options)
        if self.init == "identity":
            U, V = -torch.eye(k, n, **options), -torch.eye(k, m, **options)
        else:
            square = self.form == "full" and not self._is_thin
            U, V = haar_compact(n if square else k, n, **options), haar_compact(m if square else k, m, **options)
        if self.init == "linear":
            sigma = singular_values_of_linear(n, m)[:k].to(**options)
        self._write(**self._as_parameters(U, sigma, V) | {"sigma": self.spectrum.start(sigma)})

    def _decompose_matrix(self, W: Tensor) -> Factors:
        svd, k = SVD.from_dense(W, form="compact"), self.rank
        # The first k columns of U depend on its first k reflections alone.
        tensors = self._as_parameters(svd.U.V[:k], svd.sigma[:k], svd.V.V[:k])
        sigma = self.spectrum(tensors["sigma"])
        return Factors(tensors, relative_change(svd.sigma, F.pad(sigma, (0, len(svd.sigma) - k))))

    def _as_parameters(self, U: Tensor, sigma: Tensor, V: Tensor) -> dict[str, Tensor]:
        """Makes the parameters from compact reflectors, U: (·, n) and V: (·, m), with the signs of their columns."""
        tensors = {"sigma": self.spectrum.inverse(sigma)}
        if self.form == "compact":
            if not self._is_thin:
                return tensors | {"reflectors": joined(U, V)}
            return tensors | dict(zip(_thin_names(self.form), (U, V), strict=True))
        signs = torch.stack([diagonal_signs(Q, len(sigma)) for Q in (U, V)])
        U, V = (expand_compact(U), expand_compact(V)) if self._is_thin else (expanded(U), expanded(V))
        return tensors | {"U": U, "V": V, "signs": signs}


def _thin_names(form: str) -> tuple[str, str]:
    """The parameter names of U's and V's reflectors. They differ by form, so that a checkpoint fits only one."""
    return ("U", "V") if form == "full" else ("reflectors_U", "reflectors_V")


def spectrum_or_free(spectrum: Spectrum | None) -> Spectrum:
    if spectrum is None:
        return free()
    if not isinstance(spectrum, Spectrum):
        raise TypeError(f"`spectrum` should be one of fasth.spectrum, such as positive(); got {spectrum!r}")
    return spectrum


def one_side(Q: Tensor, sigma: Tensor | None, wide: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Arguments of ``svd_linear`` for W = Q diag(sigma) I, or I diag(sigma) Qᵀ if ``wide``.  Q: (k, d), its reflectors.

    The identity is the product of no reflections.
    """
    identity = Q.new_empty(0, min(Q.shape))
    return (identity, sigma, Q) if wide else (Q, sigma, identity)


def joined(U: Tensor, V: Tensor) -> Tensor:
    """Joins compact reflectors U: (*, k, n) and V: (*, k, m) to one matrix: (*, n, m), U's columns below the diagonal.

    The diagonal has the products of their signs.
    """
    (k, n), m = U.shape[-2:], V.shape[-1]
    signs = diagonal_signs(U, k) * diagonal_signs(V, k)
    return with_diagonal(F.pad(U.triu(1).mT, (0, m - k)) + F.pad(V.triu(1), (0, 0, 0, n - k)), signs)


def expanded(V: Tensor) -> Tensor:
    """Converts compact reflectors (r, d) to d full ones: (d, d), without changing the product's first r columns."""
    r, d = V.shape
    return expand_compact(F.pad(V, (0, 0, 0, d - r)))
