"""One leaf at a time: room for it, its encoding among others, its squared norm.

Work that goes leaf by leaf stays in a processor's cache and needs no second array of a fragment's
size: pages that the system zeroes first cost as much as the arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from dugnad.averaging import kernels
from dugnad.averaging.codec_base import octets_of
from dugnad.averaging.codecs import Codec, CodecError, leaf_bounds
from dugnad.averaging.kernels import LANES
from dugnad.averaging.pages import PAGES
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

    def add_to(self, k: int, total: Vector, factor: np.float32, *, first: bool) -> bool:
        """Add ``factor`` times leaf ``k`` to ``total``, or put it there if ``first``, in one pass.

        False where that cannot be done or the leaf is none: :meth:`leaf` raises then.
        """
        octets = octets_of(self.payload[slice(*self.bounds[k])])
        return self.codec.add_leaf(octets, total, factor, first=first)

    def leaf(self, k: int, room: Vector, scratch: Vector) -> Vector:
        """Return leaf ``k`` decoded, in the first part of ``room``; raises CodecError.

        Both are from :func:`leaf_room`, and what ``scratch`` holds is overwritten.
        """
        first, last = self.bounds[k]
        length = min(LEAF_PARAMS, self.n - k * LEAF_PARAMS)
        return self.codec.decode(self.payload[first:last], length, room[:length], scratch)


def difference(a: Vector, b: Vector) -> Vector:
    """Return a - b of vectors of a fragment's size, in memory that is used again."""
    out, native = PAGES.vector(a.size), kernels.current()
    if native is None:
        return np.subtract(a, b, out=out)
    native.difference(a, b, out)
    return out


def leaf_room(n: int) -> Vector:
    """Return an array for any leaf of ``n`` parameters."""
    return np.empty(min(n, LEAF_PARAMS), np.float32)


_LANE_ROWS: Final = 128
"""Rows of lanes at a time: 256 KiB of float64, where numpy is fastest."""


def squared(piece: Vector) -> float:
    """Return the sum of squares, in float64: infinite or NaN if an element is.

    In lanes (:data:`~dugnad.averaging.kernels.LANES`), so it is the same bits on every machine.
    """
    native = kernels.current()
    return native.squares(piece) if native is not None else _squared(piece)


def _squared(piece: Vector) -> float:
    lanes = np.zeros(LANES, np.float64)
    table = np.empty((_LANE_ROWS + 1, LANES), np.float64)
    for start in range(0, piece.size, _LANE_ROWS * LANES):
        part = piece[start : start + _LANE_ROWS * LANES]
        rows, rest = divmod(part.size, LANES)
        table[0] = lanes
        squares = table[1 : rows + 1]
        np.copyto(squares, part[: rows * LANES].reshape(rows, LANES))
        np.multiply(squares, squares, out=squares)
        np.add.reduce(table[: rows + 1], axis=0, out=lanes)  # row by row: columns are apart
        if rest:
            tail = part[rows * LANES :].astype(np.float64)
            lanes[:rest] += tail * tail
    return float(np.add.accumulate(lanes)[-1])


def encode_progress(
    codec: Codec,
    moved: tuple[Vector, Vector, Vector],
    octets: memoryview,
    rest: Vector,
    rooms: tuple[Vector, Vector],
) -> tuple[float, float]:
    """Encode a leaf of residual + (ref - theta), ``moved`` being (ref, theta, residual).

    Returns the squared norms of ref - theta and of ``rest``, which gets what encoding loses. Raises
    :class:`~dugnad.averaging.codecs.CodecError` for parameters that are not finite.
    """
    native, (ref, theta, residual), (part, bench) = kernels.current(), moved, rooms
    if native is not None:
        progress = native.progress(ref, theta, residual, part)
    else:
        np.subtract(ref, theta, out=part)
        progress = squared(part)
        np.add(residual, part, out=part)
    if not math.isfinite(progress):
        raise CodecError("the learner's parameters are not finite")
    try:
        codec.encode_rest(part, octets, rest, bench)
    except CodecError as fault:
        raise CodecError(f"progress cannot be encoded: {fault.reason}") from fault
    return progress, squared(rest)
