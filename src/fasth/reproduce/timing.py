"""The one place that verifies and times a method."""

from __future__ import annotations

import gc
import importlib.metadata
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor

from fasth.environment import describe
from fasth.reproduce.methods import Case

Call = Callable[[], object]
Progress = Callable[[int, int, str], None]  # turns taken, turns in all, what comes next


class WrongAnswer(AssertionError):
    """A method's value or gradients are not what its definition gives."""


def verify(case: Case, reference: tuple[Tensor, ...] | None = None) -> None:
    """Raises ``WrongAnswer`` unless value and gradients agree with the case's reference to rounding.

    The reference is computed, unless it is given.
    An error is measured in the Frobenius norm, relative to the reference. A gradient may cancel to nothing, for one
    with d = 1, and its rounding errors do not: they are at least relative to ‖output‖·‖gradient‖/‖tensor‖.
    """
    out, *gradients = case.step()
    expected_out, *expected_gradients = case.reference() if reference is None else reference
    _compare(case, "the output", out, expected_out)
    _compare(case, "the output without gradients", case.forward(), expected_out)
    size = _norm(expected_out) * _norm(case.gradient)
    for i, (tensor, actual, expected) in enumerate(zip(case.tensors, gradients, expected_gradients, strict=True)):
        what = f"the gradient of {f'parameter {i}' if i else 'x'}"
        length = _norm(tensor)
        _compare(case, what, actual, expected, at_least=size / length if length else 0.0)


def tolerance(dtype: torch.dtype, d: int) -> float:
    """Roundings of d steps in sequence, which add up like a random walk, with room for the constants."""
    return 16 * torch.finfo(dtype).eps * math.sqrt(d)


def _compare(case: Case, what: str, actual: Tensor, expected: Tensor, at_least: float = 0.0) -> None:
    if actual.shape != expected.shape:
        raise WrongAnswer(f"{case.name}: {what} should have shape {tuple(expected.shape)}; got {tuple(actual.shape)}")
    scale = max(_norm(expected), at_least)
    error = _norm(actual.detach().cpu().double() - expected)
    limit = case.slack * tolerance(actual.dtype, case.tensors[0].shape[-1])
    if not error <= limit * scale:  # so that nan fails
        raise WrongAnswer(f"{case.name}: {what} is off by {error / (scale or 1):.1e}; at most {limit:.1e} is rounding")


def _norm(t: Tensor) -> float:
    return t.detach().cpu().double().norm().item()


@dataclass
class Timing:
    """The readings of one method, in seconds for one call."""

    name: str
    what: str  # "step" or "forward"
    status: str = "ok"  # or "stopped", by the time limit; or "wrong", "too slow", "not installed": without readings
    note: str = ""
    calls: int = 1  # in each reading
    readings: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.readings)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.readings)

    @property
    def deviation(self) -> float:
        """The standard deviation, as in the paper's error bars."""
        return statistics.pstdev(self.readings)

    def quantile(self, q: float) -> float:
        """Between the readings by linear interpolation."""
        ordered = sorted(self.readings)
        position = q * (len(ordered) - 1)
        low = math.floor(position)
        return ordered[low] + (position - low) * (ordered[math.ceil(position)] - ordered[low])

    def ratio(self, yardstick: Timing) -> float:
        """How many times the yardstick's time: the ratio of medians."""
        return self.median / yardstick.median

    def ratios(self, yardstick: Timing) -> list[float]:
        """The ratio in each round that both took part in."""
        return [mine / other for mine, other in zip(self.readings, yardstick.readings, strict=False)]


def measure(
    cases: Sequence[Case],
    *,
    what: Sequence[str] = ("step",),
    rounds: int = 30,
    min_time: float = 1e-3,
    time_limit: float = 60.0,
    progress: Progress | None = None,
) -> list[Timing]:
    """Verifies every case, then times them in turns: one reading of each in every round.

    Taking turns, the methods meet the same noise of the machine. A wrong one is marked and not timed.

    Args:
        cases: what to time, at any sizes.
        what: of each case, "step", "forward" or both.
        rounds: the number of readings of each.
        min_time: seconds that a reading lasts at least; fast calls are repeated until then.
        time_limit: seconds for each case. One that needs more is stopped, after one reading at least, and marked.
        progress: called before each verification and each reading.

    Returns:
        A timing for each case and each of ``what``, in this order.
    """
    advance = _counter(progress, len(cases) * (1 + rounds * len(what)))
    turns, references = [], _References()
    for case in cases:
        advance(f"verifying {case.name}")
        fault = _fault(case, references)
        for way in what:
            timing = Timing(case.name, way, "wrong" if fault else "ok", fault)
            call: Call = {"step": case.step, "forward": case.forward}[way]
            turns.append(_Turn(timing, call, case.gradient.device, min_time, time_limit))
    _take_turns(turns, rounds, advance)
    return [turn.timing for turn in turns]


def compare(
    calls: Mapping[str, Call], *, device: torch.device, rounds: int, min_time: float = 1e-3, time_limit: float = 60.0
) -> list[Timing]:
    """Times calls in turns, as ``measure`` does, without knowing what they compute."""
    turns = [_Turn(Timing(name, "call"), call, device, min_time, time_limit) for name, call in calls.items()]
    _take_turns(turns, rounds, lambda label: None)
    return [turn.timing for turn in turns]


def _take_turns(turns: list[_Turn], rounds: int, advance: Callable[[str], None]) -> None:
    with _no_garbage_collection():
        for turn in turns:
            turn.warm_up()
        for _ in range(rounds):
            for turn in turns:
                advance(f"timing {turn.timing.name}")
                turn.take()


def _fault(case: Case, references: _References) -> str:
    try:
        verify(case, references.of(case))
    except WrongAnswer as error:
        return str(error)
    return ""


class _References:
    """References of the cases so far. Several methods may compute one function of the same tensors: one serves all."""

    def __init__(self) -> None:
        self.known: list[tuple[Case, tuple[Tensor, ...]]] = []

    def of(self, case: Case) -> tuple[Tensor, ...]:
        for other, reference in self.known:
            if other.obvious is case.obvious and _all_equal(other, case):
                return reference
        self.known.append((case, case.reference()))
        return self.known[-1][1]


def _all_equal(one: Case, other: Case) -> bool:
    pairs = zip((*one.tensors, one.gradient), (*other.tensors, other.gradient), strict=False)
    return len(one.tensors) == len(other.tensors) and all(torch.equal(a, b) for a, b in pairs)


class _Turn:
    """What one method does when it is its turn."""

    def __init__(self, timing: Timing, call: Call, device: torch.device, min_time: float, time_limit: float) -> None:
        self.timing, self.call, self.device = timing, call, device
        self.min_time = min_time
        self.time_left = time_limit
        self.settles = True

    def warm_up(self) -> None:
        """Finds out how many calls make a reading."""
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
        if self.settles:  # the one before left its own data in the caches; to a slow one that makes no difference
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


def _counter(progress: Progress | None, total: int) -> Callable[[str], None]:
    done = 0

    def advance(label: str) -> None:
        nonlocal done
        if progress is not None:
            progress(done, total, label)
        done += 1

    return advance


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Python's cycle collector would run inside some readings and not others."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_COMPARED = ("geotorch", "torch-householder", "nflows")


def environment(device: str = "cpu") -> dict[str, Any]:
    """The machine, the core and the versions, to stand beside the numbers."""
    found = describe()
    compared = {name: version for name in _COMPARED if (version := _version(name))}
    return {
        **found,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "versions": {**found["versions"], **compared},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
