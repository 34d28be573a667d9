"""The Triton kernels compiled for real GPUs, without one: no spills, and no more shared memory than there is.

A few of them; ``make gpu-resources`` compiles all, and writes the table in docs/gpu.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fasth.reflections.plan import COMPACT

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
triton: Any = pytest.importorskip("triton", reason="Triton has no build for this system")
gpu_resources: Any = pytest.importorskip("gpu_resources")

# Triton 3.6, which torch 2.10 comes with, spills registers of a few kernels. They are right, and slower.
SPILLS = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)


def chosen() -> list[Any]:
    """Kernels of LinearSVD's step at a small, a usual and the largest size; the gradient's in both precisions."""
    launches = gpu_resources.launches([64, 1000, 2048], ["float32"], precisions=["ieee"])
    launches += gpu_resources.launches([256], ["bfloat16"], precisions=["ieee"])
    return [one for one in launches if dict(one.constants).get("FORM", COMPACT) == COMPACT]


@pytest.mark.parametrize("target", gpu_resources.TARGETS)
def test_no_spills_and_no_more_shared_memory_than_there_is(target: str) -> None:
    for one, _, resources in gpu_resources.all_resources([(one, target) for one in chosen()]):
        assert resources.spills == 0 or SPILLS, one
        assert resources.shared <= gpu_resources.SHARED_MEMORY[target], one
        assert 0 < resources.registers <= 512


def test_what_is_compiled_is_what_is_launched() -> None:
    names = {one.kernel for one in chosen()}
    assert names == {"factors", "sweep", "gradient", "sums_over_rows", "recurrence", "recurrence_backward"}


def test_products_are_ieee() -> None:
    """Tensor cores would take TF32 without being told: the default of tl.dot."""
    launches = [one for one in chosen() if one.kernel in ("factors", "gradient")]
    for one in launches:
        assert dict(one.constants).get("PRECISION", "ieee") == "ieee"
        assert "mma" not in gpu_resources.assembly(one, "sm_80")
