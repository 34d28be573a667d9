"""Any tensor of any module kept orthogonal, or held as its SVD, by ``torch.nn.utils.parametrize``.

The calls are those of ``torch.nn.utils.parametrizations.orthogonal``. For whole layers ``fasth.nn`` is faster: they can
apply the reflections to few rows, where a parametrization has to form the weight.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from fasth.functional import svd_dense
from fasth.nn.factored import CHANGED, one_of, relative_change
from fasth.nn.factors import joined, one_side, spectrum_or_free
from fasth.nn.held_weight import HeldWeight
from fasth.operators import SVD, Orthogonal
from fasth.operators.orthogonal import compact_from_dense
from fasth.spectrum import Spectrum

__all__ = ["OrthogonalWeight", "SVDWeight", "orthogonal", "svd"]

M = TypeVar("M", bound=nn.Module)

MAPS = ("matrix_exp", "cayley", "householder")


def orthogonal(
    module: M, name: str = "weight", orthogonal_map: str | None = None, *, use_trivialization: bool = True
) -> M:
    """Keeps a tensor of ``module`` orthogonal: WᵀW = I where it is tall or square, W Wᵀ = I where it is wide.

    Replaces ``torch.nn.utils.parametrizations.orthogonal``, with the same shapes and the same initial matrix: W itself
    if it is orthogonal, otherwise the Q of W = QR where R has a positive diagonal. A later assignment,
    ``module.weight = W``, is treated in the same way. W is trained as compact reflectors in a tensor of its own shape.

    Checkpoints of torch's parametrization with the same ``orthogonal_map``, and of a module without parametrization,
    are converted as they are loaded.

    Args:
        module: any module.
        name: the name of a parameter or buffer, (n, m), or (*b, n, m): a batch of matrices, as torch takes a
            convolution's kernel. A complex tensor is passed to torch's parametrization, as reflections are real.
        orthogonal_map, use_trivialization: accepted for compatibility with torch. A real tensor is always a product of
            reflections, the fastest map here, and needs no base to start from.

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
        parametrization = OrthogonalWeight(weight)
        parametrization.map_of_torch = orthogonal_map
        _register(module, name, parametrization)
    return module


def svd(
    module: M, name: str = "weight", spectrum: Spectrum | None = None, *, shape: tuple[int, ...] | None = None
) -> M:
    """Holds a tensor of ``module`` as W = U diag(σ) Vᵀ, and trains it so.  W: (n, m), or a batch of them (*b, n, m).

    ``module.parametrizations[name].original0`` holds the reflectors, in W's own shape, and ``original1``:
    (*b, min(n, m)) the parameter that the spectrum maps to σ. Both are new parameters: make the optimizer after this
    call. The checkpoint of a module without parametrization is converted as it is loaded.

    Args:
        module, name: as in ``orthogonal``, but real.
        spectrum: a map of ``fasth.spectrum``, by default ``free()``, which keeps the initial W, and an assigned
            ``module.weight = W``, to rounding. Other spectra replace singular values outside their range by the nearest
            inside.
        shape: the shape of the matrix, or of the batch of matrices, to which the tensor is reshaped; by default its
            own. A kernel (out, in, 3, 3) of 4 groups, for example, is (4, out // 4, in * 9).

    Example:
        >>> lstm = svd(nn.LSTM(8, 16), "weight_hh_l0", spectrum=fasth.spectrum.between(0.5, 1.0))
        >>> torch.linalg.matrix_norm(lstm.weight_hh_l0, 2) <= 1 + 1e-5
        tensor(True)
    """
    weight = _matrices(module, name)
    if shape is not None and (len(shape) < 2 or math.prod(shape) != weight.numel()):
        raise ValueError(
            f"`shape` should be of matrices with the {weight.numel()} entries of `{name}`, {tuple(weight.shape)}; "
            f"got {tuple(shape)}"
        )
    if weight.is_complex():
        raise ValueError(f"`{name}` should be real, as reflections are; got {weight.dtype}")
    if parametrize.is_parametrized(module, name):
        raise ValueError(
            f"`{name}` should not be parametrized yet, since an SVD is made of two tensors; "
            f"got {module.parametrizations[name]}"  # type: ignore[index]
        )
    _register(module, name, SVDWeight(weight, spectrum, shape))
    return module


class _Weight(nn.Module):
    """Maps compact reflectors, with the signs of columns on their diagonal, to W: (*b, n, m)."""

    stored: tuple[str, ...] = ("original",)  # the names of W's tensors in PyTorch's list of parametrizations

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.shape = weight.shape

    def right_inverse(self, W: Tensor) -> Any:
        """Computes the stored tensor, or tuple of tensors, from W."""
        raise NotImplementedError

    def _check(self, W: Tensor) -> None:
        """Checks the shape of an assigned W. PyTorch would compare its dtype with the stored tensors'."""
        if W.shape != self.shape:
            raise ValueError(f"the assigned tensor should have shape {tuple(self.shape)}; got {tuple(W.shape)}")

    def convert_state(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Converts other checkpoints to this form. ``prefix`` precedes the names of the stored tensors."""

    def extra_repr(self) -> str:
        return "×".join(map(str, self.shape))


class OrthogonalWeight(_Weight):
    """X ↦ (H₁⋯H_k diag(signs))[:, :k], or its transpose where X is wide.  X: (*b, n, m) → (*b, n, m), k = min(n, m).

    The reflectors are the columns of X below its diagonal, or, if it is wide, its rows right of the diagonal; each has
    a 1 on the diagonal that is not stored. The stored diagonal holds the signs of the columns; its gradient only keeps
    these signs. ``torch.nn.utils.parametrizations.orthogonal`` stores its Householder map in the same way.
    """

    map_of_torch: str | None = None  # the orthogonal_map of checkpoints of torch's parametrization

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        n, m = weight.shape[-2:]
        self.wide = n < m

    def held_weight(self, originals: Any) -> HeldWeight:
        """W, from the tensors of PyTorch's list of parametrizations."""
        return HeldWeight("", tuple(self.shape), originals.original, None, None, "compact", None)

    def forward(self, X: Tensor) -> Tensor:
        """W, from its reflectors.  (*b, n, m) → (*b, n, m), in about 4·n·m·min(n, m) operations."""
        if 0 in X.shape:
            return X
        V = X if self.wide else X.mT
        if X.ndim == 2:
            return svd_dense(*one_side(V, None, self.wide))
        k, d = V.shape[-2:]
        columns = Orthogonal.of_stored(V).matmul(torch.eye(d, k, dtype=X.dtype, device=X.device))
        return columns.mT if self.wide else columns

    @torch.no_grad()
    def right_inverse(self, W: Tensor) -> Tensor:
        """Computes the reflectors of the Q in the QR decomposition of W: (*b, n, m)."""
        self._check(W)
        if W.is_meta or 0 in W.shape:
            return torch.empty_like(W)
        V = compact_from_dense(W.mT if self.wide else W)
        return (V if self.wide else V.mT).contiguous()

    def convert_state(self, state_dict: dict[str, Any], prefix: str) -> None:
        original = state_dict.get(prefix + "original")
        base = state_dict.pop(prefix + "0.base", None)
        if base is not None and isinstance(original, Tensor):
            dtype = torch.promote_types(original.dtype, torch.float32)  # PyTorch's maps have no kernels for less
            weight = _by_torch(original.to(dtype), base.to(dtype), self.map_of_torch)
            state_dict[prefix + "original"] = self.right_inverse(weight).to(original.dtype)


class SVDWeight(_Weight):
    """reflectors, sigma ↦ U diag(spectrum(sigma)) Vᵀ.  (*b, n, m), (*b, min(n, m)) → (*b, n, m), or the tensor's shape.

    The reflectors of U are the columns below the diagonal, the reflectors of V the rows right of it, and the diagonal
    holds signs, as in ``LinearSVD``.
    """

    stored = ("original0", "original1")

    def __init__(self, weight: Tensor, spectrum: Spectrum | None, shape: tuple[int, ...] | None = None) -> None:
        super().__init__(weight)
        self.spectrum = spectrum_or_free(spectrum)
        self.matrices = torch.Size(weight.shape if shape is None else shape)

    def svd(self, reflectors: Tensor, sigma: Tensor) -> SVD:
        """W as its factors, differentiable."""
        return SVD.of_shared(reflectors, self.spectrum(sigma))

    def held_weight(self, originals: Any) -> HeldWeight:
        """W, from the tensors of PyTorch's list of parametrizations."""
        factors = originals.original0, originals.original1, None
        return HeldWeight("", tuple(self.matrices), *factors, "compact", self.spectrum)

    def forward(self, reflectors: Tensor, sigma: Tensor) -> Tensor:
        """W, from its factors.  (*b, n, m), (*b, min(n, m)) → (*b, n, m)."""
        if 0 in reflectors.shape:
            return reflectors.reshape(self.shape)
        return self.svd(reflectors, sigma).dense().reshape(self.shape)

    @torch.no_grad()
    def right_inverse(self, W: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the SVD of W: (*b, n, m), with sigma ≥ 0 in descending order."""
        self._check(W)
        W = W.reshape(self.matrices)
        if W.is_meta or 0 in W.shape:
            return torch.empty_like(W), W.new_empty(*W.shape[:-2], min(W.shape[-2:]))
        svd = SVD.from_dense(W.to(torch.promote_types(W.dtype, torch.float32)), form="compact")
        sigma = self.spectrum.inverse(svd.sigma).to(W.dtype)
        return joined(svd.U.V, svd.V.V).to(W.dtype), sigma

    def extra_repr(self) -> str:
        matrices = "" if self.matrices == self.shape else f", matrices {'×'.join(map(str, self.matrices))}"
        return f"{super().extra_repr()}{matrices}, spectrum={self.spectrum}"


def _register(module: nn.Module, name: str, weight: _Weight) -> None:
    first = not any(isinstance(held[0], _Weight) for held in _parametrizations(module).values())
    parametrize.register_parametrization(module, name, weight, unsafe=True)
    if first:
        module.register_load_state_dict_pre_hook(convert_plain_state)
    held = _parametrizations(module)[name]
    if len(held) == 1:  # other parametrizations may change W
        held.register_load_state_dict_pre_hook(_convert_state)


def _parametrizations(module: Any) -> dict[str, Any]:
    """Maps the names of parametrized tensors to PyTorch's lists of parametrizations."""
    return dict(module.parametrizations.items()) if parametrize.is_parametrized(module) else {}


@torch.no_grad()
def convert_plain_state(
    module: Any,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Called before a state_dict is loaded: replaces plain tensors by the stored tensors of the parametrization."""
    for name, held in _parametrizations(module).items():
        first: Any = held[0]
        key, weight = prefix + name, state_dict.get(prefix + name)
        if len(held) > 1 or not isinstance(first, _Weight) or not isinstance(weight, Tensor):
            continue
        stored = [f"{prefix}parametrizations.{name}.{original}" for original in first.stored]
        if any(original in state_dict for original in stored):
            continue
        del state_dict[key]
        own = [getattr(held, original) for original in first.stored]
        like = weight if own[0].is_meta else own[0]
        W = weight.to(like.device, torch.promote_types(weight.dtype, like.dtype))
        try:
            found = first.right_inverse(W)
        except (ValueError, RuntimeError) as error:
            error_msgs.append(f'While converting "{key}" to {", ".join(stored)}: {error}.')
            state_dict.update(zip(stored, own, strict=True))
            continue
        tensors = [t.to(like.dtype) for t in (found if isinstance(found, tuple) else (found,))]
        state_dict.update(zip(stored, tensors, strict=True))
        change = 0.0 if W.is_meta else relative_change(W, first(*tensors))
        if change > CHANGED:
            warnings.warn(
                f'"{key}" was replaced by a weight that its {type(first).__name__} can have, which differs from it '
                f"by {change:.0%} of its norm",
                stacklevel=4,
            )


def _convert_state(
    held: Any,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    try:
        held[0].convert_state(state_dict, prefix)
    except (ValueError, RuntimeError) as error:
        error_msgs.append(f"{error}.")


@torch.no_grad()
def _by_torch(original: Tensor, base: Tensor, orthogonal_map: str | None) -> Tensor:
    """Computes the weight of torch's own parametrization from its stored tensors."""
    twin = nn.ParameterDict({"weight": torch.zeros_like(original)})
    twin["weight"][..., :, :] = torch.eye(*original.shape[-2:])
    parametrizations.orthogonal(twin, "weight", orthogonal_map)
    state = {"parametrizations.weight.original": original, "parametrizations.weight.0.base": base}
    twin.load_state_dict(state)
    weight: Any = twin.weight
    return weight


def _matrices(module: nn.Module, name: str) -> Tensor:
    """Returns the tensor of this name, which should be a matrix or a batch of matrices."""
    weight = getattr(module, name, None)
    if not isinstance(weight, Tensor):
        raise ValueError(f"`name` should be the name of a parameter or buffer of {type(module).__name__}; got {name!r}")
    if weight.ndim < 2:
        raise ValueError(f"`{name}` should be a matrix or a batch of matrices; got shape {tuple(weight.shape)}")
    return weight
