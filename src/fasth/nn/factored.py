"""The base class of all layers: a dense weight computed from factors, its conversion, its cache, and a bias."""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fasth import _private
from fasth.functional import DTYPES
from fasth.nn.cache import Cache, state, weight_from
from fasth.nn.computed import computed
from fasth.nn.registry import register
from fasth.spectrum import Spectrum

Self = TypeVar("Self", bound="Factored")

CHANGED = 1e-3  # the relative change of a weight above which converting it is not rounding


class Factors(NamedTuple):
    """The decomposition of a dense weight."""

    tensors: dict[str, Tensor]  # parameter name to value
    change: float  # ‖W′ − W‖ / ‖W‖, with W′ the weight that they make


class Replacing:
    """The converter of dense layers that a class of fasth replaces."""

    def __init__(self, kind: type[Factored]) -> None:
        self.kind = kind

    def weights(self, dense: Any) -> tuple[str, ...]:
        """The names of the parameters that are replaced by factors."""
        return self.kind._dense_weights(dense)

    def why_not(self, dense: Any) -> str:
        """The reason why the class cannot have the weight of this layer, or ""."""
        return self.kind._why_not(dense)

    def to_svd(self, dense: Any, spectrum: Spectrum, reflectors: str, rank: int | None) -> tuple[nn.Module, str]:
        """The layer of the class, and a remark on its rank."""
        return self.kind._convert(dense, spectrum, reflectors, rank)


class Factored(nn.Module):
    """A module with a dense weight that is computed from some of its parameters, ``_factor_names``.

    Outside of ``fasth.cached()`` the weight is never stored, so every change of a parameter, ``.data`` included, takes
    effect at the next call.

    A state_dict of the dense twin, with a ``weight``, is converted as it is loaded, as by ``set_weight_``. If the layer
    cannot have that weight and gets the nearest that it can, a warning is issued.
    """

    bias: nn.Parameter | None
    _factor_names: tuple[str, ...]

    def __init_subclass__(cls, converts: type[nn.Module] | None = None, **options: Any) -> None:
        """``converts``: the dense class whose layers ``to_svd`` replaces by this one."""
        super().__init_subclass__(**options)
        if converts is not None:
            register(converts, Replacing(cls))

    def __init__(self) -> None:
        super().__init__()
        self._cache = Cache()
        self.register_load_state_dict_pre_hook(_convert_state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called for a copy, which gets load hooks of its own."""
        super().__setstate__(state)
        _private.take_over_load_hooks(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("weight"):
            self._check_not_weight(name)
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As in ``nn.Module``. Refuses the name of the dense weight, which pruning and fusing would replace."""
        if name.startswith("weight"):
            self._check_not_weight(name)
        super().register_parameter(name, param)

    def _check_not_weight(self, name: str) -> None:
        factors = self._dense_names().get(name.removesuffix("_orig"))  # PyTorch's pruning renames parameters
        if factors is not None:
            made_of = ", ".join(f"`{factor}`" for factor in factors)
            raise AttributeError(
                f"`{name}` cannot be set: {type(self).__name__} computes its weight from {made_of}. Call "
                "`set_weight_`, change those parameters, or convert the model by `fasth.to_dense` before its weights "
                "are pruned, normalized or fused"
            )

    @property
    def weight(self) -> Tensor:
        """W, dense and differentiable, of the shape that it has in ``torch.nn``.

        It is computed. In eager mode writing into it, as ``weight.copy_(W)``, ``weight.data = W`` or ``nn.init`` do,
        raises a RuntimeError: call ``set_weight_``.
        """
        cached = self._cached_weight()
        return computed(cached if isinstance(cached, Tensor) else self._weight())

    def _weight(self) -> Tensor:
        """W, computed."""
        raise NotImplementedError

    def set_weight_(self: Self, weight: Tensor) -> Self:
        """Makes ``weight`` the layer's weight."""
        self._write(**self._decompose(weight).tensors)
        return self

    @staticmethod
    def _dense_weights(dense: Any) -> tuple[str, ...]:
        """The names of the weights of a layer of the dense class that are decomposed."""
        return ("weight",)

    @classmethod
    def _why_not(cls, dense: Any) -> str:
        """The reason why this class cannot have the weight of a dense layer, or ""."""
        return ""

    @classmethod
    def _convert(cls, dense: Any, spectrum: Spectrum, reflectors: str, rank: int | None) -> tuple[Factored, str]:
        """The layer with the weights of a dense one, and a remark on its rank."""
        raise NotImplementedError

    def _to_dense(self) -> nn.Module:
        """The layer of ``torch.nn`` that computes the same."""
        raise NotImplementedError

    def _why_not_to_dense(self) -> str:
        """The reason why no layer of ``torch.nn`` computes the same, or ""."""
        return ""

    def _decompose(self, weight: Tensor) -> Factors:
        """The factors of a weight of this layer's shape."""
        raise NotImplementedError

    def _decompose_named(self, name: str, weight: Tensor) -> Factors:
        """The factors of the weight with this name in the dense twin."""
        return self._decompose(weight)

    def _dense_names(self) -> dict[str, tuple[str, ...]]:
        """Maps the names of the dense twin's weights to the names of their factors."""
        return {"weight": self._factor_names}

    def _form(self) -> Any:
        """Forms the tensors that ``fasth.cached()`` caches: the dense weight, or thin factors of it."""
        return self._weight().contiguous()

    def _cached_weight(self) -> Any:
        """The result of ``_form``, formed once; None outside of ``fasth.cached()``."""
        if not state.enabled:
            return None
        return weight_from(self._cache, self, self._factor_names, self._form)

    @torch.no_grad()
    def _write(self, **values: Tensor) -> None:
        """Writes values into the parameters of these names. If they are sharded, the first process's values."""
        self._cache.entry = None
        mesh = getattr(self._first(), "device_mesh", None)
        for name, value in values.items():
            target = getattr(self, name)
            target.copy_(value if mesh is None else _distributed(value.to(target), target, mesh))

    def _add_bias(self, bias: bool, size: int, device: Any, dtype: torch.dtype | None) -> None:
        self.register_parameter("bias", nn.Parameter(torch.empty(size, device=device, dtype=dtype)) if bias else None)

    def _reset_bias(self, fan_in: int) -> None:
        """Initializes the bias as ``nn.Linear`` and ``nn.Conv2d`` do."""
        if self.bias is not None:
            nn.init.uniform_(self.bias, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))

    def _first(self) -> Tensor:
        """One of the factors; all have the same dtype and device."""
        return getattr(self, self._factor_names[0])

    def _matching(self, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Checks the shape of ``weight``, and casts it to a dtype for decompositions."""
        if tuple(weight.shape) != shape:
            raise ValueError(f"`weight` should have shape {shape}; got {tuple(weight.shape)}")
        if not weight.is_floating_point():
            raise TypeError(f"`weight` should be real, as reflections are; got {weight.dtype}")
        dtype = torch.promote_types(torch.promote_types(weight.dtype, self._first().dtype), torch.float32)
        return weight.detach().to(dtype)

    def _trained_factors(self) -> list[nn.Parameter]:
        """The factors that are trained: all except the signs."""
        return [getattr(self, name) for name in self._factor_names if not name.startswith("signs")]

    def _take(self: Self, dense: Any) -> Self:
        """Takes the weight, the bias, the mode and ``requires_grad`` from a dense layer."""
        self.set_weight_(dense.weight)
        for factor in self._trained_factors():
            factor.requires_grad_(dense.weight.requires_grad)
        _copy_bias(dense, self)
        return self.train(dense.training)

    def _give(self, dense: Any) -> Any:
        """Gives the weight, the bias, the mode and ``requires_grad`` to a dense layer."""
        with torch.no_grad():
            dense.weight.copy_(self._weight())
        dense.weight.requires_grad_(any(factor.requires_grad for factor in self._trained_factors()))
        _copy_bias(self, dense)
        return dense.train(self.training)


def relative_change(before: Tensor, after: Tensor) -> float:
    """‖W′ − W‖ / ‖W‖ for weights with the same singular vectors and these singular values."""
    size = torch.linalg.vector_norm(before.double())
    change = torch.linalg.vector_norm(after.double() - before.double())
    return (change / size).item() if size > 0 else float(change > 0)


@torch.no_grad()
def _convert_state(
    layer: Factored,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Called before a state_dict is loaded: dense weights in it are replaced by their factors."""
    layer._cache.entry = None
    own = {name for name, _ in layer.named_parameters(recurse=False)}
    for name, factors in layer._dense_names().items():
        weight = state_dict.get(prefix + name)
        if not isinstance(weight, Tensor) or any(prefix + factor in state_dict for factor in factors):
            continue
        if not own.issuperset(factors):
            continue  # computed, as after pruning
        del state_dict[prefix + name]
        first = layer._first()
        like = weight if first.is_meta else first
        try:
            found = layer._decompose_named(name, weight.to(like.device))
        except (ValueError, RuntimeError) as error:
            error_msgs.append(f'While converting "{prefix + name}" to {", ".join(factors)}: {error}.')
            state_dict.update({prefix + factor: getattr(layer, factor) for factor in factors})
            continue
        state_dict.update({prefix + factor: t.to(like.dtype) for factor, t in found.tensors.items()})
        if found.change > CHANGED:
            warnings.warn(
                f'"{prefix + name}" was replaced by the nearest weight that {type(layer).__name__} can have here, '
                f"which differs from it by {found.change:.0%} of its norm",
                stacklevel=4,
            )


def _distributed(values: Tensor, like: Any, mesh: Any) -> Tensor:
    """Broadcasts the first process's values: each process gets its shard, or all values if ``like`` is not sharded."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    if hasattr(like, "placements"):
        return distribute_tensor(values, mesh, like.placements)
    return distribute_tensor(values, mesh, [Replicate()] * mesh.ndim).to_local()


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"`{name}` should be {' or '.join(map(repr, allowed))}; got {value!r}")
    return value


def check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(f"`dtype` should be float32, float64, bfloat16 or float16; got {dtype}")


def at_least_one(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"`{name}` should be at least 1; got {size}")


def _copy_bias(source: Any, target: Any) -> None:
    if source.bias is not None:
        with torch.no_grad():
            target.bias.copy_(source.bias)
        target.bias.requires_grad_(source.bias.requires_grad)
