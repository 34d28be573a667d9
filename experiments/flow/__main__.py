"""Normalizing flows whose channels are mixed by one linear map or another: which learns best, and at what price?

A flow like Glow on images, and one on a table of 64 columns; see flow_models.py. Every mixer gets the same sweep of
rates and of matrices to start from. The setting that is best on validation data is run with more seeds, and judged on
test data. What is done is written to a file, and the same command goes on where it was stopped.

Run: make flow, or python examples/flow.py --help
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from flow_models import OURS, STARTS, installed
from flow_training import BATCH, DATA, SAMPLES, Record, Run, images, inverse_error, new_flow, train, training_step
from matplotlib import colormaps
from matplotlib.figure import Figure
from rich.console import Console
from torch import Generator

import fasth
from fasth import files
from fasth.environment import describe
from fasth.reproduce.pool import in_parallel
from fasth.reproduce.results import Results, show
from fasth.reproduce.study import data
from fasth.reproduce.tables import Table, markdown
from fasth.timing import compare

HERE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Grid:
    """What is tried: every combination."""

    rates: dict[str, Sequence[float]]
    starts: dict[str, Sequence[str]]
    seeds: int  # besides that of the sweep
    steps: dict[str, int]


FULL = Grid(
    rates={"images": (0.003, 0.006, 0.012, 0.024), "table": (0.001, 0.002, 0.004)},
    starts=dict.fromkeys(DATA, STARTS),
    seeds=3,
    steps={"images": 400, "table": 600},
)
QUICK = Grid(
    rates={"images": (0.006,), "table": (0.002,)},
    starts={"images": ("whitening",), "table": ("permutation",)},
    seeds=0,
    steps={"images": 100, "table": 300},
)


def sweep(grid: Grid, tasks: Iterable[str], mixers: Iterable[str]) -> list[Run]:
    """Every setting, with seed 0."""
    return [
        Run(task, DATA[task]().name, mixer, start, lr, 0, grid.steps[task])
        for task in tasks
        for mixer in mixers
        for start in grid.starts[task]
        for lr in grid.rates[task]
    ]


def finals(swept: Sequence[Run], records: Sequence[Record], grid: Grid) -> list[Run]:
    """The best setting of each mixer, with seeds that did not choose it."""
    groups = dict.fromkeys((run.task, run.mixer) for run in swept)
    winners = (best(records, task=task, mixer=mixer) for task, mixer in groups)
    return [
        replace(run_of(winner.chosen), seed=seed) for winner in winners if winner for seed in range(1, grid.seeds + 1)
    ]


def train_all(wanted: Sequence[Run], results: Results, workers: int, console: Console) -> None:
    folder = results.path.parent / "samples"
    folder.mkdir(exist_ok=True)
    calls = [(run, samples_of(folder, run)) for run in wanted if not results.of([run])]
    for (run, _), found in in_parallel(train, calls, workers, console, describe_run):
        results.add(vars(run) | found)


def describe_run(call: tuple[Any, ...], found: Record) -> str:
    return f"{call[0].name()}: {written(found['validation'])}"


def samples_of(folder: Path, run: Run) -> Path | None:
    """Where the samples of a run go: those of the first seed are drawn, if it has images."""
    return folder / f"{run.name()}.pt" if run.task == "images" and run.seed == 0 else None


@dataclass(frozen=True)
class Best:
    """Of a mixer: the run of seed 0 that was best on validation data, and those of the same setting with other seeds,
    or, without any, that run itself.
    """

    chosen: Record
    finals: list[Record]

    def __str__(self) -> str:
        values = [score(record, "test") for record in self.finals]
        if math.inf in values:
            return "diverged"
        return written(statistics.fmean(values)) + (f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else "")


def score(record: Record, part: str) -> float:
    return math.inf if record[part] is None else record[part]


def best(records: Iterable[Record], **fixed: str) -> Best | None:
    of_first_seed = [record for record in records if record["seed"] == 0 and fixed.items() <= record.items()]
    if not of_first_seed:
        return None
    chosen = min(of_first_seed, key=lambda record: score(record, "validation"))
    setting = {name: chosen[name] for name in ("task", "mixer", "start", "lr")}
    others = [record for record in records if record["seed"] and setting.items() <= record.items()]
    return Best(chosen, others or [chosen])


def written(value: float | None) -> str:
    return "diverged" if value is None or math.isinf(value) else f"{value:.3f}" if abs(value) < 10 else f"{value:.2f}"


def time_all(winners: Sequence[Best], rounds: int, console: Console) -> dict[str, list[float]]:
    """Milliseconds of a training step and of 64 samples of each mixer, at the start that was best for it.

    Single calls in turns, after it was verified that the inverse undoes the flow.
    """
    calls: dict[str, Callable[[], object]] = {}
    for winner in winners:
        run = run_of(winner.chosen)
        console.print(f"Timing {run.task}, {run.mixer}")
        task, flow = DATA[run.task](), new_flow(run)
        x = task.batch(BATCH, Generator().manual_seed(0))
        flow(x, normalize=True)
        error = inverse_error(flow, task)
        if error is None or error > 1e-3:
            raise AssertionError(f"{run.mixer}: the inverse should undo the flow; it is off by {error}")
        optimizer = torch.optim.Adam(fasth.param_groups(flow, lr=1e-6))
        calls[f"{run.mixer} step"] = lambda flow=flow, x=x, optimizer=optimizer: training_step(flow, x, optimizer)
        calls[f"{run.mixer} samples"] = lambda flow=flow: flow.sample(BATCH)
    median = {t.name: 1e3 * t.median for t in compare(calls, device=torch.device("cpu"), rounds=rounds, min_time=0)}
    mixers = [winner.chosen["mixer"] for winner in winners]
    return {mixer: [median[f"{mixer} {what}"] for what in ("step", "samples")] for mixer in mixers}


def table_of(
    task: str, winners: Sequence[Best], times: dict[str, list[float]], records: list[Record], grid: Grid
) -> Table:
    starts = grid.starts[task] if len(grid.starts[task]) > 1 else ()
    columns = ["mixer", f"test, {DATA[task]().unit}", "start", "rate", *(f"{start}, one seed" for start in starts)]
    rows = []
    for winner in winners:
        mixer, chosen = winner.chosen["mixer"], winner.chosen
        of_starts = (best(records, task=task, mixer=mixer, start=start) for start in starts)
        errors = [record["inverse"] for record in winner.finals]
        cells = [f"**{label(mixer)}**" if mixer in OURS else mixer, str(winner), chosen["start"], f"{chosen['lr']:g}"]
        cells += ["–" if one is None else written(one.chosen["test"]) for one in of_starts]
        cells += ["not finite" if None in errors else f"{max(errors):.0e}", *(f"{ms:.1f}" for ms in times[mixer])]
        rows.append(cells)
    rates = ", ".join(f"{rate:g}" for rate in grid.rates[task])
    title = f"{DATA[task]().name}, {task}: {grid.steps[task]} steps of {BATCH}; rates: {rates}"
    return Table(title, [*columns, "largest inverse error", "step, ms", f"{BATCH} samples, ms"], rows)


def label(mixer: str) -> str:
    return f"fasth {mixer}" if mixer in OURS else mixer


def draw_curves(winners: dict[str, list[Best]], path: Path) -> None:
    """The training loss of each mixer at its best setting, the mean over seeds."""
    figure = Figure(figsize=(6 * len(winners) + 2, 4.5), layout="constrained")
    panels = figure.subplots(1, len(winners), squeeze=False)[0]
    for panel, (task, of_task) in zip(panels, winners.items(), strict=True):
        for i, winner in enumerate(of_task):
            if any(None in record["curve"] for record in winner.finals):
                continue
            mixer, curve = winner.chosen["mixer"], torch.tensor([r["curve"] for r in winner.finals]).mean(0).tolist()
            steps = torch.linspace(0, winner.chosen["steps"], len(curve)).tolist()
            style: Any = {"linewidth": 2.2} if mixer in OURS else {"linewidth": 1.2, "linestyle": "--"}
            # Without the first of them, which would leave no room for the differences.
            panel.plot(steps[4:], curve[4:], label=label(mixer), color=colormaps["tab20"](i), **style)
        panel.set(title=task, xlabel="step", ylabel=f"training loss, {DATA[task]().unit}")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(path, dpi=120)


def draw_samples(winners: Sequence[Best], folder: Path, path: Path) -> None:
    """A row of real images, and one of samples for each mixer at its best setting."""
    rows = {"real": images().test[:SAMPLES]}
    for winner in winners:
        file = samples_of(folder, run_of(winner.chosen))
        if file and file.exists():
            rows[label(winner.chosen["mixer"])] = torch.load(file)
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
    options = parse(arguments)
    console, grid = Console(), grid_of(options)
    if "images" in options.tasks and data.pixels().name == "digits":
        console.print(data.HOW_TO_INSTALL)
    results = Results(options.out or HERE / "build" / ("flow-quick" if options.quick else "flow"))
    wanted = sweep(grid, options.tasks, options.mixers)
    try:
        train_all(wanted, results, options.workers, console)
        wanted += finals(wanted, results.of(wanted), grid)
        train_all(wanted, results, options.workers, console)
        report(results, wanted, grid, options, console)
    except KeyboardInterrupt:
        console.print(f"\nStopped. What is done is in {results.path}; the same command goes on from there.")
        return 130
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    known = installed()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few minutes: one seed, one rate, fewer steps")
    parser.add_argument("--tasks", nargs="+", choices=DATA, default=list(DATA), metavar="TASK", help="images, table")
    parser.add_argument("--mixers", nargs="+", choices=known, default=known, metavar="MIXER", help=", ".join(known))
    parser.add_argument("--rates", type=float, nargs="+", help="in place of those of the sweep")
    parser.add_argument("--seeds", type=int, help="besides that of the sweep; default 3, with --quick none")
    parser.add_argument("--steps", type=int, help="of training")
    parser.add_argument("--rounds", type=int, default=20, help="of timed steps")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes, of one thread each")
    parser.add_argument("--out", type=Path, help="default build/flow, with --quick build/flow-quick")
    options = parser.parse_args(arguments)
    for name, least in (("seeds", 0), ("steps", 1), ("rounds", 1), ("workers", 1)):
        if (given := getattr(options, name)) is not None and given < least:
            parser.error(f"--{name} should be at least {least}; got {given}")
    return options


def grid_of(options: argparse.Namespace) -> Grid:
    grid = QUICK if options.quick else FULL
    if options.rates:
        grid = replace(grid, rates=dict.fromkeys(DATA, options.rates))
    if options.steps:
        grid = replace(grid, steps=dict.fromkeys(DATA, options.steps))
    return grid if options.seeds is None else replace(grid, seeds=options.seeds)


def report(results: Results, wanted: Sequence[Run], grid: Grid, options: argparse.Namespace, console: Console) -> None:
    """Tables, here and as Markdown, and pictures."""
    records, folder = results.of(wanted), results.path.parent
    winners = {
        task: [one for mixer in options.mixers if (one := best(records, task=task, mixer=mixer))]
        for task in options.tasks
    }
    times = {task: time_all(of_task, options.rounds, console) for task, of_task in winners.items()}
    found = [table_of(task, of_task, times[task], records, grid) for task, of_task in winners.items()]
    for table in found:
        show(table, console)
    machine = describe()
    made = (
        f"{machine['cpu']}, {machine['threads']} threads, torch {torch.__version__}. Times are medians, taken in turns."
    )
    files.write(folder / "tables.md", "\n\n".join([*map(markdown, found), made]) + "\n")
    draw_curves(winners, folder / "curves.png")
    if "images" in winners:
        draw_samples(winners["images"], folder / "samples", folder / "samples.png")
    console.print(f"{made}\nTables and pictures: {folder}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
