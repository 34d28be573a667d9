"""The command ``fasth``, as a user runs it."""

from __future__ import annotations

import json
import platform

import pytest
import torch
from processes import python

import fasth
from fasth.cli import main
from fasth.reflections import native

needs_core = pytest.mark.skipif(not native.available_levels(), reason="no compiled core was built")


def lines(printed: str) -> dict[str, str]:
    """The table that ``info`` prints, by the first column."""
    return dict(line.split("  ", 1) for line in printed.splitlines())


def info(*arguments: str, **environment: str) -> dict[str, str]:
    done = python("-m", "fasth", *arguments, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    return {name: value.strip() for name, value in lines(done.stdout).items()}


def test_info_names_versions_machine_and_threads():
    found = info("info", OMP_NUM_THREADS="1")
    assert (found["fasth"], found["torch"]) == (fasth.__version__, torch.__version__)
    assert found["python"] == platform.python_version()
    assert found["threads"] == "1"
    assert found["CPU"]
    assert found["levels of this machine"].split(", ")[-1] == native.machine_level()
    assert (found["levels built"] == "none") == (not native.available_levels())


@needs_core
def test_info_is_what_python_m_fasth_does_by_itself():
    found = info()
    assert found["eager CPU work"] == f"compiled core, {native.available_levels()[-1]}"
    assert found["OpenMP"] in ("yes", "no, the core runs on one thread")


@needs_core
def test_info_says_that_the_core_is_switched_off():
    found = info("info", FASTH_CORE="off")
    assert found["eager CPU work"] == "PyTorch: the core is switched off by FASTH_CORE"
    assert found["FASTH_CORE"] == "off"


@needs_core
def test_info_follows_the_forced_instruction_set():
    found = info("info", FASTH_ISA="baseline")
    assert found["eager CPU work"] == "compiled core, baseline"
    assert found["FASTH_ISA"] == "baseline"


@needs_core
def test_json_for_a_program_to_read():
    done = python("-m", "fasth", "info", "--json", FASTH_ISA="baseline", OMP_NUM_THREADS="1")
    found = json.loads(done.stdout)
    assert (found["core"], found["threads"]) == ("baseline", 1)
    assert found["settings"]["FASTH_ISA"] == "baseline"
    assert set(native.available_levels()) <= set(found["levels"]["built"])


def test_an_instruction_set_that_is_not_here_is_an_error_without_a_traceback():
    done = python("-m", "fasth", "info", FASTH_ISA="nonsense")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("fasth: FASTH_ISA should be one of ")
    assert done.stderr.endswith("; got 'nonsense'\n")


def test_without_a_command_it_prints_help(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: fasth ")
    assert "info" in printed


def test_an_unknown_command_is_an_error(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["nonsense"])
    assert caught.value.code == 2
    assert "nonsense" in capsys.readouterr().err
