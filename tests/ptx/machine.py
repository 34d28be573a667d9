"""Runs a program: all threads of all CTAs at once, a NumPy array for each register.

Diverged threads run in the order of their blocks, smallest first: compilers place the block where they converge last.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from . import memory
from .instructions import compiled, operations
from .memory import Memory
from .program import Program

SHARED = 1 << 30  # where shared memory begins, and global memory
GLOBAL = 1 << 40
STORAGE = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}


class Fault(Exception):
    """A program that would hang, or be undefined, on a GPU."""


class Code:
    """A program whose instructions are functions of a machine and its active threads (None: all of them)."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.blocks = []
        for block in program.blocks:
            last = block[-1]
            ends = last.opcode in ("bra", "bra.uni", "ret", "bar.sync", "bar.warp.sync")
            self.blocks.append(([compiled(one) for one in (block[:-1] if ends else block)], last if ends else None))
        self.lengths = np.array([len(block) for block in program.blocks])
        self.operations = np.array([sum(map(operations, block)) for block in program.blocks])


class Machine:
    """A launch of ``grid`` CTAs on global memory."""

    def __init__(self, code: Code, parameters: dict[str, int], grid: int, shared: int, memory_: Memory) -> None:
        self.code, self.parameters, self.threads, self.grid = code, parameters, code.program.threads, grid
        n = self.n = self.threads * grid
        self.everybody = np.ones(n, bool)
        self.registers: dict[str, np.ndarray] = {}
        thread = np.arange(n, dtype=np.uint32)
        self.lane = (thread % np.uint32(32)).astype(np.int64)
        cta = thread // np.uint32(self.threads)
        self.special = {"%tid.x": thread % np.uint32(self.threads), "%ctaid.x": cta}
        self.clock, self.warp_clock = np.zeros(grid, np.int64), np.zeros(n // 32, np.int64)
        shared += -shared % 16
        self.spaces = {"global": memory_, "shared": Memory(max(shared * grid, 2))}
        start = cta.astype(np.int64) * shared
        self.start, self.shared = start, shared
        self.tick, self.copies, self.groups = 0, [], np.zeros(n, np.int64)
        self.found: Counter = Counter()
        self.instructions = self.flops = 0

    def run(self, limit: int = 1_000_000) -> None:
        pc, waiting = np.zeros(self.n, np.int64), np.zeros(self.n, bool)
        for _ in range(limit):
            running = (pc >= 0) & ~waiting
            if not running.any():
                if waiting.any():
                    raise Fault("threads wait at a barrier that others never reach")
                return
            at = int(pc[running].min())
            active = running & (pc == at)
            self._block(at, active, None if active.all() else active, pc, waiting)
        raise Fault("the program does not end")

    def _block(self, at: int, active: np.ndarray, mask: np.ndarray | None, pc: np.ndarray, waiting: np.ndarray) -> None:
        steps, end = self.code.blocks[at]
        for step in steps:
            step(self, mask)
        warps = int(active.reshape(-1, 32).any(1).sum())
        self.instructions += warps * int(self.code.lengths[at])
        self.flops += int(active.sum()) * int(self.code.operations[at])
        pc[active] = at + 1
        if end is None:
            return
        taken = active if end.guard is None else active & (self.registers[end.guard[0]] ^ end.guard[1])
        if end.opcode == "ret":
            pc[taken] = -1
        elif end.opcode.startswith("bra"):
            pc[taken] = self.code.program.labels[end.operands[0].text]
        elif end.opcode == "bar.warp.sync":
            self.whole_warps(mask, end)
            self.warp_clock += active.reshape(-1, 32).any(1)
        else:
            self.whole_warps(mask, end)
            waiting |= active
        arrived = (waiting | (pc < 0)).reshape(self.grid, -1).all(1) & waiting.reshape(self.grid, -1).any(1)
        self.clock += arrived
        waiting &= ~np.repeat(arrived, self.threads)

    def whole_warps(self, mask: np.ndarray | None, one: Any) -> None:
        if mask is not None:
            lanes = mask.reshape(-1, 32)
            if (lanes.any(1) & ~lanes.all(1)).any():
                raise Fault(f"lanes of a warp are missing at {one}")

    # Methods that instructions call.

    def read(self, register: str, mask: np.ndarray | None = None) -> np.ndarray:
        if register not in self.registers:
            raise Fault(f"{register} is read before it is written")
        return self.registers[register]

    def write(self, register: str, width: int, value: Any, mask: np.ndarray | None) -> None:
        value = np.broadcast_to(np.asarray(value), (self.n,))
        if value.dtype != STORAGE[width]:
            value = value.view(STORAGE[width]) if value.itemsize * 8 == width else value.astype(STORAGE[width])
        if mask is not None:
            value = np.where(mask, value, self.registers.get(register, np.zeros((), STORAGE[width])))
        self.registers[register] = value

    def access(
        self, space: str, write: bool, address: np.ndarray, active: np.ndarray, data: np.ndarray, width: int, one: Any
    ) -> None:
        buffer, shared = self.spaces[space], space == "shared"
        low = self.start if shared else np.zeros(self.n, np.int64)
        high = low + (self.shared if shared else len(buffer.bytes))
        place = address + (low - SHARED if shared else -GLOBAL)
        self.tick += 1
        found = np.zeros((len(memory.KINDS), 3), np.int64)
        memory.access(
            write, shared, buffer.bytes, buffer.valid, buffer.shadow, buffer.seen, buffer.copying, buffer.counts,
            self.tick, place, active, low, high, width, self.threads, self.clock, self.warp_clock, data, found,
        )  # fmt: skip
        buffer.counts[int(write)] += 1
        for kind in np.flatnonzero(found[:, 0]):
            self.found[memory.KINDS[kind], str(one)] += int(found[kind, 0])

    def copy(
        self, target: np.ndarray, source: np.ndarray, active: np.ndarray, size: int, bytes_read: Any, one: Any
    ) -> None:
        """cp.async: shared memory has the bytes from the wait on, or zeros for threads whose ``bytes_read`` is 0."""
        bytes_read = np.broadcast_to(bytes_read, (self.n,))
        if not np.isin(bytes_read[active], (0, size)).all():
            raise Fault(f"part of a number is copied at {one}")
        data = np.zeros((self.n, size), np.uint8)
        self.access("global", False, source, active & (bytes_read == size), data, 4, one)
        nothing = np.full((self.n, size // 2), memory.POISON, np.uint16).view(np.uint8)
        self.access("shared", True, target, active, nothing, 4, one)
        self._under_way(target, active, size, True)
        self.copies.append((self.groups.copy(), active, target, data, one))

    def wait(self, pending: int, mask: np.ndarray | None) -> None:
        left = []
        for group, active, target, data, one in self.copies:
            done = active & (group < self.groups - pending) & (self.everybody if mask is None else mask)
            self._under_way(target, done, data.shape[1], False)
            self.access("shared", True, target, done, data, 4, one)
            if (active & ~done).any():
                left.append((group, active & ~done, target, data, one))
        self.copies = left

    def _under_way(self, target: np.ndarray, active: np.ndarray, size: int, copying: bool) -> None:
        place = (target - SHARED + self.start)[active][:, None] + np.arange(size)
        self.spaces["shared"].copying[place] = copying
