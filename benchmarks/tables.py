"""The tables of ``make bench``, made from its results: bench.py prints them, readme.py puts them into the README."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from fasth.tools.reproduce.layers import NN_LINEAR
from fasth.tools.reproduce.methods import COMPACT, LINEAR
from fasth.tools.reproduce.operations import OPERATIONS
from fasth.tools.reproduce.tables import Table, by, geometric_mean, machine, number, ratio, select, time_of, unique
from fasth.tools.reproduce.tasks import Record

__all__ = ["Table", "machine", "tables"]

BASE, GROWN = 1024, 4096  # the multiple should not grow from one to the other; the second is in no mean


def tables(results: dict[str, Any]) -> list[Table]:
    def sized(title: str, experiment: str, what: str, yardstick: str = LINEAR.name) -> Table:
        return _by_size(title, select(results, experiment, what=what), yardstick)

    matrix = "one orthogonal matrix as multiples of F.linear"
    linear = "layers as multiples of nn.Linear"
    made = [
        sized(f"Training step, 32 rows, {linear}", "linear", "step", NN_LINEAR.name),
        sized(f"Training step, 32 rows, single calls in turns, {linear}", "linear", "single", NN_LINEAR.name),
        sized(f"Inference within cached(), 32 rows, {linear}", "linear", "inference", NN_LINEAR.name),
        _operations(results),
        sized(f"Training step, 32 rows, {matrix}", "layer", "step"),
        sized(f"Training step, 32 rows, single calls in turns, {matrix}", "layer", "single"),
        sized(f"Forward without gradients, 32 rows, {matrix}", "layer", "forward"),
        sized(f"Training step, 8·d rows, {matrix}", "rows", "step"),
        *_by_method(select(results, "peers", what="step")),
    ]
    return [table for table in made if table.rows]


def _by_size(title: str, records: list[Record], yardstick: str) -> Table:
    """A row for each d: the time of the yardstick, and the others as multiples of it."""
    ours = [name for name in unique(records, "name") if name != yardstick]
    found = by(records, "name", "d")
    sizes = sorted({d for _, d in found})
    multiples = {(name, d): ratio(found[name, d], found[yardstick, d], "median") for name in ours for d in sizes}
    rows = [
        [str(d), time_of(found[yardstick, d], "median"), *(number(multiples[name, d]) for name in ours)] for d in sizes
    ]
    in_mean = [d for d in sizes if d != GROWN]
    if len(in_mean) > 1:
        means = [geometric_mean([multiples[name, d] for d in in_mean]) for name in ours]
        rows.append([f"geometric mean to {in_mean[-1]}", "", *map(number, means)])
    if {BASE, GROWN} <= set(sizes):
        growth = [multiples[name, GROWN] / multiples[name, BASE] for name in ours]
        rows.append([f"{GROWN} relative to {BASE}", "", *map(number, growth)])
    return Table(title, ["d", yardstick, *ours], rows)


def _operations(results: dict[str, Any]) -> Table:
    """A row for each d: how many times faster than its standard method each operation is."""
    found = {o.standard_name: by(select(results, o.name.split()[0].lower()), "name", "d") for o in OPERATIONS}
    found = {name: records for name, records in found.items() if records}
    sizes = sorted({d for records in found.values() for _, d in records})
    rows = [
        [
            str(d),
            *(
                number(ratio(records.get((name, d)), records.get(("fasth", d)), "median"))
                for name, records in found.items()
            ),
        ]
        for d in sizes
    ]
    title = "Operation, forward pass and all gradients, 32 rows: fasth.SVD and Symmetric, times faster than"
    return Table(title, ["d", *found], rows)


def _by_method(records: list[Record]) -> Iterator[Table]:
    """For each d a table with a row for each method, the fastest first."""
    for d in sorted({record["d"] for record in records}):
        found = {record["name"]: record for record in records if record["d"] == d}
        yardsticks = [found.get(method.name) for method in (LINEAR, COMPACT)]
        rows = [
            [name, time_of(record, "median"), *(number(ratio(record, yardstick, "median")) for yardstick in yardsticks)]
            for name, record in sorted(found.items(), key=lambda item: item[1]["median"] or math.inf)
        ]
        title = f"Training step, 32 rows, d = {d}"
        yield Table(title, ["method", "time", f"× {LINEAR.name}", f"× {COMPACT.name}"], rows)
