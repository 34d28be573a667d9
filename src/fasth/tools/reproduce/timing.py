"""Verifying and timing the methods that the experiments compare."""

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

    Taking turns, the methods meet the same noise of the machine. A wrong one is marked and not timed, and one that
    raises an error is marked too: the others go on.

    Args:
        cases: what to time, at any sizes.
        what: of each case some of: "step", a training step; "single", the same as single calls, between which the other
            methods have theirs, as in a network; "forward", without gradients; "inference", that within ``cached()``.
        rounds: the number of readings of each.
        min_time: seconds that a reading lasts at least; fast calls are repeated until then.
        time_limit: seconds for each case. One that needs more is stopped, after one reading at least, and marked.
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
    return [timing for of_case in zip(*by_way, strict=True) for timing in of_case]


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
    """The turn of a method that may fail, on a GPU of too little memory for one: that is marked, and not raised."""

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
    """The status of a case, and what there is to say of it."""
    try:
        verify(case, references.of(case))
    except WrongAnswer as error:
        return "wrong", str(error)
    except Exception as error:
        return "failed", devices.first_line(error)
    return "ok", ""


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
    """The machine, the core and the versions, to stand beside the numbers."""
    found = devices.environment(device)
    compared = {name: version for name in _COMPARED if (version := devices.version(name))}
    return {**found, "versions": {**found["versions"], **compared}}
