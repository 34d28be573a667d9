"""The weights that a module holds as their factors: the only interface of spectra, rates and penalties to a layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from fasth.spectrum import Spectrum


class HeldWeight(NamedTuple):
    """The current factors of a weight W = U diag(σ) Vᵀ: a matrix, or a batch of matrices."""

    name: str  # in the dense twin, or "" if the module has no other weight
    shape: tuple[int, ...]  # of W: (n, m) or (*b, n, m)
    U: Tensor  # the reflectors of U, of both sides in one matrix, or of an orthogonal weight
    sigma: Tensor | None  # the parameter that the spectrum maps to σ; None: W is orthogonal
    V: Tensor | None  # the reflectors of V: U itself where W is symmetric, None where U has both, or is all there is
    form: str
    spectrum: Spectrum | None  # None: W is orthogonal
    signs: Tensor | None = None  # of the columns of full reflectors: a constant
    rates: tuple[float, float] = (1.0, 1.0)  # multiples of the learning rates of sigma and of reflectors
    is_changed: bool = False  # True if another parametrization follows, so that the module's weight is not W

    @property
    def trained(self) -> bool:
        """True if the singular values are trained. An orthogonal weight has constant ones."""
        return self.spectrum is not None

    @property
    def factors(self) -> tuple[Tensor, ...]:
        """The tensors of W without the signs. Modules that share a weight share all of them."""
        return tuple(t for t in (self.U, self.V, self.sigma) if t is not None)

    @property
    def singular_values(self) -> Tensor:
        """σ: (*b, k), of any sign and in any order, differentiable; gathered if it is sharded over processes."""
        *batch, n, m = self.shape
        if self.spectrum is None or self.sigma is None:
            return _whole(self.U.new_ones(*batch, min(n, m)))
        # Gathered before it is mapped: torch 2.10 has no softplus of a sharded tensor.
        return self.spectrum(_whole(self.sigma).reshape(*batch, -1))

    @property
    def rank(self) -> int:
        """The number of singular values."""
        *batch, n, m = self.shape
        return min(n, m) if self.sigma is None else self.sigma.numel() // math.prod(batch)


def held_weights(module: Any) -> Iterator[HeldWeight]:
    """Yields the factored weights of one module, from its method ``held_weights()``.

    A tensor under ``fasth.parametrizations`` belongs to the module that is PyTorch's list of its parametrizations.
    """
    if isinstance(module, ParametrizationList):
        first: Any = module[0]
        if hasattr(first, "held_weight"):
            yield first.held_weight(module)._replace(is_changed=len(module) > 1)
    elif hasattr(module, "held_weights"):
        yield from module.held_weights()


def named_held_weights(model: nn.Module) -> Iterator[tuple[str, HeldWeight]]:
    """Yields the names and the factored weights of a model. A module that occurs twice is yielded once.

    A name is the module's, as in ``model.named_modules()``, followed by the weight's name in the module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` should be a torch.nn.Module; got {type(model).__name__}")
    for path, module in model.named_modules():
        for weight in held_weights(module):
            # A parametrized tensor has the name of the tensor in its module.
            parts = [part for part in (*path.split("."), weight.name) if part not in ("", "parametrizations")]
            yield ".".join(parts), weight


def _whole(t: Any) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t
