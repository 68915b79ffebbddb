"""The numeric side of one fragment's exchange: what the core's actions mean for vectors.

Plain synchronous methods over numpy, called in the order of the core's actions, one at a time: by
the daemon in a worker thread, by the simulator at once. Nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from dugnad.averaging.buffers import AnchorState, BuffersError, FragmentBuffers
from dugnad.averaging.codecs import (
    CODECS,
    COMMIT_CODECS,
    Codec,
    CodecError,
    commit_codecs,
    leaf_bounds,
)
from dugnad.averaging.events import HandIn, Join, Key, Merge, Merged
from dugnad.averaging.formats import Contribution, Header, Input, UnitPiece, pieces_root
from dugnad.averaging.fragments import Group
from dugnad.averaging.join import JOIN
from dugnad.averaging.joinstep import join_states, shift
from dugnad.averaging.leaf import Encoded, leaf_room
from dugnad.averaging.leafmerge import InputError, combine, squares_of, weigh_encoded
from dugnad.averaging.merge import MergeError
from dugnad.averaging.outer import OuterError, Rates, float_of
from dugnad.averaging.tree import Vector, leaf_hashes, root_of
from dugnad.dht.ids import PeerId, RunId

PAYLOADS_KEPT: Final = 8
"""Commit payloads kept for peers that pull them: the versions that a catch-up may ask for."""
CORRECTIONS_KEPT: Final = 5
"""Own merges whose rounding may still have to be taken back after a switch of lineage, and newest
commits that count as not settled: F = 4 versions and the one on top (DESIGN.md 8.8)."""


class WorkError(ValueError):
    """Bytes that are not what a header says; ``lied`` when they are complete and still differ."""

    def __init__(self, reason: str, *, lied: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.lied = reason, lied


@dataclass(frozen=True, slots=True)
class FragmentRules:
    """How this run merges one fragment."""

    run: RunId
    fragment: int
    groups: tuple[Group, ...]
    rule: str
    hand_in_codec: str
    commit_codec: str
    eta_bits: int
    mu_bits: int
    leanest_commit: str = "int8"
    """No commit of the run is coarser."""

    def commit_codec_of(self, name: str) -> Codec | None:
        """The codec of a commit; None where the run has no commits in it."""
        return COMMIT_CODECS[name] if name in commit_codecs(self.leanest_commit) else None


@dataclass(frozen=True, slots=True)
class Progress:
    """What the learner did since the last hand-in of this fragment."""

    tokens: int
    steps: int
    pieces: tuple[UnitPiece, ...]
    speed_class: int
    eligible: bool


@dataclass(frozen=True, slots=True)
class Kept:
    """A contribution that lies here with its payload."""

    contribution: Contribution
    pieces: tuple[UnitPiece, ...]
    payload: bytes
    squares: tuple[float, ...] | None = None
    """Squared norms by group where the merging rule asks for no more; None: not known yet."""


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit's payload and its leaf hashes, kept to be served."""

    codec: str
    payload: bytes
    leaves: tuple[bytes, ...]


@dataclass(slots=True)
class _Made:
    """A merge of my own that is not signed yet."""

    parent: bytes
    payload_root: bytes
    commit: Commit
    state: AnchorState
    correction: Vector | None
    """What rounding lost of the inputs; a join has none of its own."""


@dataclass(slots=True)
class FragmentWorker:
    """Vectors of one fragment: buffers, anchors by commit, payloads to serve and to merge."""

    rules: FragmentRules
    me: PeerId
    buffers: FragmentBuffers
    states: dict[bytes, AnchorState]
    inbox: dict[Key, Kept] = field(default_factory=dict)
    commits: dict[bytes, Commit] = field(default_factory=dict)
    corrections: dict[bytes, Vector] = field(default_factory=dict)
    applied: set[bytes] = field(default_factory=set)
    recent: list[bytes] = field(default_factory=list)
    """The newest commits under the anchor, oldest first: those that a switch may undo."""
    last_codec: str = ""
    """Codec of the last hand-in before leaving, where it is not the run's usual one."""
    _made: _Made | None = None

    @classmethod
    def start(
        cls, rules: FragmentRules, me: PeerId, digest: bytes, anchor: AnchorState
    ) -> FragmentWorker:
        """A worker whose learner stands at ``anchor``, the state after commit ``digest``."""
        return cls(rules, me, FragmentBuffers(anchor), {digest: anchor})

    # -- own contributions ---------------------------------------------------------------------

    def hand_in(
        self,
        action: HandIn,
        theta: Vector,
        progress: Progress,
        codec: str = "",
        final: bool = True,
    ) -> Contribution:
        """Make contribution ``action.seq`` of the learner's parameters; it is not signed yet.

        ``codec`` is what its link carries; '' means the run's usual one. One that is not ``final``
        is a draft, to be taken back and made again.
        """
        codec = self.last_codec or codec or self.rules.hand_in_codec
        made = self.buffers.hand_in(action.seq, theta, CODECS[codec], final=final)
        contribution = Contribution(
            peer=self.me,
            fragment=self.rules.fragment,
            seq=action.seq,
            base=action.base,
            base_digest=action.base_digest,
            tokens=progress.tokens,
            steps=progress.steps,
            speed_class=progress.speed_class,
            eligible=progress.eligible,
            codec=codec,
            payload_root=made.payload_root,
            payload_bytes=len(made.payload),
            pieces_root=pieces_root(self.rules.run, progress.pieces),
        )
        self.inbox[(self.me, action.seq)] = Kept(contribution, progress.pieces, made.payload)
        return contribution

    def signed_own(self, contribution: Contribution) -> None:
        """Replace an own contribution by its signed form."""
        key = (self.me, contribution.seq)
        kept = self.inbox[key]
        self.inbox[key] = Kept(contribution, kept.pieces, kept.payload)

    def take_back(self, seq: int) -> None:
        """Undo the newest hand-in, a draft: its number can be used again."""
        self.buffers.take_back(seq)
        self.inbox.pop((self.me, seq), None)

    def settle(self, seq: int, share: float) -> None:
        """See to it that ``share`` of own contribution ``seq`` is back in the residual."""
        self.buffers.settle(seq, share)

    def forget(self, seq: int) -> None:
        """Own contribution ``seq`` is settled for good."""
        self.buffers.forget(seq)
        self.inbox.pop((self.me, seq), None)

    # -- others' contributions -----------------------------------------------------------------

    def keep(
        self, contribution: Contribution, pieces: tuple[UnitPiece, ...], payload: bytes
    ) -> None:
        """Keep a contribution whose root was checked; decoding checks its numbers."""
        key = (contribution.peer, contribution.seq)
        if contribution.peer == self.me:
            raise WorkError("it is my own")
        known = self.inbox.get(key)
        if known is not None and known.contribution != contribution:
            raise WorkError("its maker sent another contribution with this number", lied=True)
        encoded = _sized(contribution, payload, self.buffers.size)
        hashes: list[bytes] = []
        try:
            squares = squares_of(encoded, self.rules.groups, hashes)
        except CodecError as fault:
            _check_root(contribution, leaf_hashes(payload, encoded.bounds))
            raise _refused(fault) from fault
        _check_root(contribution, hashes)
        self.inbox[key] = Kept(contribution, pieces, payload, squares)

    def drop_payload(self, key: Key) -> None:
        """A foreign contribution is not needed any more."""
        if key[0] != self.me:
            self.inbox.pop(key, None)

    # -- merging -------------------------------------------------------------------------------

    def merge(self, action: Merge, codec: str = "") -> Merged:
        """Merge the named contributions on top of ``action.parent`` (rule 4).

        ``codec`` is the payload's, one of COMMIT_CODECS; '' means the run's usual one.
        """
        codec = codec or self.rules.commit_codec
        found: list[Kept] = []
        inputs: list[Encoded] = []
        bad: list[tuple[Key, str]] = []
        for key in action.keys:
            kept = self.inbox.get(key)
            if kept is None:
                bad.append((key, "its payload is not here any more"))
                continue
            try:
                made_in = CODECS[kept.contribution.codec]
                inputs.append(Encoded.of(made_in, kept.payload, self.buffers.size))
                found.append(kept)
            except CodecError as fault:
                bad.append((key, fault.reason))
        while found:
            try:
                return self._merge(action.parent, codec, found, inputs, tuple(bad))
            except InputError as fault:
                bad.append((_key(found.pop(fault.index)), fault.reason))
                del inputs[fault.index]
            except (MergeError, CodecError, OuterError) as fault:
                reason = f"these inputs cannot be merged: {fault.reason}"
                bad += [(_key(kept), reason) for kept in found]
                break
        return Merged(action.parent, (), "", b"", 0, b"", b"", tuple(bad))

    def _merge(
        self,
        digest: bytes,
        codec: str,
        found: Sequence[Kept],
        inputs: Sequence[Encoded],
        bad: tuple[tuple[Key, str], ...],
    ) -> Merged:
        rules = self.rules
        listed = [kept.contribution for kept in found]
        squares = [kept.squares for kept in found]
        weights = weigh_encoded(listed, inputs, rules.groups, rule=rules.rule, squares=squares)
        rows = weights.coefficients
        mine = [np.mean(row) for row, c in zip(rows, listed, strict=True) if c.peer == self.me]
        share = float(sum(mine)) if mine else 1.0 / len(found)
        made = combine(
            inputs,
            rows,
            rules.groups,
            codec=COMMIT_CODECS[codec],
            state=self.states[digest],
            rates=Rates.of_bits(eta_bits=rules.eta_bits, mu_bits=rules.mu_bits),
            rounding_factor=np.float32(1.0 / share if share > 0.0 else 0.0),
        )
        commit = Commit(codec, made.payload, made.leaves)
        self._made = _Made(digest, root_of(made.leaves), commit, made.state, made.rounding)
        return Merged(
            parent=digest,
            inputs=tuple(
                Input(kept.contribution, kept.pieces, clip, row)
                for kept, clip, row in zip(found, weights.clips, rows, strict=True)
            ),
            codec=commit.codec,
            payload_root=root_of(made.leaves),
            payload_bytes=len(made.payload),
            theta_root=made.state.theta_root,
            momentum_root=made.state.momentum_root,
            bad=bad,
        )

    def join(self, action: Join) -> Merged:
        """Move the anchors after the parent towards the other side's (rule 11).

        The answer has no inputs where one of the two is not here any more or they are too far
        apart to be joined.
        """
        parent, other = self.states.get(action.parent), self.states.get(action.other)
        failed = Merged(action.parent, (), "", b"", 0, b"", b"", other=action.other)
        if parent is None or other is None:
            return failed
        name = "float32" if self.rules.commit_codec == "float32" else "float16"
        alpha = np.float32(float_of(action.alpha_bits))
        try:
            made = join_states(parent, other, alpha, COMMIT_CODECS[name])
        except (CodecError, OuterError):
            return failed
        commit = Commit(name, made.payload, made.leaves)
        self._made = _Made(action.parent, root_of(made.leaves), commit, made.state, None)
        return Merged(
            parent=action.parent,
            inputs=action.inputs,
            codec=name,
            payload_root=root_of(made.leaves),
            payload_bytes=len(made.payload),
            theta_root=made.state.theta_root,
            momentum_root=made.state.momentum_root,
            other=action.other,
            alpha_bits=action.alpha_bits,
        )

    def made_payload(self, header: Header) -> bytes | None:
        """The payload behind a header of my own that is about to be signed."""
        made = self._made
        if made is None or made.payload_root != header.payload_root:
            return None
        return made.commit.payload

    def sealed(self, digest: bytes, header: Header) -> None:
        """The merge of my own that ``header`` describes is signed: it is commit ``digest``."""
        made = self._made
        if made is None or made.payload_root != header.payload_root:
            raise WorkError("the merge behind this header is gone")
        self._made = None
        self.states[digest] = made.state
        self._keep_commit(digest, made.commit)
        if made.correction is not None:
            self.corrections[digest] = made.correction
        while len(self.corrections) > CORRECTIONS_KEPT:
            self._drop_correction(next(iter(self.corrections)))

    # -- following -----------------------------------------------------------------------------

    def advance(
        self, digest: bytes, header: Header, payload: bytes, leaves: tuple[bytes, ...] = ()
    ) -> None:
        """Compute the anchors after a commit from its payload and check them against its roots.

        ``leaves`` are the payload's leaf hashes where whoever fetched it has compared it with them.
        Raises :class:`WorkError`; nothing is kept then.
        """
        parent = self.states.get(header.parent)
        if parent is None:
            raise WorkError("the anchors that it builds on are not here any more")
        codec = self.rules.commit_codec_of(header.codec)
        size = self.buffers.size
        if codec is None:
            raise WorkError(f"its codec {header.codec!r} is none of the run's commits", lied=True)
        if len(payload) != codec.encoded_size(size) or len(payload) != header.payload_bytes:
            raise WorkError("its payload has another size")
        leaves = leaves or leaf_hashes(payload, leaf_bounds(codec, size))
        if root_of(leaves) != header.payload_root:
            raise WorkError("its payload does not match the root")
        try:
            if header.kind == JOIN:
                state = shift(parent, payload, codec)
            else:
                state = FragmentBuffers.advance(
                    parent, payload, codec, eta_bits=header.eta_bits, mu_bits=header.mu_bits
                )
        except (CodecError, OuterError) as fault:
            raise WorkError(fault.reason, lied=True) from fault
        self._check_roots(state, header)
        self.states[digest] = state
        self._keep_commit(digest, Commit(codec.name, payload, leaves))

    def install(self, digest: bytes, header: Header, theta: Vector, momentum: Vector) -> None:
        """Take whole anchors from a donor; raises :class:`WorkError` when the roots differ."""
        try:
            state = AnchorState.of(theta, momentum)
        except BuffersError as fault:
            raise WorkError(fault.reason) from fault
        if (state.theta_root, state.momentum_root) != (header.theta_root, header.momentum_root):
            raise WorkError("the donor's anchors do not match the roots")
        self.states[digest] = state

    def _check_roots(self, state: AnchorState, header: Header) -> None:
        roots = (state.theta_root, state.momentum_root)
        if roots != (header.theta_root, header.momentum_root):
            raise WorkError("its payload leads to other roots than it says", lied=True)

    def adopt(self, digest: bytes, undone: Sequence[bytes], applied: Sequence[bytes]) -> Vector:
        """Make ``digest`` the anchor; returns what is to be added to the learner's parameters.

        The rounding of own merges enters the residual with the merge and leaves it again when a
        switch of lineage undoes the merge.
        """
        for one in undone:
            if one in self.applied:
                self.applied.discard(one)
                self.buffers.take_residual(self.corrections[one])
        for one in applied:
            if one in self.corrections and one not in self.applied:
                self.applied.add(one)
                self.buffers.add_residual(self.corrections[one])
        gone = set(undone)
        self.recent = [one for one in self.recent if one not in gone] + list(applied)
        while len(self.recent) > CORRECTIONS_KEPT:
            self._drop_correction(self.recent.pop(0))
        return self.buffers.adopt(self.states[digest])

    def drop_state(self, digest: bytes) -> None:
        """The anchors after this commit are not needed any more."""
        self.states.pop(digest, None)

    def _drop_correction(self, digest: bytes) -> None:
        self.corrections.pop(digest, None)
        self.applied.discard(digest)

    def _keep_commit(self, digest: bytes, commit: Commit) -> None:
        self.commits[digest] = commit
        while len(self.commits) > PAYLOADS_KEPT:
            self.commits.pop(next(iter(self.commits)))


def check_contribution(contribution: Contribution, payload: bytes, size: int) -> None:
    """Raise :class:`WorkError` unless ``payload`` is what ``contribution`` says it is."""
    encoded = _sized(contribution, payload, size)
    _check_root(contribution, leaf_hashes(payload, encoded.bounds))
    room, scratch = leaf_room(size), leaf_room(size)
    try:
        for k in range(len(encoded.bounds)):
            encoded.leaf(k, room, scratch)
    except CodecError as fault:
        raise _refused(fault) from fault


def _sized(contribution: Contribution, payload: bytes, size: int) -> Encoded:
    """Return a payload of the right size; its root and its numbers are not looked at."""
    codec = CODECS.get(contribution.codec)
    if codec is None:
        raise WorkError(f"its codec {contribution.codec!r} is unknown here", lied=True)
    if len(payload) != contribution.payload_bytes or len(payload) != codec.encoded_size(size):
        raise WorkError("its payload has another size than its fragment", lied=True)
    return Encoded.of(codec, payload, size)


def _check_root(contribution: Contribution, hashes: Sequence[bytes]) -> None:
    if root_of(hashes) != contribution.payload_root:
        raise WorkError("its payload does not match its root", lied=True)


def _refused(fault: CodecError) -> WorkError:
    return WorkError(f"its payload is refused: {fault.reason}", lied=True)


def _key(kept: Kept) -> Key:
    return kept.contribution.peer, kept.contribution.seq
