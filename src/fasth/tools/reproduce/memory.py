"""The peak memory of a step, on top of its input, its parameters and the gradient of its output.

On a CPU the operating system measures it, which sees the allocations of every library: each step runs in a process of
its own, forked before anything was computed, with an allocator that returns freed memory. Linux only. On a GPU torch
measures it, which sees its own allocator.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from fasth.tools.device import first_line
from fasth.tools.reproduce.methods import METHODS, Case

# Blocks above these sizes in bytes are mapped one by one, and returned to the system when freed.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MKL_DISABLE_FAST_MM": "1"}
_STATUS = Path("/proc/self/status")


class Peak(NamedTuple):
    """The peak memory of one method."""

    status: str  # "ok", "failed", or "not measured" on systems where it cannot be
    note: str = ""
    bytes: int | None = None


def available(device: str) -> bool:
    return device.startswith("cuda") if device != "cpu" else _STATUS.exists()


def peaks(names: Sequence[str], d: int, rows: int, dtype: str, device: str, threads: int) -> dict[str, Peak]:
    """Measures the peak of each of these ``METHODS``. If one fails, the others are still measured."""
    if not available(device):
        return dict.fromkeys(names, Peak("not measured"))
    if device != "cpu":
        return {name: _attempt(lambda: _on_cuda(name, d, rows, dtype, device)) for name in names}  # noqa: B023
    request = [json.dumps(names), str(d), str(rows), dtype, str(threads)]
    done = subprocess.run(
        [sys.executable, "-m", __name__, *request],
        env={**os.environ, **ALLOCATOR},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {name: Peak(*found) for name, found in json.loads(done.stdout).items()}


def _attempt(measure: Callable[[], int]) -> Peak:
    try:
        return Peak("ok", bytes=measure())
    except Exception as error:
        return Peak("failed", first_line(error))


def _build(name: str, d: int, rows: int, dtype: str, device: str) -> Case:
    return METHODS[name].build(d, rows, getattr(torch, dtype), device, torch.Generator().manual_seed(d))


def _on_cuda(name: str, d: int, rows: int, dtype: str, device: str) -> int:
    """Measures the peak above the memory allocated after a small step, which allocates cuBLAS's workspace."""
    _build(name, 8, rows, dtype, device).step()
    case = _build(name, d, rows, dtype, device)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    case.step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _on_cpu(name: str, d: int, rows: int, dtype: str) -> int:
    """Measures the peak above the memory of the process after a small step, which loads and sets up libraries."""
    _build(name, 8, rows, dtype, "cpu").step()
    return peak(_build(name, d, rows, dtype, "cpu").step)


def peak(step: Callable[[], object]) -> int:
    """Measures by how many bytes this process grows at most during the step."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the recorded peak
    before = _status("VmRSS")
    step()
    return max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    lines: Iterator[str] = (line for line in _STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return int(next(lines).split()[1]) * 1024


def _forked(function: Callable[[], int]) -> Peak:
    """Runs the function in a forked process and returns its result."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, json.dumps(_attempt(function)).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return Peak(*json.loads(answer)) if answer else Peak("failed", "its process ended")


def _main(names: str, d: str, rows: str, dtype: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    gc.freeze()  # a collection would copy the memory that the children share with this process
    found = {name: _forked(lambda: _on_cpu(name, int(d), int(rows), dtype)) for name in json.loads(names)}  # noqa: B023
    print(json.dumps(found))


if __name__ == "__main__":
    _main(*sys.argv[1:])
