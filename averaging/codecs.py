"""Codecs: float32 vectors as bytes, and foreign bytes as float32 vectors.

The encoding of a vector is the encodings of its leaves (:data:`~dugnad.averaging.tree.LEAF_PARAMS`
parameters each) one after the other, so any leaf can be fetched, verified and decoded alone. The
size is known before encoding. What a codec loses is not its business: the sender keeps
``x - decode(encode(x))`` in its residual.

Decoding is total: any bytes give either ``n`` finite float32 numbers or :class:`CodecError`. It is
also the same bits on every machine: widening is exact and int8 is one float32 multiply; numbers
below :data:`SMALLEST` become 0, so no subnormal float32 ever comes out, whatever the processor does
with them.

A further codec (int4, topk) is one more :class:`LeafCodec` with its own leaf format.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from dugnad.averaging.tree import LEAF_PARAMS, Bytes, Vector, param_bounds

SMALLEST: Final = 2.0**-100
"""Magnitudes below this count as 0 (DESIGN.md 8.7): far above float32 subnormals, below 2**-126."""

INT8_BLOCK: Final = 1024
"""Values that share a scale: 0.4 % of overhead; divides a leaf."""

SCALE_MAX: Final = 2.0**120
"""Largest scale of a block: 127 times it is still a finite float32. Larger values are clipped."""

FLOAT16_MAX: Final = 65_504.0
"""Largest finite float16. Larger values are clipped; the sender's residual keeps the rest."""

_INT8_LEVELS: Final = 127
_SCALE_BYTES: Final = 4
_FLOAT32_MAX: Final = float(np.finfo(np.float32).max)

Octets = npt.NDArray[np.uint8]


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

    def encode_into(self, x: Vector, out: bytearray | memoryview) -> None:
        """Encode ``x`` into ``out``, which has exactly ``encoded_size(x.size)`` bytes."""
        ...

    def decode(self, data: Bytes, n: int, out: Vector | None = None) -> Vector:
        """Return the ``n`` finite parameters in ``data``, in ``out`` if given.

        Raises :class:`CodecError` for anything else than a valid encoding of ``n`` parameters;
        ``out`` is then partly written.
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

    def encode_into(self, x: Vector, out: bytearray | memoryview) -> None:
        """Encode ``x`` into ``out``, which has exactly ``encoded_size(x.size)`` bytes."""
        _require_vector(x)
        octets = _octets(out)
        if octets.size != self.encoded_size(x.size):
            raise ValueError(f"{octets.size} bytes of room for {self.encoded_size(x.size)}")
        scratch = np.empty(min(x.size, LEAF_PARAMS), np.float32)
        at = 0
        for start, stop in param_bounds(x.size):
            size = self.leaf_size(stop - start)
            self.encode_leaf(x[start:stop], octets[at : at + size], scratch[: stop - start])
            at += size

    def decode(self, data: Bytes, n: int, out: Vector | None = None) -> Vector:
        """Return ``n`` finite parameters in ``data``, in ``out`` if given, or raise CodecError."""
        octets = _octets(data)
        if octets.size != self.encoded_size(n):
            raise CodecError(f"{octets.size} bytes where {self.encoded_size(n)} were due")
        if out is None:
            out = np.empty(n, np.float32)
        _require_vector(out)
        if out.size != n:
            raise ValueError(f"room for {out.size} parameters of {n}")
        scratch = np.empty(min(n, LEAF_PARAMS), np.float32)
        at = 0
        for start, stop in param_bounds(n):
            size = self.leaf_size(stop - start)
            self.decode_leaf(octets[at : at + size], out[start:stop], scratch[: stop - start])
            at += size
        return out


class Float32Codec(LeafCodec):
    """Exact, but for magnitudes below SMALLEST, which become 0."""

    name = "float32"

    def leaf_size(self, n: int) -> int:
        """Return 4 bytes for each."""
        return 4 * n

    def encode_leaf(self, x: Vector, out: Octets, scratch: Vector) -> None:
        """Copy, with what is too small as 0."""
        np.copyto(scratch, x)
        if not settle_range(scratch, np.empty_like(scratch)):
            raise CodecError("a value that is not finite")
        out[:] = scratch.astype("<f4", copy=False).view(np.uint8)

    def decode_leaf(self, data: Octets, out: Vector, scratch: Vector) -> None:
        """Copy, with what is too small as 0."""
        np.copyto(out, data.view("<f4"))
        if not settle_range(out, scratch):
            raise CodecError("a value that is not finite")


class Float16Codec(LeafCodec):
    """IEEE half precision, rounded to nearest even and clipped to its range.

    Half-precision subnormals are kept: each is a normal float32, and both conversions are exact
    about them on every processor (F16C and AArch64 ignore flush-to-zero there).
    """

    name = "float16"

    def leaf_size(self, n: int) -> int:
        """Return 2 bytes for each."""
        return 2 * n

    def encode_leaf(self, x: Vector, out: Octets, scratch: Vector) -> None:
        """Clip and round to nearest even."""
        _require_finite(x, scratch)
        np.clip(x, -FLOAT16_MAX, FLOAT16_MAX, out=scratch)
        out[:] = scratch.astype("<f2").view(np.uint8)

    def decode_leaf(self, data: Octets, out: Vector, scratch: Vector) -> None:
        """Widen, exactly."""
        np.copyto(out, data.view("<f2"))
        _require_finite(out, scratch)


class Int8Codec(LeafCodec):
    """Blocks of INT8_BLOCK values: a float32 scale, then one signed byte for each, -127 to 127.

    Scale = largest magnitude / 127; a scale below SMALLEST means a block of zeros. The error is at
    most half a scale a value. The byte -128 has no use and is refused.
    """

    name = "int8"

    def leaf_size(self, n: int) -> int:
        """Return a byte for each and 4 for each block begun."""
        return n + _SCALE_BYTES * -(-n // INT8_BLOCK)

    def encode_leaf(self, x: Vector, out: Octets, scratch: Vector) -> None:
        """Scale and round half to even, block by block."""
        for values, room, bench in _blocks(x, out, scratch):
            np.abs(values, out=bench)
            peak = bench.max(axis=1)
            if not float(peak.max()) <= _FLOAT32_MAX:  # also true of NaN
                raise CodecError("a value that is not finite")
            scale = np.minimum(peak / np.float32(_INT8_LEVELS), np.float32(SCALE_MAX))
            scale[scale < np.float32(SMALLEST)] = 0.0
            inverse = np.zeros_like(scale)
            np.divide(np.float32(1.0), scale, out=inverse, where=scale > 0.0)
            np.multiply(values, inverse[:, None], out=bench)
            np.rint(bench, out=bench)
            if float(scale.max()) >= SCALE_MAX:
                np.clip(bench, -_INT8_LEVELS, _INT8_LEVELS, out=bench)
            room[:, :_SCALE_BYTES] = scale.astype("<f4", copy=False).view(np.uint8).reshape(-1, 4)
            np.copyto(room[:, _SCALE_BYTES:].view(np.int8), bench, casting="unsafe")

    def decode_leaf(self, data: Octets, out: Vector, scratch: Vector) -> None:
        """Widen (exact), then one multiply by the block's scale."""
        for values, room, _ in _blocks(out, data, scratch):
            packed = np.ascontiguousarray(room[:, :_SCALE_BYTES])
            scale = packed.view("<f4")[:, 0].astype(np.float32)
            if not np.isfinite(scale).all() or np.signbit(scale).any():
                raise CodecError("a scale that is negative or not finite")
            if float(scale.max()) > SCALE_MAX:
                raise CodecError("a scale beyond 2**120")
            scale[scale < np.float32(SMALLEST)] = 0.0
            codes = room[:, _SCALE_BYTES:].view(np.int8)
            if int(codes.min()) < -_INT8_LEVELS:
                raise CodecError("the code -128")
            np.copyto(values, codes)
            np.multiply(values, scale[:, None], out=values)


CODECS: Final[dict[str, Codec]] = {
    codec.name: codec for codec in (Float32Codec(), Float16Codec(), Int8Codec())
}
"""Every codec by its name in manifests and headers."""


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
    np.abs(x, out=scratch)
    if not float(scratch.max(initial=0.0)) <= _FLOAT32_MAX:  # also true of NaN
        return False
    if float(scratch.min(initial=np.inf)) < SMALLEST:
        np.copyto(x, np.float32(0.0), where=scratch < np.float32(SMALLEST))
    return True


def _blocks(x: Vector, octets: Octets, scratch: Vector) -> list[tuple[Vector, Octets, Vector]]:
    """Return (values, bytes, scratch) as matrices, a block a row: full blocks, then the rest."""
    rows, rest = divmod(x.size, INT8_BLOCK)
    cut = rows * INT8_BLOCK
    byte_cut = cut + rows * _SCALE_BYTES
    parts = []
    if rows:
        parts.append(
            (
                x[:cut].reshape(rows, INT8_BLOCK),
                octets[:byte_cut].reshape(rows, INT8_BLOCK + _SCALE_BYTES),
                scratch[:cut].reshape(rows, INT8_BLOCK),
            )
        )
    if rest:
        parts.append((x[None, cut:], octets[None, byte_cut:], scratch[None, cut:]))
    return parts


def _octets(data: Bytes) -> Octets:
    """Return a flat view of bytes, empty ones included."""
    view = memoryview(data).cast("B")
    return np.frombuffer(view, np.uint8) if len(view) else np.empty(0, np.uint8)


def _require_vector(x: Vector) -> None:
    if x.ndim != 1 or x.dtype != np.float32 or not x.flags.c_contiguous:
        raise ValueError(f"a flat float32 array is needed, not {x.dtype} of shape {x.shape}")


def _require_finite(x: Vector, scratch: Vector) -> None:
    np.abs(x, out=scratch)
    if not float(scratch.max(initial=0.0)) <= _FLOAT32_MAX:  # also true of NaN
        raise CodecError("a value that is not finite")
