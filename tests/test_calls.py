"""How many Python calls a pass takes: benchmarks/calls.py, with the bounds that the design sets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fasth.reflections import core


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """benchmarks/calls.py, imported."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    import calls

    yield calls
    del sys.modules["calls"]


@pytest.mark.skipif(core.core() is None, reason="no compiled core is built, or it is switched off")
@pytest.mark.parametrize(
    ("name", "most_calls", "most_files"),
    [
        ("LinearSVD", 15, 6),
        ("LinearSVD, and backward", 18, 6),
        ("householder", 11, 3),
        ("Conv2dSVD", 23, 7),
        ("RNNSVD", 57, 9),
        ("SVDTransform, and log |det W|", 28, 9),
        ("SVDTransform.call_and_ladj", 24, 9),
    ],
)
def test_a_pass_takes_few_calls_in_few_files(calls: Any, name: str, most_calls: int, most_files: int) -> None:
    found = calls.count(calls.passes()[name])
    assert found.calls <= most_calls and found.files <= most_files, found


def test_a_call_of_a_function_of_fasth_is_counted_and_others_are_not(calls: Any) -> None:
    def run() -> None:
        sorted([2, 1], key=lambda number: -number)
        core.in_use()
        core.in_use()

    found = calls.count(run)
    assert found.calls >= 2 and found.files == 1 and found.changes == 0
