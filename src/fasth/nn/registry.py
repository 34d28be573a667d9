"""The classes of layers that ``to_svd`` can convert. A new kind of layer registers itself, in its own file."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from fasth.spectrum import Spectrum


class Converter(Protocol):
    """Holds the weights of one class of dense layers as SVDs."""

    def weights(self, dense: Any) -> tuple[str, ...]:
        """The names of the parameters that are replaced by factors."""
        ...

    def why_not(self, dense: Any) -> str:
        """The reason why this converter leaves the layer alone; "" if it does not."""
        ...

    def to_svd(self, dense: Any, spectrum: Spectrum, reflectors: str, rank: int | None) -> tuple[nn.Module, str]:
        """The converted layer, and a remark for the report."""
        ...


_converters: dict[str, list[Converter]] = {}


def register(kind: type[nn.Module] | str, converter: Converter) -> None:
    """Adds a converter for a class, or for the class with this path. The first one that takes a layer converts it."""
    _converters.setdefault(kind if isinstance(kind, str) else path_of(kind), []).append(converter)


def converter_for(module: nn.Module) -> tuple[Converter | None, str]:
    """The converter of a layer, or None and the reason."""
    reason = ""
    for converter in _converters.get(path_of(type(module)), ()):
        reason = converter.why_not(module)
        if not reason:
            return converter, ""
    return None, reason


def is_registered(kind: type[nn.Module]) -> bool:
    return path_of(kind) in _converters


def path_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
