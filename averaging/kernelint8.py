"""Compiled loops for int8, the codec that nearly everybody uses; some take several steps at once.

Written as :mod:`~dugnad.averaging.kernelsource` says. A block of numbers goes through all steps
while it lies in the nearest cache, in ``bench``. With ``past`` results of a fragment's size go past
the caches: they start at a cache line, and nobody reads them soon.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from dugnad.averaging.kernelparts import (
    BLOCK,
    LARGEST,
    LEVELS,
    REFUSED,
    ROWS,
    SUMS,
    ZERO,
    add_squares,
    after,
    begin_block,
    clear,
    codes_at,
    encode_part,
    inlined,
    inverse_of,
    is_int8,
    kernel,
    lane_sum,
    largest,
    octets_at,
    put,
    scale_bits,
    scale_in,
    settled,
    streamed_all,
)

PIECE: Final = BLOCK // 2
"""Numbers that are put into memory at once: the processor then has other work until the next."""


@inlined
def _add_block(x: Any, n: int, lanes: Any) -> None:
    """Add the squares of x[:n] to the lanes; of a whole block each lane is read once."""
    if n == BLOCK:
        for j in range(SUMS):
            total = lanes[j]
            for row in range(ROWS):
                one = np.float64(x[row * SUMS + j])
                total += one * one
            lanes[j] = total
    else:
        add_squares(x, 0, n, lanes)


@kernel
def int8_rest(x, xbits, out, codes, rest, n):  # type: ignore[no-untyped-def]
    """Encode one leaf and put what that loses into ``rest``."""
    at = 0
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        scale = begin_block(xbits, start, stop, out, at)
        if scale < ZERO:
            return REFUSED
        encode_part(x, rest, start, stop, codes, at + 4, scale)
        at += 4 + stop - start
    return 0


@kernel
def hand_in(ref, theta, residual, out, codes, rest, bench, benchbits, sums, lanes, past, n):  # type: ignore[no-untyped-def]
    """Encode residual + (ref - theta) of one leaf; ``sums``: squares of progress and of rest.

    ``lanes`` are two times LANES, and ``bench`` a block.
    """
    other = after(lanes, SUMS)
    clear(lanes)
    clear(other)
    at = 0
    for start in range(0, n, BLOCK):
        length = min(BLOCK, n - start)
        for i in range(length):
            bench[i] = ref[start + i] - theta[start + i]
        _add_block(bench, length, lanes)
        for i in range(length):
            bench[i] = residual[start + i] + bench[i]
        scale = begin_block(benchbits, 0, length, out, at)
        if scale < ZERO:
            return REFUSED
        at += 4
        for first in range(0, length, PIECE):
            last = min(first + PIECE, length)
            encode_part(bench, bench, first, last, codes, at + first, scale)
            put(rest, start + first, after(bench, first), last - first, past)
        _add_block(bench, length, other)
        at += length
    sums[0] = lane_sum(lanes)
    sums[1] = lane_sum(other)
    if past:
        streamed_all()
    return 0


@kernel
def int8_encode(x, xbits, out, codes, n):  # type: ignore[no-untyped-def]
    """Encode leaves."""
    at = 0
    for start in range(0, n, BLOCK):
        length = min(BLOCK, n - start)
        scale = begin_block(xbits, start, start + length, out, at)
        if scale < ZERO:
            return REFUSED
        inverse = inverse_of(scale)
        at += 4
        for i in range(length):
            code = min(max(np.rint(x[start + i] * inverse), -LEVELS), LEVELS)
            codes[at + i] = np.int8(code)
        at += length
    return 0


@kernel
def int8_decode(data, codes, out, bench, past, n):  # type: ignore[no-untyped-def]
    """Decode leaves; ``bench``: a block."""
    if not is_int8(data, codes, n):
        return REFUSED
    at = 0
    for start in range(0, n, BLOCK):
        length = min(BLOCK, n - start)
        scale = scale_in(scale_bits(data, at))
        at += 4
        if past:
            for i in range(length):
                bench[i] = np.float32(codes[at + i]) * scale
            put(out, start, bench, length, past)
        else:
            for i in range(length):
                out[start + i] = np.float32(codes[at + i]) * scale
        at += length
    if past:
        streamed_all()
    return 0


@kernel
def int8_squares(data, codes, bench, start, stop, sums, lanes, n):  # type: ignore[no-untyped-def]
    """Sum the squares of what a leaf of ``n`` has at ``start`` to ``stop``; ``bench``: a block."""
    if not is_int8(data, codes, n):
        return REFUSED
    clear(lanes)
    for block in range(start // BLOCK * BLOCK, stop, BLOCK):
        first, last = max(block, start), min(block + BLOCK, stop)
        at = block // BLOCK * (BLOCK + 4)
        scale = scale_in(scale_bits(data, at))
        at += 4 + first - block
        for i in range(last - first):
            bench[i] = np.float32(codes[at + i]) * scale
        if first == block and start % BLOCK == 0:
            _add_block(bench, last - first, lanes)
            continue
        done = 0
        while done < last - first:
            lane = (first - start + done) % SUMS
            count = min(SUMS - lane, last - first - done)
            for j in range(count):
                one = np.float64(bench[done + j])
                lanes[lane + j] += one * one
            done += count
    sums[0] = lane_sum(lanes)
    return 0


@kernel
def int8_step(data, codes, theta, eta, out, leaf, leafbits, past, n):  # type: ignore[no-untyped-def]
    """Decode one leaf and take the outer step without momentum with it, into ``out`` and ``leaf``.

    ``leaf`` is for whoever looks at it at once.
    """
    if not is_int8(data, codes, n):
        return REFUSED
    at = 0
    for start in range(0, n, BLOCK):
        length = min(BLOCK, n - start)
        scale = scale_in(scale_bits(data, at))
        at += 4 - start
        for first in range(start, start + length, PIECE):
            last = min(first + PIECE, start + length)
            for i in range(first, last):
                gradient = np.float32(codes[at + i]) * scale
                leaf[i] = settled(theta[i] - gradient * eta)
            put(out, first, after(leaf, first), last - first, past)
        if largest(leafbits, start, start + length) > LARGEST:
            return REFUSED
        at += start + length
    if past:
        streamed_all()
    return 0


@inlined
def _add_decoded(
    data: Any, codes: Any, at: int, factor: Any, first: Any, total: Any, start: int, length: int
) -> None:
    """Add ``factor`` times the block at data[at:] to total[start:]; ``first``: put it there."""
    scale = scale_in(scale_bits(data, at))
    at += 4
    if first:
        for i in range(length):
            total[start + i] = np.float32(codes[at + i]) * scale * factor
    else:
        for i in range(length):
            total[start + i] += np.float32(codes[at + i]) * scale * factor


@kernel
def int8_add(data, codes, total, factor, first, n):  # type: ignore[no-untyped-def]
    """Decode one leaf, multiply by ``factor``, and add to ``total`` or, if ``first``, put there."""
    if not is_int8(data, codes, n):
        return REFUSED
    at = 0
    for start in range(0, n, BLOCK):
        length = min(BLOCK, n - start)
        _add_decoded(data, codes, at, factor, first, total, start, length)
        at += 4 + length
    return 0


@kernel
def int8_merge(  # type: ignore[no-untyped-def]
    places, factors, count, leaf, out, codes, rounding, share, bench, benchbits, past, n
):
    """Encode the sum of ``count`` leaves, each times its factor, and put what that loses, times
    ``share``, into ``rounding``.

    ``places`` has addresses of payloads; in each the leaf begins at byte ``leaf``.
    """
    for k in range(count):
        place = places[k] + leaf
        if not is_int8(octets_at(place), codes_at(place), n):
            return REFUSED
    at = 0
    for start in range(0, n, BLOCK):
        length = min(BLOCK, n - start)
        for k in range(count):
            place = places[k] + leaf
            data, source = octets_at(place), codes_at(place)
            _add_decoded(data, source, at, factors[k], k == 0, bench, 0, length)
        scale = begin_block(benchbits, 0, length, out, at)
        if scale < ZERO:
            return REFUSED
        at += 4
        for first in range(0, length, PIECE):
            last = min(first + PIECE, length)
            encode_part(bench, bench, first, last, codes, at + first, scale)
            for i in range(first, last):
                bench[i] = bench[i] * share
            put(rounding, start + first, after(bench, first), last - first, past)
        at += length
    if past:
        streamed_all()
    return 0
