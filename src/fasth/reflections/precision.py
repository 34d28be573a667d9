"""Decides which products may be TF32. Products that determine Q stay IEEE float32, whatever the user allows.

A user allows TF32 by ``torch.set_float32_matmul_precision("high")`` or ``torch.backends.cuda.matmul``. Then the
gradient of the reflectors and the product with a formed matrix use it, which do not determine Q: docs/precision.md.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.compiler import is_compiling

_lock = threading.Lock()
_inside = 0  # how many threads are computing
_suspended = ""  # the user's setting while they do, if it has to be restored


def tf32_allowed(t: Tensor) -> bool:
    """True if the user allows TF32 in products of float32 matrices, and the tensor's GPU has it."""
    allowed = t.is_cuda and (bool(_suspended) or torch.backends.cuda.matmul.fp32_precision == "tf32")
    return allowed and torch.version.hip is None and torch.cuda.get_device_capability(t.device) >= (8, 0)


@contextmanager
def ieee_products(t: Tensor) -> Iterator[None]:
    """Context in which torch's products on the tensor's GPU are IEEE float32. A compiled graph keeps the setting.

    The setting belongs to the process, and backward passes run on threads: the first one sets it, the last restores.
    """
    if not t.is_cuda or is_compiling():
        yield
        return
    global _inside, _suspended
    matmul = torch.backends.cuda.matmul
    with _lock:
        if not _inside and matmul.fp32_precision == "tf32":
            matmul.fp32_precision = "none"
            _suspended = "none" if matmul.fp32_precision == "tf32" else "tf32"  # "none": inherited from torch.backends
            matmul.fp32_precision = "ieee"
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _suspended:
                matmul.fp32_precision = _suspended
                _suspended = ""
