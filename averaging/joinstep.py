"""The numbers of a join: anchors moved by a share of the way to another lineage's (rule 11).

theta = theta - G with G = alpha * (theta - other), one float32 operation at a time, leaf by leaf,
so that all machines get the same bits. The momentum stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dugnad.averaging.buffers import AnchorState
from dugnad.averaging.codecs import Codec, settle_range
from dugnad.averaging.leaf import Encoded, leaf_room
from dugnad.averaging.outer import OuterError
from dugnad.averaging.pages import PAGES
from dugnad.averaging.tree import Bytes, array_bytes, leaf_hash, param_bounds


@dataclass(frozen=True, slots=True)
class Joined:
    """A join's payload, its leaf hashes, and the anchors after it."""

    payload: bytes
    leaves: tuple[bytes, ...]
    state: AnchorState


def join_states(state: AnchorState, other: AnchorState, alpha: np.float32, codec: Codec) -> Joined:
    """Encode ``alpha`` of the way from ``state`` to ``other`` and go it as others will decode it.

    Raises :class:`~dugnad.averaging.codecs.CodecError` for a way that cannot be encoded and
    :class:`~dugnad.averaging.outer.OuterError` for anchors that are not finite.
    """
    n = state.theta.size
    payload, hashes = bytearray(codec.encoded_size(n)), []
    encoded = Encoded.of(codec, payload, n)
    room, scratch = leaf_room(n), leaf_room(n)
    for (start, stop), (first, last) in zip(param_bounds(n), encoded.bounds, strict=True):
        part, bench = room[: stop - start], scratch[: stop - start]
        np.subtract(state.theta[start:stop], other.theta[start:stop], out=part)
        np.multiply(part, alpha, out=part)
        codec.encode_into(part, encoded.payload[first:last], bench)
        hashes.append(leaf_hash(encoded.payload[first:last]))
    data = bytes(payload)
    return Joined(data, tuple(hashes), shift(state, data, codec))


def shift(state: AnchorState, payload: Bytes, codec: Codec) -> AnchorState:
    """Return the anchors after a join with this payload, hashed; changes nothing.

    Raises as :func:`join_states` does.
    """
    n = state.theta.size
    encoded = Encoded.of(codec, payload, n)
    theta, hashes = PAGES.vector(n), []
    room, scratch = leaf_room(n), leaf_room(n)
    for k, (start, stop) in enumerate(param_bounds(n)):
        moved = theta[start:stop]
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(state.theta[start:stop], encoded.leaf(k, room, scratch), out=moved)
        if not settle_range(moved, scratch[: stop - start]):
            raise OuterError("an anchor that is not finite")
        hashes.append(leaf_hash(array_bytes(moved)))
    return state.moved(theta, tuple(hashes))
