"""What the examples that train many networks have in common: a file of records, and tables on the console."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Shown

from fasth import _files
from fasth.reproduce.tables import Table

Record = dict[str, Any]


class Results:
    """The records of a folder, one line of JSON each. A run, any object with its settings as attributes, has one."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "results.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True) if self.path.exists() else []
        self.records: list[Record] = [json.loads(line) for line in lines if line.endswith("\n")]
        if lines and not lines[-1].endswith("\n"):  # cut off by a power failure or the like
            _files.write(self.path, "".join(lines[:-1]))

    def add(self, record: Record) -> None:
        self.records.append(record)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def of(self, wanted: Iterable[object]) -> list[Record]:
        return [record for run in wanted for record in self.records if vars(run).items() <= record.items()]


def show(table: Table, console: Console) -> None:
    shown = Shown(title=f"\n{table.title}", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, column in enumerate(table.columns):
        shown.add_column(column, justify="right" if i else "left")
    for row in table.rows:
        shown.add_row(*(cell.replace("**", "") for cell in row))
    console.print(shown)
