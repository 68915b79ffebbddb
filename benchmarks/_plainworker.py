"""Averaging alone: what a `FragmentWorker` does, less error feedback, outer step and roots.

The transport still checks every leaf by its hash. As hivemind's averager and gloo do, the result is
the mean itself; what the codecs lose is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dugnad.averaging import formats as fm
from dugnad.averaging.codecs import CODECS, COMMIT_CODECS, leaf_bounds
from dugnad.averaging.events import HandIn, Merge, Merged
from dugnad.averaging.leaf import Encoded, leaf_room
from dugnad.averaging.leafmerge import merge_walk, squares_of, weigh_encoded
from dugnad.averaging.pages import PAGES
from dugnad.averaging.room import Room
from dugnad.averaging.tree import LEAF_PARAMS, Vector, leaf_hash, param_bounds, root_of
from dugnad.averaging.worker import Commit, FragmentRules, Kept, Progress
from dugnad.dht.ids import PeerId

LEAVES_AT_ONCE = 4
"""Leaves that are encoded before they are hashed: they stay in the cache."""

Key = tuple[PeerId, int]


@dataclass(slots=True)
class PlainWorker:
    """Averages the vectors themselves; the methods are those of a worker."""

    rules: FragmentRules
    me: PeerId
    size: int
    result: Vector = field(default_factory=lambda: np.zeros(0, np.float32))
    inbox: dict[Key, Kept] = field(default_factory=dict)
    commits: dict[bytes, Commit] = field(default_factory=dict)
    _made: tuple[Commit, Vector] | None = None

    def hand_in(self, action: HandIn, vector: Vector, progress: Progress) -> fm.Contribution:
        """Encode and hash; nothing is kept of what that loses."""
        codec = CODECS[self.rules.hand_in_codec]
        room, scratch, hashes = Room(codec.encoded_size(self.size)), leaf_room(self.size), []
        bounds = leaf_bounds(codec, self.size)
        for k in range(0, len(bounds), LEAVES_AT_ONCE):
            some = bounds[k : k + LEAVES_AT_ONCE]
            part = vector[k * LEAF_PARAMS : (k + len(some)) * LEAF_PARAMS]
            codec.encode_into(part, room.view[some[0][0] : some[-1][1]], scratch)
            hashes += [leaf_hash(room.view[first:last]) for first, last in some]
        payload = room.take()
        made = fm.Contribution(
            peer=self.me,
            fragment=self.rules.fragment,
            seq=action.seq,
            base=action.base,
            base_digest=action.base_digest,
            tokens=progress.tokens,
            steps=progress.steps,
            speed_class=progress.speed_class,
            eligible=progress.eligible,
            codec=codec.name,
            payload_root=root_of(hashes),
            payload_bytes=len(payload),
            pieces_root=fm.pieces_root(self.rules.run, progress.pieces),
        )
        self.inbox[(self.me, action.seq)] = Kept(made, progress.pieces, payload)
        return made

    def signed_own(self, made: fm.Contribution) -> None:
        """Replace an own contribution by its signed form."""
        kept = self.inbox[(self.me, made.seq)]
        self.inbox[(self.me, made.seq)] = Kept(made, kept.pieces, kept.payload)

    def keep(self, made: fm.Contribution, pieces: tuple[fm.UnitPiece, ...], payload: bytes) -> None:
        """Keep one that matches its root."""
        encoded, hashes = Encoded.of(CODECS[made.codec], payload, self.size), list[bytes]()
        squares = squares_of(encoded, self.rules.groups, hashes)
        if root_of(hashes) != made.payload_root:
            raise RuntimeError("a payload that does not match its root")
        self.inbox[(PeerId(made.peer), made.seq)] = Kept(made, pieces, payload, squares)

    def merge(self, action: Merge) -> Merged:
        """The weighted mean, encoded, and what others will decode."""
        found = [self.inbox[(PeerId(peer), seq)] for peer, seq in action.keys]
        inputs = [Encoded.of(CODECS[k.contribution.codec], k.payload, self.size) for k in found]
        listed, groups = [kept.contribution for kept in found], self.rules.groups
        squares = [kept.squares for kept in found]
        weights = weigh_encoded(listed, inputs, groups, rule=self.rules.rule, squares=squares)
        factors = np.array([row[0] for row in weights.coefficients], np.float32)  # all alike
        codec = COMMIT_CODECS[self.rules.commit_codec]
        room, hashes, result = Room(codec.encoded_size(self.size)), [], PAGES.vector(self.size)
        merged = Encoded.of(codec, room.view, self.size)
        total, part, scratch = (leaf_room(self.size) for _ in range(3))
        walk = merge_walk(inputs, merged, result, np.float32(0.0))  # decoding overwrites the rest
        for k, (start, stop) in enumerate(param_bounds(self.size)):
            first, last = merged.bounds[k]
            if walk is None or not walk.leaf(k, factors):
                leaf = total[: stop - start]
                leaf.fill(0.0)
                for one, factor in zip(inputs, factors, strict=True):
                    decoded = one.leaf(k, part, scratch)
                    np.multiply(decoded, factor, out=decoded)
                    np.add(leaf, decoded, out=leaf)
                codec.encode_into(leaf, room.view[first:last], scratch)
            hashes.append(leaf_hash(room.view[first:last]))
            merged.leaf(k, result[start:stop], scratch)
        del merged, walk
        self._made = Commit(codec.name, room.take(), tuple(hashes)), result
        root, none = root_of(hashes), fm.NO_DIGEST
        return Merged(
            parent=action.parent,
            inputs=tuple(
                fm.Input(kept.contribution, kept.pieces, clip, row)
                for kept, clip, row in zip(found, weights.clips, weights.coefficients, strict=True)
            ),
            codec=codec.name,
            payload_root=root,
            payload_bytes=len(self._made[0].payload),
            theta_root=none,
            momentum_root=none,
        )

    def sealed(self, digest: bytes, header: fm.Header) -> None:
        """The merge is commit ``digest``."""
        assert self._made is not None, "nothing was merged"
        self.commits = {digest: self._made[0]}
        self.result = self._made[1]

    def advance(
        self, digest: bytes, header: fm.Header, payload: bytes, leaves: tuple[bytes, ...] = ()
    ) -> None:
        """Decode a payload whose leaves the puller has checked."""
        result = PAGES.vector(self.size)
        self.result = COMMIT_CODECS[header.codec].decode(payload, self.size, result)

    def adopt(self, digest: bytes, undone: Sequence[bytes], applied: Sequence[bytes]) -> Vector:
        """The result."""
        return self.result

    def forget(self, seq: int) -> None:
        """Own contribution ``seq`` is done with."""
        self.inbox.pop((self.me, seq), None)

    def drop_payload(self, key: Key) -> None:
        """A contribution is not needed any more."""
        self.inbox.pop(key, None)

    def drop_state(self, digest: bytes) -> None:
        """There is none."""
