"""How every kernel is launched, and who is told of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fasth.reflections.triton.configurations import FUSE

# Each is told of every launch: the kernel, its options, its arguments. For counts, and to compile what would be
# launched. On the meta device that is all that happens.
observers: list[Callable[[Any, dict[str, int], dict[str, Any]], None]] = []


def on_hip(options: dict[str, int]) -> dict[str, int]:
    """AMD's warps have 64 threads, so that 8 are as many as 16 of NVIDIA's. There is no limit to registers to give."""
    return {"num_warps": min(options["num_warps"], 8)}


def launched(kernel: Any, programs: int, options: dict[str, int], **arguments: Any) -> None:
    for observer in observers:
        observer(kernel, options, arguments)
    first = next(t for t in arguments.values() if isinstance(t, Tensor))
    if torch.version.hip:
        options = on_hip(options)
    if programs and not first.is_meta:
        with torch.cuda.device(first.device) if first.is_cuda else contextlib.nullcontext():
            kernel[(programs,)](**arguments, **options, enable_fp_fusion=FUSE)
