"""The inner loops of the exchange, written for a compiler (numba): one pass where numpy makes ten.

Only :mod:`~dugnad.peer.kernelbuild` imports this, in a process of its own;
:data:`~dugnad.averaging.kernels.SIGNATURES` says what the arguments are. Each loop does to an
element what the numpy code beside it does, operation by operation in float32, so the bits are the
same; that code stays, as the reference, for machines without these, and for whatever is refused: a
loop that meets a number that is not finite or a byte that must not be returns :data:`REFUSED`, what
it wrote is then worthless, and the numpy code says what is wrong.

What keeps the loops vectorised (tests look at the instructions):

* they are short, each over a part that stays in the nearest cache;
* magnitudes are compared as integers: the bits of a finite float32 without its sign rise with it,
  and infinity and NaN are above them all, while a maximum of floats has an order to keep;
* integers are cast back to 32 or 8 bits at once, since numba widens them to 64;
* the same memory is passed once for each type that it is read as.

No fast-math: nothing is reordered or contracted. A sum of squares has :data:`LANES` sums, in the
order that :func:`~dugnad.averaging.leaf.squared` gives them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import numpy as np
from numba import cfunc, njit, types

from dugnad.averaging.codec_base import FLOAT32_MAX, SCALE_MAX, SMALLEST
from dugnad.averaging.codec_int4 import INT4_BLOCK
from dugnad.averaging.codecs import FLOAT16_MAX, INT8_BLOCK
from dugnad.averaging.kernels import LANES, SIGNATURES

REFUSED: Final = 1

_BLOCK: Final = INT8_BLOCK
_LANES: Final = LANES
_MAGNITUDE: Final = np.int32(0x7FFF_FFFF)
_LARGEST: Final = np.int32(np.float32(FLOAT32_MAX).view(np.int32))
_SMALLEST: Final = np.float32(SMALLEST)
_SCALE_MAX: Final = np.float32(SCALE_MAX)
_SCALE_MAX_BITS: Final = np.uint32(np.float32(SCALE_MAX).view(np.uint32))
_ZERO: Final = np.float32(0.0)
_ONE: Final = np.float32(1.0)
_LEVELS: Final = np.float32(127.0)
_LEVELS4: Final = np.float32(7.0)
_BLOCK4: Final = INT4_BLOCK
_HALF_MAX: Final = np.int32(np.float32(FLOAT16_MAX).view(np.int32))
_HALF_NORMAL: Final = np.float32(2.0**-14)
_HALF_STEP: Final = np.float32(2.0**-24)
_HALF_STEPS: Final = np.float32(2.0**24)
_HALF_BIAS: Final = np.uint32(112 << 23)
_HALF_ROUND: Final = np.uint32(0xFFF - (112 << 23) & 0xFFFF_FFFF)
_CLIP4: Final = np.float32(7.0 * SCALE_MAX)

_TYPES: Final = {
    "f": types.CPointer(types.float32),
    "i": types.CPointer(types.int32),
    "B": types.CPointer(types.uint8),
    "b": types.CPointer(types.int8),
    "H": types.CPointer(types.uint16),
    "d": types.CPointer(types.float64),
    "n": types.int64,
    "s": types.float32,
}

KERNELS: Final[dict[str, Any]] = {}  # Any: numba has no types
"""The compiled functions by name."""

_Loop = TypeVar("_Loop", bound=Callable[..., Any])


def _inlined(function: _Loop) -> _Loop:
    """Let a function become a part of each kernel that calls it."""
    made: _Loop = njit(inline="always")(function)
    return made


def _kernel(function: _Loop) -> _Loop:
    """Compile a function with its signature, and keep it by its name."""
    letters = SIGNATURES[function.__name__]
    signature = types.int64(*(_TYPES[letter] for letter in letters))
    KERNELS[function.__name__] = cfunc(signature, error_model="numpy")(function)
    return function


@_inlined
def _largest(bits: Any, start: int, stop: int) -> Any:
    """Return the largest magnitude, as bits."""
    top = np.int32(0)
    for i in range(start, stop):
        one = np.int32(bits[i] & _MAGNITUDE)
        top = one if one > top else top
    return top


@_inlined
def _clear(lanes: Any) -> None:
    for j in range(_LANES):
        lanes[j] = 0.0


@_inlined
def _add_squares(x: Any, start: int, stop: int, lanes: Any) -> None:
    """Add squares to the lanes; ``start`` is a multiple of LANES from the first element."""
    for row in range(start, stop, _LANES):
        for j in range(min(_LANES, stop - row)):
            one = np.float64(x[row + j])
            lanes[j] += one * one


@_inlined
def _lane_sum(lanes: Any) -> Any:
    total = 0.0
    for j in range(_LANES):
        total += lanes[j]
    return total


@_inlined
def _scale_of(top: Any) -> Any:
    """Return the scale of a block whose largest magnitude has these bits."""
    scale = np.int32(top).view(np.float32) / _LEVELS
    scale = min(scale, _SCALE_MAX)
    return _ZERO if scale < _SMALLEST else scale


@_inlined
def _put_scale(out: Any, at: int, scale: Any) -> None:
    bits = np.float32(scale).view(np.uint32)
    for k in range(4):
        out[at + k] = np.uint8((bits >> np.uint32(8 * k)) & np.uint32(255))


@_inlined
def _scale_bits(data: Any, at: int) -> Any:
    bits = np.uint32(0)
    for k in range(4):
        bits = np.uint32(bits | np.uint32(np.uint32(data[at + k]) << np.uint32(8 * k)))
    return bits


@_inlined
def _inverse(scale: Any) -> Any:
    return _ONE / scale if scale > _ZERO else _ZERO


@_inlined
def _encode_block(
    x: Any, rest: Any, start: int, stop: int, out: Any, codes: Any, at: int, top: Any
) -> None:
    """Encode x[start:stop], ``top`` its largest magnitude, at out[at:], of which ``codes`` are the
    same bytes; ``rest`` gets what that loses and may be ``x``."""
    scale = _scale_of(top)
    inverse = _inverse(scale)
    _put_scale(out, at, scale)
    at += 4
    if scale >= _SCALE_MAX:
        for i in range(stop - start):
            one = x[start + i]
            code = min(max(np.rint(one * inverse), -_LEVELS), _LEVELS)
            codes[at + i] = np.int8(code)
            rest[start + i] = one - code * scale
    else:
        for i in range(stop - start):
            one = x[start + i]
            code = np.rint(one * inverse)
            codes[at + i] = np.int8(code)
            rest[start + i] = one - code * scale


@_kernel
def int8_rest(x, xbits, out, codes, rest, n):  # type: ignore[no-untyped-def]
    """Encode one leaf and put what that loses into ``rest``."""
    at = 0
    for start in range(0, n, _BLOCK):
        stop = min(start + _BLOCK, n)
        top = _largest(xbits, start, stop)
        if top > _LARGEST:
            return REFUSED
        _encode_block(x, rest, start, stop, out, codes, at, top)
        at += 4 + stop - start
    return 0


@_kernel
def hand_in(ref, theta, residual, out, codes, rest, restbits, sums, lanes, lanes2, n):  # type: ignore[no-untyped-def]
    """Encode residual + (ref - theta) of one leaf; ``sums``: squares of progress and of rest."""
    _clear(lanes)
    _clear(lanes2)
    at = 0
    for start in range(0, n, _BLOCK):
        stop = min(start + _BLOCK, n)
        for i in range(start, stop):
            rest[i] = ref[i] - theta[i]
        _add_squares(rest, start, stop, lanes)
        for i in range(start, stop):
            rest[i] = residual[i] + rest[i]
        top = _largest(restbits, start, stop)
        if top > _LARGEST:
            return REFUSED
        _encode_block(rest, rest, start, stop, out, codes, at, top)
        _add_squares(rest, start, stop, lanes2)
        at += 4 + stop - start
    sums[0] = _lane_sum(lanes)
    sums[1] = _lane_sum(lanes2)
    return 0


@_kernel
def progress(ref, theta, residual, out, sums, lanes, n):  # type: ignore[no-untyped-def]
    """Put residual + (ref - theta) of one leaf into ``out``; ``sums``: squares of ref - theta."""
    _clear(lanes)
    for start in range(0, n, _BLOCK):
        stop = min(start + _BLOCK, n)
        for i in range(start, stop):
            out[i] = ref[i] - theta[i]
        _add_squares(out, start, stop, lanes)
        for i in range(start, stop):
            out[i] = residual[i] + out[i]
    sums[0] = _lane_sum(lanes)
    return 0


@_kernel
def squares(x, sums, lanes, n):  # type: ignore[no-untyped-def]
    """Sum the squares."""
    _clear(lanes)
    _add_squares(x, 0, n, lanes)
    sums[0] = _lane_sum(lanes)
    return 0


@_inlined
def _lowest(codes: Any, start: int, stop: int) -> Any:
    low = np.int8(0)
    for i in range(start, stop):
        one = np.int8(codes[i])
        low = one if one < low else low
    return low


@_inlined
def _is_int8(data: Any, codes: Any, n: int) -> Any:
    """Return whether scales and codes are such as may be: a sign or NaN is above SCALE_MAX, too."""
    good, at = True, 0
    for start in range(0, n, _BLOCK):
        length = min(_BLOCK, n - start)
        if _scale_bits(data, at) > _SCALE_MAX_BITS:
            good = False
        if _lowest(codes, at + 4, at + 4 + length) < -127:
            good = False
        at += 4 + length
    return good


@_inlined
def _scale_in(bits: Any) -> Any:
    scale = np.uint32(bits).view(np.float32)
    return _ZERO if scale < _SMALLEST else scale


@_kernel
def int8_decode(data, codes, out, n):  # type: ignore[no-untyped-def]
    """Decode one leaf."""
    if not _is_int8(data, codes, n):
        return REFUSED
    at = 0
    for start in range(0, n, _BLOCK):
        length = min(_BLOCK, n - start)
        scale = _scale_in(_scale_bits(data, at))
        at += 4
        for i in range(length):
            out[start + i] = np.float32(codes[at + i]) * scale
        at += length
    return 0


@_kernel
def int8_add(data, codes, total, factor, first, n):  # type: ignore[no-untyped-def]
    """Decode one leaf, multiply by ``factor``, and add to ``total`` or, if ``first``, put there."""
    if not _is_int8(data, codes, n):
        return REFUSED
    at = 0
    for start in range(0, n, _BLOCK):
        length = min(_BLOCK, n - start)
        scale = _scale_in(_scale_bits(data, at))
        at += 4
        if first:
            for i in range(length):
                total[start + i] = np.float32(codes[at + i]) * scale * factor
        else:
            for i in range(length):
                total[start + i] += np.float32(codes[at + i]) * scale * factor
        at += length
    return 0


@_inlined
def _halved_scale(top: Any) -> Any:
    """Return a block's scale: its largest magnitude / 7, rounded half up to bfloat16."""
    scale = min(np.int32(top).view(np.float32) / _LEVELS4, _SCALE_MAX)
    bits = np.uint32(np.float32(scale).view(np.uint32) + np.uint32(0x8000))
    scale = np.uint32(bits & np.uint32(0xFFFF_0000)).view(np.float32)
    return _ZERO if scale < _SMALLEST else scale


@_kernel
def int4_rest(x, xbits, out, codes, rest, n):  # type: ignore[no-untyped-def]
    """Encode one leaf and put what that loses into ``rest``; ``codes`` is scratch of ``n``."""
    cut = 0
    for start in range(0, n, _BLOCK4):
        stop = min(start + _BLOCK4, n)
        top = _largest(xbits, start, stop)
        if top > _LARGEST:
            return REFUSED
        scale = _halved_scale(top)
        upper = np.float32(scale).view(np.uint32) >> np.uint32(16)
        out[cut] = np.uint8(upper & np.uint32(255))
        out[cut + 1] = np.uint8(upper >> np.uint32(8))
        cut += 2
        inverse = _inverse(scale)
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


@_kernel
def int4_decode(data, codes, out, n):  # type: ignore[no-untyped-def]
    """Decode one leaf; ``codes`` is scratch of ``n``."""
    half, cut = (n + 1) // 2, 2 * ((n + _BLOCK4 - 1) // _BLOCK4)
    if n % 2 and data[cut + half - 1] > 15:
        return REFUSED
    for i in range(half):
        codes[i] = np.int8(np.int8(data[cut + i] << 4) >> 4)
    for i in range(n - half):
        codes[half + i] = np.int8(np.int8(data[cut + i]) >> 4)
    if _lowest(codes, 0, n) < -7:
        return REFUSED
    at = 0
    for start in range(0, n, _BLOCK4):
        bits = np.uint32((np.uint32(data[at]) << 16) | (np.uint32(data[at + 1]) << 24))
        at += 2
        if bits > _SCALE_MAX_BITS:
            return REFUSED
        scale = _scale_in(bits)
        for i in range(start, min(start + _BLOCK4, n)):
            out[i] = np.float32(codes[i]) * scale
    return 0


@_kernel
def half_encode(xbits, out, n):  # type: ignore[no-untyped-def]
    """Encode one leaf as float16: clipped, to nearest even."""
    for start in range(0, n, _BLOCK):
        stop = min(start + _BLOCK, n)
        if _largest(xbits, start, stop) > _LARGEST:
            return REFUSED
        for i in range(start, stop):
            bits = np.uint32(min(np.int32(xbits[i] & _MAGNITUDE), _HALF_MAX))
            size = np.uint32(bits).view(np.float32)
            odd = np.uint32((bits >> np.uint32(13)) & np.uint32(1))
            normal = np.uint32(bits + odd + _HALF_ROUND) >> np.uint32(13)
            # below 2**-14 the last place is 2**-24: scaled to integers, rounded to nearest even
            small = np.uint32(np.int32(np.rint(size * _HALF_STEPS)))
            chosen = small if size < _HALF_NORMAL else np.uint32(normal)
            sign = np.uint32((np.uint32(xbits[i]) >> np.uint32(16)) & np.uint32(0x8000))
            out[i] = np.uint16(chosen | sign)
    return 0


@_kernel
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


@_inlined
def _settled(one: Any) -> Any:
    return _ZERO if abs(one) < _SMALLEST else one


@_kernel
def step(theta, gradient, eta, out, outbits, n):  # type: ignore[no-untyped-def]
    """Take the outer step without momentum."""
    for start in range(0, n, _BLOCK):
        stop = min(start + _BLOCK, n)
        for i in range(start, stop):
            out[i] = _settled(theta[i] - gradient[i] * eta)
        if _largest(outbits, start, stop) > _LARGEST:
            return REFUSED
    return 0


@_kernel
def momentum_step(theta, momentum, gradient, eta, mu, out, outbits, moved, movedbits, n):  # type: ignore[no-untyped-def]
    """Take the outer step; ``moved`` is the momentum after it."""
    for start in range(0, n, _BLOCK):
        stop = min(start + _BLOCK, n)
        for i in range(start, stop):
            moved[i] = _settled(momentum[i] * mu + gradient[i])
        for i in range(start, stop):
            out[i] = _settled(theta[i] - (gradient[i] + moved[i] * mu) * eta)
        if _largest(outbits, start, stop) > _LARGEST:
            return REFUSED
        if _largest(movedbits, start, stop) > _LARGEST:
            return REFUSED
    return 0


@_kernel
def settle(x, xbits, n):  # type: ignore[no-untyped-def]
    """Set what is smaller than SMALLEST to 0, unless something is not finite."""
    if _largest(xbits, 0, n) > _LARGEST:
        return REFUSED
    for i in range(n):
        x[i] = _settled(x[i])
    return 0
