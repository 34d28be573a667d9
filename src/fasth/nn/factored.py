"""What all layers share: a dense weight that is made of other tensors, kept for inference, and a bias."""

from __future__ import annotations

import copy
import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fasth.nn import kept
from fasth.nn.kept import usable as usable_in_graph
from fasth.reflections import native

Self = TypeVar("Self", bound="Factored")


class Kept(NamedTuple):
    """A weight, and the parameters and buffers that it was made of: name, tensor, version and address of each."""

    weight: Any  # a tensor, or packed for graphs
    parameters: tuple[tuple[str, Tensor, int, int], ...]
    buffers: tuple[tuple[str, Tensor, int, int], ...]
    memory: tuple[Tensor, ...]  # held, since another tensor that was given it would have the same address
    in_order: tuple[tuple[Tensor, int, int], ...]  # without the names, as ``_made_of`` has them

    def is_made_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are what it was made of, and have not changed."""
        for (tensor, version, address), given in zip(self.in_order, tensors, strict=True):
            if given is not tensor or tensor._version != version or tensor.data_ptr() != address:
                return False
        return True


class Factored(nn.Module):
    """A module with a dense weight that is made of some of its parameters and buffers, ``_made_of``.

    In eval mode and without gradients the weight is formed once and kept until one of them changes, so that inference
    costs what it costs with a dense layer. A change shows in a tensor's version, address or identity, and every
    ``torch.optim`` optimizer's step counts as one. What does not show is writing into the memory behind autograd's
    back, as through ``.data``; call ``eval()`` after that: it forgets the weight, as ``train()`` does. The kept weight
    is no part of a state_dict, a copy or a pickle. None is kept in memory that other processes share, and may write
    to, nor of parameters that FSDP gathers anew for each call, nor by a layer of low rank, whose factors are smaller.

    A state_dict of the dense twin, with a ``weight``, is converted as it is loaded, as ``set_weight_`` would.
    """

    bias: nn.Parameter | None
    _made_of: tuple[str, ...]
    _thin: bool = False  # of fewer singular values than its shape has: the weight is never formed to multiply by it
    _kept: Kept | None
    _kept_for_graphs: Kept | None
    _seen_by_graphs: tuple[int, ...] | None
    _number: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._forget()
        self._number = kept.register(self)

    @property
    def weight(self) -> Tensor:
        """The dense weight, differentiable. It is a result: writing into it changes nothing, ``set_weight_`` does."""
        raise NotImplementedError

    def set_weight_(self: Self, weight: Tensor) -> Self:
        """Makes ``weight`` the layer's weight."""
        raise NotImplementedError

    def _kept_weight(self) -> Tensor | None:
        """The dense weight where a kept one serves: in eval, without gradients, watched by nobody. Else None."""
        if self._thin or torch.is_grad_enabled():
            return None
        if torch.compiler.is_compiling():
            return self._weight_in_graph()
        return self._weight_in("_kept")

    def _weight_in(self, place: str) -> Any:
        """The weight that is kept there, made anew if the parameters have changed; None where none may be kept."""
        # All inference passes here, so: plain attributes only, none that nn.Module would have to search for or look at.
        found: Kept | None = self.__dict__[place]
        if found is None:
            return self._keep_weight(place)
        weight, parameters, buffers, *_ = found
        for now, then in ((self._parameters, parameters), (self._buffers, buffers)):
            for name, tensor, version, address in then:
                if now.get(name) is not tensor or tensor._version != version or tensor.data_ptr() != address:
                    return self._keep_weight(place)
        return weight

    def _weight_in_graph(self) -> Tensor | None:
        """The kept weight where a graph may ask for it when it runs. Else None, and it is made in the graph."""
        made_of = made_of_in_graph(self)
        return None if made_of is None else torch.ops.fasth.kept_weight(made_of, self._number, self._weight_shape())

    def _weight_shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    def kept_weight_of(self, made_of: Sequence[Tensor]) -> Any:
        """The weight that these tensors make, for graphs: the kept one, which may be packed, where they are its own.

        Graphs have one of their own, and keep it when they see the same versions for the second time. A graph that
        changes a parameter counts that before it does it: what it sees in the meantime is of no use to others.
        """
        found = self._kept_for_graphs
        if found is not None and found.is_made_of(made_of):
            return found.weight
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.kept_weight_of(made_of)
        if all(t is u or (t is not None and _same(t, u)) for t, u in zip(tensors_of(self), made_of, strict=True)):
            seen, self._seen_by_graphs = self._seen_by_graphs, _versions(made_of)
            weight = self._weight_in("_kept_for_graphs") if seen == self._seen_by_graphs else self.weight
            if weight is not None:
                return weight
        given = dict(zip(self._made_of, made_of, strict=True))
        layer = copy.copy(self)
        layer._parameters = {name: given.get(name, p) for name, p in self._parameters.items()}  # type: ignore[misc]
        layer._buffers = {name: given.get(name, b) for name, b in self._buffers.items()}
        return layer.weight

    def _keep_weight(self, place: str) -> Any:
        self._forget_in(place)
        if self.training or native.watched() or _gathered(self):
            return None
        parameters, buffers = (_records(tensors, self._made_of) for tensors in (self._parameters, self._buffers))
        if len(parameters) + len(buffers) < len(self._made_of):
            return None
        memory = tuple(tensor.detach() for _, tensor, *_ in parameters + buffers)
        weight = self.weight.contiguous()
        of = {name: (tensor, version, address) for name, tensor, version, address in parameters + buffers}
        in_order = tuple(of[name] for name in self._made_of)
        if place == "_kept_for_graphs":
            weight = self._for_graphs(weight, in_order)
        found = Kept(weight, parameters, buffers, memory, in_order)
        self.__dict__[place] = found
        _keepers.add(self)
        _watch_optimizers()
        return found.weight

    def _for_graphs(self, weight: Tensor, made_of: Sequence[tuple[Tensor, int, int]]) -> Any:
        """The dense weight as ``fasth::kept_linear`` or ``fasth::kept_weight`` takes it, of these tensors."""
        return weight

    def _forget(self) -> None:
        self._forget_in("_kept")
        self._forget_in("_kept_for_graphs")
        self._seen_by_graphs = None

    def _forget_in(self, place: str) -> None:
        found: Kept | None = self.__dict__.get(place)
        if found is not None:
            kept.forget(found.weight)
        self.__dict__[place] = None

    def train(self: Self, mode: bool = True) -> Self:
        self._forget()
        return super().train(mode)

    def _apply(self: Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._forget()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OF_THIS_ONE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
        self._number = kept.register(self)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        failed: list[str] = []
        for name, made_of in self._dense_weights().items():
            factors, weight = [prefix + factor for factor in made_of], state_dict.get(prefix + name)
            if not isinstance(weight, Tensor) or any(factor in state_dict for factor in factors):
                continue
            if not all(factor in self._parameters or factor in self._buffers for factor in made_of):
                continue  # computed, as after pruning
            del state_dict[prefix + name]
            # Assigned tensors are as they are in the state_dict; copied ones are as they are here.
            like = weight if local_metadata.get("assign_to_params_buffers", False) else self._first()
            try:
                made = self._made_from(weight, dtype=like.dtype, device=(weight if like.is_meta else like).device)
            except (ValueError, RuntimeError) as error:
                error_msgs.append(f'While converting "{prefix + name}" to {", ".join(made_of)}: {error}.')
                failed += factors
            else:
                state_dict.update(zip(factors, made, strict=True))
        missing: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs)
        missing_keys += [key for key in missing if key not in failed]

    def _dense_weights(self) -> dict[str, tuple[str, ...]]:
        """The names that the weights of the dense twin have, and what each of them is made of here."""
        return {"weight": self._made_of}

    @torch.no_grad()
    def _made_from(self, weight: Tensor, **like: Any) -> list[Tensor]:
        """What a weight of the dense twin is made of, in the order of ``_made_of``, without a change of this layer."""
        layer = copy.copy(self)
        layer._parameters = {
            name: None if p is None else nn.Parameter(torch.empty_like(p, **like), False)
            for name, p in self._parameters.items()
        }
        layer._buffers = {name: None if b is None else torch.empty_like(b, **like) for name, b in self._buffers.items()}
        layer.set_weight_(weight)
        return [getattr(layer, name).detach() for name in self._made_of]

    @torch.no_grad()
    def _write(self, **values: Tensor) -> None:
        """The values into the parameters and buffers of these names. Sharded over processes: those of the first."""
        mesh = getattr(self._first(), "device_mesh", None)
        for name, value in values.items():
            target = getattr(self, name)
            target.copy_(value if mesh is None else _distributed(value.to(target), target, mesh))

    def _add_bias(self, bias: bool, size: int, device: Any, dtype: torch.dtype | None) -> None:
        self.register_parameter("bias", nn.Parameter(torch.empty(size, device=device, dtype=dtype)) if bias else None)

    def _reset_bias(self, fan_in: int) -> None:
        """As ``nn.Linear`` and ``nn.Conv2d`` do."""
        if self.bias is not None:
            nn.init.uniform_(self.bias, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))

    def _first(self) -> Tensor:
        """One of the tensors that the weight is made of: all have its dtype and device."""
        return getattr(self, self._made_of[0])

    def _matching(self, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
        """``weight``, which should have the given shape, in a dtype to decompose it in."""
        if tuple(weight.shape) != shape:
            raise ValueError(f"`weight` should have shape {shape}; got {tuple(weight.shape)}")
        dtype = torch.promote_types(torch.promote_types(weight.dtype, self._first().dtype), torch.float32)
        return weight.detach().to(dtype)

    def _take(self: Self, dense: Any) -> Self:
        """The weight, the bias, the mode and what is to be trained from a dense layer."""
        self.set_weight_(dense.weight)
        for name in self._made_of:
            if name in self._parameters:
                getattr(self, name).requires_grad_(dense.weight.requires_grad)
        _copy_bias(dense, self)
        return self.train(dense.training)

    def _give(self, dense: Any) -> Any:
        """The weight, the bias, the mode and what is to be trained to a dense layer."""
        with torch.no_grad():
            dense.weight.copy_(self.weight)
        dense.weight.requires_grad_(any(getattr(self, name).requires_grad for name in self._made_of))
        _copy_bias(self, dense)
        return dense.train(self.training)


_OF_THIS_ONE = ("_kept", "_kept_for_graphs", "_seen_by_graphs", "_number")  # not for a copy

_keepers: weakref.WeakSet[Factored] = weakref.WeakSet()


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_forget_stepped)


def _forget_stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """A step that is fused, or written through ``.data``, does not show in the version of a parameter."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]} if _keepers else set()
    for module in tuple(_keepers):
        made_of = {
            id(tensor) for one in (module._kept, module._kept_for_graphs) if one for _, tensor, *_ in one.parameters
        }
        if not made_of or not stepped.isdisjoint(made_of):
            module._forget()
            _keepers.discard(module)


def _distributed(values: Tensor, like: Any, mesh: Any) -> Tensor:
    """The first process's values on all of them, each with its shard, or with the whole if ``like`` is a buffer."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    if hasattr(like, "placements"):
        return distribute_tensor(values, mesh, like.placements)
    return distribute_tensor(values, mesh, [Replicate()] * mesh.ndim).to_local()


def _versions(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Those of inference mode have none, and none that can be kept."""
    return tuple(-1 if tensor.is_inference() else tensor._version for tensor in tensors)


def _same(t: Tensor, u: Tensor) -> bool:
    """Whether both are the same numbers in the same memory."""
    return (t.data_ptr(), t.dtype, t.shape, t.stride()) == (u.data_ptr(), u.dtype, u.shape, u.stride())


# Functions, where methods would do: a graph would look for each of those in every class of every layer, at every call.


def made_of_in_graph(layer: Factored) -> list[Tensor] | None:
    """What the weight is made of, if a graph in the making may ask for the kept one."""
    if layer.training or layer._thin or _gathered(layer):
        return None
    made_of = tensors_of(layer)
    return made_of if usable_in_graph(layer._number, made_of) else None  # type: ignore[return-value]  # none is None


def tensors_of(layer: Factored) -> list[Tensor | None]:
    """The tensors of ``_made_of``; None for one that is computed, as after pruning."""
    return [layer._parameters.get(name, layer._buffers.get(name)) for name in layer._made_of]


def _gathered(layer: Factored) -> bool:
    """Whether FSDP refills the parameters for each call: same tensors and versions, and at times same addresses."""
    # The flag is that of fully_shard and of its predecessor; replicate, which works likewise, sets hooks only.
    return "_is_fsdp_managed_module" in layer.__dict__ or bool(layer._load_state_dict_pre_hooks)


def in_dtype_of(parameter: Tensor, buffer: Tensor) -> Tensor:
    """The buffer as the parameter is. FSDP casts only parameters to the dtype that it is told to compute in."""
    return buffer if buffer.dtype == parameter.dtype else buffer.to(parameter.dtype)


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"`{name}` should be {' or '.join(map(repr, allowed))}; got {value!r}")
    return value


def at_least_one(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"`{name}` should be at least 1; got {size}")


def _records(tensors: Mapping[str, Tensor | None], names: tuple[str, ...]) -> tuple[tuple[str, Tensor, int, int], ...]:
    """Name, tensor, version and address of those that are there and whose changes can be seen."""
    found = ((name, tensors.get(name)) for name in names)
    return tuple(
        (name, tensor, tensor._version, tensor.data_ptr())
        for name, tensor in found
        # None: it is in the other table, or computed, as after pruning. Tensors of inference mode have no version.
        if tensor is not None
        and type(tensor) in (Tensor, nn.Parameter)
        and not tensor.is_inference()
        and not (tensor.is_cpu and tensor.is_shared())
    )


def _copy_bias(source: Any, target: Any) -> None:
    if source.bias is not None:
        with torch.no_grad():
            target.bias.copy_(source.bias)
        target.bias.requires_grad_(source.bias.requires_grad)
