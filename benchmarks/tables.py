"""The tables of ``make bench``, made from its results: bench.py prints them, readme.py puts them into the README."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fasth.reproduce.methods import FULL, LINEAR, TRIANGULAR

Record = dict[str, Any]  # one method at one size, as bench.py writes it

BASE, GROWN = 1024, 4096  # the multiple should not grow from one to the other; the second is in no mean


@dataclass(frozen=True)
class Table:
    title: str
    columns: list[str]
    rows: list[list[str]]


def tables(results: dict[str, Any]) -> list[Table]:
    def select(table: str, what: str) -> list[Record]:
        return [record for record in results["records"] if (record["table"], record["what"]) == (table, what)]

    made = [
        _by_size("Training step, 32 rows, fasth as multiples of F.linear", select("layer", "step")),
        _by_size("Forward without gradients, 32 rows, fasth as multiples of F.linear", select("layer", "forward")),
        _by_size("Training step, 8·d rows, fasth as multiples of F.linear", select("rows", "step")),
        *_by_method(select("peers", "step")),
    ]
    return [table for table in made if table.rows]


def machine(results: dict[str, Any]) -> str:
    """Where and with what the numbers were measured."""
    of = results["environment"]
    instructions = f" ({', '.join(of['instructions'])})" if of["instructions"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in of["versions"].items())
    return (
        f"{of['cpu']}{instructions}, {of['cores']} cores, {of['threads']} threads; {results['dtype']}; {versions}; "
        f"{of['date'][:10]}"
    )


def _by_size(title: str, records: list[Record]) -> Table:
    """A row for each d: the time of F.linear, and ours as multiples of it."""
    ours = [TRIANGULAR.name, FULL.name]
    of = {(record["name"], record["d"]): record for record in records}
    sizes = sorted({d for _, d in of})
    multiples = {(name, d): _ratio(of[name, d], of[LINEAR.name, d]) for name in ours for d in sizes}
    rows = [[str(d), _time(of[LINEAR.name, d]), *(_number(multiples[name, d]) for name in ours)] for d in sizes]
    in_mean = [d for d in sizes if d != GROWN]
    if len(in_mean) > 1:
        means = [_geometric_mean([multiples[name, d] for d in in_mean]) for name in ours]
        rows.append([f"geometric mean to {in_mean[-1]}", "", *map(_number, means)])
    if {BASE, GROWN} <= set(sizes):
        growth = [multiples[name, GROWN] / multiples[name, BASE] for name in ours]
        rows.append([f"{GROWN} relative to {BASE}", "", *map(_number, growth)])
    return Table(title, ["d", LINEAR.name, *ours], rows)


def _by_method(records: list[Record]) -> Iterator[Table]:
    """For each d a table with a row for each method, the fastest first."""
    for d in sorted({record["d"] for record in records}):
        of = {record["name"]: record for record in records if record["d"] == d}
        rows = [
            [name, _time(record), *(_number(_ratio(record, of[other.name])) for other in (LINEAR, TRIANGULAR))]
            for name, record in sorted(of.items(), key=lambda item: item[1]["median"] or math.inf)
        ]
        title = f"Training step, 32 rows, d = {d}"
        yield Table(title, ["method", "time", f"× {LINEAR.name}", f"× {TRIANGULAR.name}"], rows)


def _ratio(record: Record, yardstick: Record) -> float:
    """The ratio of medians; nan where a method has none."""
    return (record["median"] or math.nan) / (yardstick["median"] or math.nan)


def _geometric_mean(numbers: list[float]) -> float:
    return math.nan if any(map(math.isnan, numbers)) else statistics.geometric_mean(numbers)


def _number(number: float) -> str:
    if math.isnan(number):
        return "–"
    return f"{number:.2f}" if number < 10 else f"{number:.1f}" if number < 100 else f"{number:.0f}"


def _time(record: Record) -> str:
    """In milliseconds; or why there is no time."""
    if record["median"] is None:
        return record["status"]
    mark = " (stopped)" if record["status"] == "stopped" else ""
    return f"{record['median'] * 1e3:.3g} ms{mark}"
