"""What of a state is worth keeping over restarts. `historyrows` turns it into rows for a disk.

All of it is bounded: a run of years needs a few megabytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from dugnad.dashboard.series import DAY_MS, HOUR_MS, Point, Series

SESSIONS_MAX: Final = 50
"""Stretches of presence kept of one peer."""
SESSION_PEERS_MAX: Final = 5000
HOUR_BARS_MAX: Final = 72
DAY_BARS_MAX: Final = 400
"""A year, and a month to compare."""
PARTS_MAX: Final = 200
"""Contributors kept apart in one bar; the others are added up under ''."""
HAPPENINGS_MAX: Final = 500
"""Things that happened, kept to be read: a lively quarter of an hour or a quiet week."""
OLD_BYTES_MAX: Final = 64 << 20
_OLD_VERSION: Final = 1


class Session(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A stretch of presence; `until_ms` 0 means still here."""

    since_ms: int
    until_ms: int = 0


class Bar(msgspec.Struct, frozen=True, array_like=True):
    """Tokens merged in the hour or day that starts at `at_ms`, by peer; '' is everyone else."""

    at_ms: int
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Of all peers."""
        return sum(self.parts.values())


class Happening(msgspec.Struct, frozen=True, gc=False):
    """Something in plain words. `n` rises by one with each."""

    n: int
    at_ms: int
    kind: str
    text: str


class History(msgspec.Struct, frozen=True):
    """Measurements, sessions, contributions and happenings over time."""

    train: Series = Series()
    held_out: Series = Series()
    speed: Series = Series()
    peers: Series = Series()
    sessions: dict[str, tuple[Session, ...]] = msgspec.field(default_factory=dict)
    hours: tuple[Bar, ...] = ()
    days: tuple[Bar, ...] = ()
    tokens: int = 0
    sent_bytes: int = 0
    plain_bytes: int = 0
    happenings: tuple[Happening, ...] = ()
    happened: int = 0

    def with_train(self, point: Point) -> History:
        """With one more training loss."""
        return msgspec.structs.replace(self, train=self.train.add(point))

    def with_held_out(self, point: Point) -> History:
        """With one more held-out loss."""
        return msgspec.structs.replace(self, held_out=self.held_out.add(point))

    def with_speed(self, point: Point) -> History:
        """With one more measurement of throughput."""
        return msgspec.structs.replace(self, speed=self.speed.add(point))

    def with_peers(self, point: Point) -> History:
        """With a new number of live peers."""
        return msgspec.structs.replace(self, peers=self.peers.add(point))

    def opened(self, peer: str, at_ms: int) -> History:
        """`peer` is here from now on; nothing changes if it was."""
        own = self.sessions.get(peer, ())
        if own and not own[-1].until_ms:
            return self
        sessions = dict(self.sessions)
        sessions.pop(peer, None)  # to the end: the order tells who came longest ago
        sessions[peer] = (*own[-SESSIONS_MAX + 1 :], Session(at_ms))
        while len(sessions) > SESSION_PEERS_MAX:
            del sessions[next(iter(sessions))]
        return msgspec.structs.replace(self, sessions=sessions)

    def closed(self, peer: str, at_ms: int) -> History:
        """`peer` is gone from now on."""
        own = self.sessions.get(peer, ())
        if not own or own[-1].until_ms:
            return self
        last = Session(own[-1].since_ms, max(at_ms, own[-1].since_ms))
        sessions = {**self.sessions, peer: (*own[:-1], last)}
        return msgspec.structs.replace(self, sessions=sessions)

    def with_happening(self, at_ms: int, kind: str, text: str) -> History:
        """With one more thing that happened, in printable words."""
        one = Happening(self.happened + 1, at_ms, kind, text)
        kept = self.happenings[-HAPPENINGS_MAX + 1 :]
        return msgspec.structs.replace(self, happenings=(*kept, one), happened=one.n)

    def merged(
        self,
        at_ms: int,
        tokens_total: int,
        listed: tuple[tuple[str, int], ...],
        traffic: tuple[int, int],
    ) -> History:
        """With one more merge; the total never falls. `traffic` is (sent, as float32) bytes."""
        sent, plain = traffic
        return msgspec.structs.replace(
            self,
            tokens=max(self.tokens, tokens_total),
            sent_bytes=self.sent_bytes + max(sent, 0),
            plain_bytes=self.plain_bytes + max(plain, 0),
            hours=_with_bar(self.hours, at_ms // HOUR_MS * HOUR_MS, listed, HOUR_BARS_MAX),
            days=_with_bar(self.days, at_ms // DAY_MS * DAY_MS, listed, DAY_BARS_MAX),
        )


def _with_bar(
    bars: tuple[Bar, ...], at_ms: int, listed: tuple[tuple[str, int], ...], limit: int
) -> tuple[Bar, ...]:
    if bars and at_ms <= bars[-1].at_ms:  # a late merge counts in the newest bar
        kept, parts, at_ms = bars[:-1], dict(bars[-1].parts), bars[-1].at_ms
    else:
        kept, parts = bars[-limit + 1 :], {}
    for peer, tokens in listed:
        key = peer if peer in parts or len(parts) < PARTS_MAX else ""
        parts[key] = parts.get(key, 0) + tokens
    return (*kept, Bar(at_ms, parts))


def tokens_of(bars: tuple[Bar, ...], peer: str) -> list[tuple[int, int]]:
    """(start, tokens) of one peer in each bar."""
    return [(bar.at_ms, bar.parts.get(peer, 0)) for bar in bars]


def active_ms(sessions: Mapping[str, tuple[Session, ...]], now_ms: int) -> dict[str, int]:
    """Milliseconds that each peer was here in all its kept sessions."""
    return {
        peer: sum(max((one.until_ms or now_ms) - one.since_ms, 0) for one in own)
        for peer, own in sessions.items()
    }


class _Old(History, frozen=True):
    """As earlier versions kept it in one piece."""

    version: int = _OLD_VERSION


def decode_old(data: bytes, now_ms: int) -> History:
    """The history that an earlier version kept as one blob; ValueError when it is none."""
    if len(data) > OLD_BYTES_MAX:
        raise ValueError(f"a history has at most {OLD_BYTES_MAX} bytes, this has {len(data)}")
    try:
        old = msgspec.msgpack.decode(data, type=_Old)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not a kept history: {error}") from None
    if old.version != _OLD_VERSION:
        raise ValueError(f"the history has version {old.version}, this reads {_OLD_VERSION}")
    kept = {name: getattr(old, name) for name in History.__struct_fields__}
    return all_closed(History(**kept), now_ms)


def all_closed(history: History, now_ms: int) -> History:
    """`history` with sessions that were open when the process ended closed at the newest known
    moment.
    """
    ends = [s.last.at_ms for s in (history.train, history.speed, history.peers) if s.last]
    end_ms = min(max(ends, default=now_ms), now_ms)
    sessions = {peer: _ended(own, end_ms) for peer, own in history.sessions.items()}
    return msgspec.structs.replace(history, sessions=sessions)


def _ended(own: tuple[Session, ...], end_ms: int) -> tuple[Session, ...]:
    if own[-1].until_ms:
        return own
    return (*own[:-1], Session(own[-1].since_ms, max(end_ms, own[-1].since_ms)))
