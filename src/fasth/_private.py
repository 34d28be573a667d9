"""Every private name of PyTorch that fasth uses: all of them are in this file, each with its reason.

tests/test_private.py fails when one of them goes away or changes its meaning.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

# Counts the operations of the paper's methods, in ``fasth.tools.reproduce``. There is no public path to it.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def transform_active() -> bool:
    """Whether vmap, grad or jvp of ``torch.func``, or forward-mode differentiation, is active.

    The compiled core reads memory, and an autograd Function with a ``forward(ctx, …)`` refuses these transforms; what
    they can follow is a composition of PyTorch's own operations. There is no public question for either. Without the
    first name ``torch.func`` would raise errors; without the second, forward mode would.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


# The two questions of ``transform_active``, and whether a ``TorchDispatchMode`` is active, as for fake tensors, make_fx
# and counters: without a Python function around them, since every call in eager mode asks them. Such a mode does not
# see what the compiled core does. Without the last name that would be missing from traces, and tensors without memory
# would reach the core, which refuses them.
functorch_active = torch._C._are_functorch_transforms_active
forward_level = functools.partial(getattr, forward_ad, "_current_level")
dispatch_modes = torch._C._len_torch_dispatch_stack


def is_exporting() -> bool:
    """``torch.compiler.is_exporting()``, which in torch 2.10 is True in graphs of torch.compile as well.

    This is the flag that it returns elsewhere. With the public question, those graphs would not call the core.
    """
    return torch.compiler._is_exporting_flag


def saved_tensors_hooks_active() -> bool:
    """Whether hooks of ``torch.autograd.graph.saved_tensors_hooks`` are active, as in a region of checkpoint.

    ``torch.utils.checkpoint`` takes the tensors that the second run of a region saves in place of those of the first,
    by their order. There is no public question. Without this name a weight that is cached in one run and not in the
    other would give errors, or wrong gradients.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_fake(tensor: Any) -> bool:
    """Whether a tensor is a ``FakeTensor``, which has no values. There is no public question.

    Without this name, which has no underscore but is not documented, a fake weight could be cached.
    """
    return hasattr(tensor, "fake_mode")


def stands_for(fake: Any, tensor: Tensor) -> bool:
    """Whether ``fake`` is the fake tensor that ``torch.export`` uses in place of ``tensor``, a parameter.

    A fake mode makes one fake tensor of each tensor, and gives the same one when asked again. Without these names,
    which are not documented, exported programs would have no cached weights.
    """
    return is_fake(fake) and fake.fake_mode.from_tensor(tensor) is fake


def holds(module: nn.Module, tensors: dict[str, Tensor]) -> bool:
    """Whether ``getattr(module, name) is t`` for all of these tensors, in a tenth of the time for parameters.

    Without this name every call of a small layer with its cached weight would take a third longer.
    """
    parameters: Any = module._parameters
    for name, t in tensors.items():
        if parameters.get(name) is not t and getattr(module, name) is not t:
            return False
    return True


def number_of_hooks(module: nn.Module) -> int:
    """How many hooks of any kind are registered with the module or its parameters. PyTorch has no list of them.

    If the attributes were renamed, ``to_svd`` would convert layers whose hooks are then lost.
    """
    places = [vars(module), *map(_of_tensor, module.parameters(recurse=False))]
    hooks = [held for place in places for name, held in place.items() if name[0] == "_" and name.endswith("_hooks")]
    return sum(len(held) for held in hooks if held)


def _of_tensor(tensor: Tensor) -> dict[str, Any]:
    return {name: getattr(tensor, name) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")}


def take_over_load_hooks(copy: nn.Module) -> None:
    """Makes hooks that run before a state_dict is loaded, which a shallow copy shares with its original, its own.

    Such a hook has a weak reference to its module. Without these names a shallow copy would convert a checkpoint for
    the original, and raise an error after that is gone.
    """
    hooks: dict[int, Any] = copy._load_state_dict_pre_hooks
    copy._load_state_dict_pre_hooks = OrderedDict(
        (key, type(hook)(hook.hook, copy) if getattr(hook, "with_module", False) else hook)
        for key, hook in hooks.items()
    )


def drop_load_hook(module: nn.Module, function: Any) -> None:
    """Takes back a hook that runs before a state_dict is loaded.

    PyTorch gives a handle to do that, which does not know the hooks of a copy of the module.
    """
    hooks: dict[int, Any] = module._load_state_dict_pre_hooks
    for key in [key for key, hook in hooks.items() if getattr(hook, "hook", hook) is function]:
        del hooks[key]


def without_last_values(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a ``torch.distributions`` transform for a copy, without the last argument and result that it caches.

    These are results of a graph, which cannot be copied. Without this name a transform with a cache could not be copied
    or saved after its first use.
    """
    return state | {"_cached_x_y": (None, None)} if "_cached_x_y" in state else state
