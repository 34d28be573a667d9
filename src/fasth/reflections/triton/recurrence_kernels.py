"""h_t = f(x_t + W h_{t−1}) for all times in one launch, and its backward pass in another, in Triton.

A program takes ROWS sequences through all times. States go through memory: after a barrier, each step loads in slices
the states that the previous step stored. So products are products of tiles, and every step reads W from the cache.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from fasth.reflections.triton.kernels import stored

# The order of ``nn.recurrence.NONLINEARITIES``.
TANH = tl.constexpr(0)
RELU = tl.constexpr(1)
MODRELU = tl.constexpr(2)


@triton.jit
def tanh(z):
    """tanh by the exponential function; near 0, where it would lose digits, by a series."""
    e = tl.exp(-2.0 * tl.abs(z))
    far = tl.div_rn(1.0 - e, 1.0 + e)
    s = z * z
    series = 62.0 / 2835.0
    series = series * s - 17.0 / 315.0
    series = series * s + 2.0 / 15.0
    series = series * s - 1.0 / 3.0
    near = z * (1.0 + series * s)
    return tl.where(tl.abs(z) < 0.25, near, tl.where(z < 0, -far, far))


@triton.jit
def activated(z, bias, F: tl.constexpr):
    """f(z); NaN stays NaN."""
    if F == TANH:
        return tanh(z)
    if F == RELU:
        return tl.where(z <= 0, 0.0, z)
    size = tl.abs(z) + bias
    return tl.where(size <= 0, 0.0, tl.where(z < 0, -size, tl.where(z == 0, 0.0, size)))


@triton.jit
def times_weight(
    z, STATES, W, rows, j, batch, h, TRANSPOSE: tl.constexpr, SLICE: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Columns j of z + s W, or of z + s Wᵀ if TRANSPOSE, with s rows of STATES: (batch, h)."""
    for start in range(0, h, SLICE):
        i = start + tl.arange(0, SLICE)
        at = rows[:, None].to(tl.int64) * h + i[None, :]
        s = tl.load(STATES + at, mask=(rows < batch)[:, None] & (i < h)[None, :], other=0.0).to(tl.float32)
        place = i[:, None] * h + j[None, :]
        if TRANSPOSE:
            place = j[None, :] * h + i[:, None]
        w = tl.load(W + place, mask=(i < h)[:, None] & (j < h)[None, :], other=0.0).to(tl.float32)
        z = tl.dot(s, w, z, input_precision=PRECISION)
    return z


@triton.jit(do_not_specialize=["times", "batch"])
def recurrence(
    X, W, H0, BIAS, OUT, times, batch, h,
    F: tl.constexpr, REVERSE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, SLICE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The states OUT: (times, batch, h).  X has OUT's shape, W: (h, h), H0: (batch, h), BIAS: (h,) for modReLU."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_offsets, stride = rows[:, None].to(tl.int64) * h, batch.to(tl.int64) * h
    for step in range(times):
        t, before = step, step - 1
        if REVERSE:
            t, before = times - 1 - step, times - step
        states = OUT + before * stride
        if step == 0:
            states = H0
        for start in range(0, h, TILE):
            j = start + tl.arange(0, TILE)
            mask, place = (rows < batch)[:, None] & (j < h)[None, :], t * stride + row_offsets + j[None, :]
            z = tl.load(X + place, mask=mask, other=0.0).to(tl.float32)
            z = times_weight(z, states, W, rows, j, batch, h, True, SLICE, PRECISION)
            bias = tl.zeros([TILE], tl.float32)
            if F == MODRELU:
                bias = tl.load(BIAS + j, mask=j < h, other=0.0).to(tl.float32)
            tl.store(OUT + place, stored(activated(z, bias[None, :], F), OUT), mask=mask)
        tl.debug_barrier()  # the next step loads what other threads have stored


@triton.jit(do_not_specialize=["times", "batch"])
def recurrence_backward(
    G, W, OUT, DX, DH0, times, batch, h,
    F: tl.constexpr, REVERSE: tl.constexpr, NEEDS_H0: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    SLICE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """DX: (times, batch, h), dx_t = f′ · (g_t + dx_{t+1} W), and DH0: (batch, h), dx of the first time times W."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_offsets, stride = rows[:, None].to(tl.int64) * h, batch.to(tl.int64) * h
    for step in range(times):
        t, after = times - 1 - step, times - step
        if REVERSE:
            t, after = step, step - 1
        for start in range(0, h, TILE):
            j = start + tl.arange(0, TILE)
            mask, place = (rows < batch)[:, None] & (j < h)[None, :], t * stride + row_offsets + j[None, :]
            e = tl.load(G + place, mask=mask, other=0.0).to(tl.float32)
            if step > 0:
                e = times_weight(e, DX + after * stride, W, rows, j, batch, h, False, SLICE, PRECISION)
            out = tl.load(OUT + place, mask=mask, other=0.0).to(tl.float32)
            if F == TANH:
                e *= 1.0 - out * out
            else:
                e = tl.where(out == 0, 0.0, e)
            tl.store(DX + place, stored(e, DX), mask=mask)
        tl.debug_barrier()
    if NEEDS_H0:
        last = times - 1
        if not REVERSE:
            last = 0
        for start in range(0, h, TILE):
            j = start + tl.arange(0, TILE)
            e = tl.zeros([ROWS, TILE], tl.float32)
            e = times_weight(e, DX + last * stride, W, rows, j, batch, h, False, SLICE, PRECISION)
            tl.store(DH0 + row_offsets + j[None, :], stored(e, DH0), mask=(rows < batch)[:, None] & (j < h)[None, :])
