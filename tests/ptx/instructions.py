"""The function of each instruction that the kernels use. An instruction that is missing here raises an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .program import Address, Instruction, Name, Register

TYPES = {
    "b16": np.uint16, "u16": np.uint16, "s16": np.int16, "f16": np.float16, "b32": np.uint32, "u32": np.uint32,
    "s32": np.int32, "f32": np.float32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "pred": np.bool_,
}  # fmt: skip
Step = Callable[[Any, "np.ndarray | None"], None]
SHARED = 1 << 30


def compiled(one: Instruction) -> Step:
    """The instruction as a function of a machine and the active threads."""
    words = one.opcode.split(".")
    try:
        run = _FAMILIES.get(words[0], _elementwise)(one, words)
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise NotImplementedError(f"{one.opcode}, as in {one}") from error
    if one.guard is None:
        return run
    name, negated = one.guard

    def guarded(m: Any, mask: np.ndarray | None) -> None:
        allowed = m.read(name) ^ negated
        run(m, allowed if mask is None else mask & allowed)

    return guarded


def operations(one: Instruction) -> int:
    """Floating-point operations of one thread."""
    name, kind = one.opcode.split(".")[0], one.opcode.rpartition(".")[2]
    if name == "mma":
        M, N, K = map(int, re.findall(r"m(\d+)n(\d+)k(\d+)", one.opcode)[0])
        return 2 * M * N * K // 32
    return {"add": 1, "sub": 1, "mul": 1, "div": 1, "fma": 2, "ex2": 1, "max": 1, "min": 1}.get(name, 0) * (
        kind == "f32"
    )


# Operands.


def _source(operand: Any, kind: str) -> Callable[[Any], np.ndarray]:
    """The operand as numbers of a type; bfloat16 as float32."""
    if kind == "bf16":
        bits = _source(operand, "b16")
        return lambda m: (bits(m).astype(np.uint32) << np.uint32(16)).view(np.float32)
    dtype = TYPES[kind]
    if isinstance(operand, Register):
        if operand.width != (1 if kind == "pred" else dtype(0).itemsize * 8):
            raise ValueError(f"{operand} as {kind}")
        return lambda m: m.read(operand.name).view(dtype)
    if isinstance(operand, Name):
        if operand.text == "global_smem":
            return lambda m: np.full(m.n, SHARED, dtype)
        return lambda m: m.special[operand.text].view(dtype)
    if kind == "pred":
        return lambda m: np.full(m.n, operand != 0)
    width = dtype(0).itemsize
    value = np.array([operand % (1 << 8 * width)], f"u{width}").view(dtype)
    return lambda m: value


def _target(operand: Any) -> Callable[[Any, Any, np.ndarray | None], None]:
    if isinstance(operand, Name):  # "_", a result that is not used
        return lambda m, value, mask: None
    return lambda m, value, mask: m.write(operand.name, operand.width, value, mask)


def _address(operand: Address) -> Callable[[Any], np.ndarray]:
    if isinstance(operand.base, str):
        return lambda m: np.full(m.n, SHARED + operand.offset, np.int64)
    base = operand.base
    return lambda m: m.read(base.name).astype(np.int64) + operand.offset


# Numbers.


def _bfloat16(x: np.ndarray) -> np.ndarray:
    """The bits of float32 numbers rounded to bfloat16, to nearest even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


def _stored(x: np.ndarray, kind: str) -> np.ndarray:
    return _bfloat16(x) if kind == "bf16" else np.asarray(x, np.float16).view(np.uint16)


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The product is exact in float64; the sum is rounded to float64 first, which is wrong in one case of 2²⁹."""
    return (np.multiply(a, b, dtype=np.float64) + c).astype(np.float32)


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Quotient of integers, rounded towards zero."""
    return np.trunc(a.astype(np.float64) / np.where(b == 0, 1, b)).astype(a.dtype)


def _shift(name: str) -> Callable[..., np.ndarray]:
    """Shifts by at most the width, which leaves zero, or the sign."""

    def shifted(a: np.ndarray, by: np.ndarray) -> np.ndarray:
        width = a.dtype.itemsize * 8
        most = np.minimum(by, width - 1).astype(a.dtype)
        out = np.left_shift(a, most) if name == "shl" else np.right_shift(a, most)
        return out if a.dtype.kind == "i" else np.where(by >= width, a.dtype.type(0), out)

    return shifted


_COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.fmax, "min": np.fmin,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "abs": np.abs, "neg": np.negative,
    "mad": lambda a, b, c: a * b + c, "rem": lambda a, b: a - _quotient(a, b) * b, "shl": _shift("shl"),
    "shr": _shift("shr"), "not": np.invert, "fma": _fma,
    "ex2": lambda a: np.exp2(a.astype(np.float64)).astype(np.float32),
}  # fmt: skip
_ARGUMENTS = {"abs": 1, "neg": 1, "not": 1, "ex2": 1, "mad": 3, "fma": 3}


def _elementwise(one: Instruction, words: list[str]) -> Step:
    name, *modes, kind = words
    allowed = {"rn", "lo", "wide", "approx", "ftz", "full"}
    if not set(modes) <= allowed or ("ftz" in modes and name != "ex2"):
        raise ValueError(one.opcode)
    write, kinds = _target(one.operands[0]), [kind] * _ARGUMENTS.get(name, 2)
    function = _quotient if name == "div" and kind[0] in "su" else _FUNCTIONS[name]
    if "wide" in modes:
        narrow, wide = function, np.int64 if kind[0] == "s" else np.uint64
        kinds = [kind, kind, kind[0] + "64"][: len(kinds)]

        def function(*values: np.ndarray) -> np.ndarray:
            return narrow(*(v.astype(wide) for v in values))

    if name in ("shl", "shr"):
        kinds = [kind, "u32"]
    if kind in ("f16x2", "bf16x2"):
        return _pairs(one, function, kind[:-2], len(kinds))
    sources = [_source(operand, k) for operand, k in zip(one.operands[1:], kinds, strict=True)]
    half = kind == "bf16"
    return lambda m, mask: write(
        m, _bfloat16(function(*(s(m) for s in sources))) if half else function(*(s(m) for s in sources)), mask
    )


def _halves(bits: np.ndarray, kind: str) -> list[np.ndarray]:
    """The numbers in the lower and the upper 16 bits."""
    parts = [(bits >> np.uint32(16 * i)).astype(np.uint16) for i in (0, 1)]
    if kind == "f16":
        return [part.view(np.float16) for part in parts]
    return [(part.astype(np.uint32) << np.uint32(16)).view(np.float32) for part in parts]


def _joined(low: np.ndarray, high: np.ndarray, kind: str) -> np.ndarray:
    return _stored(low, kind).astype(np.uint32) | _stored(high, kind).astype(np.uint32) << np.uint32(16)


def _pairs(one: Instruction, function: Callable[..., np.ndarray], kind: str, count: int) -> Step:
    write, sources = _target(one.operands[0]), [_source(operand, "b32") for operand in one.operands[1 : 1 + count]]

    def run(m: Any, mask: np.ndarray | None) -> None:
        low, high = (function(*numbers) for numbers in zip(*(_halves(s(m), kind) for s in sources), strict=True))
        write(m, _joined(low, high, kind), mask)

    return run


def _compare(one: Instruction, words: list[str]) -> Step:
    function, kind = _COMPARISONS[words[1]], words[-1]
    if kind in ("f16x2", "bf16x2"):
        writes, (a, b) = (
            [_target(t) for t in one.operands[0]],
            [_source(operand, "b32") for operand in one.operands[1:]],
        )

        def run(m: Any, mask: np.ndarray | None) -> None:
            for write, x, y in zip(writes, _halves(a(m), kind[:-2]), _halves(b(m), kind[:-2]), strict=True):
                write(m, function(x, y), mask)

        return run
    write, a, b = _target(one.operands[0]), *(_source(operand, kind) for operand in one.operands[1:])
    return lambda m, mask: write(m, function(a(m), b(m)), mask)


def _select(one: Instruction, words: list[str]) -> Step:
    write, kind = _target(one.operands[0]), words[-1]
    a, b, p = (_source(operand, k) for operand, k in zip(one.operands[1:], (kind, kind, "pred"), strict=True))
    return lambda m, mask: write(m, np.where(p(m), a(m), b(m)), mask)


def _convert(one: Instruction, words: list[str]) -> Step:
    *modes, to, source_type = words[1:]
    write = _target(one.operands[0])
    if to in ("f16x2", "bf16x2"):
        high, low = (_source(operand, "f32") for operand in one.operands[1:])
        return lambda m, mask: write(m, _joined(low(m), high(m), to[:-2]), mask)
    operand = one.operands[1]
    if (
        source_type[0] in "su" and isinstance(operand, Register) and operand.width > int(source_type[1:])
    ):  # the lower bits
        whole, part = _source(operand, f"b{operand.width}"), TYPES[source_type]
        return lambda m, mask: write(m, whole(m).astype(f"u{part(0).itemsize}").view(part).astype(TYPES[to]), mask)
    a = _source(operand, source_type)
    if (to, modes) in (("f16", ["rn"]), ("bf16", ["rn"])):
        return lambda m, mask: write(m, _stored(a(m), to), mask)
    if modes or to not in TYPES:
        raise ValueError(one.opcode)
    return lambda m, mask: write(m, a(m).astype(TYPES[to]), mask)


def _move(one: Instruction, words: list[str]) -> Step:
    target, source = one.operands
    kind = words[-1]
    if isinstance(target, list):
        width = int(kind[1:]) // len(target)
        whole, writes = _source(source, kind), [_target(part) for part in target]

        def unpack(m: Any, mask: np.ndarray | None) -> None:
            bits = whole(m)
            for i, write in enumerate(writes):
                write(m, (bits >> TYPES[kind](width * i)).astype(f"u{width // 8}"), mask)

        return unpack
    if isinstance(source, list):
        width = int(kind[1:]) // len(source)
        write, parts = _target(target), [_source(part, f"b{width}") for part in source]

        def pack(m: Any, mask: np.ndarray | None) -> None:
            bits = [part(m).astype(TYPES[kind]) << TYPES[kind](width * i) for i, part in enumerate(parts)]
            write(m, np.bitwise_or.reduce(bits), mask)

        return pack
    write, a = _target(target), _source(source, kind)
    return lambda m, mask: write(m, a(m), mask)


def _bits(one: Instruction, words: list[str]) -> Step:
    write, a, (start, length) = _target(one.operands[0]), _source(one.operands[1], words[-1]), one.operands[2:]
    kind = TYPES[words[-1]]
    return lambda m, mask: write(m, (a(m) << kind(32 - start - length)) >> kind(32 - length), mask)


def _permute(one: Instruction, words: list[str]) -> Step:
    """Four bytes of the eight of two numbers."""
    write, a, b, selector = _target(one.operands[0]), *(_source(o, "b32") for o in one.operands[1:3]), one.operands[3]
    if selector & 0x8888:
        raise ValueError(one.opcode)

    def run(m: Any, mask: np.ndarray | None) -> None:
        both = a(m).astype(np.uint64) | b(m).astype(np.uint64) << np.uint64(32)
        out = np.zeros(m.n, np.uint64)
        for i in range(4):
            byte = both >> np.uint64(8 * (selector >> 4 * i & 7)) & np.uint64(255)
            out |= byte << np.uint64(8 * i)
        write(m, out.astype(np.uint32), mask)

    return run


# Between threads.


def _shuffle(one: Instruction, words: list[str]) -> Step:
    write, a, by = _target(one.operands[0]), *(_source(operand, "b32") for operand in one.operands[1:3])
    other = {"bfly": lambda lane, n: lane ^ n, "idx": lambda lane, n: n}[words[2]]
    if one.operands[3:] != [31, -1]:
        raise ValueError(one.opcode)

    def run(m: Any, mask: np.ndarray | None) -> None:
        m.whole_warps(mask, one)
        lane = other(m.lane, np.broadcast_to(by(m), (m.n,)).astype(np.int64) & 31)
        write(m, np.broadcast_to(a(m), (m.n,))[np.arange(m.n) - m.lane + lane], mask)

    return run


def _multiply(one: Instruction, words: list[str]) -> Step:
    """D = A B + C of a warp, A: (16, K), B: (K, 8), whose numbers the lanes hold as PTX's manual says."""
    shape, kind = words[3], words[7]
    K = int(shape.removeprefix("m16n8k"))
    D, A, B, C = one.operands
    writes = [_target(t) for t in D]
    a, b, c = ([_source(operand, k) for operand in operands] for operands, k in ((A, "b32"), (B, "b32"), (C, "f32")))
    if words[6] != "f32" or kind not in ("tf32", "bf16", "f16"):
        raise ValueError(one.opcode)
    lane = np.arange(32)
    row, of_four = lane // 4, lane % 4
    packed = 1 if kind == "tf32" else 2

    def numbers(m: Any, source: Callable[[Any], np.ndarray]) -> list[np.ndarray]:
        bits = np.broadcast_to(source(m), (m.n,)).reshape(-1, 32)
        if kind == "tf32":  # the unit does not look at the lower bits
            return [(bits & np.uint32(0xFFFFE000)).view(np.float32)]
        return _halves(bits, kind)

    def run(m: Any, mask: np.ndarray | None) -> None:
        m.whole_warps(mask, one)
        warps = m.n // 32
        left, right, out = np.zeros((warps, 16, K)), np.zeros((warps, K, 8)), np.zeros((warps, 16, 8))
        for i, source in enumerate(a):
            for half, values in enumerate(numbers(m, source)):
                left[:, row + 8 * (i % 2), packed * of_four + half + 4 * packed * (i // 2)] = values
        for i, source in enumerate(b):
            for half, values in enumerate(numbers(m, source)):
                right[:, packed * of_four + half + 4 * packed * i, row] = values
        places = [(row + 8 * (i // 2), 2 * of_four + i % 2) for i in range(4)]
        for (p, q), source in zip(places, c, strict=True):
            out[:, p, q] = np.broadcast_to(source(m), (m.n,)).reshape(-1, 32)
        out = (left @ right + out).astype(np.float32)
        for (p, q), write in zip(places, writes, strict=True):
            write(m, np.ascontiguousarray(out[:, p, q]).reshape(-1), mask)

    return run


# Memory.


def _load_or_store(one: Instruction, words: list[str]) -> Step:
    write, space, width = words[0] == "st", words[1], int(words[-1][1:]) // 8
    places, values = one.operands if write else reversed(one.operands)
    values = values if isinstance(values, list) else [values]
    if space == "param":
        target, kind, name = _target(values[0]), TYPES[f"u{8 * width}"], places.base
        return lambda m, mask: target(m, np.full(m.n, m.parameters[name] % (1 << 8 * width), kind), mask)
    if space not in ("global", "shared") or set(words[2:-1]) - {"v2", "v4"} or width < 2:
        raise ValueError(one.opcode)
    address, size, kind = _address(places), width * len(values), TYPES[f"u{8 * width}"]
    ends = [_source(value, f"b{8 * width}") if write else _target(value) for value in values]

    def run(m: Any, mask: np.ndarray | None) -> None:
        data = np.zeros((m.n, size), np.uint8)
        parts = data.view(kind)
        if write:
            for i, source in enumerate(ends):
                parts[:, i] = source(m)
        m.access(space, write, address(m), m.everybody if mask is None else mask, data, width, one)
        if not write:
            for i, target in enumerate(ends):
                target(m, np.ascontiguousarray(parts[:, i]), mask)

    return run


def _matrices(one: Instruction, words: list[str]) -> Step:
    """ldmatrix and stmatrix: matrices of 8 × 8 numbers of 16 bits, whose rows the first lanes point to."""
    write, count, transposed = words[0] == "stmatrix", int(words[4][1:]), "trans" in words
    places, values = one.operands if write else reversed(one.operands)
    address = _address(places)
    ends = [_source(value, "b32") if write else _target(value) for value in values]
    lane = np.arange(32)
    at = [(2 * (lane % 4) + half, lane // 4)[:: 1 if transposed else -1] for half in (0, 1)]

    def run(m: Any, mask: np.ndarray | None) -> None:
        m.whole_warps(mask, one)
        pointing = (m.everybody if mask is None else mask) & (m.lane < 8 * count)
        data = np.zeros((m.n, 16), np.uint8)
        rows = data.view(np.uint16).reshape(-1, 32, 8)
        if not write:
            m.access("shared", False, address(m), pointing, data, 2, one)
        for i, end in enumerate(ends):
            matrix = rows[:, 8 * i : 8 * i + 8]
            if write:
                bits = np.broadcast_to(end(m), (m.n,)).reshape(-1, 32)
                for half, (p, q) in enumerate(at):
                    matrix[:, p, q] = (bits >> np.uint32(16 * half)).astype(np.uint16)
            else:
                low, high = (matrix[:, p, q].astype(np.uint32) for p, q in at)
                end(m, (low | high << np.uint32(16)).reshape(-1), mask)
        if write:
            m.access("shared", True, address(m), pointing, data, 2, one)

    return run


def _copy(one: Instruction, words: list[str]) -> Step:
    if words[2] == "commit_group":
        return lambda m, mask: setattr(m, "groups", m.groups + (1 if mask is None else mask))
    if words[2] == "wait_group":
        return lambda m, mask: m.wait(one.operands[0], mask)
    target, source, size = _address(one.operands[0]), _address(one.operands[1]), one.operands[2]
    bytes_read = _source(one.operands[3], "b32") if len(one.operands) > 3 else lambda m: np.uint32(size)
    return lambda m, mask: m.copy(target(m), source(m), m.everybody if mask is None else mask, size, bytes_read(m), one)


_FAMILIES: dict[str, Callable[[Instruction, list[str]], Step]] = {
    "ld": _load_or_store, "st": _load_or_store, "ldmatrix": _matrices, "stmatrix": _matrices, "cp": _copy,
    "mma": _multiply, "shfl": _shuffle, "setp": _compare, "selp": _select, "cvt": _convert, "mov": _move, "bfe": _bits,
    "prmt": _permute,
}  # fmt: skip
