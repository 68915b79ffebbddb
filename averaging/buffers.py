"""The numbers that a peer holds of one fragment, and the moves that conserve progress.

For a learner's parameters theta, at any moment (schedules.md section 1)::

    L = residual + (retained contributions, less what of them was returned) + (ref - theta)

An inner step changes L by its progress; a hand-in moves progress from (ref - theta) to a
contribution and the residual; settling moves a share of a contribution back; adopting an anchor, of
whatever lineage, moves theta and ref together. So progress is in one place at a time, and nothing
here knows about lineages: *when* to settle and forget is the exchange's to decide.

Nothing here reads clocks, files or sockets. One thread at a time may use a
:class:`FragmentBuffers`; anchors are immutable, so any number of threads may read one and compute
the next.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

import numpy as np
import numpy.typing as npt

from dugnad.averaging import kernels
from dugnad.averaging.codec_base import octets_of
from dugnad.averaging.codecs import (
    CODECS,
    SPARSE_CODECS,
    Codec,
    CodecError,
    Int8Codec,
    leaf_bounds,
)
from dugnad.averaging.int8walk import HandInWalk, StepWalk
from dugnad.averaging.leaf import Encoded, difference, encode_progress, leaf_room
from dugnad.averaging.outer import OuterState, Rates, step_leaf
from dugnad.averaging.pages import PAGES
from dugnad.averaging.room import Room
from dugnad.averaging.tree import (
    LEAF_PARAMS,
    Bytes,
    Vector,
    array_bytes,
    array_leaf_hashes,
    leaf_hash,
    param_bounds,
    root_of,
)

RESIDUAL_BOUND: Final = 64.0
"""The residual's norm may be this many times the median norm of recent progress.

Sparse codecs that send 1 to 2 % leave up to 64 hand-ins of progress waiting. Guess, to be measured.
"""

HAND_INS_BEFORE_BOUND: Final = 8
"""Hand-ins before the bound works: a median of fewer says little."""

RECENT_HAND_INS: Final = 32
"""Hand-ins whose norms make the median; those without any progress are left out."""

UNSENT_SHARE: Final = 0.3
"""Of what waits in the residual of a sparse codec, the part that the learner keeps in its
parameters when it moves to a new anchor. With none of it, it trains the same direction again at
every anchor until its turn comes, and overshoots; with all of it, each learner goes its own way.
Measured (M = 2, 4, 8, topk-1.56; `benchmarks/parity.py`): the residuals of peers hardly agree, so
of a peer's own about 1 / M and a little more reaches the anchor in the end; 0.25 to 0.4 did best.
"""

RETAINED_MAX: Final = 64
"""Contributions held for settling: F + S versions is 6, the rest is room for a peer cut off."""


class BuffersError(ValueError):
    """A move that would break the accounts, with the reason; the buffers are as they were."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, eq=False)
class AnchorState:
    """A fragment's agreed parameters and outer momentum at one version, with their roots.

    The arrays are read-only. Two states are equal when their roots are.
    """

    theta: Vector
    momentum: Vector
    theta_root: bytes
    momentum_root: bytes
    theta_leaves: tuple[bytes, ...]
    momentum_leaves: tuple[bytes, ...]

    @classmethod
    def of(cls, theta: Vector, momentum: Vector) -> AnchorState:
        """Return the state of these arrays, hashed and copied."""
        if theta.size != momentum.size or not theta.size:
            raise BuffersError(f"{theta.size} parameters with {momentum.size} momenta")
        for array in (theta, momentum):
            if array.dtype != np.float32 or array.ndim != 1 or not np.isfinite(array).all():
                raise BuffersError("an anchor that is not flat, float32 and finite")
        hashes = array_leaf_hashes(theta), array_leaf_hashes(momentum)
        return _sealed(theta.copy(), momentum.copy(), *hashes)

    def moved(self, theta: Vector, leaves: tuple[bytes, ...]) -> AnchorState:
        """Return the state with other parameters, which nobody else holds, and this momentum."""
        theta.flags.writeable = False
        return replace(self, theta=theta, theta_root=root_of(leaves), theta_leaves=leaves)

    @classmethod
    def fresh(cls, theta: Vector) -> AnchorState:
        """Return version 0: these parameters, no momentum."""
        return cls.of(theta, np.zeros_like(theta))


@dataclass(frozen=True, slots=True)
class HandIn:
    """One contribution as made, and what making it left behind. Norms are Euclidean."""

    seq: int
    payload: bytes
    payload_root: bytes
    leaf_hashes: tuple[bytes, ...]
    progress_norm: float
    residual_norm: float
    dropped_norm: float


@dataclass(slots=True)
class Retained:
    """A contribution that may still be settled: what was sent and what share came back."""

    payload: bytes
    codec: str
    returned: float = 0.0


class NextAnchor:
    """The anchor after a merge, made leaf by leaf: stepped and hashed while in the cache."""

    def __init__(self, state: AnchorState, rates: Rates, encoded: Encoded) -> None:
        """Follow on ``state``, which is not changed, with the gradient that is ``encoded``."""
        n = state.theta.size
        self._state, self._rates, self._encoded = state, rates, encoded
        self._bounds = param_bounds(n)
        self._theta = PAGES.vector(n)
        self._momentum = PAGES.vector(n) if rates.mu else state.momentum
        self._rooms = leaf_room(n), leaf_room(n), leaf_room(n)
        self._theta_leaves: list[bytes] = []
        self._momentum_leaves: list[bytes] = []
        self._walk = _step_walk(state, rates, encoded, self._theta)

    def step(self) -> None:
        """Take the outer step on the next leaf.

        Raises :class:`~dugnad.averaging.codecs.CodecError` for a leaf that cannot be decoded and
        :class:`~dugnad.averaging.outer.OuterError` if what follows is not finite.
        """
        k = len(self._theta_leaves)
        stepped = self._walk.leaf(k) if self._walk is not None else None
        if stepped is not None:
            self._theta_leaves.append(leaf_hash(stepped))
            return
        start, stop = self._bounds[k]
        part = slice(start, stop)
        gradient = self._encoded.leaf(k, *self._rooms[:2])
        before = OuterState(self._state.theta[part], self._state.momentum[part])
        momentum = self._momentum[part] if self._rates.mu else before.momentum
        after = OuterState(self._theta[part], momentum)
        step_leaf(before, gradient, self._rates, after, self._rooms[2][: stop - start])
        self._theta_leaves.append(leaf_hash(array_bytes(after.theta)))
        if self._rates.mu:
            self._momentum_leaves.append(leaf_hash(array_bytes(momentum)))

    def sealed(self) -> AnchorState:
        """Return the anchor once every leaf was stepped."""
        if len(self._theta_leaves) != len(self._bounds):
            raise ValueError(f"{len(self._theta_leaves)} leaves stepped of {len(self._bounds)}")
        leaves = tuple(self._theta_leaves)
        if self._rates.mu:
            return _sealed(self._theta, self._momentum, leaves, tuple(self._momentum_leaves))
        return self._state.moved(self._theta, leaves)


class FragmentBuffers:
    """One peer's anchor, reference, residual and unsettled contributions of one fragment."""

    def __init__(self, anchor: AnchorState) -> None:
        """Start at ``anchor``: the learner's parameters must be ``anchor.theta``."""
        self.anchor = anchor
        self.ref: Vector = anchor.theta
        self.residual: Vector = np.zeros(anchor.theta.size, np.float32)
        self.retained: dict[int, Retained] = {}
        self.last_seq = -1
        self.made = 0
        """Hand-ins so far, those that were taken back included."""
        self.dropped_norm = 0.0
        """Sum of the norms of all that the residual's bound dropped: progress that is gone."""
        self.sparse = False
        """Whether the newest hand-in left most of its progress in the residual."""
        self._recent: deque[float] = deque(maxlen=RECENT_HAND_INS)
        self._begun_norm = 0.0

    @property
    def size(self) -> int:
        """Number of parameters."""
        return self.residual.size

    def hand_in(
        self, seq: int, learner_theta: Vector, codec: Codec, *, final: bool = True
    ) -> HandIn:
        """Move the learner's new progress into contribution ``seq`` and the residual.

        Parameters in a read-only array become the reference themselves, others are copied. A
        contribution that is not ``final`` is to be taken back (:meth:`take_back`) and made again
        with what was learned until then; the residual is not bounded meanwhile.

        Raises :class:`BuffersError` for a seq that does not rise, too many retained contributions,
        another size, or parameters that are not finite.
        """
        self._check_hand_in(seq, learner_theta)
        rest, room = PAGES.vector(self.size), Room(codec.encoded_size(self.size))
        hashes, progress_norm, residual_norm = self._encoded(learner_theta, codec, room, rest)
        payload = room.take()
        self.ref, self.residual = _lasting(learner_theta), rest
        self.sparse = codec.name in SPARSE_CODECS
        self.last_seq = seq
        self.made += 1
        self.retained[seq] = Retained(payload, codec.name)
        self._begun_norm += progress_norm
        dropped = 0.0
        if final:
            if self._begun_norm > 0.0:
                self._recent.append(self._begun_norm)
            self._begun_norm = 0.0
            residual_norm, dropped = self._bound_residual(residual_norm)
        root, norms = root_of(hashes), (progress_norm, residual_norm)
        return HandIn(seq, payload, root, hashes, *norms, dropped_norm=dropped)

    def settle(self, seq: int, fraction: float) -> None:
        """See to it that just ``fraction`` of contribution ``seq`` is back in the residual.

        0 when it is listed in full, 1 - k when listed with clip factor k, 1 when it never will be.
        May be called again with another share, as when the peer changes to another lineage.
        """
        if not 0.0 <= fraction <= 1.0:
            raise BuffersError(f"a share of {fraction}")
        kept = self.retained.get(seq)
        if kept is None:
            raise BuffersError(f"contribution {seq} is not retained")
        if fraction != kept.returned:
            codec = CODECS[kept.codec]
            _add_decoded(self.residual, kept.payload, codec, fraction - kept.returned)
            kept.returned = fraction

    def take_back(self, seq: int) -> None:
        """Undo the newest hand-in: what it sent is in the residual again, and its number free."""
        if seq != self.last_seq or seq not in self.retained:
            raise BuffersError(f"contribution {seq} is not the newest one")
        self.settle(seq, 1.0)
        del self.retained[seq]
        self.last_seq = seq - 1

    def forget(self, seq: int) -> None:
        """Let go of a contribution whose settlement is final; unknown ones are none."""
        self.retained.pop(seq, None)

    @staticmethod
    def advance(
        state: AnchorState, payload: Bytes, codec: Codec, *, eta_bits: int, mu_bits: int
    ) -> AnchorState:
        """Return the anchor after the merge with this payload, hashed; changes nothing.

        Leaf by leaf, so that each is decoded, stepped and hashed while in the cache. Raises
        :class:`~dugnad.averaging.codecs.CodecError` for a payload that is not one of this size and
        :class:`~dugnad.averaging.outer.OuterError` for rates or results out of range.
        """
        rates = Rates.of_bits(eta_bits=eta_bits, mu_bits=mu_bits)
        encoded = Encoded.of(codec, payload, state.theta.size)
        following = NextAnchor(state, rates, encoded)
        for _ in encoded.bounds:
            following.step()
        return following.sealed()

    def adopt(self, state: AnchorState) -> Vector:
        """Make ``state`` the anchor; return what is to be added to the learner's parameters.

        What the learner learned since its last hand-in stays on top, and where hand-ins are sparse
        UNSENT_SHARE of the residual does, too: from there it goes on, so none of it is counted
        twice. ``state`` may be of any lineage.
        """
        if state.theta.size != self.size:
            raise BuffersError(f"an anchor of {state.theta.size} parameters for {self.size}")
        ref = self._beside(state.theta) if self.sparse else state.theta
        delta = difference(ref, self.ref)
        self.anchor, self.ref = state, ref
        return delta

    def _beside(self, theta: Vector) -> Vector:
        """Return where a learner stands that keeps UNSENT_SHARE of the residual; read-only."""
        ref = np.multiply(self.residual, np.float32(-UNSENT_SHARE), out=PAGES.vector(self.size))
        np.add(ref, theta, out=ref)
        ref.flags.writeable = False
        return ref

    def add_residual(self, vector: Vector) -> None:
        """Add to the residual: a home puts the rounding of its merged payload back this way."""
        self._require_addend(vector)
        np.add(self.residual, vector, out=self.residual)

    def take_residual(self, vector: Vector) -> None:
        """Subtract from the residual what :meth:`add_residual` added."""
        self._require_addend(vector)
        np.subtract(self.residual, vector, out=self.residual)

    def typical_progress(self) -> float:
        """Median norm of the progress of recent hand-ins; 0 before the first."""
        return median(self._recent) if self._recent else 0.0

    def export(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return all state as arrays for a snapshot; those that may change later are copied."""
        arrays: dict[str, npt.NDArray[np.generic]] = {
            "theta": self.anchor.theta,
            "momentum": self.anchor.momentum,
            "ref": self.ref,
            "residual": self.residual.copy(),
            "last_seq": np.array([self.last_seq], np.int64),
            "dropped_norm": np.array([self.dropped_norm], np.float64),
            "recent_norms": np.array(self._recent, np.float64),
        }
        for seq, kept in self.retained.items():
            arrays[f"retained/{seq}/{kept.codec}"] = np.frombuffer(kept.payload, np.uint8)
            arrays[f"returned/{seq}"] = np.array([kept.returned], np.float64)
        return arrays

    @classmethod
    def restore(cls, arrays: Mapping[str, npt.NDArray[np.generic]]) -> FragmentBuffers:
        """Return the buffers that :meth:`export` described.

        Raises :class:`BuffersError` if something is missing or cut. Roots are computed anew, so the
        caller can compare them with a header's.
        """
        try:
            theta, momentum = _float32(arrays["theta"]), _float32(arrays["momentum"])
            buffers = cls(AnchorState.of(theta, momentum))
            buffers.ref = _float32(arrays["ref"]).copy()
            buffers.residual = _float32(arrays["residual"]).copy()
            buffers.last_seq = int(arrays["last_seq"][0])
            buffers.dropped_norm = float(arrays["dropped_norm"][0])
            buffers._recent.extend(float(norm) for norm in arrays["recent_norms"])
            buffers.retained = _restored(arrays, theta.size)
            newest = next(reversed(buffers.retained.values()), None)
            buffers.sparse = newest is not None and newest.codec in SPARSE_CODECS
        except (KeyError, IndexError) as fault:
            raise BuffersError(f"a snapshot without {fault}") from fault
        for array in (buffers.ref, buffers.residual):
            if array.shape != theta.shape or not np.isfinite(array).all():
                raise BuffersError("a snapshot with a reference or residual that does not fit")
        return buffers

    def _check_hand_in(self, seq: int, learner_theta: Vector) -> None:
        if seq <= self.last_seq:
            raise BuffersError(f"seq {seq} after {self.last_seq}")
        if len(self.retained) >= RETAINED_MAX:
            raise BuffersError(f"{RETAINED_MAX} contributions are waiting to be settled")
        if learner_theta.shape != (self.size,) or learner_theta.dtype != np.float32:
            raise BuffersError(
                f"{learner_theta.dtype} of shape {learner_theta.shape} for {self.size} parameters"
            )

    def _require_addend(self, vector: Vector) -> None:
        if vector.shape != self.residual.shape or vector.dtype != np.float32:
            raise BuffersError(f"{vector.dtype} of shape {vector.shape} for {self.size} parameters")
        if not all(np.isfinite(vector[a:b]).all() for a, b in param_bounds(self.size)):
            raise BuffersError("a residual that is not finite")

    def _encoded(
        self, theta: Vector, codec: Codec, room: Room, rest: Vector
    ) -> tuple[tuple[bytes, ...], float, float]:
        """Encode residual and progress into ``room`` and put what that loses into ``rest``.

        Returns the leaf hashes and the norms of progress and rest. Changes nothing else; raises
        :class:`BuffersError` for parameters that are not finite. One walk, leaf by leaf, so that
        each is read, encoded and hashed while in the cache.
        """
        total, scratch = leaf_room(self.size), leaf_room(self.size)
        hashes, progress, left = [], 0.0, 0.0
        native, moved = kernels.current(), (self.ref, theta, self.residual)
        walk = None
        if native is not None and isinstance(codec, Int8Codec):
            walk = HandInWalk(native, moved, octets_of(room.view), rest)
        for k, (first, last) in enumerate(leaf_bounds(codec, self.size)):
            octets, made = room.view[first:last], walk.leaf(k) if walk is not None else None
            if made is None:
                part = slice(k * LEAF_PARAMS, min((k + 1) * LEAF_PARAMS, self.size))
                parts = self.ref[part], theta[part], self.residual[part]
                rooms = total[: parts[0].size], scratch[: parts[0].size]
                try:
                    made = encode_progress(codec, parts, octets, rest[part], rooms)
                except CodecError as fault:
                    raise BuffersError(fault.reason) from fault
            hashes.append(leaf_hash(octets))
            progress, left = progress + made[0], left + made[1]
        return tuple(hashes), math.sqrt(progress), math.sqrt(left)

    def _bound_residual(self, norm: float) -> tuple[float, float]:
        """Shrink a residual beyond its bound; return its norm and the norm of what was dropped."""
        if len(self._recent) < HAND_INS_BEFORE_BOUND:
            return norm, 0.0
        limit = RESIDUAL_BOUND * median(self._recent)
        if norm <= limit:
            return norm, 0.0
        np.multiply(self.residual, np.float32(limit / norm), out=self.residual)
        self.dropped_norm += norm - limit
        return limit, norm - limit


def _sealed(
    theta: Vector,
    momentum: Vector,
    theta_leaves: tuple[bytes, ...],
    momentum_leaves: tuple[bytes, ...],
) -> AnchorState:
    """Return the state of arrays that nobody else holds, made read-only."""
    theta.flags.writeable = False
    momentum.flags.writeable = False
    return AnchorState(
        theta=theta,
        momentum=momentum,
        theta_root=root_of(theta_leaves),
        momentum_root=root_of(momentum_leaves),
        theta_leaves=theta_leaves,
        momentum_leaves=momentum_leaves,
    )


def _step_walk(
    state: AnchorState, rates: Rates, encoded: Encoded, theta: Vector
) -> StepWalk | None:
    """Return how all of a step is taken in one pass, where that can be."""
    native = kernels.current()
    if native is None or rates.mu or not isinstance(encoded.codec, Int8Codec):
        return None
    return StepWalk(native, octets_of(encoded.payload), state.theta, rates.eta, theta)


def _lasting(theta: Vector) -> Vector:
    """Return parameters that stay as they are: these, where nobody can write to them."""
    if not theta.flags.writeable:
        return theta
    copy = PAGES.vector(theta.size)
    np.copyto(copy, theta)
    return copy


def _restored(arrays: Mapping[str, npt.NDArray[np.generic]], n: int) -> dict[int, Retained]:
    """Return the retained contributions of a snapshot, in order of seq."""
    found = {}
    for key, array in arrays.items():
        kind, _, rest = key.partition("/")
        if kind != "retained":
            continue
        seq, _, codec = rest.partition("/")
        payload = array.tobytes()
        if not seq.isdecimal() or codec not in CODECS:
            raise BuffersError(f"a snapshot with an unknown contribution {key!r}")
        if len(payload) != CODECS[codec].encoded_size(n):
            raise BuffersError(f"a snapshot with a cut contribution {key!r}")
        found[int(seq)] = Retained(payload, codec, float(arrays[f"returned/{seq}"][0]))
    return dict(sorted(found.items()))


def _add_decoded(target: Vector, payload: bytes, codec: Codec, share: float) -> None:
    """Add ``share`` times the decoded payload to ``target``, leaf by leaf."""
    encoded = Encoded.of(codec, payload, target.size)
    room, scratch, factor = leaf_room(target.size), leaf_room(target.size), np.float32(share)
    for k, (start, stop) in enumerate(param_bounds(target.size)):
        if encoded.add_to(k, target[start:stop], factor, first=False):
            continue
        part = encoded.leaf(k, room, scratch)
        np.multiply(part, factor, out=part)
        np.add(target[start:stop], part, out=target[start:stop])


def _float32(array: npt.NDArray[np.generic]) -> Vector:
    """Return a snapshot's array if it is float32."""
    if array.dtype != np.float32:
        raise BuffersError(f"a snapshot with {array.dtype} where float32 was due")
    return array.view(np.float32)
