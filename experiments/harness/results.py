"""The results file of an experiment: one line of JSON for each finished run, so that an interrupted command resumes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from fasth import _files

Run = dict[str, Any]
"""The settings of one training."""
Record = dict[str, Any]
"""A run and its results."""

FILE = "results.jsonl"


class OtherExperiment(ValueError):
    """The results file was written under other conditions, or is no results file."""


def read(path: Path) -> tuple[Record, list[Record]]:
    """The header of a results file, {} if it has none, and the records; a last line that was cut off is dropped."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    try:
        records = [dict(json.loads(line)) for line in lines if line.endswith("\n")]
    except (ValueError, TypeError) as error:
        message = f"{path} should hold the results of an experiment; it cannot be read: {error!r}"
        raise OtherExperiment(message) from None
    has_header = bool(records) and "versions" in records[0]
    return (records[0], records[1:]) if has_header else ({}, records)


def key(run: Run, found: Collection[str]) -> str:
    """The settings of a run or of its record; ``found`` names the results, and "experiment" is only a label."""
    return json.dumps({name: run[name] for name in sorted(run) if name not in found and name != "experiment"})


class Results:
    """The records of one results file.

    Args:
        found: the names of the results in a record; everything else in it is a setting.
        header: the conditions, such as versions and machine; the first line of a new file.
        compared: the conditions that have to be the same to add to an existing file.
    """

    def __init__(self, path: Path, found: Collection[str], header: Record, compared: Collection[str] = ()) -> None:
        self.path, self.found = path, found
        self.header, self.records = read(path)
        for name in compared if self.header else ():
            then, now = self.header.get(name), header[name]
            if then != now:
                raise OtherExperiment(f"{path} was made otherwise: {name} was {then}, now {now}")
        if not self.header and not self.records:
            self.header = header
        self._by_key = {key(record, found): record for record in self.records}
        self._is_whole = False

    def add(self, record: Record) -> None:
        if not self._is_whole:  # before the first addition: writes the header, and drops a line that was cut off
            head = [self.header] if self.header else []
            _files.write(self.path, "".join(map(_line, (*head, *self.records))))
            self._is_whole = True
        self.records.append(record)
        self._by_key[key(record, self.found)] = record
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(record))

    def finished(self, runs: Iterable[Run]) -> list[Record]:
        """The records of those runs that are finished."""
        return [record for run in runs if (record := self._by_key.get(key(run, self.found)))]

    def missing(self, runs: Iterable[Run]) -> list[Run]:
        """The runs that are not finished, each once."""
        by_key = {key(run, self.found): run for run in reversed(list(runs))}
        return [run for name, run in reversed(by_key.items()) if name not in self._by_key]

    def settings(self, record: Record) -> Run:
        return {name: value for name, value in record.items() if name not in self.found}


def _line(record: Record) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def best_of_first_seed(records: Iterable[Record], value: Callable[[Record], float | None]) -> Record | None:
    """The record of seed 0 with the least value; None, of a run that diverged, counts as infinite."""
    candidates = [record for record in records if record["seed"] == 0]
    return min(candidates, key=lambda record: math.inf if (v := value(record)) is None else v, default=None)


def other_seeds(run: Run, seeds: int) -> list[Run]:
    """The run with the seeds 1 to ``seeds``."""
    return [{**run, "seed": seed} for seed in range(1, seeds + 1)]


def finite(value: float, digits: int | None = None) -> float | None:
    """The number, or None for inf and NaN, of a run that diverged: JSON has no numbers for them."""
    return (value if digits is None else round(value, digits)) if math.isfinite(value) else None


def means(values: Sequence[float], points: int, digits: int) -> list[float | None]:
    """A learning curve: the means over ``points`` equal parts of the training."""
    parts = torch.tensor(values, dtype=torch.float64).tensor_split(min(points, len(values)))
    return [finite(part.mean().item(), digits) for part in parts]
