"""The compiled core by itself: what it computes and saves, threads, processes, memory, and what it refuses."""

from __future__ import annotations

import copy
import functools
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
from processes import script, script_alone
from torch import Tensor
from torch.nn.functional import pad

from fasth.reflections import core, definition
from fasth.reflections.plan import COMPACT, CORE, FORMS, FULL, SAVE_A, SAVE_NOTHING, SAVE_T, SAVE_Z, TRIANGULAR, Plan
from fasth.reflections.planner import number_of_blocks, saved_size
from fasth.tools.problems import Problem, assert_all_close, assert_close, gradient_of
from fasth.tools.twins import definition_svd

pytestmark = pytest.mark.skipif(core.core() is None, reason="no compiled core is built, or it is switched off")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc, or forks")

DTYPES = (torch.float32, torch.float64)
LEVELS = range(SAVE_A + 1)  # of what is saved for backward
each_form = pytest.mark.parametrize("form", range(len(FORMS)), ids=FORMS)
each_direction = pytest.mark.parametrize("transpose", [False, True], ids=["Qt", "Q"])

load = functools.cache(core.load)


def plan(form: int = FULL, transpose: bool = False, block_size: int = 32, save: int = SAVE_A, **options: bool) -> Plan:
    return Plan(CORE, form, transpose, block_size, save, **options)


def sign_guard(V: Tensor) -> Tensor:
    """The gradient of a diagonal whose signs are in use: it pushes entries close to zero away from there."""
    diagonal = V.detach().diagonal(dim1=-2, dim2=-1)
    return torch.where(diagonal.abs() < 0.25, -torch.copysign(torch.full_like(diagonal, 0.1), diagonal), 0)


def reflectors(V: Tensor, form: int) -> Tensor:
    """The stored reflectors in full form."""
    return V if form == FULL else V.triu() if form == TRIANGULAR else V.triu(1) + torch.eye(*V.shape[-2:]).to(V)


def from_definition(x: Tensor, V: Tensor, g: Tensor, transpose: bool, form: int) -> tuple[Tensor, Tensor, Tensor]:
    """The value and the gradients of x and V, in float64."""
    x, V = (t.detach().double().requires_grad_() for t in (x, V))
    out = definition.householder(x, reflectors(V, form), transpose=transpose)
    dx, dV = torch.autograd.grad(out, (x, V), g.double(), allow_unused=True)
    dV = torch.zeros_like(V) if dV is None else dV
    if form == COMPACT:
        dV = torch.diagonal_scatter(dV, sign_guard(V), dim1=-2, dim2=-1)
    return out.detach(), dx, dV


def from_core(
    x: Tensor,
    V: Tensor,
    g: Tensor,
    transpose: bool = False,
    form: int = FULL,
    block_size: int = 32,
    threads: int = 1,
    save: int = SAVE_A,
    back: int | None = None,
    module: Any = None,
    copy_output: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same on the core. ``back``: the threads of the backward pass."""
    module = module or core.core()
    options = plan(form, transpose, min(block_size, *V.shape[-2:]) or 1, save, copy_output=copy_output)
    out, *saved = module.householder(x, V, options, threads)
    value = out
    if copy_output:
        value, out = out.clone(), None if save % 2 else out.fill_(torch.nan)  # the copy is used in place of it
    return value, *module.householder_backward(g, out, V, saved, (True, True), options, back or threads)


def draw(problem: Problem, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """x, V and the gradient of the output, in any dtype the same float32 numbers."""
    x, V = (t.detach() for t in problem.draw(torch.float64, "cpu"))
    return tuple(in_dtype(t.copy_(t.float()), dtype) for t in (x, V, gradient_of(x)))


def in_dtype(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts t to the dtype and keeps its strides."""
    return torch.empty_strided(t.shape, t.stride(), dtype=dtype).copy_(t)


# Few rows stay row-major; up to a hundred, columns are shared out; parts of still more rows are.
def problems(rows: int, d: int) -> list[Problem]:
    return [
        Problem("square", (rows, d), (d, d)),
        Problem("ragged", (rows + 28, d + 33), (d - 30, d + 33), 16),
        Problem("no whole packets", (rows - 2, d + 3), (d + 3, d + 3), 20),
        Problem("r > d", (rows, d), (d + 50, d), 32),
        Problem(
            "long and short", (rows, d), (d, d), change_V=lambda V: V * 10.0 ** (30 - torch.arange(d)[:, None] % 61)
        ),
        Problem("zeros", (rows, d), (d, d), change_V=lambda V: V * (torch.arange(d) % 3 > 0)[:, None]),
        Problem("column-major", (rows, d), (d, d), change_V=lambda V: V.mT.clone().mT),
        Problem("columns 8 KiB apart", (rows, d), (d, d), change_V=lambda V: pad(V.mT, (0, 2048 - d))[:, :d].mT),
        Problem(
            "strided",
            (rows, d),
            (d, d),
            change_x=lambda x: pad(x, (0, d))[:, :d],
            change_V=lambda V: pad(V, (0, 3))[:, :d],
        ),
        Problem("every other column", (rows, d), (d, d), change_V=lambda V: V.repeat_interleave(2, -1)[:, ::2]),
        Problem("few matrices", (2, rows, d), (2, 60, d), 16),
        Problem("many matrices", (7, rows, d), (7, 30, d), 16),
    ]


def table(*rows_and_d: tuple[int, int]) -> pytest.MarkDecorator:
    listed = [problem for rows, d in rows_and_d for problem in problems(rows, d)]
    return pytest.mark.parametrize("problem", listed, ids=lambda p: f"{p.name}-{p.x_shape[-2]}")


def as_compact(V: Tensor) -> Tensor:
    """Scales V to the usual entries of compact reflectors, whose diagonal counts as ones."""
    return (V / V.abs().amax((-2, -1), keepdim=True) * (3 / V.shape[-1] ** 0.5)).float().to(V)


# Values and gradients.


@table((5, 70), (40, 70), (270, 50))
@each_form
@each_direction
def test_agrees_with_the_definition(problem, form, transpose):
    doubles = x, V, g = draw(problem)
    if form == COMPACT:
        doubles = x, V, g = x, as_compact(V), g
    expected, full = from_definition(x, V, g, transpose, form), reflectors(V, form)
    for dtype in DTYPES:
        x, V, g = (in_dtype(t, dtype) for t in doubles)
        for i, level in enumerate(reversed(core.available_levels())):
            # The best instruction set runs with all levels of what is saved, others with the least and the most.
            for save in LEVELS if i == 0 else (SAVE_T, SAVE_A):
                options = (
                    transpose,
                    form,
                    problem.block_size or 32,
                    1,
                    save,
                    1,
                    load(level),
                    transpose == (save > SAVE_T),
                )
                actual = from_core(x, V, g, *options)
                assert_all_close(actual, expected, full)
                if form == COMPACT:
                    assert torch.equal(actual[2].diagonal(dim1=-2, dim2=-1), sign_guard(V))


@table((5, 270), (40, 200), (270, 200))
@pytest.mark.parametrize("form", [FULL, COMPACT], ids=["full", "compact"])
def test_any_number_of_threads_gives_the_same(problem, form, precise):
    x, V, g = draw(problem, precise)
    if form == COMPACT:
        V = as_compact(V)
    calls = {
        False: ((2, 3, SAVE_A, False), (3, 2, SAVE_Z, True), (1, 4, SAVE_NOTHING, False)),
        True: ((3, 2, SAVE_A, True), (5, 1, SAVE_T, False)),
    }
    for transpose in calls:
        options = transpose, form, problem.block_size or 32
        expected = from_core(x, V, g, *options)
        for threads, back, save, copy_output in calls[transpose]:
            actual = from_core(x, V, g, *options, threads, save, back, copy_output=copy_output)
            assert_all_close(actual, expected, reflectors(V, form))


@pytest.mark.parametrize(("rows", "d"), [(128, 100), (540, 700), (259, 1100)])
def test_rows_do_not_depend_on_each_other(rows, d, precise):
    x, V, g = draw(Problem("", (rows, d), (min(d, 330), d)), precise)
    for transpose, threads in ((False, (1, 3)), (True, (2, 6))):
        pieces = [from_core(a, V, b, transpose, save=SAVE_Z) for a, b in zip(x.split(50), g.split(50), strict=True)]
        out, dx, dV = zip(*pieces, strict=True)
        for count in threads:
            actual = from_core(x, V, g, transpose, threads=count, save=SAVE_Z)
            assert_all_close(actual, (torch.cat(out), torch.cat(dx), sum(dV)), V)


@pytest.mark.parametrize("rows", [4, 40])
@each_form
def test_a_matrix_too_large_for_the_caches(rows, form):
    x, V, g = draw(Problem("", (rows, 999), (500, 999)))
    V = V.mul_(1 / 32)
    if form < COMPACT:
        V[::50] *= 2**-66
        V[13::50] = 0
    expected, full = from_definition(x, V, g, False, form), reflectors(V, form)
    for dtype in DTYPES:
        for threads in (1, 2):
            tensors = (in_dtype(t, dtype) for t in (x, V, g))
            assert_all_close(from_core(*tensors, form=form, threads=threads), expected, full)


def test_the_signs_of_compact_reflectors_are_no_concern_of_a_single_product(precise):
    x, V, g = draw(Problem("", (9, 40), (40, 40)), precise)
    V = V / 9
    entries = torch.tensor([0.0, -0.0, 1e-30, -0.2, 0.24, -0.25, 0.25, 1.0, -9.0], dtype=precise)
    guards = torch.tensor([-0.1, 0.1, -0.1, 0.1, -0.1, 0.0, 0.0, 0.0, 0.0], dtype=precise)
    V.diagonal()[: len(entries)] = entries
    for layout in (V, V.mT.contiguous().mT):
        out, dx, dV = from_core(x, layout, g, form=COMPACT)
        assert torch.equal(dV.diagonal()[: len(guards)], guards)
        positive = layout.clone()
        positive.diagonal().abs_()
        others = from_core(x, positive, g, form=COMPACT)
        assert torch.equal(out, others[0]) and torch.equal(dx, others[1]) and torch.equal(dV.triu(1), others[2].triu(1))
        assert not dV.tril(-1).any()


@pytest.mark.parametrize(
    "problem",
    [
        Problem("many parts", (290, 290), (290, 290)),
        Problem("ragged", (70, 140), (70, 140), 16),
        Problem("no whole packets", (123, 123), (123, 123), 20),
        Problem("few rows", (5, 90), (90, 90)),
        Problem("column-major", (101, 120), (120, 120), change_V=lambda V: V.mT.clone().mT),
    ],
    ids=lambda problem: problem.name,
)
@each_form
def test_rows_of_the_identity(problem, form):
    _, doubles, g = draw(problem)
    doubles = as_compact(doubles) if form == COMPACT else doubles
    value, _, gradient = from_definition(torch.eye(*problem.x_shape), doubles, g, False, form)
    full = reflectors(doubles, form)
    for dtype in DTYPES:
        eye, V, out_gradient = torch.eye(*problem.x_shape, dtype=dtype), in_dtype(doubles, dtype), g.to(dtype)
        for save in LEVELS:
            options = plan(form, False, problem.block_size or 32, save, of_identity=True)
            out, *saved = core.core().householder(eye, V, options, 3)
            none, dV = core.core().householder_backward(out_gradient, out, V, saved, (False, True), options, 3)
            assert none is None
            assert_all_close((out, g, dV), (value, g, gradient), full)


def weight_from_core(
    tensors: list[Tensor | None], g: Tensor, options: Plan, threads: int = 1, back: int | None = None
) -> tuple[Tensor | None, ...]:
    """x Wᵀ + bias on the core, and the gradients of x, U, sigma, V and the bias; None where there is none."""
    out, saved = core.core().svd_linear(*tensors, options, threads)
    _, U, sigma, V, bias = tensors
    value, output = out.clone(), None if bias is None else out - bias  # before the bias
    if options.copy_output:
        output = None
        out.fill_(torch.nan)
    elif bias is None:
        output = out
    needs = [t is not None for t in tensors]
    return value, *core.core().svd_linear_backward(g, output, U, sigma, V, [saved], needs, options, back or threads)


@pytest.mark.parametrize("rows", [5, 40, 270])
@pytest.mark.parametrize(
    ("form", "sides", "shape"),
    [
        (form, sides, shape)
        for form, sides in (
            (FULL, "separate"),
            (COMPACT, "separate"),
            (COMPACT, "shared"),
            (TRIANGULAR, "symmetric"),
            (COMPACT, "symmetric"),
        )
        for shape in ((40, 70), (70, 40), (50, 50))
        if sides != "symmetric" or shape == (50, 50)
    ],
)
def test_svd_linear_agrees_with_the_definition(rows, form, sides, shape):
    n, m = shape
    x, g, bias = (torch.randn(size) for size in ((rows, m), (rows, n), n))
    U = torch.randn(n if sides == "shared" else n // 2, m if sides == "shared" else n) / 9
    V = {"shared": None, "symmetric": U, "separate": torch.randn(m, m) / 9}[sides]
    for sigma, b, threads, save, copy_output in (
        (torch.randn(min(n, m)), bias, 2, SAVE_A, True),
        (torch.randn(min(n, m) // 2), None, 3, SAVE_Z, False),
        (torch.randn(min(n, m) // 2), bias, 1, SAVE_T, False),
        (None, None, 1, SAVE_A, False),
        (None, bias, 2, SAVE_T, True),
    ):
        tensors = [x, U, sigma, V, b]
        doubles = [None if t is None else t.double().requires_grad_() for t in tensors]
        if sides == "symmetric":
            doubles[3] = doubles[1]
        W = definition_svd(*doubles[1:4], FORMS[form])
        expected = torch.nn.functional.linear(doubles[0], W, doubles[4])
        wanted = list(dict.fromkeys(t for t in doubles if t is not None))
        gradients = dict(zip(wanted, torch.autograd.grad(expected, wanted, g.double()), strict=True))
        options = plan(form, False, 16, save, copy_output=copy_output, symmetric=sides == "symmetric")
        scale = W.detach().abs().max().item() + W.detach().norm(2).item()
        size = max(scale, 1) * x.norm().item() * g.norm().item() / (1 if form == COMPACT else 0.1)
        for dtype in DTYPES:
            rounded = [None if t is None else t.to(dtype) for t in tensors]
            if sides == "symmetric":
                rounded[3] = rounded[1]
            out, *actual = weight_from_core(rounded, g.to(dtype), options, threads)
            assert_close(out, expected.detach(), scale * x.norm(dim=-1).max().item() + 10, n + m)
            for t, stored, double, name in zip(actual, rounded, doubles, ("x", "U", "sigma", "V", "bias"), strict=True):
                if stored is None or (name == "V" and sides == "symmetric"):
                    assert t is None
                    continue
                if form == COMPACT and name in "UV":
                    assert torch.equal(t.diagonal(), sign_guard(stored))
                    t.fill_diagonal_(0)
                assert_close(t, gradients[double], size, n + m)


@pytest.mark.parametrize("rows", [5, 40, 270])
@pytest.mark.parametrize("sides", ["separate", "symmetric", "shared"])
def test_svd_linear_on_any_number_of_threads(rows, sides, precise):
    n, m = (200, 240) if sides == "shared" else (200, 200)
    x, g, bias, sigma = (torch.randn(*size, dtype=precise) for size in ((rows, m), (rows, n), (n,), (150,)))
    U = torch.randn(n, m, dtype=precise) / 9
    V = {"shared": None, "symmetric": U, "separate": torch.randn(n, m, dtype=precise) / 9}[sides]
    options = plan(COMPACT if sides == "shared" else FULL, copy_output=True, symmetric=sides == "symmetric")
    expected = weight_from_core([x, U, sigma, V, bias], g, options)
    for threads, back, save in ((2, 3, SAVE_A), (3, 2, SAVE_Z), (5, 1, SAVE_T)):
        results = weight_from_core([x, U, sigma, V, bias], g, options._replace(save=save), threads, back)
        for actual, wanted in zip(results, expected, strict=True):
            assert (actual is None) == (wanted is None)
            if wanted is not None:
                assert_close(actual, wanted, wanted.norm().item(), n + m)


def test_each_gradient_may_be_the_only_one():
    """Each gradient alone, without the output where no reflectors need it."""
    tensors = [torch.randn(*shape, dtype=torch.float64) / 3 for shape in ((5, 40), (50, 50), (30,), (40, 40), (50,))]
    x, U, sigma, V, _ = tensors
    g = torch.randn(5, 50, dtype=torch.float64)
    for save in (SAVE_T, SAVE_Z, SAVE_A):
        options = plan(save=save)
        out, saved = core.core().svd_linear(x, U, sigma, V, None, options, 1)
        rest = U, sigma, V, [saved]
        expected = core.core().svd_linear_backward(g, out, *rest, [True] * 5, options, 1)
        for i, wanted in enumerate(expected):
            needs = [i == j for j in range(5)]
            found = core.core().svd_linear_backward(g, out if i == 1 else None, *rest, needs, options, 1)
            assert [t is not None for t in found] == needs
            torch.testing.assert_close(found[i], wanted)
    options = plan(symmetric=True)
    out, saved = core.core().svd_linear(x, V, None, V, None, options, 1)
    found = [
        core.core().svd_linear_backward(out, out, V, None, V, [saved], needs, options, 1)
        for needs in (
            (False, True, False, True, False),
            (False, True, False, False, False),
            (False, False, False, True, False),
        )
    ]
    for _, dU, _, dV, _ in found:  # of both sides, whichever asks
        assert dV is None and torch.equal(dU, found[0][1])
    V = torch.randn(40, 40, dtype=torch.float64)
    out, saved = core.core().householder(x, V, plan(save=SAVE_T), 1)
    for output, needs in ((None, (True, False)), (out, (False, True)), (None, (False, False))):
        found = core.core().householder_backward(x, output, V, [saved], needs, plan(save=SAVE_T), 1)
        assert tuple(t is not None for t in found) == needs


@pytest.mark.parametrize("entry", [0.0, -0.0, 1.0, -1e-30], ids=str)
def test_the_sign_bit_of_the_diagonal_is_the_sign_of_a_column(entry):
    U = torch.full((1, 1), entry)
    sign = -1 if U.signbit() else 1
    for V, signs, reflections in ((None, 1, 2), (U, 2, 2), (torch.zeros(0, 1), 1, 1)):
        options = plan(COMPACT, False, 1, SAVE_NOTHING, symmetric=V is U)
        (out,) = core.core().svd_linear(torch.ones(1, 1), U, None, V, None, options, 1)
        assert out.item() == (-1) ** reflections * sign**signs


# Tensors saved for backward.


@pytest.mark.parametrize("rows", [3, 20, 100])
@each_form
def test_the_saved_tensor_has_the_size_that_plans_count_on(rows, form):
    V, sigma = torch.randn(90, 70), torch.randn(50)
    for save in LEVELS:
        for block_size, copy_output in ((1, False), (20, True), (70, False)):
            options = plan(form, False, block_size, save, copy_output=copy_output)
            blocks = number_of_blocks(90, 70, form, block_size)
            for batch in ((), (3,)):
                x = torch.randn(*batch, rows, 70)
                found = core.core().householder(x, V.expand(*batch, 90, 70), options, 2)
                copied = x.numel() if copy_output else 0
                size = saved_size(rows, 70, [blocks], block_size, save, *batch, output=copied)
                assert [tuple(t.shape) for t in found] == [(*batch, rows, 70)] + ([(size,)] if size else [])
            if not save:
                continue
            # W: (50, 70), by separate reflectors, and by those of one matrix.
            U, x = torch.randn(40, 50), torch.randn(rows, 70)
            pairs = [(U, V, blocks)] + [(torch.randn(50, 70), None, number_of_blocks(50, 70, form, block_size))] * (
                form == COMPACT
            )
            for U, V_or_none, of_V in pairs:
                options = options._replace(block_size=min(block_size, 50))
                k = options.block_size
                of_V = number_of_blocks(90 if V_or_none is not None else 50, 70, form, k)
                of_U = number_of_blocks(40 if V_or_none is not None else 70, 50, form, k)
                sizes = dict(inner=rows * 70, output=rows * 50 if copy_output else 0)
                out, saved = core.core().svd_linear(x, U, sigma, V_or_none, None, options, 2)
                assert out.shape == (rows, 50)
                assert saved.shape == (saved_size(rows, 70, [of_V, of_U], k, save, **sizes),)


@pytest.mark.parametrize("rows", [5, 40])
def test_saved_tensors_may_come_back_in_other_memory(rows):
    x, V, g = draw(problems(rows, 200)[0], torch.float64)
    expected = from_definition(x, V, g, False, FULL)

    def strided(t: Tensor) -> Tensor:
        return t.repeat_interleave(2, -1)[..., ::2]

    for save in LEVELS:
        for copy_output in (False, True):
            options = plan(save=save, copy_output=copy_output)
            out, *saved = core.core().householder(x, V, options, 2)
            saved, output = tuple(strided(t) for t in saved), None if copy_output else strided(out)
            found = core.core().householder_backward(strided(g), output, strided(V), saved, (True, True), options, 2)
            assert_all_close((out, *found), expected, V)


def test_saved_tensors_that_come_back_as_something_else_are_an_error():
    x, V, g = draw(problems(5, 200)[0], torch.float32)
    changes = Tensor.half, Tensor.double, lambda t: t[..., :1], lambda t: t[:1]
    back = functools.partial(pytest.raises, RuntimeError, match="a saved tensor should come back as it was: ")
    for copy_output in (False, True):
        options = plan(copy_output=copy_output)
        out, saved = core.core().householder(x, V, options, 1)
        for change in changes:
            with back():
                core.core().householder_backward(g, out, change(V), [saved], (True, True), options, 1)
            with back():
                core.core().householder_backward(g, out, V, [change(saved)], (True, True), options, 1)
            if not copy_output:
                with back():
                    core.core().householder_backward(g, change(out), V, [saved], (True, True), options, 1)
        for wrong in ([], [None], [saved[1:]], [torch.cat([saved, saved[:1]])]):
            with back(
                match=rf"`saved` should have {len(saved)} numbers; got {sum(map(len, filter(torch.is_tensor, wrong)))}$"
            ):
                core.core().householder_backward(g, out, V, wrong, (True, True), options, 1)
    with back(match=r"the output should have the shape of its gradient, \(5, 200\); got None"):
        core.core().householder_backward(g, None, V, [], (True, True), plan(save=SAVE_NOTHING), 1)
    U, sigma, options = V / 9, torch.ones(200), plan(COMPACT)
    out, saved = core.core().svd_linear(x, U, sigma, None, None, options, 1)
    good = [g, out, U, sigma, None, saved]
    for i in (1, 2, 5):
        for change in (*changes[:2], lambda t: t[..., :-1]):
            *arguments, changed = [change(t) if i == j else t for j, t in enumerate(good)]
            with back():
                core.core().svd_linear_backward(*arguments, [changed], [True] * 5, options, 1)
    with back(match="`sigma` should be a float32 tensor on the CPU, as the rows are; got float64 on the CPU"):
        core.core().svd_linear_backward(g, out, U, sigma.double(), None, [saved], [True] * 5, options, 1)
    with back(match="`saved` should have"):  # x Q_V, which is the first part of it, alone
        core.core().svd_linear_backward(g, out, U, sigma, None, [saved[: 5 * 200]], [True] * 5, options, 1)
    with back(match=r"U and V should be one tensor; got \(200, 200\) and \(199, 200\)"):
        symmetric = plan(symmetric=True)
        core.core().svd_linear_backward(g, out, U, sigma, U[1:], [saved], [True] * 5, symmetric, 1)
    freed = torch.randn(200, 200)
    freed.untyped_storage().resize_(0)
    out, saved = core.core().householder(x, V, plan(), 1)
    with back(match="`V` should have memory; got a tensor whose storage was freed"):
        core.core().householder_backward(g, out, freed, [saved], (True, True), plan(), 1)


@pytest.mark.parametrize("rows", [5, 40, 300])
@pytest.mark.parametrize("batch", [(), (2,)], ids=["one", "batch"])
def test_a_copy_of_the_output_survives_what_happens_to_it(rows, batch, precise):
    """With the copy, the output itself is neither needed nor read; the results are the same to the last bit."""
    shapes = (*batch, rows, 90), (*batch, 60, 90)
    x, V = (torch.randn(shape, dtype=precise) for shape in shapes)
    for save in LEVELS:
        alone, copied = plan(save=save), plan(save=save, copy_output=True)
        out, *saved = core.core().householder(x, V, alone, 2)
        expected = core.core().householder_backward(x, out, V, saved, (True, True), alone, 2)
        other, *saved = core.core().householder(x, V, copied, 2)
        assert torch.equal(other, out)
        assert len(saved) == 1 and torch.equal(saved[0][: out.numel()], out.flatten())
        other.exp_()
        for output in (other, None):
            found = core.core().householder_backward(x, output, V, saved, (True, True), copied, 2)
            assert all(map(torch.equal, found, expected))


# No rows, and no reflectors.


def test_empty_ones():
    for x_shape, V_shape in (
        ((0, 8), (6, 8)),
        ((4, 8), (0, 8)),
        ((0, 8), (0, 8)),
        ((0, 4, 8), (0, 6, 8)),
        ((2, 0, 8), (2, 6, 8)),
        ((2, 4, 8), (2, 0, 8)),
    ):
        x, V = torch.randn(x_shape), torch.randn(V_shape)
        for save in LEVELS:
            for copy_output in (False, True):
                out, dx, dV = from_core(x, V, x, block_size=2, save=save, copy_output=copy_output)
                assert out.shape == dx.shape == x.shape and dV.shape == V.shape
                assert not dV.any() and (x.numel() == 0 or V.numel() or (torch.equal(out, x) and torch.equal(dx, x)))
    sigma, no = torch.randn(5), torch.zeros(0, 8)
    for x, U, V in ((torch.randn(0, 8), torch.randn(5, 8), None), (torch.randn(4, 8), no[:, :5], no)):
        options = plan(COMPACT, block_size=1)
        out, dx, *_ = weight_from_core([x, U, sigma, V, None], x[:, :5], options)
        torch.testing.assert_close(out, x[:, :5] * sigma)
        torch.testing.assert_close(dx, pad(x[:, :5] * sigma, (0, 3)))


# Arguments.


def refused(message: str, function: Any, *arguments: Any, error: type[Exception] = ValueError) -> None:
    with pytest.raises(error, match=f"{re.escape(message)}$"):
        function(*arguments)


def test_refuses_what_does_not_fit():
    householder, good = core.core().householder, plan(block_size=1, save=SAVE_NOTHING)
    x, V = torch.randn(4, 8), torch.randn(6, 8)
    for k in (0, -1, 7, 10**9, 2**63 - 1):
        refused(f"block_size should be from 1 to 6; got {k}", householder, x, V, good._replace(block_size=k), 1)
    for form in (-1, 3):
        message = f"form should be 0 (full), 1 (triangular) or 2 (compact); got {form}"
        refused(message, householder, x, V, good._replace(form=form), 1)
    for save in (-1, 4):
        refused(f"save should be from 0 to 3; got {save}", householder, x, V, good._replace(save=save), 1)
    refused("threads should be at least 1; got 0", householder, x, V, good, 0)
    refused("a plan should have at least 8 entries; got 7", householder, x, V, good[:7], 1)
    lengths = "the rows and the reflectors should have one length, at least 1; got "
    refused(f"{lengths}(4, 7) and (6, 8)", householder, x[:, :7], V, good, 1)
    refused(f"{lengths}(4, 0) and (6, 0)", householder, x[:, :0], V[:, :0], good, 1)
    for rows, reflectors, got in (
        (x, V[None], "(4, 8) and (1, 6, 8)"),
        (x[None], V.expand(2, 6, 8), "(1, 4, 8) and (2, 6, 8)"),
        (x, V[0], "(4, 8) and (8,)"),
        (x[None, None], V[None, None], "(1, 1, 4, 8) and (1, 1, 6, 8)"),
        (torch.ones(()), V, "() and (6, 8)"),
    ):
        message = f"the rows should be (*, d) for `V` (r, d), or (b, m, d) for `V` (b, r, d); got {got}"
        refused(message, householder, rows, reflectors, good, 1)
    message = "`V` should be a float32 tensor on the CPU, as the rows are; got float64 on the CPU"
    refused(message, householder, x, V.double(), good, 1, error=TypeError)
    for dtype in ("float16", "bfloat16", "int32", "uint8", "bool", "complex64"):
        t = x.to(getattr(torch, dtype))
        message = f"the rows should be float32 or float64 on the CPU; got {dtype} on the CPU"
        refused(message, householder, t, t, good, 1, error=TypeError)
    of_identity = good._replace(of_identity=True)
    refused("rows of the identity should be at most d = 8; got 9", householder, torch.eye(9, 8), V, of_identity, 1)
    with pytest.raises(ValueError, match="rows of the identity should be multiplied by Qᵀ; got transpose"):
        householder(torch.eye(8), V, of_identity._replace(transpose=True), 1)
    out, *_ = householder(torch.eye(8), V, of_identity, 1)
    message = "rows of the identity should need no gradient"
    with pytest.raises(RuntimeError, match=message):
        core.core().householder_backward(out, out, V, [], (True, True), of_identity, 1)


def test_refuses_a_weight_that_does_not_fit():
    svd_linear, good = core.core().svd_linear, plan(block_size=1, save=SAVE_NOTHING)
    x, V = torch.randn(4, 8), torch.randn(6, 8)
    refused("block_size should be from 1 to 6; got 7", svd_linear, x, V, None, V, None, good._replace(block_size=7), 1)
    refused(
        "`x` should have last dimension 8 for a weight of 8×8; got (4, 7)",
        svd_linear,
        x[:, :7],
        V,
        None,
        V,
        None,
        good,
        1,
    )
    for sigma, shape in ((torch.ones(9), "(9,)"), (torch.ones(2, 2), "(2, 2)")):
        message = f"`sigma` should have at most 8 singular values for a weight of 8×8; got {shape}"
        refused(message, svd_linear, x, V, sigma, V, None, good, 1)
    for bias, shape in ((torch.ones(7), "(7,)"), (torch.ones(8, 1), "(8, 1)")):
        refused(f"`bias` should have shape (8,); got {shape}", svd_linear, x, V, None, V, bias, good, 1)
    for name, arguments in {
        "U": (V.double(), None, V, None),
        "sigma": (V, torch.ones(8).double(), V, None),
        "V": (V, None, V.double(), None),
        "bias": (V, None, V, torch.ones(8).double()),
    }.items():
        message = f"`{name}` should be a float32 tensor on the CPU, as the rows are; got float64 on the CPU"
        refused(message, svd_linear, x, *arguments, good, 1, error=TypeError)
    message = "U and V should be compact to share a matrix, form 2; got form 1 and no `V`"
    refused(message, svd_linear, x, V, None, None, None, good._replace(form=TRIANGULAR), 1)
    refused("`U` and `V` should be matrices; got (8,) and (6, 8)", svd_linear, x, V[0], None, V, None, good, 1)
    message = "a weight should have at least one row and one column; got 0×8"
    refused(message, svd_linear, x, V[:, :0], None, V, None, good, 1)
    out, saved = svd_linear(x, V, None, V, None, plan(block_size=1), 1)
    for message, g, output, save in (
        ("save should be at least 1 for a backward pass; got 0", out, out, SAVE_NOTHING),
        ("the gradient should have last dimension 8; got (4, 7)", out[:, :7], out, SAVE_A),
        ("the output should have the shape of its gradient, (4, 8); got (3, 8)", out, out[:3], SAVE_A),
        ("the output should have the shape of its gradient, (4, 8); got None", out, None, SAVE_A),
    ):
        arguments = g, output, V, None, V, [saved], [True] * 5, plan(block_size=1, save=save), 1
        refused(message, core.core().svd_linear_backward, *arguments, error=RuntimeError)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "change",
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
def test_does_not_accept(change):
    accepts, t = core.core().accepts, torch.randn(3, 3)
    assert accepts(t, torch.nn.Parameter(t), None, t[:0], t.mT)
    assert accepts(t.double(), None) and accepts()
    assert not accepts(t, change(t))
    assert not accepts(change(t), None, t)


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
    options = plan(save=SAVE_T)
    try:
        rows, seconds = 512, 0.0
        while seconds < 3:
            x, V = torch.randn(rows, 512), torch.randn(512, 512)
            out, *saved = core.core().householder(x, V, options, 1)
            seen.clear()
            start = time.perf_counter()
            if what == "forward":
                core.core().householder(x, V, options, 1)
            else:
                core.core().householder_backward(x, out, V, saved, (True, True), options, 1)
            seconds = time.perf_counter() - start
            if seconds > 0.05 and any(0.3 < (moment - start) / seconds < 0.7 for moment in seen):
                return
            rows *= 2
    finally:
        stop.set()
        watcher.join()
    pytest.fail(f"no other thread ran during a call of {seconds:.1f} s")


@linux_only
def test_shares_the_threads_of_torch():
    script_alone("""
import os, re, torch
from fasth.reflections import core
from fasth.reflections.plan import CORE, Plan

torch.set_num_threads(2)
torch.randn(1000, 1000).exp()
before = set(os.listdir("/proc/self/task"))
core.core().householder(torch.randn(16, 500), torch.randn(500, 500), Plan(CORE, block_size=32), 2)
maps = open("/proc/self/maps").read()
assert "_core_" + core.core().isa in maps
if core.core().openmp:
    assert set(os.listdir("/proc/self/task")) == before
    assert len(set(re.findall(r"/\\S*libgomp\\S*", maps))) == 1
""")


@linux_only
def test_inside_another_parallel_region():
    """Inside a parallel region the core runs on one thread."""
    library = re.search(r"/\S*libgomp\S*", Path("/proc/self/maps").read_text())
    if not core.core().openmp or library is None:
        pytest.skip("the core was built without OpenMP")
    import ctypes

    x, V, g = draw(problems(40, 200)[0], torch.float64)
    expected, results = from_core(x, V, g), []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def body(_):
        results.extend(from_core(x, V, g, threads=2, save=save) for save in (SAVE_T, SAVE_A))

    ctypes.CDLL(library.group()).GOMP_parallel(body, None, 2, 0)
    assert len(results) == 4
    for actual in results:
        assert_all_close(actual, expected, V)


# Processes.


@linux_only
def test_after_a_fork():
    script_alone("""
import multiprocessing, torch
from fasth.tools.problems import *
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


def test_an_instruction_set_by_environment():
    level, *_ = core.available_levels()
    assert script("from fasth.reflections import core\nprint(core.core().isa)", FASTH_ISA=level).strip() == level


# Memory.


def test_the_pool_hands_out_what_nobody_holds():
    """Memory of freed tensors is used again; that of living ones is not."""
    x, V = torch.randn(5, 600), torch.randn(600, 600)
    arguments = (True, True), plan(), 2
    held = core.core().householder(x, V, plan(), 2)
    held += core.core().householder_backward(x, held[0], V, held[1:], *arguments)
    before = [t.view(torch.int32).clone() for t in held]  # parts of A are not initialised, and may be nan
    for _ in range(3):
        out, saved = core.core().householder(x + 1, V, plan(), 2)
        address = saved.data_ptr()
        core.core().householder_backward(x, out, V, [saved], *arguments)
        del out, saved
    assert all(torch.equal(a.view(torch.int32), b) for a, b in zip(held, before, strict=True))
    _, saved = core.core().householder(x, V, plan(), 2)
    assert saved.data_ptr() == address and address != held[1].data_ptr()


def test_a_large_gradient_is_a_tensor_like_any_other():
    x, V = torch.randn(3, 600), torch.nn.Parameter(torch.randn(600, 600))
    out, *saved = core.core().householder(x, V.detach(), plan(), 1)
    _, dV = core.core().householder_backward(x, out, V.detach(), saved, (True, True), plan(), 1)
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
    script_alone("""
import resource, torch
from fasth.reflections import core
from fasth.reflections.plan import CORE, Plan

x, V, plan = torch.ones(1).expand(2, 2**18, 1024), torch.ones(2, 1, 1024), Plan(CORE)
few = x[:, :5]
expected = core.core().householder(few, V, plan, 2)[0]
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 3 * 2**30,) * 2)  # room for the 2 GiB of the result, not for its copy
for options in (dict(save=0), dict(save=3), dict(copy_output=True)):
    try:
        core.core().householder(x, V, plan._replace(**options), 2)
    except MemoryError:
        pass
    else:
        raise AssertionError("3 GiB were enough")
assert torch.equal(core.core().householder(few, V, plan, 2)[0], expected)
""")


def test_a_gradient_past_the_caches_may_end_anywhere():
    """Written in whole packets where it is aligned, which rows beyond the last reflector need not be."""
    x, V = torch.randn(2, 4, 1016), torch.randn(1016, 2, 1032).permute(1, 2, 0)
    (_, _, strided), (_, _, expected) = (from_core(x, t, x, form=TRIANGULAR) for t in (V, V.contiguous()))
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
    actual, *_ = core.core().householder(x, many, plan(TRIANGULAR, block_size=5, save=SAVE_NOTHING), 1)
    torch.testing.assert_close(actual, definition.householder(x, V.expand(5, 5), triangular=True))
