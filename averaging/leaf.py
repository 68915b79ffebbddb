"""One leaf at a time: room for it, its encoding among others, its squared norm.

Work that goes leaf by leaf stays in a processor's cache and needs no second array of a fragment's
size: pages that the system zeroes first cost as much as the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dugnad.averaging.codecs import Codec, CodecError, leaf_bounds
from dugnad.averaging.tree import LEAF_PARAMS, Bytes, Vector

PRODUCT_CHUNK: Final = 8192
"""Elements of one inner product: OpenBLAS starts threads above 10 000, which cost more than they
bring here, and 64 KiB of float64 stay in a processor's nearest caches."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A payload of ``n`` parameters that is decoded a leaf at a time."""

    codec: Codec
    payload: memoryview
    bounds: list[tuple[int, int]]
    """The byte range of each leaf."""
    n: int

    @classmethod
    def of(cls, codec: Codec, payload: Bytes, n: int) -> Encoded:
        """A payload of this size, or :class:`~dugnad.averaging.codecs.CodecError`."""
        view = memoryview(payload).cast("B")
        if len(view) != codec.encoded_size(n):
            raise CodecError(f"{len(view)} bytes where {codec.encoded_size(n)} were due")
        return cls(codec, view, leaf_bounds(codec, n), n)

    def leaf(self, k: int, room: Vector, scratch: Vector) -> Vector:
        """Return leaf ``k`` decoded, in the first part of ``room``; raises CodecError.

        Both are from :func:`leaf_room`, and what ``scratch`` holds is overwritten.
        """
        first, last = self.bounds[k]
        length = min(LEAF_PARAMS, self.n - k * LEAF_PARAMS)
        return self.codec.decode(self.payload[first:last], length, room[:length], scratch)


def leaf_room(n: int) -> Vector:
    """Return an array for any leaf of ``n`` parameters."""
    return np.empty(min(n, LEAF_PARAMS), np.float32)


_NARROW_MIN: Final = 1e-20
_NARROW_MAX: Final = 1e35
"""Sums of squares that float32 holds: squares that it flushes to 0 are then nothing beside them."""


def squared(piece: Vector, wide: npt.NDArray[np.float64] | None = None) -> float:
    """Return the sum of squares, in float64: infinite or NaN if an element is.

    ``wide`` is scratch of PRODUCT_CHUNK elements.
    """
    if wide is None:
        wide = np.empty(PRODUCT_CHUNK, np.float64)
    total = 0.0
    for start in range(0, piece.size, PRODUCT_CHUNK):
        part = piece[start : start + PRODUCT_CHUNK]
        row = wide[: part.size]
        np.copyto(row, part)
        total += float(np.dot(row, row))
    return total


def about_squared(piece: Vector) -> float:
    """Return the sum of squares to a few parts in a million, in a third of the time.

    For what one peer alone goes by: each machine has other last bits. Chunks are summed in float32
    where their sum fits, else as :func:`squared` does.
    """
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, piece.size, PRODUCT_CHUNK):
            part = piece[start : start + PRODUCT_CHUNK]
            found = float(np.dot(part, part))
            total += found if _NARROW_MIN <= found <= _NARROW_MAX else squared(part)
    return total
