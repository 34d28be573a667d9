"""The compiled core itself: threads, processes, memory, and which tensors it leaves to PyTorch."""

from __future__ import annotations

import copy
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from problems import DIRECTIONS, PROBLEMS, Problem, assert_all_close, from_definition, with_gradients
from processes import script
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

from fasth import householder
from fasth.reflections import _formed, householder_compact, native

pytestmark = pytest.mark.skipif(native.core() is None, reason="no compiled core is built, or FASTH_CORE is off")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
can_fork = pytest.mark.skipif(sys.platform != "linux", reason="fork is the way to start a process only on Linux")

each_direction = pytest.mark.parametrize("direction", DIRECTIONS, ids=lambda d: "-".join(k for k in d if d[k]) or "Q")

# Members of a team share out rows if there are few, columns if there are more, and teams parts of still more rows.
few_and_many = pytest.mark.parametrize("rows", [5, 100, 270])


def shared(rows: int) -> list[Problem]:
    """All wider than a panel, so that there is work for more than one thread."""
    return [
        Problem("square", (rows, 200), (200, 200)),
        Problem("ragged", (rows + 28, 333), (150, 333), 16),
        Problem("blocks and rows not of whole packets", (rows - 2, 203), (203, 203), 20),
        Problem("r > d", (rows, 150), (200, 150), 32),
        Problem(
            "short and long reflectors", (rows, 200), (200, 200), of_V=lambda V: V * 10.0 ** -torch.arange(200)[:, None]
        ),
        Problem("stored by columns", (rows, 200), (200, 200), of_V=lambda V: V.mT.clone().mT),
        Problem("columns 8 KiB apart", (rows, 200), (150, 200), of_V=lambda V: pad(V.mT, (0, 2048 - 150))[:, :150].mT),
        Problem("a batch of fewer than threads", (3, rows, 150), (3, 60, 150), 16),
        Problem("a batch of more than threads", (7, rows, 150), (7, 60, 150), 16),
    ]


SHARED = shared(5) + shared(100) + shared(270)
by_name = pytest.mark.parametrize("problem", SHARED, ids=lambda problem: f"{problem.name}-{problem.x_shape[-2]}")


# Threads.


@by_name
@each_direction
def test_any_number_of_threads_gives_the_same(problem, direction, precise, set_threads):
    x, V = problem.draw(precise, "cpu")

    def result(threads: int):
        set_threads(threads)
        return with_gradients(householder, x, V, block_size=problem.block_size, **direction)

    expected = result(1)
    for threads in (2, 3, 5):
        assert_all_close(result(threads), expected, V.triu() if direction["triangular"] else V)


@each_direction
@pytest.mark.parametrize(("rows", "d"), [(128, 100), (300, 250), (200, 700), (540, 700), (259, 1100), (512, 90)])
def test_rows_do_not_depend_on_each_other(rows, d, direction, precise, set_threads):
    x, V = Problem("", (rows, d), (d, d)).draw(precise, "cpu")
    kind = native.TRIANGULAR if direction["triangular"] else native.FULL

    def multiplied(x, V):
        return native.householder(x, V, transpose=direction["transpose"], kind=kind, block_size=32)

    set_threads(1)
    expected = with_gradients(lambda x, V: torch.cat([multiplied(rows, V) for rows in x.split(50)]), x, V)
    for threads in (1, 2, 3, 6):
        set_threads(threads)
        assert_all_close(with_gradients(multiplied, x, V), expected, V.triu() if direction["triangular"] else V)
        with torch.no_grad():
            assert_all_close((multiplied(x, V), expected[1]), expected[:2], V)


# The rows of the identity, most of which a block of triangular reflectors leaves alone.


@pytest.mark.parametrize(
    "problem",
    [
        Problem("square", (200, 200), (200, 200)),
        Problem("many parts", (290, 290), (290, 290)),
        Problem("ragged", (70, 140), (70, 140), 16),
        Problem("blocks and rows not of whole packets", (123, 123), (123, 123), 20),
        Problem("r > d", (90, 90), (130, 90)),
        Problem("few rows", (5, 90), (90, 90)),
        Problem("stored by columns", (101, 120), (120, 120), of_V=lambda V: V.mT.clone().mT),
    ],
    ids=lambda problem: problem.name,
)
@pytest.mark.parametrize("triangular", [True, False])
def test_forming_the_matrix(problem, triangular, precise, set_threads, path):
    set_threads(3)
    _, V = problem.draw(precise, "cpu")
    eye = torch.eye(*problem.x_shape, dtype=precise, requires_grad=True)
    kind = native.TRIANGULAR if triangular else native.FULL

    def formed(x, V):
        return _formed(V, len(x), kind, problem.block_size)

    expected = with_gradients(from_definition, eye, V, triangular=triangular)
    out, _, dV = with_gradients(formed, eye, V)
    assert_all_close((out, expected[1], dV), expected, V.triu() if triangular else V)
    torch.testing.assert_close(formed(eye, V.detach()), out)


@pytest.mark.parametrize("compact", [True, False])
def test_forming_the_matrix_where_new_tensors_are_elsewhere_by_default(compact):
    x, V = torch.randn(50, 10), torch.randn(10, 10).triu(1)
    function = householder_compact if compact else householder
    expected = function(x, V)
    with torch.device("meta"):
        assert torch.equal(function(x, V), expected)


def test_forming_the_matrix_has_second_derivatives():
    V = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda V: _formed(V, 6, native.TRIANGULAR, 4), (V,))


def test_forming_the_matrix_says_what_it_cannot_do():
    V, eye = torch.randn(6, 6), torch.eye(7, 6)
    with pytest.raises(ValueError, match="identity has d rows"):
        native.core().householder(eye, V, False, native.FULL, 4, 1, True, True)
    with pytest.raises(ValueError, match="by the transpose"):
        native.core().householder(eye[:6], V, True, native.FULL, 4, 1, True, True)
    out, kept = native.core().householder(eye[:6], V, False, native.FULL, 4, 1, True, True)
    with pytest.raises(RuntimeError, match="no gradient"):
        native.core().householder_backward(out, out, V, kept, False, native.FULL, 4, 1, True, True, True)


def _short_and_long_here_and_there(V):
    V = V.clone()
    V[::50] *= 1e-20
    V[7::50] *= 1e20
    V[13::50] = 0
    return V


@each_direction
@pytest.mark.parametrize("rows", [4, 40])
def test_a_matrix_too_large_for_the_caches(rows, direction, precise, set_threads):
    problem = Problem("", (rows, 999), (999, 999), of_V=_short_and_long_here_and_there)
    x, V = problem.draw(precise, "cpu")
    expected = with_gradients(from_definition, x.double(), V.double(), **direction)
    for threads in (1, 2, 3):
        set_threads(threads)
        actual = with_gradients(householder, x, V, **direction)
        assert_all_close(actual, expected, V.triu() if direction["triangular"] else V)


@pytest.mark.parametrize("lower", [False, True], ids=["upper", "lower"])
@pytest.mark.parametrize("rows", [4, 40])
def test_compact_reflectors_too_large_for_the_caches(rows, lower, precise, set_threads):
    x, matrix = Problem("", (rows, 999), (999, 999), of_V=lambda V: V / 30).draw(precise, "cpu")
    side = matrix.mT if lower else matrix
    V = side.triu(1) + torch.eye(999, dtype=precise)
    out, dx, dV = with_gradients(from_definition, x.double(), V.double(), triangular=True)
    expected = (out, dx, dV.triu(1).mT if lower else dV.triu(1))
    for threads in (1, 2):
        set_threads(threads)
        actual = with_gradients(householder_compact, x, matrix, lower=lower)
        assert_all_close(actual, expected, V.mT if lower else V)


@pytest.mark.parametrize("lower", [False, True], ids=["upper", "lower"])
@few_and_many
def test_any_number_of_threads_gives_the_same_from_compact_reflectors(rows, lower, precise, set_threads):
    x, matrix = Problem("", (rows, 200), (200, 200), of_V=lambda V: V / 14).draw(precise, "cpu")
    set_threads(1)
    expected = with_gradients(householder_compact, x, matrix, lower=lower)
    for threads in (2, 3, 5):
        set_threads(threads)
        actual = with_gradients(householder_compact, x, matrix, lower=lower)
        assert_all_close(actual, expected, torch.ones(200, 1))  # a compact reflector is at least that long


@few_and_many
def test_backward_may_run_on_more_or_fewer_threads_than_forward(rows, set_threads):
    x, V = shared(rows)[0].draw(torch.float64, "cpu")
    expected = with_gradients(from_definition, x, V)
    for forward, backward in ((1, 3), (3, 1), (2, 5)):
        set_threads(forward)
        out = householder(x, V)
        set_threads(backward)
        assert_all_close(with_gradients(lambda *_, out=out: out, x, V), expected, V)


def test_several_python_threads_at_once(set_threads):
    set_threads(2)
    problems = [SHARED[0], SHARED[1], SHARED[2], SHARED[4]]
    drawn = [problem.draw(torch.float64, "cpu") for problem in problems]
    expected = [with_gradients(from_definition, x, V) for x, V in drawn]
    start = threading.Barrier(len(drawn))

    def results(x, V):
        start.wait()
        return [with_gradients(householder, x, V, block_size=16) for _ in range(20)]

    with ThreadPoolExecutor(len(drawn)) as pool:
        for (_, V), wanted, repeated in zip(drawn, expected, pool.map(results, *zip(*drawn, strict=True)), strict=True):
            for actual in repeated:
                assert_all_close(actual, wanted, V)


def test_the_first_use_may_be_from_several_threads():
    script("""
import threading
from concurrent.futures import ThreadPoolExecutor
import torch
from fasth import householder

x, V, start = torch.randn(4, 200), torch.randn(200, 200), threading.Barrier(4)
with ThreadPoolExecutor(4) as pool:
    first, *others = pool.map(lambda _: start.wait() < 4 and householder(x, V), range(4))
for other in others:
    torch.testing.assert_close(other, first)
""")


@pytest.mark.parametrize("what", ["forward", "backward"])
def test_other_python_threads_run_meanwhile(what, set_threads):
    """Longer and longer calls, until another thread was seen to run in the middle of a long one.

    If ours kept Python's lock, none ever would be.
    """
    set_threads(1)
    seen, stop = [], threading.Event()

    def watch():
        while not stop.wait(1e-3):
            seen.append(time.perf_counter())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        rows, seconds = 512, 0.0
        while seconds < 3:
            x, V = torch.randn(1, rows, 512, requires_grad=True), torch.randn(1, 512, 512)
            out = householder(x, V)
            seen.clear()
            start = time.perf_counter()
            householder(x, V) if what == "forward" else out.backward(torch.ones_like(out))
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
from fasth import householder
from fasth.reflections import native

torch.set_num_threads(2)
torch.randn(1000, 1000).exp()
before = set(os.listdir("/proc/self/task"))
householder(torch.randn(4, 500), torch.randn(500, 500))
maps = open("/proc/self/maps").read()
assert "_core_" + native.core().isa in maps
if native.core().openmp:
    assert set(os.listdir("/proc/self/task")) == before
    assert len(set(re.findall(r"/\\S*libgomp\\S*", maps))) == 1
""")


# Processes.


@can_fork
def test_after_a_fork():
    script("""
import multiprocessing, torch
from problems import *
from fasth import householder

torch.set_num_threads(2)
x, V = Problem("", (4, 150), (150, 150)).draw(torch.float64, "cpu")  # so small that torch itself needs no threads
expected = with_gradients(from_definition, x, V)
assert_all_close(with_gradients(householder, x, V), expected, V)  # so there are threads that the child will not have

def check():
    assert torch.get_num_threads() == 2
    assert_all_close(with_gradients(householder, x, V), expected, V)

children = [multiprocessing.get_context("fork").Process(target=check, daemon=True) for _ in range(2)]
for child in children:
    child.start()
for child in children:
    child.join(20)
    assert child.exitcode == 0, child.exitcode
check()  # the parent goes on as before
""")


@can_fork
def test_in_the_workers_of_a_data_loader():
    script("""
import torch
from problems import *
from fasth import householder
from torch.utils.data import DataLoader

torch.set_num_threads(2)
x, V = Problem("", (4, 200), (200, 200)).draw(torch.float64, "cpu")
expected = householder(x, V).detach()

class Reflected:
    def __len__(self): return 4
    def __getitem__(self, i): return with_gradients(householder, x[i : i + 1], V)[0].detach()

loader = DataLoader(Reflected(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=20)
torch.testing.assert_close(torch.cat(list(loader)), expected)
""")


@pytest.mark.parametrize("level", native.available_levels())
def test_every_instruction_set_by_environment(level):
    code = """
import torch
from problems import *
from fasth import householder
from fasth.reflections import native

x, V = Problem("", (4, 150), (70, 150)).draw(torch.float64, "cpu")
assert_all_close(with_gradients(householder, x, V), with_gradients(from_definition, x, V), V)
print(native.core().isa)
"""
    assert script(code, FASTH_ISA=level).strip() == level


# What it leaves to PyTorch, because it could not see into it or would not be seen.


class Subclass(torch.Tensor):
    pass


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_the_core_takes_plain_tensors(precise):
    x, V = torch.randn(2, 3, dtype=precise), torch.nn.Parameter(torch.randn(4, 3, dtype=precise))
    assert native.usable(x, V)
    assert type(householder(x, V).grad_fn).__name__ == "_HouseholderBackward"


@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_the_core_does_not_take_other_dtypes(storage):
    assert not native.usable(torch.ones(2, 3, dtype=storage), torch.ones(4, 3, dtype=storage))


@pytest.mark.parametrize(
    "of",
    [
        lambda t: t.as_subclass(Subclass),
        lambda t: t.to("meta"),
        lambda t: torch._efficientzerotensor(t.shape),
        lambda t: torch.complex(t, t).conj().imag,
    ],
    ids=["subclass", "meta", "zero without memory", "negative bit"],
)
def test_the_core_does_not_take_other_tensors(of):
    plain, other = torch.randn(3, 3), of(torch.randn(3, 3))
    assert not native.usable(other, other)
    assert not native.usable(other, plain)
    assert not native.usable(plain, other)


def test_the_core_does_not_take_what_a_transform_or_mode_watches():
    x, V = torch.randn(2, 3), torch.randn(4, 3)
    answers = []

    def ask(x):
        answers.append(native.usable(x, V))
        return x.sum()

    torch.func.vmap(ask)(x)
    torch.func.grad(ask)(x)
    torch.func.jvp(ask, (x,), (x,))
    torch.func.functionalize(ask)(x)
    with Watching():
        ask(x)
    with fwAD.dual_level():
        ask(fwAD.make_dual(x, x))
    torch.compile(ask, backend="eager")(x)
    assert answers == [False] * 7
    assert native.usable(x, V)


@pytest.mark.parametrize("mixed", [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=str)
@pytest.mark.parametrize("function", [householder, householder_compact])
def test_autocast_takes_rows_and_reflectors_of_two_dtypes(function, mixed):
    x, V = torch.randn(4, 100, dtype=mixed[0]), torch.randn(100, 100, dtype=mixed[1])
    with torch.autocast("cpu"):
        actual = function(x, V)
    torch.testing.assert_close(actual, function(x.to(V.dtype), V))


# The way back meets gradients that the way forward knew nothing of.


def test_the_tangent_of_a_gradient_is_not_lost():
    x, V = Problem("", (4, 6), (5, 6)).draw(torch.float64, "cpu")
    out, tangent = householder(x, V), torch.randn(4, 6, dtype=torch.float64)
    expected = torch.autograd.grad(out, (x, V), tangent, retain_graph=True)  # linear in the gradient
    with fwAD.dual_level():
        g = fwAD.make_dual(torch.randn_like(tangent), tangent)
        actual = [fwAD.unpack_dual(t).tangent for t in torch.autograd.grad(out, (x, V), g)]
    torch.testing.assert_close(actual, list(expected))


def test_gradients_may_come_in_a_batch():
    x, V = Problem("", (4, 6), (5, 6)).draw(torch.float64, "cpu")
    out, g = householder(x, V), torch.randn(3, 4, 6, dtype=torch.float64)

    def gradients(g):
        return torch.autograd.grad(out, (x, V), g, retain_graph=True)

    expected = [torch.stack(t) for t in zip(*map(gradients, g), strict=True)]
    torch.testing.assert_close(list(torch.func.vmap(gradients)(g)), expected)


def test_a_gradient_of_zeros_without_memory():
    script("""
import torch
from problems import *
from fasth import householder

x, V = Problem("", (4, 6), (5, 6)).draw(torch.float64, "cpu")
zeros = torch._efficientzerotensor((4, 6), dtype=torch.float64)
assert not any(t.any() for t in torch.autograd.grad(householder(x, V), (x, V), zeros))
""")


@few_and_many
@pytest.mark.parametrize(
    "elsewhere",
    [lambda t: t.repeat_interleave(2, -1)[..., ::2], lambda t: t.mT.clone().mT if t.ndim == 2 else t.clone()],
    ids=["strided", "by columns"],
)
def test_saved_tensors_may_come_back_in_other_memory(rows, elsewhere, set_threads):
    x, V = shared(rows)[0].draw(torch.float64, "cpu")
    expected = with_gradients(from_definition, x, V)
    for threads in (1, 2):
        set_threads(threads)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, elsewhere):
            actual = with_gradients(householder, x, V)
        assert_all_close(actual, expected, V)


def test_saved_tensors_that_come_back_as_something_else_are_an_error():
    done = script("""
import torch
from fasth import householder

V = torch.randn(200, 200, requires_grad=True)
for unpack in (torch.Tensor.half, lambda t: t[..., :1]):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        out = householder(torch.randn(4, 200), V)
    try:
        out.sum().backward()
    except (RuntimeError, ValueError, TypeError):
        print("error")
""")
    assert done.split() == ["error"] * 2


# An older PyTorch.


@each_direction
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_tensors_are_read_by_methods_where_there_is_no_table(problem, direction, precise):
    x, V = problem.draw(precise, "cpu")
    expected = with_gradients(householder, x, V, block_size=problem.block_size, **direction)
    native.connect(native.core(), None)
    try:
        actual = with_gradients(householder, x, V, block_size=problem.block_size, **direction)
        assert not native.usable(torch.ones(2, 3), torch.ones(3, 3, device="meta"))
        assert not native.usable(torch.ones(2, 3), torch.ones(3, 3, dtype=torch.float16))
    finally:
        native.connect(native.core(), getattr(torch.Tensor, "__dlpack_c_exchange_api__", None))
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


# Memory.


def test_what_is_kept_belongs_to_its_graph():
    """The memory of freed graphs is used again; that of living ones, and of tensors that a hook held back, is not."""
    x, V = Problem("", (5, 96), (96, 96)).draw(torch.float64, "cpu")
    expected = with_gradients(from_definition, x, V)
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        householder(x, V)
    before = [t.clone() for t in held]
    outs = [householder(x * scale, V) for scale in (1, 2, 3)]
    for scale in (3, 1, 2):  # freed in another order than made
        actual = torch.autograd.grad(outs[scale - 1], (x, V), expected[0].detach().to(x))
        wanted = torch.autograd.grad(from_definition(x * scale, V), (x, V), expected[0].detach())
        outs[scale - 1] = None
        householder(x, V)
        torch.testing.assert_close(actual, wanted)
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))


def test_a_large_gradient_is_a_tensor_like_any_other():
    """Its memory is the core's own, and is used again only when nobody holds it any more."""
    x, V = torch.randn(3, 600), torch.nn.Parameter(torch.randn(600, 600))
    householder(x, V).sum().backward()
    held, expected = V.grad, V.grad.clone()
    assert held.is_contiguous() and held.shape == V.shape
    for _ in range(3):
        V.grad = None
        householder(torch.randn(3, 600), V).sum().backward()
    assert torch.equal(held, expected)
    assert torch.equal(copy.deepcopy(held), expected)
    assert torch.equal(held.clone().share_memory_(), expected)
    V.grad = held
    householder(x, V).sum().backward()  # added to it
    torch.testing.assert_close(V.grad, 2 * expected)
    torch.optim.SGD([V], lr=0.1).step()


@linux_only
@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer reserves terabytes")
def test_running_out_of_memory_is_a_python_error():
    script("""
import resource, torch
from fasth import householder

torch.set_num_threads(2)
x, V = torch.ones(1).expand(2, 2**18, 1024), torch.ones(2, 1, 1024)
few = x[:, :5]
expected = householder(few, V)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 3 * 2**30,) * 2)  # room for the 2 GiB of the result, not for its copy
try:
    householder(x, V)
except MemoryError:
    pass
else:
    raise AssertionError("3 GiB were enough")
assert torch.equal(householder(few, V), expected)
""")


def test_a_gradient_past_the_caches_may_end_anywhere():
    """Written in whole packets where it is aligned, which rows beyond the last reflector need not be."""
    B, r, d = 2, 1032, 1016
    x = torch.randn(B, 4, d)
    V = torch.randn(d, B, r).permute(1, 2, 0).requires_grad_()
    out, expected = householder(x, V, triangular=True), householder(x, V.contiguous(), triangular=True)
    torch.testing.assert_close(*(torch.autograd.grad(t.sum(), V)[0] for t in (out, expected)), atol=1e-4, rtol=1e-4)


def test_a_saved_tensor_without_memory_is_an_error():
    done = script("""
import torch
from fasth import householder
from fasth.reflections import svd_linear

for function in (householder, lambda x, V: svd_linear(x, V, torch.ones(64))):
    x, V = torch.randn(8, 64, requires_grad=True), torch.randn(64, 64)
    out = function(x, V)
    V.untyped_storage().resize_(0)
    try:
        out.sum().backward()
    except RuntimeError as error:
        print("memory" in str(error))
""")
    assert done.split() == ["True"] * 2


def test_flags_may_be_anything_true():
    x, V = torch.randn(4, 8), torch.randn(8, 8)
    assert torch.equal(householder(x, V, transpose=1), householder(x, V, transpose=True))


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
def test_entries_further_apart_than_an_int_can_count(shapes, stride, direction):
    try:
        memory = torch.empty(FAR + 2**12)  # 8 GiB, of which only a few pages are ever touched
    except RuntimeError:
        pytest.skip("the system does not promise 8 GiB")
    x, V, g = (
        memory.as_strided(shape, stride, offset).copy_(torch.randn(shape)).detach().requires_grad_(offset < 2000)
        for shape, offset in ((shapes[0], 0), (shapes[1], 1000), (shapes[0], 2000))
    )
    out = householder(x, V, **direction)
    expected = from_definition(x, V, **direction)
    actual = (out, *torch.autograd.grad(out, (x, V), g))
    assert_all_close(actual, (expected, *torch.autograd.grad(expected, (x, V), g.double())), V)


def test_more_reflectors_than_an_int_can_count():
    x, V = torch.randn(2, 5, dtype=torch.float64), torch.randn(1, 5, dtype=torch.float64)
    actual = householder(x, V.expand(2**31 + 7, 5), triangular=True)  # of which all but the first five are zero
    torch.testing.assert_close(actual, from_definition(x, V.expand(5, 5), triangular=True))
