"""Makes tables of records, for the report, the benchmark and the documentation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fasth.tools.reproduce.methods import COMPACT
from fasth.tools.reproduce.operations import OPERATIONS
from fasth.tools.reproduce.tasks import Record

OURS = COMPACT.name
VALUES = {"mean": "mean time", "bytes": "peak memory"}
PAPER_SIZE = 768  # the size at which the paper reports the improvement of the four operations
# The paper's speed-ups: section 2.2 over the algorithms of Zhang et al.; section 4.2 over the standard methods.
PAPER_OVER = {"sequential": 27.1, "parallel": 6.2}
PAPER_OPERATIONS = {"inverse": 2.7, "determinant": 3.5, "exponential": 4.1, "cayley": 3.1}


@dataclass(frozen=True)
class Table:
    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""


def markdown(table: Table) -> str:
    alignment = ["---", *["---:"] * (len(table.columns) - 1)]
    lines = [f"| {' | '.join(cells)} |" for cells in (table.columns, alignment, *table.rows)]
    return "\n".join([f"**{table.title}**", "", *lines])


def select(results: dict[str, Any], experiment: str, **values: Any) -> list[Record]:
    """Returns the records of one experiment with these values."""
    records = (record for record in results["records"] if record["experiment"] == experiment)
    return [record for record in records if all(record[name] == value for name, value in values.items())]


def by(records: Iterable[Record], *names: str) -> dict[Any, Record]:
    """Maps the value, or a tuple of values, of these fields to the last record that has it."""
    return {record[names[0]] if len(names) == 1 else tuple(record[n] for n in names): record for record in records}


def unique(records: Iterable[Record], name: str) -> list[Any]:
    """Returns the distinct values of a field, in order of appearance."""
    return list(dict.fromkeys(record[name] for record in records))


def ratio(record: Record | None, yardstick: Record | None, statistic: str = "mean") -> float:
    """The time divided by the yardstick's time; nan if either is missing."""
    if record is None or yardstick is None or not (record[statistic] and yardstick[statistic]):
        return math.nan
    return float(record[statistic] / yardstick[statistic])


def headlines(results: dict[str, Any]) -> Table:
    """The paper's own numbers beside those of this run."""
    rows = []
    steps = by(select(results, "step"), "name", "d")
    sizes = sorted({d for _, d in steps})
    for name, papers in PAPER_OVER.items():
        times = [f"faster than the {name} algorithm, at most", f"{papers}"]
        rows.append([*times, *(_highest(steps, name, ours, sizes) for ours in ("FastH", OURS))])
    for operation in OPERATIONS:
        key = operation.name.split()[0].lower()
        found = by(select(results, key), "name", "d")
        if found:
            d = PAPER_SIZE if any(size == PAPER_SIZE for _, size in found) else max(size for _, size in found)
            here = [ratio(found.get((operation.standard_name, d)), found.get((ours, d))) for ours in ("FastH", "fasth")]
            what = f"{operation.name}: faster than {operation.standard_name}, d = {d}"
            rows.append([what, f"{PAPER_OPERATIONS[key]}", *map(number, here)])
    rows = [row for row in rows if set(row[2:]) != {"–"}]
    note = (
        "The paper's numbers are of its FastH on an RTX 2080 Ti, against the implementations of its time. "
        "“FastH, here” is its Algorithms 1 and 2 on the machine of this run."
    )
    return Table("The paper's headline numbers", ["times", "paper", "FastH, here", "fasth, here"], rows, note)


def _highest(found: dict[Any, Record], name: str, ours: str, sizes: Sequence[int]) -> str:
    ratios = {d: ratio(found.get((name, d)), found.get((ours, d))) for d in sizes}
    known = {d: value for d, value in ratios.items() if not math.isnan(value)}
    best = max(known, key=lambda d: known[d], default=None)
    return "–" if best is None else f"{number(known[best])} (d = {best})"


def times(title: str, records: Sequence[Record], row: str, column: str = "name", note: str = "") -> Table:
    """Mean times, with a row for each value of one field and a column for each value of another."""
    cells = by(records, row, column)
    columns = unique(records, column)
    rows = [[str(value), *(time_of(cells.get((value, c))) for c in columns)] for value in unique(records, row)]
    return Table(title, [row, *map(str, columns)], rows, note)


def bars(title: str, records: Sequence[Record], value: str, form: Callable[[float], str], note: str = "") -> Table:
    """A row for each method, the smallest first: its value, and the value as a multiple of fasth's."""
    ordered = sorted(records, key=lambda record: record[value] or math.inf)
    ours = next((record[value] for record in records if record["name"] == OURS), None)
    rows = [
        [r["name"], form(r[value]), number(r[value] / ours) if ours else "–"]
        if r[value]
        else [r["name"], r["status"], "–"]
        for r in ordered
    ]
    return Table(title, ["method", VALUES[value], f"× {OURS}"], rows, note)


def counts(results: dict[str, Any]) -> Table:
    records = select(results, "counts")
    rows = [
        [
            str(r["d"]),
            r["name"],
            *(f"{'≥ ' if r['library'] else ''}{quantity(r[name])}" for name in ("depth", "launches", "operations")),
            quantity(r["bytes"]) + "B",
        ]
        if r["status"] == "ok"
        else [str(r["d"]), r["name"], r["status"], "–", "–", "–"]
        for r in records
    ]
    note = (
        "Counted by tracing a step on the meta device, not measured; no GPU was used. A launch is an operation of "
        "PyTorch that does work, or a Triton kernel; dependent launches are the longest chain of them in which each "
        "needs the one before; bytes are read and written as if nothing stayed in a cache. ≥: a matrix exponential or "
        "a linear solve counts as one launch, and is many. Kernels: fasth's Triton kernels, for rows of up to 2048 "
        "numbers; blocks: its PyTorch path, which serves the rest."
    )
    columns = ["d", "method", "dependent launches", "launches", "operations", "bytes"]
    return Table("Estimated for a GPU, per gradient step of 32 rows: counted, not measured", columns, rows, note)


def faults(results: dict[str, Any]) -> list[str]:
    """Returns a sentence for each method that was not measured because it is wrong or failed."""
    noted = {(r["status"], r["name"], r.get("note", "")) for r in results["records"]}
    wrong = [f"Not timed, because its answer is wrong: {note}" for status, _, note in noted if status == "wrong"]
    failed = [f"Not measured, because it failed: {name}: {note}" for status, name, note in noted if status == "failed"]
    return sorted(wrong) + sorted(failed)


def any_wrong(results: dict[str, Any]) -> bool:
    return any(record["status"] == "wrong" for record in results["records"])


def machine(results: dict[str, Any]) -> str:
    """Describes the machine and the versions of a measurement."""
    about = results["environment"]
    instructions = f" ({', '.join(about['instructions'])})" if about["instructions"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    device = "" if about["device"] == "cpu" else f"{about['device']}; "
    return (
        f"{device}{about['cpu']}{instructions}, {about['cores']} cores, {about['threads']} threads; "
        f"{results['settings']['dtype']}; {versions}; {about['date'][:10]}"
    )


def geometric_mean(numbers: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, numbers)) else statistics.geometric_mean(numbers)


def number(value: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def seconds(value: float) -> str:
    """Formats seconds as milliseconds."""
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value * 1e3:.0f} ms"


def time_of(record: Record | None, statistic: str = "mean") -> str:
    """Formats the time of a record, or its status if it has none."""
    if record is None:
        return "–"
    if record[statistic] is None:
        return str(record["status"])
    return seconds(record[statistic]) + (" (stopped)" if record["status"] == "stopped" else "")


def megabytes(value: float) -> str:
    return f"{value / 1e6:.3g} MB"


def quantity(value: float) -> str:
    """Formats with three digits and a prefix: 65.5 k, 1.38 G."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if value >= size:
            return f"{value / (1e3 if prefix == 'k' else size):.3g} {prefix}"
    return f"{value:.0f} "
