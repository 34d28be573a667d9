"""Runs Python in a separate process: with other settings, or where it may fork, run out of memory or crash."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# Forks of a process that has imported torch, which takes ten times as long as everything else that ``fasth info`` does.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch"])


def python(*arguments: str, timeout: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in this directory. ``environment`` replaces the variables that choose a core."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=Path(__file__).parent,
        env=_settings(environment),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def forked(*arguments: str, timeout: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    """``python("-m", …)`` or ``python("-c", …)`` in a fork. Variables that torch reads on import have no effect."""
    with tempfile.TemporaryDirectory() as folder:
        printed = [Path(folder) / name for name in ("stdout", "stderr")]
        process = _FORKS.Process(target=_run, args=(arguments, _settings(environment), printed))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired(arguments, timeout)
        code = process.exitcode
        process.close()
        return subprocess.CompletedProcess(arguments, code, *(path.read_text("utf-8") for path in printed))


def _run(arguments: tuple[str, ...], environment: dict[str, str], printed: list[Path]) -> None:
    for number, path in enumerate(printed, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(Path(__file__).parent)
    option, code, *rest = arguments
    sys.argv = [option, *rest]
    if option == "-m":
        runpy.run_module(code, run_name="__main__", alter_sys=True)
    else:
        exec(code, {"__name__": "__main__"})


def script(code: str, **options: Any) -> str:
    """Runs the code in a fork, where it should succeed, and returns what it prints."""
    return _output(forked("-c", code, **options))


def script_alone(code: str, **options: Any) -> str:
    """Runs ``script`` in a new process, not a fork: for code that forks, runs out of memory or crashes."""
    return _output(python("-c", code, **options))


def _output(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def _settings(environment: dict[str, str]) -> dict[str, str]:
    """The environment of this process without its choice of a core, and with these variables."""
    chosen = ("FASTH_BACKEND", "FASTH_ISA")
    return {name: value for name, value in os.environ.items() if name not in chosen} | environment
