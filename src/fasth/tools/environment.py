"""The machine, the versions and the core in use: what ``fasth info`` prints and every benchmark writes down."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

import fasth
from fasth.reflections import core as core_module
from fasth.reflections.planner import kernels_setting

_SETTINGS = ("FASTH_BACKEND", "FASTH_ISA", "FASTH_CORE_DIR", "TRITON_INTERPRET")
_INSTRUCTIONS = ("sse4_2", "avx", "avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve")


def describe() -> dict[str, Any]:
    """Describes, as values for JSON, everything that decides how fast this process computes.

    ``core`` is the instruction set of the compiled core in use, "off" or "not built". The levels are the instruction
    sets that the core was built for and that this machine has. ``kernels`` is the device of the Triton kernels: "cuda",
    "cpu" if they are interpreted, "off", or "not installed" if Triton is not installed.
    """
    core = core_module.core()
    built = [level for level in core_module.LEVELS if core_module._spec(level)]
    highest = core_module.LEVELS.index(core_module.machine_level())
    cpu = core_module.processor()
    flags = cpu.get("flags", cpu.get("Features", "")).split()
    return {
        "versions": {"fasth": fasth.__version__, "python": platform.python_version(), "torch": str(torch.__version__)},
        "core": core_module.in_use(),
        "openmp": core.openmp if core else None,
        "levels": {"built": built, "machine": list(core_module.LEVELS[: highest + 1])},
        "kernels": kernels_setting(),
        "settings": {name: os.environ[name] for name in _SETTINGS if name in os.environ},
        "threads": torch.get_num_threads(),
        "cpu": core_module.processor_name(),
        "cores": os.cpu_count(),
        "instructions": [flag for flag in _INSTRUCTIONS if flag in flags],
        "system": platform.platform(),
    }
