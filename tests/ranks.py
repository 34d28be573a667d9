"""Processes that talk to each other by torch.distributed, to which a test sends functions."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = 120.0  # seconds, of a collective and of a function


class Ranks:
    """``ranks(function, *arguments)`` runs it on all of them, and returns what it returns on each.

    They start with the first call, on gloo, and serve all others. After a failure they are stopped, since some may wait
    for the one that failed, and the next call starts new ones. None outlives the test's process.
    """

    def __init__(self, size: int, directory: Path) -> None:
        self.size, self.directory, self.starts = size, directory, 0
        self.members: list[tuple[Any, Connection]] = []

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        if not self.members:
            self._start()
        for _, connection in self.members:
            connection.send((function, arguments))
        answers: dict[int, Any] = {}
        try:
            while len(answers) < self.size:
                rank, answer = self._next_answer(set(range(self.size)) - set(answers))
                answers[rank] = answer
        except BaseException:
            self.stop()
            raise
        return [answers[rank] for rank in range(self.size)]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.starts += 1
        meeting = self.directory / f"meeting{self.starts}"
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, meeting.as_uri(), rank, self.size), daemon=True)
            process.start()
            theirs.close()
            self.members.append((process, ours))

    def _next_answer(self, waiting: set[int]) -> tuple[int, Any]:
        ready = wait([self.members[rank][1] for rank in waiting], TIMEOUT)
        if not ready:
            raise AssertionError(f"no answer from ranks {waiting} for {TIMEOUT} seconds")
        rank = next(rank for rank in waiting if self.members[rank][1] is ready[0])
        try:
            succeeded, answer = self.members[rank][1].recv()
        except EOFError:
            raise AssertionError(f"rank {rank} ended") from None
        if not succeeded:
            raise AssertionError(f"on rank {rank}:\n{answer}")
        return rank, answer

    def stop(self) -> None:
        for process, connection in self.members:
            connection.close()
            process.kill()
        for process, _ in self.members:
            process.join()
        self.members = []


def _serve(connection: Connection, meeting: str, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=timeout)
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, function(*arguments)))
        except Exception:
            connection.send((False, traceback.format_exc()))
