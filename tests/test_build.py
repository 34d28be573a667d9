"""Without a compiler the package installs all the same, and works on the PyTorch path."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent

# -I and -S keep out the environment's own fasth, which an editable install puts ahead of everything on the path.
USE = """
import sys
target, *path = sys.argv[1:]
sys.path[:] = [target, *sys.path, *path]

import torch
from fasth.problems import DIRECTIONS, Problem, assert_all_close, from_definition, with_gradients

import fasth
from fasth.cli import main
from fasth.reflections import core

assert fasth.__file__.startswith(target), fasth.__file__
assert core.core() is None and core.available_levels() == []
x, V = Problem("", (4, 33), (33, 33)).draw(torch.float32, "cpu")
for direction in DIRECTIONS:
    expected = with_gradients(from_definition, x, V, **direction)
    assert_all_close(with_gradients(fasth.householder, x, V, **direction), expected, V)
main(["info"])
"""


@pytest.mark.skipif(
    importlib.util.find_spec("scikit_build_core") is None,
    reason="scikit-build-core is not installed, and building in isolation would need the network",
)
def test_without_a_compiler_it_installs_and_computes(tmp_path):
    # Neither a required core, nor a core from elsewhere, nor a sanitizer's library for every process.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("FASTH_") and name != "LD_PRELOAD"
    }
    target = tmp_path / "target"
    pip = ["-m", "pip", "--no-input", "--disable-pip-version-check", "install", "--no-index"]
    pip += ["--no-build-isolation", "--no-deps", "--target", str(target), str(REPOSITORY)]
    run([sys.executable, *pip], environment | {"CC": "/bin/false", "CXX": "/bin/false"})
    printed = run([sys.executable, "-I", "-S", "-c", USE, str(target), *sys.path], environment)
    assert "PyTorch: no compiled core was built" in printed


def run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
