"""Normalizing flows whose channels are mixed by one linear map or another: which learns best, and at what price?

A flow like Glow on images, and one on a table of 64 columns; see flow_models.py. Every mixer gets the same sweep of
rates and of matrices to start from. The setting that is best on validation data is run with more seeds, and judged on
test data. What is done is written to a file, and the same command goes on where it was stopped.

Run: make flow, or python examples/flow.py --help
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import signal
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from flow_models import OURS, STARTS, installed
from flow_training import BATCH, DATA, SAMPLES, Record, Run, images, inverse_error, new_flow, train, training_step
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as Shown
from torch import Generator

import fasth
from fasth import files
from fasth.environment import describe
from fasth.reproduce.study import data
from fasth.reproduce.tables import Table, markdown
from fasth.timing import compare

HERE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Grid:
    """What is tried: every combination."""

    rates: dict[str, Sequence[float]]
    starts: Sequence[str]
    seeds: int
    steps: dict[str, int]


FULL = Grid(
    rates={"images": (0.003, 0.006, 0.012, 0.024), "table": (0.001, 0.002, 0.004)},
    starts=STARTS,
    seeds=3,
    steps={"images": 400, "table": 600},
)
QUICK = Grid({"images": (0.012,), "table": (0.002,)}, ("whitening",), 1, {"images": 100, "table": 300})


def sweep(grid: Grid, tasks: Iterable[str], mixers: Iterable[str]) -> list[Run]:
    """Every setting, with the first seed."""
    return [
        Run(task, mixer, start, lr, 0, grid.steps[task])
        for task in tasks
        for mixer in mixers
        for start in grid.starts
        for lr in grid.rates[task]
    ]


def finals(swept: Sequence[Run], records: Sequence[Record], grid: Grid) -> list[Run]:
    """The best setting of each mixer, with the other seeds."""
    groups = dict.fromkeys((run.task, run.mixer) for run in swept)
    winners = (best(records, task=task, mixer=mixer) for task, mixer in groups)
    return [
        replace(run_of(winner.records[0]), seed=seed) for winner in winners if winner for seed in range(1, grid.seeds)
    ]


class Results:
    """The records of a folder, one line of JSON each."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "results.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True) if self.path.exists() else []
        self.records: list[Record] = [json.loads(line) for line in lines if line.endswith("\n")]
        if lines and not lines[-1].endswith("\n"):  # cut off by a power failure or the like
            files.write(self.path, "".join(lines[:-1]))

    def add(self, record: Record) -> None:
        self.records.append(record)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def of(self, wanted: Iterable[Run]) -> list[Record]:
        return [record for run in wanted for record in self.records if vars(run).items() <= record.items()]


def train_all(wanted: Sequence[Run], results: Results, workers: int, console: Console) -> None:
    folder = results.path.parent / "samples"
    folder.mkdir(exist_ok=True)
    todo = [run for run in wanted if not results.of([run])]
    if not todo:
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("runs"), TimeElapsedColumn(), TextColumn("left:"))
    with (
        ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=one_thread) as pool,
        Progress(*columns, TimeRemainingColumn(), TextColumn("{task.description}"), console=console) as bar,
    ):
        futures = {pool.submit(train, run, samples_of(folder, run)): run for run in todo}
        row = bar.add_task("", total=len(todo))
        try:
            for future in as_completed(futures):
                run, found = futures[future], future.result()
                results.add(vars(run) | found)
                bar.update(row, advance=1, description=f"{run.name()}: {written(found['validation'])}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def samples_of(folder: Path, run: Run) -> Path | None:
    """Where the samples of a run go: those of the first seed are drawn, if it has images."""
    return folder / f"{run.name()}.pt" if run.task == "images" and run.seed == 0 else None


def one_thread() -> None:
    """One process a core, of one thread each, has a higher throughput than one process with as many threads."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process sees to that
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Best:
    """Of a mixer: the setting that was best on validation data with the first seed, and its runs, one a seed."""

    start: str
    lr: float
    records: list[Record]

    def __str__(self) -> str:
        values = [score(record, "test") for record in self.records]
        if math.inf in values:
            return "diverged"
        return written(statistics.fmean(values)) + (f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else "")


def first_seed(winner: Best | None) -> str:
    return "–" if winner is None else written(winner.records[0]["test"])


def score(record: Record, part: str) -> float:
    return math.inf if record[part] is None else record[part]


def best(records: Iterable[Record], **fixed: str) -> Best | None:
    of_first_seed = [record for record in records if record["seed"] == 0 and fixed.items() <= record.items()]
    if not of_first_seed:
        return None
    winner = min(of_first_seed, key=lambda record: score(record, "validation"))
    setting = {name: winner[name] for name in ("task", "mixer", "start", "lr")}
    return Best(winner["start"], winner["lr"], [record for record in records if setting.items() <= record.items()])


def written(value: float | None) -> str:
    return "diverged" if value is None or math.isinf(value) else f"{value:.3f}" if abs(value) < 10 else f"{value:.2f}"


def time_all(
    tasks: Iterable[str], mixers: Sequence[str], rounds: int, console: Console
) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of a training step and of sampling, one of each in turns: task → mixer → [step, samples]."""
    found = {}
    for name in tasks:
        console.print(f"Timing {name}")
        calls: dict[str, Callable[[], object]] = {}
        for mixer in mixers:
            flow = new_flow(Run(name, mixer, "rotation", 1e-3, 0, 1))
            x = DATA[name]().batch(BATCH, Generator().manual_seed(0))
            flow(x, normalize=True)
            error = inverse_error(flow, DATA[name]())
            if error is None or error > 1e-3:
                raise AssertionError(f"{mixer}: the inverse should undo the flow; it is off by {error}")
            optimizer = torch.optim.Adam(fasth.param_groups(flow, lr=1e-6))
            calls[f"{mixer} step"] = lambda flow=flow, x=x, optimizer=optimizer: training_step(flow, x, optimizer)
            calls[f"{mixer} samples"] = lambda flow=flow: flow.sample(BATCH)
        timings = {
            t.name: t.median * 1e3 for t in compare(calls, device=torch.device("cpu"), rounds=rounds, min_time=0)
        }
        found[name] = {mixer: [timings[f"{mixer} {what}"] for what in ("step", "samples")] for mixer in mixers}
    return found


def tables(records: Sequence[Record], times: dict[str, dict[str, list[float]]], grid: Grid) -> list[Table]:
    found = []
    for task, of_mixers in times.items():
        unit = DATA[task]().unit
        columns = ["mixer", f"test, {unit}", "start", "rate"]
        columns += [f"{start}, one seed" for start in grid.starts] if len(grid.starts) > 1 else []
        columns += ["largest inverse error", "step, ms", f"{BATCH} samples, ms"]
        rows = []
        for mixer, (step, samples) in of_mixers.items():
            of_mixer = [r for r in records if r["task"] == task and r["mixer"] == mixer]
            winner = best(of_mixer)
            if winner is None:
                continue
            name = f"**fasth {mixer}**" if mixer in OURS else mixer
            cells = [name, str(winner), winner.start, f"{winner.lr:g}"]
            cells += [first_seed(best(of_mixer, start=start)) for start in grid.starts] if len(grid.starts) > 1 else []
            errors = [record["inverse"] for record in winner.records]
            error = "not finite" if None in errors else f"{max(errors):.0e}"
            rows.append([*cells, error, f"{step:.1f}", f"{samples:.1f}"])
        what = data.pixels().name if task == "images" else "digits as a table"
        rates = ", ".join(f"{rate:g}" for rate in grid.rates[task])
        title = f"{what}: {grid.steps[task]} steps of {BATCH}, seeds: {grid.seeds}, rates: {rates}"
        found.append(Table(title, columns, rows))
    return found


def draw_curves(records: Sequence[Record], tasks: Sequence[str], mixers: Sequence[str], path: Path) -> None:
    """The training loss of each mixer at its best setting, the mean over seeds."""
    figure = Figure(figsize=(6 * len(tasks), 4.5), layout="constrained")
    panels = figure.subplots(1, len(tasks), squeeze=False)[0]
    for panel, task in zip(panels, tasks, strict=True):
        for i, mixer in enumerate(mixers):
            winner = best(records, task=task, mixer=mixer)
            if winner is None or any(None in record["curve"] for record in winner.records):
                continue
            curve = torch.tensor([record["curve"] for record in winner.records]).mean(0).tolist()
            steps = torch.linspace(0, winner.records[0]["steps"], len(curve)).tolist()
            style = {"linewidth": 2.2} if mixer in OURS else {"linewidth": 1.2, "linestyle": "--"}
            panel.plot(
                steps[2:], curve[2:], label=("fasth " if mixer in OURS else "") + mixer, color=f"C{i % 10}", **style
            )
        panel.set(title=task, xlabel="step", ylabel=f"training loss, {DATA[task]().unit}")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(path, dpi=120)


def draw_samples(records: Sequence[Record], mixers: Sequence[str], folder: Path, path: Path) -> None:
    """A row of real images, and one of samples for each mixer at its best setting."""
    rows = {"real": images().test[:SAMPLES]}
    for mixer in mixers:
        winner = best(records, task="images", mixer=mixer)
        file = winner and samples_of(folder, run_of(winner.records[0]))
        if file and file.exists():
            rows[("fasth " if mixer in OURS else "") + mixer] = torch.load(file)
    figure = Figure(figsize=(SAMPLES * 0.7 + 1.8, len(rows) * 0.72), layout="constrained")
    panels = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    for panel, (name, found) in zip(panels, rows.items(), strict=True):
        strip = torch.cat(list(found.squeeze(1)), -1).nan_to_num(0).clamp(-0.5, 0.5)
        panel.imshow(strip.numpy(), cmap="gray", vmin=-0.5, vmax=0.5)
        panel.set(xticks=[], yticks=[])
        panel.set_ylabel(name, rotation=0, ha="right", va="center")
    figure.savefig(path, dpi=120)


def run_of(record: Record) -> Run:
    return Run(**{name: record[name] for name in Run.__dataclass_fields__})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few minutes: one seed, one rate, fewer steps")
    parser.add_argument("--tasks", nargs="+", choices=DATA, default=list(DATA), metavar="TASK", help="images, table")
    known = installed()
    parser.add_argument("--mixers", nargs="+", choices=known, default=known, metavar="MIXER", help=", ".join(known))
    parser.add_argument("--rates", type=float, nargs="+", help="in place of those of the sweep")
    parser.add_argument("--seeds", type=int, help=f"default {FULL.seeds}, with --quick {QUICK.seeds}")
    parser.add_argument("--steps", type=int, help="in place of those of the grid")
    parser.add_argument("--rounds", type=int, default=20, help="of timed steps")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes, of one thread each")
    parser.add_argument("--out", type=Path, help="default build/flow, with --quick build/flow-quick")
    options = parser.parse_args(arguments)
    for name in ("seeds", "steps", "rounds", "workers"):
        if (given := getattr(options, name)) is not None and given < 1:
            parser.error(f"--{name} should be at least 1; got {given}")

    console = Console()
    grid = QUICK if options.quick else FULL
    if options.rates:
        grid = replace(grid, rates=dict.fromkeys(DATA, options.rates))
    if options.steps:
        grid = replace(grid, steps=dict.fromkeys(DATA, options.steps))
    grid = replace(grid, seeds=options.seeds or grid.seeds)
    if "images" in options.tasks and data.pixels().name == "digits":
        console.print(data.HOW_TO_INSTALL)
    results = Results(options.out or HERE / "build" / ("flow-quick" if options.quick else "flow"))
    folder = results.path.parent
    wanted = sweep(grid, options.tasks, options.mixers)
    try:
        train_all(wanted, results, options.workers, console)
        wanted += finals(wanted, results.of(wanted), grid)
        train_all(wanted, results, options.workers, console)
    except KeyboardInterrupt:
        console.print(f"\nStopped. What is done is in {results.path}; the same command goes on from there.")
        return 130
    records = results.of(wanted)
    found = tables(records, time_all(options.tasks, options.mixers, options.rounds, console), grid)
    show(found, console)
    machine = describe()
    made = (
        f"{machine['cpu']}, {machine['threads']} threads, torch {torch.__version__}. Times are medians, taken in turns."
    )
    files.write(folder / "tables.md", "\n\n".join([*map(markdown, found), made]) + "\n")
    draw_curves(records, options.tasks, options.mixers, folder / "curves.png")
    if "images" in options.tasks:
        draw_samples(records, options.mixers, folder / "samples", folder / "samples.png")
    console.print(f"{made}\nTables and pictures: {folder}", soft_wrap=True)
    return 0


def show(found: Sequence[Table], console: Console) -> None:
    for table in found:
        shown = Shown(title=f"\n{table.title}", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for i, column in enumerate(table.columns):
            shown.add_column(column, justify="right" if i else "left")
        for row in table.rows:
            shown.add_row(*(cell.replace("**", "") for cell in row))
        console.print(shown)


if __name__ == "__main__":
    sys.exit(main())
