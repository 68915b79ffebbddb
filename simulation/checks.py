"""What must hold after every event, whatever the network does (DESIGN.md promises 4 and 6).

Progress is conserved: for each peer and fragment G = M + L, where G is all inner progress, M what
its lineage lists of it, and L what is in its residual, in flight, or fresh in its parameters. A
lineage lists a contribution once. Equal heads have equal roots, and nobody goes back from a head
to what it builds on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from dugnad.averaging import formats as fm
from dugnad.averaging.codecs import CODECS
from dugnad.averaging.events import Adopt
from dugnad.averaging.join import AMENDED
from dugnad.averaging.worker import FragmentWorker
from dugnad.dht.ids import PeerId

if TYPE_CHECKING:
    from dugnad.simulation.people import SimPeer

TOLERANCE: Final = 1e-4
"""Relative error of the conservation law: float32 rounding of thousands of steps."""

Key = tuple[bytes, int, int]
"""(peer, fragment, seq)."""


class Violation(AssertionError):
    """A promise was broken."""


@dataclass(slots=True)
class Checks:
    """The omniscient ledger of one world."""

    size: int
    horizon: int
    vectors: dict[Key, np.ndarray] = field(default_factory=dict)
    commits: dict[bytes, fm.CommitRecord] = field(default_factory=dict)
    listed: dict[bytes, dict[tuple[bytes, int], float]] = field(default_factory=dict)
    """Digest -> everything its lineage lists, with the clip factor."""
    mass: dict[tuple[bytes, bytes, int], np.ndarray] = field(default_factory=dict)
    roots: dict[bytes, bytes] = field(default_factory=dict)
    births: dict[bytes, int] = field(default_factory=dict)
    first_seq: dict[tuple[bytes, int, int], int] = field(default_factory=dict)
    bases: dict[Key, int] = field(default_factory=dict)
    highest: dict[tuple[bytes, int], int] = field(default_factory=dict)
    """(peer, fragment) -> the highest version that its head ever had."""
    worst: float = 0.0

    def handed_in(
        self, sim: SimPeer, p: int, made: fm.Contribution, worker: FragmentWorker
    ) -> None:
        """Remember the vector of a contribution."""
        payload = worker.inbox[(sim.peer, made.seq)].payload
        vector = CODECS[made.codec].decode(payload, self.size)
        key = (made.peer, p, made.seq)
        if key in self.vectors:
            raise Violation(f"seq {made.seq} of fragment {p} was used twice by peer {sim.number}")
        self.vectors[key] = vector.astype(np.float64)
        self.bases[key] = made.base
        self.first_seq.setdefault((sim.peer, p, sim.born), made.seq)

    def committed(self, record: fm.CommitRecord, digest: bytes) -> None:
        """A commit was signed: no contribution may be listed twice in its lineage.

        A join may amend what became of one that is listed already.
        """
        self.commits[digest] = record
        known = dict(self.listed.get(record.header.parent, {}))
        for one in record.inputs:
            key = (one.contribution.peer, one.contribution.seq)
            if key in known and one.refusal != AMENDED:
                raise Violation(f"contribution {key[1]} is listed twice in one lineage")
            known[key] = one.clip
        self.listed[digest] = known

    def adopted(self, sim: SimPeer, p: int, old: bytes, adopt: Adopt) -> None:
        """A peer changed its head: equal digests mean equal bits.

        A switch of up to F versions settles everything anew. A deeper one, also an earlier one to a
        lineage of lower version, leaves behind what the old lineage listed and the new one does
        not; that is accounted for as given up.
        """
        fragment = sim.fragments[p]
        state = fragment.worker.states[adopt.digest]
        root = state.theta_root + state.momentum_root
        if self.roots.setdefault(adopt.digest, root) != root:
            raise Violation(f"two peers hold different bits of version {adopt.version}")
        if self._below(adopt.digest, old):
            raise Violation(f"peer {sim.number} went back to version {adopt.version}")
        before, now = self.listed.get(old, {}), self.listed[adopt.digest]
        kept = fragment.worker.buffers.retained
        first = self.first_seq.get((sim.peer, p, sim.born), 1 << 62)
        highest = max(self.highest.get((sim.peer, p), 0), adopt.version)
        self.highest[(sim.peer, p)] = highest
        for key in sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k)):
            if key[0] != sim.peer or key[1] < first or key[1] in kept:
                continue
            settled = self.bases[(sim.peer, p, key[1])] + self.horizon < highest
            if len(adopt.undone) <= self.horizon and not adopt.gap and not settled:
                raise Violation(f"contribution {key[1]} was forgotten and its listing changed")
            share = before.get(key, 0.0) - now.get(key, 0.0)
            fragment.given_up += share * self.vectors[(sim.peer, p, key[1])]

    def _below(self, digest: bytes, head: bytes) -> bool:
        """Whether a commit is the head, or one that the head builds on."""
        version = self.commits[digest].header.version
        while head in self.commits and self.commits[head].header.version > version:
            head = self.commits[head].header.parent
        return head == digest

    def forgotten(self, sim: SimPeer, p: int, seq: int) -> None:
        """A peer lets go of a contribution: it is listed, or all of it came back.

        Only where the chain down to its base is not known (a peer that came back without its
        history) may it be neither: then that progress is given up.
        """
        fragment = sim.fragments[p]
        kept = fragment.worker.buffers.retained.get(seq)
        if kept is None or (sim.peer, seq) in self.listed.get(fragment.head, {}):
            return
        core, made = fragment.core, fragment.worker.inbox[(sim.peer, seq)].contribution
        if kept.returned < 1.0:
            if core.view.lineage.oldest_known(core.head) <= made.base + 1:
                raise Violation(f"contribution {seq} is forgotten, neither listed nor returned")
            fragment.given_up += (1.0 - kept.returned) * self.vectors[(sim.peer, p, seq)]

    def after(self, sim: SimPeer, p: int) -> None:
        """Check the conservation law for one peer and fragment."""
        fragment = sim.fragments[p]
        worker, core = fragment.worker, fragment.core
        head = core.head.digest
        lineage = self.listed.get(head, {})
        first = self.first_seq.get((sim.peer, p, sim.born))
        total = worker.buffers.residual.astype(np.float64)
        total -= fragment.rounding
        total += worker.buffers.ref.astype(np.float64) - fragment.theta
        for seq, kept in worker.buffers.retained.items():
            if (sim.peer, seq) not in lineage:
                total += (1.0 - kept.returned) * self.vectors[(sim.peer, p, seq)]
            elif abs(1.0 - lineage[(sim.peer, seq)] - kept.returned) > 1e-6:
                raise Violation(
                    f"contribution {seq} of peer {sim.number} is listed with clip "
                    f"{lineage[(sim.peer, seq)]} and {kept.returned} of it came back"
                )
        total += fragment.given_up
        if first is not None:
            total += self._listed_mass(head, sim.peer, p, first)
        scale = float(np.abs(fragment.progress).max()) + 1.0
        error = float(np.abs(total - fragment.progress).max()) / scale
        self.worst = max(self.worst, error)
        if error > TOLERANCE:
            raise Violation(
                f"progress of peer {sim.number}, fragment {p} is not conserved: off by {error:.2e} "
                f"at head v{core.head.version} {head.hex()[:6]}"
            )

    def _listed_mass(self, head: bytes, peer: PeerId, p: int, first: int) -> np.ndarray:
        """What the lineage of ``head`` lists of a peer's present life."""
        key = (head, peer, first)
        if key not in self.mass:
            lineage = self.listed.get(head, {})
            found = np.zeros(self.size, np.float64)
            for (maker, seq), clip in lineage.items():
                if maker == peer and seq >= first:
                    found += clip * self.vectors[(peer, p, seq)]
            self.mass[key] = found
        return self.mass[key]
