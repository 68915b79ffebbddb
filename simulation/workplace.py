"""The work of simulated learners: each peer's units core, fed as the daemon feeds it.

A learner trains one sequence a step, of the units that its own core gives it; what its lineage
lists, who takes part, who is lost, what others claim and how fast the swarm is, the core hears as
in the daemon. Nothing is given before a peer is level with the swarm.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from dugnad.averaging import formats as fm
from dugnad.averaging.credit import CoverageChange
from dugnad.averaging.speed import speed_class
from dugnad.dht.ids import PeerId
from dugnad.peer import units as un
from dugnad.simulation.checks import Violation
from dugnad.simulation.people import SimPeer
from dugnad.simulation.settings import EPOCH_SEQUENCES, RUN, SEQUENCE_TOKENS, UNIT_SEQUENCES

if TYPE_CHECKING:
    from dugnad.simulation.fates import Fates

WANTED: Final = 8
"""Sequences asked for at a time: two units, as a learner that prefetches."""
PACE_S: Final = 5.0
"""Between two looks at the swarm's speed (`peer.vitals`)."""
ALONE_S: Final = 4.0
"""A peer that meets nobody trains after this."""
SILENT_S: Final = 5.0
"""Whose heads are not heard this long after the start is not waited for."""
HELD_UNITS_MAX: Final = 65_536
"""Units that a table remembers (`peer.unittable.HELD_UNITS_MAX`)."""

LISTED_INTERVALS: Final = 5.0
"""Work of a live, undisturbed learner is listed within so many merge intervals (H): two are usual,
one more for a home that died, two for a contribution that came back."""
DONE_S: Final = 240.0
"""What was trained this long ago is not asked for any more."""

Sequence = tuple[int, int, int]
"""(epoch, unit, place in it)."""


@dataclass(slots=True)
class Desk:
    """One life of one learner."""

    units: un.Units
    since: float
    todo: deque[fm.UnitPiece] = field(default_factory=deque)
    heard: dict[PeerId, dict[int, int]] = field(default_factory=dict)
    """Peer -> fragment -> the version it said it stands at."""
    synced: bool = False
    paced_at: float = float("-inf")
    idle: int = 0
    """Steps for which there was no work."""


class Workplace:
    """All desks of one world."""

    def __init__(self, stage: Fates) -> None:
        self.stage = stage
        self.plan = un.UnitPlan(RUN, EPOCH_SEQUENCES, UNIT_SEQUENCES)
        self.desks: dict[PeerId, Desk] = {}
        self.trained: Counter[Sequence] = Counter()
        """How often each sequence was trained."""
        self.done: deque[tuple[float, PeerId, int, Sequence]] = deque()
        """When which life of whom trained what: the newest."""
        self.claims = 0
        self.takeovers = 0

    # -- lives and times -------------------------------------------------------------------------

    def born(self, sim: SimPeer, covered: Iterable[fm.UnitPiece]) -> None:
        """A learner starts; its disk says what is listed."""
        contract = un.Contract(0, ("float32",), 0.0, splittable=True, attempts=3)
        core = un.Units(sim.peer, self.plan, contract, sequence_tokens=SEQUENCE_TOKENS)
        self.desks[sim.peer] = Desk(core, self.stage.now)
        self.changed(sim, CoverageChange(covered=tuple(covered)))
        self.participants(sim)

    def step(self, sim: SimPeer) -> fm.UnitPiece | None:
        """The sequence that the next step trains on; None: there is none to be had now."""
        desk, now = self.desks[sim.peer], self.stage.now
        self._pace(sim, desk)
        if not desk.synced and not self._level(sim, desk):
            return None
        if not desk.todo:
            items, actions = desk.units.next_work(WANTED, now)
            for item in items:
                places = range(item.start, item.stop)
                desk.todo.extend(fm.UnitPiece(item.epoch, item.index, p, p + 1) for p in places)
            self._act(sim, actions)
            self._check(sim, desk)
        if not desk.todo:
            desk.idle += 1
            return None
        piece = desk.todo.popleft()
        desk.units.handle(un.Trained(piece), now)
        key = (piece.epoch, piece.index, piece.start)
        self.trained[key] += 1
        self.done.append((now, sim.peer, sim.born, key))
        while self.done and now - self.done[0][0] > DONE_S:
            self.done.popleft()
        return piece

    def _pace(self, sim: SimPeer, desk: Desk) -> None:
        now = self.stage.now
        if now - desk.paced_at >= PACE_S:
            desk.paced_at = now
            desk.units.handle(un.Interval(self.stage.settings.interval_s), now)
            speeds = [SEQUENCE_TOKENS / one.step_s for one in self._around(sim)]
            desk.units.handle(un.SwarmSpeed(sum(speeds)), now)

    def _level(self, sim: SimPeer, desk: Desk) -> bool:
        """Whether its anchors are the swarm's, or there is nobody to take them from."""
        waited = self.stage.now - desk.since
        if not sim.live and waited < ALONE_S:
            return False
        if waited < SILENT_S and any(one not in desk.heard for one in sim.live):
            return False
        for p, fragment in enumerate(sim.fragments):
            ahead = max((desk.heard.get(one, {}).get(p, 0) for one in sim.live), default=0)
            version = fragment.core.head.version
            if version + 1 < ahead or (ahead and not version):
                return False
        desk.synced = True
        self.participants(sim)
        return True

    def _around(self, sim: SimPeer) -> list[SimPeer]:
        """The peer and all that it counts as live."""
        peers = self.stage.peers
        return [sim, *(peers[one] for one in sorted(sim.live) if one in peers)]

    def _check(self, sim: SimPeer, desk: Desk) -> None:
        if desk.units.held > HELD_UNITS_MAX:
            raise Violation(f"the table of units of peer {sim.number} is over its bound")
        if len(desk.todo) > WANTED:
            raise Violation(f"the learner of peer {sim.number} was given too much at a time")

    # -- what the core hears ---------------------------------------------------------------------

    def participants(self, sim: SimPeer) -> None:
        """Members of the head and newcomers in sight share the work."""
        desk, head = self.desks[sim.peer], sim.fragments[0].core.head
        members = tuple((PeerId(row.peer), row.speed_class) for row in head.members)
        known = {peer for peer, _ in members}
        newcomers = [
            (one.peer, speed_class(SEQUENCE_TOKENS / one.step_s, None))
            for one in self._around(sim)
            if one.peer not in known
        ]
        event = un.Participants(head.digest, members, tuple(sorted(newcomers)))
        desk.units.handle(event, self.stage.now)

    def changed(self, sim: SimPeer, change: CoverageChange) -> None:
        """The lineage lists more, or other, sequences."""
        desk, now = self.desks[sim.peer], self.stage.now
        self._check(sim, desk)
        if change.uncovered:
            desk.units.handle(un.Uncovered(change.uncovered), now)
        if change.covered:
            desk.units.handle(un.Covered(change.covered), now)

    def returned(self, sim: SimPeer, pieces: tuple[fm.UnitPiece, ...]) -> None:
        """A contribution came back: its work goes with the next one."""
        self.desks[sim.peer].units.handle(un.Returned(pieces), self.stage.now)

    def up(self, sim: SimPeer, peer: PeerId) -> None:
        """Somebody is there."""
        self.desks[sim.peer].units.handle(un.PeerBack(peer), self.stage.now)
        self.participants(sim)

    def down(self, sim: SimPeer, peer: PeerId) -> None:
        """Somebody is gone."""
        desk = self.desks[sim.peer]
        desk.heard.pop(peer, None)
        self._act(sim, desk.units.handle(un.PeerLost(peer), self.stage.now))
        self.participants(sim)

    def message(self, sim: SimPeer, sender: PeerId, message: fm.Message) -> None:
        """Claims of others, and where they stand."""
        if not sim.alive:
            return
        desk = self.desks[sim.peer]
        if isinstance(message, fm.Claims):
            desk.units.handle(un.Claimed(sender, message.units), self.stage.now)
        elif isinstance(message, fm.PeerClaims):
            desk.units.handle(un.Claimed(message.peer, message.units), self.stage.now)
        elif isinstance(message, fm.Heads):
            mine = desk.heard.setdefault(sender, {})
            mine.update((row.fragment, row.version) for row in message.rows)

    def _act(self, sim: SimPeer, actions: list[un.Action]) -> None:
        for action in actions:
            if isinstance(action, un.Claim):
                self.claims += 1
                sim.story.append((self.stage.now, "units ->", action))
                self.stage.broadcast(sim, fm.Claims(tuple(action.units[: fm.CLAIMS_MAX])))
            else:
                self.takeovers += len(action.units)

    # -- looking at it ---------------------------------------------------------------------------

    def twice(self) -> int:
        """Sequences that were trained more than once, each further time counted."""
        return sum(times - 1 for times in self.trained.values())

    def unlisted(
        self,
        listed: set[Sequence],
        since: float,
        liars: Collection[PeerId] = (),
        intervals: float = LISTED_INTERVALS,
    ) -> list[str]:
        """Whose work is not listed long after all healed (``since``), when the heads list
        ``listed``: what live learners did more than ``intervals`` ago (of ``liars``, whose pieces
        nobody credits, none is asked)."""
        stage = self.stage
        until = stage.now - intervals * stage.settings.interval_s
        lost: Counter[int] = Counter()
        for at, peer, born, key in self.done:
            sim = stage.peers[peer]
            if peer in liars:
                continue
            begin = max(since, stage.disturbed.get(peer, 0.0))
            if begin <= at <= until and sim.alive and sim.born == born and key not in listed:
                lost[sim.number] += 1
        return [f"{n} sequences that peer {who} trained are not listed" for who, n in lost.items()]

    def still_open(
        self, units: list[tuple[int, int]], listed: set[Sequence]
    ) -> list[tuple[int, int]]:
        """Those of the units of which not all is listed."""
        return [
            unit
            for unit in units
            if any((*unit, place) not in listed for place in range(self.plan.size_of(*unit)))
        ]

    def oldest_open(self, listed: set[Sequence], count: int) -> list[tuple[int, int]]:
        """The first ``count`` units that are not listed in full."""
        found: list[tuple[int, int]] = []
        position = 0
        while len(found) < count:
            found += self.still_open([self.plan.unit(position)], listed)
            position += 1
        return found
