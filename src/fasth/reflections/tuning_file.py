"""The file with the results of ``fasth.tune``, in the user's cache folder: JSON, {"version": 1, "entries": [...]}.

It is replaced whole, and under a lock, so that processes that tune at the same time all leave their entries.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from fasth import _files
from fasth.reflections import core

_VERSION = 1
_TEXTS = ("machine", "core", "device", "dtype")
_LARGEST = 1 << 40  # the largest valid number in the file


@dataclass(frozen=True)
class Entry:
    """The best choices for d reflections of d dimensions."""

    machine: str
    core: str  # the compiled core's instruction set, "off" or "not built"
    device: str  # its type: "cpu", "cuda", …
    threads: int
    dtype: str
    d: int
    rows: int  # with which the block size was found
    block_size: int
    crossover: int  # the number of rows from which forming Q is faster, for triangular reflectors
    kernel_rows: int = 0  # up to so many rows the Triton kernels are faster than PyTorch's products; 0: never, or wrong

    @property
    def key(self) -> tuple[str, int, str, int]:
        return self.device, self.threads if self.device == "cpu" else 0, self.dtype, self.d

    def check(self) -> Entry:
        for name, value in asdict(self).items():
            least = 0 if name == "kernel_rows" else 1
            if not (type(value) is str if name in _TEXTS else type(value) is int and least <= value <= _LARGEST):
                raise ValueError(f"`{name}` is {value!r}")
        if self.block_size > self.d:
            raise ValueError(f"`block_size` is {self.block_size} for d = {self.d}")
        return self


def path() -> Path:
    """The path of the file: in ``FASTH_CACHE_DIR``, or in the folder "fasth" of the user's cache folder."""
    places = {"win32": ("LOCALAPPDATA", "AppData/Local"), "darwin": ("", "Library/Caches")}
    variable, folder = places.get(sys.platform, ("XDG_CACHE_HOME", ".cache"))
    caches = Path(os.environ.get(variable) or Path.home() / folder)
    return Path(os.environ.get("FASTH_CACHE_DIR") or caches / "fasth") / "tuning.json"


def machine(device: str) -> tuple[str, str]:
    """The name of the processor or GPU, and the core in use; empty if there is no such device."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name() if torch.cuda.is_available() else "", ""
    return core.processor_name(), core.in_use()


def load() -> list[Entry]:
    """Reads all entries of the file, of all machines. For a damaged file, warns and returns none."""
    try:
        content = json.loads(path().read_text(encoding="utf-8"))
        if content["version"] != _VERSION:
            raise ValueError(f"version {content['version']}, not {_VERSION}")
        names = [field.name for field in fields(Entry)]
        records = [{name: record[name] for name in names if name in record} for record in content["entries"]]
        return [Entry(**record).check() for record in records]
    except OSError:  # the file does not exist or cannot be read
        return []
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        message = f"{path()} is damaged and was ignored ({error}); `fasth tune` writes a new one"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return []


def store(entry: Entry) -> None:
    """Adds the entry to the file, or replaces the entry with the same key."""
    with _files.locked(path()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a damaged file is replaced
        place = entry.machine, entry.core, entry.key
        entries = [other for other in load() if (other.machine, other.core, other.key) != place]
        content = {"version": _VERSION, "entries": [asdict(one) for one in (*entries, entry)]}
        _files.write(path(), json.dumps(content, indent=1) + "\n")


def entries_here() -> dict[tuple[str, int, str, int], Entry]:
    """The entries of this machine by (device, threads, dtype, d)."""
    entries = load()
    machines = {device: machine(device) for device in {entry.device for entry in entries}}
    return {entry.key: entry for entry in entries if machines[entry.device] == (entry.machine, entry.core)}
