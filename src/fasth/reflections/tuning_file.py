"""What ``fasth.tune`` found on this machine: a file in the user's cache folder, and a table to look things up in.

The file is JSON, {"version": 1, "entries": [...]}, each entry the fields of ``Entry``. It is read when first needed,
replaced whole, and written under a lock, so that processes that tune at the same time all leave their entries.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from fasth import files

_VERSION = 1
_LARGEST = 1 << 40  # of any number in the file: what is larger was not measured


@dataclass(frozen=True)
class Entry:
    """The best choices for d reflections of d dimensions."""

    machine: str  # the processor or GPU
    core: str  # the compiled core's instruction set, "off" or "not built"
    device: str  # its type: "cpu", "cuda", …
    threads: int
    dtype: str
    d: int
    rows: int  # with which the block size was found
    block_size: int
    crossover: int  # from so many rows on, forming Q pays, for triangular reflectors
    crossover_full: int
    kernel_rows: int = 0  # up to so many rows the Triton kernels are faster than PyTorch's products
    warps: int = 0  # of the kernels; 0: as many as by default

    @property
    def identity(self) -> tuple[str | int, ...]:
        return self.machine, self.core, *self.key

    @property
    def key(self) -> tuple[str, int, str, int]:
        return self.device, self.threads if self.device == "cpu" else 0, self.dtype, self.d


def folder() -> Path:
    """``FASTH_CACHE_DIR``, or the folder "fasth" where this system keeps a user's caches."""
    chosen = os.environ.get("FASTH_CACHE_DIR")
    if chosen:
        return Path(chosen)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "fasth"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "fasth"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fasth"


def path() -> Path:
    return folder() / "tuning.json"


def machine(device: str) -> tuple[str, str]:
    """The name of what computes on such a device, and the core in use."""
    from fasth.environment import describe

    found = describe()
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(), ""
    return str(found["cpu"]), str(found["core"])


def load() -> list[Entry]:
    """All entries of the file, also those of other machines. A damaged file is as good as none, and says so."""
    file = path()
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["version"] != _VERSION:
            raise ValueError(f"version {content['version']}, not {_VERSION}")
        return [_entry(record) for record in content["entries"]]
    except OSError:  # there is none, or it may not be read
        return []
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        warnings.warn(
            f"{file} is damaged and was ignored ({error}); `fasth tune` writes a new one", RuntimeWarning, stacklevel=2
        )
        return []


def store(entry: Entry) -> None:
    """Adds the entry to the file, or replaces the one before it, and to this process's table."""
    with _locked(path()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a damaged file is being replaced
            others = [other for other in load() if other.identity != entry.identity]
        entries = [asdict(one) for one in (*others, entry)]
        files.write(path(), json.dumps({"version": _VERSION, "entries": entries}, indent=1) + "\n")
    global _changes
    table()[entry.key] = entry
    _changes += 1


_table: dict[tuple[str, int, str, int], Entry] | None = None
_changes = 0  # of the table


def table() -> dict[tuple[str, int, str, int], Entry]:
    """The entries of this machine by (device, threads, dtype, d); empty where nothing was tuned."""
    global _table
    if _table is None:
        _table = {}
        of: dict[str, tuple[str, str]] = {}
        for entry in load():
            if entry.device not in of:
                of[entry.device] = _machine_or_none(entry.device)
            if of[entry.device] == (entry.machine, entry.core):
                _table[entry.key] = entry
    return _table


def invalidate() -> None:
    """The file is read again when next needed."""
    global _table, _changes
    _table = None
    _changes += 1


def tuning_state() -> tuple[int, int]:
    """What a choice by the table depends on besides its sizes, for those who remember it."""
    return torch.get_num_threads(), _changes


def _machine_or_none(device: str) -> tuple[str, str]:
    try:
        return machine(device)
    except (RuntimeError, AssertionError):  # no such device here
        return "", ""


def _entry(record: dict[str, Any]) -> Entry:
    values: dict[str, Any] = {}
    for field in fields(Entry):
        optional = field.default is not MISSING  # new, so not in every file, and 0 where nothing was found
        value = record.get(field.name, field.default) if optional else record[field.name]
        if field.type == "int" and (type(value) is not int or not (0 if optional else 1) <= value <= _LARGEST):
            raise ValueError(f"`{field.name}` is {value!r}")
        if field.type == "str" and type(value) is not str:
            raise ValueError(f"`{field.name}` is {value!r}")
        values[field.name] = value
    entry = Entry(**values)
    if entry.block_size > entry.d:
        raise ValueError(f"`block_size` is {entry.block_size} for d = {entry.d}")
    return entry


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """One process at a time, where the system has locks for files."""
    try:
        import fcntl
    except ImportError:  # Windows: the file is still replaced whole
        yield
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield  # closing it unlocks
