"""The fuzzer: its reference is the definition, it finds planted bugs, goes on where it ended and notices a crash."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz import layers, maps, reference, subjects, workers
from fuzz.draws import Draw
from fuzz.run import Run
from fuzz.state import State, summary
from fuzz.subjects import run_case

from fasth.adapters import turns
from fasth.nn import cache
from fasth.nn.linear import LinearSVD
from fasth.reflections import autograd, core, definition
from fasth.tools.problems import DIRECTIONS, PROBLEMS, Problem, assert_all_close, from_definition, with_gradients

SEED = 5


@pytest.fixture(autouse=True)
def as_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition, "householder", reference.householder)
    monkeypatch.setattr(core, "_core", core._core)
    monkeypatch.setattr(Draw, "threads", lambda draw: None)  # they spin while they wait, which costs seconds


def failures(name: str, cases: int) -> int:
    """Number of failures among the first cases of one subject."""
    found = 0
    for case in range(cases):
        draw = Draw(SEED, case)
        try:
            subjects.SUBJECTS[name].run(draw)
        except Exception:
            found += 1
    return found


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
@pytest.mark.parametrize("direction", DIRECTIONS, ids=lambda d: "-".join(k for k in d if d[k]) or "Q")
def test_the_reference_is_the_definition(
    problem: Problem, direction: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, V = problem.draw(torch.float64, "cpu")
    actual = with_gradients(from_definition, x, V, **direction)
    monkeypatch.undo()
    expected = with_gradients(from_definition, x, V, **direction)
    assert_all_close(actual, expected, V.triu() if direction["triangular"] else V)


def test_cases_are_as_they_should_be() -> None:
    outcomes = [run_case(SEED, case) for case in range(300)]
    assert [(case, o.failure) for case, o in enumerate(outcomes) if o.failure is not None] == []
    assert all(o.actions for o in outcomes)
    assert len({o.subject for o in outcomes}) >= len(subjects.SUBJECTS) - 1  # compiling is rare


def test_a_case_depends_on_its_seed_and_number_alone() -> None:
    first = [run_case(SEED, case).notes for case in (7, 8)]
    torch.randn(100)
    assert [run_case(SEED, case).notes for case in (7, 8)] == first
    assert run_case(SEED + 1, 7).notes != first[0]


def test_an_error_without_words_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(draw: Draw) -> None:
        raise AssertionError

    monkeypatch.setattr(subjects, "SUBJECTS", {"one": subjects.Subject(1, fails)})
    assert run_case(SEED, 0).failure == "AssertionError in fails: "


# Planted bugs.


@pytest.mark.parametrize(("name", "module", "cases"), [("linear layers", layers, 60), ("maps of images", maps, 40)])
def test_a_stale_weight_is_found(name: str, module: Any, cases: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.state, "enabled", True)  # each layer keeps its first weight
    monkeypatch.setattr(module, "cached", contextlib.nullcontext)
    assert failures(name, cases) > cases // 6


def test_a_wrong_sign_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = autograd.Householder.backward

    def negated(ctx: Any, g: torch.Tensor) -> Any:
        of_x, of_V, none = backward(ctx, g)
        return of_x, None if of_V is None else -of_V, none

    monkeypatch.setattr(autograd.Householder, "backward", staticmethod(negated))
    assert failures("householder", 60) > 10


def test_a_small_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = LinearSVD._multiply
    monkeypatch.setattr(LinearSVD, "_multiply", lambda self, x: multiply(self, x) * (1 + 2**-9))
    assert failures("linear layers", 60) > 5


def test_an_adapter_that_is_merged_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    transposed = turns.ReflectionsTurn.transposed
    monkeypatch.setattr(turns.ReflectionsTurn, "transposed", lambda self, x: transposed(self, x) * self.signs)
    assert failures("adapters", 60) > 3


# Runs.


def fuzz(tmp_path: Path, cases: int, count: int = 1) -> State:
    state = State.load(tmp_path / "state.json", SEED)
    Run(state, cases, count, module="fuzz.troubled")()
    return state


def test_a_crash_and_a_hang_are_reported_and_the_other_cases_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "TIME_LIMIT", 1.0)
    state = fuzz(tmp_path, 250, count=2)
    assert state.spans == [(0, 250)] and state.subjects == {"troubled": 248, "crash or hang": 2}
    assert {case: failure for case, _, failure in state.failures} == {
        3: "it is wrong",
        120: "the process ended with exit code -11",
        240: "it hangs: no answer after 1 seconds",
    }
    printed = capfd.readouterr().out
    assert all(f'--seed {SEED} --case {case}"' in printed for case in (3, 120, 240))


def test_a_run_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    assert fuzz(tmp_path, 50).done() == 50
    state = fuzz(tmp_path, 60)
    assert state.spans == [(0, 60)] and state.actions == {"nothing": 60}
    assert [case for case, *_ in state.failures] == [3]
    assert "60 cases" in summary(state) and "case 3" in summary(state)
    assert sum(state.versions.values()) == 60


def test_what_is_missing_is_run_first(tmp_path: Path) -> None:
    state = State(SEED, tmp_path / "state.json")
    for span in ((0, 100), (200, 250)):
        state.add(span, {"failures": []})
    assert list(state.missing(300, 60)) == [(100, 160), (160, 200), (250, 300)]
    state.end = 250
    assert list(state.missing(None, 100)) == [(100, 200)]
