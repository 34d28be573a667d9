"""The package installs without a compiler and works on the PyTorch path; the source distribution is consistent."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent

# -I and -S keep out the environment's own fasth, which an editable install puts ahead of everything on the path.
USE = """
import sys
target, *path = sys.argv[1:]
sys.path[:] = [target, *sys.path, *path]

import torch
from fasth.tools.problems import DIRECTIONS, Problem, assert_all_close, from_definition, with_gradients

import fasth
from fasth.tools.cli import main
from fasth.reflections import core

assert fasth.__file__.startswith(target), fasth.__file__
assert core.core() is None and core.available_levels() == []
x, V = Problem("", (4, 33), (33, 33)).draw(torch.float32, "cpu")
for direction in DIRECTIONS:
    expected = with_gradients(from_definition, x, V, **direction)
    assert_all_close(with_gradients(fasth.householder, x, V, **direction), expected, V)
main(["info"])
"""


needs_scikit_build_core = pytest.mark.skipif(
    importlib.util.find_spec("scikit_build_core") is None,
    reason="scikit-build-core is not installed, and building in isolation would need the network",
)


@needs_scikit_build_core
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


@needs_scikit_build_core
def test_the_source_distribution_has_no_test_that_reads_a_folder_which_it_leaves_out(tmp_path):
    build = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    run([sys.executable, "-c", build, str(tmp_path)], dict(os.environ), cwd=REPOSITORY)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        paths = {Path(*Path(name).parts[1:]): name for name in files.getnames()}
        found = {path.parts[0] for path in paths if path.parts}
        left_out = {"docs", "benchmarks", "experiments", ".github", ".ci"} - found
        tests = [path for path in paths if path.match("tests/**/*.py") or path.match("tests/*.py")]
        assert left_out and len(tests) > 30
        for path in tests:
            text = files.extractfile(paths[path]).read().decode()
            read = [folder for folder in left_out if f'/ "{folder}"' in text or f"from {folder}" in text]
            assert not read, f"{path} reads {read}: list it in sdist.exclude of pyproject.toml"


def run(command: list[str], environment: dict[str, str], cwd: Path | None = None) -> str:
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
