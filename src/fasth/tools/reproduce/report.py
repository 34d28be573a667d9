"""The output of ``fasth reproduce``: the readings as CSV, the figures, and a self-contained HTML page."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fasth import _files
from fasth.tools.reproduce import figures, runner, tables
from fasth.tools.reproduce.operations import OPERATIONS
from fasth.tools.reproduce.tables import Table, select, unique

PAPER = "Mathiasen, Hvilshøj, Jørgensen, Nasery and Mottin, <i>What if Neural Networks had SVDs?</i>, NeurIPS 2020"


def write(found: dict[str, Any], out: Path, command: str) -> list[Path]:
    """Writes all files except the results themselves, and returns their paths."""
    contents: dict[str, str | bytes] = {"readings.csv": runner.readings(found)}
    pictures = []
    for drawing, formats in figures.drawn(found):
        contents |= {f"{drawing.name}.{ending}": content for ending, content in formats.items()}
        pictures.append((drawing, formats["svg"]))
    contents["report.html"] = page(found, pictures, command)
    for name, content in contents.items():
        _files.write(out / name, content)
    return [out / name for name in contents]


def page(found: dict[str, Any], pictures: list[tuple[figures.Drawing, bytes]], command: str) -> str:
    headlines = tables.headlines(found)
    body = [
        "<h1>The paper's experiments, run again</h1>",
        f"<p>{PAPER}; with <b>fasth</b>, an independent implementation. Every method's value and gradients were "
        "verified against its definition, in float64, before it was timed; methods took turns.</p>",
        f"<p class=machine><b>Measured on</b> {html.escape(tables.machine(found))}. "
        f"{found['settings']['rounds']} repetitions, at most {found['settings']['time_limit']:g} s for each method at "
        "each size.</p>",
        *([_table(headlines)] if headlines.rows else []),
        *(f"<p class=wrong>{html.escape(fault)}</p>" for fault in tables.faults(found)),
        *(_figure(drawing, svg) for drawing, svg in pictures),
        "<h2>Tables</h2>",
        *(_folded(table) for table in all_tables(found)),
        "<h2>Run it again</h2>",
        f"<pre>pip install 'fasth[reproduce]'\n{html.escape(command)}</pre>",
        "<p>A run that was interrupted goes on from what it has. <code>--full</code> is the paper's own grid, "
        "<code>--device cuda</code> runs it on a GPU. <code>results.json</code> and <code>readings.csv</code> beside "
        "this page hold every repetition.</p>",
    ]
    content = "\n".join(body)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>fasth: the paper's experiments, run again</title>
<style>{_CSS}</style>
</head>
<body>
<main>
{content}
</main>
</body>
</html>
"""


def all_tables(found: dict[str, Any]) -> Iterator[Table]:
    """Yields the tables below the figures."""
    if steps := select(found, "step"):
        yield tables.times("A gradient step with one orthogonal matrix, 32 rows, mean time (Figure 3)", steps, "d")
    for operation in OPERATIONS:
        if records := select(found, operation.name.split()[0].lower()):
            yield tables.times(f"The {operation.name}, forward pass and gradients, 32 rows, mean time", records, "d")
    for d in unique(select(found, "block-size"), "d"):
        yield tables.times(f"Block size k, d = {d}, 32 rows, mean time", select(found, "block-size", d=d), "k")
    for d in unique(select(found, "rows"), "d"):
        yield tables.times(f"Rows, d = {d}, mean time", select(found, "rows", d=d), "rows")
    for d in unique(select(found, "memory"), "d"):
        yield tables.bars(f"Peak memory, d = {d}, 32 rows", select(found, "memory", d=d), "bytes", tables.megabytes)
    for d in unique(select(found, "peers"), "d"):
        yield tables.bars(f"Other libraries, d = {d}, 32 rows", select(found, "peers", d=d), "mean", tables.seconds)
    if select(found, "counts"):
        yield tables.counts(found)


def _figure(drawing: figures.Drawing, svg: bytes) -> str:
    data, caption = base64.b64encode(svg).decode(), html.escape(drawing.caption)
    image = f'<img src="data:image/svg+xml;base64,{data}" alt="{caption}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def _table(table: Table) -> str:
    cells = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
    rows = "\n".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in table.rows)
    note = f"<p class=note>{html.escape(table.note)}</p>" if table.note else ""
    head = f"<h2>{html.escape(table.title)}</h2>"
    return f"{head}<div class=wide><table><thead><tr>{cells}</tr></thead><tbody>\n{rows}\n</tbody></table></div>{note}"


def _folded(table: Table) -> str:
    title = html.escape(table.title)
    inner = _table(table).removeprefix(f"<h2>{title}</h2>")
    return f"<details open><summary>{title}</summary>{inner}</details>"


_CSS = """
:root { color-scheme: light; }
body { margin: 0; background: #f4f5f7; color: #1d1f23; font: 16px/1.55 system-ui, "Segoe UI", sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 1rem; }
h2 { font-size: 1.25rem; margin: 2.4rem 0 .7rem; }
.machine, .note, figcaption { color: #555b66; font-size: .88rem; }
.wrong { background: #fde8e4; border-left: 4px solid #c0392b; padding: .6rem .9rem; }
figure { margin: 1.5rem 0; padding: 1.2rem 1.2rem .9rem; }
figure { background: #fff; border: 1px solid #e2e4e8; border-radius: 8px; }
figure img { display: block; width: 100%; height: auto; max-width: 52rem; margin: 0 auto .6rem; }
details { margin: .7rem 0; background: #fff; border: 1px solid #e2e4e8; border-radius: 8px; padding: .3rem 1rem; }
summary { cursor: pointer; font-weight: 600; padding: .4rem 0; }
.wide { overflow-x: auto; background: #fff; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .34rem .7rem; text-align: right; border-bottom: 1px solid #eceef1; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { color: #555b66; font-weight: 600; border-bottom: 2px solid #d5d8dd; }
pre { background: #1f2430; color: #f0f2f5; padding: .9rem 1.1rem; border-radius: 8px; overflow-x: auto; }
@media print { body { background: #fff; } figure, details { break-inside: avoid; } }
"""
