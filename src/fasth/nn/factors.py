"""The parameters of an SVD: what ``LinearSVD`` and the convolutions train in place of a weight."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasth import spectrum as spectra
from fasth.nn.factored import Factored, in_dtype_of, one_of
from fasth.nn.init import singular_values_of_linear
from fasth.operators import SVD, Orthogonal
from fasth.operators.orthogonal import haar_compact, in_form
from fasth.reflections import svd_dense
from fasth.reflections.blocked import expand_compact

REFLECTORS = ("compact", "full")
INITS = ("haar", "identity")
SVD_INITS = (*INITS, "linear")
DEFAULT_INIT = "haar"  # of layers that train sigma


class SVDFactors(Factored):
    """A module whose weight, as an (n, m) matrix, is W = U diag(σ) Vᵀ with k singular values, by default min(n, m).

    ``sigma``: (k,), a parameter, and σ = spectrum(sigma).
    ``signs``: (2, k), a buffer of ±1: the signs of the columns of U and of V, which reflections leave open.
    The reflectors of U and V:
        compact: one parameter ``reflectors``: (n, m). Below its diagonal stand U's, as columns, right of it V's, as
            rows, each with a 1 on the diagonal that is not stored; the diagonal itself is not used.
        full: two parameters ``U``: (n, n) and ``V``: (m, m), one reflector a row.
        of rank k < min(n, m): two parameters, (k, n) and (k, m), one reflector a row: ``U`` and ``V`` if they are full,
            ``reflectors_U`` and ``reflectors_V`` if compact. These have a 1 in column i of row i that is not stored;
            that entry and those left of it are not used.
    """

    reflectors: nn.Parameter
    reflectors_U: nn.Parameter
    reflectors_V: nn.Parameter
    U: nn.Parameter
    V: nn.Parameter
    sigma: nn.Parameter
    signs: Tensor

    def _add_factors(
        self,
        n: int,
        m: int,
        rank: int | None,
        form: str,
        spectrum: spectra.Spectrum | None,
        init: str,
        device: Any,
        dtype: Any,
    ) -> None:
        self.form, self.init = one_of("reflectors", form, REFLECTORS), one_of("init", init, SVD_INITS)
        self.spectrum = spectrum_or_free(spectrum)
        k = min(n, m) if rank is None else rank
        if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= min(n, m):
            raise ValueError(f"`rank` should be an int from 1 to {min(n, m)} for a weight of {n}×{m}; got {rank!r}")
        self._matrix_shape, self._thin = (n, m), k < min(n, m)
        if self._thin:
            U, V = _thin_names(form)
            shapes = {U: (k, n), V: (k, m)}
        else:
            shapes = {"reflectors": (n, m)} if form == "compact" else {"U": (n, n), "V": (m, m)}
        for name, shape in (*shapes.items(), ("sigma", (k,))):
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.register_buffer("signs", torch.empty(2, k, device=device, dtype=dtype))
        self._made_of = (*shapes, "sigma", "signs")

    @property
    def rank(self) -> int:
        """The number of singular values, k: W has no larger rank."""
        return len(self.sigma)

    @property
    def svd(self) -> SVD:
        """W = U Σ Vᵀ as its factors, differentiable."""
        U, sigma, V = factors_of(self)
        signs = in_dtype_of(sigma, self.signs)
        if V is None:
            return SVD.of_shared(U, sigma, signs)
        U_signs, V_signs = signs.unbind()
        return SVD(Orthogonal(U, form=self.form, signs=U_signs), sigma, Orthogonal(V, form=self.form, signs=V_signs))

    def _matrix(self) -> Tensor:
        """W: (n, m)."""
        U, sigma, V = factors_of(self)
        return svd_dense(U, sigma, V, signs=in_dtype_of(sigma, self.signs), form=self.form)

    def _reset_factors(self) -> None:
        if self.sigma.is_meta:
            return
        (n, m), k = self._matrix_shape, self.rank
        options: Any = {"dtype": self.sigma.dtype, "device": self.sigma.device}
        sigma = torch.ones(k, **options)
        if self.init == "identity":
            U, V, signs = (torch.zeros(shape, **options) for shape in ((k, n), (k, m), (2, k)))
            signs = signs - 1
        else:
            square = self.form == "full" and not self._thin
            U, U_signs = haar_compact(n if square else k, n, **options)
            V, V_signs = haar_compact(m if square else k, m, **options)
            signs = torch.stack((U_signs[:k], V_signs[:k]))
        if self.init == "linear":
            sigma = singular_values_of_linear(n, m)[:k].to(**options)
        self._set_factors(U, sigma, V, signs)

    def _set_matrix(self, W: Tensor) -> None:
        svd, k = SVD.from_dense(W, form="compact"), self.rank
        signs: Any = svd.U.signs, svd.V.signs
        # The first k columns of U are those of its first k reflections: the others leave them alone.
        self._set_factors(svd.U.V[:k], svd.sigma[:k], svd.V.V[:k], torch.stack(signs)[:, :k])

    def _set_factors(self, U: Tensor, sigma: Tensor, V: Tensor, signs: Tensor) -> None:
        """From compact reflectors, U: (·, n) and V: (·, m)."""
        if self._thin:
            reflectors = in_form(U, self.form), in_form(V, self.form)
            self._write(**dict(zip(_thin_names(self.form), reflectors, strict=True)))
        elif self.form == "compact":
            self._write(reflectors=joined(U, V))
        else:
            self._write(U=expanded(U), V=expanded(V))
        self._write(sigma=self.spectrum.inverse(sigma), signs=signs)


def factors_of(layer: SVDFactors) -> tuple[Tensor, Tensor, Tensor | None]:
    """The reflectors of U, σ and the reflectors of V, as ``svd_linear`` takes them."""
    sigma = layer.spectrum(layer.sigma)
    if layer.form == "full":
        return layer.U, sigma, layer.V
    if layer._thin:
        return layer.reflectors_U, sigma, layer.reflectors_V
    return layer.reflectors, sigma, None


def _thin_names(form: str) -> tuple[str, str]:
    """Of the reflectors of U and V. Their shapes are the same in both forms; a checkpoint should not fit both."""
    return ("U", "V") if form == "full" else ("reflectors_U", "reflectors_V")


def spectrum_or_free(spectrum: spectra.Spectrum | None) -> spectra.Spectrum:
    if spectrum is None:
        return spectra.free()
    if not isinstance(spectrum, spectra.Spectrum):
        raise TypeError(f"`spectrum` should be one of fasth.spectrum, such as positive(); got {spectrum!r}")
    return spectrum


def of_orthogonal(Q: Tensor, signs: Tensor, wide: bool) -> tuple[Tensor, Tensor, Tensor]:
    """W = Q diag(signs) I, or I diag(signs) Qᵀ if ``wide``, as ``svd_linear`` takes it.  Q: (k, d), its reflectors.

    The identity is the product of no reflections.
    """
    identity = Q.new_empty(0, min(Q.shape))
    signs = in_dtype_of(Q, signs)
    return (identity, signs, Q) if wide else (Q, signs, identity)


def joined(U: Tensor, V: Tensor) -> Tensor:
    """Compact reflectors U: (*, k, n) and V: (*, k, m) in one matrix: (*, n, m), U's as columns below the diagonal."""
    (k, n), m = U.shape[-2:], V.shape[-1]
    return F.pad(U.mT, (0, m - k)) + F.pad(V, (0, 0, 0, n - k))


def expanded(V: Tensor) -> Tensor:
    """Compact reflectors (r, d) as d full ones: (d, d). Those added leave the first r columns of the product alone."""
    r, d = V.shape
    return expand_compact(F.pad(V, (0, 0, 0, d - r)))
