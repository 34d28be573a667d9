"""The device that a command runs on: whether it is there, and what to write down of it."""

from __future__ import annotations

import importlib.metadata
from datetime import datetime, timezone
from typing import Any

import torch

from fasth.tools.environment import describe


def require(device: str) -> None:
    """Raises a ``ValueError`` of one line unless the device is there, and computes."""
    try:
        torch.zeros(1, device=device).add_(1).item()
    except Exception as error:  # torch has its own for every device it lacks
        raise ValueError(first_line(error)) from None


def environment(device: str = "cpu") -> dict[str, Any]:
    """The machine, the core and the versions, to stand beside results; of a GPU its name and size, too."""
    found = describe()
    found["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    found["device"] = device
    if device.startswith("cuda"):
        found["device"] = torch.cuda.get_device_name(device)
        found["gpu"] = _gpu(device)
        if triton := version("triton"):
            found["versions"] = {**found["versions"], "triton": triton}
    return found


def _gpu(device: str) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory": properties.total_memory,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "float32 products": torch.get_float32_matmul_precision(),
    }


def version(package: str) -> str | None:
    """That of an installed package, which is not imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def first_line(error: BaseException) -> str:
    """What an error says, in one line; the name of its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
