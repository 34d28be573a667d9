"""Verifies and times the methods that the experiments compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

import fasth
from fasth.tools import device as devices
from fasth.tools.reproduce.methods import Case
from fasth.tools.timing import Call, Timing, Turn, take_turns

Progress = Callable[[int, int, str], None]  # turns taken, turns in all, what comes next


class WrongAnswer(AssertionError):
    """A method's value or gradients differ from its definition's."""


def verify(case: Case, reference: tuple[Tensor, ...] | None = None) -> None:
    """Raises ``WrongAnswer`` unless value and gradients agree with the case's reference to rounding.

    The reference is computed if it is not passed. Errors are measured in the Frobenius norm, relative to the reference.
    A gradient may cancel to zero, as for d = 1, but its rounding errors do not: they are compared with
    ‖output‖·‖gradient‖/‖tensor‖ at least.
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
    """Tolerance for d steps in sequence, whose roundings add up like a random walk, with room for the constants."""
    return 16 * torch.finfo(dtype).eps * math.sqrt(d)


def _compare(case: Case, what: str, actual: Tensor, expected: Tensor, at_least: float = 0.0) -> None:
    if actual.shape != expected.shape:
        raise WrongAnswer(f"{case.name}: {what} should have shape {tuple(expected.shape)}; got {tuple(actual.shape)}")
    scale = max(_norm(expected), at_least)
    error = _norm(actual.detach().cpu().double() - expected)
    limit = case.slack * tolerance(actual.dtype, case.tensors[0].shape[-1])
    if not error <= limit * scale:  # nan fails
        raise WrongAnswer(f"{case.name}: {what} is off by {error / (scale or 1):.1e}; at most {limit:.1e} is rounding")


def _norm(t: Tensor) -> float:
    return t.detach().cpu().double().norm().item()


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

    In turns, all methods are exposed to the same noise of the machine. A method with a wrong answer is marked and not
    timed; a method that raises an error is marked too. The others continue.

    Args:
        cases: the cases to time, of any sizes.
        what: for each case some of: "step", a training step; "single", a training step as single calls between those of
            the other methods, as in a network; "forward", without gradients; "inference", the same within ``cached()``.
        rounds: the number of readings of each.
        min_time: the shortest reading in seconds; fast calls are repeated to reach it.
        time_limit: seconds for each case. A slower one is stopped, after one reading at least, and marked.
        progress: called before each verification and each reading.

    Returns:
        A timing for each case and each of ``what``, in this order.
    """
    advance = _counter(progress, len(cases) * (1 + rounds * len(what)))
    references, faults = _References(), []
    for case in cases:
        advance(f"verifying {case.name}")
        faults.append(_fault(case, references))
    by_way = [_measure(cases, faults, way, rounds, min_time, time_limit, advance) for way in what]
    return [timing for timings in zip(*by_way, strict=True) for timing in timings]


def _measure(
    cases: Sequence[Case],
    faults: Sequence[tuple[str, str]],
    way: str,
    rounds: int,
    min_time: float,
    time_limit: float,
    advance: Callable[[str], None],
) -> list[Timing]:
    turns = []
    for case, (status, note) in zip(cases, faults, strict=True):
        timing = Timing(case.name, way, status, note)
        call: Call = case.step if way in ("step", "single") else case.forward
        turns.append(_Guarded(timing, call, case.gradient.device, 0.0 if way == "single" else min_time, time_limit))
    with fasth.cached() if way == "inference" else nullcontext():
        take_turns(turns, rounds, advance)
    return [turn.timing for turn in turns]


class _Guarded(Turn):
    """A turn that may fail, for example on a GPU with too little memory. An error is recorded instead of raised."""

    def warm_up(self) -> None:
        self._attempt(super().warm_up)

    def take(self) -> None:
        self._attempt(super().take)

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self.timing.status, self.timing.note = "failed", devices.first_line(error)
            self.timing.readings.clear()


def _fault(case: Case, references: _References) -> tuple[str, str]:
    """Verifies a case. Returns its status and a note."""
    try:
        verify(case, references.find(case))
    except WrongAnswer as error:
        return "wrong", str(error)
    except Exception as error:
        return "failed", devices.first_line(error)
    return "ok", ""


class _References:
    """The references of the cases so far. Methods that compute the same function of the same tensors share one."""

    def __init__(self) -> None:
        self.known: list[tuple[Case, tuple[Tensor, ...]]] = []

    def find(self, case: Case) -> tuple[Tensor, ...]:
        for other, reference in self.known:
            if other.obvious is case.obvious and _all_equal(other, case):
                return reference
        self.known.append((case, case.reference()))
        return self.known[-1][1]


def _all_equal(one: Case, other: Case) -> bool:
    pairs = zip((*one.tensors, one.gradient), (*other.tensors, other.gradient), strict=False)
    return len(one.tensors) == len(other.tensors) and all(torch.equal(a, b) for a, b in pairs)


def _counter(progress: Progress | None, total: int) -> Callable[[str], None]:
    done = 0

    def advance(label: str) -> None:
        nonlocal done
        if progress is not None:
            progress(done, total, label)
        done += 1

    return advance


_COMPARED = ("geotorch", "torch-householder", "nflows")


def environment(device: str = "cpu") -> dict[str, Any]:
    """Describes the machine, the core and the versions, to store with the results."""
    found = devices.environment(device)
    compared = {name: version for name in _COMPARED if (version := devices.version(name))}
    return {**found, "versions": {**found["versions"], **compared}}
