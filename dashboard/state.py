"""What a dashboard knows of a run: one immutable value, folded from events by `apply`.

`apply` is pure: no clock, no chance. The same events give the same state, whoever folds them, and
a page is a function of a state and of the time at which it is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from dugnad.averaging.board import Board, BoardRow
from dugnad.dashboard import events as ev
from dugnad.dashboard.history import Happening, History, Session
from dugnad.dashboard.series import Point
from dugnad.dashboard.text import NAME_CHARS_MAX, count, line

PEERS_MAX: Final = 5000
"""Rows of peers; the swarm is planned for thousands. Those gone longest are dropped first."""
GONE_KEPT_MS: Final = 86_400_000
"""For a day a table shows who left."""
LATE_MS: Final = 60_000
"""A merge that is overdue for so long will come when it comes."""
FRAGMENT_NUMBER_MAX: Final = ev.FRAGMENTS_MAX


@dataclass(frozen=True, slots=True)
class FragmentHead:
    """The newest version of a fragment, and when the next is expected (0: unknown)."""

    version: int = 0
    digest: str = ""
    at_ms: int = 0
    home: str = ""
    listed: int = 0
    due_ms: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """Everything that pages, API and metrics show. `events` counts those folded so far."""

    events: int = 0
    as_of_ms: int = 0
    run: ev.RunDescribed | None = None
    serving: ev.Status | None = None
    ended: ev.RunEnded | None = None
    peers: Mapping[str, ev.PeerRow] = field(default_factory=dict)
    heads: Mapping[int, FragmentHead] = field(default_factory=dict)
    history: History = field(default_factory=History)
    board: Board | None = None
    board_heard: int = 0
    board_known: int = 0
    units: tuple[tuple[str, int], ...] = ()
    evaluated: tuple[ev.EvaluatedRow, ...] = ()
    prepared: tuple[ev.PreparedRow, ...] = ()
    sample: ev.SampleText | None = None

    @property
    def live(self) -> int:
        """Peers that are here now."""
        return sum(1 for row in self.peers.values() if not row.gone_ms)

    @property
    def tokens(self) -> int:
        """Tokens merged by the run."""
        return self.history.tokens

    @property
    def happenings(self) -> tuple[Happening, ...]:
        """The newest things that happened, oldest first."""
        return self.history.happenings

    @property
    def happened(self) -> int:
        """How many things have happened in all."""
        return self.history.happened

    @property
    def merges(self) -> int:
        """Merges of the run: the versions of all fragments together."""
        return sum(head.version for head in self.heads.values())

    def next_due(self, now_ms: int) -> tuple[int, int] | None:
        """(due_ms, fragment) of the next merge; None where nobody knows. One that is late by more
        than a minute is no longer expected.
        """
        dues = [(one.due_ms, p) for p, one in self.heads.items() if one.due_ms > now_ms - LATE_MS]
        return min(dues, default=None)


def apply(state: State, event: ev.AnyEvent) -> State:
    """`state` after `event`, whose text is made printable first; numbers that are none change
    nothing but the counters.
    """
    return apply_clean(state, ev.clean(event))


def apply_clean(state: State, event: ev.AnyEvent) -> State:
    """As `apply`, of an event that `clean` made."""
    after = _folded(state, event)
    return replace(after, events=state.events + 1, as_of_ms=max(state.as_of_ms, event.at_ms))


def restored(state: State, history: History) -> State:
    """`state` with a history that an earlier process kept."""
    return replace(state, history=history)


def _folded(state: State, event: ev.AnyEvent) -> State:
    match event:
        case ev.RunDescribed():
            return replace(state, run=event)
        case ev.PeerSeen():
            return _seen(state, event)
        case ev.PeerGone():
            return _gone(state, event)
        case ev.PeerChanged():
            return _counted(_with_rows(state, event.rows, event.at_ms), event.at_ms)
        case ev.HeadAdopted():
            return _adopted(state, event)
        case ev.TrainLoss() | ev.HeldOutLoss() | ev.Throughput():
            return _measured(state, event)
        case ev.MergeDue():
            return _due(state, event)
        case ev.Happened():
            return _happened(state, event.at_ms, event.kind, event.text)
        case ev.UnitsMoved():
            text = f"{count(event.units, 'work unit')} of {event.source} moved to {event.target}"
            return _happened(state, event.at_ms, "units", text)
        case ev.UnitCounts():
            return replace(state, units=event.counts)
        case ev.BoardComputed():
            heard, known = event.peers_heard, event.peers_known
            return replace(state, board=event.board, board_heard=heard, board_known=known)
        case ev.Evaluations():
            return replace(state, evaluated=event.rows)
        case ev.Preparations():
            return replace(state, prepared=event.rows)
        case ev.SampleText():
            return replace(state, sample=event)
        case ev.Status():
            return replace(state, serving=event)
        case ev.RunEnded():
            ended = replace(state, ended=event)
            return _happened(ended, event.at_ms, "ended", f"the run has ended: {event.reason}")


def _label(row: ev.PeerRow) -> str:
    return f"{row.name or 'a peer'} ({row.peer[-6:]})"


def _seen(state: State, event: ev.PeerSeen) -> State:
    row, at_ms = event.row, event.at_ms
    known = state.peers.get(row.peer)
    back = known is not None and known.gone_ms
    after = _with_rows(state, (msgspec.structs.replace(row, gone_ms=0),), at_ms)
    after = replace(after, history=after.history.opened(row.peer, at_ms))
    if known is None or back:
        after = _happened(after, at_ms, "joined", f"{_label(row)} {'is back' if back else 'came'}")
    return _counted(after, at_ms)


def _gone(state: State, event: ev.PeerGone) -> State:
    row = state.peers.get(event.peer)
    if row is None or row.gone_ms:
        return state
    gone = msgspec.structs.replace(
        row, state=event.how, reason=event.reason, gone_ms=event.at_ms, tokens_per_s=0.0
    )
    after = _with_rows(state, (gone,), event.at_ms)
    after = replace(after, history=after.history.closed(event.peer, event.at_ms))
    said = "left" if event.how == "left" else "was lost"
    text = f"{_label(row)} {said}" + (f": {event.reason}" if event.reason else "")
    return _counted(_happened(after, event.at_ms, event.how, text), event.at_ms)


def _with_rows(state: State, rows: tuple[ev.PeerRow, ...], now_ms: int) -> State:
    peers = dict(state.peers)
    peers.update((row.peer, row) for row in rows)
    old = [row for row in peers.values() if row.gone_ms and now_ms - row.gone_ms > GONE_KEPT_MS]
    for row in old:
        del peers[row.peer]
    surplus = len(peers) - PEERS_MAX
    if surplus > 0:
        order = sorted(peers.values(), key=lambda row: (not row.gone_ms, row.last_seen_ms))
        for row in order[:surplus]:
            del peers[row.peer]
    return replace(state, peers=peers)


def _counted(state: State, at_ms: int) -> State:
    """Note the number of live peers, when it changed."""
    last, live = state.history.peers.last, state.live
    if last is not None and last.value == live:
        return state
    point = Point.of(at_ms, state.tokens, live)
    return replace(state, history=state.history.with_peers(point))


def _adopted(state: State, event: ev.HeadAdopted) -> State:
    if not 0 <= event.fragment < FRAGMENT_NUMBER_MAX:
        return state
    before = state.heads.get(event.fragment, FragmentHead())
    head = FragmentHead(
        version=event.version,
        digest=event.digest,
        at_ms=event.at_ms,
        home=event.home,
        listed=len(event.listed),
        due_ms=before.due_ms if before.due_ms > event.at_ms else 0,
    )
    history = state.history.merged(
        event.at_ms, event.tokens_total, event.listed, (event.sent_bytes, event.plain_bytes)
    )
    return replace(state, heads={**state.heads, event.fragment: head}, history=history)


def _measured(state: State, event: ev.TrainLoss | ev.HeldOutLoss | ev.Throughput) -> State:
    value = event.tokens_per_s if isinstance(event, ev.Throughput) else event.loss
    if not math.isfinite(value):
        return state
    history = state.history
    match event:
        case ev.TrainLoss():
            history = history.with_train(Point.of(event.at_ms, event.tokens, value))
        case ev.HeldOutLoss():
            history = history.with_held_out(Point.of(event.at_ms, event.tokens, value))
        case ev.Throughput():
            history = history.with_speed(Point.of(event.at_ms, state.tokens, max(value, 0.0)))
    return replace(state, history=history)


def _due(state: State, event: ev.MergeDue) -> State:
    if not 0 <= event.fragment < FRAGMENT_NUMBER_MAX:
        return state
    before = state.heads.get(event.fragment, FragmentHead())
    head = replace(before, due_ms=event.due_ms)
    return replace(state, heads={**state.heads, event.fragment: head})


def _happened(state: State, at_ms: int, kind: str, text: str) -> State:
    return replace(state, history=state.history.with_happening(at_ms, kind, line(text)))


def sessions_of(state: State, peer: str) -> tuple[Session, ...]:
    """When `peer` was here, oldest first; the last has `until_ms` 0 while it is here."""
    return state.history.sessions.get(line(peer, 64), ())


def board_row(board: Board, peer: str) -> BoardRow | None:
    """The row of a peer, of an owner, or of a machine of an owner."""
    for row in board.rows:
        if row.peer == peer:
            return row
        for machine in row.machines:
            if machine.peer == peer:
                return machine
    return None


def name_in(state: State, peer: str) -> str:
    """The name under which a peer is known, or the end of its key."""
    row = state.peers.get(peer)
    if row is not None and row.name:
        return row.name
    if state.board is not None:
        one = board_row(state.board, peer)
        if one is not None:
            return line(one.name, NAME_CHARS_MAX)
    return f"peer {peer[-6:]}" if peer else ""
