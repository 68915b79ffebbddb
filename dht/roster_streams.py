"""Control streams: hello, refusal, and which of two streams of a pair stays. Part of the roster's
core.

A stream counts from its hello on. When both peers dialled at once there are two; the peer with the
lesser id decides, after the older one proved that it still lives: then the stream that the lesser
id opened stays. While that is open both are used, so nothing flaps. The same proof tells a peer
that was started anew (its old stream is dead) from two daemons with one key (it is alive).
"""

from collections.abc import Iterator, Mapping
from typing import Final

from dugnad.dht.advert import Advert, clean_text, decode_advert
from dugnad.dht.ids import PeerId, short
from dugnad.dht.messages import (
    REASON_CHARS_MAX,
    Hello,
    Message,
    Ping,
    RefusalCode,
    Refused,
    refused,
)
from dugnad.dht.protocol import Mismatch, agree, spoken_by
from dugnad.dht.records import RecordError
from dugnad.dht.roster_events import (
    Action,
    CloseStream,
    DuplicateIdentity,
    Send,
    StreamDown,
    StreamUp,
)
from dugnad.dht.roster_gossip import Gossip
from dugnad.dht.roster_liveness import Liveness
from dugnad.dht.roster_own import Own
from dugnad.dht.roster_table import STREAMS_PER_PEER_MAX, ControlStream, Entry, Probe, Table

HELLO_S: Final = 5.0
"""For a stream to bring its hello; a stream that does not is of no use."""
PROBE_S: Final = 1.0
"""The older of two streams has this long to answer; more than any usual round trip."""
BAN_S: Final = 60.0
"""Whoever floods us or sends garbage is not served for this long."""

_BANNING: Final = frozenset({"flood", "garbage"})
_HELD_MAX: Final = 8  # a claimant says two or three things before it is decided


class Streams:
    """Owns the streams in the table's entries. Appends to `out`; its owner calls `tick`."""

    def __init__(
        self, own: Own, table: Table, liveness: Liveness, gossip: Gossip, out: list[Action]
    ) -> None:
        self._own = own
        self._table = table
        self._liveness = liveness
        self._gossip = gossip
        self._out = out
        self._ping = 0
        self._released: list[tuple[PeerId, int, Message]] = []

    # --- events

    def opened(self, event: StreamUp, now: float) -> None:
        """A stream is open: greet, or say why not."""
        entry = self._table.ensure(event.peer, now) if event.peer != self._own.peer else None
        if event.outgoing and entry is not None:
            entry.dial_until = None
        refusal = self._refusal(event.peer, entry, now)
        if entry is None or refusal is not None:
            refusal = refusal or refused("full", "the table of peers is full")
            self._out.append(Send(event.peer, event.stream, refusal))
            self._out.append(CloseStream(event.peer, event.stream, refusal.reason))
            if event.outgoing and entry is not None:
                self._liveness.not_reached(entry, refusal.reason, now)
            return
        self._make_place(entry)
        entry.streams[event.stream] = ControlStream(event.stream, event.outgoing, now, now)
        self._out.append(Send(event.peer, event.stream, self._own.hello(now)))

    def ended(self, event: StreamDown, now: float) -> None:
        """A stream is gone, not by our doing."""
        entry = self._table.get(event.peer)
        stream = entry.streams.pop(event.stream, None) if entry is not None else None
        if entry is not None and stream is not None:
            self._gone(entry, stream, event.reason, now)

    def hello(self, entry: Entry, stream: ControlStream, hello: Hello, now: float) -> None:
        """The peer's first message: accepted, held until a doubt is settled, or refused."""
        advert = self._judge(entry, hello)
        if isinstance(advert, Refused):
            self.refuse(entry, stream.number, advert, now)
            return
        stream.boot, stream.heard_at = hello.boot, now
        entry.heartbeat.said_hello(hello.wall_ms / 1000, self._own.wall_ms(now) / 1000)
        others = [other for other in entry.established() if other is not stream]
        if others and others[-1].boot != hello.boot:
            stream.claim = advert  # `tick` settles who it is
            return
        self._gossip.adopt(entry, advert)
        self._accept(entry, stream, now)

    def hold(self, stream: ControlStream, message: Message) -> None:
        """Keeps what a claimant says until it is decided who it is."""
        if len(stream.held) < _HELD_MAX:
            stream.held.append(message)

    def released(self) -> list[tuple[PeerId, int, Message]]:
        """What was held back and may be read now: (peer, stream, message)."""
        released, self._released = self._released, []
        return released

    def pong(self, entry: Entry, stream: ControlStream, number: int, now: float) -> None:
        """An answer that may prove the older of two streams."""
        probe = entry.probe
        if probe is not None and (probe.ping, probe.old) == (number, stream.number):
            self._decide(entry, probe, now, old_lives=True)

    def was_refused(
        self, entry: Entry, stream: ControlStream, refusal: Refused, now: float
    ) -> None:
        """The peer will have none of us, or not of this stream."""
        reason = f"refused by it ({refusal.code}): {clean_text(refusal.reason, REASON_CHARS_MAX)}"
        if refusal.code == "duplicate":
            self._out.append(DuplicateIdentity(self._own.peer, reason, told_by=entry.peer))
        if stream.boot is None and entry.established():
            self._liveness.close(entry, stream.number, reason)
        elif refusal.code == "leaving":
            self._liveness.leave(entry, reason, now)
        else:
            self._liveness.refuse(entry, reason, now)

    def refuse(self, entry: Entry, number: int, refusal: Refused, now: float) -> None:
        """We will have none of the peer: says why, closes all its streams."""
        self._out.append(Send(entry.peer, number, refusal))
        ban_s = BAN_S if refusal.code in _BANNING else 0.0
        self._liveness.refuse(entry, f"{refusal.code}: {refusal.reason}", now, ban_s=ban_s)

    def ban(self, reasons: Mapping[PeerId, str], now: float) -> None:
        """From now on these peers, and only these, are not served, whatever they were before."""
        self._own.bans = dict(reasons)
        for entry in list(self._table):
            reason = reasons.get(entry.peer)
            if reason is None:
                continue
            for number in entry.streams:
                self._out.append(Send(entry.peer, number, refused("admission", reason)))
            self._liveness.refuse(entry, f"admission: {reason}", now)

    def refuse_for(
        self, entry: Entry, number: int, code: RefusalCode, reason: str, now: float
    ) -> None:
        """`refuse` with a code and a reason."""
        self.refuse(entry, number, refused(code, reason), now)

    def beat(self, entry: Entry, stream: ControlStream, now: float) -> int:
        """A heartbeat on one stream; returns its number."""
        self._ping += 1
        entry.heartbeat.pinged(self._ping, now)
        self._out.append(Send(entry.peer, stream.number, Ping(self._ping, self._own.wall_ms(now))))
        return self._ping

    # --- time

    def deadlines(self, entry: Entry) -> Iterator[float]:
        """When this entry wants `tick`."""
        if entry.probe is not None:
            yield entry.probe.until
        for stream in entry.streams.values():
            if stream.boot is None:
                yield stream.opened_at + HELLO_S

    def tick(self, entry: Entry, now: float) -> None:
        """Whatever is due for this entry's streams."""
        if entry.probe is not None and entry.probe.until <= now:
            self._decide(entry, entry.probe, now, old_lives=False)
        claimed = False
        for stream in tuple(entry.streams.values()):
            claimed = claimed or stream.claim is not None
            if stream.boot is None and stream.opened_at + HELLO_S <= now:
                self._liveness.close(entry, stream.number, "no hello came")
                self._liveness.not_reached(entry, "no hello came", now)
        if claimed or len(entry.streams) > 1:
            for _ in range(STREAMS_PER_PEER_MAX):
                if not self._settle(entry, now):
                    break

    def drop_idle(self, entry: Entry, now: float) -> None:
        """Of several streams those that fell silent are dropped (the decider's word may have been
        lost).
        """
        streams = entry.established()
        for stream in streams[:-1]:
            if now - stream.heard_at > entry.heartbeat.silence_s and entry.probe is None:
                self._liveness.close(entry, stream.number, "silent beside another stream")

    # --- inside

    def _refusal(self, peer: PeerId, entry: Entry | None, now: float) -> Refused | None:
        """Why a new stream with `peer` cannot be served, or None."""
        if peer == self._own.peer:
            return refused("duplicate", "this is your own identity")
        if self._own.leaving:
            return refused("leaving", "this peer is leaving")
        if peer in self._own.bans:
            return refused("admission", self._own.bans[peer])
        if not self._own.admits(peer):
            return refused("admission", "this run admits only named peers")
        if entry is None:
            return None
        if entry.banned_until > now:
            return refused(
                "flood", f"not served for another {entry.banned_until - now:.0f} s: {entry.reason}"
            )
        config = self._own.config
        if not entry.streams and self._table.connected_count() >= config.streams_max:
            return refused("full", f"the mesh is full ({config.mesh_max} peers)")
        return None

    def _make_place(self, entry: Entry) -> None:
        """A peer that opens yet another stream has lost the older ones: the stalest one goes."""
        if len(entry.streams) >= STREAMS_PER_PEER_MAX:
            main = entry.main()
            spare = [stream for stream in entry.streams.values() if stream is not main]
            stalest = min(spare, key=lambda stream: (stream.heard_at, stream.number))
            self._liveness.close(entry, stalest.number, "too many control streams at once")

    def _judge(self, entry: Entry, hello: Hello) -> Advert | Refused:
        ours = self._own.config
        if hello.run != ours.run:
            return refused("run", "this peer belongs to another run")
        theirs = spoken_by(hello.protocol, hello.oldest)
        version = agree(ours.spoken, theirs, short(self._own.peer), short(entry.peer))
        if isinstance(version, Mismatch):
            return refused("protocol", version.reason)
        try:
            advert = decode_advert(hello.advert)
        except RecordError as error:
            return refused("advert", error.reason)
        said = (advert.peer, advert.boot, advert.protocol)
        if said != (entry.peer, hello.boot, hello.protocol):
            return refused("advert", "the advert describes another daemon")
        fault = self._own.fault(advert)
        return advert if fault is None else refused("advert", fault)

    def _accept(self, entry: Entry, stream: ControlStream, now: float) -> None:
        assert stream.boot is not None, "only after its hello"
        if len(entry.established()) == 1:
            entry.heartbeat.paused()
            self._liveness.up(entry, stream.boot, now)
        self._gossip.catch_up(entry, stream, now)
        self.beat(entry, stream, now)

    def _gone(self, entry: Entry, stream: ControlStream, reason: str, now: float) -> None:
        """After a stream was taken out of the entry."""
        probe = entry.probe
        if probe is not None and stream.number in (probe.old, probe.new):
            entry.probe = None
        claimants = entry.claimants()
        rest = entry.main()
        if rest is not None:
            self._gossip.catch_up(entry, rest, now)  # what was sent on the other may be lost
        elif claimants:
            self._adopt(entry, claimants[0], now)
        elif stream.established:
            self._liveness.ended(entry, reason, now)
        else:
            self._liveness.not_reached(entry, reason, now)

    def _settle(self, entry: Entry, now: float) -> bool:
        """Takes the next step towards one stream a pair; whether there may be more to do."""
        if entry.probe is not None:
            return False
        rest = entry.established()
        for claimant in entry.claimants():
            if rest and rest[-1].boot != claimant.boot:
                self._probe(entry, rest[-1], claimant, now)
                return False
            self._adopt(entry, claimant, now)
            return True
        if (
            len(rest) > 1 and self._own.peer < entry.peer
        ):  # if both sides decided, both could be closed
            self._probe(entry, rest[0], rest[-1], now)
        return False

    def _probe(self, entry: Entry, old: ControlStream, new: ControlStream, now: float) -> None:
        """Two streams: which stays depends on whether the older one still lives."""
        number = self.beat(entry, old, now)
        entry.probe = Probe(old.number, new.number, number, now + PROBE_S)

    def _decide(self, entry: Entry, probe: Probe, now: float, *, old_lives: bool) -> None:
        entry.probe = None
        old, new = entry.streams[probe.old], entry.streams[probe.new]
        if new.claim is not None and old_lives:
            self._turn_away(entry, new)
        elif new.claim is not None:
            self._adopt(entry, new, now)
        else:
            # The stream that the lesser id opened stays; of two that the same side opened, the
            # younger.
            keep_old = (
                old_lives and old.outgoing != new.outgoing and self._opened_by_lesser(entry, old)
            )
            keep, drop = (old, new) if keep_old else (new, old)
            self._liveness.close(entry, drop.number, "the other stream of the pair stays")
            self._gossip.catch_up(entry, keep, now)

    def _opened_by_lesser(self, entry: Entry, stream: ControlStream) -> bool:
        return stream.outgoing == (self._own.peer < entry.peer)

    def _turn_away(self, entry: Entry, claimant: ControlStream) -> None:
        reason = f"two daemons use the identity of {short(entry.peer)} at the same time"
        self._out.append(DuplicateIdentity(entry.peer, reason))
        refusal = refused("duplicate", "another daemon uses your identity")
        self._out.append(Send(entry.peer, claimant.number, refusal))
        self._liveness.close(entry, claimant.number, reason)

    def _adopt(self, entry: Entry, stream: ControlStream, now: float) -> None:
        """The peer did start anew: its old streams are dead, what was held back is taken up."""
        advert, held = stream.claim, stream.held
        assert advert is not None, "only for claimants"
        for old in entry.established():
            if old.boot != stream.boot:
                self._liveness.close(entry, old.number, "the peer started anew")
        stream.claim, stream.held = None, []
        self._gossip.adopt(entry, advert)
        self._accept(entry, stream, now)
        self._released.extend((entry.peer, stream.number, message) for message in held)
