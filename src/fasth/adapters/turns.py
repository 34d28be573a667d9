"""Orthogonal maps of activations, initially the identity: few reflections, a general matrix, or blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasth.functional import reflect
from fasth.nn import LinearOrthogonal
from fasth.nn.held_weight import HeldWeight
from fasth.operators import Orthogonal
from fasth.operators.matrix import computing_dtype

# Multiplies the rate of reflectors in `param_groups`, so that LoRA's best lr is near the best lr here (a sweep by
# benchmarks/adapter_rates.py). Full reflectors have lr/√2 in `param_groups`, and 0.85·lr with this multiple.
REFLECTIONS_RATE = 1.2
# The same for rotations, divided by the root of the features in a block: at one rate, larger blocks turn further.
ORTHOGONAL_RATE = 3.5


class Turn(nn.Module):
    """x ↦ Q x for every row x, with Q orthogonal and trained.  x: (*, d) → (*, d), in the dtype of x.

    A half-precision x is multiplied in the dtype of the parameters, float32 by default, and rounded once.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def forward(self, x: Tensor, *, internal: bool = False) -> Tensor:
        """x Qᵀ. ``internal``: the caller does not change the result in place, so that it may be saved for backward."""
        return self._multiply(x, transpose=False, internal=internal)

    def transposed(self, x: Tensor) -> Tensor:
        """x Q, the inverse."""
        return self._multiply(x, transpose=True, internal=False)

    def restart(self) -> None:
        """Makes Q the identity, with parameters from which training can go on."""
        raise NotImplementedError

    @torch.no_grad()
    def angles(self) -> Tensor:
        """The angles by which Q turns its eigenvectors, in radians from 0 to π: float64. Other vectors are not turned.

        The eigenvalues of the symmetric part of Q are cos θ.
        """
        Q = self._compressed()
        cosines = torch.linalg.eigvalsh((Q + Q.mT) / 2).clamp(-1, 1).flatten()
        return cosines.acos()

    def _multiply(self, x: Tensor, transpose: bool, internal: bool) -> Tensor:
        raise NotImplementedError

    def _compressed(self) -> Tensor:
        """Q, or Q in a basis of a subspace outside of which it is the identity: (*, k, k), in float64."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"features={self.features}"


class ReflectionsTurn(Turn):
    """Q = H₁⋯H_r D with H = I − 2vvᵀ/‖v‖², v the rows of V: (r, d), and D a diagonal of constant signs.

    Initially the rows of V are r different columns of the identity, drawn at random, and D has −1 at their places: Q is
    exactly the identity, for every r from 0 to d, and all r·d numbers have independent gradients. Pairs of equal
    reflections would be the identity too, but to first order only the difference of each pair matters, so that only
    half of the numbers would train. Costs 4·r·d operations per row and direction.
    """

    signs: Tensor

    def __init__(self, features: int, r: int, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(features)
        r = min(r, features)
        self.V = nn.Parameter(torch.empty(r, features, device=device, dtype=dtype))
        self.register_buffer("signs", torch.empty(features, device=device, dtype=dtype))
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Draws new places, and sets reflections and signs there that cancel."""
        if self.V.is_meta:
            return
        places = torch.randperm(self.features)[: len(self.V)].to(self.V.device)
        self.V.zero_()[torch.arange(len(self.V)), places] = 1.0
        self.signs.fill_(1.0)[places] = -1.0

    def held_weights(self) -> Iterator[HeldWeight]:
        """Yields Q as an orthogonal weight."""
        shape, rates = (self.features, self.features), (1.0, REFLECTIONS_RATE)
        yield HeldWeight("", shape, self.V, None, None, "full", None, rates=rates)

    def _multiply(self, x: Tensor, transpose: bool, internal: bool) -> Tensor:
        dtype = torch.promote_types(self.V.dtype, x.dtype)
        internal = internal or dtype != x.dtype
        return _reflected(x.to(dtype), self.V.to(dtype), self.signs.to(dtype), transpose, internal).to(x.dtype)

    def _compressed(self) -> Tensor:
        """Q in a basis of the span of the rows of V and of the features with sign −1."""
        V, signs = self.V.double(), self.signs.double()
        places = F.one_hot((signs < 0).nonzero().squeeze(-1), self.features).to(V.dtype)
        basis = torch.linalg.qr(torch.cat((V, places)).mT).Q.mT
        return _reflected(basis, V, signs, False, True) @ basis.mT

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, r={len(self.V)}"


def _reflected(x: Tensor, V: Tensor, signs: Tensor, transpose: bool, internal: bool) -> Tensor:
    """x Qᵀ, or x Q if ``transpose``, with Q = H₁⋯H_r diag(signs)."""
    if transpose:
        return reflect(x, V, "full", transpose=True, internal=True) * signs
    return reflect(x * signs, V, "full", internal=internal)


class GeneralTurn(Turn):
    """Any rotation Q: a ``LinearOrthogonal`` with d² numbers, of which d·(d − 1)/2 are used."""

    def __init__(self, features: int, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(features)
        self.layer = _Orthogonal(features, features, False, device, dtype, init="identity")

    def restart(self) -> None:
        """Sets Q = I: d reflections of one coordinate each, and signs that cancel them."""
        self.layer.reset_parameters()

    def _multiply(self, x: Tensor, transpose: bool, internal: bool) -> Tensor:
        V = self.layer.reflectors
        dtype = torch.promote_types(V.dtype, x.dtype)
        if dtype == V.dtype and not transpose:
            return self.layer(x.to(dtype)).to(x.dtype)
        Q = Orthogonal.of_stored(V.to(dtype))
        return (x.to(dtype) @ (Q if transpose else Q.mT)).to(x.dtype)

    def _compressed(self) -> Tensor:
        return self.layer.weight.double()


class _Orthogonal(LinearOrthogonal):
    """A ``LinearOrthogonal`` with the rate of adapters."""

    def held_weights(self) -> Iterator[HeldWeight]:
        """Yields W, with the rate of adapters."""
        for held in super().held_weights():
            yield held._replace(rates=(1.0, ORTHOGONAL_RATE / math.sqrt(held.shape[-1])))

    def _why_not_to_dense(self) -> str:
        return "it is part of an adapter"


class BlocksTurn(Turn):
    """Q = diag(Q₁, …, Q_k), general rotations of b features each, d = k·b. They are formed, and cost 2·b·d a row.

    The parameter holds compact reflectors with the signs of their columns: (k, b, b).
    """

    def __init__(self, features: int, block_size: int, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(features)
        if features % block_size:
            raise ValueError(f"`block_size` should divide the {features} features; got {block_size}")
        shape = features // block_size, block_size, block_size
        self.reflectors = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Sets Q = I, as in ``GeneralTurn``."""
        self.reflectors.zero_().diagonal(dim1=-2, dim2=-1).fill_(-1.0)

    def held_weights(self) -> Iterator[HeldWeight]:
        """Yields the blocks as a batch of orthogonal weights."""
        shape = tuple(self.reflectors.shape)
        rates = 1.0, ORTHOGONAL_RATE / math.sqrt(shape[-1])
        yield HeldWeight("", shape, self.reflectors, None, None, "compact", None, rates=rates)

    def _multiply(self, x: Tensor, transpose: bool, internal: bool) -> Tensor:
        dtype = computing_dtype(torch.promote_types(self.reflectors.dtype, x.dtype))
        Q = Orthogonal.of_stored(self.reflectors.to(dtype)).dense()
        blocks = x.to(dtype).unflatten(-1, Q.shape[:2])  # (*, k, b)
        return torch.einsum("...kb,kbc->...kc", blocks, Q if transpose else Q.mT).flatten(-2).to(x.dtype)

    def _compressed(self) -> Tensor:
        return Orthogonal.of_stored(self.reflectors.double()).dense()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, block_size={self.reflectors.shape[-1]}"
