"""The base class of matrices given by their factors: products with tensors, and checks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fasth import _private
from fasth.functional import as_reflectors, autocast_enabled

if TYPE_CHECKING:
    from typing_extensions import Self

LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # missing in torch's types


class Matrix(ABC):
    """An n×m matrix A, or a batch of matrices, given by its factors. Only ``dense`` forms it.

    ``A @ X`` takes columns, as in mathematics: X of shape (m,), (m, c) or (*b, m, c). ``X @ A`` takes rows.
    """

    @property
    def shape(self) -> torch.Size:
        """(n, m), or (*b, n, m)."""
        return torch.Size((*self._batch(), *self._sides()))

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @property
    @abstractmethod
    def mT(self) -> Self:
        """Aᵀ, with the same tensors as factors."""

    @abstractmethod
    def _batch(self) -> tuple[int, ...]: ...

    @abstractmethod
    def _sides(self) -> tuple[int, int]:
        """n and m."""

    @abstractmethod
    def _times(self, X: Tensor) -> Tensor:
        """A X for X of shape (*, m, c)."""

    def _times_rows(self, X: Tensor) -> Tensor:
        """X Aᵀ, as ``F.linear(X, A)``, for X of shape (*, m)."""
        return self._times(X.unsqueeze(-1)).squeeze(-1) if X.ndim == 1 else self._times(X.mT).mT

    def _form(self) -> str:
        """The form of the factors, for the repr."""
        return ""

    def dense(self) -> Tensor:
        """A itself, (*b, n, m), differentiable: A, or the transpose of Aᵀ, times the smaller identity."""
        n, m = self._sides()
        if n < m:
            return self.mT.dense().mT
        return self._times(torch.eye(m, dtype=self.dtype, device=self.device))

    def matmul(self, X: Tensor) -> Tensor:
        """``A @ X``, spelled as ``torch.compile`` can follow it into one graph."""
        _, m = self._sides()
        if X.ndim == 0 or X.shape[-1 if X.ndim == 1 else -2] != m:
            raise ValueError(
                f"`X` should have shape ({m},), ({m}, c) or (*b, {m}, c) for {self!r} @ X; got {tuple(X.shape)}"
            )
        X = self._as_this(X)
        return self._times_rows(X) if X.ndim == 1 else self._times(X)

    def _as_this(self, X: Tensor) -> Tensor:
        """Checks the dtype and device of X; under autocast casts X instead."""
        if X.dtype != self.dtype:
            if not autocast_enabled(X):
                raise TypeError(f"`X` should be {self.dtype}, as {self!r} is; got {X.dtype}")
            X = as_reflectors(X, self.dtype)
        if X.device != self.device:
            raise ValueError(f"`X` should be on {self.device}, as {self!r} is; got {X.device}")
        return X

    def __matmul__(self, X: Tensor) -> Tensor:
        return self.matmul(X) if isinstance(X, Tensor) else NotImplemented

    def __rmatmul__(self, X: Tensor) -> Tensor:
        if not isinstance(X, Tensor):
            return NotImplemented
        n, _ = self._sides()
        if X.ndim == 0 or X.shape[-1] != n:
            raise ValueError(
                f"`X` should have shape ({n},), (c, {n}) or (*b, c, {n}) for X @ {self!r}; got {tuple(X.shape)}"
            )
        return self.mT._times_rows(self._as_this(X))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """``X @ A`` and ``torch.matmul``. Without this method PyTorch would first try to read A as a tensor, slowly."""
        if function in _PRODUCTS and len(args) == 2 and not kwargs:
            left, right = args
            return left.__matmul__(right) if isinstance(left, Matrix) else right.__rmatmul__(left)
        return NotImplemented

    def __repr__(self) -> str:
        form, dtype = self._form(), str(self.dtype).removeprefix("torch.")
        return f"{type(self).__name__}({'×'.join(map(str, self.shape))}{form and ', ' + form}, {dtype})"


_PRODUCTS = (Tensor.__matmul__, Tensor.matmul, torch.matmul)


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: bfloat16 and float16 only store."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def values_known(t: Tensor) -> bool:
    """True if values may be read: not meta, not traced, not vmapped."""
    return not (torch.compiler.is_compiling() or t.is_meta or _private.transform_active() or _private.dispatch_modes())


def has_entry(t: Tensor, value: float) -> bool:
    """True if an entry of t equals this value and values may be read."""
    return values_known(t) and bool((t == value).any())


def broadcast_batches(**batches: tuple[int, ...]) -> tuple[int, ...]:
    distinct: list[tuple[int, ...]] = []
    for batch in batches.values():
        if batch and batch not in distinct:
            distinct.append(batch)
    if len(distinct) < 2:  # the usual case; the general one takes as long as a small product
        return distinct[0] if distinct else ()
    try:
        return tuple(torch.broadcast_shapes(*distinct))
    except RuntimeError:
        names = " and ".join(f"`{name}`" for name in batches)
        raise ValueError(
            f"the batches of {names} should broadcast against each other; "
            f"got {' and '.join(map(str, batches.values()))}"
        ) from None
