"""The int4 codec: 4.25 bits a parameter.

A leaf of n parameters is, in this order:

1. a scale for each block of :data:`INT4_BLOCK` parameters begun: a little-endian bfloat16, that is
   the upper half of a float32, so it widens exactly;
2. ceil(n/2) bytes: byte i holds parameter i in its low and parameter ceil(n/2) + i in its high four
   bits, each a two's complement integer from -7 to 7. For odd n the last high half is 0.

A parameter is its integer times its block's scale, one float32 multiply.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from dugnad.averaging import kernels
from dugnad.averaging.codec_base import (
    FLOAT32_MAX,
    SCALE_MAX,
    SMALLEST,
    CodecError,
    LeafCodec,
    Octets,
)
from dugnad.averaging.tree import Vector

INT4_BLOCK: Final = 64
"""Values that share a scale. Measured squared error, normal and Student-t(3) values: 1.2 % and
3.2 % at 64 (4.25 bits), 1.4 % and 5.0 % at 128 (4.125 bits); float32 scales gain nothing."""

_LEVELS: Final = 7
_SCALE_BYTES: Final = 2

_Codes = npt.NDArray[np.int8]


class Int4Codec(LeafCodec):
    """Blocks of INT4_BLOCK values, a scale each, -7 to 7; the integer -8 is refused.

    Scale = largest magnitude / 7, rounded to bfloat16; the error is at most half a scale a value.
    """

    name = "int4"

    def leaf_size(self, n: int) -> int:
        """Return half a byte for each and 2 bytes for each block begun."""
        return (n + 1) // 2 + _SCALE_BYTES * -(-n // INT4_BLOCK)

    def encode_leaf(self, x: Vector, out: Octets, scratch: Vector) -> None:
        """Scale and round half to even, then pack the leaf's first half with its second."""
        native = kernels.current()
        if native is not None and native.int4_rest(x, out, scratch):
            return
        n = x.size
        blocks = -(-n // INT4_BLOCK)
        np.abs(x, out=scratch)
        scale = _scales(_peaks(scratch, blocks))
        if float(scale.max()) >= SCALE_MAX:  # only then can a value be beyond 7 scales
            np.clip(x, -_LEVELS * SCALE_MAX, _LEVELS * SCALE_MAX, out=scratch)
            x = scratch
        inverse = np.zeros_like(scale)
        np.divide(np.float32(1.0), scale, out=inverse, where=scale > 0.0)
        _times(x, inverse, scratch)
        np.rint(scratch, out=scratch)
        codes = scratch.astype(np.int8)
        cut = _SCALE_BYTES * blocks
        out[:cut] = (scale.view(np.uint32) >> np.uint32(16)).astype("<u2").view(np.uint8)
        half = (n + 1) // 2
        low, high = codes[:half].view(np.uint8), codes[half:].view(np.uint8)
        room = out[cut:]
        np.bitwise_and(low, np.uint8(15), out=room)
        np.left_shift(high, np.uint8(4), out=high)
        np.bitwise_or(room[: n - half], high, out=room[: n - half])

    def leaf_rest(self, x: Vector, out: Octets, rest: Vector, scratch: Vector) -> None:
        """The same, with the codes at hand where there are kernels."""
        native = kernels.current()
        if native is None or not native.int4_rest(x, out, rest):
            super().leaf_rest(x, out, rest, scratch)

    def decode_leaf(self, data: Octets, out: Vector, scratch: Vector) -> None:
        """Widen (exact), then one multiply by the block's scale."""
        native = kernels.current()
        if native is not None and native.int4_decode(data, out):
            return
        n = out.size
        cut = _SCALE_BYTES * -(-n // INT4_BLOCK)
        scale = _widened(data[:cut])
        half = (n + 1) // 2
        packed = data[cut:]
        if n % 2 and int(packed[-1]) >> 4:
            raise CodecError("padding that is not 0")
        low: _Codes = np.left_shift(packed, np.uint8(4)).view(np.int8)
        np.right_shift(low, np.int8(4), out=low)
        high: _Codes = np.right_shift(packed[: n - half].view(np.int8), np.int8(4))
        if min(int(low.min()), int(high.min(initial=0))) < -_LEVELS:
            raise CodecError("the code -8")
        np.copyto(out[:half], low)
        np.copyto(out[half:], high)
        _times(out, scale, out)


def _peaks(magnitudes: Vector, blocks: int) -> Vector:
    """Return the largest of each block of magnitudes; raises CodecError if one is not finite."""
    full = magnitudes.size // INT4_BLOCK
    peaks = np.empty(blocks, np.float32)
    if full:
        rows = magnitudes[: full * INT4_BLOCK].reshape(full, INT4_BLOCK)
        rows.max(axis=1, out=peaks[:full])
    if blocks > full:
        peaks[full] = magnitudes[full * INT4_BLOCK :].max()
    if not float(peaks.max()) <= FLOAT32_MAX:  # also true of NaN
        raise CodecError("a value that is not finite")
    return peaks


def _scales(peaks: Vector) -> Vector:
    """Return scales that are bfloat16 numbers: 0, or from SMALLEST to SCALE_MAX."""
    scale: Vector = np.minimum(peaks / np.float32(_LEVELS), np.float32(SCALE_MAX))
    bits = scale.view(np.uint32)
    bits += np.uint32(0x8000)  # round half up; the carry into the exponent is right
    bits &= np.uint32(0xFFFF_0000)
    scale[scale < np.float32(SMALLEST)] = 0.0
    return scale


def _widened(data: Octets) -> Vector:
    """Return the scales in ``data`` as float32, those below SMALLEST as 0, or raise CodecError."""
    bits = data.view("<u2").astype(np.uint32)
    np.left_shift(bits, np.uint32(16), out=bits)
    scale: Vector = bits.view(np.float32)
    if not np.isfinite(scale).all() or np.signbit(scale).any():
        raise CodecError("a scale that is negative or not finite")
    if float(scale.max()) > SCALE_MAX:
        raise CodecError("a scale beyond 2**120")
    scale[scale < np.float32(SMALLEST)] = 0.0
    return scale


def _times(x: Vector, factors: Vector, out: Vector) -> None:
    """Multiply each block of ``x`` by its factor."""
    full = x.size // INT4_BLOCK
    cut = full * INT4_BLOCK
    if full:
        shape = (full, INT4_BLOCK)
        np.multiply(x[:cut].reshape(shape), factors[:full, None], out=out[:cut].reshape(shape))
    if cut < x.size:
        np.multiply(x[cut:], factors[full], out=out[cut:])
