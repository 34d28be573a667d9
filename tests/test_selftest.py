"""The core's own test, a C++ program without Python (native/selftest.cpp), passes, and would notice an error."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NATIVE = Path(__file__).parent.parent / "native"
# Kept, so that only a change of the core compiles again; one for each environment, since several may run at a time.
BUILD = NATIVE.parent / "build" / f"selftest-{Path(sys.prefix).name.lstrip('.')}"
FORMS = ("full", "triangular", "compact")
KINDS = {
    *(f"householder, {form}" for form in FORMS),
    *(f"svd_linear, {form}" for form in FORMS),
    "svd_linear, one matrix, compact",
    *(f"recurrence, {f}" for f in ("tanh", "relu", "modrelu")),
}


@pytest.fixture(scope="module")
def programs() -> list[Path]:
    cmake, ninja, eigen = _tool("cmake"), _tool("ninja"), _eigen()
    if not (cmake and ninja and eigen and shutil.which(os.environ.get("CXX", "c++"))):
        pytest.skip("needs a C++ compiler, CMake, Ninja and Eigen's headers")
    options = [f"-DCMAKE_MAKE_PROGRAM={ninja}", "-DFASTH_SELFTEST_ONLY=ON", f"-DEIGEN_INCLUDE_DIR={eigen}"]
    names = ["selftest_baseline_float", "selftest_baseline_double"]
    for command in (["-S", NATIVE, "-B", BUILD, "-G", "Ninja", *options], ["--build", BUILD, "--target", *names]):
        done = _run(cmake, *command)
        assert done.returncode == 0, done.stdout + done.stderr
    return [BUILD / name for name in names]


def test_every_kind_of_call_agrees_with_the_definition(programs):
    for program in programs:
        done = _run(program)
        assert done.returncode == 0, done.stdout + done.stderr
        assert {kind: failed for kind, (_, failed) in _counts(done.stdout).items()} == dict.fromkeys(KINDS, 0)
        assert all(compared >= 200 for compared, _ in _counts(done.stdout).values())


def test_an_error_is_found_in_every_kind_of_call(programs):
    """Tests float, which has the larger tolerances."""
    done = _run(programs[0], "--plant-error")
    assert done.returncode == 1, done.stdout + done.stderr
    counts = _counts(done.stdout)
    assert counts.keys() == KINDS and all(failed > 0 for _, failed in counts.values()), done.stdout


def test_an_unknown_argument_is_an_error(programs):
    done = _run(programs[0], "--plant")
    assert done.returncode == 2 and "--plant-error; got --plant" in done.stderr


def _counts(printed: str) -> dict[str, tuple[int, int]]:
    """Maps each kind of call to its number of comparisons, and how many of them failed."""
    lines = re.findall(r"^(\S.*?) +worst error .* (\d+) comparisons, (\d+) failed$", printed, re.MULTILINE)
    return {kind: (int(compared), int(failed)) for kind, compared, failed in lines}


def _run(*command: object) -> subprocess.CompletedProcess[str]:
    # A sanitizer's library is for Python, which loads a core that was built with it.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return subprocess.run([str(c) for c in command], env=environment, capture_output=True, text=True, timeout=300)


def _tool(name: str) -> str | None:
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


def _eigen() -> Path | None:
    folders = [Path(path) / "cmeel.prefix/include/eigen3" for path in sys.path]
    return next((folder for folder in folders if folder.exists()), None)
