"""Which backend computes on given tensors: the compiled core, the Triton kernels, or PyTorch's own operations.

Asking does not import Triton. It is imported with ``reflections.triton.launch``, at the first launch.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.jit import is_tracing  # type: ignore[attr-defined]  # missing in torch's types

from fasth import private
from fasth.reflections.core import backend_setting, core, core_for, interpreting

CORE, TRITON, TORCH = "core", "triton", "torch"

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TRITON_INSTALLED = find_spec("triton") is not None
_counting = False


def kernels_setting() -> str:
    """Where the Triton kernels serve: "cuda", "cpu" if they are interpreted there, "off", or "not installed"."""
    setting = backend_setting()
    if setting not in ("auto", "triton"):
        return "off"
    if not _TRITON_INSTALLED:
        return "not installed"
    return "cpu" if setting == "triton" and interpreting() else "cuda"


def kernels_forced() -> bool:
    """Whether they are used wherever they can be, and not only where the cost model has them."""
    return _forced or _counting


def backend_for(*tensors: Tensor | None) -> str:
    """The backend that takes all of these tensors.

    The kernels take unwrapped float32, bfloat16 and float16 tensors of a CUDA or HIP device. Under ``torch.compile``
    they are called by operators, but not in an exported program, which should run without fasth.
    """
    if core_for(*tensors) is not None:
        return CORE
    return TRITON if _kernels_take([t for t in tensors if t is not None]) else TORCH


def _kernels_take(tensors: list[Tensor]) -> bool:
    if not all(type(t) in (Tensor, torch.nn.Parameter) for t in tensors):
        return False
    dtype, device = tensors[0].dtype, tensors[0].device
    if not (device.type == _kernels_on or (_counting and device.type == "meta")) or dtype not in _KERNEL_DTYPES:
        return False
    if any(t.dtype != dtype or t.device != device for t in tensors):
        return False
    if torch.compiler.is_compiling():
        return not private.is_exporting()
    if _counting:
        return True
    if private.dispatch_mode_active() or is_tracing() or any(t.is_neg() for t in tensors):  # numbers stored negated
        return False
    return _forced or _can_launch(device)


@functools.cache
def _can_launch(device: torch.device) -> bool:
    """Whether a first launch succeeds. Triton needs a C compiler for it, which not every machine with a GPU has."""
    try:
        from fasth.reflections.triton import launch

        launch.factored(torch.ones(1, 1, device=device), 0)
    except Exception as error:
        warnings.warn(
            f"the Triton kernels cannot be launched, and PyTorch's products are used ({error!r}); "
            "with FASTH_BACKEND=torch they are not tried",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def has_memory(t: Tensor) -> bool:
    """Whether the numbers of a tensor are in memory of its own, and not negated. In a transform they are not."""
    if type(t) is not Tensor or t.is_neg():
        return False
    try:
        t.data_ptr()
    except RuntimeError:
        return False
    return True


@contextmanager
def counting_kernels() -> Iterator[None]:
    """Within it the kernels take tensors of the meta device, where nothing runs: to see what would be launched."""
    global _counting
    before, _counting = _counting, True
    try:
        yield
    finally:
        _counting = before


# Settled here, and not at the first call, which torch.compile may be tracing. What is wrong with the settings is an
# error at that call: ``core`` raises it.
try:
    core()
    _kernels_on = kernels_setting()
    _forced = backend_setting() == "triton"
except (ImportError, ValueError):
    _kernels_on, _forced = "off", False
