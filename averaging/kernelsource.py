"""The inner loops of the exchange, written for a compiler (numba): one pass where numpy makes ten.

Only :mod:`~dugnad.peer.kernelbuild` imports this, in a process of its own, with
:mod:`~dugnad.averaging.kernelparts`, what the loops share, and
:mod:`~dugnad.averaging.kernelint8`, those for int8;
:data:`~dugnad.averaging.kernels.SIGNATURES` says what the arguments are. Each loop does to an
element what the numpy code beside it does, operation by operation in float32, so the bits are the
same; that code stays, as the reference, for machines without these, and for whatever is refused: a
loop that meets a number that is not finite or a byte that must not be returns REFUSED, what it
wrote is then worthless, and the numpy code says what is wrong.

What keeps the loops vectorised (tests look at the instructions):

* they are short, each over a part that stays in the nearest cache;
* magnitudes are compared as integers: the bits of a finite float32 without its sign rise with it,
  and infinity and NaN are above them all, while a maximum of floats has an order to keep;
* integers are cast back to 32 or 8 bits at once, since numba widens them to 64;
* the same memory is passed once for each type that it is read as.

No fast-math: nothing is reordered or contracted. A sum of squares has LANES sums, in the order that
:func:`~dugnad.averaging.leaf.squared` gives them.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from dugnad.averaging.codec_int4 import INT4_BLOCK
from dugnad.averaging.codecs import FLOAT16_MAX
from dugnad.averaging.kernelparts import (
    BLOCK,
    LARGEST,
    LEAST,
    MAGNITUDE,
    REFUSED,
    SCALE_MAX_BITS,
    TOP_SCALE,
    ZERO,
    add_squares,
    clear,
    inlined,
    inverse_of,
    kernel,
    lane_sum,
    largest,
    lowest,
    put,
    scale_in,
    settled,
    streamed_all,
)

_AT_ONCE: Final = 64
"""Numbers that :func:`difference` puts into memory before it reads on; with fewer it is fastest."""
_LEVELS4: Final = np.float32(7.0)
_BLOCK4: Final = INT4_BLOCK
_HALF_MAX: Final = np.int32(np.float32(FLOAT16_MAX).view(np.int32))
_HALF_NORMAL: Final = np.float32(2.0**-14)
_HALF_STEP: Final = np.float32(2.0**-24)
_HALF_STEPS: Final = np.float32(2.0**24)
_HALF_BIAS: Final = np.uint32(112 << 23)
_HALF_ROUND: Final = np.uint32(0xFFF - (112 << 23) & 0xFFFF_FFFF)
_CLIP4: Final = np.float32(7.0 * float(TOP_SCALE))


@kernel
def progress(ref, theta, residual, out, sums, lanes, n):  # type: ignore[no-untyped-def]
    """Put residual + (ref - theta) of one leaf into ``out``; ``sums``: squares of ref - theta."""
    clear(lanes)
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        for i in range(start, stop):
            out[i] = ref[i] - theta[i]
        add_squares(out, start, stop, lanes)
        for i in range(start, stop):
            out[i] = residual[i] + out[i]
    sums[0] = lane_sum(lanes)
    return 0


@kernel
def difference(a, b, out, bench, past, n):  # type: ignore[no-untyped-def]
    """Put a - b into ``out``; ``bench`` has room for a block."""
    for start in range(0, n, _AT_ONCE):
        length = min(_AT_ONCE, n - start)
        for i in range(length):
            bench[i] = a[start + i] - b[start + i]
        put(out, start, bench, length, past)
    if past:
        streamed_all()
    return 0


@kernel
def squares(x, sums, lanes, n):  # type: ignore[no-untyped-def]
    """Sum the squares."""
    clear(lanes)
    add_squares(x, 0, n, lanes)
    sums[0] = lane_sum(lanes)
    return 0


@inlined
def _halved_scale(top: Any) -> Any:
    """Return a block's scale: its largest magnitude / 7, rounded half up to bfloat16."""
    scale = min(np.int32(top).view(np.float32) / _LEVELS4, TOP_SCALE)
    bits = np.uint32(np.float32(scale).view(np.uint32) + np.uint32(0x8000))
    scale = np.uint32(bits & np.uint32(0xFFFF_0000)).view(np.float32)
    return ZERO if scale < LEAST else scale


@kernel
def int4_rest(x, xbits, out, codes, rest, n):  # type: ignore[no-untyped-def]
    """Encode one leaf and put what that loses into ``rest``; ``codes`` is scratch of ``n``."""
    cut = 0
    for start in range(0, n, _BLOCK4):
        stop = min(start + _BLOCK4, n)
        top = largest(xbits, start, stop)
        if top > LARGEST:
            return REFUSED
        scale = _halved_scale(top)
        upper = np.float32(scale).view(np.uint32) >> np.uint32(16)
        out[cut] = np.uint8(upper & np.uint32(255))
        out[cut + 1] = np.uint8(upper >> np.uint32(8))
        cut += 2
        inverse = inverse_of(scale)
        for i in range(start, stop):
            one = x[i]
            code = np.rint(min(max(one, -_CLIP4), _CLIP4) * inverse)
            codes[i] = np.int8(code)
            rest[i] = one - code * scale
    half = (n + 1) // 2
    for i in range(n - half):
        out[cut + i] = np.uint8((codes[i] & 15) | ((codes[half + i] & 15) << 4))
    if n % 2:
        out[cut + half - 1] = np.uint8(codes[half - 1] & 15)
    return 0


@kernel
def int4_decode(data, codes, out, n):  # type: ignore[no-untyped-def]
    """Decode one leaf; ``codes`` is scratch of ``n``."""
    half, cut = (n + 1) // 2, 2 * ((n + _BLOCK4 - 1) // _BLOCK4)
    if n % 2 and data[cut + half - 1] > 15:
        return REFUSED
    for i in range(half):
        codes[i] = np.int8(np.int8(data[cut + i] << 4) >> 4)
    for i in range(n - half):
        codes[half + i] = np.int8(np.int8(data[cut + i]) >> 4)
    if lowest(codes, 0, n) < -7:
        return REFUSED
    at = 0
    for start in range(0, n, _BLOCK4):
        bits = np.uint32((np.uint32(data[at]) << 16) | (np.uint32(data[at + 1]) << 24))
        at += 2
        if bits > SCALE_MAX_BITS:
            return REFUSED
        scale = scale_in(bits)
        for i in range(start, min(start + _BLOCK4, n)):
            out[i] = np.float32(codes[i]) * scale
    return 0


@kernel
def half_encode(xbits, out, n):  # type: ignore[no-untyped-def]
    """Encode one leaf as float16: clipped, to nearest even."""
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        if largest(xbits, start, stop) > LARGEST:
            return REFUSED
        for i in range(start, stop):
            bits = np.uint32(min(np.int32(xbits[i] & MAGNITUDE), _HALF_MAX))
            size = np.uint32(bits).view(np.float32)
            odd = np.uint32((bits >> np.uint32(13)) & np.uint32(1))
            normal = np.uint32(bits + odd + _HALF_ROUND) >> np.uint32(13)
            # below 2**-14 the last place is 2**-24: scaled to integers, rounded to nearest even
            small = np.uint32(np.int32(np.rint(size * _HALF_STEPS)))
            chosen = small if size < _HALF_NORMAL else np.uint32(normal)
            sign = np.uint32((np.uint32(xbits[i]) >> np.uint32(16)) & np.uint32(0x8000))
            out[i] = np.uint16(chosen | sign)
    return 0


@kernel
def half_decode(data, out, outbits, n):  # type: ignore[no-untyped-def]
    """Decode one leaf of float16."""
    top = np.uint16(0)
    for i in range(n):
        one = np.uint16(data[i] & np.uint16(0x7FFF))
        top = one if one > top else top
    if top >= np.uint16(0x7C00):
        return REFUSED
    for i in range(n):
        size = np.uint32(data[i] & np.uint16(0x7FFF))
        sign = np.uint32(np.uint32(data[i] & np.uint16(0x8000)) << np.uint32(16))
        normal = np.uint32(np.uint32(size << np.uint32(13)) + _HALF_BIAS)
        small = np.float32(np.int32(size)) * _HALF_STEP
        chosen = np.float32(small).view(np.uint32) if size < np.uint32(0x400) else normal
        outbits[i] = np.int32(np.uint32(chosen | sign))
    return 0


@kernel
def step(theta, gradient, eta, out, outbits, n):  # type: ignore[no-untyped-def]
    """Take the outer step without momentum."""
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        for i in range(start, stop):
            out[i] = settled(theta[i] - gradient[i] * eta)
        if largest(outbits, start, stop) > LARGEST:
            return REFUSED
    return 0


@kernel
def momentum_step(theta, momentum, gradient, eta, mu, out, outbits, moved, movedbits, n):  # type: ignore[no-untyped-def]
    """Take the outer step; ``moved`` is the momentum after it."""
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        for i in range(start, stop):
            moved[i] = settled(momentum[i] * mu + gradient[i])
        for i in range(start, stop):
            out[i] = settled(theta[i] - (gradient[i] + moved[i] * mu) * eta)
        if largest(outbits, start, stop) > LARGEST:
            return REFUSED
        if largest(movedbits, start, stop) > LARGEST:
            return REFUSED
    return 0


@kernel
def settle(x, xbits, n):  # type: ignore[no-untyped-def]
    """Set what is smaller than SMALLEST to 0, unless something is not finite."""
    if largest(xbits, 0, n) > LARGEST:
        return REFUSED
    for i in range(n):
        x[i] = settled(x[i])
    return 0
