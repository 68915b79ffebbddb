"""What the compiled loops of the exchange share: how they are compiled, and what they are made of.

As in :mod:`~dugnad.averaging.kernelsource`, which says how such loops are written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from dugnad.averaging.codec_base import FLOAT32_MAX, SCALE_MAX, SMALLEST
from dugnad.averaging.codecs import INT8_BLOCK
from dugnad.averaging.kernels import LANES, SIGNATURES

REFUSED: Final = 1
"""What a loop returns that met something that must not be."""

BLOCK: Final = INT8_BLOCK
SUMS: Final = LANES
ROWS: Final = BLOCK // SUMS
"""Rows of lanes in a block."""
MAGNITUDE: Final = np.int32(0x7FFF_FFFF)
"""All bits of a float32 but its sign's."""
LARGEST: Final = np.int32(np.float32(FLOAT32_MAX).view(np.int32))
LEAST: Final = np.float32(SMALLEST)
TOP_SCALE: Final = np.float32(SCALE_MAX)
SCALE_MAX_BITS: Final = np.uint32(np.float32(SCALE_MAX).view(np.uint32))
ZERO: Final = np.float32(0.0)
ONE: Final = np.float32(1.0)
LEVELS: Final = np.float32(127.0)
VECTOR: Final = 16
"""Numbers that are put into memory at once: a cache line."""

_TYPES: Final = {
    "f": types.CPointer(types.float32),
    "i": types.CPointer(types.int32),
    "B": types.CPointer(types.uint8),
    "b": types.CPointer(types.int8),
    "H": types.CPointer(types.uint16),
    "q": types.CPointer(types.int64),
    "d": types.CPointer(types.float64),
    "n": types.int64,
    "s": types.float32,
}

KERNELS: Final[dict[str, Any]] = {}  # Any: numba has no types
"""The compiled functions by name."""

_Loop = TypeVar("_Loop", bound=Callable[..., Any])


def inlined(function: _Loop) -> _Loop:
    """Let a function become a part of each kernel that calls it."""
    made: _Loop = njit(inline="always")(function)
    return made


def kernel(function: _Loop) -> _Loop:
    """Compile a function with its signature, and keep it by its name."""
    letters = SIGNATURES[function.__name__]
    signature = types.int64(*(_TYPES[letter] for letter in letters))
    KERNELS[function.__name__] = cfunc(signature, error_model="numpy")(function)
    return function


@intrinsic  # type: ignore[untyped-decorator]
def stream(typing: Any, to: Any, at: Any, source: Any, count: Any) -> Any:
    """Copy source[:count] to to[at:], past the caches: nobody reads it soon, and memory that is
    written in full need not be read before. to[at] begins a cache line."""
    return types.void(to, types.int64, source, types.int64), _streamed


def _streamed(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    to, at, source, count = arguments
    whole, single = ir.VectorType(ir.FloatType(), VECTOR), ir.IntType(64)
    mark = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
    lines = builder.udiv(count, ir.Constant(single, VECTOR))
    with cgutils.for_range(builder, lines) as line:
        offset = builder.mul(line.index, ir.Constant(single, VECTOR))
        place = builder.gep(source, [offset])
        numbers = builder.load(builder.bitcast(place, whole.as_pointer()), align=4)
        place = builder.gep(to, [builder.add(at, offset)])
        put = builder.store(numbers, builder.bitcast(place, whole.as_pointer()), align=64)
        put.set_metadata("nontemporal", mark)
    done = builder.mul(lines, ir.Constant(single, VECTOR))
    with cgutils.for_range(builder, builder.sub(count, done)) as left:
        offset = builder.add(left.index, done)
        number = builder.load(builder.gep(source, [offset]))
        builder.store(number, builder.gep(to, [builder.add(at, offset)]))
    return context.get_dummy_value()


@intrinsic  # type: ignore[untyped-decorator]
def streamed_all(typing: Any) -> Any:
    """What was streamed is there for all other threads before anything that comes after this."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic  # type: ignore[untyped-decorator]
def octets_at(typing: Any, address: Any) -> Any:
    """The bytes at an address."""
    return types.CPointer(types.uint8)(types.int64), _pointed


@intrinsic  # type: ignore[untyped-decorator]
def codes_at(typing: Any, address: Any) -> Any:
    """The bytes at an address, as int8 numbers."""
    return types.CPointer(types.int8)(types.int64), _pointed


def _pointed(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))


@intrinsic  # type: ignore[untyped-decorator]
def after(typing: Any, numbers: Any, count: Any) -> Any:
    """What a pointer points to, without the first ``count``."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.gep(arguments[0], [arguments[1]])

    return numbers(numbers, types.int64), codegen


@inlined
def put(to: Any, at: int, source: Any, count: int, past: int) -> None:
    """Copy source[:count] to to[at:]: past the caches if ``past``."""
    if past:
        stream(to, at, source, count)
    else:
        for i in range(count):
            to[at + i] = source[i]


@inlined
def largest(bits: Any, start: int, stop: int) -> Any:
    """Return the largest magnitude, as bits."""
    top = np.int32(0)
    for i in range(start, stop):
        one = np.int32(bits[i] & MAGNITUDE)
        top = one if one > top else top
    return top


@inlined
def clear(lanes: Any) -> None:
    for j in range(SUMS):
        lanes[j] = 0.0


@inlined
def add_squares(x: Any, start: int, stop: int, lanes: Any) -> None:
    """Add squares to the lanes; ``start`` is a multiple of LANES from the first element."""
    for row in range(start, stop, SUMS):
        for j in range(min(SUMS, stop - row)):
            one = np.float64(x[row + j])
            lanes[j] += one * one


@inlined
def lane_sum(lanes: Any) -> Any:
    total = 0.0
    for j in range(SUMS):
        total += lanes[j]
    return total


@inlined
def scale_of(top: Any) -> Any:
    """Return the scale of a block whose largest magnitude has these bits."""
    scale = np.int32(top).view(np.float32) / LEVELS
    scale = min(scale, TOP_SCALE)
    return ZERO if scale < LEAST else scale


@inlined
def put_scale(out: Any, at: int, scale: Any) -> None:
    bits = np.float32(scale).view(np.uint32)
    for k in range(4):
        out[at + k] = np.uint8((bits >> np.uint32(8 * k)) & np.uint32(255))


@inlined
def scale_bits(data: Any, at: int) -> Any:
    bits = np.uint32(0)
    for k in range(4):
        bits = np.uint32(bits | np.uint32(np.uint32(data[at + k]) << np.uint32(8 * k)))
    return bits


@inlined
def inverse_of(scale: Any) -> Any:
    return ONE / scale if scale > ZERO else ZERO


@inlined
def begin_block(bits: Any, start: int, stop: int, out: Any, at: int) -> Any:
    """Put the scale of the block with these bits at out[at:]; returns it, or less than 0 for a
    block that is not finite."""
    top = largest(bits, start, stop)
    scale = scale_of(top)
    put_scale(out, at, scale)
    return scale if top <= LARGEST else -ONE


@inlined
def encode_part(x: Any, rest: Any, start: int, stop: int, codes: Any, at: int, scale: Any) -> None:
    """Encode x[start:stop] of a block with this scale at codes[at:]; ``rest``, which may be ``x``,
    gets what that loses. Only with TOP_SCALE are there codes to clip."""
    inverse = inverse_of(scale)
    for i in range(stop - start):
        one = x[start + i]
        code = min(max(np.rint(one * inverse), -LEVELS), LEVELS)
        codes[at + i] = np.int8(code)
        rest[start + i] = one - code * scale


@inlined
def lowest(codes: Any, start: int, stop: int) -> Any:
    low = np.int8(0)
    for i in range(start, stop):
        one = np.int8(codes[i])
        low = one if one < low else low
    return low


@inlined
def is_int8(data: Any, codes: Any, n: int) -> Any:
    """Return whether scales and codes are such as may be: a sign or NaN is above SCALE_MAX, too."""
    good, at = True, 0
    for start in range(0, n, BLOCK):
        length = min(BLOCK, n - start)
        if scale_bits(data, at) > SCALE_MAX_BITS:
            good = False
        if lowest(codes, at + 4, at + 4 + length) < -127:
            good = False
        at += 4 + length
    return good


@inlined
def scale_in(bits: Any) -> Any:
    scale = np.uint32(bits).view(np.float32)
    return ZERO if scale < LEAST else scale


@inlined
def settled(one: Any) -> Any:
    return ZERO if abs(one) < LEAST else one
