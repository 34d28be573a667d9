"""The command ``fasth``, as a user runs it."""

from __future__ import annotations

import importlib.util
import json
import platform

import pytest
import torch
from processes import forked, python

import fasth
from fasth.reflections import core
from fasth.tools.cli import main

KERNELS = importlib.util.find_spec("triton") is not None
needs_core = pytest.mark.skipif(not core.available_levels(), reason="no compiled core was built")


def lines(printed: str) -> dict[str, str]:
    """The table that ``info`` prints, by the first column."""
    return dict(line.split("  ", 1) for line in printed.splitlines())


def info(*arguments: str, **environment: str) -> dict[str, str]:
    done = forked("-m", "fasth", *arguments, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    return {name: value.strip() for name, value in lines(done.stdout).items()}


def test_info_names_versions_machine_and_threads():
    done = python("-m", "fasth", "info", OMP_NUM_THREADS="1")
    assert (done.returncode, done.stderr) == (0, "")
    found = {name: value.strip() for name, value in lines(done.stdout).items()}
    assert (found["fasth"], found["torch"]) == (fasth.__version__, torch.__version__)
    assert found["python"] == platform.python_version()
    assert found["threads"] == "1"
    assert found["CPU"]
    assert found["levels of this machine"].split(", ")[-1] == core.machine_level()
    assert (found["levels built"] == "none") == (not core.available_levels())


@needs_core
def test_info_is_what_python_m_fasth_does_by_itself():
    found = info()
    assert found["eager CPU work"] == f"compiled core, {core.available_levels()[-1]}"
    assert found["OpenMP"] in ("yes", "no, the core runs on one thread")


@needs_core
def test_info_says_that_the_core_is_switched_off():
    found = info("info", FASTH_BACKEND="torch")
    assert found["eager CPU work"] == "PyTorch: the core is switched off by FASTH_BACKEND"
    assert found["FASTH_BACKEND"] == "torch"


@needs_core
@pytest.mark.parametrize(
    ("value", "work"), [("auto", "compiled core"), ("Core ", "compiled core"), (" TORCH", "PyTorch"), ("", "compiled")]
)
def test_the_backend(value, work):
    assert info("info", FASTH_BACKEND=value)["eager CPU work"].startswith(work)


def test_info_says_which_path_a_gpu_has():
    work = "Triton kernels for few rows" if KERNELS else "PyTorch: Triton is not installed"
    assert info("info")["GPU work"].startswith(work)
    assert info("info", FASTH_BACKEND="torch")["GPU work"].startswith("PyTorch: the Triton kernels are switched off")
    assert info("info")["GPU"] == (
        torch.cuda.get_device_name() if torch.cuda.is_available() else "none that torch sees"
    )


@pytest.mark.skipif(not KERNELS, reason="Triton has no build for this system")
def test_info_says_that_the_kernels_are_interpreted():
    found = info("info", FASTH_BACKEND="triton", TRITON_INTERPRET="1")
    assert found["eager CPU work"].startswith("Triton kernels, in Triton's interpreter")
    assert (found["FASTH_BACKEND"], found["TRITON_INTERPRET"]) == ("triton", "1")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"FASTH_BACKEND": "cuda"}, "FASTH_BACKEND should be one of auto, core, torch, triton; got 'cuda'"),
        pytest.param(
            {"FASTH_BACKEND": "triton"},
            "FASTH_BACKEND=triton needs a GPU, and torch sees none" if KERNELS else "FASTH_BACKEND=triton needs Triton",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and it is no error"),
        ),
    ],
)
def test_settings_that_mean_nothing_are_errors(environment, words):
    done = forked("-m", "fasth", "info", **environment)
    assert (done.returncode, done.stdout) == (2, "") and "Traceback" not in done.stderr
    assert words in done.stderr
    # A program that imports fasth is told at its first product, and not before.
    code = "import fasth, torch; print('imported'); fasth.LinearSVD(3, 3)(torch.ones(3))"
    done = forked("-c", code, **environment)
    assert done.returncode == 1 and done.stdout == "imported\n" and words in done.stderr


def test_a_backend_that_is_not_built_is_an_error(tmp_path):
    done = forked("-m", "fasth", "info", FASTH_BACKEND="core", FASTH_CORE_DIR=str(tmp_path))
    assert done.returncode == 2 and "no compiled core was built" in done.stderr


@needs_core
@pytest.mark.parametrize("level", core.available_levels())
def test_info_follows_the_forced_instruction_set(level):
    for spelled in (level, level.upper(), f" {level} "):
        found = info("info", FASTH_ISA=spelled)
        assert found["eager CPU work"] == f"compiled core, {level}"
        assert found["FASTH_ISA"] == spelled.strip()


@needs_core
def test_json_for_a_program_to_read():
    level = core.available_levels()[0]
    done = forked("-m", "fasth", "info", "--json", FASTH_ISA=level)
    found = json.loads(done.stdout)
    assert found["core"] == level and found["threads"] >= 1
    assert found["settings"]["FASTH_ISA"] == level
    assert set(core.available_levels()) <= set(found["levels"]["built"])


def test_an_instruction_set_that_is_not_here_is_an_error_without_a_traceback():
    done = forked("-m", "fasth", "info", FASTH_ISA="nonsense")
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
