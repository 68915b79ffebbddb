"""The roster's table: one entry for each peer we heard of, with its control streams. Bounded."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from dugnad.dht.advert import ADDRESSES_MAX, Advert
from dugnad.dht.heartbeat import Heartbeat
from dugnad.dht.ids import PeerId
from dugnad.dht.messages import Message

PEERS_MAX: Final = 512
"""Peers remembered, live or not: eight full meshes of names, about 2 MB."""
ADDRESSES_KEPT_MAX: Final = 2 * ADDRESSES_MAX
"""The advert's and as many again from links and memory."""
STREAMS_PER_PEER_MAX: Final = 3
"""Two when both dial at once, and one that is about to end."""


class State(enum.StrEnum):
    """Where a peer stands in our view."""

    KNOWN = "known"  # named somewhere, never reached
    LIVE = "live"  # a control stream of our own
    INDIRECT = (
        "indirect"  # others hear it, we do not (both behind NAT, or the line between us is cut)
    )
    SUSPECT = "suspect"  # ended or silent a moment ago; still counts
    LOST = "lost"
    LEFT = "left"
    REFUSED = "refused"  # it refused us or we refused it
    UNKNOWN = "unknown"  # never heard of, or forgotten


COUNTED: Final = frozenset({State.LIVE, State.INDIRECT, State.SUSPECT})
"""States of peers that `live()` lists."""


@dataclass(frozen=True, slots=True)
class PeerState:
    """The answer to "how is this peer, and why": times are in the seconds of the caller's `now`."""

    state: State
    reason: str
    since: float
    last_seen: float | None


@dataclass(slots=True)
class ControlStream:
    """One control stream. `boot` is None until the peer's hello came."""

    number: int
    outgoing: bool
    opened_at: float
    heard_at: float
    boot: int | None = None
    # While two daemons claim one identity, what the second says waits here (its advert, its
    # messages).
    claim: Advert | None = None
    held: list[Message] = field(default_factory=list)

    @property
    def established(self) -> bool:
        """Whether its hello was accepted."""
        return self.boot is not None and self.claim is None


@dataclass(frozen=True, slots=True)
class Probe:
    """Is the older of two streams alive? Decided by a pong to `ping`, or at the time `until`."""

    old: int
    new: int
    ping: int
    until: float


@dataclass(slots=True)
class Entry:
    """All that is known of one peer. Times are absolute; None means "nothing to wait for"."""

    peer: PeerId
    since: float
    state: State = State.KNOWN
    reason: str = "named"
    advert: Advert | None = None
    boot: int | None = None
    addresses: tuple[str, ...] = ()
    last_seen: float | None = None
    streams: dict[int, ControlStream] = field(default_factory=dict)
    vouchers: set[PeerId] = field(default_factory=set)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    probe: Probe | None = None

    ended_at: float | None = None  # when its last stream ended by itself
    verdict_at: float | None = None  # a suspect has until then to be reached
    answer_at: float | None = None  # others have until then to vouch for it
    dial_until: float | None = None  # a dial is under way
    dialled_at: float | None = None
    retry_at: float | None = None
    retry_s: float = 0.0
    give_up_at: float = 0.0
    banned_until: float = 0.0
    refute_after: float = 0.0

    spent: float = 0.0  # messages above the allowed rate (a leaking bucket)
    spent_at: float = 0.0

    @property
    def counted(self) -> bool:
        """Whether `live()` lists it."""
        return self.state in COUNTED

    @property
    def incarnation(self) -> int:
        """The newest incarnation we know."""
        return self.advert.incarnation if self.advert is not None else 0

    @property
    def can_dial(self) -> bool:
        """Whether there is any point in dialling it."""
        return bool(self.addresses) and (self.advert is None or self.advert.reachable != "outbound")

    def dialled(self) -> bool:
        """Whether a stream is open, or being opened."""
        return self.dial_until is not None or bool(self.streams)

    def established(self) -> list[ControlStream]:
        """Streams whose hello was accepted, oldest first."""
        return [stream for stream in self.streams.values() if stream.established]

    def claimants(self) -> list[ControlStream]:
        """Streams that wait until it is clear which of two boots of the peer lives."""
        return [stream for stream in self.streams.values() if stream.claim is not None]

    def main(self) -> ControlStream | None:
        """The stream to send on: the youngest established one."""
        streams = self.established()
        return streams[-1] if streams else None

    def heard_at(self) -> float:
        """When any established stream last brought something."""
        latest = float("-inf")
        for stream in self.streams.values():  # plain: this is asked most often of all
            if stream.heard_at > latest and stream.established:
                latest = stream.heard_at
        return latest

    def add_addresses(self, addresses: tuple[str, ...]) -> None:
        """Puts `addresses` first, keeps older ones behind them, bounded."""
        merged = tuple(dict.fromkeys((*addresses, *self.addresses)))
        self.addresses = merged[:ADDRESSES_KEPT_MAX]

    def enter(self, state: State, reason: str, now: float) -> None:
        """Changes state; nothing that was waited for in the old one is waited for any longer."""
        if state != self.state:
            self.since = now
        self.state, self.reason = state, reason
        self.verdict_at = self.answer_at = None


class Table:
    """Entries by peer, at most `PEERS_MAX`; whoever has no stream and does not count makes room."""

    def __init__(self) -> None:
        self._entries: dict[PeerId, Entry] = {}

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, peer: PeerId) -> Entry | None:
        """The entry, if there is one."""
        return self._entries.get(peer)

    def ensure(self, peer: PeerId, now: float) -> Entry | None:
        """The entry, made if need be; None when the table is full of peers that are in use."""
        entry = self._entries.get(peer)
        if entry is None:
            if len(self._entries) >= PEERS_MAX and not self._make_room(now):
                return None
            entry = self._entries[peer] = Entry(peer, now)
        return entry

    def listening(self) -> list[Entry]:
        """Entries with an established stream, in order of peer id."""
        found = [e for e in self if e.streams and e.established()]
        found.sort(key=lambda entry: entry.peer)
        return found

    def counted(self) -> tuple[PeerId, ...]:
        """Peers that count as live, sorted."""
        return tuple(sorted(entry.peer for entry in self if entry.counted))

    def connected_count(self) -> int:
        """Peers with any stream, established or about to be."""
        return sum(1 for entry in self if entry.streams)

    def _make_room(self, now: float) -> bool:
        idle = [
            entry
            for entry in self
            if not entry.counted
            and not entry.streams
            and entry.banned_until <= now
            and entry.dial_until is None
        ]
        if not idle:
            return False
        # Those we gave up go first, those once met last; of names never met the newest goes, so
        # that a stranger's long list of names pushes out itself and not the seeds of our link.
        victim = min(
            idle,
            key=lambda e: (e.retry_at is not None, e.last_seen is not None, -e.since, e.peer),
        )
        del self._entries[victim.peer]
        return True
