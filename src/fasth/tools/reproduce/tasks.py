"""The tasks of an experiment, and their records.

A record is a dict of values for JSON. All have "experiment", "task", "name", "d", "rows" and "status". Timings also
have "k", "what", "calls", "mean", "deviation", "median", "quantiles" and "readings", in seconds for one call. If the
status is "wrong" or "failed", "note" is the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fasth.tools.device import first_line
from fasth.tools.reproduce import counts, memory
from fasth.tools.reproduce.methods import Case, Method
from fasth.tools.reproduce.timing import Progress, measure
from fasth.tools.timing import Timing

Record = dict[str, Any]

QUANTILES = (0.05, 0.25, 0.75, 0.95)


@dataclass(frozen=True)
class Settings:
    """The settings of a run, the same for all timings."""

    dtype: str
    device: str
    rounds: int
    time_limit: float  # seconds for each method at each size


class Task(Protocol):
    @property
    def label(self) -> str:
        """A name, unique among the tasks of an experiment."""

    @property
    def weight(self) -> float:
        """The rough duration, in any unit."""

    def run(self, settings: Settings, before: Sequence[Record], progress: Progress) -> Iterable[Record]:
        """Returns the records, without "experiment" and "task". ``before`` are the experiment's earlier records."""


@dataclass(frozen=True)
class Entry:
    """A method at one size."""

    method: Method
    d: int
    rows: int
    k: int | None = None  # the block size, in the experiment on block sizes


@dataclass(frozen=True)
class InTurns:
    """Methods timed in turns."""

    label: str
    entries: Sequence[Entry]
    what: Sequence[str] = ("step",)
    rounds: int | None = None  # replaces the rounds of the settings

    @property
    def weight(self) -> float:
        return sum(1 + entry.rows * (entry.d / 512) ** 2 / 32 for entry in self.entries)

    def run(self, settings: Settings, before: Sequence[Record], progress: Progress) -> Iterable[Record]:
        chosen, cases = [], []
        for entry in self.entries:
            status, note = _excuse(entry, before, settings.time_limit)
            if not status:
                try:
                    cases.append(_built(entry, settings))
                    chosen.append(entry)
                except Exception as error:  # a method that cannot be built here must not end the run
                    status, note = "failed", first_line(error)
            if status:
                yield from (_record(entry, Timing(entry.method.name, what, status, note)) for what in self.what)
        rounds = self.rounds or settings.rounds
        timings = measure(cases, what=self.what, rounds=rounds, time_limit=settings.time_limit, progress=progress)
        for i, timing in enumerate(timings):
            yield _record(chosen[i // len(self.what)], timing)


def _built(entry: Entry, settings: Settings) -> Case:
    generator = torch.Generator().manual_seed(entry.d)
    return entry.method.build(entry.d, entry.rows, getattr(torch, settings.dtype), settings.device, generator)


def _excuse(entry: Entry, before: Sequence[Record], time_limit: float) -> tuple[str, str]:
    """Returns the status and the reason if a method is not timed, or two empty strings.

    A method is not started if verifying, a warm-up and a reading would exceed the time limit. Its time is extrapolated
    from the previous size in proportion to d, as no method's time grows less.
    """
    if not entry.method.installed:
        return "not installed", f"{entry.method.requires} is not installed"
    smaller = [r for r in before if (r["name"], r["k"]) == (entry.method.name, entry.k) and r["d"] < entry.d]
    if smaller:
        last = max(smaller, key=lambda record: record["d"])
        if last["status"] == "too slow" or (last["median"] or 0) * entry.d / last["d"] * 3 > time_limit:
            return "too slow", f"one call would take {time_limit / 3:.3g} s or more"
    return "", ""


def _record(entry: Entry, timing: Timing) -> Record:
    timed = bool(timing.readings)
    return {
        "name": timing.name,
        "d": entry.d,
        "rows": entry.rows,
        "k": entry.k,
        "what": timing.what,
        "status": timing.status,
        "note": timing.note,
        "calls": timing.calls,
        "mean": timing.mean if timed else None,
        "deviation": timing.deviation if timed else None,
        "median": timing.median if timed else None,
        "quantiles": {str(q): timing.quantile(q) for q in QUANTILES} if timed else None,
        "readings": [float(f"{seconds:.5g}") for seconds in timing.readings],
    }


@dataclass(frozen=True)
class PeakMemory:
    """Measures the peak memory of each method's step, in "bytes"."""

    d: int
    rows: int
    methods: Sequence[Method]

    @property
    def label(self) -> str:
        return f"d = {self.d}"

    @property
    def weight(self) -> float:
        return sum(1 + (self.d / 512) ** 2 for _ in self.methods)

    def run(self, settings: Settings, before: Sequence[Record], progress: Progress) -> Iterable[Record]:
        names = [method.name for method in self.methods if method.installed]
        progress(0, 1, "memory")
        threads = torch.get_num_threads()
        found = memory.peaks(names, self.d, self.rows, settings.dtype, settings.device, threads)
        for name, peak in found.items():
            yield {"name": name, "d": self.d, "rows": self.rows, **peak._asdict()}


@dataclass(frozen=True)
class Counting:
    """Counts, without measuring, the launches, operations and bytes of each method's step."""

    d: int
    rows: int
    methods: Sequence[
        tuple[Method, Callable[..., counts.Count | None]]
    ]  # returns None if the method has no such path at this size

    @property
    def label(self) -> str:
        return f"d = {self.d}"

    @property
    def weight(self) -> float:
        return self.d / 512 * len(self.methods) / 4

    def run(self, settings: Settings, before: Sequence[Record], progress: Progress) -> Iterable[Record]:
        for i, (method, count) in enumerate(self.methods):
            progress(i, len(self.methods), f"counting {method.name}")
            status, note, found = "ok", "", counts.Count()
            try:
                counted = count(method, self.d, self.rows, getattr(torch, settings.dtype))
                if counted is None:
                    continue
                found = counted
            except Exception as error:
                status, note = "failed", first_line(error)
            yield {
                "name": method.name,
                "d": self.d,
                "rows": self.rows,
                "status": status,
                "note": note,
                "launches": found.launches,
                "depth": found.depth,
                "operations": found.operations,
                "bytes": found.bytes,
                "library": sorted(found.library),
            }
