"""Cases that tests/test_fuzz.py runs in place of real ones: one that fails, one that crashes and one that hangs."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

from fuzz.outcome import Outcome


def prepare() -> None:
    """Nothing to set up."""


def run_case(seed: int, case: int) -> Outcome:
    if case == 120:
        os.kill(os.getpid(), signal.SIGSEGV)
    if case == 240:
        time.sleep(1000)
    return Outcome("troubled", "none", [], Counter(nothing=1), "it is wrong" if case == 3 else None)
