"""The compiled core by itself: what it computes and saves, threads, processes, memory, and what it refuses."""

from __future__ import annotations

import copy
import os
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import script
from torch import Tensor
from torch.nn.functional import pad

from fasth.problems import Problem, assert_all_close, assert_close, gradient_of
from fasth.reflections import core, definition

pytestmark = pytest.mark.skipif(core.core() is None, reason="no compiled core is built, or it is switched off")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc, or forks")
each_level = pytest.mark.parametrize("level", core.available_levels())

FULL, TRIANGULAR, COMPACT, SIGNED = range(4)
each_kind = pytest.mark.parametrize("kind", [FULL, TRIANGULAR, COMPACT], ids=["full", "triangular", "compact"])
each_direction = pytest.mark.parametrize("transpose", [False, True], ids=["Qt", "Q"])


def padded(n: int) -> int:
    return -(-n // 16) * 16


def reflectors(V: Tensor, kind: int) -> Tensor:
    """What is stored, as full reflectors."""
    return V if kind == FULL else V.triu() if kind == TRIANGULAR else V.triu(1) + torch.eye(*V.shape[-2:]).to(V)


def from_definition(x: Tensor, V: Tensor, g: Tensor, transpose: bool, kind: int) -> tuple[Tensor, Tensor, Tensor]:
    """The value and the gradients of x and V, in float64."""
    x, V = (t.detach().double().requires_grad_() for t in (x, V))
    out = definition.householder(x, reflectors(V, kind), transpose=transpose)
    dx, dV = torch.autograd.grad(out, (x, V), g.double(), allow_unused=True)
    return out.detach(), dx, torch.zeros_like(V) if dV is None else dV


def from_core(
    x: Tensor,
    V: Tensor,
    g: Tensor,
    transpose: bool = False,
    kind: int = FULL,
    block_size: int = 32,
    threads: int = 1,
    save: int = 3,
    back: int | None = None,
    module: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same on the core. ``back``: the threads of the backward pass."""
    module, options = module or core.core(), (transpose, kind, min(block_size, *V.shape[-2:]) or 1)
    out, *saved = module.householder(x, V, *options, threads, save)
    return out, *module.householder_backward(g, out, V, *saved, *options, back or threads, True, True)


def draw(problem: Problem, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x, V = (t.detach() for t in problem.draw(dtype, "cpu"))
    return x, V, gradient_of(x).to(dtype)


# Few rows stay row-major; up to a hundred, columns are shared out; parts of still more rows are.
def problems(rows: int, d: int) -> list[Problem]:
    return [
        Problem("square", (rows, d), (d, d)),
        Problem("ragged", (rows + 28, d + 33), (d - 30, d + 33), 16),
        Problem("no whole packets", (rows - 2, d + 3), (d + 3, d + 3), 20),
        Problem("r > d", (rows, d), (d + 50, d), 32),
        Problem("long and short", (rows, d), (d, d), of_V=lambda V: V * 10.0 ** (30 - torch.arange(d)[:, None] % 61)),
        Problem("zeros", (rows, d), (d, d), of_V=lambda V: V * (torch.arange(d) % 3 > 0)[:, None]),
        Problem("column-major", (rows, d), (d, d), of_V=lambda V: V.mT.clone().mT),
        Problem("columns 8 KiB apart", (rows, d), (d, d), of_V=lambda V: pad(V.mT, (0, 2048 - d))[:, :d].mT),
        Problem(
            "strided", (rows, d), (d, d), of_x=lambda x: pad(x, (0, d))[:, :d], of_V=lambda V: pad(V, (0, 3))[:, :d]
        ),
        Problem("every other column", (rows, d), (d, d), of_V=lambda V: V.repeat_interleave(2, -1)[:, ::2]),
        Problem("few matrices", (2, rows, d), (2, 60, d), 16),
        Problem("many matrices", (7, rows, d), (7, 30, d), 16),
    ]


def table(*rows_and_d: tuple[int, int]) -> pytest.MarkDecorator:
    listed = [problem for rows, d in rows_and_d for problem in problems(rows, d)]
    return pytest.mark.parametrize("problem", listed, ids=lambda p: f"{p.name}-{p.x_shape[-2]}")


def as_compact(V: Tensor) -> Tensor:
    """Of the usual size, between ones on the diagonal."""
    return V / V.abs().amax((-2, -1), keepdim=True) * (3 / V.shape[-1] ** 0.5)


# Values and gradients.


@table((5, 70), (40, 70), (270, 50))
@each_kind
@each_direction
def test_agrees_with_the_definition(problem, kind, transpose, precise):
    x, V, g = draw(problem, precise)
    if kind == COMPACT:
        V = as_compact(V)
    expected = from_definition(x, V, g, transpose, kind)
    for level in core.available_levels():
        for save in (1, 2, 3):
            options = transpose, kind, problem.block_size or 32, 1, save, 1, core.load(level)
            assert_all_close(from_core(x, V, g, *options), expected, reflectors(V, kind))


@table((5, 270), (40, 200), (270, 200))
@pytest.mark.parametrize("kind", [FULL, COMPACT], ids=["full", "compact"])
@each_direction
def test_any_number_of_threads_gives_the_same(problem, kind, transpose, precise):
    x, V, g = draw(problem, precise)
    if kind == COMPACT:
        V = as_compact(V)
    options = transpose, kind, problem.block_size or 32
    expected = from_core(x, V, g, *options)
    for threads, back, save in ((2, 3, 3), (3, 2, 2), (5, 1, 1)):
        assert_all_close(from_core(x, V, g, *options, threads, save, back), expected, reflectors(V, kind))


@pytest.mark.parametrize(("rows", "d"), [(128, 100), (540, 700), (259, 1100)])
@each_direction
def test_rows_do_not_depend_on_each_other(rows, d, transpose, precise):
    x, V, g = draw(Problem("", (rows, d), (d, d)), precise)
    pieces = [from_core(a, V, b, transpose, save=2) for a, b in zip(x.split(50), g.split(50), strict=True)]
    out, dx, dV = zip(*pieces, strict=True)
    for threads in (1, 2, 3, 6):
        actual = from_core(x, V, g, transpose, threads=threads, save=2)
        assert_all_close(actual, (torch.cat(out), torch.cat(dx), sum(dV)), V)


@pytest.mark.parametrize("rows", [4, 40])
@each_kind
def test_a_matrix_too_large_for_the_caches(rows, kind, precise):
    x, V, g = draw(Problem("", (rows, 999), (500, 999)), precise)
    V = V / 30
    if kind < COMPACT:
        V[::50] *= 1e-20
        V[13::50] = 0
    expected = from_definition(x, V, g, False, kind)
    for threads in (1, 2):
        assert_all_close(from_core(x, V, g, kind=kind, threads=threads), expected, reflectors(V, kind))


def sign_guard(diagonal: Tensor) -> Tensor:
    """The gradient of entries whose sign is in use: it pushes those close to zero away from there."""
    return torch.where(diagonal.abs() < 0.25, -torch.copysign(torch.full_like(diagonal, 0.1), diagonal), 0)


def test_signs_are_no_concern_of_a_single_product():
    x, V, g = draw(Problem("", (9, 40), (40, 40)), torch.float64)
    compact, signed = (from_core(x, V / 9, g, kind=kind) for kind in (COMPACT, SIGNED))
    torch.testing.assert_close(signed[2].diagonal(), sign_guard((V / 9).diagonal()))
    signed[2].fill_diagonal_(0)
    assert all(map(torch.equal, compact, signed))


@pytest.mark.parametrize(
    "problem",
    [
        Problem("many parts", (290, 290), (290, 290)),
        Problem("ragged", (70, 140), (70, 140), 16),
        Problem("no whole packets", (123, 123), (123, 123), 20),
        Problem("few rows", (5, 90), (90, 90)),
        Problem("column-major", (101, 120), (120, 120), of_V=lambda V: V.mT.clone().mT),
    ],
    ids=lambda problem: problem.name,
)
@pytest.mark.parametrize("kind", [FULL, TRIANGULAR])
@pytest.mark.parametrize("save", [1, 2, 3])
def test_rows_of_the_identity(problem, kind, save, precise):
    _, V, g = draw(problem, precise)
    eye, options = torch.eye(*problem.x_shape, dtype=precise), (False, kind, problem.block_size or 32)
    expected = from_definition(eye, V, g, False, kind)
    out, *saved = core.core().householder(eye, V, *options, 3, save, True)
    none, dV = core.core().householder_backward(g, out, V, *saved, *options, 3, False, True, True)
    assert none is None
    assert_all_close((out, g, dV), (expected[0], g, expected[2]), reflectors(V, kind))


def weight(U: Tensor, sigma: Tensor | None, V: Tensor | None, kind: int) -> Tensor:
    """W, from the definition."""
    U, V = (U.mT, U) if V is None else (U, V)
    n, m, shared = U.shape[-1], V.shape[-1], V is U.mT
    k = min(n, m) if sigma is None else len(sigma)
    signs = torch.ones(k, dtype=U.dtype)
    for side in () if kind != SIGNED else (V,) if shared or U._base is V else (U, V):
        of_side = torch.where(side.detach().diagonal().signbit(), -1.0, 1.0)[:k]
        signs[: len(of_side)] *= of_side
    Q_U, Q_V = (
        definition.householder(torch.eye(t.shape[-1]).to(t), reflectors(t, kind), transpose=True)[:, :k] for t in (U, V)
    )
    return Q_U * (signs if sigma is None else signs * sigma) @ Q_V.mT


@pytest.mark.parametrize("rows", [5, 40, 270])
@pytest.mark.parametrize("shape", [(40, 70), (70, 40), (50, 50)], ids=["wide", "tall", "square"])
@pytest.mark.parametrize(
    "kind, form",
    [(FULL, "separate"), (TRIANGULAR, "symmetric"), (SIGNED, "separate"), (COMPACT, "shared"), (SIGNED, "shared")],
)
def test_svd_linear_agrees_with_the_definition(rows, shape, kind, form, precise):
    n, m = (shape[0],) * 2 if form == "symmetric" else shape
    x, g, bias = (torch.randn(*size, dtype=precise) for size in ((rows, m), (rows, n), (n,)))
    U = torch.randn(n, m, dtype=precise) / 9 if form == "shared" else torch.randn(n // 2, n, dtype=precise) / 9
    V = {"shared": None, "symmetric": U, "separate": torch.randn(m, m, dtype=precise) / 9}[form]
    for sigma in (torch.randn(min(n, m), dtype=precise), torch.randn(min(n, m) // 2, dtype=precise), None):
        for b, threads, save in ((bias, 2, 3), (None, 3, 2), (bias, 1, 1)):
            doubles = [None if t is None else t.double().requires_grad_() for t in (x, U, sigma, V, b)]
            if form == "symmetric":
                doubles[3] = doubles[1]
            W = weight(*doubles[1:4], kind)
            expected = torch.nn.functional.linear(doubles[0], W, doubles[4])
            wanted = list(dict.fromkeys(t for t in doubles if t is not None))
            gradients = dict(zip(wanted, torch.autograd.grad(expected, wanted, g.double()), strict=True))
            options = kind, 16, threads
            out, inner, product, *saved = core.core().svd_linear(x, U, sigma, V, b, *options, save)
            assert (product is None) == (b is None)
            needs = [True, True, sigma is not None, V is not None, b is not None]
            actual = core.core().svd_linear_backward(
                g, inner, out if b is None else product, U, sigma, V, *saved, *options, needs, form == "symmetric"
            )
            scale = W.detach().abs().max().item() + W.detach().norm(2).item()
            assert_close(out, expected.detach(), scale * x.double().norm(dim=-1).max().item() + 10, n + m)
            for t, double, name in zip(actual, doubles, ("x", "U", "sigma", "V", "bias"), strict=True):
                if t is None:
                    assert double is None or (name == "V" and form == "symmetric")
                else:
                    if kind == SIGNED and name in "UV":
                        torch.testing.assert_close(t.diagonal(), sign_guard({"U": U, "V": V}[name].diagonal()))
                        t.fill_diagonal_(0)
                    size = max(scale, 1) * x.double().norm().item() * g.double().norm().item()
                    assert_close(t, gradients[double], size / (1 if kind >= COMPACT else 0.1), n + m)
    if form == "shared":
        assert not actual[1].diagonal().any()


@pytest.mark.parametrize("rows", [5, 40, 270])
@pytest.mark.parametrize("form", ["separate", "symmetric", "shared"])
def test_svd_linear_on_any_number_of_threads(rows, form, precise):
    n, m = (200, 240) if form == "shared" else (200, 200)
    x, g, bias, sigma = (torch.randn(*size, dtype=precise) for size in ((rows, m), (rows, n), (n,), (150,)))
    U = torch.randn(n, m, dtype=precise) / 9
    V = {"shared": None, "symmetric": U, "separate": torch.randn(n, m, dtype=precise) / 9}[form]

    def results(threads: int, save: int) -> tuple[Tensor, ...]:
        options = COMPACT if form == "shared" else FULL, 32, threads
        out, inner, product, *saved = core.core().svd_linear(x, U, sigma, V, bias, *options, save)
        needs, symmetric = [True] * 3 + [V is not None, True], form == "symmetric"
        return out, *core.core().svd_linear_backward(g, inner, product, U, sigma, V, *saved, *options, needs, symmetric)

    expected = results(1, 3)
    for threads, save in ((2, 3), (3, 2), (5, 1)):
        for actual, wanted in zip(results(threads, save), expected, strict=True):
            if wanted is not None:
                assert_close(actual, wanted, wanted.norm().item(), n + m)


@pytest.mark.parametrize("entry", [0.0, -0.0, 1.0, -1e-30], ids=str)
def test_the_sign_bit_of_the_diagonal_is_the_sign_of_a_column(entry):
    U = torch.full((1, 1), entry)
    sign = -1 if U.signbit() else 1
    for V, signs, reflections in ((None, 1, 2), (U, 2, 2), (torch.zeros(0, 1), 1, 1)):
        out, *_ = core.core().svd_linear(torch.ones(1, 1), U, None, V, None, SIGNED, 1, 1, 0)
        assert out.item() == (-1) ** reflections * sign**signs


# What is saved for backward.


@pytest.mark.parametrize("rows", [3, 20, 100])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["one", "batch"])
def test_saved_tensors(rows, batch, precise):
    x, V = torch.randn(*batch, rows, 70, dtype=precise), torch.randn(*batch, 50, 70, dtype=precise)
    for block_size in (1, 20, 50):
        N, K, M = -(-50 // block_size), padded(block_size), padded(rows)
        shapes = [(*batch, N, K, K), (*batch, N, M, K), (*batch, N - 1, padded(70), M)]
        for save in range(4):
            _, *saved = core.core().householder(x, V, False, FULL, block_size, 2, save)
            assert [None if t is None else tuple(t.shape) for t in saved] == shapes[:save] + [None] * (3 - save)
        T, Z, _ = saved
        assert not T.tril(-1).any()
        assert not Z[..., rows:, :].any()


@pytest.mark.parametrize("rows", [5, 40])
def test_saved_tensors_may_come_back_in_other_memory_or_not_at_all(rows):
    x, V, g = draw(problems(rows, 200)[0], torch.float64)
    expected, options = from_definition(x, V, g, False, FULL), (False, FULL, 32)
    out, T, Z, A = core.core().householder(x, V, *options, 2, 3)

    def strided(t: Tensor) -> Tensor:
        return t.repeat_interleave(2, -1)[..., ::2]

    for saved in ((strided(T), strided(Z), strided(A)), (T, Z, None), (T, None, None), (T, None, A), (None, Z, A)):
        gradients = core.core().householder_backward(g, strided(out), strided(V), *saved, *options, 2, True, True)
        assert_all_close((out, *gradients), expected, V)


def test_saved_tensors_that_come_back_as_something_else_are_an_error():
    x, V, g = draw(problems(5, 200)[0], torch.float32)
    options = False, FULL, 32, 1
    out, *saved = core.core().householder(x, V, *options, 3)
    good = [g, out, V, *saved]
    for i in range(1, len(good)):
        for change in (Tensor.half, Tensor.double, lambda t: t[..., :1], lambda t: t[:1]):
            arguments = [change(t) if i == j else t for j, t in enumerate(good)]
            with pytest.raises(RuntimeError, match="a saved tensor should come back as it was"):
                core.core().householder_backward(*arguments, *options, True, True)
    U, sigma = V / 9, torch.ones(200)
    out, inner, _, *saved = core.core().svd_linear(x, U, sigma, None, None, COMPACT, 32, 1, 3)
    good = [g, inner, out, U, sigma, None, *saved]
    for i in (1, 2, 3, 6, 7, 8):
        arguments = [t[..., :-1] if i == j else t for j, t in enumerate(good)]
        with pytest.raises(RuntimeError, match="a saved tensor should come back as it was"):
            core.core().svd_linear_backward(*arguments, COMPACT, 32, 1, [True] * 5, False)
    freed = torch.randn(200, 200)
    freed.untyped_storage().resize_(0)
    out, *saved = core.core().householder(x, V, *options, 3)
    with pytest.raises(RuntimeError, match="memory"):
        core.core().householder_backward(g, out, freed, *saved, *options, True, True)


# Arguments.


def test_refuses_what_does_not_fit():
    householder, svd_linear = core.core().householder, core.core().svd_linear
    x, V = torch.randn(4, 8), torch.randn(6, 8)

    def refused(message, function, *arguments, error=ValueError):
        with pytest.raises(error, match=message):
            function(*arguments)

    for block_size in (0, -1, 7, 10**9):
        refused(f"block_size should be from 1 to 6, got {block_size}", householder, x, V, False, FULL, block_size, 1, 0)
        refused("block_size should be from 1 to 6", svd_linear, x, V, None, x, None, FULL, block_size * 2, 1, 0)
    refused("kind", householder, x, V, False, 4, 1, 1, 0)
    refused("threads", householder, x, V, False, FULL, 1, 0, 0)
    refused("save", householder, x, V, False, FULL, 1, 1, 4)
    refused("one length", householder, x[:, :7], V, False, FULL, 1, 1, 0)
    refused(r"\(\*, d\)", householder, x, V[None], False, FULL, 1, 1, 0)
    refused(r"\(\*, d\)", householder, x[None], V.expand(2, 6, 8), False, FULL, 1, 1, 0)
    refused("one dtype", householder, x, V.double(), False, FULL, 1, 1, 0, error=TypeError)
    refused("one dtype", householder, x.half(), V.half(), False, FULL, 1, 1, 0, error=TypeError)
    refused("identity has d rows", householder, torch.eye(9, 8), V, False, FULL, 1, 1, 0, True)
    refused("by the transpose", householder, torch.eye(8), V, True, FULL, 1, 1, 0, True)
    refused("as wide as W", svd_linear, x[:, :7], V, None, V, None, FULL, 1, 1, 0)
    refused("singular values", svd_linear, x, V, torch.ones(9), V, None, FULL, 1, 1, 0)
    refused("bias", svd_linear, x, V, None, V, torch.ones(7), FULL, 1, 1, 0)
    refused("compact", svd_linear, x, V, None, None, None, TRIANGULAR, 1, 1, 0)
    refused("matrices", svd_linear, x, V[0], None, V, None, FULL, 1, 1, 0)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "of",
    [
        lambda t: t.as_subclass(Subclass),
        lambda t: t.to("meta"),
        lambda t: torch._efficientzerotensor(t.shape),
        lambda t: torch.complex(t, t).conj().imag,
        torch.Tensor.half,
        torch.Tensor.double,
        lambda t: t.tolist(),
    ],
    ids=["subclass", "meta", "zeros without memory", "negative bit", "float16", "two dtypes", "no tensor"],
)
def test_does_not_accept(of):
    accepts, t = core.core().accepts, torch.randn(3, 3)
    assert accepts(t, torch.nn.Parameter(t), None, t[:0], t.mT)
    assert accepts(t.double(), None) and accepts()
    assert not accepts(t, of(t))
    assert not accepts(of(t), None, t)


def test_does_not_accept_what_a_transform_wraps():
    answers = []
    torch.func.vmap(lambda t: answers.append((core.core().accepts(t), t)) or t)(torch.randn(2, 3))
    (accepted, outlived) = answers[0]
    assert not accepted
    assert not core.core().accepts(outlived)


# Threads.


def test_several_python_threads_at_once():
    drawn = [draw(problem, torch.float64) for problem in problems(20, 200)[:4]]
    expected = [from_definition(*tensors, False, FULL) for tensors in drawn]
    start = threading.Barrier(len(drawn))

    def results(x, V, g):
        start.wait()
        return [from_core(x, V, g, block_size=16, threads=2) for _ in range(20)]

    with ThreadPoolExecutor(len(drawn)) as pool:
        for (_, V, _), wanted, repeated in zip(
            drawn, expected, pool.map(results, *zip(*drawn, strict=True)), strict=True
        ):
            for actual in repeated:
                assert_all_close(actual, wanted, V)


@pytest.mark.parametrize("what", ["forward", "backward"])
def test_other_python_threads_run_meanwhile(what):
    """Longer and longer calls, until another thread was seen to run in the middle of a long one.

    If ours held Python's lock, none ever would be.
    """
    seen, stop = [], threading.Event()

    def watch():
        while not stop.wait(1e-3):
            seen.append(time.perf_counter())

    watcher = threading.Thread(target=watch)
    watcher.start()
    options = False, FULL, 32, 1
    try:
        rows, seconds = 512, 0.0
        while seconds < 3:
            x, V = torch.randn(rows, 512), torch.randn(512, 512)
            out, *saved = core.core().householder(x, V, *options, 1)
            seen.clear()
            start = time.perf_counter()
            if what == "forward":
                core.core().householder(x, V, *options, 0)
            else:
                core.core().householder_backward(x, out, V, *saved, *options, True, True)
            seconds = time.perf_counter() - start
            if seconds > 0.3 and any(0.3 < (moment - start) / seconds < 0.7 for moment in seen):
                return
            rows *= 2
    finally:
        stop.set()
        watcher.join()
    pytest.fail(f"no other thread ran during a call of {seconds:.1f} s")


@linux_only
def test_shares_the_threads_of_torch():
    script("""
import os, re, torch
from fasth.reflections import core

torch.set_num_threads(2)
torch.randn(1000, 1000).exp()
before = set(os.listdir("/proc/self/task"))
core.core().householder(torch.randn(16, 500), torch.randn(500, 500), False, 0, 32, 2, 0)
maps = open("/proc/self/maps").read()
assert "_core_" + core.core().isa in maps
if core.core().openmp:
    assert set(os.listdir("/proc/self/task")) == before
    assert len(set(re.findall(r"/\\S*libgomp\\S*", maps))) == 1
""")


@linux_only
def test_inside_another_parallel_region():
    """There it gets no threads, and does with one."""
    library = re.search(r"/\S*libgomp\S*", Path("/proc/self/maps").read_text())
    if not core.core().openmp or library is None:
        pytest.skip("the core was built without OpenMP")
    import ctypes

    x, V, g = draw(problems(40, 200)[0], torch.float64)
    expected, results = from_core(x, V, g), []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def body(_):
        results.extend(from_core(x, V, g, threads=2, save=save) for save in (1, 3))

    ctypes.CDLL(library.group()).GOMP_parallel(body, None, 2, 0)
    assert len(results) == 4
    for actual in results:
        assert_all_close(actual, expected, V)


# Processes.


@linux_only
def test_after_a_fork():
    script("""
import multiprocessing, torch
from fasth.problems import *
from test_core import draw, from_core, from_definition

x, V, g = draw(Problem("", (24, 150), (150, 150)), torch.float64)  # so small that torch itself needs no threads
expected = from_definition(x, V, g, False, 0)
assert_all_close(from_core(x, V, g, threads=2), expected, V)  # so there are threads that the child will not have

def check():
    assert_all_close(from_core(x, V, g, threads=2), expected, V)

children = [multiprocessing.get_context("fork").Process(target=check, daemon=True) for _ in range(2)]
for child in children:
    child.start()
for child in children:
    child.join(20)
    assert child.exitcode == 0, child.exitcode
check()  # the parent goes on as before
""")


@each_level
def test_every_instruction_set_by_environment(level):
    assert script("from fasth.reflections import core\nprint(core.core().isa)", FASTH_ISA=level).strip() == level


# Memory.


def test_the_pool_hands_out_what_nobody_holds():
    """Memory of freed tensors is used again; that of living ones is not."""
    x, V = torch.randn(5, 600), torch.randn(600, 600)
    options = False, FULL, 32, 2
    held = core.core().householder(x, V, *options, 3)
    held += core.core().householder_backward(x, held[0], V, *held[1:], *options, True, True)
    before = [t.view(torch.int32).clone() for t in held]  # parts of A are not initialised, and may be nan
    for _ in range(3):
        out, *saved = core.core().householder(x + 1, V, *options, 3)
        addresses = {t.data_ptr() for t in saved}
        core.core().householder_backward(x, out, V, *saved, *options, True, True)
        del out, saved
    assert all(torch.equal(a.view(torch.int32), b) for a, b in zip(held, before, strict=True))
    *_, T, Z, A = core.core().householder(x, V, *options, 3)
    assert addresses == {t.data_ptr() for t in (T, Z, A)}


def test_a_large_gradient_is_a_tensor_like_any_other():
    x, V = torch.randn(3, 600), torch.nn.Parameter(torch.randn(600, 600))
    options = False, FULL, 32, 1
    out, *saved = core.core().householder(x, V.detach(), *options, 3)
    _, dV = core.core().householder_backward(x, out, V.detach(), *saved, *options, True, True)
    expected = dV.clone()
    assert dV.is_contiguous() and dV.shape == V.shape and not dV.requires_grad
    assert torch.equal(copy.deepcopy(dV), expected)
    assert torch.equal(dV.clone().share_memory_(), expected)
    V.grad = dV
    V.grad.add_(expected)
    torch.testing.assert_close(V.grad, 2 * expected)
    torch.optim.SGD([V], lr=0.1).step()


@linux_only
@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer reserves terabytes")
def test_running_out_of_memory_is_a_python_error():
    script("""
import resource, torch
from fasth.reflections import core

x, V, options = torch.ones(1).expand(2, 2**18, 1024), torch.ones(2, 1, 1024), (False, 0, 1, 2)
few = x[:, :5]
expected = core.core().householder(few, V, *options, 0)[0]
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 3 * 2**30,) * 2)  # room for the 2 GiB of the result, not for its copy
for save in (0, 3):
    try:
        core.core().householder(x, V, *options, save)
    except MemoryError:
        pass
    else:
        raise AssertionError("3 GiB were enough")
assert torch.equal(core.core().householder(few, V, *options, 0)[0], expected)
""")


def test_a_gradient_past_the_caches_may_end_anywhere():
    """Written in whole packets where it is aligned, which rows beyond the last reflector need not be."""
    x, V = torch.randn(2, 4, 1016), torch.randn(1016, 2, 1032).permute(1, 2, 0)
    (_, _, strided), (_, _, expected) = (from_core(x, t, x, kind=TRIANGULAR) for t in (V, V.contiguous()))
    torch.testing.assert_close(strided, expected, atol=1e-4, rtol=1e-4)


FAR = 2**31 + 2**12


@pytest.mark.parametrize(
    ("shapes", "stride"),
    [
        (((2, 100), (2, 100)), (FAR, 1)),
        (((100, 2), (100, 2)), (1, FAR)),
        (((2, 3, 100), (2, 5, 100)), (FAR, 100, 1)),
    ],
    ids=["rows", "columns", "batch"],
)
@each_direction
def test_entries_further_apart_than_an_int_can_count(shapes, stride, transpose):
    try:
        memory = torch.empty(FAR + 2**12)  # 8 GiB, of which only a few pages are ever touched
    except RuntimeError:
        pytest.skip("the system does not promise 8 GiB")
    x, V, g = (
        memory.as_strided(shape, stride, offset).copy_(torch.randn(shape))
        for shape, offset in ((shapes[0], 0), (shapes[1], 1000), (shapes[0], 2000))
    )
    expected = from_definition(x, V, g, transpose, FULL)
    assert_all_close(from_core(x, V, g, transpose), expected, V)


def test_more_reflectors_than_an_int_can_count():
    x, V = torch.randn(2, 5, dtype=torch.float64), torch.randn(1, 5, dtype=torch.float64)
    many = V.expand(2**31 + 7, 5)  # of which all but the first five are zero
    actual, *_ = core.core().householder(x, many, False, TRIANGULAR, 5, 1, 0)
    torch.testing.assert_close(actual, definition.householder(x, V.expand(5, 5), triangular=True))
