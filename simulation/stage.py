"""A world in which everything can happen to peers that happens to volunteers' machines.

:class:`Stage` adds to :class:`dugnad.simulation.world.World` what scenarios need: disks with heads
and anchors, splits of every kind, ends of streams that are false, long freezes that the others
notice, planned leaves, peers behind NAT, wrong clocks, lies; and the counts of a report. The cores
are untouched: whatever is wrong here is wrong in the daemon, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from dugnad.averaging import events as ev
from dugnad.averaging import formats as fm
from dugnad.averaging.home import INBOX_MAX, PROMISES_MAX
from dugnad.averaging.linkrate import Delivery
from dugnad.averaging.pruning import NODES_MAX
from dugnad.averaging.view import HOLDERS_DIGESTS_MAX
from dugnad.averaging.worker import WorkError
from dugnad.dht.ids import PeerId
from dugnad.dht.records import encode
from dugnad.simulation.checks import Violation
from dugnad.simulation.credits import Credits
from dugnad.simulation.fates import Fates
from dugnad.simulation.ledger import Ledger
from dugnad.simulation.linkchoice import AUTO, LinkChoices
from dugnad.simulation.people import SimFragment, SimPeer
from dugnad.simulation.settings import RUN, UNIT_SEQUENCES, WALL_START_S, WorldSettings
from dugnad.simulation.story import told
from dugnad.simulation.transfers import Piece, Transfers, hash_of

SAMPLE_S: Final = 1.0
"""Virtual seconds between two points of the plot."""
HANG_S: Final = 0.5
"""How often a merge that hangs looks whether its peer still idles."""
SLACK: Final = 64
"""Entries that a table may have above its bound between being filled and being pruned: one
message's worth of commits."""


@dataclass(slots=True)
class Trap:
    """Something that happens at one of the next moments of a kind, to whom the moment belongs."""

    kind: str
    strike: Callable[[SimPeer], None]
    times: int = 1
    skip: int = 0
    reach: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One point of the plot: commits and steps of fragment 0."""

    at_s: float
    alive: int
    merges: int
    listed: int
    made: int


class Stage(Fates):
    """The world of the scenarios."""

    def __init__(self, settings: WorldSettings) -> None:
        super().__init__(settings)
        self.ledger = self.checks = Ledger(settings.size, settings.horizon)
        self.credits = Credits(self.ledger, settings.fragments, settings.horizon)
        self.traps: list[Trap] = []
        self.claims: dict[PeerId, float] = {}
        self.until: dict[tuple[str, PeerId], float] = {}
        """(what, peer) -> when it stops: 'idle', 'withhold' and 'miss'."""
        self.first_listed: dict[tuple[PeerId, int], float] = {}
        self.donors: dict[PeerId, int] = {}
        """Who served whole anchors, or pieces of them, and how often."""
        self.transfers = Transfers(self)
        self.links = LinkChoices(self) if settings.codec == AUTO else None
        self.made = 0
        """Steps of all peers, each counted once per fragment."""
        self.acked: dict[bytes, set[PeerId]] = {}
        """Digest -> who said that it holds the payload and computed the same roots."""
        self.bytes = 0
        self.samples: list[Sample] = []
        self._weighed: tuple[fm.Message | None, int] = (None, 0)
        self.later(SAMPLE_S, self._sample)

    def _enter(self, sim: SimPeer) -> None:
        if self.work is not None:
            heads = {p: digest for p, (_, digest, _) in sim.disk.heads.items()}
            self.work.born(sim, self.credits.begin(sim, heads))
        super()._enter(sim)

    # -- moments ---------------------------------------------------------------------------------

    def _moment(self, kind: str, sim: SimPeer, *, at_once: bool = False) -> None:
        for trap in [one for one in self.traps if one.kind == kind]:
            if trap.skip:
                trap.skip -= 1
                continue
            trap.times -= 1
            if trap.times < 1:
                self.traps.remove(trap)
            if at_once:
                trap.strike(sim)
            else:  # after the other actions of this event
                self.later(0.0, partial(_strike, trap, sim))

    def _is(self, what: str, peer: PeerId) -> bool:
        return self.until.get((what, peer), 0.0) > self.now

    def _tell(self, sim: SimPeer, p: int, event: ev.Event) -> None:
        if isinstance(event, ev.Pace):
            offset = self.members.offset(sim) if self.members is not None else 0.0
            wall = WALL_START_S + self.skew.get(sim.number, 0.0) + offset
            event = ev.Pace(event.interval_s, wall)
        try:
            super()._tell(sim, p, event)
            fault = self._overfull(sim.fragments[p])
            if fault:
                raise Violation(f"{fault} of peer {sim.number} is over its bound")
        except Violation as violation:
            if "\nseed " in str(violation):
                raise
            story = told(sim.number, sim.story)
            raise Violation(f"{violation}\nseed {self.settings.seed}, story:\n{story}") from None

    def _overfull(self, fragment: SimFragment) -> str:
        view, home = fragment.core.view, fragment.core.home
        sizes = (
            ("the inbox", len(home.inbox), INBOX_MAX),
            ("the list of refusals", len(home.refused), INBOX_MAX),
            ("the lineage", len(view.lineage.nodes), NODES_MAX + SLACK),
            ("the list of promises", len(view.promised), PROMISES_MAX + SLACK),
            ("the list of holders", len(view.holders), HOLDERS_DIGESTS_MAX),
        )
        return next((what for what, size, bound in sizes if size > bound), "")

    def _do(self, sim: SimPeer, p: int, action: ev.Action) -> None:
        match action:
            case ev.Merge() | ev.Join() if self._is("idle", sim.peer):
                self._hang(sim, p, action)
                return
        super()._do(sim, p, action)
        if self.links is not None and isinstance(action, ev.Adopt | ev.Settle):
            self.links.became(sim, p, action)
        match action:
            case ev.Merge() | ev.Join():
                self._moment("merge", sim)
            case ev.Sign():
                self._moment("sign", sim)
            case ev.Broadcast(fm.Announce()):
                self._moment("commit", sim)
            case ev.Obtain() if action.whole:
                self._moment("join", sim)
            case ev.Acknowledge(_, digest):
                self.acked.setdefault(digest, set()).add(sim.peer)
            case ev.Adopt(digest):
                self._check_witness(sim, p, digest)
                for change in self.credits.adopted(sim, p, action):
                    if self.work is not None:
                        self.work.changed(sim, change)
                if self.work is not None and not p:
                    self.work.participants(sim)
                point = sim.fragments[p].core.view.lineage.checkpoint(sim.fragments[p].core.head)
                if point is not None:
                    anchor = sim.fragments[p].worker.states[digest]
                    sim.disk.heads[p] = (point, digest, anchor)

    def _hang(self, sim: SimPeer, p: int, action: ev.Merge | ev.Join) -> None:
        """A merge hangs as long as its peer idles, and fails then."""
        if self._is("idle", sim.peer):
            self.later(HANG_S, partial(self._hang, sim, p, action))
        elif self.peers[sim.peer] is sim:
            other = action.other if isinstance(action, ev.Join) else fm.NO_DIGEST
            failed = ev.Merged(action.parent, (), "", b"", 0, b"", b"", other=other)
            self._tell(sim, p, failed)

    def _check_witness(self, sim: SimPeer, p: int, digest: bytes) -> None:
        """Nobody takes a head that only its home holds, unless no other member is there to ask."""
        node = sim.fragments[p].core.head
        home = self.ledger.commits[digest].header.home
        others = {PeerId(row.peer) for row in node.members if row.peer != home}
        asked = others & set(sim.fragments[p].core.view.live)  # who is gone may not be known yet
        if sim.peer != home or not asked or others & self.acked.get(digest, set()):
            return
        if not any(digest in self.peers[one].fragments[p].worker.states for one in others):
            raise Violation(f"peer {sim.number} took its own version {node.version} unwitnessed")

    def _hand_in(self, sim: SimPeer, p: int, action: ev.HandIn) -> None:
        if self.links is not None:
            codec, worker = self.links.hand_in(sim, p), sim.fragments[p].worker
            if codec is None:
                self._answer(sim, p, ev.HandedIn(action.seq, None, ()))
                return
            worker.rules = replace(worker.rules, hand_in_codec=codec)
        super()._hand_in(sim, p, action)

    def commit_codec(self, sim: SimPeer, p: int) -> str:
        """As in the world, or what the links allow."""
        return self.links.commit(sim, p) if self.links is not None else ""

    def give_back(self, sim: SimPeer, p: int, seq: int, share: float) -> tuple[fm.UnitPiece, ...]:
        """As in the world; the units core is told what came back."""
        back = super().give_back(sim, p, seq, share)
        if back and self.work is not None:
            self.work.returned(sim, back)
        return back

    def _sign(self, sim: SimPeer, p: int, header: fm.Header, inputs: tuple[fm.Input, ...]) -> None:
        super()._sign(sim, p, header, inputs)
        digest = fm.header_digest(header, RUN)
        if digest in self.ledger.commits:
            payload = sim.fragments[p].worker.commits[digest].payload
            sim.disk.promises[p] = (digest, self.ledger.commits[digest], payload)
        for maker, _ in self.ledger.listed_now:
            life = (PeerId(maker), self.peers[PeerId(maker)].born)
            self.first_listed.setdefault(life, self.now)
        self.ledger.listed_now.clear()

    def _piece(self, sim: SimPeer) -> fm.UnitPiece | None:
        piece = self.credits.piece() if self.work is None else self.work.step(sim)
        if piece is None:
            return None
        self.made += self.settings.fragments
        claimed = int(self.claims.get(sim.peer, 1.0))
        if claimed > 1:  # more sequences than a unit has
            stop = piece.start + claimed + UNIT_SEQUENCES
            piece = fm.UnitPiece(piece.epoch, piece.index, piece.start, stop)
        return piece

    # -- messages --------------------------------------------------------------------------------

    def mend(self) -> None:
        """End everything that was done to the network and to peers, but not their deaths."""
        self.traps.clear()
        self.until.clear()
        super().mend()

    def _broadcast(self, sim: SimPeer, message: fm.Message, p: int) -> None:
        reach = min((one.reach for one in self.traps if one.reach and not one.skip), default=0)
        if reach and isinstance(message, fm.Announce) and message.commit.header.home == sim.peer:
            for peer in self.near(sim)[:reach]:
                self._send(sim, peer, message, p)
            return
        super()._broadcast(sim, message, p)

    def _send(self, sim: SimPeer, to: PeerId, message: fm.Message, p: int) -> None:
        if self._weighed[0] is not message:
            self._weighed = (message, len(encode(message)))
        self.bytes += self._weighed[1]
        odd = isinstance(message, fm.Announce) and message.commit.header.version % 2
        if not (odd and self._is("miss", to)):
            self.net.weigh(self._weighed[1])
            super()._send(sim, to, message, p)
            self.net.weigh(0)  # it may have been lost on the way out

    def _send_contribution(self, sim: SimPeer, p: int, seq: int, to: PeerId) -> None:
        size = len(sim.fragments[p].worker.inbox[(sim.peer, seq)].payload)
        self.bytes += size
        self.net.weigh(size)
        self.net.line_s = 0.0
        super()._send_contribution(sim, p, seq, to)
        self.net.weigh(0)
        if self.links is not None:
            took = Delivery(size, self.net.line_s)
            self.links.sent(sim, p, ev.SendContribution(seq, to), took)

    def _forward(self, sim: SimPeer, p: int, key: ev.Key, to: PeerId) -> None:
        """As in the world; a maker refuses its own, and the daemon's forwarding ends there."""
        if key[0] != to:
            size = len(sim.fragments[p].worker.inbox[key].payload)
            self.bytes += size
            self.net.weigh(size)
            super()._forward(sim, p, key, to)
            self.net.weigh(0)

    def _obtain(self, sim: SimPeer, p: int, action: ev.Obtain) -> None:
        """What is fetched goes through its donor's uplink; whole anchors come in pieces."""
        if action.whole and self.settings.pieces:
            self.transfers.begin(sim, p, action)
            return
        self.net.weigh(8 * self.settings.size if action.whole else action.header.payload_bytes)
        super()._obtain(sim, p, action)
        self.net.weigh(0)

    def _fetch(self, sim: SimPeer, p: int, action: ev.Obtain, source: PeerId) -> None:
        donor = self.peers[source]
        if action.whole:
            self._moment("donate", donor, at_once=True)
        if self._is("withhold", source) or not donor.alive:
            raise WorkError("the source went away in the middle")
        if self._is("corrupt", source):
            raise WorkError("a piece does not have its hash")
        super()._fetch(sim, p, action, source)
        if action.whole:
            self.donors[source] = self.donors.get(source, 0) + 1
            self.bytes += 8 * self.settings.size
        else:
            self.bytes += action.header.payload_bytes
            if source == action.header.home:
                self._moment("fetch", donor)

    def serve(self, donor: PeerId, p: int, action: ev.Obtain, part: range) -> tuple[Piece, bytes]:
        """A piece of whole anchors as a donor sends it, and its hash as the root proves it.
        WorkError: nothing comes."""
        sim = self.peers[donor]
        self._moment("donate", sim, at_once=True)
        state = sim.fragments[p].worker.states.get(action.digest)
        if state is None or not sim.alive or self._is("withhold", donor):
            raise WorkError("the source has not got these anchors")
        cut = slice(part.start, part.stop)
        piece = (state.theta[cut], state.momentum[cut])
        digest = hash_of(piece)
        if self._is("corrupt", donor):
            self.transfers.lies[donor] = self.transfers.lies.get(donor, 0) + 1
            piece = (piece[0] + np.float32(1.0), piece[1])
        return piece, digest

    def silent(self, donor: PeerId, to: PeerId) -> bool:
        """Whether nothing comes from a peer now."""
        return not self._reaches(to, donor) or self.now < self.peers[donor].frozen_until

    def tell(self, sim: SimPeer, p: int, event: ev.Event) -> None:
        """Feed one core of a peer."""
        self._tell(sim, p, event)

    # -- counting --------------------------------------------------------------------------------

    def best(self, p: int) -> bytes:
        """The head that most live peers have; of equals the lowest digest."""
        heads = [sim.fragments[p].core.head.digest for sim in self.alive()]
        return max(sorted(set(heads)), key=heads.count)

    def pending(self, p: int) -> int:
        """Steps that live peers hold and that nothing has become of yet."""
        listed = self.ledger.listed.get(self.best(p), {})
        return sum(self.ledger.pending(sim, p, listed) for sim in self.alive())

    def _sample(self) -> None:
        if self.alive():
            listed = self.ledger.listed_steps.get(self.best(0), 0)
            made = self.made // self.settings.fragments
            merges = len(self.merged_at[0])
            self.samples.append(Sample(self.now, len(self.alive()), merges, listed, made))
        self.later(SAMPLE_S, self._sample)


def _strike(trap: Trap, sim: SimPeer) -> None:
    if sim.alive:
        trap.strike(sim)
