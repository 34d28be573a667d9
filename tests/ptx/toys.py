"""Kernels that are right, and kernels that are wrong in one way each, to test the emulator itself."""

import triton
import triton.language as tl


@triton.jit
def softmax(X, OUT, n, BLOCK: tl.constexpr):
    row, j = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(X + row * n + j, mask=j < n, other=-float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(OUT + row * n + j, e / tl.sum(e, 0), mask=j < n)


@triton.jit
def double(X, OUT, n, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Doubles X; without the mask it writes beyond the end."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, mask=i < n)
    if MASKED:
        tl.store(OUT + i, 2 * x, mask=i < n)
    else:
        tl.store(OUT + i, 2 * x)


@triton.jit
def all_write_one(X, OUT):
    tl.store(OUT, tl.load(X + tl.program_id(0)))


@triton.jit
def neighbours(X, OUT, BLOCK: tl.constexpr):
    """Reads what another thread of the program wrote, without a barrier."""
    i = tl.arange(0, BLOCK)
    tl.store(OUT + i, tl.load(X + i))
    tl.store(OUT + BLOCK + i, tl.load(OUT + (i + 33) % BLOCK))


@triton.jit
def square(A, OUT, N: tl.constexpr, PRECISION: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    a = tl.load(A + i * N + j)
    tl.store(OUT + i * N + j, tl.dot(a, a, input_precision=PRECISION))
