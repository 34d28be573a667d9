"""Worker processes that run cases, of which one may crash or hang.

A worker writes the number of the case that it is about to run into shared memory. So the parent knows which case it
was, reports it as failed, starts another worker and goes on with the next case.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

from fuzz.outcome import Outcome
from fuzz.state import Span

NOT_STARTED = -1  # in the place of a case
TIME_LIMIT = 300.0  # seconds for one case; compiling takes some on a busy machine


class Ended(Exception):
    """The worker crashed or hung, at this case."""

    def __init__(self, case: int, reason: str) -> None:
        super().__init__(reason)
        self.case, self.reason = case, reason


class Worker:
    """A process that runs one span of cases after the other."""

    def __init__(self, module: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.current = context.Value("q", NOT_STARTED, lock=False)
        with _sleeping_threads():
            self.process = context.Process(target=_serve, args=(theirs, self.current, module), daemon=True)
            self.process.start()
        theirs.close()
        self.span: Span | None = None
        self.seen, self.since = NOT_STARTED, 0.0  # the case that it ran when the parent looked last, and since when

    def assign(self, seed: int, span: Span) -> None:
        self.span, self.seen, self.since = span, NOT_STARTED, time.monotonic()
        self.current.value = NOT_STARTED
        self.connection.send((seed, span))

    def result(self) -> dict[str, Any] | None:
        """The result of the span, or None while it runs."""
        if self.connection.poll():
            try:
                found: dict[str, Any] = self.connection.recv()
                return found
            except (EOFError, ConnectionError):
                self.process.join()
                raise self._ended(f"the process ended with exit code {self.process.exitcode}") from None
        case = self.current.value
        if case == NOT_STARTED or case != self.seen:
            self.seen, self.since = case, time.monotonic()
        elif time.monotonic() - self.since > TIME_LIMIT:
            self.stop()
            raise self._ended(f"it hangs: no answer after {TIME_LIMIT:.0f} seconds")
        return None

    def _ended(self, reason: str) -> Exception:
        case = self.current.value
        return Ended(case, reason) if case != NOT_STARTED else RuntimeError(f"a worker should start, but {reason}")

    def stop(self) -> None:
        """Lets it end by itself if it has nothing to do."""
        self.connection.close()
        if self.span is None:
            self.process.join(10)
        self.process.kill()
        self.process.join()


def wait_for(workers: list[Worker]) -> None:
    """Until one of them has something to say, for a second at most."""
    wait([worker.connection for worker in workers], timeout=1.0)


@contextmanager
def _sleeping_threads() -> Iterator[None]:
    """Threads of OpenMP that sleep while they wait: with several workers on few cores, spinning would cost seconds."""
    before = os.environ.get("OMP_WAIT_POLICY")
    os.environ["OMP_WAIT_POLICY"] = "passive"
    try:
        yield
    finally:
        del os.environ["OMP_WAIT_POLICY"]
        if before is not None:
            os.environ["OMP_WAIT_POLICY"] = before


# In the worker.


def _serve(connection: Connection, current: Any, module: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent says when to end
    run_case = prepared(module)
    while True:
        try:
            seed, span = connection.recv()
        except EOFError:
            return
        connection.send(_run_span(run_case, seed, span, current))


def prepared(module: str) -> Callable[[int, int], Outcome]:
    """``run_case`` of the module, in a process that is set up for it."""
    cases = importlib.import_module(module)
    cases.prepare()
    return cases.run_case


def _run_span(run_case: Callable[[int, int], Outcome], seed: int, span: Span, current: Any) -> dict[str, Any]:
    """Runs a span; returns counts of its cases by subject, dtype and action, and the failures."""
    subjects: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    actions: Counter[str] = Counter()
    failures: list[tuple[int, str, str]] = []
    for case in range(*span):
        current.value = case
        outcome = run_case(seed, case)
        subjects[outcome.subject] += 1
        dtypes[outcome.dtype] += 1
        actions.update(outcome.actions)
        if outcome.failure is not None:
            failures.append((case, outcome.description, outcome.failure))
    return {"subjects": subjects, "dtypes": dtypes, "actions": actions, "failures": failures}
