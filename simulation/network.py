"""The simulated network: links with latencies of their own, lines that queue, and cuts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from dugnad.averaging import events as ev
from dugnad.averaging import formats as fm
from dugnad.averaging.worker import FragmentWorker, WorkError
from dugnad.dht.ids import PeerId
from dugnad.simulation.links import Line, Link
from dugnad.simulation.settings import Weather


class Network:
    """Links between peers, each with a generator of its own: adding a peer shifts no other."""

    def __init__(
        self, weather: Weather, rng: Callable[..., random.Random], clock: Callable[[], float]
    ) -> None:
        """``rng`` makes the generator that its arguments name (:meth:`World.rng`)."""
        self.weather = weather
        self.blocked: set[tuple[PeerId, PeerId]] = set()
        self.up: dict[bytes, Line] = {}
        self.down: dict[bytes, Line] = {}
        self._rng = rng
        self._clock = clock
        self._links: dict[tuple[PeerId, PeerId], Link] = {}
        self._controls: dict[tuple[PeerId, PeerId], Link] = {}
        self._size = 0
        self.line_s = 0.0
        """What the lines took of the time of the newest weighed message."""

    def link(self, source: PeerId, target: PeerId) -> Link:
        """One direction of a link, with its generator."""
        key = (source, target)
        if key not in self._links:
            named = self._rng("link", source.hex()[:8], target.hex()[:8])
            self._links[key] = Link(named, source, target)
        return self._links[key]

    def control(self, source: PeerId, target: PeerId) -> Link:
        """The same direction for control streams: its chance is its own."""
        key = (source, target)
        if key not in self._controls:
            named = self._rng("control", source.hex()[:8], target.hex()[:8])
            self._controls[key] = Link(named, source, target)
        return self._controls[key]

    def weigh(self, size: int) -> None:
        """The next message has so many bytes (:meth:`latency` counts them, once)."""
        self._size = size

    def latency(self, link: Link, trips: int = 1) -> float:
        """Seconds until one message is there: its waiting, its bytes, its way; ``trips`` of them
        where it is asked for, or a stream is opened for it, first."""
        size, self._size = self._size, 0
        weather, now = self.weather, self._clock()
        taken = way = trips * link.trip(weather)
        if size and weather.up_bytes_s:
            line = self.up.setdefault(link.source, Line())
            taken += line.passes(size, weather.up_bytes_s, now, now)
        if size and weather.down_bytes_s:
            there = now + taken
            line = self.down.setdefault(link.target, Line())
            taken += line.passes(size, weather.down_bytes_s, there, now)
        if size:
            self.line_s = taken - way
        return taken

    def noticed(self, source: PeerId, target: PeerId) -> float:
        """Seconds until ``target`` notices that its stream from ``source`` ended."""
        weather = self.weather
        return self.link(source, target).uniform(weather.detect_low_s, weather.detect_high_s)

    def is_cut(self, a: PeerId, b: PeerId) -> bool:
        """Whether nothing passes from ``a`` to ``b``."""
        return (a, b) in self.blocked

    def cut(self, left: Iterable[PeerId], right: Iterable[PeerId]) -> list[tuple[PeerId, PeerId]]:
        """Cut every link between two sets of peers; returns the pairs, in a fixed order."""
        rights = sorted(right)
        pairs = [(a, b) for a in sorted(left) for b in rights]
        self.blocked |= {pair for a, b in pairs for pair in ((a, b), (b, a))}
        return pairs

    def mend(self) -> list[tuple[PeerId, PeerId]]:
        """Mend every cut link; returns the pairs, in a fixed order."""
        cut, self.blocked = self.blocked, set()
        return [(a, b) for a, b in sorted(cut) if a < b]


def message_events(sender: PeerId, message: fm.Message) -> list[ev.Event]:
    """The core events of one control message (signatures are the shell's business)."""
    match message:
        case fm.Announce(commit):
            return [ev.CommitIn(sender, commit)]
        case fm.Witness(ack):
            return [ev.AckIn(ack)]
        case fm.Heads():
            return [*ev.heads_in(sender, message)]
        case fm.WantCommits(_, digest, known):
            return [ev.CommitsWanted(sender, digest, known)]
        case fm.Commits(_, commits, checkpoint):
            return [ev.CommitsIn(sender, commits, checkpoint)]
        case fm.Claims() | fm.Word() | fm.Challenge() | fm.Answer() | fm.Told():
            return []  # claims concern the units core; there is no organiser or trial
        case fm.PeerClaims() | fm.Scores() | fm.Prepares():
            return []  # the units core's, or nobody evaluates or prepares


def fetch(action: ev.Obtain, there: FragmentWorker, here: FragmentWorker) -> None:
    """Move a payload or whole anchors between two workers; WorkError when that is not possible."""
    if action.whole:
        state = there.states.get(action.digest)
        if state is None:
            raise WorkError("the source has not got these anchors")
        here.install(action.digest, action.header, state.theta, state.momentum)
        return
    commit = there.commits.get(action.digest)
    if commit is None:
        raise WorkError("the source has not got this payload")
    here.advance(action.digest, action.header, commit.payload)
