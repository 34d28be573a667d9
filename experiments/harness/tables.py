"""Tables on the console and in Markdown, and the numbers in them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Shown

from fasth import _files
from fasth.tools.environment import describe
from fasth.tools.reproduce.tables import Table, markdown, number
from fasth.tools.timing import compare

__all__ = ["Score", "Table", "machine", "markdown", "number", "score", "show", "step_times", "write"]


class Score(NamedTuple):
    """The mean and the standard deviation over runs that differ in their seed; NaN if one of them diverged."""

    mean: float
    spread: float  # 0 for a single run
    runs: int = 1

    @property
    def diverged(self) -> bool:
        return math.isnan(self.mean)

    def text(self, digits: int, spread: str = "") -> str:
        """Such as "12.3 ± 0.4", without the spread for a single run; ``spread`` is a format for it, such as ".2g"."""
        if self.diverged:
            return "diverged"
        return f"{self.mean:.{digits}f}" + (f" ± {self.spread:{spread or f'.{digits}f'}}" if self.runs > 1 else "")


def score(values: Iterable[float | None]) -> Score | None:
    """None if there are no values; a value of None comes from a run that diverged."""
    values = list(values)
    numbers = [value for value in values if value is not None]
    if not values or len(numbers) < len(values):
        return Score(math.nan, math.nan, len(values)) if values else None
    return Score(statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else 0.0, len(numbers))


def step_times(calls: Mapping[str, Callable[[], object]], rounds: int, time_limit: float = 60.0) -> dict[str, float]:
    """Seconds of each call: the median of ``rounds`` single calls, taken in turns."""
    timings = compare(calls, device=torch.device("cpu"), rounds=rounds, min_time=0, time_limit=time_limit)
    return {timing.name: timing.median for timing in timings}


def machine() -> str:
    """The processor, the threads and the version of PyTorch, for the note below a table."""
    found = describe()
    return f"{found['cpu']}, {found['threads']} threads, torch {torch.__version__}"


def show(table: Table, console: Console) -> None:
    shown = Shown(title=f"\n{table.title}", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, column in enumerate(table.columns):
        shown.add_column(column, justify="right" if i else "left")
    for row in table.rows:
        shown.add_row(*(cell.replace("**", "") for cell in row))
    console.print(shown)


def write(path: Path, tables: Sequence[Table], note: str, console: Console) -> None:
    """Shows the tables and the note, and writes them as Markdown."""
    for table in tables:
        show(table, console)
    _files.write(path, "\n\n".join([*map(markdown, tables), *filter(None, [note])]) + "\n")
    if note:
        console.print(note, soft_wrap=True)
