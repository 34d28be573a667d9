"""Launches kernels, and calls observers of launches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fasth.reflections.triton.configurations import FUSE

# Observers are called before every launch, with the kernel, its options and its arguments, to count launches or to
# compile the kernels. On the meta device only the observers are called; nothing is launched.
observers: list[Callable[[Any, dict[str, int], dict[str, Any]], None]] = []


def on_hip(options: dict[str, int]) -> dict[str, int]:
    """Options for AMD: 8 warps of 64 threads are as many threads as 16 of NVIDIA's, and registers have no limit."""
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
