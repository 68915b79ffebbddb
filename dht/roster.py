"""The roster: who is in the swarm, who is alive, how to reach them. A pure core; the shell does the
rest.

Up to `MESH_MAX` peers every pair keeps one control stream. This module takes events apart, keeps
the heartbeat and answers questions; `roster_streams` owns the streams of a pair, `roster_liveness`
the states of peers, `roster_gossip` what peers tell about peers, `roster_table` the table,
`roster_own` ourselves. `now` is monotonic seconds that go on while the machine sleeps
(CLOCK_BOOTTIME where there is one).
"""

import random
import statistics
from collections import deque
from collections.abc import Iterator
from typing import Final, assert_never

from dugnad.dht.advert import Advert
from dugnad.dht.heartbeat import HEARTBEAT_S, SILENCE_MIN_S
from dugnad.dht.ids import PeerId
from dugnad.dht.messages import (
    TAG_BYTES,
    Adverts,
    AdvertUpdate,
    AliveNotice,
    Hello,
    Leaving,
    LostNotice,
    Message,
    PeersKnown,
    Ping,
    Pong,
    Refused,
    Talk,
    WantAdverts,
    WhoSees,
)
from dugnad.dht.records import Signer, Verifier, verify_ed25519
from dugnad.dht.roster_crowding import Crowding
from dugnad.dht.roster_events import (
    Action,
    Bans,
    ClockJumped,
    ClockOffset,
    DialFailed,
    Event,
    GarbageIn,
    Known,
    LeaveNow,
    MessageIn,
    MyAdvert,
    Send,
    StreamDown,
    StreamUp,
    Timer,
)
from dugnad.dht.roster_gossip import Gossip
from dugnad.dht.roster_liveness import Liveness
from dugnad.dht.roster_own import MESH_MAX, Own, RosterConfig
from dugnad.dht.roster_streams import Streams
from dugnad.dht.roster_table import ControlStream, Entry, PeerState, State, Table

__all__ = ["MESH_MAX", "PeerState", "Roster", "RosterConfig", "State"]

TRIPS_KEPT: Final = 2048
"""Round trips remembered for percentiles: half a minute of a full mesh, some minutes of a few."""
JUMP_S: Final = SILENCE_MIN_S
"""A timer that is so late was not late: we did not run."""
RATE_PER_S: Final = 32.0
BURST: Final = 256.0
"""Messages a peer may send: heartbeats are 2 a second, a mesh of 64 that starts at once about 130
in all.
"""
ADVERTS_PER_MESSAGE: Final = 4
"""So many adverts count as one message more (a signature check is about 0.1 ms)."""
CLOCK_STEP_S: Final = 0.1
"""Changes of the clock offset below this are not worth telling."""


class Roster:
    """`handle` each event, perform the actions in order, call again with `Timer` at `deadline`."""

    def __init__(
        self,
        config: RosterConfig,
        signer: Signer,
        advert: Advert,
        rng: random.Random,
        verifier: Verifier = verify_ed25519,
    ) -> None:
        """`advert` is unsigned; `boot` (random, drawn at start) and `at_ms` (wall clock) must be
        set in it.
        """
        self.me = signer.peer
        self._out: list[Action] = []
        self._table = Table()
        self._own = Own(config, signer, advert, verifier)
        self._liveness = Liveness(self._own, self._table, self._out, rng)
        self._gossip = Gossip(self._own, self._table, self._liveness, self._out)
        self._streams = Streams(self._own, self._table, self._liveness, self._gossip, self._out)
        parts = (self._own, self._table, self._liveness, self._gossip, self._out)
        self._crowding = Crowding(*parts, rng)
        self._liveness.elsewhere = self._crowding.member
        self._offset_s = 0.0
        self._beat_at: float | None = None
        self.trips: deque[float] = deque(maxlen=TRIPS_KEPT)
        """The newest round trips of heartbeats with all peers, seconds."""
        self._deadline: float | None = None

    # --- questions

    @property
    def deadline(self) -> float | None:
        """When `Timer` is wanted, in `now` seconds; None when nothing is waited for."""
        return self._deadline

    @property
    def my_advert(self) -> Advert:
        """Our own advert as it was signed last."""
        return self._own.advert

    def live(self) -> tuple[PeerId, ...]:
        """Live peers without ourselves, sorted; a suspect counts until its verdict."""
        if self._crowding.life is not None:
            return tuple(sorted(self._crowding.up))
        return self._table.counted()

    @property
    def crowded(self) -> bool:
        """Whether the swarm is a crowd: streams with some (`neighbours`), word of all."""
        return self._own.crowded

    def neighbours(self) -> tuple[PeerId, ...]:
        """Peers with an established control stream, sorted."""
        return tuple(entry.peer for entry in self._table.listening())

    def known(self) -> tuple[PeerId, ...]:
        """All peers in the table, and in a crowd all that are live, sorted."""
        return tuple(sorted({entry.peer for entry in self._table} | set(self.live())))

    def advert(self, peer: PeerId) -> Advert | None:
        """The newest verified advert of a peer (or of ourselves); None if there is none."""
        if peer == self.me:
            return self._own.advert
        entry, far = self._table.get(peer), self._crowding.advert(peer)
        near = entry.advert if entry is not None else None
        if near is None or (far is not None and far.order > near.order):
            return far
        return near

    def addresses(self, peer: PeerId) -> tuple[str, ...]:
        """Multiaddrs to try for a peer, best first."""
        entry, far = self._table.get(peer), self._crowding.advert(peer)
        if entry is not None and entry.addresses:
            return entry.addresses
        return far.addresses if far is not None else ()

    def state(self, peer: PeerId) -> PeerState:
        """How a peer is, why, since when, and when it was last heard."""
        entry = self._table.get(peer)
        if peer in self._crowding.up and (entry is None or not entry.counted):
            since, seen = (float("-inf"), None) if entry is None else (entry.since, entry.last_seen)
            return PeerState(State.INDIRECT, "a member of the crowd", since, seen)
        if entry is None:
            return PeerState(State.UNKNOWN, "never heard of", float("-inf"), None)
        return PeerState(entry.state, entry.reason, entry.since, entry.last_seen)

    def banned(self) -> tuple[PeerId, ...]:
        """Peers that are not served, as the last `Bans` said."""
        return tuple(self._own.bans)

    def rtt(self, peer: PeerId) -> float | None:
        """The usual round trip to a peer in seconds; None if never measured."""
        entry = self._table.get(peer)
        return entry.heartbeat.rtt_s if entry is not None else None

    def heartbeats_lost(self) -> int:
        """Pings to peers still in the table that were never answered."""
        return sum(entry.heartbeat.lost for entry in self._table)

    def clock_offset(self) -> float:
        """The swarm's median wall clock (ours included) minus ours, in seconds."""
        return self._offset_s

    # --- events

    def handle(self, event: Event, now: float) -> list[Action]:
        """Takes one event at time `now` (never falling) and says what is to be done, in order.

        ValueError only for a `MyAdvert` that cannot be made valid; then nothing has changed.
        """
        self._out.clear()
        self._own.start_clock(now)
        if self._deadline is not None and now - self._deadline > JUMP_S:
            self._jumped(now - self._deadline, now)
        self._dispatch(event, now)
        for peer, stream, message in self._streams.released():
            self._judged_in(peer, stream, message, now)
        if not self._is_routine(event, now):
            self._tick(now)
            self._crowding.settle(now)
            self._deadline = min(self._deadlines(now), default=None)
        return list(self._out)

    def _is_routine(self, event: Event, now: float) -> bool:
        """A heartbeat that changed nothing: it can only have moved the deadline of silence further
        away.

        Nearly all events are such, and in a full mesh looking through all peers each time costs 20
        times as much as the heartbeat itself. The deadline may then come early, which is harmless.
        """
        return (
            isinstance(event, MessageIn)
            and isinstance(event.message, Ping | Pong)
            and self._deadline is not None
            and now < self._deadline
            and len(self._out) <= 1  # the answer; everything else that can come of it says more
            and not self._liveness.fresh
        )

    def _dispatch(self, event: Event, now: float) -> None:
        match event:
            case Timer(wall_ms):
                self._own.set_clock(wall_ms, now)
            case StreamUp():
                self._streams.opened(event, now)
            case StreamDown():
                self._streams.ended(event, now)
            case MessageIn():
                self._message_in(event, now)
            case GarbageIn(peer, stream, reason):
                entry = self._table.get(peer)
                if entry is not None and stream in entry.streams:
                    self._streams.refuse_for(entry, stream, "garbage", reason, now)
            case DialFailed(peer, reason):
                entry = self._table.get(peer)
                if entry is not None:
                    self._liveness.dial_failed(entry, reason, now)
            case Known():
                self._known(event, now)
            case MyAdvert(advert):
                self._own.renew(now, advert)
                self._gossip.send_all(AdvertUpdate(self._own.advert))
            case Bans(reasons):
                before = tuple(self._own.bans)
                self._streams.ban(reasons, now)
                self._crowding.judge_again((*before, *reasons))
            case LeaveNow():
                self._crowding.leave()
                self._own.leaving = True
                self._gossip.send_all(Leaving(self.me, self._own.advert.incarnation))
                self._liveness.stop("we left", now)
            case _:
                assert_never(event)

    def _known(self, event: Known, now: float) -> None:
        if event.peer == self.me or self._own.leaving or not self._own.admits(event.peer):
            return
        entry = self._table.ensure(event.peer, now)
        if entry is not None:
            if entry.state is State.KNOWN and event.source:
                entry.reason = f"named by {event.source}"
            entry.add_addresses(event.addresses)
            self._liveness.named(entry, now)

    # --- messages

    def _message_in(self, event: MessageIn, now: float) -> None:
        entry, message = self._table.get(event.peer), event.message
        stream = entry.streams.get(event.stream) if entry is not None else None
        if entry is None or stream is None:
            return  # it was on its way when we closed the stream
        if _floods(entry, message, now):
            self._streams.refuse_for(entry, stream.number, "flood", "too many messages", now)
        elif isinstance(message, Refused):
            self._streams.was_refused(entry, stream, message, now)
        elif isinstance(message, Hello) != (stream.boot is None):
            self._streams.refuse_for(
                entry, stream.number, "garbage", "hello comes first, and once", now
            )
        elif isinstance(message, Hello):
            self._streams.hello(entry, stream, message, now)
        elif stream.claim is not None:
            self._streams.hold(stream, message)
        else:
            stream.heard_at = now
            self._liveness.heard(entry, now)
            self._judged_in(event.peer, event.stream, message, now)

    def _judged_in(self, peer: PeerId, number: int, message: Message, now: float) -> None:
        """A message on an established stream."""
        entry = self._table.get(peer)
        stream = entry.streams.get(number) if entry is not None else None
        if entry is not None and stream is not None:
            fault = self._message(entry, stream, message, now)
            if fault is not None:
                self._streams.refuse_for(entry, number, "advert", fault, now)

    def _message(
        self, entry: Entry, stream: ControlStream, message: Message, now: float
    ) -> str | None:
        """Does what the message asks; the fault for which to refuse its sender, or None."""
        match message:
            case Ping(number):
                entry.heartbeat.beat(now)
                self._out.append(
                    Send(entry.peer, stream.number, Pong(number, self._own.wall_ms(now)))
                )
            case Pong(number, wall_ms):
                wall_s = self._own.wall_ms(now) / 1000
                if entry.heartbeat.answered(number, wall_ms / 1000, now, wall_s):
                    self.trips.append(entry.heartbeat.trip_s)
                self._streams.pong(entry, stream, number, now)
            case AdvertUpdate(advert):
                return self._gossip.own_advert(entry, stream, advert)
            case AliveNotice(advert):
                if advert.peer == entry.peer:
                    return self._gossip.own_advert(entry, stream, advert)
                return self._gossip.vouched(entry, advert, now)
            case PeersKnown():
                return self._gossip.peers_known(entry, message, now)
            case LostNotice():
                self._gossip.lost_notice(entry, message, now)
            case WhoSees(peer):
                self._gossip.who_sees(entry, peer, now)
            case Leaving():
                self._gossip.leaving(entry, message, now)
            case Talk() | WantAdverts() | Adverts():
                return self._crowding.message(entry, message, now)
            case Hello() | Refused():
                raise AssertionError("judged before")
            case _:
                assert_never(message)
        return None

    # --- time

    def _deadlines(self, now: float) -> Iterator[float]:
        if self._own.leaving:
            return
        dials_full = self._liveness.dials_full()
        for entry in self._table:
            yield from self._liveness.deadlines(entry, now, dials_full=dials_full)
            yield from self._streams.deadlines(entry)
        yield from self._crowding.deadlines()
        for moment in (self._beat_at, self._gossip.news_at, self._liveness.look_back_at):
            if moment is not None:
                yield moment

    def _tick(self, now: float) -> None:
        if self._own.leaving:
            return
        for entry in list(self._table):
            self._streams.tick(entry, now)
            self._liveness.tick(entry, now)
        self._liveness.look_back(now)
        listening = self._table.listening()
        if not listening:
            self._beat_at = None
        elif self._beat_at is None:
            self._beat_at = now + HEARTBEAT_S
        elif self._beat_at <= now:
            self._beat_all(listening, now)
        self._gossip.collect_news(now)
        if self._gossip.news_at is not None and self._gossip.news_at <= now:
            self._gossip.tell_news(now)

    def _beat_all(self, listening: list[Entry], now: float) -> None:
        self._beat_at = now + HEARTBEAT_S
        for entry in listening:
            self._streams.drop_idle(entry, now)
            for stream in entry.established():
                self._streams.beat(entry, stream, now)
        clocks = [entry.heartbeat.clock_s for entry in listening]
        offset = statistics.median([0.0, *(clock for clock in clocks if clock is not None)])
        if abs(offset - self._offset_s) > CLOCK_STEP_S:
            self._offset_s = offset
            self._out.append(ClockOffset(offset))

    def _jumped(self, seconds: float, now: float) -> None:
        self._out.append(ClockJumped(seconds))
        self._liveness.jumped(now)
        self._crowding.jumped(now)
        self._beat_at = now  # ask everybody before judging anybody
        if self._gossip.news_at is not None:
            self._gossip.news_at = max(self._gossip.news_at, now)


def _floods(entry: Entry, message: Message, now: float) -> bool:
    """Counts a message in the peer's leaking bucket; whether that is more than a peer may send."""
    adverts = 0
    if isinstance(message, PeersKnown | Adverts):
        adverts = len(message.adverts)
    elif isinstance(message, WantAdverts):
        adverts = len(message.tags) // TAG_BYTES
    drained = (now - entry.spent_at) * RATE_PER_S
    entry.spent = max(0.0, entry.spent - drained) + 1 + adverts / ADVERTS_PER_MESSAGE
    entry.spent_at = now
    return entry.spent > BURST
