"""The private names of PyTorch: all are in one file, and mean what it takes them to mean."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fasth
from fasth import _private

PRIVATE = re.compile(
    r"\btorch(\.\w+)*\._[a-z]\w*|from torch(\.\w+)*\._\w+|import torch(\.\w+)*\._\w+|forward_ad\._\w+"
    r"|\._(version|parameters|buffers|modules|\w*hooks|flat_weights\w*|reversed_padding\w*|op|cached_x_y|cache_size)\b"
)


def test_all_private_names_are_in_one_file() -> None:
    folder = Path(fasth.__file__).parent
    found = {
        (path.relative_to(folder).as_posix(), match.group())
        for path in folder.rglob("*.py")
        for match in PRIVATE.finditer(path.read_text(encoding="utf-8"))
    }
    names = {name for path, name in found if path == "_private.py"}
    assert {path for path, _ in found} == {"_private.py"}, found
    assert len(names) <= 8, names  # of the library; hooks of a module count as one, and so do those of a tensor


def test_transforms_are_noticed() -> None:
    x = torch.randn(3)
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(_private.transform_active())
        return x.sum()

    assert not _private.transform_active()
    torch.func.vmap(look)(x)
    torch.func.grad(look)(x)
    torch.func.jvp(look, (x,), (x,))
    with forward_ad.dual_level():
        look(forward_ad.make_dual(x, x))
    assert seen == [True] * 4
    assert not _private.transform_active()


@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: FlopCounterMode(display=False)])
def test_dispatch_modes_are_noticed(mode) -> None:
    assert not _private.dispatch_modes()
    with mode():
        assert _private.dispatch_modes()
    assert not _private.dispatch_modes()


def test_hooks_of_saved_tensors_are_noticed() -> None:
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(_private.saved_tensors_hooks_active())
        return x.sin()

    x = torch.randn(3, requires_grad=True)
    look(x)
    checkpoint(look, x, use_reentrant=False).sum().backward()
    with torch.autograd.graph.save_on_cpu():
        look(x)
    look(x)
    assert seen == [False, True, True, True, False]


def test_tensors_that_a_module_holds() -> None:
    layer = nn.Linear(2, 3)
    replica = layer._replicate_for_data_parallel()
    replica.weight = torch.ones(3, 2)
    pruned = prune.identity(nn.Linear(2, 3), "weight")
    for module in (layer, replica, pruned):
        for other in (layer, replica, pruned):
            assert _private.holds(module, {"weight": other.weight}) == (module is other)


def test_fake_tensors_are_noticed() -> None:
    x, other = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
    fake = FakeTensorMode().from_tensor(x)
    assert _private.is_fake(fake) and not _private.is_fake(x)
    assert _private.stands_for(fake, x) and not _private.stands_for(fake, other) and not _private.stands_for(x, x)


HOOKS = {
    "forward": lambda m: m.register_forward_hook(lambda *a: None),
    "forward pre": lambda m: m.register_forward_pre_hook(lambda *a: None),
    "backward": lambda m: m.register_full_backward_hook(lambda *a: None),
    "backward pre": lambda m: m.register_full_backward_pre_hook(lambda *a: None),
    "state dict": lambda m: m.register_state_dict_post_hook(lambda *a: None),
    "state dict pre": lambda m: m.register_state_dict_pre_hook(lambda *a: None),
    "load": lambda m: m.register_load_state_dict_post_hook(lambda *a: None),
    "load pre": lambda m: m.register_load_state_dict_pre_hook(lambda *a: None),
    "gradient": lambda m: m.weight.register_hook(lambda g: g),
    "accumulated gradient": lambda m: m.weight.register_post_accumulate_grad_hook(lambda p: None),
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS.keys())
def test_hooks_are_counted(register) -> None:
    layer = nn.Linear(3, 3)
    assert _private.number_of_hooks(layer) == 0
    register(layer)
    assert _private.number_of_hooks(layer) == 1


def test_a_shallow_copy_has_load_hooks_of_its_own() -> None:
    layer, seen = fasth.LinearSVD(2, 2), []
    layer.register_load_state_dict_pre_hook(lambda module, *_: seen.append(module))
    other = copy.copy(layer)
    other.load_state_dict(layer.state_dict())
    assert seen == [other]
