"""What travels between simulated peers: messages, contributions, payloads, whole anchors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dugnad.averaging import events as ev
from dugnad.averaging import formats as fm
from dugnad.averaging.worker import WorkError
from dugnad.dht.ids import PeerId
from dugnad.simulation.clock import Clock
from dugnad.simulation.network import Network, fetch, message_events
from dugnad.simulation.people import SimPeer
from dugnad.simulation.settings import WorldSettings


@dataclass(slots=True)
class Sending:
    """A contribution on its way."""

    arrives: bool
    told: bool = True
    """Whether its maker still waits for the answer."""


class Carrier(Clock):
    """The shell's part between peers, on simulated links; what arrives goes to a core."""

    def __init__(self, settings: WorldSettings) -> None:
        super().__init__(settings.seed)
        self.settings = settings
        self.peers: dict[PeerId, SimPeer] = {}
        self.net = Network(settings.weather, self.rng, lambda: self.now)
        self.messages = 0
        self._under_way: dict[tuple[PeerId, int, int, PeerId], Sending] = {}

    def _tell(self, sim: SimPeer, p: int, event: ev.Event) -> None:
        """Feed a core."""
        raise NotImplementedError

    def near(self, sim: SimPeer) -> list[PeerId]:
        """To whom a peer tells what all should hear."""
        return sorted(sim.live)

    def _reaches(self, a: PeerId, b: PeerId) -> bool:
        return not self.net.is_cut(a, b) and b in self.peers and self.peers[b].alive

    def _broadcast(self, sim: SimPeer, message: fm.Message, p: int) -> None:
        for peer in self.near(sim):
            self._send(sim, peer, message, p)

    def _send(self, sim: SimPeer, to: PeerId, message: fm.Message, p: int) -> None:
        link, weather = self.net.link(sim.peer, to), self.settings.weather
        self.messages += 1
        if link.random() < weather.loss or not self._reaches(sim.peer, to):
            return
        copies = 2 if link.random() < weather.duplication else 1
        for _ in range(copies):
            self.later(self.net.latency(link), lambda: self._deliver(sim.peer, to, message, p))

    def _deliver(self, sender: PeerId, to: PeerId, message: fm.Message, p: int) -> None:
        if self.net.is_cut(sender, to):
            return
        for event in message_events(sender, message):
            self._tell(self.peers[to], p, event)
        if isinstance(message, fm.Heads) and message.reply and self.peers[to].alive:
            self._send(self.peers[to], sender, self.peers[to].fragments[p].core.follower.heads(), p)

    def _send_contribution(self, sim: SimPeer, p: int, seq: int, to: PeerId) -> None:
        link, weather, born = self.net.link(sim.peer, to), self.settings.weather, sim.born
        kept = sim.fragments[p].worker.inbox[(sim.peer, seq)]
        breaks = link.random() < weather.send_loss
        sending = Sending(self._reaches(sim.peer, to) and not (breaks and link.random() < 0.5))
        self._under_way[sim.peer, p, seq, to] = sending

        def hear(event: ev.Event) -> None:
            if sim.born == born and sending.told:
                self._under_way.pop((sim.peer, p, seq, to), None)
                self._tell(sim, p, event)

        def back(event: ev.Event) -> None:
            self.later(self.net.latency(link), lambda: hear(event))

        def arrive() -> None:
            if not sending.arrives:
                return
            if not self._reaches(sim.peer, to):
                back(ev.SendLost(seq, to))
                return
            there = self.peers[to].fragments[p]
            there.worker.keep(kept.contribution, kept.pieces, kept.payload)
            self._tell(self.peers[to], p, ev.ContributionIn(kept.contribution, kept.pieces))
            key = (sim.peer, seq)
            refusal = "" if key in there.core.home.inbox else "not listable"
            back(ev.SendLost(seq, to) if breaks else ev.SendDone(seq, to, refusal))

        if sending.arrives:
            self._carry((sim.peer,), to, 2, arrive)
        else:
            back(ev.SendLost(seq, to))

    def _cancel_send(self, sim: SimPeer, p: int, seq: int, to: PeerId) -> None:
        """The stream is ended; half of the time all of it had got through before."""
        sending = self._under_way.pop((sim.peer, p, seq, to), None)
        if sending is not None:
            sending.told = False
            sending.arrives = sending.arrives and self.net.link(sim.peer, to).random() < 0.5

    def _forward(self, sim: SimPeer, p: int, key: ev.Key, to: PeerId) -> None:
        """A leaving peer passes on what somebody else handed in to it."""
        kept = sim.fragments[p].worker.inbox[key]

        def arrive() -> None:
            if self._reaches(sim.peer, to):
                there = self.peers[to].fragments[p].worker
                there.keep(kept.contribution, kept.pieces, kept.payload)
                self._tell(self.peers[to], p, ev.ContributionIn(kept.contribution, kept.pieces))

        self.later(self.net.latency(self.net.link(sim.peer, to), 2), arrive)

    def _obtain(self, sim: SimPeer, p: int, action: ev.Obtain) -> None:
        weather, born = self.settings.weather, sim.born
        source = sim.rng.choice(action.sources)
        link = self.net.link(source, sim.peer)
        failed = link.random() < weather.fetch_loss

        def arrive() -> None:
            if sim.born != born or not sim.alive:
                return
            event: ev.Event
            try:
                if (
                    failed
                    or not self._reaches(sim.peer, source)
                    or self.now < self.peers[source].frozen_until
                ):
                    raise WorkError("the source does not answer")
                self._fetch(sim, p, action, source)
                event = ev.Obtained(action.digest)
            except WorkError as fault:
                event = ev.ObtainFailed(action.digest, fault.reason, fault.lied)
            self._tell(sim, p, event)

        others = (one for one in action.sources if one != source)
        self._carry((source, *others), sim.peer, 3, arrive)

    def _carry(
        self, sources: Sequence[PeerId], to: PeerId, trips: int, then: Callable[[], None]
    ) -> None:
        """Bulk data goes from the first of the sources to a peer."""
        self.later(self.net.latency(self.net.link(sources[0], to), trips), then)

    def _fetch(self, sim: SimPeer, p: int, action: ev.Obtain, source: PeerId) -> None:
        fetch(action, self.peers[source].fragments[p].worker, sim.fragments[p].worker)
