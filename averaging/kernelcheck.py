"""Whether compiled kernels give the bits of the numpy code: tried once before they are used.

A few milliseconds. A compiler or processor that errs shows here, and numpy goes on serving.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from dugnad.averaging import kernels
from dugnad.averaging.codec_base import SMALLEST, octets_of, settle_range
from dugnad.averaging.codecs import CODECS, INT8_BLOCK
from dugnad.averaging.int8walk import (
    HandInWalk,
    MergeWalk,
    SquaresWalk,
    StepWalk,
)
from dugnad.averaging.kernels import PAST_BYTES_MIN, aligned
from dugnad.averaging.leaf import squared
from dugnad.averaging.outer import OuterState, Rates, step_leaf
from dugnad.averaging.tree import Vector

_PARAMS: Final = 9 * INT8_BLOCK + 77
_SEED: Final = 20_261_130
_RATES: Final = (
    Rates(np.float32(1.0), np.float32(0.0)),
    Rates(np.float32(0.7), np.float32(0.0)),
    Rates(np.float32(0.4), np.float32(0.9)),
)


def fault_of(tried: kernels.Kernels) -> str:
    """Return which kernel differs from numpy, or '' if none does.

    Meant to be asked while numpy is in use; it compares kernels with kernels afterwards.
    """
    wrong = dict.fromkeys(name for name, right in _trials(tried) if not right)
    return f"compiled {', '.join(wrong)} gave other bits than numpy" if wrong else ""


def _trials(tried: kernels.Kernels) -> Iterator[tuple[str, bool]]:
    """Yield each kernel's name and whether it does what numpy does, here."""
    rng = np.random.default_rng(_SEED)
    theta, other, residual, gradient = (_hard(rng) for _ in range(4))
    codec, moved = CODECS["int8"], np.subtract(theta, other)
    whole = np.add(residual, moved)
    payload, rest = bytearray(codec.encoded_size(_PARAMS)), _room()
    codec.encode_rest(whole, payload, rest, _room())
    octets, decoded = octets_of(payload), codec.decode(payload, _PARAMS)

    made, left = np.zeros_like(octets), _room()
    alike = tried.int8_rest(whole, made, left) and made.tobytes() == payload
    yield "int8_rest", alike and np.array_equal(left, rest)
    out = _room()
    alike = tried.progress(theta, other, residual, out) == squared(moved)
    yield "progress", alike and _same(out, whole)
    for past_from in (0, PAST_BYTES_MIN):
        out = _line_room()
        tried.difference(theta, other, out, past_from)
        yield "difference", _same(out, moved)
    yield "squares", tried.squares(theta) == squared(theta)
    made = np.zeros_like(octets)
    yield "int8_encode", tried.int8_encode(whole, made) and made.tobytes() == payload
    for past_from in (0, PAST_BYTES_MIN):
        out = _line_room()
        yield "int8_decode", tried.int8_decode(octets, out, past_from) and _same(out, decoded)
    for past_from in (0, PAST_BYTES_MIN):
        left, norms = _line_room(), (squared(moved), squared(rest))
        made = np.zeros_like(octets)
        walk = HandInWalk(tried, (theta, other, residual), made, left, past_from)
        alike = walk.leaf(0) == norms and made.tobytes() == payload
        yield "hand_in", alike and np.array_equal(left, rest)
        yield from _walk_trials(tried, payload, theta, past_from)
    for start, stop in ((0, _PARAMS), (0, INT8_BLOCK), (77, 3 * INT8_BLOCK + 5)):
        found = SquaresWalk(tried, octets, _PARAMS).span(0, start, stop)
        yield "int8_squares", found == squared(decoded[start:stop])
    yield from _int4_trials(tried, whole)
    yield from _half_trials(tried, whole)
    out, factor = theta.copy(), np.float32(0.3)
    alike = tried.int8_add(octets, out, factor, first=False)
    yield "int8_add", alike and _same(out, np.add(theta, np.multiply(decoded, factor)))
    for rates in _RATES:
        yield _step_trial(tried, OuterState(theta, other), gradient, rates)
    out, due = residual.copy(), residual.copy()
    settle_range(due, _room())
    yield "settle", tried.settle(out) and _same(out, due)


def _walk_trials(
    tried: kernels.Kernels, payload: bytearray, theta: Vector, past_from: int
) -> Iterator[tuple[str, bool]]:
    codec, octets = CODECS["int8"], octets_of(payload)
    decoded, due, out = codec.decode(payload, _PARAMS), OuterState(_room(), _room()), _line_room()
    for eta in (np.float32(1.0), np.float32(0.7)):
        rates = Rates(eta, np.float32(0.0))
        step_leaf(OuterState(theta, theta), decoded, rates, due, _room())
        stepped = StepWalk(tried, octets, theta, eta, out, past_from).leaf(0)
        alike = stepped is not None and bytes(stepped) == due.theta.tobytes()
        yield "int8_step", alike and _same(out, due.theta)
    factors, share = np.array([0.3, -0.6], np.float32), np.float32(1.7)
    total = np.add(decoded * factors[0], decoded * factors[1])
    sent, rest, made, left = bytearray(payload), _room(), np.zeros_like(octets), _line_room()
    codec.encode_rest(total, sent, rest, _room())
    walk = MergeWalk(tried, (octets, octets), made, left, share, past_from)
    alike = walk.leaf(0, factors) and made.tobytes() == sent
    yield "int8_merge", alike and np.array_equal(left, rest * share)


def _int4_trials(tried: kernels.Kernels, x: Vector) -> Iterator[tuple[str, bool]]:
    codec = CODECS["int4"]
    payload, rest = bytearray(codec.encoded_size(_PARAMS)), _room()
    codec.encode_rest(x, payload, rest, _room())
    octets = octets_of(payload)
    made, left, out = np.zeros_like(octets), _room(), _room()
    alike = tried.int4_rest(x, made, left) and made.tobytes() == payload
    yield "int4_rest", alike and np.array_equal(left, rest)
    alike = tried.int4_decode(octets, out)
    yield "int4_decode", alike and _same(out, codec.decode(payload, _PARAMS))


def _half_trials(tried: kernels.Kernels, x: Vector) -> Iterator[tuple[str, bool]]:
    codec = CODECS["float16"]
    x = np.concatenate((x, np.float32(2.0**-25) * np.arange(4096, dtype=np.float32)))
    payload = codec.encode(x)
    made, out = np.zeros(len(payload), np.uint8), np.empty_like(x)
    yield "half_encode", tried.half_encode(x, made) and made.tobytes() == payload
    decoded = codec.decode(payload, x.size)
    yield "half_decode", tried.half_decode(octets_of(payload), out) and _same(out, decoded)


def _step_trial(
    tried: kernels.Kernels, state: OuterState, gradient: Vector, rates: Rates
) -> tuple[str, bool]:
    due, out, moved = OuterState(_room(), _room()), _room(), _room()
    step_leaf(state, gradient, rates, due, _room())
    if not rates.mu:
        alike = tried.step(state.theta, gradient, rates.eta, out)
        return "step", alike and _same(out, due.theta)
    before = state.theta, state.momentum
    alike = tried.momentum_step(before, gradient, (rates.eta, rates.mu), (out, moved))
    return "momentum_step", alike and _same(out, due.theta) and _same(moved, due.momentum)


def _room() -> Vector:
    return np.full(_PARAMS, np.nan, np.float32)


def _line_room() -> Vector:
    room = aligned(4 * _PARAMS).view(np.float32)
    room.fill(np.nan)
    return room


def _hard(rng: np.random.Generator) -> Vector:
    """Numbers of many sizes, some near and below SMALLEST, some 0, some exact halves."""
    x = rng.standard_normal(_PARAMS) * 2.0 ** rng.integers(-20, 3, _PARAMS)
    x[::7] = rng.integers(-127, 128, x[::7].size) / 2.0
    x[INT8_BLOCK : 2 * INT8_BLOCK] *= SMALLEST
    x[2 * INT8_BLOCK : 3 * INT8_BLOCK] = 0.0
    x[::31] = 0.0
    return x.astype(np.float32)


def _same(a: Vector, b: Vector) -> bool:
    return a.tobytes() == b.tobytes()
