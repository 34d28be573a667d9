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


def launched(kernel: Any, programs: int, options: dict[str, int], **arguments: Any) -> None:
    for observer in observers:
        observer(kernel, options, arguments)
    first = next(t for t in arguments.values() if isinstance(t, Tensor))
    if torch.version.hip:  # it has no such option
        options = {name: value for name, value in options.items() if name != "maxnreg"}
    if programs and not first.is_meta:
        with torch.cuda.device(first.device) if first.is_cuda else contextlib.nullcontext():
            kernel[(programs,)](**arguments, **options, enable_fp_fusion=FUSE)
