"""The topk codec: the largest values of each chunk, two magnitudes a chunk, Rice-coded gaps.

The size of a leaf follows from its length and the density alone. The gaps get a fixed room, a
little above what evenly spread positions need; where they need more, the smallest values are left
out, and so stay in the sender's residual. That is at most one in twelve, commonly none.

A leaf of n parameters is, in this order (integers little-endian, bits from the highest of a byte):

1. two counts of 16 bits: ``m`` kept values and ``h`` marks;
2. for each chunk of :data:`CHUNK` parameters begun two levels, three bytes: the first byte and the
   low half of the second are the level of unmarked values, the rest that of marked ones. The 12
   bits are those of a float32 below the sign: 8 of exponent, 4 of mantissa;
3. a fixed room of bits, in which follow each other: for each value its sign (1: negative) and its
   gap's low ``rice`` bits; for each mark its gap's low bits (:data:`MARK_RICE`); for each value its
   gap's upper part in unary (that many 0, then a 1); the same for each mark; and only 0.

A value's gap is the number of parameters passed over since the value before it, a mark's gap the
number of values passed over since the mark before it. So positions rise strictly whatever the bytes
are; what leads beyond the end is refused. Nothing is computed in floating point when decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dugnad.averaging.codec_base import (
    FLOAT32_MAX,
    SCALE_MAX,
    SMALLEST,
    CodecError,
    LeafCodec,
    Octets,
)
from dugnad.averaging.tree import Vector

CHUNK: Final = 4096
"""Parameters among which the largest are kept (algorithms.md 4.1); divides a leaf."""

MARK_RICE: Final = 2
"""Low bits of a mark's gap: one value in eight is marked."""

TOPK_KEPT: Final = {1024: "25", 512: "12.5", 256: "6.25", 128: "3.12", 64: "1.56", 32: "0.78"}
"""Values kept of a chunk, with the density in per cent as codec names give it."""

_MARKED_SHARE: Final = 8
"""One kept value in so many is marked. For an exponential tail a fifth errs least; an eighth errs
8 % more, a half 47 % more. An eighth's marks take 0.55 bit a value, flags would take 1."""

_SLACK_BITS: Final = 16
"""Room beyond the proportional one, so that a leaf of a few parameters can send one of them."""

_COUNT_BYTES: Final = 4
_LEVEL_BYTES: Final = 3
_LEVEL_SHIFT: Final = 19
_LEVEL_LAST: Final = int(np.float32(SCALE_MAX).view(np.uint32)) >> _LEVEL_SHIFT

_Ints = npt.NDArray[np.int64]
_Bits = npt.NDArray[np.uint8]
_Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Picked:
    """Kept values of a leaf: positions that rise, magnitudes, and which are marked."""

    at: _Ints
    magnitude: Vector
    marked: _Flags


class TopkCodec(LeafCodec):
    """Keeps ``kept`` values of each chunk of 4096: sign, and the mean of its chunk's large or rest.

    A magnitude below SMALLEST is never kept; a level below it decodes to 0.
    """

    def __init__(self, kept: int) -> None:
        """Keep ``kept`` values a chunk, one of :data:`TOPK_KEPT`."""
        self.name = f"topk-{TOPK_KEPT[kept]}"
        self.kept = kept
        self.rice = (CHUNK // kept).bit_length() - 2
        """Low bits of a gap: half the mean gap, which is what Rice codes of even spread want."""

    def kept_of(self, n: int) -> int:
        """Return the largest number of values in a leaf of ``n`` parameters."""
        return n // CHUNK * self.kept + self._kept_of_rest(n % CHUNK)

    def room_bits(self, n: int) -> int:
        """Return the bits for signs, gaps and marks of a leaf of ``n`` parameters.

        Evenly spread positions need ``rice`` + 4.09 bits a value: a sign, the low bits, a mean
        unary part of 1 / (1 - e**-0.5) = 2.54 and 0.55 for marks. The spread of their sum in a full
        leaf is about as large as the rest of this.
        """
        chunk = self.kept * (32 * (self.rice + 4) + 5) // 32 + 1
        return -(-chunk * n // CHUNK) + _SLACK_BITS

    def leaf_size(self, n: int) -> int:
        """Return the size for counts, levels and the room of the rest."""
        return _COUNT_BYTES + _LEVEL_BYTES * -(-n // CHUNK) + (self.room_bits(n) + 7) // 8

    def encode_leaf(self, x: Vector, out: Octets, scratch: Vector) -> None:
        """Pick the largest of each chunk, drop what finds no room, and pack."""
        picked = self._fitting(self._picked(_magnitudes(x, scratch), x.size), x.size)
        chunks = -(-x.size // CHUNK)
        count, marks = picked.at.size, np.flatnonzero(picked.marked)
        out[:_COUNT_BYTES] = np.array([count, marks.size], "<u2").view(np.uint8)
        cut = _COUNT_BYTES + _LEVEL_BYTES * chunks
        out[_COUNT_BYTES:cut] = _pack_levels(_levels(picked, chunks))
        low, high = _split(picked.at, self.rice)
        low |= np.signbit(x[picked.at]).astype(np.int64) << self.rice
        mark_low, mark_high = _split(marks, MARK_RICE)
        bits = np.zeros(8 * (out.size - cut), np.uint8)
        at = 0
        for part in (
            _fixed_bits(low, self.rice + 1),
            _fixed_bits(mark_low, MARK_RICE),
            _unary_bits(high),
            _unary_bits(mark_high),
        ):
            bits[at : at + part.size] = part
            at += part.size
        out[cut:] = np.packbits(bits)

    def decode_leaf(self, data: Octets, out: Vector, scratch: Vector) -> None:
        """Add up the gaps and put each value's level there, with its sign."""
        n = out.size
        chunks = -(-n // CHUNK)
        count, marks = (int(one) for one in data[:_COUNT_BYTES].view("<u2"))
        if count > self.kept_of(n) or marks > count:
            raise CodecError(f"{count} values, {marks} of them marked, in {n} parameters")
        cut = _COUNT_BYTES + _LEVEL_BYTES * chunks
        levels = _unpack_levels(data[_COUNT_BYTES:cut])
        bits = np.unpackbits(data[cut:])
        width = self.rice + 1
        at, mark_at = count * width, count * width + marks * MARK_RICE
        if mark_at > self.room_bits(n):
            raise CodecError("counts beyond the room")
        ends = np.flatnonzero(bits[mark_at:])
        if ends.size != count + marks:
            raise CodecError("gaps that are cut, or padding that is not 0")
        out.fill(0.0)
        if not count:
            return
        fields = _fixed_values(bits[:at], width)
        negative = fields >> self.rice
        low = fields & ((1 << self.rice) - 1)
        where = _positions(low, ends[:count], self.rice, -1)
        if int(where[-1]) >= n:
            raise CodecError("a position beyond the end")
        which = where // CHUNK * 4 + negative
        if marks:
            mark_low = _fixed_values(bits[at:mark_at], MARK_RICE)
            marked = _positions(mark_low, ends[count:], MARK_RICE, int(ends[count - 1]))
            if int(marked[-1]) >= count:
                raise CodecError("a mark beyond the last value")
            which[marked] += 2
        out[where] = levels[which]

    def _kept_of_rest(self, length: int) -> int:
        return -(-self.kept * length // CHUNK)

    def _picked(self, rows: Vector, n: int) -> _Picked:
        """Return the largest magnitudes of each row of CHUNK; of equal ones the first."""
        at = _candidates(rows, self.kept)
        magnitude = rows.reshape(-1)[at]
        chunk = at // CHUNK
        count = np.bincount(chunk, minlength=len(rows))
        starts = np.cumsum(count) - count
        width = max(int(count.max()), self.kept + 1)
        ranked = np.zeros((len(rows), width), np.float32)
        ranked[chunk, np.arange(at.size) - starts[chunk]] = magnitude
        ranked.sort(axis=1)
        most = np.full(len(rows), self.kept)
        if n % CHUNK:
            most[-1] = self._kept_of_rest(n % CHUNK)
        every = np.arange(len(rows))
        least = np.maximum(ranked[every, width - most], np.float32(SMALLEST))
        largest = ranked[every, width - 1 - most // _MARKED_SHARE]  # the first that is not marked
        keep = magnitude >= least[chunk]
        if (np.bincount(chunk[keep], minlength=len(rows)) > most).any():
            keep = _first_of_equals(magnitude, least, chunk, most)
        at, magnitude, chunk = at[keep], magnitude[keep], chunk[keep]
        return _Picked(at, magnitude, magnitude > largest[chunk])

    def _fitting(self, picked: _Picked, n: int) -> _Picked:
        """Drop values until the rest finds room: the smallest, beside the mean of their chunk.

        Dropping a value saves its sign and low bits at least: the 0s of its unary part pass to the
        next gap, which may need one more 0, and its 1 is saved. Marks never need more.
        """
        excess = self._bits(picked) - self.room_bits(n)
        if excess <= 0:
            return picked
        chunk = picked.at // CHUNK
        total = np.bincount(chunk, weights=picked.magnitude)
        mean = total / np.maximum(np.bincount(chunk), 1)
        order = np.argsort(picked.magnitude / mean[chunk], kind="stable")
        keep = np.ones(picked.at.size, np.bool_)
        keep[order[: -(-excess // (self.rice + 1))]] = False
        return _Picked(picked.at[keep], picked.magnitude[keep], picked.marked[keep])

    def _bits(self, picked: _Picked) -> int:
        """Return the bits that signs, gaps and marks need."""
        marks = np.flatnonzero(picked.marked)
        _, high = _split(picked.at, self.rice)
        _, mark_high = _split(marks, MARK_RICE)
        fixed = picked.at.size * (self.rice + 2) + marks.size * (MARK_RICE + 1)
        return fixed + int(high.sum()) + int(mark_high.sum())


def _magnitudes(x: Vector, scratch: Vector) -> Vector:
    """Return the magnitudes of ``x`` as rows of CHUNK, with 0 after the end."""
    if x.size % CHUNK:
        padded = np.zeros(-(-x.size // CHUNK) * CHUNK, np.float32)
        np.abs(x, out=padded[: x.size])
    else:
        padded = np.abs(x, out=scratch)
    if not float(padded.max()) <= FLOAT32_MAX:  # also true of NaN
        raise CodecError("a value that is not finite")
    return padded.reshape(-1, CHUNK)


def _candidates(rows: Vector, kept: int) -> _Ints:
    """Return flat positions, rising, that hold the ``kept`` largest of each row, and few more.

    Of a row cut into groups, ``kept`` groups have their largest value at or above the kept-th of
    these, so at least ``kept`` values are. Groups of interleaved values make this much cheaper than
    ranking the row: 8 * kept groups leave some 7 % more than needed.
    """
    group = max(1, CHUNK // (8 * kept))
    peaks = rows.reshape(len(rows), group, CHUNK // group).max(axis=1)
    rank = peaks.shape[1] - kept
    peaks.partition(rank, axis=1)
    least = np.maximum(peaks[:, rank], np.float32(SMALLEST))
    return np.flatnonzero(rows >= least[:, None])


def _first_of_equals(magnitude: Vector, least: Vector, chunk: _Ints, most: _Ints) -> _Flags:
    """Return which values to keep where more than ``most`` of a chunk reach its ``least``."""
    above = magnitude > least[chunk]
    equal = magnitude == least[chunk]
    room = most - np.bincount(chunk[above], minlength=most.size)
    before = np.cumsum(np.bincount(chunk[equal], minlength=most.size))
    number = np.cumsum(equal) - np.concatenate(([0], before[:-1]))[chunk]
    kept: _Flags = above | (equal & (number <= room[chunk]))
    return kept


def _levels(picked: _Picked, chunks: int) -> _Ints:
    """Return the 12 bits of each chunk's two levels: means, rounded; 0 below SMALLEST."""
    which = picked.at // CHUNK * 2 + picked.marked
    total = np.bincount(which, weights=picked.magnitude, minlength=2 * chunks)
    mean = total / np.maximum(np.bincount(which, minlength=2 * chunks), 1)
    mean[mean < SMALLEST] = 0.0
    bits = np.minimum(mean, SCALE_MAX).astype(np.float32).view(np.uint32).astype(np.int64)
    return (bits + (1 << (_LEVEL_SHIFT - 1))) >> _LEVEL_SHIFT


def _pack_levels(levels: _Ints) -> Octets:
    """Return pairs of 12 bits as three bytes each."""
    pairs = levels[::2] | levels[1::2] << 12
    return np.ascontiguousarray(pairs.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3]).ravel()


def _unpack_levels(data: Octets) -> Vector:
    """Return each chunk's level, level negated, marked level and that negated, or raise."""
    octets = data.reshape(-1, 3).astype(np.uint32)
    codes = np.empty((len(octets), 2), np.uint32)
    codes[:, 0] = octets[:, 0] | (octets[:, 1] & 15) << 8
    codes[:, 1] = octets[:, 1] >> 4 | octets[:, 2] << 4
    if int(codes.max()) > _LEVEL_LAST:
        raise CodecError("a level that is beyond 2**120 or not finite")
    level = (codes << _LEVEL_SHIFT).view(np.float32)
    level[level < np.float32(SMALLEST)] = 0.0
    both = np.stack((level, 0.0 - level), axis=2)  # and 0 negated is +0
    flat: Vector = both.astype(np.float32, copy=False).reshape(-1)
    return flat


def _split(at: _Ints, low_bits: int) -> tuple[_Ints, _Ints]:
    """Return the low bits and the upper parts of the gaps between rising positions."""
    gaps = np.diff(at, prepend=-1) - 1
    return gaps & ((1 << low_bits) - 1), gaps >> low_bits


def _positions(low: _Ints, ends: _Ints, low_bits: int, before: int) -> _Ints:
    """Return the positions behind gaps whose unary parts end at ``ends``, after bit ``before``.

    At most a room of bits times 2**low_bits: far within int64.
    """
    high = np.diff(ends, prepend=before) - 1
    positions: _Ints = np.cumsum((high << low_bits) + low + 1) - 1
    return positions


def _fixed_bits(values: _Ints, width: int) -> _Bits:
    """Return ``width`` bits for each value."""
    rows = np.empty((values.size, width), np.uint8)
    for column in range(width):
        rows[:, column] = values >> (width - 1 - column) & 1
    return rows.reshape(-1)


def _fixed_values(bits: _Bits, width: int) -> _Ints:
    """Return the values behind ``width`` bits for each."""
    rows = bits.reshape(-1, width)
    values = np.zeros(len(rows), np.int64)
    for column in range(width):
        values += rows[:, column].astype(np.int64) << (width - 1 - column)
    return values


def _unary_bits(values: _Ints) -> _Bits:
    """Return each value as that many 0 and a 1."""
    ends = np.cumsum(values + 1) - 1
    bits = np.zeros(int(ends[-1]) + 1 if ends.size else 0, np.uint8)
    bits[ends] = 1
    return bits
