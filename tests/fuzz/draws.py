"""Random numbers, shapes, strides and dtypes: all that a case is made of comes from its seed and number."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fasth.reflections import core

T = TypeVar("T")

DTYPES = {torch.float32: 45, torch.float64: 30, torch.bfloat16: 13, torch.float16: 12}
PRECISE = {torch.float32: 6, torch.float64: 4}
LOW = (torch.bfloat16, torch.float16)
# Powers of ten that reflectors and rows may have as their size, so that products stay in the range of the dtype.
REFLECTOR_SCALE = {torch.float64: 100, torch.float32: 30, torch.bfloat16: 30, torch.float16: 1}
ROW_SCALE = {torch.float64: 30, torch.float32: 5, torch.bfloat16: 3, torch.float16: 1}


class Draw:
    """The random source of one case. ``notes`` describe the case, ``actions`` count what it did."""

    def __init__(self, seed: int, case: int) -> None:
        self.random = random.Random(f"{seed} {case}")
        self.notes: list[str] = []
        self.actions: Counter[str] = Counter()
        self.first_dtype = "none"
        torch.default_generator.manual_seed(self.random.getrandbits(62))  # torch.manual_seed remembers every call

    def note(self, *words: object) -> None:
        self.notes.append(" ".join(map(str, words)))

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def choice(self, options: Sequence[T]) -> T:
        return options[self.random.randrange(len(options))]

    def weighted(self, weights: dict[T, int]) -> T:
        return self.random.choices(list(weights), list(weights.values()))[0]

    def between(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def size(self, largest: int = 40, rare: int = 0) -> int:
        """1 to ``largest``, more often small; now and then up to ``rare``."""
        if rare > largest and self.chance(0.01):
            return self.between(largest, rare)
        return min(1 + int(self.random.expovariate(1 / 9)), largest)

    def dtype(self, weights: dict[torch.dtype, int] = DTYPES) -> torch.dtype:
        dtype = self.weighted(weights)
        self.note(name := str(dtype).removeprefix("torch."))
        self.first_dtype = name if self.first_dtype == "none" else self.first_dtype
        return dtype

    def threads(self) -> None:
        """Now and then another number of threads for the cases that follow, this one first."""
        threads = self.weighted({1: 12, 2: 2, 3: 1, 4: 1})
        self.note("threads", threads)
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)

    def backend(self, cores: dict[str, Any]) -> None:
        """Mostly the compiled core that is used by default; at times another one, or PyTorch's operations."""
        name = self.weighted({"default": 14, "pytorch": 3, "baseline": 1, "avx2": 1})
        if name != "default":
            self.note(name)
        core._core = cores.get(name, cores["default"])

    def numbers(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Gaussian, drawn in float64 and rounded."""
        return torch.randn(shape, dtype=torch.float64).to(dtype)

    def scale(self, powers: dict[torch.dtype, int], dtype: torch.dtype) -> float:
        """1, or a power of ten that the dtype takes."""
        if self.chance(0.7):
            return 1.0
        return 10.0 ** self.between(-powers[dtype], powers[dtype])

    def rows(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Rows of one random size, in random strides."""
        return self.arranged(self.numbers(*shape, dtype=dtype) * self.scale(ROW_SCALE, dtype))

    def reflectors(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Full reflectors: Gaussian, or with zero, repeated or nearly parallel rows, or rows of many sizes."""
        V = self.numbers(*shape, dtype=dtype) * self.scale(REFLECTOR_SCALE, dtype)
        kind = self.weighted({"plain": 12, "zeros": 2, "repeated": 1, "parallel": 1, "sizes": 2, "integers": 1})
        if kind == "zeros":
            V = V * (torch.rand(*shape[:-1], 1) < 0.7)
        elif kind == "repeated" and shape[-2]:
            V = V[..., :1, :].expand(shape).clone()
        elif kind == "parallel" and shape[-2]:
            V = V[..., :1, :] + torch.finfo(dtype).eps ** 0.5 * V
        elif kind == "sizes":
            most = REFLECTOR_SCALE[dtype] / 2
            V = (V.double() * 10 ** torch.empty(*shape[:-1], 1).uniform_(-most, most)).to(dtype)
            V = torch.where(V.isfinite(), V, 1)
        elif kind == "integers":
            V = torch.randint(-2, 3, shape).to(dtype)
        self.note(kind, f"V {tuple(shape)}")
        return self.arranged(V)

    def arranged(self, t: Tensor) -> Tensor:
        """The same numbers with other strides: transposed in memory, with gaps, expanded, with an offset, negated."""
        layout = self.weighted(ARRANGED)
        if layout != "contiguous":
            self.note(layout)
        return _ARRANGE[layout](t)


def _transposed(t: Tensor) -> Tensor:
    return t.mT.contiguous().mT if t.ndim >= 2 else t


def _with_gaps(t: Tensor) -> Tensor:
    return t.repeat_interleave(2, -1)[..., ::2] if t.ndim else t


def _with_offset(t: Tensor) -> Tensor:
    return torch.cat((t.new_ones(3), t.flatten()))[3:].view(t.shape)


def _expanded(t: Tensor) -> Tensor:
    """The first row in the place of all."""
    return t[..., :1, :].expand(t.shape) if t.ndim >= 2 and t.shape[-2] else t


def _reversed_batch(t: Tensor) -> Tensor:
    return t.transpose(0, 1).contiguous().transpose(0, 1) if t.ndim >= 3 else t


def _negated(t: Tensor) -> Tensor:
    """Stored with the opposite sign, which PyTorch notes in a bit of the tensor."""
    return torch.complex(t, t).conj().imag if t.dtype in (torch.float32, torch.float64) else t


_ARRANGE: dict[str, Any] = {
    "contiguous": lambda t: t,
    "transposed": _transposed,
    "gaps": _with_gaps,
    "offset": _with_offset,
    "expanded": _expanded,
    "outer dimensions swapped": _reversed_batch,
    "negated": _negated,
}
ARRANGED = {name: 14 if name == "contiguous" else 1 for name in _ARRANGE}
