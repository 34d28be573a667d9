"""The libraries that the architectures come from."""

from __future__ import annotations

import importlib.util

import torch

LIBRARIES = ("transformers", "timm", "torchvision")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def missing(names: tuple[str, ...] = LIBRARIES) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


def define_operators_of_torchvision() -> None:
    """Declares the operators that ``import torchvision`` registers shapes for.

    The package index has torchvision for CUDA alone, whose compiled operators do not load beside a torch for CPUs. Then
    the import fails, and that of timm with it, although their models are pure Python.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", SCHEMA)
