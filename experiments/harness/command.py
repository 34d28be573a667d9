"""The command of an experiment, such as ``python -m experiments.flow``: trains what is missing, then reports."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from experiments.harness.pool import in_parallel
from experiments.harness.results import FILE, OtherExperiment, Record, Results, Run
from fasth.tools.reproduce import timing

BUILD = Path(__file__).parents[2] / "build"
LEAST = {"workers": 0, "rounds": 1, "seeds": 0, "steps": 1}
Options = argparse.Namespace
G = TypeVar("G")


@dataclass(frozen=True)
class Experiment:
    """Describes one experiment to the shared command.

    Args:
        name: the name of its folder.
        about: the description that --help prints.
        found: the names of the results of a run: the keys of the dict that ``train`` returns.
        add_options: adds the experiment's own options to the parser.
        stages: yields lists of runs. Each list is trained before the next one is asked for, so that a later one can
            depend on the results of earlier ones. Is called with the options, the results and the console.
        train: the results of a run. Runs in a worker process. Is called with the run and the folder of the results,
            for other files that it may write.
        label: what the progress bar says about the record of a finished run.
        report: writes tables and figures. Is called as ``stages`` is.
        conditions: what else, beside the versions, has to be the same to add to an existing file.
        rounds: how many times a training step is timed, unless --rounds says otherwise.
    """

    name: str
    about: str
    found: Sequence[str]
    add_options: Callable[[argparse.ArgumentParser], None]
    stages: Callable[[Options, Results, Console], Iterable[Sequence[Run]]]
    train: Callable[[Run, Path], Record]
    label: Callable[[Record], str]
    report: Callable[[Options, Results, Console], None]
    conditions: Callable[[], Record] = dict
    rounds: int = 20


def main(experiment: Experiment, arguments: Sequence[str] | None = None) -> int:
    """Returns 0; 1 if an answer was wrong; 2 for results that it cannot add to; 130 if it was interrupted."""
    options, console = parse(experiment, arguments), Console()
    path = (options.out or BUILD / (f"{experiment.name}-quick" if options.quick else experiment.name)) / FILE
    if options.again:
        path.unlink(missing_ok=True)
    try:
        conditions = experiment.conditions()
        compared = () if options.report else ("versions", *conditions)
        results = Results(path, experiment.found, timing.environment("cpu") | conditions, compared)
        if not options.report:
            for runs in experiment.stages(options, results, console):
                train_missing(experiment, runs, results, options.workers, console)
        experiment.report(options, results, console)
    except OtherExperiment as error:
        print(f"{error}. Take another --out, or --again to replace it", file=sys.stderr)
        return 2
    except timing.WrongAnswer as error:
        print(f"Stopped, because an answer is wrong: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        console.print(f"\nInterrupted. Finished runs are in {path}; the same command resumes.", soft_wrap=True)
        return 130
    console.print(f"Tables and pictures: {path.parent}", soft_wrap=True)
    return 0


def parse(experiment: Experiment, arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments.{experiment.name}",
        description=experiment.about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    experiment.add_options(parser)
    out = f"build/{experiment.name}"
    parser.add_argument("--quick", action="store_true", help="shorter trainings, fewer of them: a few minutes")
    parser.add_argument("--out", type=Path, help=f"where results go; default: {out}, with --quick {out}-quick")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="processes; 0: this one; default: %(default)s"
    )
    parser.add_argument("--rounds", type=int, default=experiment.rounds, help="timed steps; default: %(default)s")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--again", action="store_true", help="delete the results in the folder first")
    either.add_argument("--report", action="store_true", help="train nothing: tables and figures of existing results")
    options = parser.parse_args(arguments)
    for name, least in LEAST.items():
        value = getattr(options, name, None)
        if value is not None and value < least:
            parser.error(f"--{name} should be at least {least}; got {value}")
    return options


def with_options(grid: G, options: Options) -> G:
    """The grid, a dataclass, with the options that share a name with one of its fields and are not None."""
    changes: dict[str, Any] = {field.name: getattr(options, field.name, None) for field in fields(grid)}  # type: ignore[arg-type]
    return replace(grid, **{name: value for name, value in changes.items() if value is not None})  # type: ignore[type-var]


def train_missing(
    experiment: Experiment, runs: Sequence[Run], results: Results, workers: int, console: Console
) -> None:
    calls = [(run, results.path.parent) for run in results.missing(runs)]

    def label(call: tuple[Any, ...], found: Record) -> str:
        return experiment.label(call[0] | found)

    for (run, _), found in in_parallel(experiment.train, calls, workers, console, label):
        results.add(run | found)
