"""Counts the kernels of a step on a GPU, their longest chain, operations and bytes.

Nothing is run or timed. A step is traced on the meta device, where tensors have shapes and no values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from fasth._private import TorchDispatchMode
from fasth.reflections.plan import FULL
from fasth.reflections.planner import counting_kernels
from fasth.reflections.triton.configurations import LONGEST
from fasth.tools.reproduce.methods import Method

aten = torch.ops.aten


@dataclass
class Count:
    launches: int = 0  # operations that do work, each at least one kernel
    depth: int = 0  # the longest chain of dependent launches, which no GPU can overlap
    operations: int = 0  # floating-point operations
    bytes: int = 0  # bytes read and written, as if nothing stayed in a cache
    library: set[str] = field(default_factory=set)  # decompositions: counted as one launch, many in fact


def count(method: Method, d: int, rows: int, dtype: torch.dtype = torch.float32) -> Count:
    """Counts one training step: the output and the gradients of x and of all parameters, each (d, d) or (d,)."""
    case = method.build(1, rows, dtype, "cpu", torch.Generator().manual_seed(0))  # only its function is used
    shapes = [(rows, d), *((d,) * t.ndim for t in case.tensors[1:])]
    tensors = [torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for shape in shapes]
    gradient = torch.empty(rows, d, dtype=dtype, device="meta")
    with _Counter() as counter:
        torch.autograd.grad(case.function(*tensors), tensors, gradient)
    return counter.count


def by_kernels(method: Method, d: int, rows: int, dtype: torch.dtype = torch.float32) -> Count | None:
    """``count`` with the Triton kernels; None where they do not apply: without Triton, or for longer rows."""
    if find_spec("triton") is None or d > LONGEST or dtype == torch.float64:
        return None
    with counting_kernels():
        return count(method, d, rows, dtype)


@contextmanager
def observed() -> Iterator[list[str]]:
    """Yields a list to which the names of all operations and kernels within the context are appended, in order."""
    with _Counter() as counter:
        yield counter.names


def continued(method: Method, d: int, rows: int, dtype: torch.dtype = torch.float32) -> Count:
    """``count`` of a method without blocks, extrapolated from three small sizes: its numbers are of degree two in d."""
    step = 8
    if d % step:
        return count(method, d, rows, dtype)
    samples = [count(method, n * step, rows, dtype) for n in (1, 2, 3)]

    def at(name: str) -> int:
        a, b, c = (getattr(sample, name) for sample in samples)
        t = d // step - 1
        return a + t * (b - a) + t * (t - 1) // 2 * (c - 2 * b + a)  # Newton's form

    return Count(at("launches"), at("depth"), at("operations"), at("bytes"), samples[0].library)


class _Counter(TorchDispatchMode):
    """Counts every operation that is not a view, an allocation or a query.

    Depth is a property of memory, not of tensors, so that views and writes in place count: an operation that reads
    memory comes after all operations that wrote there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = Count()
        self.names: list[str] = []
        self.depths: dict[int, tuple[Any, int]] = {}  # holds the storage, so that its address is not reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        outputs = _tensors(out)
        if not outputs or func in _FREE or _is_view(func):
            return out
        read = _read(func, args, _tensors((args, kwargs)))
        if func.overloadpacket in _LIBRARY:
            self.count.library.add(func.overloadpacket.__name__)
        moved = sum(t.numel() * t.element_size() for t in (*read, *outputs))
        self._add(func.overloadpacket.__name__, read, outputs, _operations(func, args, outputs), moved)
        return out

    def __enter__(self) -> _Counter:
        if find_spec("triton"):
            from fasth.reflections.triton import launching

            launching.observers.append(self._launch)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if find_spec("triton"):
            from fasth.reflections.triton import launching

            launching.observers.remove(self._launch)

    def _launch(self, kernel: Any, options: dict[str, int], arguments: dict[str, Any]) -> None:
        """Counts the launch of a Triton kernel, which the dispatcher does not see."""
        written = [t for name, t in arguments.items() if name in _WRITTEN[kernel.__name__] and t is not None]
        read = [t for name, t in arguments.items() if isinstance(t, Tensor) and name not in _WRITTEN[kernel.__name__]]
        operations, reflectors = _KERNELS[kernel.__name__](arguments)
        others = [t for name, t in arguments.items() if isinstance(t, Tensor) and name != "V"]
        itemsize = arguments["V"].element_size() if "V" in arguments else 0
        moved = reflectors * itemsize + sum(t.numel() * t.element_size() for t in others)
        self._add(kernel.__name__, read, written, operations, moved)

    def _add(self, name: str, read: Sequence[Tensor], written: Sequence[Tensor], operations: int, moved: int) -> None:
        count = self.count
        self.names.append(name)
        count.launches += 1
        count.operations += operations
        count.bytes += moved
        after = 1 + max((self._depth(t) for t in read), default=0)
        for t in written:
            storage = t.untyped_storage()
            self.depths[storage._cdata] = storage, max(after, self._depth(t))
        count.depth = max(count.depth, after)

    def _depth(self, t: Tensor) -> int:
        return self.depths.get(t.untyped_storage()._cdata, (None, 0))[1]


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, (list, tuple)):
        return [t for branch in tree for t in _tensors(branch)]
    if isinstance(tree, dict):
        return _tensors(list(tree.values()))
    return [tree] if isinstance(tree, Tensor) else []


def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _read(func: Any, args: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Returns the inputs whose values are read. Tensors that are only overwritten, as ``out`` or by a copy, are not."""
    if func.overloadpacket in _OVERWRITES:
        return list(inputs[1:])
    names = [a.name for a in func._schema.arguments if a.is_write and a.kwarg_only]
    return list(inputs[: len(inputs) - len(names)])


_FREE = {aten.detach.default, aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
         aten.new_empty.default, aten._unsafe_view.default, aten._reshape_alias.default}  # fmt: skip
_OVERWRITES = {aten.copy_, aten.fill_, aten.zero_}


def _product(A: Tensor, B: Tensor) -> int:
    return 2 * A.numel() * (B.shape[-1] if B.ndim > 1 else 1)


def _lu(A: Tensor) -> int:
    return 2 * A.shape[-1] ** 3 // 3


def _exponential(A: Tensor) -> int:
    """Five products to degree 18 and, for a norm up to about ten, three squarings. The derivative has size 2 d."""
    return 16 * A.shape[-1] ** 3


_PRODUCTS: dict[Any, Callable[..., int]] = {
    aten.mm: _product,
    aten.bmm: _product,
    aten.mv: _product,
    aten.dot: _product,
    aten.addmm: lambda C, A, B, *_: _product(A, B),
    aten.addmm_: lambda C, A, B, *_: _product(A, B),
    aten.baddbmm: lambda C, A, B, *_: _product(A, B),
    aten.baddbmm_: lambda C, A, B, *_: _product(A, B),
    aten.addmv: lambda c, A, b, *_: _product(A, b),
    aten.addr: lambda C, *_: 2 * C.numel(),
    aten.addr_: lambda C, *_: 2 * C.numel(),
    aten.linalg_solve_triangular: lambda A, B, *_: A.shape[-1] * B.numel(),
}
_LIBRARY: dict[Any, Callable[..., int]] = {
    aten._linalg_solve_ex: lambda A, B, *_: _lu(A) + 2 * A.shape[-1] * B.numel(),
    aten.linalg_lu_factor_ex: lambda A, *_: _lu(A),
    aten.linalg_lu_solve: lambda LU, pivots, B, *_: 2 * LU.shape[-1] * B.numel(),
    aten.linalg_inv_ex: lambda A, *_: 3 * _lu(A),
    aten.linalg_matrix_exp: lambda A, *_: _exponential(A),
    aten._linalg_slogdet: lambda A, *_: _lu(A),
}


def _operations(func: Any, args: Any, outputs: Sequence[Tensor]) -> int:
    """Counts floating-point operations: exact for products, one per number of the result elsewhere."""
    formula = _PRODUCTS.get(func.overloadpacket) or _LIBRARY.get(func.overloadpacket)
    return formula(*args) if formula else math.prod(outputs[0].shape)


# For each Triton kernel: the arguments that it writes, its operations, and how many numbers of V it reads.
_WRITTEN = {
    "factors": {"T", "SCALE"},
    "sweep": {"OUT", "COPY", "Z", "STATES"},
    "gradient": {"DV"},
    "sums_over_rows": {"DSIGMA", "DBIAS"},
    "recurrence": {"OUT"},
    "recurrence_backward": {"DX", "DH0"},
}


def _stored(a: dict[str, Any], used: int) -> int:
    """How many numbers of V hold reflectors: all, or those right of the diagonal."""
    return len(a["V"]) * (used * a["d"] - (0 if a["FORM"] == FULL else used * (used - 1) // 2))


def _of_factors(a: dict[str, Any]) -> tuple[int, int]:
    stored, K = _stored(a, a["r"]), a["K"]
    return 2 * K * stored + 4 * K**3 * a["LEVELS"] * a["blocks"] * len(a["V"]), 2 * stored


def _of_sweep(a: dict[str, Any]) -> tuple[int, int]:
    rows = a["m"] + a["m2"]
    return rows * (4 * a["r"] * a["d"] + 2 * a["K"] * a["r"]) * len(a["V"]), rows * _stored(a, a["r"])


def _gradient(a: dict[str, Any]) -> tuple[int, int]:
    """Zᵀ g and Rᵀ O over the rows, N Y, and Zᵀ R, which every tile of columns recomputes."""
    r, d, B, tiles = a["used"], a["d"], len(a["V"]), -(-a["d"] // a["BD"])
    return B * (4 * a["m"] * r * d + 2 * a["GROUP"] * r * (d + a["m"] * tiles)), _stored(a, r)


def _of_recurrence(a: dict[str, Any]) -> tuple[int, int]:
    """A product of h × h a sequence and time. W is read from the cache: it counts no bytes."""
    return 2 * a["times"] * a["batch"] * a["h"] ** 2, 0


def _of_sums(a: dict[str, Any]) -> tuple[int, int]:
    return a["m"] * (2 * a["k"] + a["n"]), 0


_KERNELS: dict[str, Callable[[dict[str, Any]], tuple[int, int]]] = {
    "factors": _of_factors,
    "sweep": _of_sweep,
    "gradient": _gradient,
    "sums_over_rows": _of_sums,
    "recurrence": _of_recurrence,
    "recurrence_backward": _of_recurrence,
}
