from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile

import pytest
import torch
from hypothesis import settings

from fasth.reflections import core, planner

# New examples on every run at home; the same ones where a run decides whether a change goes in.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


# Tests should not depend on this machine's tuning file.
os.environ["FASTH_CACHE_DIR"] = tempfile.mkdtemp(prefix="fasth-tests-")
atexit.register(shutil.rmtree, os.environ["FASTH_CACHE_DIR"], ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the tests run, for example cuda")
    parser.addoption("--dtype", default=None, help="one dtype for all tests that take any, for example float32")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--device"))


KERNELS = planner.kernels_setting() == "cpu"  # this process interprets the Triton kernels
collect_ignore = [] if KERNELS else ["test_kernels.py"]
if KERNELS:
    import numpy

    numpy.seterr(all="ignore")  # the interpreter computes in NumPy, which warns about infinity and NaN
LEVELS = core.available_levels()


@pytest.fixture
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each backend: PyTorch, and the compiled core for the best instruction set that this machine has.

    Tests marked ``every_level`` run with every instruction set. The Triton kernels are interpreted in a process of
    their own: ``make test-kernels``.
    """
    if not KERNELS:
        monkeypatch.setattr(core, "_core", None if request.param == "pytorch" else core.load(request.param))
    return request.param


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``dtype`` is every dtype, ``precise`` those that compute as well as store; --dtype picks one of them."""
    chosen = [mark for mark in metafunc.definition.iter_markers("parametrize") if mark.args[0] == "path"]
    if "path" in metafunc.fixturenames and not chosen:
        every_level = metafunc.definition.get_closest_marker("every_level")
        levels = LEVELS if every_level else LEVELS[-1:]
        metafunc.parametrize("path", ["triton"] if KERNELS else ["pytorch", *levels], indirect=True)
    only = metafunc.config.getoption("--dtype")
    for fixture, names in (
        ("dtype", ["float64", "float32", "bfloat16", "float16"]),
        ("precise", ["float64", "float32"]),
    ):
        if fixture in metafunc.fixturenames:
            names = [name for name in names if only in (None, name)]
            metafunc.parametrize(fixture, [getattr(torch, name) for name in names], ids=names)


def pytest_collection_finish() -> None:
    """Excludes what has been imported from garbage collections: a full one takes 0.01 s instead of 0.3."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips half precision with the compiled core, which does not support it: the test would repeat PyTorch's."""
    half = (torch.bfloat16, torch.float16)
    items[:] = [
        item
        for item in items
        if (parameters := getattr(item, "callspec", None)) is None
        or parameters.params.get("path") not in LEVELS
        or not any(value in half for value in parameters.params.values() if isinstance(value, torch.dtype))
    ]


@pytest.fixture
def set_threads():
    """``torch.set_num_threads``, undone afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def nothing_remembered():
    """Plans that are made in the test, and forgotten after it."""
    planner.forget_plans()
    yield
    planner.forget_plans()
