"""Merging encoded contributions leaf by leaf: the same bits as merging whole vectors, less memory.

Two passes over the inputs, which stay encoded. The first sums their moments, from which clip
factors and coefficients follow; the second applies these in the published order, encodes the merged
leaf, takes the outer step with what others will decode and hashes everything, all while the leaf is
in the cache. Besides the results a merge holds a few leaves (one for each input where a rule asks
for angles), however many inputs there are. :func:`~dugnad.averaging.merge.merge` is the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dugnad.averaging.buffers import AnchorState, NextAnchor
from dugnad.averaging.codecs import Codec, CodecError
from dugnad.averaging.fragments import Group
from dugnad.averaging.leaf import Encoded, leaf_room
from dugnad.averaging.merge import (
    Entry,
    MergeError,
    Moments,
    Span,
    Weights,
    check_entries,
    spans,
    weigh,
)
from dugnad.averaging.outer import Rates
from dugnad.averaging.tree import LEAF_PARAMS, Vector, leaf_hash, param_bounds


class InputError(MergeError):
    """Input number ``index`` cannot be decoded; the others may be merged without it."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


@dataclass(frozen=True, slots=True)
class LeafMerge:
    """A merged payload, its leaf hashes, the anchor after it and what encoding it lost.

    ``rounding`` is the merged vector less what the payload decodes to, times a factor.
    """

    payload: bytes
    leaves: tuple[bytes, ...]
    state: AnchorState
    rounding: Vector


def weigh_encoded(
    entries: Sequence[Entry], inputs: Sequence[Encoded], groups: Sequence[Group], *, rule: str
) -> Weights:
    """Return the clip factors and coefficients of a merge: the first pass.

    Raises :class:`InputError` for an input that is not one, else as
    :func:`~dugnad.averaging.merge.merge` does.
    """
    check_entries(entries, groups, rule=rule)
    size = groups[-1].stop if groups else 0
    for one in inputs:
        if one.n != size:
            raise MergeError(f"{one.n} parameters, not {size}")
    moments = Moments(len(inputs), groups, rule)
    rooms = [leaf_room(size) for _ in (inputs if any(moments.pairs) else inputs[:1])]
    for k, parts in enumerate(_by_leaf(groups)):
        if any(moments.pairs[part.group] for part in parts):
            leaves = [_decoded(inputs, i, k, room) for i, room in enumerate(rooms)]
            for part in parts:
                moments.add(part.group, [leaf[part.start : part.stop] for leaf in leaves])
            continue
        for i in range(len(inputs)):
            leaf = _decoded(inputs, i, k, rooms[0])
            for part in parts:
                moments.add_squares(part.group, i, leaf[part.start : part.stop])
    return weigh(entries, groups, moments, rule=rule)


def combine(
    inputs: Sequence[Encoded],
    coefficients: Sequence[Sequence[float]],
    groups: Sequence[Group],
    *,
    codec: Codec,
    state: AnchorState,
    rates: Rates,
    rounding_factor: np.float32,
) -> LeafMerge:
    """Merge with these coefficients and take the outer step from ``state``: the second pass.

    Raises :class:`~dugnad.averaging.merge.MergeError` for a sum that is not finite and
    :class:`~dugnad.averaging.outer.OuterError` for a step that is not.
    """
    n = state.theta.size
    following, rounding = NextAnchor(state, rates), np.empty(n, np.float32)
    factors = np.array(coefficients, np.float32)
    payload, hashes = bytearray(codec.encoded_size(n)), []
    merged = Encoded.of(codec, payload, n)
    total, scratch = leaf_room(n), leaf_room(n)
    for k, ((start, stop), parts) in enumerate(zip(param_bounds(n), _by_leaf(groups), strict=True)):
        first, last = merged.bounds[k]
        room = merged.payload[first:last]
        leaf = _summed(inputs, k, parts, factors, total, scratch)
        try:
            codec.encode_into(leaf, room)
        except CodecError as fault:
            raise MergeError("a merged vector that is not finite") from fault
        hashes.append(leaf_hash(room))
        decoded = merged.leaf(k, scratch)
        rest = np.subtract(leaf, decoded, out=rounding[start:stop])
        np.multiply(rest, rounding_factor, out=rest)
        following.step(decoded)
    return LeafMerge(bytes(payload), tuple(hashes), following.sealed(), rounding)


def _summed(
    inputs: Sequence[Encoded],
    k: int,
    parts: Sequence[Span],
    factors: npt.NDArray[np.float32],
    total: Vector,
    scratch: Vector,
) -> Vector:
    """Return leaf ``k`` of what :func:`~dugnad.averaging.merge.apply_coefficients` returns."""
    leaf = total
    with np.errstate(over="ignore", invalid="ignore"):
        for i in range(len(inputs)):
            piece = _decoded(inputs, i, k, scratch if i else total)
            for part in parts:
                range_of = piece[part.start : part.stop]
                np.multiply(range_of, factors[i, part.group], out=range_of)
            leaf = np.add(leaf, piece, out=leaf) if i else piece
    return leaf


def _by_leaf(groups: Sequence[Group]) -> list[list[Span]]:
    """Return the spans of each leaf, counted from the leaf's start."""
    leaves: list[list[Span]] = []
    for span in spans(groups):
        k, start = divmod(span.start, LEAF_PARAMS)
        if k == len(leaves):
            leaves.append([])
        leaves[k].append(Span(span.group, start, start + span.stop - span.start))
    return leaves


def _decoded(inputs: Sequence[Encoded], i: int, k: int, room: Vector) -> Vector:
    try:
        return inputs[i].leaf(k, room)
    except CodecError as fault:
        raise InputError(i, fault.reason) from fault
