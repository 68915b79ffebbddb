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

from dugnad.averaging import kernels
from dugnad.averaging.buffers import AnchorState, NextAnchor
from dugnad.averaging.codec_base import octets_of
from dugnad.averaging.codecs import Codec, CodecError, Int8Codec
from dugnad.averaging.fragments import Group
from dugnad.averaging.int8walk import MergeWalk, SquaresWalk
from dugnad.averaging.leaf import Encoded, leaf_room, squared
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
from dugnad.averaging.pages import PAGES
from dugnad.averaging.room import Room
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


def squares_of(
    encoded: Encoded, groups: Sequence[Group], hashes: list[bytes] | None = None
) -> tuple[float, ...]:
    """Return the squared norm of each group: all that a rule without angles asks of an input.

    Decodes all of it, so it also raises CodecError for a payload that is none. ``hashes`` gets the
    hash of each leaf after that, while it is in the cache.
    """
    totals, native, walk = [0.0] * len(groups), kernels.current(), None
    room, scratch = leaf_room(encoded.n), leaf_room(encoded.n)
    if native is not None and isinstance(encoded.codec, Int8Codec):
        walk = SquaresWalk(native, octets_of(encoded.payload), encoded.n)
    for k, parts in enumerate(_by_leaf(groups)):
        leaf = encoded.leaf(k, room, scratch) if walk is None else None
        for part in parts:
            one = None
            if walk is not None:
                one = walk.span(k, part.start, part.stop)
            if one is None:
                leaf = encoded.leaf(k, room, scratch) if leaf is None else leaf
                one = squared(leaf[part.start : part.stop])
            totals[part.group] += one
        if hashes is not None:
            hashes.append(leaf_hash(encoded.payload[slice(*encoded.bounds[k])]))
    return tuple(totals)


def weigh_encoded(
    entries: Sequence[Entry],
    inputs: Sequence[Encoded],
    groups: Sequence[Group],
    *,
    rule: str,
    squares: Sequence[tuple[float, ...] | None] = (),
) -> Weights:
    """Return the clip factors and coefficients of a merge: the first pass.

    ``squares`` may hold what :func:`squares_of` returned for an input earlier. Raises
    :class:`InputError` for an input that is not one, else as
    :func:`~dugnad.averaging.merge.merge` does.
    """
    check_entries(entries, groups, rule=rule)
    size = groups[-1].stop if groups else 0
    for one in inputs:
        if one.n != size:
            raise MergeError(f"{one.n} parameters, not {size}")
    moments = Moments(len(inputs), groups, rule)
    if any(moments.pairs):
        _add_all(moments, inputs, groups)
    else:
        for i, one in enumerate(inputs):
            known = squares[i] if squares else None
            moments.put_squares(i, known or _squares_of_input(i, one, groups))
    return weigh(entries, groups, moments, rule=rule)


def _squares_of_input(i: int, encoded: Encoded, groups: Sequence[Group]) -> tuple[float, ...]:
    try:
        return squares_of(encoded, groups)
    except CodecError as fault:
        raise InputError(i, fault.reason) from fault


def _add_all(moments: Moments, inputs: Sequence[Encoded], groups: Sequence[Group]) -> None:
    """Sum the moments with a leaf of every input at hand."""
    rooms, scratch = [leaf_room(one.n) for one in inputs], leaf_room(inputs[0].n)
    for k, parts in enumerate(_by_leaf(groups)):
        leaves = [_decoded(inputs, i, k, (room, scratch)) for i, room in enumerate(rooms)]
        for part in parts:
            moments.add(part.group, [leaf[part.start : part.stop] for leaf in leaves])


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
    rounding, room = PAGES.vector(n), Room(codec.encoded_size(n))
    merged = Encoded.of(codec, room.view, n)
    following, hashes = NextAnchor(state, rates, merged), []
    factors = np.array(coefficients, np.float32)
    rooms = leaf_room(n), leaf_room(n), leaf_room(n)
    walk = merge_walk(inputs, merged, rounding, rounding_factor)
    for k, ((start, stop), parts) in enumerate(zip(param_bounds(n), _by_leaf(groups), strict=True)):
        first, last = merged.bounds[k]
        octets, alike = merged.payload[first:last], _alike(factors, parts)
        if walk is None or alike is None or not walk.leaf(k, alike):
            leaf, rest = _summed(inputs, k, parts, factors, rooms), rounding[start:stop]
            try:
                codec.encode_rest(leaf, octets, rest, rooms[2][: leaf.size])
            except CodecError as fault:
                raise MergeError("a merged vector that is not finite") from fault
            np.multiply(rest, rounding_factor, out=rest)
        hashes.append(leaf_hash(octets))
        following.step()
    after = following.sealed()
    del merged, following, walk, octets  # whoever still looks at the room makes `take` copy it
    return LeafMerge(room.take(), tuple(hashes), after, rounding)


def merge_walk(
    inputs: Sequence[Encoded], merged: Encoded, rounding: Vector, share: np.float32
) -> MergeWalk | None:
    """Return how leaves are summed and encoded in one pass, where that can be."""
    native = kernels.current()
    if native is None or not all(isinstance(one.codec, Int8Codec) for one in (*inputs, merged)):
        return None
    payloads = [octets_of(one.payload) for one in inputs]
    return MergeWalk(native, payloads, octets_of(merged.payload), rounding, share)


def _alike(factors: npt.NDArray[np.float32], parts: Sequence[Span]) -> Vector | None:
    """Return the factor of each input where a leaf has but one, else None."""
    first = np.ascontiguousarray(factors[:, parts[0].group])
    for part in parts[1:]:
        if first.tobytes() != factors[:, part.group].tobytes():
            return None
    return first


def _summed(
    inputs: Sequence[Encoded],
    k: int,
    parts: Sequence[Span],
    factors: npt.NDArray[np.float32],
    rooms: tuple[Vector, Vector, Vector],
) -> Vector:
    """Return leaf ``k`` of what :func:`~dugnad.averaging.merge.apply_coefficients` returns.

    It lies in the first of ``rooms``.
    """
    total = rooms[0][: parts[-1].stop]
    alike = _alike(factors, parts)
    with np.errstate(over="ignore", invalid="ignore"):
        for i, one in enumerate(inputs):
            if alike is not None and one.add_to(k, total, alike[i], first=not i):
                continue
            piece = _decoded(inputs, i, k, (rooms[min(i, 1)], rooms[2]))
            for part in parts:
                values = piece[part.start : part.stop]
                np.multiply(values, factors[i, part.group], out=values)
            if i:
                np.add(total, piece, out=total)
    return total


def _by_leaf(groups: Sequence[Group]) -> list[list[Span]]:
    """Return the spans of each leaf, counted from the leaf's start."""
    leaves: list[list[Span]] = []
    for span in spans(groups):
        k, start = divmod(span.start, LEAF_PARAMS)
        if k == len(leaves):
            leaves.append([])
        leaves[k].append(Span(span.group, start, start + span.stop - span.start))
    return leaves


def _decoded(inputs: Sequence[Encoded], i: int, k: int, rooms: tuple[Vector, Vector]) -> Vector:
    try:
        return inputs[i].leaf(k, *rooms)
    except CodecError as fault:
        raise InputError(i, fault.reason) from fault
