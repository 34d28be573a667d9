"""PEFT's orthogonal adapters computed by fasth: ``enable()``, also a context. Only ``enable`` imports PEFT.

HRA. PEFT forms Q = H₁⋯H_r, d×d, in r steps, and W Q, in every call. Here the reflections are applied to the
activations, and the base layer is called: the same values and gradients, also for a quantized base.

OFT. PEFT's default takes five terms of the Neumann series of the Cayley map,

    R = I + 2S + 2S² + 2S³ + S⁴ instead of (I + S)(I − S)⁻¹, S skew,

whose singular values are |1 − θ⁴| for an eigenvalue ±iθ of S, which turns by 2·atan θ. ``enable(oft="exact")`` computes
the map itself. A checkpoint that was trained with the series then computes something else, the more so the larger its
angles are: train and load with the same setting. PEFT's own ``use_cayley_neumann=False`` is the inverse rotation,
(I − S)(I + S)⁻¹.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasth.functional import autocast_enabled, reflect
from fasth.operators import Orthogonal

__all__ = ["Enabled", "disable", "enable"]

VERSIONS = ("0.21.2",)  # versions of PEFT whose own forward the tests compare with

Methods = dict[tuple[type, str], Callable[..., Any]]


class Enabled(AbstractContextManager["Enabled"]):
    """The result of ``enable``. Leaving its context, or ``disable()``, restores PEFT's methods."""

    def __init__(self, oft: str | None) -> None:
        self.oft = oft

    def disable(self) -> None:
        """Undoes this call of ``enable``. Undoing the last call restores PEFT's methods."""
        if self in _enabled:
            _enabled.remove(self)
            _refresh()

    def __exit__(self, *error: object) -> None:
        self.disable()


_enabled: list[Enabled] = []
_originals: Methods = {}


def enable(*, oft: str | None = None) -> Enabled:
    """Makes fasth compute PEFT's HRA layers from now on, existing and new ones. Nothing else changes.

    Configurations, checkpoints, initialization, multiple adapters, ``merge``, ``disable_adapter`` and ``apply_GS``
    are PEFT's. Adapters are multiplied in their own dtype, and the base in its own: with a half-precision base the
    activations are rounded between, where PEFT widens W. Hooks of the base layer run. A ``Conv2d`` has all options of
    its base, as after PEFT's ``merge``, where PEFT's own forward reads the first stride and padding alone.

    Args:
        oft: if "exact", OFT layers too, with the Cayley map in place of five terms of its series.

    Raises:
        ImportError: without PEFT.
        RuntimeError: if this version of PEFT was not tested, or other code replaced its methods.
    """
    if oft not in (None, "exact"):
        raise ValueError(f'`oft` should be "exact" or None; got {oft!r}')
    _check_version()
    enabled = Enabled(oft)
    _enabled.append(enabled)
    try:
        _refresh()
    except BaseException:
        _enabled.remove(enabled)
        raise
    return enabled


def disable() -> None:
    """Undoes every call of ``enable``."""
    _enabled.clear()
    _refresh()


def _check_version() -> None:
    try:
        import peft
    except ModuleNotFoundError as error:
        if error.name != "peft":  # a dependency of PEFT is missing
            raise
        raise ImportError("fasth.peft needs PEFT; get it with pip install peft") from error
    if peft.__version__ not in VERSIONS:
        raise RuntimeError(f"fasth.peft was tested with PEFT {', '.join(VERSIONS)}; got {peft.__version__}")


def _refresh() -> None:
    """Replaces and restores methods of PEFT's classes, according to ``_enabled``."""
    wanted: Methods = {}
    if _enabled:
        hra = importlib.import_module("peft.tuners.hra.layer")
        for kind, forward in ((hra.HRALinear, _linear_forward), (hra.HRAConv2d, _conv_forward)):
            wanted |= {(kind, "forward"): forward, (kind, "get_delta_weight"): _delta_weight}
    if any(enabled.oft for enabled in _enabled):
        oft = importlib.import_module("peft.tuners.oft.layer")
        wanted[oft.OFTRotationModule, "_cayley_batch"] = _cayley
    for kind, name in wanted.keys() - _originals.keys():
        original = vars(kind).get(name)
        if getattr(original, "__module__", None) != kind.__module__:
            raise RuntimeError(f"{kind.__qualname__}.{name} should be PEFT's own; got {original!r}")
    for key in wanted.keys() - _originals.keys():
        _originals[key] = vars(key[0])[key[1]]
        setattr(*key, wanted[key])
    for key in _originals.keys() - wanted.keys():
        setattr(*key, _originals.pop(key))


# HRA.


def _linear_forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """x (W Q₁⋯Q_k)ᵀ + bias with the active adapters Q₁, …, Q_k: the last one turns x first."""
    turned = _active(self)
    if not turned:
        return _call_original(self, x, *args, **kwargs)
    y = x
    for name in reversed(turned):
        y = _turned(self, name, y)
    return self.base_layer(_as_base(self, y), *args, **kwargs).to(x.dtype)


def _conv_forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The convolution by W Q₁⋯Q_k with the kernel as a matrix, W: (out, in·kh·kw).

    For 1×1 kernels the channels of x are turned; else the kernel is.
    """
    turned = _active(self)
    if not turned:
        return _call_original(self, x, *args, **kwargs)
    base = self.get_base_layer()
    if set(base.kernel_size) == {1}:
        y = x.movedim(-3, -1)
        for name in reversed(turned):
            y = _turned(self, name, y)
        return self.base_layer(_as_base(self, y.movedim(-1, -3)), *args, **kwargs).to(x.dtype)
    W = base.weight.detach().flatten(1)
    for name in turned:
        if self.hra_u[name].shape[0] != W.shape[1]:
            raise ValueError(f"HRA needs a square kernel; got {tuple(base.kernel_size)}")
        W = _turned(self, name, W.to(torch.promote_types(W.dtype, self.hra_u[name].dtype)), transpose=True)
    bias = None if base.bias is None else base.bias.to(W.dtype)
    y, padding = x.to(W.dtype), base.padding
    if base.padding_mode != "zeros":
        y, padding = F.pad(y, _padding_on_all_sides(base), mode=base.padding_mode), 0
    return F.conv2d(y, W.view_as(base.weight), bias, base.stride, padding, base.dilation).to(x.dtype)


def _padding_on_all_sides(base: nn.Conv2d) -> list[int]:
    """Padding in the order of ``F.pad``: width first, before and after. An odd pixel of "same" padding comes after."""
    sides = []
    for i in (1, 0):
        if isinstance(base.padding, str):
            both = base.dilation[i] * (base.kernel_size[i] - 1) if base.padding == "same" else 0
        else:
            both = 2 * base.padding[i]
        sides += [both // 2, both - both // 2]
    return sides


def _delta_weight(self: Any, adapter_name: str, reverse: bool = False) -> Tensor:
    """Q = H₁⋯H_r: (d, d), or Qᵀ if ``reverse``."""
    U = self.hra_u[adapter_name]
    if self.hra_apply_GS[adapter_name]:
        eye = torch.eye(len(U), dtype=U.dtype, device=U.device)
        return _mirrored(eye, U)
    Q = Orthogonal(U.mT).dense()
    return Q.mT if reverse else Q


def _active(self: Any) -> list[str]:
    """Names of the adapters that apply now."""
    if self.disable_adapters or self.merged:
        return []
    return [name for name in self.active_adapters if name in self.hra_u]


def _turned(self: Any, name: str, x: Tensor, transpose: bool = False) -> Tensor:
    """x Qᵀ, or x Q if ``transpose``, for every row, in the wider dtype of x and the adapter."""
    U = self.hra_u[name]
    dtype = torch.promote_types(U.dtype, x.dtype)
    x, U = x.to(dtype), U.to(dtype)
    if self.hra_apply_GS[name]:
        return _mirrored(x, U)
    return reflect(x, U.mT, "full", transpose=transpose, internal=True)


def _mirrored(x: Tensor, U: Tensor) -> Tensor:
    """x (I − 2 P) with P the projection onto the span of the columns of U, as in PEFT's ``apply_GS``."""
    dtype = torch.promote_types(U.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        basis = torch.linalg.qr(U.to(dtype)).Q
        y = x.to(dtype)
        return (y - 2 * (y @ basis) @ basis.mT).to(x.dtype)


def _as_base(self: Any, x: Tensor) -> Tensor:
    """Casts x to the dtype of the base layer's weight, unless the weight is quantized or autocast is enabled."""
    weight = self.get_base_layer().weight
    if autocast_enabled(x) or not isinstance(weight, Tensor) or not weight.is_floating_point():
        return x
    return x.to(weight.dtype)


def _call_original(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    for kind in type(self).__mro__:
        if (kind, "forward") in _originals:
            return _originals[kind, "forward"](self, x, *args, **kwargs)
    raise AssertionError(f"{type(self).__name__} is none of PEFT's layers")


# OFT.


def _cayley(
    self: Any, Q: Tensor, block_size: int, use_cayley_neumann: bool = True, num_neumann_terms: int = 5
) -> Tensor:
    """(I + S)(I − S)⁻¹ for every skew S, the limit of PEFT's series; PEFT's own result without the series."""
    original = _originals[next(key for key in _originals if key[1] == "_cayley_batch")]
    if not use_cayley_neumann:
        return original(self, Q, block_size, use_cayley_neumann, num_neumann_terms)
    dtype = torch.promote_types(Q.dtype, torch.float32)
    with torch.autocast(Q.device.type, enabled=False):
        S = self._pytorch_skew_symmetric(Q.to(dtype), block_size)
        eye = torch.eye(block_size, dtype=dtype, device=Q.device)
        return torch.linalg.solve(eye - S, eye + S).to(Q.dtype)
