"""Memory that checks every access: bounds, alignment, initialization, and races.

Global memory and the shared memory of all CTAs are each one array of bytes. Beside every two bytes stands who wrote and
who read them last, and when. Two accesses are unordered

* in two CTAs of a launch, always;
* in two warps of a CTA, without a ``bar.sync`` between them;
* in two lanes of a warp, with neither that nor a ``bar.warp.sync`` between them.

Two unordered accesses of which one writes are a race, unless it writes the value that is there: Triton stores copies
of one number by several threads. Where these copies differ, the result would depend on who comes last.
"""

from __future__ import annotations

import numpy as np
from numba import njit

POISON = 0x7FBA  # two bytes that were never written: a NaN in every dtype
KINDS = (
    "outside of every tensor", "misaligned", "read before it is written", "race of two CTAs", "race of two warps",
    "race within a warp", "lanes of one store differ", "read while it is copied",
)  # fmt: skip
OUTSIDE, MISALIGNED, UNSET, CTAS, WARPS, LANES, DIFFER, COPIED = range(len(KINDS))
SEVERAL, SEVERAL_WARPS, SEVERAL_CTAS = -2, -3, -4  # readers; −1 is none
COUNTS = ("loads", "stores", "sectors", "bytes used")


class Memory:
    """Bytes, which of them belong to a tensor, and the shadow of each two: of the last writer the thread, the clocks of
    its CTA and its warp and the access; of the readers the same, without the access."""

    def __init__(self, size: int, valid: np.ndarray | None = None) -> None:
        size += size % 2
        self.bytes = np.full(size // 2, POISON, np.uint16).view(np.uint8)
        self.valid = np.ones(size, bool) if valid is None else valid
        self.shadow = np.full((size // 2, 8), -1, np.int64)
        self.seen = np.full((size // 2 + 1, 2), -1, np.int64)  # the last request for these two bytes, and this sector
        self.copying = np.zeros(size, bool)  # a copy is under way
        self.counts = np.zeros(len(COUNTS), np.int64)


@njit(cache=True)
def access(
    write, by_writer, memory, valid, shadow, seen, copying, counts, tick, place, active, low, high, width, threads,
    clock, warp_clock, data, found,
):  # fmt: skip
    """Reads data: (threads, bytes), or writes it, where threads are active, each at its place between low and high.

    ``width``: bytes of a number. ``by_writer``: what nobody wrote in this launch is not initialized; otherwise that is
    what holds the mark of new buffers. ``threads``: of a CTA.
    found: (kinds, 3), how often, and of the first time the thread and the place.
    """
    size = data.shape[1]
    for i in range(len(place)):
        if not active[i]:
            continue
        me, at = i, place[i]
        cta, warp = me // threads, i // 32
        now, warp_now = clock[i // threads], warp_clock[warp]
        inside = at >= low[i] and at + size <= high[i]
        if inside:
            for b in range(at, at + size):
                inside = inside and valid[b]
        if not inside:
            _note(found, OUTSIDE, me, at)
            continue
        if (at - low[i]) % size:
            _note(found, MISALIGNED, me, at)
            continue
        request = tick * 65536 + warp
        for g in range(at // 2, (at + size) // 2):
            s = shadow[g]
            if seen[g, 0] != request:
                seen[g, 0] = request
                counts[3] += 2
            if seen[g // 16, 1] != request:
                seen[g // 16, 1] = request
                counts[2] += 1
            if by_writer and not write and s[0] == -1:
                _note(found, UNSET, me, at)
            if copying[2 * g]:
                _note(found, COPIED, me, at)
            here = 2 * g - at
            same = write and memory[2 * g] == data[i, here] and memory[2 * g + 1] == data[i, here + 1]
            if s[0] >= 0 and s[0] != me and not same:
                if s[0] // threads != cta:
                    _note(found, CTAS, me, at)
                elif s[1] == now and s[0] // 32 != me // 32:
                    _note(found, WARPS, me, at)
                elif s[1] == now and s[2] == warp_now:
                    _note(found, DIFFER if write and s[3] == tick else LANES, me, at)
            if write:
                if s[4] == SEVERAL_CTAS or (s[4] != -1 and s[7] != cta):
                    _note(found, CTAS, me, at)
                elif s[4] != -1 and s[5] == now and s[4] != me:
                    if s[4] == SEVERAL_WARPS or s[6] // 65536 != me // 32:
                        _note(found, WARPS, me, at)
                    elif s[6] % 65536 == warp_now % 65536:
                        _note(found, LANES, me, at)
                s[0], s[1], s[2], s[3] = me, now, warp_now, tick
                memory[2 * g], memory[2 * g + 1] = data[i, here], data[i, here + 1]
            else:
                _remember_reader(s, me, cta, now, warp_now)
                data[i, here], data[i, here + 1] = memory[2 * g], memory[2 * g + 1]
        if not write and not by_writer:
            for n in range(0, size, width):
                unset = True
                for b in range(n, n + width, 2):
                    unset = unset and data[i, b] == POISON & 255 and data[i, b + 1] == POISON >> 8
                if unset:
                    _note(found, UNSET, me, at)


@njit(cache=True)
def _remember_reader(s, me, cta, now, warp_now):
    """s[4]: the thread that read, or several; s[5]: its clock; s[6]: its warp and the clock of that; s[7]: its CTA."""
    if s[4] == SEVERAL_CTAS or (s[4] != -1 and s[7] != cta):
        s[4] = SEVERAL_CTAS
    elif s[4] == -1 or s[5] != now:
        s[4] = me
    elif s[4] != SEVERAL_WARPS and s[6] // 65536 == me // 32 and s[6] % 65536 != warp_now % 65536:
        s[4] = me  # the other lanes read before a bar.warp.sync
    elif s[4] != me:
        s[4] = SEVERAL if s[4] != SEVERAL_WARPS and s[6] // 65536 == me // 32 else SEVERAL_WARPS
    s[5], s[6], s[7] = now, me // 32 * 65536 + warp_now % 65536, cta


@njit(cache=True)
def _note(found, kind, thread, place):
    if found[kind, 0] == 0:
        found[kind, 1], found[kind, 2] = thread, place
    found[kind, 0] += 1
