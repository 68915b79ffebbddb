"""Who is there, as each simulated peer's own roster finds out: the roster cores of one stage.

Control messages travel the simulated links, in order, with their loss as waiting for what is sent
again. A death is known by the end of streams or by silence, and both may deceive. What a roster
says goes to the peer's exchange cores as the daemon passes it on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from dugnad.averaging import events as ev
from dugnad.averaging import formats as fm
from dugnad.averaging.speed import speed_class
from dugnad.dht import roster_events as ro
from dugnad.dht.ids import PeerId
from dugnad.dht.messages import Ping, Pong
from dugnad.dht.roster import Roster, RosterConfig
from dugnad.simulation.people import SimPeer, SimSigner, peer_of, seal
from dugnad.simulation.rosters import Daemon, Rosters, Said, advert_of
from dugnad.simulation.settings import RUN, SEQUENCE_TOKENS, WALL_START_S

if TYPE_CHECKING:
    from dugnad.simulation.fates import Fates

LINK_NAMES: Final = 4
"""Peers that a newcomer's link names; as many of its remembered ones as it finds."""
RESENT_S: Final = 0.25
"""A lost packet of a stream is sent again after this and a round trip; then after twice as long."""
RESENT_MAX: Final = 5
STRANGER_S: Final = 5.0
"""A message from a peer that is not up yet waits so long (`peer.messenger.STRANGER_S`)."""
HELD_MAX: Final = 64
"""Messages of one stranger that wait; the daemon leaves them unread in the stream."""
DOUBLES_FROM: Final = 1_000_000
"""Numbers of second machines that use somebody's key."""
SOFTWARE: Final = "simulated"


class Membership:
    """The daemons of one world's peers."""

    def __init__(self, stage: Fates) -> None:
        self.stage = stage
        self.rosters = Rosters(stage, self, self, stage.rng("rosters"), WALL_START_S)
        self.seeds: tuple[int, ...] = ()
        """Numbers that every link names."""
        self.jumps: Counter[PeerId] = Counter()
        """How often a peer's roster said that its clock jumped."""
        self.turned_away: dict[int, float] = {}
        """Second machines with somebody's key -> when they were told."""
        self.detected: list[float] = []
        """Seconds from each death to each live peer's learning of it."""
        self.died_at: dict[PeerId, float] = {}
        self._sims: dict[int, SimPeer] = {}
        self._offsets: dict[PeerId, float] = {}
        self._apart: set[tuple[PeerId, PeerId]] = set()
        self._held: dict[tuple[PeerId, PeerId], list[tuple[float, fm.Message, int]]] = {}

    # -- lives -----------------------------------------------------------------------------------

    def born(self, sim: SimPeer) -> None:
        """A peer's daemon starts, and is told where others are."""
        self._sims[sim.number] = sim
        self._offsets.pop(sim.peer, None)
        self.died_at.pop(sim.peer, None)
        daemon = self._start(sim.number, sim)
        self.rosters.introduce(daemon, self._named(sim), "a link")

    def double(self, sim: SimPeer) -> int:
        """A second machine starts with a copy of a peer's key; its number."""
        machine = DOUBLES_FROM + sim.number
        while machine in self.rosters.daemons:
            machine += DOUBLES_FROM
        daemon = self._start(machine, sim)
        others = [(one.peer, one.number) for one in self.stage.alive() if one is not sim]
        self.rosters.introduce(daemon, others, "a link")
        return machine

    def _start(self, machine: int, sim: SimPeer) -> Daemon:
        stage = self.stage
        rng = stage.rng("roster", machine, sim.born)
        skew_s = stage.skew.get(sim.number, 0.0)
        outbound = sim.number in stage.outbound
        advert = advert_of(
            sim.peer,
            machine,
            boot=rng.getrandbits(60) | 1,
            at_ms=round((WALL_START_S + stage.now + skew_s) * 1000),
            reachable="outbound" if outbound else "direct",
            can_home=not outbound,
            dialable=not outbound,
            tokens_per_s=SEQUENCE_TOKENS / sim.step_s,
            speed_class=speed_class(SEQUENCE_TOKENS / sim.step_s, None),
        )
        settings = stage.settings
        config = RosterConfig(RUN, SOFTWARE, mesh_max=settings.mesh_max, links=settings.links)
        roster = Roster(config, SimSigner(sim.peer), advert, rng, _sealed)
        daemon = Daemon(machine, sim.peer, roster, not outbound, skew_s, born_s=stage.now)
        self.rosters.start(daemon)
        return daemon

    def _named(self, sim: SimPeer) -> list[tuple[PeerId, int]]:
        """Whom a new daemon hears of: its memory, the swarm's link, and some that live."""
        stage = self.stage
        rng = stage.rng("link", sim.number, sim.born)
        others = [one for one in stage.alive() if one is not sim]
        near = [one for one in others if not stage.apart(sim.peer, one.peer)]
        far = [one for one in others if one not in near]
        chosen = rng.sample(near, min(LINK_NAMES, len(near)))
        chosen += rng.sample(far, min(LINK_NAMES, len(far)))
        named = dict(sim.disk.known)
        named.update((peer_of(number), number) for number in self.seeds)
        named.update((one.peer, one.number) for one in chosen)
        return sorted(named.items())

    def died(self, sim: SimPeer, *, quietly: bool) -> None:
        """The peer's daemon is gone."""
        self.died_at[sim.peer] = self.stage.now
        self.rosters.stop(self._daemon(sim), quietly=quietly)

    def left(self, sim: SimPeer) -> None:
        """The peer says good-bye."""
        self.rosters.feed(self._daemon(sim), ro.LeaveNow())

    def froze(self, sim: SimPeer, *, asleep: bool) -> None:
        """The peer stands still until ``sim.frozen_until``."""
        self.rosters.freeze(self._daemon(sim), sim.frozen_until, asleep=asleep)

    def _daemon(self, sim: SimPeer) -> Daemon:
        return self.rosters.daemons[sim.number]

    # -- links -----------------------------------------------------------------------------------

    def broken(self, sim: SimPeer, others: Iterable[PeerId], *, shy_s: float = 0.0) -> None:
        """Streams with these peers end, and for ``shy_s`` none can be opened."""
        machines = [self.stage.peers[one].number for one in others]
        self.rosters.break_streams(self._daemon(sim), machines, shy_s=shy_s)

    def mended(self, pairs: Iterable[tuple[PeerId, PeerId]]) -> None:
        """These ways are open again; until the two meet, both count as disturbed."""
        self._apart.update(pairs)
        self.rosters.mended()

    def trip(self, source: Daemon, target: Daemon, size: int) -> float:
        """The way of one message, with what of it had to be sent again."""
        net, weather = self.stage.net, self.stage.settings.weather
        link = net.control(source.peer, target.peer)
        again, wait = 0.0, RESENT_S
        for _ in range(RESENT_MAX):
            if not weather.loss or link.random() >= weather.loss:
                break
            again, wait = again + wait, 2 * wait
        net.weigh(size)
        return again + net.latency(link)

    def is_cut(self, source: Daemon, target: Daemon) -> bool:
        """Whether nothing passes this way."""
        return self.stage.net.is_cut(source.peer, target.peer)

    def crowded(self, sim: SimPeer) -> bool:
        """Whether a peer takes the swarm for a crowd."""
        return self._daemon(sim).roster.crowded

    def near(self, sim: SimPeer) -> list[PeerId]:
        """To whom a peer tells what all should hear: all, or in a crowd its neighbours."""
        roster = self._daemon(sim).roster
        found = roster.neighbours() if roster.crowded else sim.live
        return sorted(sim.live.intersection(found))

    def admits(self, sender: PeerId, to: PeerId, message: fm.Message, p: int) -> bool:
        """Whether a message is read now; one from a peer that is not up waits a little."""
        if sender in self.stage.peers[to].live:
            return True
        held = self._held.setdefault((to, sender), [])
        if len(held) < HELD_MAX:
            held.append((self.stage.now, message, p))
        return False

    # -- what rosters hear and say ---------------------------------------------------------------

    def heard(self, daemon: Daemon, event: ro.Event) -> None:
        """Count and write down what goes into a roster."""
        stage = self.stage
        stage.events += 1
        stage.note(f"{stage.now:.6f} {daemon.machine} {type(event).__name__}")
        sim = self._sims.get(daemon.machine)
        routine = isinstance(event, ro.MessageIn) and isinstance(event.message, Ping | Pong)
        if sim is not None and not routine and not isinstance(event, ro.Timer):
            what = event.message if isinstance(event, ro.MessageIn) else event
            sim.story.append((stage.now, "roster <-", what))

    def said(self, daemon: Daemon, action: Said) -> None:
        """As the daemon does with what its roster says."""
        sim = self._sims.get(daemon.machine)
        if isinstance(action, ro.DuplicateIdentity) and action.peer == daemon.peer:
            self._double(daemon, sim)
        if sim is None:
            return
        stage = self.stage
        sim.story.append((stage.now, "roster ->", action))
        match action:
            case ro.PeerUp(peer, advert):
                self._up(sim, peer, can_home=advert.can_home)
            case ro.PeerLost(peer) | ro.PeerLeft(peer):
                if peer in self.died_at:
                    self.detected.append(stage.now - self.died_at[peer])
                stage.down(sim, peer)
            case ro.PeerChanged(peer, advert) if peer in sim.live:
                stage.tell_all(sim, ev.PeerUp(peer, advert.can_home))
            case ro.SelfSuspect():
                stage.renew_substrate(sim)
            case ro.ClockOffset(seconds):
                self._offsets[sim.peer] = seconds
                stage.tell_all(sim, ev.Pace(stage.settings.interval_s, WALL_START_S))
            case ro.ClockJumped():
                self.jumps[sim.peer] += 1

    def fault(self, sim: SimPeer) -> str:
        """What is wrong, long after all healed, with who a peer believes is there; '' if nothing.

        Two peers behind NAT may know of each other by the others' word.
        """
        stage = self.stage
        awake = {one.peer for one in stage.alive() if one.frozen_until <= stage.now}
        seen = {one for one in sim.live if one in awake or not stage.peers[one].alive}
        if sim.peer not in awake or seen == awake - {sim.peer}:
            return ""
        wrong = sorted(stage.peers[one].number for one in seen ^ (awake - {sim.peer}))
        return f"peer {sim.number} is wrong about whether {wrong} are there"

    def undetected(self, within_s: float) -> list[str]:
        """Second machines with somebody's key that were not told so in time, and first ones that
        were."""
        found = []
        for machine, daemon in self.rosters.daemons.items():
            told = self.turned_away.get(machine)
            if machine >= DOUBLES_FROM and (told is None or told - daemon.born_s > within_s):
                found.append(f"machine {machine} was not told that its key is another's")
            elif machine < DOUBLES_FROM and told is not None:
                found.append(f"peer {machine} was told that its key is another's")
        return found

    def offset(self, sim: SimPeer) -> float:
        """What a peer's roster adds to its wall clock."""
        return self._offsets.get(sim.peer, 0.0)

    def _up(self, sim: SimPeer, peer: PeerId, *, can_home: bool) -> None:
        stage, pair = self.stage, (sim.peer, peer)
        if pair in self._apart:
            self._apart.discard(pair)
            stage.disturbed[sim.peer] = stage.now
        sim.live.add(peer)
        if peer in stage.peers:
            sim.disk.remember(peer, stage.peers[peer].number)
        stage.tell_all(sim, ev.PeerUp(peer, can_home))
        if stage.work is not None:
            stage.work.up(sim, peer)
        for at, message, p in self._held.pop(pair, []):
            if stage.now - at <= STRANGER_S:
                stage.read(peer, sim.peer, message, p)

    def _double(self, daemon: Daemon, sim: SimPeer | None) -> None:
        """Told that its key is used twice, a daemon ends (error E028)."""
        self.turned_away.setdefault(daemon.machine, self.stage.now)
        if sim is not None:
            self.stage.say(f"{sim.number} is told that its key is used twice")
            self.stage.later(0.0, lambda: self.stage.leave(sim.peer) if sim.alive else None)
        else:
            self.stage.later(0.0, lambda: self.rosters.stop(daemon))


def _sealed(peer: PeerId, message: bytes, signature: bytes) -> bool:
    return seal(peer, message) == signature
