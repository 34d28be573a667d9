"""Every way to change a layer, or to get one like it. Each takes the layer and returns the one to go on with."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrize, vector_to_parameters

from fasth import compress, param_groups, to_dense, to_svd
from fasth.nn.conv import _ConvSVD
from fasth.nn.factored import Factored
from fasth.nn.linear import LinearOrthogonal, LinearSVD
from fasth.nn.orthogonal_conv import ImageMap
from fasth.nn.recurrent import Recurrent
from fasth.spectrum import free
from fuzz.compare import check, norm, tolerance
from fuzz.draws import DTYPES, Draw

Run = Callable[[Any], Tensor]  # the layer's output, for a step of training


def trained(layer: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by name, but for signs, which are ±1."""
    return {name: p for name, p in layer.named_parameters() if not name.endswith("signs")}


def nearby(draw: Draw, p: Tensor, size: float = 0.2) -> Tensor:
    """Other numbers, not far away. Signs stay signs."""
    return (p.detach().double() + size * torch.randn(p.shape, dtype=torch.float64)).to(p.dtype)


def one_of_them(draw: Draw, layer: nn.Module) -> tuple[str, nn.Parameter]:
    return draw.choice(list(trained(layer).items()))


def in_place(draw: Draw, layer: Any, run: Run) -> Any:
    _, p = one_of_them(draw, layer)
    with torch.no_grad():
        way = draw.choice(["add_", "copy_", "row", "mul_", "foreach"])
        if way == "add_":
            p.add_(0.1 * torch.randn_like(p))
        elif way == "copy_":
            p.copy_(nearby(draw, p))
        elif way == "row":
            p[draw.between(0, len(p) - 1)] += 0.25
        elif way == "mul_":
            p.mul_(0.75)
        else:
            for q in trained(layer).values():
                q.sub_(0.1 * torch.randn_like(q))
    return layer


def data(draw: Draw, layer: Any, run: Run) -> Any:
    _, p = one_of_them(draw, layer)
    way = draw.choice(["copy", "new", "strided", "entry", "set"])
    new = nearby(draw, p)
    if way == "copy":
        p.data.copy_(new)
    elif way == "new":
        p.data = new
    elif way == "strided":
        p.data = new.mT.contiguous().mT if new.ndim > 1 else new.repeat_interleave(2)[::2]
    elif way == "entry":
        p.data[-1] += 0.25
    else:
        p.data.set_(new)
    return layer


def new_parameter(draw: Draw, layer: Any, run: Run) -> Any:
    """Another Parameter object in the place of one."""
    name, p = one_of_them(draw, layer)
    if parametrize.is_parametrized(layer):
        return data(draw, layer, run)
    setattr(layer, name, nn.Parameter(nearby(draw, p), requires_grad=p.requires_grad))
    return layer


def swapped(draw: Draw, layer: Any, run: Run) -> Any:
    _, p = one_of_them(draw, layer)
    torch.utils.swap_tensors(p, nn.Parameter(nearby(draw, p), requires_grad=p.requires_grad))
    return layer


def step(draw: Draw, layer: Any, run: Run) -> Any:
    """Makes one or two steps of an optimizer."""
    params = [p for p in layer.parameters() if p.requires_grad]
    if not params:
        return layer
    kind = draw.choice(["SGD", "AdamW", "param_groups"])
    if kind == "SGD":
        optimizer: Any = torch.optim.SGD(params, lr=1e-2, momentum=draw.choice([0, 0.5]))
    elif kind == "AdamW":
        optimizer = torch.optim.AdamW(params, lr=3e-2, eps=1e-4, foreach=draw.chance(0.5))
    else:
        optimizer = torch.optim.AdamW(param_groups(layer, lr=1e-2, weight_decay=0.1), eps=1e-4)
    for _ in range(draw.between(1, 2)):
        optimizer.zero_grad(set_to_none=draw.chance(0.5))
        run(layer).float().square().mean().backward()
        for p in params:
            if p.grad is not None:  # a step stays small, whatever the input's size
                p.grad.nan_to_num_(0, 1, -1).clamp_(-1, 1)
        optimizer.step()
    optimizer.zero_grad()
    return layer


def load(draw: Draw, layer: Any, run: Run) -> Any:
    """A checkpoint with other numbers, copied or assigned; saved by torch, or as it is."""
    state = {
        name: t.detach().clone() if name.endswith("signs") or not t.is_floating_point() else nearby(draw, t)
        for name, t in layer.state_dict().items()
    }
    if draw.chance(0.2):
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    layer.load_state_dict(state, assign=draw.chance(0.5))
    return layer


def load_dense(draw: Draw, layer: Any, run: Run) -> Any:
    """The checkpoint of a dense twin."""
    if not isinstance(layer, (LinearSVD, _ConvSVD)):
        return load(draw, layer, run)
    state = {name: t for name, t in layer.state_dict().items() if name == "bias"}
    state["weight"] = nearby(draw, layer.weight)
    layer.load_state_dict(state, strict=False)
    return layer


def set_weight(draw: Draw, layer: Any, run: Run) -> Any:
    if isinstance(layer, ImageMap):  # which takes no kernel
        return in_place(draw, layer, run)
    if isinstance(layer, Factored):
        W = nearby(draw, layer.weight)
        W = (W + W.mT) / 2 if hasattr(layer, "eig") else W
        layer.set_weight_(W)
        if getattr(layer, "spectrum", None) == free() and not getattr(layer, "_is_thin", False):
            check_weight(layer, W)
    if parametrize.is_parametrized(layer):
        name = draw.choice(list(layer.parametrizations))
        setattr(layer, name, nearby(draw, getattr(layer, name)))
    return layer


def reset(draw: Draw, layer: Any, run: Run) -> Any:
    if isinstance(layer, Factored):
        layer.reset_parameters()
    return layer


def to_vector(draw: Draw, layer: Any, run: Run) -> Any:
    params = trained(layer).values()
    if all(p.is_contiguous() for p in params):  # torch takes no others
        vector_to_parameters(nearby(draw, parameters_to_vector(params)), params)
    return layer


def copied(draw: Draw, layer: Any, run: Run) -> Any:
    """A copy, of which the original is then changed, or the other way round."""
    way = draw.choice(["deepcopy", "pickle", "copy"])
    if way == "copy" and not parametrize.is_parametrized(layer):
        other = copy.copy(layer)  # which shares its parameters
        return in_place(draw, layer, run) and other
    other = copy.deepcopy(layer) if way == "deepcopy" or parametrize.is_parametrized(layer) else _pickled(layer)
    changed, kept = (layer, other) if draw.chance(0.5) else (other, layer)
    in_place(draw, changed, run)
    return draw.choice([changed, kept])


def _pickled(layer: Any) -> Any:
    return pickle.loads(pickle.dumps(layer))


def to_dtype(draw: Draw, layer: Any, run: Run) -> Any:
    if parametrize.is_parametrized(layer):  # whose check of what is assigned knows the dtype that it was made for
        return in_place(draw, layer, run)
    dtype = draw.weighted(DTYPES)
    swap = draw.chance(0.2)
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        return layer.to(dtype)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def freeze(draw: Draw, layer: Any, run: Run) -> Any:
    for p in trained(layer).values():
        p.requires_grad_(draw.chance(0.6))
    return layer


def mode(draw: Draw, layer: Any, run: Run) -> Any:
    layer.train(draw.chance(0.5))
    return layer


def memory(draw: Draw, layer: Any, run: Run) -> Any:
    """Another memory format, or shared memory."""
    if draw.chance(0.1):
        return layer.share_memory()
    if any(p.ndim == 4 for p in layer.parameters()) or isinstance(layer, _ConvSVD):
        return layer.to(memory_format=draw.choice([torch.channels_last, torch.contiguous_format]))
    return layer


def converted(draw: Draw, layer: Any, run: Run) -> Any:
    """Converts the layer to a dense one and back, or truncates it."""
    if (
        not isinstance(layer, Factored)
        or isinstance(layer, ImageMap)
        or getattr(layer, "nonlinearity", "") == "modrelu"
    ):
        return in_place(draw, layer, run)
    if isinstance(layer, (Recurrent, LinearOrthogonal)) or hasattr(layer, "eig") or draw.chance(0.5):
        return check_weight(to_svd(to_dense(layer)), layer.weight)
    return compress(layer, rank=draw.between(1, layer.rank), trainable=True)


def check_weight(layer: Any, expected: Tensor) -> Any:
    """Checks that the layer has this weight, to the rounding of an SVD and of the stored factors."""
    W = layer.weight
    n, m = layer._matrix_shape if hasattr(layer, "_matrix_shape") else W.shape
    check("weight", W, expected.double(), norm(expected), tolerance(W.dtype, 4 * (n + m) + 10, 4))
    return layer


CHANGES: dict[Callable[..., Any], int] = {
    in_place: 5, data: 5, new_parameter: 3, swapped: 2, step: 5, load: 4, load_dense: 2, set_weight: 2, reset: 1,
    to_vector: 2, copied: 4, to_dtype: 3, freeze: 2, mode: 3, memory: 1, converted: 2,
}  # fmt: skip


def change(draw: Draw, layer: Any, run: Run) -> Any:
    """Draws one change, notes its name, and makes it."""
    action = draw.weighted(CHANGES)
    draw.note(action.__name__)
    draw.actions[action.__name__] += 1
    return action(draw, layer, run)
