"""What every codec shares: the interface, the walk over leaves, the checks of sizes and ranges.

The encoding of a vector is the encodings of its leaves (:data:`~dugnad.averaging.tree.LEAF_PARAMS`
parameters each) one after the other, so any leaf can be fetched, verified and decoded alone. The
size follows from the number of parameters alone, for sparse codecs too: a header's sizes can be
checked before a byte is fetched. What a codec loses is not its business: the sender keeps
``x - decode(encode(x))`` in its residual.

Decoding is total: any bytes give either ``n`` finite float32 numbers or :class:`CodecError`. It is
also the same bits on every machine: widening is exact, levels are float32 from the wire and a
scaled integer is one float32 multiply; numbers below :data:`SMALLEST` become 0, so no subnormal
float32 ever comes out, whatever the processor does with them.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from dugnad.averaging import kernels
from dugnad.averaging.tree import LEAF_PARAMS, Bytes, Vector, param_bounds

SMALLEST: Final = 2.0**-100
"""Magnitudes below this count as 0 (DESIGN.md 8.7): far above float32 subnormals, below 2**-126."""

SCALE_MAX: Final = 2.0**120
"""Largest scale of a block: 127 times it is still a finite float32. Larger values are clipped."""

FLOAT32_MAX: Final = float(np.finfo(np.float32).max)
"""Largest finite float32: a magnitude that is not at most this is infinite or NaN."""

Octets = npt.NDArray[np.uint8]
"""Bytes as an array."""


class CodecError(ValueError):
    """A payload that cannot be decoded, or a vector that cannot be encoded; ``reason`` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Codec(Protocol):
    """What the exchange needs of a codec. All methods may run in any thread."""

    @property
    def name(self) -> str:
        """The name in manifests and headers."""
        ...

    def encoded_size(self, n: int) -> int:
        """Return the exact size in bytes of ``n`` encoded parameters."""
        ...

    def bits_per_param(self, n: int) -> float:
        """Return the size of ``n`` encoded parameters, in bits for each."""
        ...

    def encode(self, x: Vector) -> bytes:
        """Return ``x`` encoded; raises :class:`CodecError` if it holds NaN or infinity."""
        ...

    def encode_into(
        self, x: Vector, out: bytearray | memoryview, scratch: Vector | None = None
    ) -> None:
        """Encode ``x`` into ``out``, which has exactly ``encoded_size(x.size)`` bytes.

        ``scratch`` has room for a leaf: who works leaf by leaf saves a fresh one for each.
        """
        ...

    def encode_rest(
        self, x: Vector, out: bytearray | memoryview, rest: Vector, scratch: Vector
    ) -> None:
        """Encode one leaf and put into ``rest`` what of ``x`` the encoding has not.

        All three vectors have its size, and nothing of them in common.
        """
        ...

    def add_leaf(self, data: Octets, total: Vector, factor: np.float32, *, first: bool) -> bool:
        """Add ``factor`` times one leaf of the right size to ``total``; False: not this way."""
        ...

    def decode(
        self, data: Bytes, n: int, out: Vector | None = None, scratch: Vector | None = None
    ) -> Vector:
        """Return the ``n`` finite parameters in ``data``, in ``out`` if given.

        Raises :class:`CodecError` for anything else than a valid encoding of ``n`` parameters;
        ``out`` is then partly written. ``scratch`` has room for a leaf.
        """
        ...


class LeafCodec:
    """The part that codecs share: the walk over leaves and the checks of sizes."""

    name: str

    def leaf_size(self, n: int) -> int:
        """Return the size in bytes of a leaf of ``n`` parameters, 1 to LEAF_PARAMS."""
        raise NotImplementedError

    def encode_leaf(self, x: Vector, out: Octets, scratch: Vector) -> None:
        """Encode one leaf into ``out``; ``scratch`` has the size of ``x``."""
        raise NotImplementedError

    def decode_leaf(self, data: Octets, out: Vector, scratch: Vector) -> None:
        """Decode one leaf of the right size into ``out``; ``scratch`` has the size of ``out``."""
        raise NotImplementedError

    def leaf_rest(self, x: Vector, out: Octets, rest: Vector, scratch: Vector) -> None:
        """Encode one leaf into ``out``; ``rest`` is ``x`` less what it decodes to."""
        self.encode_leaf(x, out, scratch)
        self.decode_leaf(out, rest, scratch)
        np.subtract(x, rest, out=rest)

    def add_leaf(self, data: Octets, total: Vector, factor: np.float32, *, first: bool) -> bool:
        """Add ``factor`` times one leaf to ``total`` in one pass, or put it there if ``first``.

        False where there is no such way, or the leaf is none; ``total`` is then as it was. The
        sizes are right.
        """
        return False

    def encode_leaves(self, x: Vector, out: Octets) -> bool:
        """Encode all leaves in one pass; False where there is no such way, or ``x`` cannot be
        encoded. The sizes are right."""
        return False

    def decode_leaves(self, data: Octets, out: Vector) -> bool:
        """Decode all leaves in one pass; False where there is no such way, or they cannot be
        decoded. The sizes are right."""
        return False

    def encoded_size(self, n: int) -> int:
        """Return the exact size in bytes of ``n`` encoded parameters."""
        if n < 0:
            raise ValueError(f"{n} parameters")
        full, rest = divmod(n, LEAF_PARAMS)
        return full * self.leaf_size(LEAF_PARAMS) + (self.leaf_size(rest) if rest else 0)

    def bits_per_param(self, n: int) -> float:
        """Return the size of ``n`` encoded parameters, in bits for each."""
        return 8 * self.encoded_size(n) / n if n else 0.0

    def encode(self, x: Vector) -> bytes:
        """Return ``x`` encoded; raises :class:`CodecError` if it holds NaN or infinity."""
        out = bytearray(self.encoded_size(x.size))
        self.encode_into(x, out)
        return bytes(out)

    def encode_into(
        self, x: Vector, out: bytearray | memoryview, scratch: Vector | None = None
    ) -> None:
        """Encode ``x`` into ``out``, which has exactly ``encoded_size(x.size)`` bytes."""
        _require_vector(x)
        octets = octets_of(out)
        if octets.size != self.encoded_size(x.size):
            raise ValueError(f"{octets.size} bytes of room for {self.encoded_size(x.size)}")
        if self.encode_leaves(x, octets):
            return
        if scratch is None:
            scratch = np.empty(min(x.size, LEAF_PARAMS), np.float32)
        at = 0
        for start, stop in param_bounds(x.size):
            size = self.leaf_size(stop - start)
            self.encode_leaf(x[start:stop], octets[at : at + size], scratch[: stop - start])
            at += size

    def encode_rest(
        self, x: Vector, out: bytearray | memoryview, rest: Vector, scratch: Vector
    ) -> None:
        """Encode one leaf and put into ``rest`` what of ``x`` the encoding has not."""
        for one in (x, rest, scratch):
            _require_vector(one)
        octets = octets_of(out)
        if not 0 < x.size == rest.size == scratch.size <= LEAF_PARAMS:
            raise ValueError(f"{x.size}, {rest.size} and {scratch.size} parameters of one leaf")
        if octets.size != self.leaf_size(x.size):
            raise ValueError(f"{octets.size} bytes of room for {self.leaf_size(x.size)}")
        self.leaf_rest(x, octets, rest, scratch)

    def decode(
        self, data: Bytes, n: int, out: Vector | None = None, scratch: Vector | None = None
    ) -> Vector:
        """Return ``n`` finite parameters in ``data``, in ``out`` if given, or raise CodecError."""
        octets = octets_of(data)
        if octets.size != self.encoded_size(n):
            raise CodecError(f"{octets.size} bytes where {self.encoded_size(n)} were due")
        if out is None:
            out = np.empty(n, np.float32)
        _require_vector(out)
        if out.size != n:
            raise ValueError(f"room for {out.size} parameters of {n}")
        if self.decode_leaves(octets, out):
            return out
        if scratch is None:
            scratch = np.empty(min(n, LEAF_PARAMS), np.float32)
        at = 0
        for start, stop in param_bounds(n):
            size = self.leaf_size(stop - start)
            self.decode_leaf(octets[at : at + size], out[start:stop], scratch[: stop - start])
            at += size
        return out


def leaf_bounds(codec: Codec, n: int) -> list[tuple[int, int]]:
    """Return the byte range of each leaf in the encoding of ``n`` parameters."""
    bounds = []
    at = 0
    for start, stop in param_bounds(n):
        size = codec.encoded_size(stop - start)
        bounds.append((at, at + size))
        at += size
    return bounds


def settle_range(x: Vector, scratch: Vector) -> bool:
    """Set what is smaller than SMALLEST in ``x`` to +0, in place; return whether ``x`` is finite.

    The rule that keeps subnormals out (DESIGN.md 8.7). ``scratch`` has the size of ``x``; if the
    answer is False, ``x`` is not changed.
    """
    native = kernels.current()
    if native is not None and native.settle(x):
        return True
    np.abs(x, out=scratch)
    if not float(scratch.max(initial=0.0)) <= FLOAT32_MAX:  # also true of NaN
        return False
    if float(scratch.min(initial=np.inf)) < SMALLEST:
        np.copyto(x, np.float32(0.0), where=scratch < np.float32(SMALLEST))
    return True


def octets_of(data: Bytes) -> Octets:
    """Return a flat view of bytes, empty ones included."""
    view = memoryview(data).cast("B")
    return np.frombuffer(view, np.uint8) if len(view) else np.empty(0, np.uint8)


def _require_vector(x: Vector) -> None:
    if x.ndim != 1 or x.dtype != np.float32 or not x.flags.c_contiguous:
        raise ValueError(f"a flat float32 array is needed, not {x.dtype} of shape {x.shape}")


def require_finite(x: Vector, scratch: Vector) -> None:
    """Raise :class:`CodecError` for NaN or infinity in ``x``; ``scratch`` gets its magnitudes."""
    np.abs(x, out=scratch)
    if not float(scratch.max(initial=0.0)) <= FLOAT32_MAX:  # also true of NaN
        raise CodecError("a value that is not finite")
