"""The device of a command: whether it works, and its description for results."""

from __future__ import annotations

import importlib.metadata
from datetime import datetime, timezone
from typing import Any

import torch

from fasth.tools.environment import describe


def require(device: str) -> None:
    """Raises a ``ValueError`` with a message of one line if the device is missing or does not compute."""
    try:
        torch.zeros(1, device=device).add_(1).item()
    except Exception as error:  # the type of the error depends on the device
        raise ValueError(first_line(error)) from None


def environment(device: str = "cpu") -> dict[str, Any]:
    """Describes the machine, the core and the versions, and for a GPU its name and size, to store with results."""
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
    """Returns the version of an installed package without importing it, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its type if the message is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
