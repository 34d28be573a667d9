"""Loads the compiled CPU core for the best instruction set that this machine and this build have."""

from __future__ import annotations

import functools
import os
import platform
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

LEVELS = ("baseline", "avx2", "avx512")
BACKENDS = ("auto", "core", "torch", "triton")

_OPERATIONS = ("householder", "svd_linear", "recurrence")
_FUNCTIONS = ("connect", "accepts", *_OPERATIONS, *(f"{name}_backward" for name in _OPERATIONS))


def machine_level() -> str:
    """The highest instruction set that both this machine and torch support."""
    return {"AVX2": "avx2", "AVX512": "avx512"}.get(torch.backends.cpu.get_cpu_capability(), "baseline")


def available_levels() -> list[str]:
    """The levels that are both built and usable here, lowest first."""
    return [level for level in LEVELS[: LEVELS.index(machine_level()) + 1] if _spec(level)]


def backend_setting() -> str:
    """``FASTH_BACKEND``: "auto", "core", "torch" or "triton"."""
    backend = os.environ.get("FASTH_BACKEND", "auto").strip().lower() or "auto"
    if backend not in BACKENDS:
        raise ValueError(f"FASTH_BACKEND should be one of {', '.join(BACKENDS)}; got {backend!r}")
    return backend


def interpreting() -> bool:
    """Whether Triton interprets the kernels on CPU tensors, which shows that they are correct, slowly."""
    return os.environ.get("TRITON_INTERPRET", "").strip().lower() in ("1", "true", "on", "yes", "y")


def core() -> Any:
    """The core for this machine, or None: not built, or switched off."""
    if isinstance(_core, Exception):
        raise _core
    return _core


def _load_best() -> ModuleType | None:
    """The core for the highest instruction set that this machine has; ``FASTH_ISA`` picks a lower one."""
    backend = backend_setting()
    if backend == "triton":
        _check_triton()
    if backend in ("torch", "triton"):
        return None
    levels = available_levels()
    if backend == "core" and not levels:
        raise ImportError("FASTH_BACKEND=core, but no compiled core was built: install fasth with a C++ compiler")
    wanted = os.environ.get("FASTH_ISA", "").strip().lower()
    if wanted and levels:
        if wanted not in levels:
            raise ValueError(
                f"FASTH_ISA should be one of {levels}, which this machine and this build have; got {wanted!r}"
            )
        levels = [wanted]
    return load(levels[-1]) if levels else None


def _check_triton() -> None:
    """Raises an error if no device can run the kernels."""
    if find_spec("triton") is None:
        raise ImportError(
            "FASTH_BACKEND=triton needs Triton, which PyTorch's CUDA builds bring along: pip install triton"
        )
    if not (torch.cuda.is_available() or interpreting()):
        raise ValueError(
            "FASTH_BACKEND=triton needs a GPU, and torch sees none; TRITON_INTERPRET=1 interprets the kernels"
        )


def load(level: str) -> ModuleType:
    """The core for one instruction set. It is loaded after torch, and so shares torch's thread pool."""
    spec = _spec(level)
    if spec is None or spec.loader is None:
        raise ImportError(f"the core for {level} is not built")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    if missing := [name for name in _FUNCTIONS if not hasattr(module, name)]:
        raise ImportError(f"the core for {level} is older than these files, without {missing[0]}: install fasth again")
    contiguous = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)
    table = Tensor.__dlpack_c_exchange_api__  # DLPack's C functions to read tensors
    module.connect(Tensor, torch.nn.Parameter, torch.empty_like, contiguous, table)
    return module


def _spec(level: str) -> Any:
    import fasth

    directory = os.environ.get("FASTH_CORE_DIR")
    return PathFinder.find_spec(f"fasth._core_{level}", [directory] if directory else list(fasth.__path__))


# Loaded here, and not at the first call, which torch.compile may be tracing. What goes wrong is an error at that call.
_core: ModuleType | Exception | None
try:
    _core = _load_best()
except (ImportError, ValueError) as error:
    _core = error


def in_use() -> str:
    """The instruction set of the core in use, "off", or "not built"."""
    module = core()
    return str(module.isa) if module else "off" if any(_spec(level) for level in LEVELS) else "not built"


def processor_name() -> str:
    """The name of this machine's processor."""
    return processor().get("model name") or platform.processor() or platform.machine()


def processor() -> dict[str, str]:
    """The fields of the first processor in Linux's /proc/cpuinfo."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(errors="replace").split("\n\n")[0] if path.exists() else ""
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
