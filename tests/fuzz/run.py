"""Runs cases for some time or up to some number, shows progress, and goes on where the last run ended."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from fuzz.state import Span, State, summary
from fuzz.workers import Ended, Worker, prepared, wait_for

SPAN = 100  # cases that a worker is given at once
SAVED_EVERY = 2.0  # seconds
ROOT = Path(__file__).parents[2]


class Run:
    """The cases of a state that are not done yet, on so many workers. ``module`` has ``prepare`` and ``run_case``."""

    def __init__(self, state: State, cases: int | None, workers: int, module: str = "fuzz.subjects") -> None:
        self.state, self.cases, self.workers, self.module = state, cases, workers, module
        self.waiting = deque(state.missing(cases, SPAN))
        self.interrupted = False

    def __call__(self, seconds: float | None = None) -> None:
        """Until the time is over or all cases are done. Ctrl-C ends it after the spans under way, a second one now."""
        before = {number: signal.signal(number, self._interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        pool = [Worker(self.module) for _ in range(self.workers)] if self.waiting or self.cases is None else []
        started = saved = time.monotonic()
        try:
            while True:
                stopping = self.interrupted or (seconds is not None and time.monotonic() > started + seconds)
                for worker in pool:
                    if not stopping and worker.span is None and (span := self._next()):
                        worker.assign(self.state.seed, span)
                if not (busy := [worker for worker in pool if worker.span]):
                    break
                wait_for(busy)
                pool = [self._collect(worker) for worker in pool]
                if time.monotonic() > saved + SAVED_EVERY:
                    saved = self._save(saved)
        finally:
            self._save(saved)
            for worker in pool:
                worker.stop()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _next(self) -> Span | None:
        if not self.waiting and self.cases is None:
            self.waiting.append((self.state.end, self.state.end + SPAN))
        span = self.waiting.popleft() if self.waiting else None
        self.state.end = max(self.state.end, span[1]) if span else self.state.end
        return span

    def _collect(self, worker: Worker) -> Worker:
        """Takes its result, if there is one. The worker to go on with is another one if this one crashed."""
        if worker.span is None:
            return worker
        try:
            result = worker.result()
        except Ended as end:
            first, last = worker.span
            failure = (end.case, "a crash or a hang", end.reason)
            self._add((end.case, end.case + 1), {"failures": [failure], "subjects": {"crash or hang": 1}})
            self.waiting.extendleft(s for s in ((end.case + 1, last), (first, end.case)) if s[0] < s[1])
            return Worker(self.module)
        if result is not None:
            self._add(worker.span, result)
            worker.span = None
        return worker

    def _add(self, span: Span, result: dict[str, Any]) -> None:
        for case, description, failure in result["failures"]:
            again = f'make fuzz ARGS="--seed {self.state.seed} --case {case}"'
            print(f"\ncase {case} of seed {self.state.seed}: {description}\n  {failure}\n  again: {again}", flush=True)
        self.state.add(span, result)

    def _save(self, saved: float) -> float:
        now = time.monotonic()
        self.state.seconds += now - saved
        self.state.save()
        total = f" of {self.cases:,}" if self.cases else ""
        rate = self.state.done() / max(self.state.seconds, 1e-9)
        line = f"{self.state.done():,}{total} cases, {len(self.state.failures)} failures, {rate:.0f} a second"
        print(f"\r{line}" if sys.stdout.isatty() else line, end="" if sys.stdout.isatty() else "\n", flush=True)
        return now

    def _interrupt(self, number: int, frame: Any) -> None:
        self.interrupted = True
        signal.signal(number, signal.default_int_handler)
        print("\nending with the cases under way; the same command goes on from there", flush=True)


def run_one(seed: int, case: int) -> int:
    """Runs one case in this process and prints its description."""
    outcome = prepared("fuzz.subjects")(seed, case)
    print(f"case {case} of seed {seed}: {outcome.description}")
    print(f"  {'as it should be' if outcome.failure is None else outcome.failure}")
    return 0 if outcome.failure is None else 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("make fuzz", description=sys.modules["fuzz"].__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=None, help="how long, by default 60 if --cases is not given")
    parser.add_argument("--cases", type=int, default=None, help="how many in all, those of earlier runs included")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--case", type=int, default=None, help="run this one case again, and nothing else")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs with this seed did")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "fuzz", help="where the state is kept")
    parser.add_argument("--summary", type=Path, default=None, help="write the summary to this Markdown file, too")
    options = parser.parse_args(arguments)
    if options.case is not None:
        return run_one(options.seed, options.case)
    path = options.out / f"seed-{options.seed}.json"
    if options.fresh:
        path.unlink(missing_ok=True)
    state = State.load(path, options.seed)
    if state.done():
        print(
            f"going on with seed {state.seed}: {state.done():,} cases are done, {len(state.failures)} failed ({path})"
        )
    Run(state, options.cases, options.workers)(60 if options.seconds is None and not options.cases else options.seconds)
    text = summary(state)
    for target in (path.with_suffix(".md"), options.summary):
        if target is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    print(f"\n{text}")
    return 1 if state.failures else 0
