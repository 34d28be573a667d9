"""A driver for Triton whose GPU is ``machine.py``: all else, from specialization to launches, is Triton's own."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import compiler
from triton.runtime import driver

from fasth.reflections import core, planner
from fasth.reflections.triton import launch

from . import memory
from .machine import GLOBAL, Code, Fault, Machine
from .memory import Memory
from .program import parsed

SHARED_MEMORY = {75: 64 << 10, 80: 163 << 10, 90: 227 << 10}  # bytes that a program may have


@dataclass
class Launch:
    """One launch: its counts, and the errors found in it."""

    kernel: str
    grid: int
    constants: dict[str, Any]
    hash: str  # of the compiled kernel
    found: Counter
    instructions: int  # of warps
    flops: int
    sectors: int  # of 32 bytes, asked for by the requests of warps
    used: int  # bytes of these that were asked for
    again: Callable[[], None]  # the same launch, recorded as another


class Heap:
    """The storages of a launch's tensors, in one memory, apart from one another."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.places: dict[int, tuple[int, np.ndarray]] = {}
        end = 512
        for t in tensors:
            storage = _bytes(t)
            if len(storage) and t.untyped_storage().data_ptr() not in self.places:
                self.places[t.untyped_storage().data_ptr()] = end, storage
                end += -(-len(storage) // 512) * 512 + 512
        self.memory = Memory(end, np.zeros(end, bool))
        for start, storage in self.places.values():
            self.memory.bytes[start : start + len(storage)] = storage
        for t in tensors:
            if t.numel():
                start, storage = self.places[t.untyped_storage().data_ptr()]
                elements = torch.zeros(len(storage) // t.itemsize, dtype=torch.bool)
                elements.as_strided(t.shape, t.stride(), t.storage_offset()).fill_(True)
                of_bytes = np.repeat(elements.numpy(), t.itemsize)
                self.memory.valid[start : start + len(of_bytes)] |= of_bytes

    def address(self, t: Tensor) -> int:
        start, _ = self.places.get(t.untyped_storage().data_ptr(), (0, None))
        return GLOBAL + start + t.storage_offset() * t.itemsize

    def give_back(self) -> None:
        for start, storage in self.places.values():
            storage[:] = self.memory.bytes[start : start + len(storage)]


def _bytes(t: Tensor) -> np.ndarray:
    return torch.tensor([], dtype=torch.uint8).set_(t.untyped_storage()).numpy()


class Gpu:
    """Has what Triton asks of a driver, and records launches."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture
        self.launches: list[Launch] = []
        self.ptx: dict[str, str] = {}
        self.codes: dict[str, Code] = {}
        self.utils = self

    def get_current_device(self) -> int:
        return self.architecture

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY[self.architecture]}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return self, self, 0, 0, 1024

    def unload_module(self, module: Any) -> None:
        pass

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        names = source.fn.arg_names
        constants = {names[place[0]]: value for place, value in source.constants.items() if len(place) == 1}
        kinds = list(source.signature.items())

        def run(x: int, y: int, z: int, *options_and_arguments: Any) -> None:
            arguments = options_and_arguments[-len(kinds) :]
            tensors = [a for (_, kind), a in zip(kinds, arguments, strict=True) if kind != "constexpr"]
            if (y, z) != (1, 1):
                raise NotImplementedError("a grid of several dimensions")
            self._run(metadata, x, tensors, constants)

        return run

    def _run(self, metadata: Any, grid: int, arguments: list[Any], constants: dict[str, Any]) -> None:
        if metadata.hash not in self.codes:
            self.codes[metadata.hash] = Code(parsed(self.ptx[metadata.hash]))
        code = self.codes[metadata.hash]
        heap = Heap([a for a in arguments if isinstance(a, Tensor)])
        values = [heap.address(a) if isinstance(a, Tensor) else int(a) for a in arguments]
        names = [name for name, _ in code.program.parameters]
        values += [0] * (len(names) - len(values))  # pointers to scratch memory, of which there is none
        machine = Machine(code, dict(zip(names, values, strict=True)), grid, metadata.shared, heap.memory)
        try:
            with np.errstate(all="ignore"):
                machine.run()
        except Fault as fault:
            machine.found["fault", str(fault)] += 1
        heap.give_back()
        *_, sectors, used = (int(n) for n in heap.memory.counts)
        counts = machine.instructions, machine.flops, sectors, used

        def again() -> None:
            self._run(metadata, grid, arguments, constants)

        name = code.program.name
        self.launches.append(Launch(name, grid, constants, metadata.hash, machine.found, *counts, again))

    @property
    def problems(self) -> list[str]:
        return [
            f"{one.kernel}: {what} × {n}, {where}" for one in self.launches for (what, where), n in one.found.items()
        ]


_gpus: dict[int, Gpu] = {}  # with what they have compiled


@contextlib.contextmanager
def emulated(architecture: int) -> Iterator[Gpu]:
    """Within it Triton's kernels run on CPU tensors, and fasth takes these for a GPU's. New buffers are marked."""
    gpu = _gpus.setdefault(architecture, Gpu(architecture))
    gpu.launches = []
    before, initialize = driver._active, compiler.CompiledKernel.__init__

    def remember(self: Any, source: Any, metadata_group: Any, hash: str) -> None:
        initialize(self, source, metadata_group, hash)
        gpu.ptx[self.metadata.hash] = self.asm["ptx"]

    planner.forget_plans()
    driver.set_active(gpu)
    try:
        with (
            patch.object(compiler.CompiledKernel, "__init__", remember),
            patch.object(torch, "empty", _marked(torch.empty)),
            patch.object(torch, "empty_like", _marked(torch.empty_like)),
            patch.object(Tensor, "new_empty", _marked(Tensor.new_empty)),
            patch.object(core, "_core", None),
            patch.object(planner, "_kernels_on", "cpu"),
            patch.object(planner, "_forced", True),
        ):
            yield gpu
    finally:
        driver._active = before
        planner.forget_plans()


def _marked(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """New buffers have the bytes that memory takes for never written."""

    def made(*arguments: Any, **options: Any) -> Tensor:
        t = make(*arguments, **options)
        if t.is_floating_point() and not t.is_meta and t.numel():
            _bytes(t).view(np.int16)[:] = memory.POISON
        return t

    return made


def tf32(allowed: bool) -> Any:
    """Sets whether the gradient may use TF32, the answer of ``precision.tf32_allowed`` on a GPU."""
    return patch.object(launch, "tf32_allowed", lambda t: allowed)
