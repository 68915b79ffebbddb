"""What befalls simulated peers and the links between them, as it befalls volunteers' machines.

:class:`Fates` adds to :class:`dugnad.simulation.world.World` disks with heads and anchors, deaths
told or silent, splits of every kind, ends of streams that are false, hangs and closed lids, planned
leaves, peers behind NAT, wrong clocks, keys used twice. With ``settings.roster`` each peer finds
out by its own roster who is there; without, it is told a moment later.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Final

from dugnad.averaging import events as ev
from dugnad.averaging import formats as fm
from dugnad.averaging.history import History
from dugnad.averaging.worker import FragmentWorker
from dugnad.dht.ids import PeerId
from dugnad.simulation.membership import Membership
from dugnad.simulation.people import Disk, SimFragment, SimPeer, peer_of
from dugnad.simulation.relay import Relay, spreads
from dugnad.simulation.settings import WorldSettings
from dugnad.simulation.workplace import Workplace
from dugnad.simulation.world import World

SUSPECT_S: Final = 10.0
"""Silence after which the others count a frozen peer as lost (the roster's suspicion time)."""
LEAVE_S: Final = 10.0
"""A leaving peer waits at most this long for its work to be in other hands."""
RENEW_S: Final = 1.0
"""For a new libp2p daemon to listen on the old port."""

Pair = tuple[PeerId, PeerId]


class Fates(World):
    """The world of the things that happen."""

    def __init__(self, settings: WorldSettings) -> None:
        super().__init__(settings)
        self.walls: dict[int, set[Pair]] = {}
        """Splits in force: number -> the directions they cut. 0 are links that never are."""
        self.skew: dict[int, float] = {}
        self.snapshots: dict[PeerId, Disk] = {}
        self.started: dict[tuple[PeerId, int], float] = {}
        self.disturbed: dict[PeerId, float] = {}
        """Peer -> when something last befell it: from then on it has time to be useful again."""
        self.timeline: list[tuple[float, str]] = []
        self._cuts = 0
        self._quietly = False
        self._substrates: dict[PeerId, int] = {}
        """Peers whose libp2p daemon is dead -> the cut that stands for it."""
        self.members = Membership(self) if settings.roster else None
        self.work = Workplace(self) if settings.units else None
        self.relay = Relay(self)

    def say(self, text: str) -> None:
        """Remember what was done to the swarm."""
        self.timeline.append((self.now, text))

    # -- lives -----------------------------------------------------------------------------------

    def add(self, number: int, *, step_s: float | None = None, disk: Disk | None = None) -> SimPeer:
        """Start a peer; what its disk holds it goes on from."""
        peer = peer_of(number)
        for other in self.peers.values():
            if number in self.outbound and other.number in self.outbound and other.peer != peer:
                self.walls.setdefault(0, set()).update({(peer, other.peer), (other.peer, peer)})
        self._block()
        sim = super().add(number, step_s=step_s, disk=disk)
        self.started[(peer, sim.born)] = self.disturbed[peer] = self.now
        self._enter(sim)
        for p, (digest, record, payload) in sorted(sim.disk.promises.items()):
            fragment = sim.fragments[p]
            if record.header.parent == fragment.head:  # it died before it could announce this
                fragment.worker.advance(digest, record.header, payload)
                self._tell(sim, p, ev.Signed(record, digest))
        return sim

    def _enter(self, sim: SimPeer) -> None:
        """A peer that started looks for the others."""
        if self.members is not None:
            self.members.born(sim)

    def _fragment(self, sim: SimPeer, p: int) -> SimFragment:
        made = super()._fragment(sim, p)
        if p in sim.disk.heads:
            point, digest, anchor = sim.disk.heads[p]
            made.core.resume(point, digest, self._past(digest))
            made.worker = FragmentWorker.start(made.worker.rules, sim.peer, digest, anchor)
            made.theta, made.head = anchor.theta.copy(), digest
        return made

    def _past(self, digest: bytes) -> History:
        """What a peer's store has of the versions below a head that it adopted."""
        found: list[tuple[bytes, fm.CommitRecord]] = []
        while (record := self.checks.commits.get(digest)) is not None:
            found.append((digest, record))
            digest = record.header.parent
        return History(tuple(found[::-1]))

    def restart_all(self) -> None:
        """Start everybody again whose disk is there."""
        for sim in sorted(self.peers.values(), key=lambda one: one.number):
            if not sim.alive:
                self.restart(sim.peer)

    def leave(self, peer: PeerId) -> None:
        """A planned leave: hand over, wait until it is done, go."""
        sim = self.peers[peer]
        born, end = sim.born, self.now + LEAVE_S
        for p in range(self.settings.fragments):
            self._tell(sim, p, ev.LeaveNow())

        def gone() -> None:
            if not sim.alive or self.peers[peer].born != born:
                return
            if self.now >= end or all(f.core.left() for f in sim.fragments):
                if self.members is not None:
                    self.members.left(sim)
                self.kill(peer)
            else:
                self.later(0.5, gone)

        self.later(0.5, gone)

    def kill(self, peer: PeerId, *, quietly: bool = False) -> None:
        """Kill -9; ``quietly``: the machine goes with it, and nothing tells the others."""
        self._quietly = quietly
        super().kill(peer)

    def _died(self, sim: SimPeer) -> None:
        if self.members is not None:
            self.members.died(sim, quietly=self._quietly)
        elif self._quietly:
            self.later(SUSPECT_S, partial(World._died, self, sim))
        else:
            super()._died(sim)

    def freeze(self, peer: PeerId, seconds: float, *, asleep: bool = False) -> None:
        """Stop a machine; the others may lose it by its silence, and meet it again. ``asleep``: a
        closed lid, which stops its timers, too."""
        sim = self.peers[peer]
        if asleep and sim.asleep_since is None:
            sim.asleep_since = self.now
        super().freeze(peer, seconds)
        self.disturbed[peer] = sim.frozen_until
        if self.members is not None:
            self.members.froze(sim, asleep=asleep)
        elif seconds > SUSPECT_S:
            self.later(SUSPECT_S, partial(self._fell_silent, sim, sim.frozen_until))
            self.later(sim.frozen_until - self.now, partial(self._woke, sim, sim.frozen_until))

    def _fell_silent(self, sim: SimPeer, until: float) -> None:
        if self._still(sim, until):
            for other in self.alive():
                self.down(other, sim.peer)

    def _woke(self, sim: SimPeer, until: float) -> None:
        if self._still(sim, until):
            for other in self.alive():
                if other is not sim:
                    self._meet(sim, other)

    def _still(self, sim: SimPeer, until: float) -> bool:
        """Whether this is the same life and the same sleep."""
        return self.peers[sim.peer] is sim and sim.alive and sim.frozen_until == until

    def restore(self, peer: PeerId) -> None:
        """Put an old snapshot of a peer's disk back and start it from that."""
        if peer in self.snapshots:
            self.kill(peer)
            old = self.peers[peer]
            self.add(old.number, step_s=old.step_s, disk=self.snapshots[peer].copy())

    # -- links -----------------------------------------------------------------------------------

    def _block(self) -> None:
        self.net.blocked = set().union(*self.walls.values())

    def apart(self, a: PeerId, b: PeerId) -> bool:
        """Whether no stream can be between two peers."""
        return self.net.is_cut(a, b) or self.net.is_cut(b, a)

    def part(
        self, left: Iterable[PeerId], right: Iterable[PeerId], *, one_way: bool = False
    ) -> int:
        """Cut all links from ``left`` to ``right``, and back unless ``one_way``; the cut's number.

        A connection needs both directions, so that both sides lose each other either way (with
        rosters: by silence); what was under way in the open direction still arrives.
        """
        self._cuts += 1
        rights = sorted(right)
        pairs = {(a, b) for a in left for b in rights if a != b}
        self.walls[self._cuts] = pairs | (set() if one_way else {(b, a) for a, b in pairs})
        self._block()
        for a, b in sorted(pairs):
            for one, two in ((a, b), (b, a)):
                sim = self.peers.get(one)
                if sim is not None and sim.alive and two in sim.live:
                    self.disturbed[one] = self.now
                    if self.members is None:
                        self.later(self.net.noticed(two, one), partial(self._lost, sim, two))
        return self._cuts

    def join(self, number: int) -> None:
        """Mend one cut; who was apart by it meets again."""
        pairs = self.walls.pop(number, set())
        self._block()
        for a, b in sorted({(min(pair), max(pair)) for pair in pairs}):
            one, two = self.peers.get(a), self.peers.get(b)
            if one is not None and two is not None and one.alive and two.alive:
                self.disturbed[a] = self.disturbed[b] = self.now
                self._meet(one, two)
        if self.members is not None:
            self.members.mended(pairs)

    def mend(self) -> None:
        """End everything that was done to the network, but not deaths."""
        for number in sorted(self.walls):
            if number:
                self.join(number)

    def _meet(self, a: SimPeer, b: SimPeer) -> None:
        if self.members is None and not self.apart(a.peer, b.peer):
            super()._meet(a, b)

    def _lost(self, sim: SimPeer, peer: PeerId) -> None:
        if self.apart(sim.peer, peer):
            self.down(sim, peer)

    def down(self, sim: SimPeer, peer: PeerId) -> None:
        """A peer loses another from its sight."""
        if sim.alive and peer in sim.live:
            sim.live.discard(peer)
            self.tell_all(sim, ev.PeerDown(peer))
            if self.work is not None:
                self.work.down(sim, peer)

    def tell_all(self, sim: SimPeer, event: ev.Event) -> None:
        """Feed all cores of a peer."""
        for p in range(self.settings.fragments):
            self._tell(sim, p, event)

    def false_end(self, peer: PeerId, seen_by: Iterable[PeerId], seconds: float) -> None:
        """Streams of some with a peer that lives end, and for ``seconds`` none can be opened."""
        if self.members is not None:
            others = [one for one in sorted(seen_by) if one != peer]
            self.members.broken(self.peers[peer], others, shy_s=seconds)
            return
        for one in sorted(seen_by):
            sim = self.peers[one]
            if one != peer and peer in sim.live:
                self.down(sim, peer)
                self.later(seconds, partial(self._again, sim, peer))

    def _again(self, sim: SimPeer, peer: PeerId) -> None:
        other = self.peers[peer]
        if sim.alive and other.alive and not self.apart(sim.peer, peer):
            self._up(sim, other)()

    # -- the machine's libp2p daemon -------------------------------------------------------------

    def lose_substrate(self, peer: PeerId, seconds: float) -> None:
        """A peer's own libp2p daemon dies: all its streams end at once, and nothing can be sent
        until a new one is up, at its roster's word or after ``seconds``."""
        others = [one.peer for one in self.alive() if one.peer != peer]
        if self.members is not None:
            self.members.broken(self.peers[peer], others)
        number = self._substrates[peer] = self.part([peer], others)
        self.later(seconds, partial(self._renewed, peer, number))

    def renew_substrate(self, sim: SimPeer) -> None:
        """The peer starts its libp2p daemon anew."""
        if sim.peer in self._substrates:
            self.later(RENEW_S, partial(self._renewed, sim.peer, self._substrates[sim.peer]))

    def _renewed(self, peer: PeerId, number: int) -> None:
        if self._substrates.get(peer) == number:
            del self._substrates[peer]
            self.join(number)

    # -- messages --------------------------------------------------------------------------------

    def near(self, sim: SimPeer) -> list[PeerId]:
        """To whom a peer tells what all should hear: in a crowd its neighbours."""
        return super().near(sim) if self.members is None else self.members.near(sim)

    def far(self, sim: SimPeer, peer: PeerId) -> bool:
        """Whether a peer of a crowd has no stream with another one."""
        members = self.members
        return members is not None and members.crowded(sim) and peer not in members.near(sim)

    def _reaches(self, a: PeerId, b: PeerId) -> bool:
        """Who takes no connections is reached only by its neighbours."""
        if not super()._reaches(a, b):
            return False
        return self.peers[b].number not in self.outbound or not self.far(self.peers[a], b)

    def _broadcast(self, sim: SimPeer, message: fm.Message, p: int) -> None:
        if self.members is not None and self.members.crowded(sim):
            message = self.relay.begin(sim, message)
        super()._broadcast(sim, message, p)

    def send_one(self, sim: SimPeer, to: PeerId, message: fm.Message, p: int) -> None:
        """Send a message to one peer."""
        self._send(sim, to, message, p)

    def _send(self, sim: SimPeer, to: PeerId, message: fm.Message, p: int) -> None:
        if isinstance(message, fm.Heads) and message.reply and self.far(sim, to):
            return  # heads are compared with neighbours
        if self.members is None or to in sim.live:
            super()._send(sim, to, message, p)

    def _deliver(self, sender: PeerId, to: PeerId, message: fm.Message, p: int) -> None:
        if self.members is None or self.members.admits(sender, to, message, p):
            self.read(sender, to, message, p)

    def read(self, sender: PeerId, to: PeerId, message: fm.Message, p: int) -> None:
        """A message is taken up by its receiver."""
        sim = self.peers[to]
        crowded = self.members is not None and self.members.crowded(sim)
        if crowded and spreads(message) and not self.net.is_cut(sender, to):
            self.relay.read(sender, to, message, p)
        else:
            self.take(sender, sim, message, p)

    def take(self, sender: PeerId, sim: SimPeer, message: fm.Message, p: int) -> None:
        """Give a message to the cores that it concerns."""
        to = sim.peer
        if self.work is not None and sim.alive and not self.net.is_cut(sender, to):
            wait = max(0.0, sim.frozen_until - self.now)
            self.later(wait, partial(self.work.message, sim, sender, message))
        super()._deliver(sender, to, message, p)

    def broadcast(self, sim: SimPeer, message: fm.Message) -> None:
        """Send a message to all that a peer counts as live."""
        self._broadcast(sim, message, 0)

    def note(self, text: str) -> None:
        """Take a line into the digest."""
        self.trace.update(text.encode() + b"\n")
