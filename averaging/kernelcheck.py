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
    wrong = [name for name, right in _trials(tried) if not right]
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
    norms = tried.hand_in(theta, other, residual, made, left)
    alike = norms == (squared(moved), squared(rest)) and made.tobytes() == payload
    yield "hand_in", alike and np.array_equal(left, rest)
    made, left = np.zeros_like(octets), _room()
    alike = tried.int8_rest(whole, made, left) and made.tobytes() == payload
    yield "int8_rest", alike and np.array_equal(left, rest)
    out = _room()
    alike = tried.progress(theta, other, residual, out) == squared(moved)
    yield "progress", alike and _same(out, whole)
    yield "squares", tried.squares(theta) == squared(theta)
    out = _room()
    yield "int8_decode", tried.int8_decode(octets, out) and _same(out, decoded)
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
