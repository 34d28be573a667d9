"""PEFT's own test cases for HRA, with its layers computed by fasth.

PEFT's tests are in its source distribution, and are not copied here:

    pip download --no-deps --no-binary :all: peft==0.21.2 && tar xzf peft-0.21.2.tar.gz
    python benchmarks/peft_cases.py peft-0.21.2

They need datasets, diffusers and parameterized. ``--plain`` runs the same cases on PEFT's own code.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import pytest

import fasth


class Enabled:
    """A plugin of pytest: enabled before the tests are imported, and still at their end."""

    def pytest_configure(self) -> None:
        fasth.peft.enable()

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        from peft.tuners.hra.layer import HRALinear

        assert HRALinear.forward.__module__ == fasth.peft.__name__, "a test has put PEFT's own forward back"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the folder of PEFT's source")
    parser.add_argument("--plain", action="store_true", help="without fasth")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.chdir(options.source)
    sys.path.insert(0, ".")
    words = ["tests/test_custom_models.py", "-k", "hra", "-q", "-c", os.devnull, "--rootdir", ".", "-rs"]
    return pytest.main([*words, "--import-mode=importlib"], plugins=[] if options.plain else [Enabled()])


if __name__ == "__main__":
    sys.exit(main())
