"""Any tensor of any module kept orthogonal, or held as its SVD, by ``torch.nn.utils.parametrize``.

The calls are those of ``torch.nn.utils.parametrizations.orthogonal``. For whole layers ``fasth.nn`` is faster: they can
apply the reflections to few rows, where a parametrization has to form the weight.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from fasth.nn.factored import in_dtype_of, one_of
from fasth.nn.factors import joined, of_orthogonal, spectrum_or_free
from fasth.operators import SVD, Orthogonal
from fasth.operators.orthogonal import compact_from_dense
from fasth.reflections import svd_dense
from fasth.spectrum import Spectrum

__all__ = ["OrthogonalWeight", "SVDWeight", "orthogonal", "svd"]

M = TypeVar("M", bound=nn.Module)

MAPS = ("matrix_exp", "cayley", "householder")


def orthogonal(
    module: M, name: str = "weight", orthogonal_map: str | None = None, *, use_trivialization: bool = True
) -> M:
    """Keeps a tensor of ``module`` orthogonal: WᵀW = I where it is tall or square, W Wᵀ = I where it is wide.

    In place of ``torch.nn.utils.parametrizations.orthogonal``, with the same shapes and the same matrix at the start:
    W itself, if it is orthogonal, and else the Q of W = QR with positive diagonal of R. So is what is assigned to it
    later, ``module.weight = W``. W is trained as compact reflectors, which stand in a tensor of its own shape.

    Args:
        module: any module.
        name: of a parameter or buffer, (n, m), or (*b, n, m): a batch of matrices, as torch takes a convolution's
            kernel. A complex one is handed on to torch, as reflections are real.
        orthogonal_map, use_trivialization: those of torch, for calls that have them. A real tensor is always a product
            of reflections, the fastest of them here, and needs no base to start from.

    Returns:
        ``module``. Each use of the tensor forms it, in about 4·n·m·min(n, m) operations, but once only within
        ``with torch.nn.utils.parametrize.cached():``.

    Example:
        >>> layer = orthogonal(nn.Linear(20, 40))
        >>> torch.dist(layer.weight.mT @ layer.weight, torch.eye(20)) < 1e-5
        tensor(True)
    """
    weight = _matrices(module, name)
    if orthogonal_map is not None:
        one_of("orthogonal_map", orthogonal_map, MAPS)
    if weight.is_complex():
        parametrizations.orthogonal(module, name, orthogonal_map, use_trivialization=use_trivialization)
    else:
        parametrize.register_parametrization(module, name, OrthogonalWeight(weight), unsafe=True)
    return module


def svd(module: M, name: str = "weight", spectrum: Spectrum | None = None) -> M:
    """Holds a tensor of ``module`` as W = U diag(σ) Vᵀ, and trains it so.  W: (n, m), or a batch of them (*b, n, m).

    ``module.parametrizations[name].original0`` are the reflectors, of W's own shape, and ``original1``: (*b, min(n, m))
    is what the spectrum maps to σ: two new parameters, which an optimizer that was there before does not know.

    Args:
        module, name: as in ``orthogonal``, but real.
        spectrum: of ``fasth.spectrum``, by default ``free()``, with which W is at the start, and after an assignment
            ``module.weight = W``, what it was, to rounding. Any other replaces singular values that it does not have by
            the nearest ones that it has.

    Example:
        >>> lstm = svd(nn.LSTM(8, 16), "weight_hh_l0", spectrum=fasth.spectrum.between(0.5, 1.0))
        >>> torch.linalg.matrix_norm(lstm.weight_hh_l0, 2) <= 1 + 1e-5
        tensor(True)
    """
    weight = _matrices(module, name)
    if weight.is_complex():
        raise ValueError(f"`{name}` should be real, as reflections are; got {weight.dtype}")
    if parametrize.is_parametrized(module, name):
        raise ValueError(
            f"`{name}` should not be parametrized yet, since an SVD is made of two tensors; "
            f"got {module.parametrizations[name]}"  # type: ignore[index]
        )
    parametrize.register_parametrization(module, name, SVDWeight(weight, spectrum), unsafe=True)
    return module


class _Weight(nn.Module):
    """A map to W: (*b, n, m) from reflectors, with a buffer of ±1 that reflections leave open."""

    signs: Tensor

    def __init__(self, weight: Tensor, *signs: int) -> None:
        super().__init__()
        self.shape = weight.shape
        # With these, zeros as reflectors are the identity.
        signs = (*weight.shape[:-2], *signs, min(weight.shape[-2:]))
        self.register_buffer("signs", torch.full(signs, -1.0, dtype=weight.dtype, device=weight.device))

    def _check(self, W: Tensor) -> None:
        if (W.shape, W.dtype) != (self.shape, self.signs.dtype):
            raise ValueError(
                f"what is assigned should have shape {tuple(self.shape)} and be {self.signs.dtype}; "
                f"got {tuple(W.shape)} and {W.dtype}"
            )

    def extra_repr(self) -> str:
        return "×".join(map(str, self.shape))


class OrthogonalWeight(_Weight):
    """X ↦ (H₁⋯H_k diag(signs))[:, :k], or its transpose where X is wide.  X: (*b, n, m) → (*b, n, m), k = min(n, m).

    The reflectors are the columns of X below its diagonal, or its rows right of it, where it is wide; each has a 1 on
    the diagonal that is not stored.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        n, m = weight.shape[-2:]
        self.wide = n < m

    def forward(self, X: Tensor) -> Tensor:
        V = X if self.wide else X.mT
        if X.ndim == 2:
            return svd_dense(*of_orthogonal(V, self.signs, self.wide))
        Q = Orthogonal(V, form="compact", signs=in_dtype_of(V, self.signs))
        k, d = V.shape[-2:]
        columns = Q.matmul(torch.eye(d, k, dtype=X.dtype, device=X.device))
        return columns.mT if self.wide else columns

    @torch.no_grad()
    def right_inverse(self, W: Tensor) -> Tensor:
        """From any W: (*b, n, m), of which its QR decomposition makes an orthogonal one."""
        self._check(W)
        if W.is_meta:
            return torch.empty_like(W)
        V, signs = compact_from_dense(W.mT if self.wide else W)
        self.signs.copy_(signs)
        return (V if self.wide else V.mT).contiguous()


class SVDWeight(_Weight):
    """reflectors, sigma ↦ U diag(spectrum(sigma)) Vᵀ.  (*b, n, m), (*b, min(n, m)) → (*b, n, m).

    Of the reflectors, those of U are the columns below the diagonal, those of V the rows right of it, as in
    ``LinearSVD``. ``signs``: (*b, 2, min(n, m)), of U's and of V's columns.
    """

    def __init__(self, weight: Tensor, spectrum: Spectrum | None) -> None:
        super().__init__(weight, 2)
        self.spectrum = spectrum_or_free(spectrum)

    def svd(self, reflectors: Tensor, sigma: Tensor) -> SVD:
        """W as its factors, differentiable."""
        signs, sigma = in_dtype_of(sigma, self.signs), self.spectrum(sigma)
        if reflectors.ndim == 2:
            return SVD.of_shared(reflectors, sigma, signs)
        U_signs, V_signs = signs.unbind(-2)
        return SVD(
            Orthogonal(reflectors.mT, form="compact", signs=U_signs),
            sigma,
            Orthogonal(reflectors, form="compact", signs=V_signs),
        )

    def forward(self, reflectors: Tensor, sigma: Tensor) -> Tensor:
        return self.svd(reflectors, sigma).dense()

    @torch.no_grad()
    def right_inverse(self, W: Tensor) -> tuple[Tensor, Tensor]:
        """From any W: (*b, n, m), by its SVD: sigma ≥ 0 in descending order."""
        self._check(W)
        if W.is_meta:
            return torch.empty_like(W), self.signs[..., 0, :].clone()
        svd = SVD.from_dense(W.to(torch.promote_types(W.dtype, torch.float32)), form="compact")
        sigma = self.spectrum.inverse(svd.sigma).to(W.dtype)
        signs = [Q.signs for Q in (svd.U, svd.V) if Q.signs is not None]
        self.signs.copy_(torch.stack(signs, -2))
        return joined(svd.U.V, svd.V.V).to(W.dtype).contiguous(), sigma

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, spectrum={self.spectrum}"


def _matrices(module: nn.Module, name: str) -> Tensor:
    """The tensor of that name, which should be a matrix, or a batch of them."""
    weight = getattr(module, name, None)
    if not isinstance(weight, Tensor):
        raise ValueError(f"`name` should be that of a parameter or buffer of {type(module).__name__}; got {name!r}")
    if weight.ndim < 2:
        raise ValueError(f"`{name}` should be a matrix or a batch of matrices; got shape {tuple(weight.shape)}")
    return weight
