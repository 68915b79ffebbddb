"""A fragment's int8 payloads, leaf by leaf through the compiled kernels.

What a kernel points to is looked up and checked once for a whole array: doing it for each leaf took
a fifth of the time. Leaf ``k`` has the parameters from ``k * LEAF_PARAMS`` on. A walk holds on to
its arrays, and answers None or False for what a kernel refuses; what it has written of that leaf is
then worthless.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from dugnad.averaging.kernels import (
    LANES,
    PAST_BYTES_MIN,
    Kernels,
    Octets,
    aligned,
    floats_at,
    goes_past,
    int8_size,
    octets_at,
    room_at,
)
from dugnad.averaging.tree import LEAF_PARAMS, Vector

_BLOCK: Final = 1024
_LEAF_BYTES: Final = int8_size(LEAF_PARAMS)


class HandInWalk:
    """Encodes residual + (ref - theta); ``moved`` is (ref, theta, residual)."""

    def __init__(
        self,
        native: Kernels,
        moved: tuple[Vector, Vector, Vector],
        out: Octets,
        rest: Vector,
        past_from: int = PAST_BYTES_MIN,
    ) -> None:
        """The payload goes into ``out``, and what it loses into ``rest``."""
        self._n = n = rest.size
        self._kernel = native.call["hand_in"]
        self._sources = [floats_at(one, n) for one in moved]
        self._out = room_at(out, octets_at(out, int8_size(n)))
        self._rest = room_at(rest, floats_at(rest, n))
        self._past = goes_past(rest, past_from)
        self._sums, bench = np.empty(2), aligned(4 * _BLOCK + 16 * LANES)
        at = bench.ctypes.data
        self._rooms = at, at, self._sums.ctypes.data, at + 4 * _BLOCK
        self._keep = moved, out, rest, bench

    def leaf(self, k: int) -> tuple[float, float] | None:
        """Encode leaf ``k``; returns the sums of squares of progress and rest."""
        start, to = k * LEAF_PARAMS, self._out + k * _LEAF_BYTES
        ref, theta, residual = (one + 4 * start for one in self._sources)
        rest, length = self._rest + 4 * start, min(LEAF_PARAMS, self._n - start)
        moved = ref, theta, residual
        status = self._kernel(*moved, to, to, rest, *self._rooms, self._past, length)
        return None if status else (float(self._sums[0]), float(self._sums[1]))


class SquaresWalk:
    """Sums the squares of what a payload of ``n`` parameters decodes to."""

    def __init__(self, native: Kernels, payload: Octets, n: int) -> None:
        self._n = n
        self._kernel = native.call["int8_squares"]
        self._payload = octets_at(payload, int8_size(n))
        self._sums, bench = np.empty(1), aligned(4 * _BLOCK + 8 * LANES)
        self._bench = bench.ctypes.data
        self._rooms = self._sums.ctypes.data, self._bench + 4 * _BLOCK
        self._keep = payload, bench

    def span(self, k: int, start: int, stop: int) -> float | None:
        """Return the sum over the parameters ``start`` to ``stop`` of leaf ``k``."""
        data, length = self._payload + k * _LEAF_BYTES, min(LEAF_PARAMS, self._n - k * LEAF_PARAMS)
        if not 0 <= start < stop <= length:
            raise ValueError(f"parameters {start} to {stop} of a leaf of {length}")
        status = self._kernel(data, data, self._bench, start, stop, *self._rooms, length)
        return None if status else float(self._sums[0])


class StepWalk:
    """Takes the outer step without momentum with what a payload decodes to."""

    def __init__(
        self,
        native: Kernels,
        payload: Octets,
        theta: Vector,
        eta: np.float32,
        out: Vector,
        past_from: int = PAST_BYTES_MIN,
    ) -> None:
        """From ``theta`` to ``out``."""
        self._n = n = theta.size
        self._kernel, self._eta = native.call["int8_step"], eta
        self._payload = octets_at(payload, int8_size(n))
        self._theta = floats_at(theta, n)
        self._out, self._past = room_at(out, floats_at(out, n)), goes_past(out, past_from)
        leaf = aligned(4 * min(n, LEAF_PARAMS))
        self._leaf, self._view = leaf.ctypes.data, leaf.data
        self._keep = payload, theta, out

    def leaf(self, k: int) -> memoryview | None:
        """Step leaf ``k``; returns its bytes while they lie in the cache: valid until the next."""
        start, data = k * LEAF_PARAMS, self._payload + k * _LEAF_BYTES
        length, leaf = min(LEAF_PARAMS, self._n - start), self._leaf
        theta, out = self._theta + 4 * start, self._out + 4 * start
        status = self._kernel(data, data, theta, self._eta, out, leaf, leaf, self._past, length)
        return None if status else self._view[: 4 * length]


class MergeWalk:
    """Encodes a sum of payloads, each times a factor, of as many parameters as ``rounding``."""

    def __init__(
        self,
        native: Kernels,
        payloads: Sequence[Octets],
        out: Octets,
        rounding: Vector,
        share: np.float32,
        past_from: int = PAST_BYTES_MIN,
    ) -> None:
        """Into ``out``; what that loses, times ``share``, into ``rounding``."""
        self._n = n = rounding.size
        self._kernel, self._share = native.call["int8_merge"], share
        self._places = np.array([octets_at(one, int8_size(n)) for one in payloads], np.int64)
        self._out = room_at(out, octets_at(out, int8_size(n)))
        self._rounding = room_at(rounding, floats_at(rounding, n))
        bench = aligned(4 * _BLOCK)
        self._bench, self._past = bench.ctypes.data, goes_past(rounding, past_from)
        self._keep = payloads, out, rounding, bench

    def leaf(self, k: int, factors: Vector) -> bool:
        """Merge leaf ``k``; ``factors`` has one for each payload."""
        start, at = k * LEAF_PARAMS, k * _LEAF_BYTES
        count, to, rounding = self._places.size, self._out + at, self._rounding + 4 * start
        sources = self._places.ctypes.data, floats_at(factors, count), count, at
        ways = self._bench, self._bench, self._past, min(LEAF_PARAMS, self._n - start)
        return self._kernel(*sources, to, to, rounding, self._share, *ways) == 0
