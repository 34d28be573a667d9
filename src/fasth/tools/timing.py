"""Times calls in turns, so that all of them are exposed to the same noise of the machine."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

Call = Callable[[], object]


@dataclass
class Timing:
    """The readings of one method, in seconds for one call."""

    name: str
    what: str  # "step" or "forward"
    status: str = "ok"  # "stopped": the time limit was reached; without readings: "wrong", "failed", "too slow", …
    note: str = ""
    calls: int = 1  # number of calls in each reading
    readings: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.readings)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.readings)

    @property
    def deviation(self) -> float:
        """The standard deviation of the readings, as in the paper's error bars."""
        return statistics.pstdev(self.readings)

    def quantile(self, q: float) -> float:
        """The q-quantile of the readings, by linear interpolation."""
        ordered = sorted(self.readings)
        position = q * (len(ordered) - 1)
        low = math.floor(position)
        return ordered[low] + (position - low) * (ordered[math.ceil(position)] - ordered[low])

    def ratio(self, yardstick: Timing) -> float:
        """The median divided by the yardstick's median."""
        return self.median / yardstick.median

    def ratios(self, yardstick: Timing) -> list[float]:
        """The ratio of readings in each round that both have."""
        return [mine / other for mine, other in zip(self.readings, yardstick.readings, strict=False)]


def compare(
    calls: Mapping[str, Call], *, device: torch.device, rounds: int, min_time: float = 1e-3, time_limit: float = 60.0
) -> list[Timing]:
    """Times calls in turns: one reading of each in every round.

    Args:
        min_time: the shortest reading in seconds; fast calls are repeated to reach it.
        time_limit: seconds for each call. A slower one is stopped, after one reading at least, and marked.
    """
    turns = [Turn(Timing(name, "call"), call, device, min_time, time_limit) for name, call in calls.items()]
    take_turns(turns, rounds, lambda label: None)
    return [turn.timing for turn in turns]


def take_turns(turns: Sequence[Turn], rounds: int, advance: Callable[[str], None]) -> None:
    with _no_garbage_collection():
        for turn in turns:
            turn.warm_up()
        for _ in range(rounds):
            for turn in turns:
                advance(f"timing {turn.timing.name}")
                turn.take()


class Turn:
    """The state of one method while methods are timed in turns."""

    def __init__(self, timing: Timing, call: Call, device: torch.device, min_time: float, time_limit: float) -> None:
        self.timing, self.call, self.device = timing, call, device
        self.min_time = min_time
        self.time_left = time_limit
        self.settles = True

    def warm_up(self) -> None:
        """Determines the number of calls in a reading."""
        if self.timing.status != "ok":
            return
        seconds = self._reading()
        if seconds < 10 * self.min_time:
            seconds = min(self._reading() for _ in range(3))
        self.settles = seconds < 100 * self.min_time
        self.timing.calls = max(1, math.ceil(self.min_time / seconds))

    def take(self) -> None:
        timing = self.timing
        if timing.status != "ok":
            return
        if self.time_left <= 0 and timing.readings:
            timing.status, timing.note = "stopped", f"stopped at the time limit, after {len(timing.readings)} readings"
            return
        start = time.perf_counter()
        if self.settles:  # refills the caches after the previous method; a slow method does not need it
            self.call()
        timing.readings.append(self._reading())
        self.time_left -= time.perf_counter() - start

    def _reading(self) -> float:
        """Seconds for one call, the mean over ``calls``."""
        calls = range(self.timing.calls)
        self._synchronize()
        start = time.perf_counter()
        for _ in calls:
            self.call()
        self._synchronize()
        return (time.perf_counter() - start) / len(calls)

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disables Python's cycle collector, which would run inside some readings and not others."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
