"""Compiled inner loops of the exchange: one pass over the numbers where numpy makes ten.

They are optional, and there is no choosing between results: whatever they do, the numpy code beside
each call does too, to the same bits, so they may come into use at any moment. Each method answers
False for what it refuses (a number that is not finite, a byte that must not be); the caller then
goes the numpy way, which says what is wrong. :mod:`~dugnad.averaging.kernelsource` has the loops,
:mod:`~dugnad.peer.kernelload` brings them here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dugnad.averaging.tree import Vector

LANES: Final = 256
"""Sums that a sum of squares is made of: element i goes to sum i modulo this, and these are added
up in order. So it is the same bits with and without kernels, on every machine."""

SIGNATURES: Final[dict[str, str]] = {
    "int8_encode": "fiBbn",
    "int8_rest": "fiBbfn",
    "int8_decode": "Bbffnn",
    "int8_add": "Bbfsnn",
    "int4_rest": "fiBbfn",
    "int4_decode": "Bbfn",
    "half_encode": "iHn",
    "half_decode": "Hfin",
    "int8_squares": "Bbfnnddn",
    "int8_step": "Bbfsffinn",
    "int8_merge": "qfnnBbfsfinn",
    "hand_in": "fffBbffiddnn",
    "progress": "ffffddn",
    "difference": "ffffnn",
    "squares": "fddn",
    "step": "ffsfin",
    "momentum_step": "fffssfifin",
    "settle": "fin",
}
"""Arguments by kernel: f, i, B, b, H, q, d point to float32, int32, uint8, int8, uint16, int64 and
float64 numbers, n is an int64, s a float32. Each returns an int64: 0, or another for what it
refuses."""

PAST_BYTES_MIN: Final = 1 << 22
"""Results of so many bytes are written past the caches: what is smaller may be read from there
before other work takes its place."""

_BENCH: Final = 4096
"""Bytes of a block of numbers."""
_LINE: Final = 64
"""Bytes of a cache line, or a whole number of them."""
Octets = npt.NDArray[np.uint8]
Function = Callable[..., int]
"""A kernel as ctypes calls it, without Python's lock."""

_PLAIN: Final = {"n": ctypes.c_int64, "s": ctypes.c_float}


def prototype(name: str) -> Any:
    """Return the ctypes function type of a kernel. Any: ctypes makes these up."""
    arguments: list[Any] = [_PLAIN.get(letter, ctypes.c_void_p) for letter in SIGNATURES[name]]
    return ctypes.CFUNCTYPE(ctypes.c_int64, *arguments)


class Kernels:
    """The loops, with what they point to checked: arrays must be flat, contiguous and long enough.

    ValueError for arrays that are not; that is a mistake in this program.
    """

    def __init__(self, functions: Mapping[str, Function], keep: object = None) -> None:
        """``keep`` is what the functions' code lies in."""
        self.call: Final = dict(functions)
        """By name, for :mod:`~dugnad.averaging.int8walk`, which checks what it points to itself."""
        self._keep = keep
        self._int8_encode = functions["int8_encode"]
        self._int8_rest = functions["int8_rest"]
        self._int8_decode = functions["int8_decode"]
        self._int8_add = functions["int8_add"]
        self._int4_rest = functions["int4_rest"]
        self._int4_decode = functions["int4_decode"]
        self._half_encode = functions["half_encode"]
        self._half_decode = functions["half_decode"]
        self._progress = functions["progress"]
        self._difference = functions["difference"]
        self._squares = functions["squares"]
        self._step = functions["step"]
        self._momentum_step = functions["momentum_step"]
        self._settle = functions["settle"]

    def int8_encode(self, x: Vector, out: Octets) -> bool:
        """Encode as int8, any number of leaves."""
        n = x.size
        at, to = floats_at(x, n), room_at(out, octets_at(out, int8_size(n)))
        return self._int8_encode(at, at, to, to, n) == 0

    def int8_rest(self, x: Vector, out: Octets, rest: Vector) -> bool:
        """Encode one leaf as int8; ``rest`` gets what that loses."""
        n = x.size
        at, to = floats_at(x, n), room_at(out, octets_at(out, int8_size(n)))
        return self._int8_rest(at, at, to, to, room_at(rest, floats_at(rest, n)), n) == 0

    def int8_decode(self, data: Octets, out: Vector, past_from: int = PAST_BYTES_MIN) -> bool:
        """Decode int8, any number of leaves."""
        n, bench = out.size, aligned(_BENCH)
        at, to = octets_at(data, int8_size(n)), room_at(out, floats_at(out, n))
        rooms = to, bench.ctypes.data, goes_past(out, past_from)
        return self._int8_decode(at, at, *rooms, n) == 0

    def int8_add(self, data: Octets, total: Vector, factor: np.float32, *, first: bool) -> bool:
        """Decode one leaf of int8, times ``factor``, and add it; ``first``: put it there.

        After a refusal ``total`` is as it was.
        """
        n = total.size
        at = octets_at(data, int8_size(n))
        to = room_at(total, floats_at(total, n))
        return self._int8_add(at, at, to, factor, first, n) == 0

    def int4_rest(self, x: Vector, out: Octets, rest: Vector) -> bool:
        """Encode one leaf as int4; ``rest`` gets what that loses."""
        n = x.size
        at, to = floats_at(x, n), room_at(out, octets_at(out, int4_size(n)))
        codes, left = np.empty(n, np.int8), room_at(rest, floats_at(rest, n))
        return self._int4_rest(at, at, to, codes.ctypes.data, left, n) == 0

    def int4_decode(self, data: Octets, out: Vector) -> bool:
        """Decode one leaf of int4."""
        n = out.size
        at, codes = octets_at(data, int4_size(n)), np.empty(n, np.int8)
        return self._int4_decode(at, codes.ctypes.data, room_at(out, floats_at(out, n)), n) == 0

    def half_encode(self, x: Vector, out: Octets) -> bool:
        """Encode one leaf as float16."""
        n = x.size
        return self._half_encode(floats_at(x, n), room_at(out, octets_at(out, 2 * n)), n) == 0

    def half_decode(self, data: Octets, out: Vector) -> bool:
        """Decode one leaf of float16."""
        n = out.size
        to = room_at(out, floats_at(out, n))
        return self._half_decode(octets_at(data, 2 * n), to, to, n) == 0

    def progress(self, ref: Vector, theta: Vector, residual: Vector, out: Vector) -> float:
        """Put residual + (ref - theta) into ``out``; returns the sum of squares of ref - theta."""
        n, room = ref.size, np.empty(LANES + 1)
        arrays = [floats_at(one, n) for one in (ref, theta, residual)]
        lanes = room.ctypes.data
        self._progress(*arrays, room_at(out, floats_at(out, n)), lanes + 8 * LANES, lanes, n)
        return float(room[-1])

    def difference(
        self, a: Vector, b: Vector, out: Vector, past_from: int = PAST_BYTES_MIN
    ) -> None:
        """Put a - b into ``out``."""
        n, bench = out.size, aligned(_BENCH)
        to, room = room_at(out, floats_at(out, n)), bench.ctypes.data
        past = goes_past(out, past_from)
        self._difference(floats_at(a, n), floats_at(b, n), to, room, past, n)

    def squares(self, x: Vector) -> float:
        """Return the sum of squares, as :func:`~dugnad.averaging.leaf.squared` does."""
        room = np.empty(LANES + 1)
        lanes = room.ctypes.data
        self._squares(floats_at(x, x.size), lanes + 8 * LANES, lanes, x.size)
        return float(room[-1])

    def step(self, theta: Vector, gradient: Vector, eta: np.float32, out: Vector) -> bool:
        """Take the outer step without momentum, into ``out``."""
        n = theta.size
        to = room_at(out, floats_at(out, n))
        return self._step(floats_at(theta, n), floats_at(gradient, n), eta, to, to, n) == 0

    def momentum_step(
        self,
        before: tuple[Vector, Vector],
        gradient: Vector,
        rates: tuple[np.float32, np.float32],
        after: tuple[Vector, Vector],
    ) -> bool:
        """Take the outer step with momentum: (theta, momentum) and (eta, mu)."""
        n = gradient.size
        theta, momentum = (floats_at(one, n) for one in before)
        out, moved = (room_at(one, floats_at(one, n)) for one in after)
        pull = floats_at(gradient, n)
        status = self._momentum_step(theta, momentum, pull, *rates, out, out, moved, moved, n)
        return status == 0

    def settle(self, x: Vector) -> bool:
        """Set what is smaller than SMALLEST to 0, if all is finite."""
        at = room_at(x, floats_at(x, x.size))
        return self._settle(at, at, x.size) == 0


def int8_size(n: int) -> int:
    """Return the bytes of ``n`` parameters as int8: what a kernel reads or writes."""
    return n + 4 * -(-n // 1024)


def int4_size(n: int) -> int:
    """Return the bytes of ``n`` parameters as int4: what a kernel reads or writes."""
    return (n + 1) // 2 + 2 * -(-n // 64)


def goes_past(array: Vector, past_from: int) -> bool:
    """Whether what is written to ``array`` goes past the caches: if it has ``past_from`` bytes and
    begins a cache line, as must be."""
    return array.nbytes >= past_from and array.ctypes.data % _LINE == 0


def aligned(size: int) -> Octets:
    """Return room that begins a cache line."""
    room = np.empty(size + _LINE, np.uint8)
    start = -room.ctypes.data % _LINE
    return room[start : start + size]


_active: Kernels | None = None


def current() -> Kernels | None:
    """Return the kernels, or None while or where there are none."""
    return _active


def use(kernels: Kernels | None) -> None:
    """Let everybody in this process use these, or numpy."""
    global _active
    _active = kernels


def floats_at(array: Vector, n: int) -> int:
    """Return the address of ``n`` float32 numbers to read."""
    if array.dtype != np.float32 or array.size < n or not array.flags.c_contiguous:
        raise ValueError(f"{array.dtype} {array.shape} where {n} float32 numbers in a row were due")
    return array.ctypes.data


def octets_at(array: Octets, n: int) -> int:
    """Return the address of ``n`` bytes to read."""
    if array.dtype != np.uint8 or array.size < n or not array.flags.c_contiguous:
        raise ValueError(f"{array.dtype} {array.shape} where {n} bytes in a row were due")
    return array.ctypes.data


def room_at(array: npt.NDArray[np.generic], address: int) -> int:
    """Return an address that may be written to."""
    if not array.flags.writeable:
        raise ValueError("an array that cannot be written to")
    return address
