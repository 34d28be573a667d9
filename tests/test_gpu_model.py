"""The cost model that chooses between paths on a GPU: that it counts what is launched, and what follows from it."""

from __future__ import annotations

import math

import pytest
import torch

from fasth.reflections import backends, gpu_model, heuristics
from fasth.reflections.gpu_model import A100, GPU, GPUS, H100, LATENCY
from fasth.reproduce import counts
from fasth.reproduce.methods import COMPACT, FULL, TRIANGULAR, Method

CUDA = heuristics.Where("cuda", torch.float32)
FREE = GPU("one that takes launches alone", 10**9, 1e30, 1e30, 0.0)

each_gpu = pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
each_size = pytest.mark.parametrize("d", [64, 256, 768, 1024, 2048])


@each_size
@pytest.mark.parametrize("method", [FULL, TRIANGULAR], ids=lambda method: method.name)
def test_launches_are_those_that_are_counted(method: Method, d: int) -> None:
    k, triangular = heuristics.block_size_by_rule(d, False), method is TRIANGULAR
    estimated = gpu_model.blocks(FREE, 32, d, d, triangular, k) / LATENCY
    assert estimated == pytest.approx(counts.count(method, d, 32).launches, abs=8)
    by_kernels = counts.by_kernels(method, d, 32)
    if by_kernels is not None:
        assert by_kernels.launches == 4
        steps = gpu_model.sweep(FREE, 32, d, d, d * d)
        assert gpu_model.kernels(FREE, 32, d, d, triangular) == pytest.approx(2 * LATENCY + 2 * steps)


@each_gpu
@each_size
def test_few_rows_take_the_kernels_and_many_are_formed(gpu: GPU, d: int) -> None:
    k = heuristics.block_size_by_rule(d, False)
    for triangular in (False, True):
        if d <= 1024 or triangular:
            assert gpu_model.kernel_rows(gpu, d, d, triangular, k) >= 32
        assert d / 4 <= gpu_model.forming_rows(gpu, d, d, triangular, k) < 100 * d


@each_gpu
def test_a_faster_gpu_and_fewer_rows_take_no_longer(gpu: GPU) -> None:
    for d in (64, 512, 2048):
        for rows in (1, 32, 500):
            times = [gpu_model.applying(gpu, n, d, d, True, 128) for n in (rows, 2 * rows)]
            assert times[0] <= times[1]
    assert gpu_model.kernels(H100, 32, 1024, 1024, True) <= gpu_model.kernels(A100, 32, 1024, 1024, True)


def test_rows_that_no_program_holds_and_states_that_no_memory_should() -> None:
    assert gpu_model.kernels(A100, 1, 10, 2049, False) == math.inf
    assert gpu_model.kernels(A100, 10**6, 2048, 2048, False) == math.inf
    assert gpu_model.kernel_rows(A100, 2048, 2048, False, 256) * 2048 * 64 * 8 <= gpu_model.MOST_STATES


def test_no_reflectors_at_all() -> None:
    assert gpu_model.kernel_rows(A100, 0, 5, False, 1) > 0


def test_the_choice_is_a_comparison_of_rows() -> None:
    """So a compiled graph that takes any number of rows has one guard, and no more."""
    limit = heuristics._kernel_rows(1024, 1024, True)
    assert heuristics.kernels_pay(limit, 1024, 1024, True, CUDA)
    if not backends.kernels_forced():
        assert not heuristics.kernels_pay(limit + 1, 1024, 1024, True, CUDA)


def test_thin_weights() -> None:
    few, many = (heuristics.forming_svd_pays(rows, 1024, 1024, 16, 16, 16, True, CUDA) for rows in (8, 10**5))
    assert not few and many


@pytest.mark.parametrize("method", [COMPACT, FULL], ids=lambda method: method.name)
def test_the_kernels_do_less_than_the_blocks(method: Method) -> None:
    pytest.importorskip("triton", reason="Triton has no build for this system")
    kernels, blocks = counts.by_kernels(method, 1024, 32), counts.count(method, 1024, 32)
    assert kernels is not None
    assert kernels.depth == kernels.launches == 4
    assert kernels.operations < blocks.operations
    # Every row reads all reflectors, which stay in a GPU's cache; counted as if nothing did.
    assert kernels.bytes > blocks.bytes
