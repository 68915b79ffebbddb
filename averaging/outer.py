"""The outer step: Nesterov SGD that gives the same bits on every machine (DESIGN.md 8.7).

It runs in numpy on host memory, one float32 operation at a time, since fused and reordered forms
differ. No subnormal goes in or out: gradients come from the codecs, whose numbers are 0 or at least
SMALLEST (2**-100), and anchors and momenta are set to 0 below it. A product inside a step may still
be subnormal, and a processor that flushes it to zero gets the same bits: it is then under 2**-126,
while whatever it is added to is 0 (and the sum is set to 0) or at least 2**-100, whose last bit is
worth 2**-124 or more.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dugnad.averaging import kernels
from dugnad.averaging.codec_int4 import INT4_BLOCK
from dugnad.averaging.codecs import COMMIT_CODECS, SMALLEST, CodecError, settle_range
from dugnad.averaging.tree import LEAF_PARAMS, Vector, param_bounds

ETA_MAX: Final = 2.0
"""Largest outer learning rate taken from a header: published ones are 0.4 to 1 (algorithms.md)."""


class OuterError(ValueError):
    """A step that must not be taken: a rate out of range or a result that is not finite."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def bits_of(value: float) -> int:
    """Return the bits of ``value`` as a float32: how rates travel in headers."""
    return int.from_bytes(struct.pack("<f", value), "little")


def float_of(bits: int) -> float:
    """Return the float32 with these bits; raises :class:`OuterError` beyond 32 bits."""
    if not 0 <= bits < 1 << 32:
        raise OuterError("a rate of more than 32 bits")
    return float(struct.unpack("<f", bits.to_bytes(4, "little"))[0])


@dataclass(frozen=True, slots=True)
class Rates:
    """The outer learning rate and momentum of one merge, each exactly a float32."""

    eta: np.float32
    mu: np.float32

    @classmethod
    def of_bits(cls, *, eta_bits: int, mu_bits: int) -> Rates:
        """Return the rates of a header; raises :class:`OuterError` if they are out of range."""
        eta, mu = float_of(eta_bits), float_of(mu_bits)
        if not SMALLEST <= eta <= ETA_MAX:
            raise OuterError(f"outer learning rate {eta:g} outside (0, {ETA_MAX:g}]")
        if not (mu == 0.0 or SMALLEST <= mu < 1.0):
            raise OuterError(f"outer momentum {mu:g} outside [0, 1)")
        return cls(np.float32(eta), np.float32(mu))


@dataclass(frozen=True, slots=True)
class OuterState:
    """An anchor's parameters and outer momentum, or one leaf of them."""

    theta: Vector
    momentum: Vector


def step_leaf(
    state: OuterState, gradient: Vector, rates: Rates, out: OuterState, scratch: Vector
) -> None:
    """Take the outer step on one leaf (or any equal ranges), into ``out``.

    b = mu*b + G, set to 0 below SMALLEST; theta = theta - eta*(G + mu*b), likewise. Without
    momentum (mu = 0) b has no say and stays as it is, and a rate of 1 changes no bit. ``out`` may
    be ``state``; ``scratch`` has the same size. Raises :class:`OuterError` if a result is not
    finite.
    """
    theta, momentum, move = out.theta, out.momentum, gradient
    if _native_step(state, gradient, rates, out):
        return
    with np.errstate(over="ignore", invalid="ignore"):
        if rates.mu:
            np.multiply(state.momentum, rates.mu, out=momentum)
            np.add(momentum, gradient, out=momentum)
            if not settle_range(momentum, scratch):
                raise OuterError("an outer momentum that is not finite")
            np.multiply(momentum, rates.mu, out=scratch)
            move = np.add(gradient, scratch, out=scratch)
        elif momentum is not state.momentum:
            np.copyto(momentum, state.momentum)
        if rates.eta != 1.0:
            move = np.multiply(move, rates.eta, out=scratch)
        np.subtract(state.theta, move, out=theta)
        if not settle_range(theta, scratch):
            raise OuterError("an anchor that is not finite")


def _native_step(state: OuterState, gradient: Vector, rates: Rates, out: OuterState) -> bool:
    """Take the step in one pass; False where there are no kernels or a result is not finite."""
    native = kernels.current()
    if native is None:
        return False
    if rates.mu:
        before, after = (state.theta, state.momentum), (out.theta, out.momentum)
        return native.momentum_step(before, gradient, (rates.eta, rates.mu), after)
    if out.momentum is not state.momentum:
        np.copyto(out.momentum, state.momentum)
    return native.step(state.theta, gradient, rates.eta, out.theta)


def step(state: OuterState, gradient: Vector, rates: Rates) -> OuterState:
    """Return the state after the outer step with a merged pseudo-gradient; changes no argument."""
    n = state.theta.size
    if not state.momentum.size == gradient.size == n:
        raise ValueError(f"sizes {n}, {state.momentum.size} and {gradient.size} differ")
    result = OuterState(np.empty(n, np.float32), np.empty(n, np.float32))
    scratch = np.empty(min(n, LEAF_PARAMS), np.float32)
    for start, stop in param_bounds(n):
        part = slice(start, stop)
        step_leaf(
            OuterState(state.theta[part], state.momentum[part]),
            gradient[part],
            rates,
            OuterState(result.theta[part], result.momentum[part]),
            scratch[: stop - start],
        )
    return result


_CONFORMANCE_PARAMS: Final = 4096
_CONFORMANCE_ROUNDS: Final = 3
_TINY_LANES: Final = 8
"""Each 8th number of the vector stays near SMALLEST, to see that it becomes 0 where it must."""
_CONFORMANCE_RATES: Final = ((0.7, 0.5), (1.0, 0.0), (0.4, 0.9))
_CONFORMANCE_DIGESTS: Final = (
    "f3beb19e38864b56b2c0f745df05d2863c6c06d2f3279e0bc5636d5dd7deb72b",
    "79ad0be8c6f3c798765634cd56b4133532f6253914f21c199b75d58ba2e05dc3",
)
"""SHA-256 of anchor and momentum; a plain-Python copy of the step in the tests gives the same."""


def conformance() -> str | None:
    """Return None if this machine computes the exchange as all others do, else what it got wrong.

    About a millisecond. Decodes payloads made of integers in each codec of commits, some scales at
    and below SMALLEST, steps with them and compares SHA-256 of anchor and momentum with constants.
    A machine that fails must not take part in merges: it would hold other bits than the rest.
    """
    try:
        state = _conformance_state()
    except (CodecError, OuterError) as fault:
        return f"the conformance vector was refused: {fault.reason}"
    found = _digests((state.theta, state.momentum))
    for name, got, due in zip(("anchor", "momentum"), found, _CONFORMANCE_DIGESTS, strict=True):
        if got != due:
            return f"this machine's {name} of the conformance vector is {got[:16]}, not {due[:16]}"
    return None


def _conformance_state() -> OuterState:
    """Return the anchor and momentum of the conformance run."""
    n = _CONFORMANCE_PARAMS
    theta = _integers(n, 1) * np.float32(2.0**-26)
    theta[::_TINY_LANES] = 0.0
    state = OuterState(theta, np.zeros(n, np.float32))
    for number, (eta, mu) in enumerate(_CONFORMANCE_RATES):
        rates = Rates.of_bits(eta_bits=bits_of(eta), mu_bits=bits_of(mu))
        for index, codec in enumerate(COMMIT_CODECS.values()):
            data = _conformance_payload(codec.name, n, seed=10 * number + index)
            state = step(state, codec.decode(data, n), rates)
    return state


def _conformance_payload(codec: str, n: int, *, seed: int) -> bytes:
    """Return ``n`` encoded parameters, made without the encoder; some are near SMALLEST or 0."""
    values = _integers(n, seed) * np.float32(2.0**-30)
    if codec == "float32":
        values[::_TINY_LANES] *= np.float32(2.0**-88)  # up to 2**-95
        values[:: 2 * _TINY_LANES] *= np.float32(2.0**-6)  # up to 2**-101
        return values.astype("<f4").tobytes()
    if codec == "float16":
        values[::_TINY_LANES] = 0.0
        return values.astype("<f2").tobytes()
    if codec == "int4":
        scales = np.abs(values[: n // INT4_BLOCK])
        scales[:2] = np.float32(SMALLEST), np.float32(2.0**-101)
        widened = scales.astype("<f4").view("<u4") >> np.uint32(16)
        nibbles = (_integers(n, seed) % np.float32(15.0) - np.float32(7.0)).astype(np.int8)
        low, high = (part.view(np.uint8) & np.uint8(15) for part in np.split(nibbles, 2))
        packed = np.bitwise_or(low, np.left_shift(high, np.uint8(4)))
        return bytes(widened.astype("<u2").tobytes() + packed.tobytes())
    scales = np.abs(values[1:5])
    scales[:2] = np.float32(SMALLEST), np.float32(2.0**-101)
    codes = _integers(n, seed) % np.float32(127.0)
    codes[1024::_TINY_LANES] = 0.0
    rows = zip(scales.astype("<f4"), codes.astype(np.int8).reshape(4, -1), strict=True)
    return b"".join(scale.tobytes() + row.tobytes() for scale, row in rows)


def _integers(n: int, seed: int) -> Vector:
    """Return ``n`` integers in [-2**23, 2**23), as float32 (exact), by a multiplicative hash."""
    mixed = (np.arange(n, dtype=np.uint32) + np.uint32(seed * n)) * np.uint32(2_654_435_761)
    mixed ^= mixed >> np.uint32(15)
    mixed *= np.uint32(2_246_822_519)
    return ((mixed >> np.uint32(8)).astype(np.int64) - (1 << 23)).astype(np.float32)


def _digests(arrays: Sequence[Vector]) -> tuple[str, ...]:
    return tuple(hashlib.sha256(one.astype("<f4").tobytes()).hexdigest() for one in arrays)
