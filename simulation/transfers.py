"""Whole anchors on their way: pieces from several donors at once, each checked by its hash.

Plays what the daemon's puller does, whose code waits for sockets and cannot run here. A donor
proves itself by hashes that lead to the header's root, then draws pieces from one pool through its
uplink. What a donor leaves undone goes back to the pool. One that dies, hangs or has not got them
is dropped, one whose piece does not have its hash is dropped and *named*.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from dugnad.averaging import events as ev
from dugnad.averaging.worker import WorkError
from dugnad.dht.ids import PeerId
from dugnad.simulation.people import SimPeer

if TYPE_CHECKING:
    from dugnad.simulation.stage import Stage

PIECES: Final = 8
"""Pieces of one fragment's anchors."""
DONORS_AT_ONCE: Final = 4
"""Donors that one transfer draws from (`peer.transferwire`)."""
PATIENCE_S: Final = 2.0
"""A donor that brings nothing for so long is given up (`peer.transferwire`)."""

Piece = tuple[np.ndarray, np.ndarray]


@dataclass(slots=True, eq=False)
class Transfer:
    """One fragment's anchors for one life of one peer."""

    sim: SimPeer
    p: int
    action: ev.Obtain
    born: int
    waiting: deque[int]
    donors: deque[PeerId]
    """Who may still be asked."""
    drawing: dict[PeerId, int] = field(default_factory=dict)
    """Donor -> the piece that it is bringing."""
    got: dict[int, Piece] = field(default_factory=dict)
    served: dict[PeerId, int] = field(default_factory=dict)


class Transfers:
    """All transfers of one stage."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.named: dict[PeerId, int] = {}
        """Donors whose pieces did not have their hashes, and how often."""
        self.lies: dict[PeerId, int] = {}
        """Who really served bad pieces: what the names are judged by."""
        self.spread: list[int] = []
        """From how many donors each finished transfer came."""
        self.finished = 0

    def begin(self, sim: SimPeer, p: int, action: ev.Obtain) -> None:
        """Fetch anchors; the core hears :class:`Obtained` or :class:`ObtainFailed`."""
        donors = list(action.sources)
        sim.rng.shuffle(donors)
        job = Transfer(sim, p, action, sim.born, deque(range(PIECES)), deque(donors))
        self._draw_all(job)

    def _draw_all(self, job: Transfer) -> None:
        """Let as many donors draw as may at once; without any the transfer has failed."""
        while job.donors and len(job.drawing) < min(DONORS_AT_ONCE, len(job.waiting)):
            self._draw(job, job.donors.popleft())
        if not job.drawing and len(job.got) < PIECES:
            reason = "no donor is left"
            self.stage.tell(job.sim, job.p, ev.ObtainFailed(job.action.digest, reason))

    def _draw(self, job: Transfer, donor: PeerId) -> None:
        stage = self.stage
        number = job.drawing[donor] = job.waiting.popleft()
        size = 8 * len(self._part(number))
        link = stage.net.link(donor, job.sim.peer)
        lost = link.random() < stage.settings.weather.fetch_loss
        stage.net.weigh(size)
        trips = 1 if donor in job.served else 3  # the stream and the hashes come first
        taken = stage.net.latency(link, trips)
        if lost or stage.silent(donor, job.sim.peer):
            stage.later(PATIENCE_S, partial(self._dropped, job, donor))
        else:
            stage.later(taken, partial(self._arrived, job, donor, size))

    def _part(self, number: int) -> range:
        size = self.stage.settings.size
        return range(number * size // PIECES, (number + 1) * size // PIECES)

    def _over(self, job: Transfer) -> bool:
        """Whether the one who fetches is no more."""
        return not job.sim.alive or self.stage.peers[job.sim.peer].born != job.born

    def _arrived(self, job: Transfer, donor: PeerId, size: int) -> None:
        stage, number = self.stage, job.drawing[donor]
        if self._over(job):
            return
        try:
            sent, digest = stage.serve(donor, job.p, job.action, self._part(number))
        except WorkError:
            stage.later(PATIENCE_S, partial(self._dropped, job, donor))
            return
        stage.bytes += size
        if hash_of(sent) != digest:
            self.named[donor] = self.named.get(donor, 0) + 1
            job.sim.story.append((stage.now, f"names {stage.peers[donor].number}", None))
            self._dropped(job, donor)
            return
        del job.drawing[donor]
        job.got[number] = sent
        job.served[donor] = job.served.get(donor, 0) + 1
        if len(job.got) == PIECES:
            self._complete(job)
            return
        job.donors.appendleft(donor)
        if job.waiting:
            self._draw_all(job)

    def _dropped(self, job: Transfer, donor: PeerId) -> None:
        """The donor is not asked again; its piece is another's."""
        if not self._over(job):
            job.waiting.appendleft(job.drawing.pop(donor))
            self._draw_all(job)

    def _complete(self, job: Transfer) -> None:
        pieces = [job.got[number] for number in range(PIECES)]
        theta, momentum = (np.concatenate([one[part] for one in pieces]) for part in (0, 1))
        action, event = job.action, ev.Obtained(job.action.digest)
        worker = job.sim.fragments[job.p].worker
        self.finished += 1
        self.spread.append(len(job.served))
        for donor in job.served:
            self.stage.donors[donor] = self.stage.donors.get(donor, 0) + 1
        try:
            worker.install(action.digest, action.header, theta, momentum)
        except WorkError as fault:
            failed = ev.ObtainFailed(action.digest, fault.reason, fault.lied)
            self.stage.tell(job.sim, job.p, failed)
        else:
            self.stage.tell(job.sim, job.p, event)

    def faults(self, named_min: int) -> list[str]:
        """Honest donors that were named, liars that were not, too few names for the scenario."""
        number = {peer: sim.number for peer, sim in self.stage.peers.items()}
        found = [
            f"{number[one]} is named for bad pieces and served none"
            for one in self.named
            if one not in self.lies
        ]
        found += [
            f"{number[one]} served {count} bad pieces and is named for {self.named.get(one, 0)}"
            for one, count in self.lies.items()
            if self.named.get(one, 0) != count
        ]
        if len(self.named) < named_min:
            found.append(f"{len(self.named)} donors are named for bad pieces, not {named_min}")
        return found


def hash_of(piece: Piece) -> bytes:
    """What stands for a leaf's hash."""
    return hashlib.sha256(piece[0].tobytes() + piece[1].tobytes()).digest()
