"""Large arrays in memory that is used again.

The system zeroes a fresh page when it is first touched, and on a virtual machine has to get it from
the host before: more work than the arithmetic on it (a quarter of an exchange's CPU, measured). So
arrays of a fragment's size come from here. Their memory returns when the last view of one is gone,
and waits for the next array of the same size.
"""

from __future__ import annotations

import mmap
import weakref
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from dugnad.averaging.tree import Vector

POOLED_BYTES_MIN: Final = 1 << 20
"""Smaller arrays are left to malloc, which keeps their pages anyway."""

IDLE_PER_USED: Final = 1
"""Memory that waits is at most so many times what is in use. An exchange of all fragments at once
holds nearly twice as much at its height as between two; what waits then was there at the height, so
keeping it makes no peak higher."""

_PRIVATE: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class Pages:
    """Memory by size. Safe in any thread; nobody gives anything back by hand.

    There is no lock, since a view may die, and its memory come back, in the middle of anything:
    every step is one operation on a list or dictionary.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, list[mmap.mmap]] = {}
        """By size; the one that was asked for or given back last is at the end."""
        self._used: dict[int, tuple[object, int]] = {}

    @property
    def used(self) -> int:
        """Bytes in arrays that somebody holds."""
        return sum(size for _, size in list(self._used.values()))

    @property
    def idle(self) -> int:
        """Bytes that wait."""
        return sum(size * len(self._waiting.get(size, ())) for size in tuple(self._waiting))

    def octets(self, size: int) -> npt.NDArray[np.uint8]:
        """``size`` bytes, whatever they hold."""
        if size < POOLED_BYTES_MIN:
            return np.empty(size, np.uint8)
        memory = self._memory(size)
        array: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        word = weakref.ref(array, partial(self._back, memory, size))
        self._used[id(word)] = word, size
        return array

    def vector(self, n: int) -> Vector:
        """``n`` numbers, whatever they are."""
        return self.octets(4 * n).view(np.float32)

    def _memory(self, size: int) -> mmap.mmap:
        waiting = self._waiting.pop(size, [])
        try:
            memory = waiting.pop()
        except IndexError:
            return _mapped(size)
        if waiting:
            self._waiting[size] = waiting
        return memory

    def _back(self, memory: mmap.mmap, size: int, word: object) -> None:
        """Called when no view of an array is left: they all hold on to it."""
        self._used.pop(id(word), None)
        waiting = self._waiting.pop(size, [])
        waiting.append(memory)
        self._waiting[size] = waiting
        while self.idle > self.used * IDLE_PER_USED:
            self._drop_one()

    def _drop_one(self) -> None:
        """Let go of memory of the size that has been left alone for longest."""
        for size in tuple(self._waiting):
            waiting = self._waiting.pop(size, [])
            if waiting:
                waiting.pop()
            if waiting:
                self._waiting[size] = waiting
            return


def _mapped(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=_PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


PAGES: Final = Pages()
"""The process's own."""
