"""Python in a process of its own: with other settings, and where it may fork, run out of memory or crash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def python(*arguments: str, timeout: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs it in this directory, with the given environment in place of any choice of core in our own."""
    chosen = ("FASTH_BACKEND", "FASTH_ISA")
    inherited = {name: value for name, value in os.environ.items() if name not in chosen}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=Path(__file__).parent,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def script(code: str, **options: str) -> str:
    """What the code prints. It has to end well."""
    done = python("-c", code, **options)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout
