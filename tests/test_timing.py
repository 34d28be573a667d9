"""Verification and timing: what is wrong is named and not timed, what is right is timed in turns."""

from __future__ import annotations

import gc
import json
import math
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fasth.reflections import core
from fasth.tools.device import first_line, require
from fasth.tools.reproduce.methods import LINEAR, METHODS, Case
from fasth.tools.reproduce.timing import WrongAnswer, environment, measure, verify
from fasth.tools.timing import Timing


def case(name: str = "right", function=torch.nn.functional.linear) -> Case:
    built = LINEAR.build(5, 3, torch.float32, "cpu", torch.Generator().manual_seed(0))
    return replace(built, name=name, function=function)


def detached_weight(x, W):
    return torch.nn.functional.linear(x, W.detach()) + 0 * W.sum()


def wrong_without_gradients(x, W):
    return torch.nn.functional.linear(x, W) * (1 if torch.is_grad_enabled() else 2)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x, W: x @ W, "the output is off by"),
        (lambda x, W: x @ W.mT * (1 + 1e-4), "the output is off by 1.0e-04"),
        (lambda x, W: x @ W.mT * math.nan, "the output is off by nan"),
        (detached_weight, "the gradient of parameter 1 is off by 1.0e+00"),
        (wrong_without_gradients, "the output without gradients is off by"),
    ],
)
def test_verify_says_what_differed(function, words):
    with pytest.raises(WrongAnswer, match="a method: ") as caught:
        verify(case("a method", function))
    assert words in str(caught.value)


def test_verify_says_what_shape_was_expected():
    with pytest.raises(WrongAnswer, match=r"should have shape \(3, 5\); got \(1, 3, 5\)"):
        verify(case(function=lambda x, W: x @ W.mT if torch.is_grad_enabled() else (x @ W.mT)[None]))


def test_a_wrong_method_is_marked_and_not_timed():
    right, wrong = measure([case(), case("wrong", lambda x, W: x @ W)], rounds=2)
    assert (right.status, len(right.readings)) == ("ok", 2)
    assert (wrong.status, wrong.readings) == ("wrong", [])
    assert "wrong: the output" in wrong.note


def failing_at(call: int, error: BaseException):
    """A right function, until it is called for so many times."""
    calls = []

    def function(x, W):
        calls.append(None)
        if len(calls) >= call:
            raise error
        return x @ W.mT

    return function


@pytest.mark.parametrize("call", [1, 3, 4, 6], ids=["verifying", "warming up", "first round", "last round"])
@pytest.mark.parametrize("error", [ValueError, torch.OutOfMemoryError, NotImplementedError])
def test_a_method_that_fails_is_marked_and_the_others_go_on(call, error):
    fails = case("fails", failing_at(call, error("out of memory\nTried to allocate")))
    timings = measure([case("before"), fails, case("after")], rounds=3, min_time=0)
    assert [timing.status for timing in timings] == ["ok", "failed", "ok"]
    assert (timings[1].note, timings[1].readings) == ("out of memory", [])
    assert len(timings[0].readings) == len(timings[2].readings) == 3


@pytest.mark.parametrize("call", [1, 3, 6])
def test_an_interruption_is_not_the_failure_of_a_method(call):
    with pytest.raises(KeyboardInterrupt):
        measure([case(function=failing_at(call, KeyboardInterrupt()))], rounds=3, min_time=0)


def test_methods_take_turns():
    calls = []

    def recorded(name):
        def function(x, W):
            calls.append(name)
            return x @ W.mT

        return function

    measure([case(name, recorded(name)) for name in "abc"], rounds=4, min_time=0)
    in_turns = [name for name, before in zip(calls, [None, *calls], strict=False) if name != before]
    assert in_turns[-12:] == list("abc") * 4


def test_a_reading_of_a_fast_method_is_many_calls():
    (timing,) = measure([case()], rounds=3, min_time=2e-3)
    assert timing.calls > 3
    assert all(0 < reading < 2e-3 for reading in timing.readings)


def test_a_slow_method_is_stopped_and_marked_while_others_go_on():
    def slow(x, W):
        time.sleep(0.02)
        return x @ W.mT

    timings = measure([case("slow", slow), case("fast")], rounds=20, time_limit=0.1)
    assert [timing.status for timing in timings] == ["stopped", "ok"]
    assert 1 <= len(timings[0].readings) < 20
    assert f"after {len(timings[0].readings)} readings" in timings[0].note
    assert len(timings[1].readings) == 20


def test_even_the_slowest_has_a_reading():
    (timing,) = measure([case()], rounds=3, time_limit=0)
    assert (timing.status, len(timing.readings)) == ("stopped", 1)


def test_steps_and_forward_passes_are_timed_side_by_side():
    timings = measure([case("a"), case("b")], what=["step", "forward"], rounds=2)
    assert [(t.name, t.what) for t in timings] == [("a", "step"), ("a", "forward"), ("b", "step"), ("b", "forward")]


def test_progress_is_told_before_each_verification_and_reading():
    told = []
    measure([case("a"), case("b")], rounds=3, progress=lambda *news: told.append(news))
    assert told[0] == (0, 8, "verifying a")
    assert told[-1] == (7, 8, "timing b")
    assert [done for done, _, _ in told] == list(range(8))


def test_the_garbage_collector_is_off_while_timing_and_on_again_afterwards():
    seen = []

    def function(x, W):
        seen.append(gc.isenabled())
        return x @ W.mT

    measure([case(function=function)], rounds=1)
    assert seen[0] and not seen[-1]
    assert gc.isenabled()


def test_median_quantiles_and_ratios():
    timing, yardstick = (
        Timing("a", "step", readings=[4.0, 1.0, 2.0, 3.0]),
        Timing("b", "step", readings=[1.0, 2.0, 3.0]),
    )
    assert timing.median == 2.5
    assert [timing.quantile(q) for q in (0, 0.5, 0.75, 1)] == [1.0, 2.5, 3.25, 4.0]
    assert timing.ratio(yardstick) == 1.25
    assert timing.ratios(yardstick) == [4.0, 0.5, 2 / 3]


def test_the_gradients_of_a_step_are_new_each_time():
    for method in METHODS.values():
        if method.installed:
            built = method.build(4, 3, torch.float64, "cpu", torch.Generator().manual_seed(1))
            first, second = built.step(), built.step()
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "gradients add up"
            assert all(tensor.grad is None for tensor in built.tensors)


def test_the_environment_names_machine_threads_and_versions():
    found = environment()
    assert found["cpu"] and found["cores"] >= 1
    assert found["threads"] == torch.get_num_threads()
    assert {"fasth", "python", "torch"} <= set(found["versions"])
    assert found["core"] in {"off", "not built", *core.available_levels()}
    assert found["date"].endswith("+00:00")
    assert found["device"] == "cpu" and "gpu" not in found and "triton" not in found["versions"]


def test_the_environment_of_a_gpu_has_its_name_size_and_versions(monkeypatch):
    properties = SimpleNamespace(major=8, minor=6, multi_processor_count=82, total_memory=24 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr("fasth.tools.device.version", {"triton": "3.7.1"}.get)
    found = environment("cuda:1")
    assert found["device"] == "a GPU" and found["versions"]["triton"] == "3.7.1"
    assert (found["gpu"]["capability"], found["gpu"]["multiprocessors"]) == ("8.6", 82)
    assert (found["gpu"]["cuda"], found["gpu"]["hip"], found["gpu"]["memory"]) == ("12.6", None, 24 << 30)
    assert "torch" in found["versions"] and json.dumps(found)
    monkeypatch.setattr("fasth.tools.device.version", lambda package: None)
    assert "triton" not in environment("cuda")["versions"]


def test_what_an_error_says_in_one_line():
    assert first_line(ValueError("\none\ntwo")) == "one"
    assert first_line(KeyboardInterrupt()) == "KeyboardInterrupt"


@pytest.mark.parametrize("name", ["nonsense", "meta", *([] if torch.cuda.is_available() else ["cuda"])])
def test_a_device_that_is_not_there_is_said_in_one_line(name):
    require("cpu")
    with pytest.raises(ValueError) as caught:
        require(name)
    assert str(caught.value) and "\n" not in str(caught.value)
