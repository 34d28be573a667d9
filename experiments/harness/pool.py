"""Calls that take minutes, several at a time, with a progress bar."""

from __future__ import annotations

import logging
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Arguments = tuple[Any, ...]


def in_parallel(
    function: Callable[..., Any],
    calls: Sequence[Arguments],
    workers: int,
    console: Console,
    label: Callable[[Arguments, Any], str],
) -> Iterator[tuple[Arguments, Any]]:
    """The arguments and the result of each call, in the order in which the calls end.

    Each worker is a process of one thread; with ``workers=0`` the calls run in this process, one after the other. The
    bar shows the label of the call that ended last. An interruption or an error ends all workers.
    """
    if not calls:
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("runs"), TimeElapsedColumn(), TextColumn("left:"))
    bar = Progress(*columns, TimeRemainingColumn(), TextColumn("{task.description}"), console=console, transient=True)
    with bar:
        row = bar.add_task("", total=len(calls))
        for arguments, result in _in_processes(function, calls, workers) if workers else _here(function, calls):
            yield arguments, result
            bar.update(row, advance=1, description=label(arguments, result))


def _here(function: Callable[..., Any], calls: Sequence[Arguments]) -> Iterator[tuple[Arguments, Any]]:
    return ((arguments, function(*arguments)) for arguments in calls)


def _in_processes(
    function: Callable[..., Any], calls: Sequence[Arguments], workers: int
) -> Iterator[tuple[Arguments, Any]]:
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_one_thread) as pool:
        futures = {pool.submit(function, *arguments): arguments for arguments in calls}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()  # a call may take a minute
            raise


def _one_thread() -> None:
    """One process per core with one thread each has a higher throughput than one process with many threads."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles interruptions
    torch.set_num_threads(1)
    logging.getLogger("fasth").setLevel(logging.ERROR)  # to_svd warns about unconverted layers, once for each run
