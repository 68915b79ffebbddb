"""Codecs by name: the dense ones are here, int4 and topk have modules of their own.

:mod:`~dugnad.averaging.codec_base` says what all promise. Anchors step with the payloads of
commits, so a commit uses one of :data:`COMMIT_CODECS`, no leaner than its run allows; a hand-in may
use any of :data:`CODECS`, since its maker's residual keeps what the codec loses.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from dugnad.averaging import kernels
from dugnad.averaging.codec_base import (
    FLOAT32_MAX,
    SCALE_MAX,
    SMALLEST,
    Codec,
    CodecError,
    LeafCodec,
    Octets,
    leaf_bounds,
    require_finite,
    settle_range,
)
from dugnad.averaging.codec_int4 import Int4Codec
from dugnad.averaging.codec_topk import TOPK_KEPT, TopkCodec
from dugnad.averaging.tree import Vector

__all__ = [
    "CODECS",
    "COMMIT_CODECS",
    "FLOAT16_MAX",
    "HAND_IN_ONLY",
    "INT8_BLOCK",
    "SCALE_MAX",
    "SMALLEST",
    "SPARSE_CODECS",
    "Codec",
    "CodecError",
    "Float16Codec",
    "Float32Codec",
    "Int8Codec",
    "LeafCodec",
    "Octets",
    "commit_codecs",
    "leaf_bounds",
    "settle_range",
]

INT8_BLOCK: Final = 1024
"""Values that share a scale: 0.4 % of overhead; divides a leaf."""

FLOAT16_MAX: Final = 65_504.0
"""Largest finite float16. Larger values are clipped; the sender's residual keeps the rest."""

_INT8_LEVELS: Final = 127
_SCALE_BYTES: Final = 4


class Float32Codec(LeafCodec):
    """Exact, but for magnitudes below SMALLEST, which become 0."""

    name = "float32"

    def leaf_size(self, n: int) -> int:
        """Return 4 bytes for each."""
        return 4 * n

    def encode_leaf(self, x: Vector, out: Octets, scratch: Vector) -> None:
        """Copy, with what is too small as 0."""
        np.copyto(scratch, x)
        if not settle_range(scratch, np.empty_like(scratch)):
            raise CodecError("a value that is not finite")
        out[:] = scratch.astype("<f4", copy=False).view(np.uint8)

    def decode_leaf(self, data: Octets, out: Vector, scratch: Vector) -> None:
        """Copy, with what is too small as 0."""
        np.copyto(out, data.view("<f4"))
        if not settle_range(out, scratch):
            raise CodecError("a value that is not finite")


class Float16Codec(LeafCodec):
    """IEEE half precision, rounded to nearest even and clipped to its range.

    Half-precision subnormals are kept: each is a normal float32, and both conversions are exact
    about them on every processor (F16C and AArch64 ignore flush-to-zero there).
    """

    name = "float16"

    def leaf_size(self, n: int) -> int:
        """Return 2 bytes for each."""
        return 2 * n

    def encode_leaf(self, x: Vector, out: Octets, scratch: Vector) -> None:
        """Clip and round to nearest even."""
        native = kernels.current()
        if native is not None and native.half_encode(x, out):
            return
        require_finite(x, scratch)
        np.clip(x, -FLOAT16_MAX, FLOAT16_MAX, out=scratch)
        out[:] = scratch.astype("<f2").view(np.uint8)

    def decode_leaf(self, data: Octets, out: Vector, scratch: Vector) -> None:
        """Widen, exactly."""
        native = kernels.current()
        if native is not None and native.half_decode(data, out):
            return
        np.copyto(out, data.view("<f2"))
        require_finite(out, scratch)


class Int8Codec(LeafCodec):
    """Blocks of INT8_BLOCK values: a float32 scale, then one signed byte for each, -127 to 127.

    Scale = largest magnitude / 127; a scale below SMALLEST means a block of zeros. The error is at
    most half a scale a value. The byte -128 has no use and is refused.
    """

    name = "int8"

    def leaf_size(self, n: int) -> int:
        """Return a byte for each and 4 for each block begun."""
        return n + _SCALE_BYTES * -(-n // INT8_BLOCK)

    def encode_leaf(self, x: Vector, out: Octets, scratch: Vector) -> None:
        """Scale and round half to even, block by block."""
        for values, room, bench in _blocks(x, out, scratch):
            _encode_blocks(values, room, bench)

    def encode_leaves(self, x: Vector, out: Octets) -> bool:
        """The same, where there are kernels: a leaf ends between two blocks."""
        native = kernels.current()
        return native is not None and native.int8_encode(x, out)

    def leaf_rest(self, x: Vector, out: Octets, rest: Vector, scratch: Vector) -> None:
        """The same; the codes are still at hand as numbers, so nothing is decoded."""
        native = kernels.current()
        if native is not None and native.int8_rest(x, out, rest):
            return
        parts = zip(_blocks(x, out, scratch), _blocks(rest, out, scratch), strict=True)
        for (values, room, bench), (left, _, _) in parts:
            scale = _encode_blocks(values, room, bench)
            np.multiply(bench, scale[:, None], out=bench)
            np.subtract(values, bench, out=left)

    def decode_leaf(self, data: Octets, out: Vector, scratch: Vector) -> None:
        """Widen (exact), then one multiply by the block's scale."""
        for values, room, _ in _blocks(out, data, scratch):
            packed = np.ascontiguousarray(room[:, :_SCALE_BYTES])
            scale = packed.view("<f4")[:, 0].astype(np.float32)
            if not np.isfinite(scale).all() or np.signbit(scale).any():
                raise CodecError("a scale that is negative or not finite")
            if float(scale.max()) > SCALE_MAX:
                raise CodecError("a scale beyond 2**120")
            scale[scale < np.float32(SMALLEST)] = 0.0
            np.copyto(values, room[:, _SCALE_BYTES:].view(np.int8))
            if float(values.min()) < -_INT8_LEVELS:
                raise CodecError("the code -128")
            np.multiply(values, scale[:, None], out=values)

    def decode_leaves(self, data: Octets, out: Vector) -> bool:
        """The same, where there are kernels."""
        native = kernels.current()
        return native is not None and native.int8_decode(data, out)

    def add_leaf(self, data: Octets, total: Vector, factor: np.float32, *, first: bool) -> bool:
        """Decode, multiply and add in one pass, where there are kernels."""
        native = kernels.current()
        return native is not None and native.int8_add(data, total, factor, first=first)


COMMIT_CODECS: Final[dict[str, Codec]] = {
    codec.name: codec for codec in (Float32Codec(), Float16Codec(), Int8Codec(), Int4Codec())
}
"""Codecs of merged payloads, from the richest down. The home that merged keeps what rounding lost
in its residual; with int4 that is 1 % of a merge's squared norm, and nothing was lost by it."""

HAND_IN_ONLY: Final[dict[str, Codec]] = {codec.name: codec for codec in map(TopkCodec, TOPK_KEPT)}
"""Codecs too coarse for a commit, from the richest down."""

SPARSE_CODECS: Final = frozenset(
    name for name, codec in HAND_IN_ONLY.items() if isinstance(codec, TopkCodec)
)
"""Those that leave most parameters out of each hand-in."""

CODECS: Final[dict[str, Codec]] = COMMIT_CODECS | HAND_IN_ONLY
"""Every codec by its name in manifests and headers, from the richest down."""


def commit_codecs(leanest: str, richest: str = "float32") -> tuple[str, ...]:
    """The names of COMMIT_CODECS from the richest allowed down to the leanest: at least one."""
    names = list(COMMIT_CODECS)
    first, last = names.index(richest), names.index(leanest)
    return tuple(names[first : max(first, last) + 1])


def _encode_blocks(values: Vector, room: Octets, bench: Vector) -> Vector:
    """Encode rows of one block each; ``bench`` gets the codes as numbers. Return the scales."""
    np.abs(values, out=bench)
    peak = np.maximum.reduceat(bench.reshape(-1), np.arange(0, bench.size, bench.shape[1]))
    if not float(peak.max()) <= FLOAT32_MAX:  # also true of NaN
        raise CodecError("a value that is not finite")
    scale: Vector = np.minimum(peak / np.float32(_INT8_LEVELS), np.float32(SCALE_MAX))
    scale[scale < np.float32(SMALLEST)] = 0.0
    inverse = np.zeros_like(scale)
    np.divide(np.float32(1.0), scale, out=inverse, where=scale > 0.0)
    np.multiply(values, inverse[:, None], out=bench)
    np.rint(bench, out=bench)
    if float(scale.max()) >= SCALE_MAX:
        np.clip(bench, -_INT8_LEVELS, _INT8_LEVELS, out=bench)
    room[:, :_SCALE_BYTES] = scale.astype("<f4", copy=False).view(np.uint8).reshape(-1, 4)
    np.copyto(room[:, _SCALE_BYTES:].view(np.int8), bench, casting="unsafe")
    return scale


def _blocks(x: Vector, octets: Octets, scratch: Vector) -> list[tuple[Vector, Octets, Vector]]:
    """Return (values, bytes, scratch) as matrices, a block a row: full blocks, then the rest."""
    rows, rest = divmod(x.size, INT8_BLOCK)
    cut = rows * INT8_BLOCK
    byte_cut = cut + rows * _SCALE_BYTES
    parts = []
    if rows:
        parts.append(
            (
                x[:cut].reshape(rows, INT8_BLOCK),
                octets[:byte_cut].reshape(rows, INT8_BLOCK + _SCALE_BYTES),
                scratch[:cut].reshape(rows, INT8_BLOCK),
            )
        )
    if rest:
        parts.append((x[None, cut:], octets[None, byte_cut:], scratch[None, cut:]))
    return parts
