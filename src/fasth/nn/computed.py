"""Read-only tensors that a layer computes from its parameters: writing into one would not change the layer."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from fasth._private import transform_active

_IN_PLACE = re.compile(r"(?!_).*[^_]_|__i(add|and|floordiv|lshift|mod|mul|or|pow|rshift|sub|truediv|xor)__|__setitem__")
_WITHOUT_WRITING = ("detach_", "requires_grad_", "share_memory_")
_DATA: Any = Tensor.data  # a descriptor


class ComputedTensor(Tensor):
    """A tensor that raises an error on writes. Results of operations, except ``.data``, are plain tensors."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(kwargs.get("out"), cls) or (isinstance(target, cls) and _writes(func)):
            raise RuntimeError(
                "the weight of a layer of fasth is computed from its parameters, and writing into it would change "
                "nothing; call the layer's `set_weight_`, or convert the model by `fasth.to_dense` before adapters are "
                "merged into it or its weights are initialized"
            )
        result = Tensor.__torch_function__(func, (), args, kwargs)
        return result.as_subclass(cls) if func == _DATA.__get__ else result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as a plain tensor."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copied as a plain tensor."""
        return copy.deepcopy(self.as_subclass(Tensor), memo)


def computed(tensor: Tensor) -> Tensor:
    """Makes the tensor read-only in eager mode. Graphs and transforms get the tensor itself."""
    if type(tensor) is not Tensor or is_compiling() or transform_active():
        return tensor
    return tensor.as_subclass(ComputedTensor)


def _writes(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return func == _DATA.__set__ or (name not in _WITHOUT_WRITING and _IN_PLACE.fullmatch(name) is not None)
