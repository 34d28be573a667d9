"""The GPU kernels, in Triton: T of every block, the rows through all blocks, the gradient of V, and sums over rows.

README.md in this directory lists the kernels; ``reflections/README.md`` derives the formulas. Computations are
float32: bfloat16 and float16 are storage types only. Products are IEEE float32, except in ``gradient``, whose precision
is an argument. No kernel uses atomics, so results do not change from run to run.

Grids have one dimension, since the second dimension of a CUDA grid is limited to 65,535. Numbers of rows are not
specialized: a new number of rows does not compile anything.
"""

# Kernels are compiled from their source, and there annotations are Triton's, not Python's.
# mypy: ignore-errors
import triton
import triton.language as tl

# The forms of ``plan.py``, as constants for the compiler.
FULL = tl.constexpr(0)
TRIANGULAR = tl.constexpr(1)
COMPACT = tl.constexpr(2)


@triton.jit
def load_reflectors(V, i, j, first, r, d, row_stride, col_stride, FORM: tl.constexpr):
    """Loads rows i and columns j of V, with the zeros and ones of the reflectors where V stores other values.

    ``first`` is at most the smallest i, and a multiple of 8. Columns left of ``first`` are not read. Entries between
    column ``first`` and the diagonal are read and set to zero: a mask that follows the diagonal would keep the compiler
    from loading four numbers at once.
    """
    row, col = i[:, None], j[None, :]
    inside = (row < r) & (col < d)
    read = inside
    if FORM >= TRIANGULAR:
        read = inside & (col >= first)
    place = V + row.to(tl.int64) * row_stride + col.to(tl.int64) * col_stride
    y = tl.load(place, mask=read, other=0.0).to(tl.float32)
    if FORM == TRIANGULAR:
        y = tl.where(col >= row, y, 0.0)
    if FORM == COMPACT:
        y = tl.where(col > row, y, tl.where(col == tl.where(row < r, row, -1), 1.0, 0.0))
    return y


@triton.jit
def signs_of(SIGNS, stride, j, mask):
    """The signs, 1 or −1, of entries j of a diagonal or row, from their sign bits: −0 is negative."""
    bits = tl.load(SIGNS + j.to(tl.int64) * stride, mask=mask, other=1.0).to(tl.float32).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -1.0, 1.0)


@triton.jit
def signs(U_SIGNS, V_SIGNS, U_signs_stride, V_signs_stride, j, mask, U_SIGNED: tl.constexpr, V_SIGNED: tl.constexpr):
    """The signs that multiply sigma_j: from one side of the weight, from both, or 1."""
    sign = tl.full(j.shape, 1.0, tl.float32)
    if U_SIGNED:
        sign *= signs_of(U_SIGNS, U_signs_stride, j, mask)
    if V_SIGNED:
        sign *= signs_of(V_SIGNS, V_signs_stride, j, mask)
    return sign


@triton.jit
def stored(x, POINTER):
    """Rounds x to nearest in the dtype of POINTER."""
    if POINTER.dtype.element_ty == tl.float32:
        return x
    else:
        return x.to(POINTER.dtype.element_ty, fp_downcast_rounding="rtne")


@triton.jit
def factors(
    V, T, SCALE, r, d, batch_stride, row_stride, col_stride, blocks,
    FORM: tl.constexpr, K: tl.constexpr, LEVELS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """T: (B, blocks, K, K) of every block of V: (B, r, d), and the power of two that each reflector is multiplied by.

    One program a block. Its columns are read twice, BD at a time: for the largest entries, and for the Gram matrix.
    T is computed by halves, as in ``blocked.triangular_T``.
    """
    block, batch = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    V += batch * batch_stride
    i = tl.arange(0, K)
    reflections = block * K + i
    start = 0
    if FORM >= TRIANGULAR:
        start = block * K // BD * BD
    largest = tl.zeros([K], tl.float32)
    for c in range(start, d, BD):
        y = load_reflectors(V, reflections, c + tl.arange(0, BD), start, r, d, row_stride, col_stride, FORM)
        largest = tl.maximum(largest, tl.max(tl.abs(y), 1))
    # 2 to the minus exponent of the largest entry, from its bits. The limits keep both powers normal numbers.
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 1), 253)
    scale = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(SCALE + batch * (blocks * K) + reflections, scale)
    gram = tl.zeros([K, K], tl.float32)
    for c in range(start, d, BD):
        y = (
            load_reflectors(V, reflections, c + tl.arange(0, BD), start, r, d, row_stride, col_stride, FORM)
            * scale[:, None]
        )
        gram += tl.dot(y, tl.trans(y), input_precision="ieee")
    row, col = i[:, None], i[None, :]
    squared_norms = tl.sum(tl.where(row == col, gram, 0.0), 1)
    # A zero reflector: T = 1, Y = 0.
    t = tl.where(row == col, tl.div_rn(2.0, tl.where(squared_norms == 0.0, 2.0, squared_norms))[:, None], 0.0)
    highest = tl.where(col > row, row ^ col, 0)
    for level in tl.static_range(LEVELS):
        B12 = tl.where((highest >> level) == 1, gram, 0.0)
        t -= tl.dot(tl.dot(t, B12, input_precision="ieee"), t, input_precision="ieee")
    tl.store(T + (batch * blocks + block) * K * K + row * K + col, t)


@triton.jit
def read_row(
    X, X2, row, j, m, total, x_stride, d, has_input, diagonal, SCALED: tl.constexpr, RECORD: tl.constexpr
):  # fmt: skip
    """Loads a row of X stacked on X2; rows of X are multiplied by ``diagonal``. Rows beyond the last one are zeros."""
    a = tl.load(X + row * x_stride + j, mask=has_input & (row < m), other=0.0).to(tl.float32)
    if SCALED:
        a *= diagonal
    if RECORD:
        a += tl.load(X2 + (row - m) * d + j, mask=(j < d) & (row >= m) & (row < total), other=0.0).to(tl.float32)
    return a


@triton.jit
def reflect_row(a, y, t, LAST_FIRST: tl.constexpr):
    """Applies the block of y and t to the row a: returns a − z Y, and z."""
    s = tl.sum(y * a[None, :], 1)
    if LAST_FIRST:  # s Tᵀ
        z = tl.sum(t * s[None, :], 1)
    else:  # s T
        z = tl.sum(t * s[:, None], 0)
    return a - tl.sum(y * z[:, None], 0), z


@triton.jit
def write_row(a, bias, OUT, COPY, row, j, columns, mask, HAS_COPY: tl.constexpr):
    if HAS_COPY:
        tl.store(COPY + row * columns + j, stored(a, COPY), mask=mask)
    tl.store(OUT + row * columns + j, stored(a + bias, OUT), mask=mask)


@triton.jit(do_not_specialize=["m", "m2"])
def sweep(
    X, X2, OUT, COPY, V, SCALE, T, Z, STATES,
    SIGMA, U_SIGNS, V_SIGNS, BIAS,
    m, m2, r, d, x_columns, x_stride, out_columns, blocks, batch_stride, row_stride, col_stride,
    U_signs_stride, V_signs_stride,
    LAST_FIRST: tl.constexpr, FORM: tl.constexpr,
    K: tl.constexpr, TK: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    OF_IDENTITY: tl.constexpr, RECORD: tl.constexpr, SCALED: tl.constexpr, HAS_SIGMA: tl.constexpr,
    U_SIGNED: tl.constexpr, V_SIGNED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_COPY: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Applies all blocks to two rows in the registers of one program: x Qᵀ if LAST_FIRST, else x Q.

    Rows of X: (B, m, ≥ x_columns) precede rows of X2: (B, m2, d). A program takes two rows, half of their number apart,
    and reads every reflector once for both. A step applies K reflections; their T is a K × K square on the diagonal of
    a block's T: (TK, TK). For a weight U Σ Vᵀ, rows of X are multiplied by sigma and its signs when they are read, and
    the bias is added when rows are written; COPY gets the rows without the bias. Columns beyond ``x_columns`` are read
    as zero, columns beyond ``out_columns`` are not written.

    RECORD writes the tensors for the gradient, and needs an X2: Z: (B, m + m2, blocks·K), and STATES: (B, groups,
    m + m2, d), the rows before each group of GROUP reflections.
    """
    total = m + m2
    programs = tl.cdiv(total, 2)
    row, batch = tl.program_id(0) % programs, (tl.program_id(0) // programs).to(tl.int64)
    other = row + programs
    V += batch * batch_stride
    i, j = tl.arange(0, K), tl.arange(0, D)
    inside, both = j < d, other < total
    first_step = 0
    if OF_IDENTITY:
        a, b = tl.where(j == row, 1.0, 0.0), tl.where(j == other, 1.0, 0.0)
        if FORM >= TRIANGULAR:  # reflections after the other-th do not change either row
            first_step = tl.maximum(blocks - 1 - other // K, 0)
    else:
        has_input = j < x_columns
        diagonal = tl.full([D], 1.0, tl.float32)
        if SCALED:
            diagonal = signs(U_SIGNS, V_SIGNS, U_signs_stride, V_signs_stride, j, has_input, U_SIGNED, V_SIGNED)
            if HAS_SIGMA:
                diagonal *= tl.load(SIGMA + j, mask=has_input, other=0.0).to(tl.float32)
        X += batch * m * x_stride
        X2 += batch * m2 * d
        a = read_row(X, X2, row, j, m, total, x_stride, d, has_input, diagonal, SCALED, RECORD)
        b = read_row(X, X2, other, j, m, total, x_stride, d, has_input, diagonal, SCALED, RECORD)
    for step in tl.range(first_step, blocks, num_stages=STAGES):
        block = step
        if LAST_FIRST:
            block = blocks - 1 - step
        reflections = block * K + i
        if RECORD:
            arrives = block % (GROUP // K) == 0
            if LAST_FIRST:
                arrives = (step == 0) | (block % (GROUP // K) == GROUP // K - 1)
            if arrives:
                place = STATES + (batch * tl.cdiv(blocks * K, GROUP) + block * K // GROUP) * total * d + j
                tl.store(place + row * d, a, mask=inside)
                tl.store(place + other * d, b, mask=inside & both)
        scale = tl.load(SCALE + batch * (blocks * K) + reflections)
        y = load_reflectors(V, reflections, j, block * K, r, d, row_stride, col_stride, FORM) * scale[:, None]
        t = tl.load(T + (batch * blocks + block) * K * TK + block * K % TK + i[:, None] * TK + i[None, :])
        a, z = reflect_row(a, y, t, LAST_FIRST)
        b, z2 = reflect_row(b, y, t, LAST_FIRST)
        if RECORD:
            place = Z + batch * total * (blocks * K) + reflections
            tl.store(place + row * (blocks * K), z)
            tl.store(place + other * (blocks * K), z2, mask=both)
    written = j < out_columns
    bias = tl.zeros([D], tl.float32)
    if HAS_BIAS:
        bias = tl.load(BIAS + j, mask=written, other=0.0).to(tl.float32)
    OUT += batch * m * out_columns
    COPY += batch * m * out_columns
    write_row(a, bias, OUT, COPY, row, j, out_columns, written & (row < m), HAS_COPY)
    write_row(b, bias, OUT, COPY, other, j, out_columns, written & (other < m), HAS_COPY)


@triton.jit(do_not_specialize=["m"])
def gradient(
    V, SCALE, Z, STATES, DV,
    m, r, used, d, batch_stride, row_stride, col_stride, dv_batch_stride, dv_row_stride, dv_col_stride, known,
    TRANSPOSE: tl.constexpr, FORM: tl.constexpr, SHARED: tl.constexpr, DIAGONAL: tl.constexpr,
    GROUP: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """∂V of GROUP reflections and BD columns: N Y − Zᵀ g − Rᵀ O, times the scale of each reflector. One program each.

    Z: (B, 2m, known) holds R above −Z, STATES: (B, groups, 2m, d) g above O. Reflectors beyond the ``used`` ones, and
    entries left of the diagonal, have a zero gradient. If two sides are SHARED, each writes entries right of its
    diagonal only, and one writes the diagonal. ``autograd.with_sign_guard`` defines the diagonal of compact reflectors.
    """
    tiles, groups = tl.cdiv(d, BD), tl.cdiv(r, GROUP)
    tile, group = tl.program_id(0) % tiles, tl.program_id(0) // tiles % groups
    batch = (tl.program_id(0) // (tiles * groups)).to(tl.int64)
    i, j = group * GROUP + tl.arange(0, GROUP), tile * BD + tl.arange(0, BD)
    row, col = i[:, None], j[None, :]
    exists = group * GROUP < known
    if FORM >= TRIANGULAR:  # left of the diagonal there is nothing to compute
        exists = exists & ((tile + 1) * BD > group * GROUP)
    rows = tl.where(exists, m, 0)
    held, inside = (i < known)[None, :], (j < d)[None, :]
    Z += batch * 2 * m * known + i[None, :]
    STATES += (batch * tl.cdiv(known, GROUP) + group) * 2 * m * d + j[None, :]
    M = tl.zeros([GROUP, GROUP], tl.float32)
    dY = tl.zeros([GROUP, BD], tl.float32)
    for q in range(0, rows, BM):
        p = (q + tl.arange(0, BM))[:, None].to(tl.int64)
        R = tl.load(Z + p * known, mask=(p < m) & held, other=0.0)
        minus_Z = tl.load(Z + (p + m) * known, mask=(p < m) & held, other=0.0)
        g = tl.load(STATES + p * d, mask=(p < m) & inside, other=0.0)
        O = tl.load(STATES + (p + m) * d, mask=(p < m) & inside, other=0.0)
        M -= tl.dot(tl.trans(minus_Z), R, input_precision=PRECISION)
        dY += tl.dot(tl.trans(minus_Z), g, input_precision=PRECISION)
        dY -= tl.dot(tl.trans(R), O, input_precision=PRECISION)
    a, b = tl.arange(0, GROUP)[:, None], tl.arange(0, GROUP)[None, :]
    half = b < a
    if TRANSPOSE:
        half = b > a
    N = tl.where(half, M - tl.trans(M), 0.0)
    scale = tl.load(SCALE + batch * known + i, mask=(i < known) & exists, other=0.0)[:, None]
    V += batch * batch_stride
    y = load_reflectors(V, i, j, group * GROUP, used, d, row_stride, col_stride, FORM) * scale
    dV = (dY + tl.dot(N, y, input_precision=PRECISION)) * scale
    written = (row < r) & (col < d)
    place = DV + batch * dv_batch_stride + row.to(tl.int64) * dv_row_stride + col.to(tl.int64) * dv_col_stride
    if FORM == FULL:
        tl.store(place, stored(dV, DV), mask=written)
    elif tile * BD >= (group + 1) * GROUP:  # right of the diagonal; a mask for it would keep stores apart
        tl.store(place, stored(dV, DV), mask=written)
    else:
        if FORM == TRIANGULAR:
            dV = tl.where(col >= row, dV, 0.0)
        if FORM == COMPACT:
            on_diagonal = written & (col == row)
            at = V + row.to(tl.int64) * row_stride + col.to(tl.int64) * col_stride
            diagonal = tl.load(at, mask=on_diagonal, other=1.0).to(tl.float32)
            push = tl.where(diagonal.to(tl.int32, bitcast=True) < 0, 0.1, -0.1)
            push = tl.where(on_diagonal & (tl.abs(diagonal) < 0.25), push, 0.0)
            dV = tl.where(col > row, dV, push)
        if SHARED:
            written = written & (col > row)
            if DIAGONAL:
                written = (row < r) & (col < d) & (col >= row)
        tl.store(place, stored(dV, DV), mask=written)


@triton.jit(do_not_specialize=["m"])
def sums_over_rows(
    G, G_INNER, INNER, U_SIGNS, V_SIGNS, DSIGMA, DBIAS,
    m, n, k, inner_stride, U_signs_stride, V_signs_stride,
    U_SIGNED: tl.constexpr, V_SIGNED: tl.constexpr, NEEDS_SIGMA: tl.constexpr, NEEDS_BIAS: tl.constexpr,
    BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """∂sigma: the sum of G_INNER: (m, k) times INNER: (m, ≥ k) over all rows, with the signs; ∂bias: the sum of G.

    One program for BD columns.
    """
    j = tl.program_id(0) * BD + tl.arange(0, BD)
    if NEEDS_SIGMA:
        total = tl.zeros([BD], tl.float32)
        for q in range(0, m, BM):
            p = (q + tl.arange(0, BM))[:, None].to(tl.int64)
            mask = (p < m) & (j < k)[None, :]
            g = tl.load(G_INNER + p * k + j[None, :], mask=mask, other=0.0)
            total += tl.sum(g * tl.load(INNER + p * inner_stride + j[None, :], mask=mask, other=0.0), 0)
        total *= signs(U_SIGNS, V_SIGNS, U_signs_stride, V_signs_stride, j, j < k, U_SIGNED, V_SIGNED)
        tl.store(DSIGMA + j, stored(total, DSIGMA), mask=j < k)
    if NEEDS_BIAS:
        total = tl.zeros([BD], tl.float32)
        for q in range(0, m, BM):
            p = (q + tl.arange(0, BM))[:, None].to(tl.int64)
            mask = (p < m) & (j < n)[None, :]
            total += tl.sum(tl.load(G + p * n + j[None, :], mask=mask, other=0.0).to(tl.float32), 0)
        tl.store(DBIAS + j, stored(total, DBIAS), mask=j < n)
