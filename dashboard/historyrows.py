"""A history as rows of tables, for a host's disk: what changed since it was last written, and back.

Series and contributions are kept by minute, hour and day, each with the bound that it has in memory
(`series.MINUTES_MAX`, …); values as they were measured are not kept. A history only grows at its
newest end, so what has to be written is a few rows, whatever is kept already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import msgspec

from dugnad.dashboard.history import Bar, Happening, History, Session
from dugnad.dashboard.series import DAY_MS, HOUR_MS, MINUTE_MS, Point, Series

INTEGER_MAX: Final = (1 << 63) - 1
"""The largest number of a database; a foreign count of tokens could be above."""

Size = Literal["minute", "hour", "day"]
_SIZES: Final[dict[Size, int]] = {"minute": MINUTE_MS, "hour": HOUR_MS, "day": DAY_MS}
_SERIES: Final = ("train", "held_out", "speed", "peers")
_TOTALS: Final = ("tokens", "sent_bytes", "plain_bytes")


class RollupRow(NamedTuple):
    """The roll-up (`series.Point`) of the minute, hour or day that starts at `start_ms`."""

    size: Size
    series: str
    start_ms: int
    at_ms: int
    tokens: int
    value: float
    low: float
    high: float
    n: int


class BarRow(NamedTuple):
    """Tokens of `peer` ('' is everyone else) merged in the hour or day that starts then."""

    size: Size
    start_ms: int
    peer: str
    tokens: int


class SessionRow(NamedTuple):
    """A stretch of presence; `until_ms` 0: still here when it was written."""

    peer: str
    since_ms: int
    until_ms: int


class HappeningRow(NamedTuple):
    """Something in plain words, numbered."""

    n: int
    at_ms: int
    kind: str
    text: str


class TotalRow(NamedTuple):
    """One of the running totals."""

    name: str
    amount: int


@dataclass(frozen=True, slots=True)
class HistoryRows:
    """A history, or its newest rows; each tuple oldest first."""

    rollups: tuple[RollupRow, ...] = ()
    bars: tuple[BarRow, ...] = ()
    sessions: tuple[SessionRow, ...] = ()
    happenings: tuple[HappeningRow, ...] = ()
    totals: tuple[TotalRow, ...] = ()


@dataclass(frozen=True, slots=True)
class HistoryChange:
    """Rows to write, new ones or over those with the same key, and what is kept no longer: roll-ups
    (size, series) and bars (size) that start before a time, sessions of a peer that begin before
    one, all of a peer, happenings numbered below one.
    """

    rows: HistoryRows
    old_rollups: tuple[tuple[Size, str, int], ...] = ()
    old_bars: tuple[tuple[Size, int], ...] = ()
    old_sessions: tuple[tuple[str, int], ...] = ()
    old_peers: tuple[str, ...] = ()
    old_happenings: int = 0


def changed(before: History, after: History) -> HistoryChange | None:
    """What turns the rows of `before` into those of `after`, which grew out of it; None: nothing.

    Costs a look at each peer and at the newest rows only.
    """
    if after is before:
        return None
    rollups: list[RollupRow] = []
    old_rollups: list[tuple[Size, str, int]] = []
    for name in _SERIES:
        for size, newest, oldest in _levels(getattr(before, name), getattr(after, name)):
            rollups.extend(_rollup(size, name, point) for point in newest)
            if oldest:
                old_rollups.append((size, name, oldest))
    bars = _bar_rows("hour", before.hours, after.hours) + _bar_rows("day", before.days, after.days)
    old_bars: list[tuple[Size, int]] = []
    if before.hours and before.hours[0].at_ms < after.hours[0].at_ms:
        old_bars.append(("hour", after.hours[0].at_ms))
    if before.days and before.days[0].at_ms < after.days[0].at_ms:
        old_bars.append(("day", after.days[0].at_ms))
    peers = [p for p, own in after.sessions.items() if before.sessions.get(p) is not own]
    happenings = [one for one in after.happenings if one.n > before.happened]
    cut = after.happenings[0].n if after.happenings else 0
    return HistoryChange(
        HistoryRows(
            tuple(rollups),
            tuple(bars),
            tuple(row for p in peers for row in _session_rows(p, after.sessions[p])),
            tuple(HappeningRow(one.n, one.at_ms, one.kind, one.text) for one in happenings),
            tuple(TotalRow(name, _held(getattr(after, name))) for name in _TOTALS),
        ),
        old_rollups=tuple(old_rollups),
        old_bars=tuple(old_bars),
        old_sessions=tuple((p, after.sessions[p][0].since_ms) for p in peers),
        old_peers=tuple(p for p in before.sessions if p not in after.sessions),
        old_happenings=cut,
    )


def _levels(before: Series, after: Series) -> Iterable[tuple[Size, Sequence[Point], int]]:
    """Per size: the roll-ups that are new or changed, and the start of the oldest if that moved."""
    for size, width in _SIZES.items():
        was: tuple[Point, ...] = getattr(before, f"{size}s")
        now: tuple[Point, ...] = getattr(after, f"{size}s")
        if was is now or not now:
            continue
        newest = was[-1].at_ms // width if was else -1
        first = now[0].at_ms // width
        moved = bool(was) and was[0].at_ms // width < first
        yield size, _from_end(now, newest * width), first * width if moved else 0


def _from_end(points: tuple[Point, ...], start_ms: int) -> list[Point]:
    """Points at or after `start_ms`, oldest first."""
    count = 0
    for point in reversed(points):
        if point.at_ms < start_ms:
            break
        count += 1
    return list(points[len(points) - count :])


def _rollup(size: Size, series: str, p: Point) -> RollupRow:
    width = _SIZES[size]
    start_ms = p.at_ms // width * width
    return RollupRow(size, series, start_ms, p.at_ms, _held(p.tokens), p.value, p.low, p.high, p.n)


def _bar_rows(size: Size, was: tuple[Bar, ...], now: tuple[Bar, ...]) -> list[BarRow]:
    """Parts of bars that are new or changed; only the newest bar ever changes."""
    newest = was[-1] if was else Bar(-1, {})
    rows: list[BarRow] = []
    for bar in now:
        if bar is newest or bar.at_ms < newest.at_ms:
            continue
        known = newest.parts if bar.at_ms == newest.at_ms else {}
        rows.extend(
            BarRow(size, bar.at_ms, peer, _held(tokens))
            for peer, tokens in bar.parts.items()
            if known.get(peer) != tokens
        )
    return rows


def _session_rows(peer: str, own: tuple[Session, ...]) -> list[SessionRow]:
    return [SessionRow(peer, one.since_ms, one.until_ms) for one in own]


def _held(amount: int) -> int:
    return min(amount, INTEGER_MAX)


def history_of(rows: HistoryRows, now_ms: int) -> History:
    """The history that was kept as `rows`, oldest first; ValueError when they are not such rows.

    What lies after `now_ms` is left out: the clock was wrong when it was measured. Whoever goes on
    with it in another process closes the open sessions first (`history.all_closed`).
    """
    try:
        rows = msgspec.convert(
            {name: [tuple(r) for r in getattr(rows, name)] for name in rows.__slots__}, HistoryRows
        )
    except msgspec.ValidationError as error:
        raise ValueError(f"not a kept history: {error}") from None
    points: dict[tuple[Size, str], list[Point]] = {}
    for row in rows.rollups:
        if row.at_ms <= now_ms:
            points.setdefault((row.size, row.series), []).append(Point(*row[3:]))
    history = History(
        hours=_bars(rows.bars, "hour", now_ms),
        days=_bars(rows.bars, "day", now_ms),
        happenings=tuple(Happening(*row) for row in rows.happenings if row.at_ms <= now_ms),
        happened=rows.happenings[-1].n if rows.happenings else 0,
        sessions=_sessions(rows.sessions, now_ms),
    )
    facts: dict[str, object] = {
        name: Series((), *(tuple(points.get((size, name), ())) for size in _SIZES))
        for name in _SERIES
    }
    facts |= {row.name: row.amount for row in rows.totals if row.name in _TOTALS}
    return msgspec.structs.replace(history, **facts)


def _bars(rows: tuple[BarRow, ...], size: Size, now_ms: int) -> tuple[Bar, ...]:
    parts: dict[int, dict[str, int]] = {}
    for row in rows:
        if row.size == size and row.start_ms <= now_ms:
            parts.setdefault(row.start_ms, {})[row.peer] = row.tokens
    return tuple(Bar(at_ms, own) for at_ms, own in parts.items())


def _sessions(rows: tuple[SessionRow, ...], now_ms: int) -> dict[str, tuple[Session, ...]]:
    """By peer; who came last is at the end, as the history wants it."""
    own: dict[str, list[Session]] = {}
    for row in rows:
        if row.since_ms <= now_ms:
            stretches = own.pop(row.peer, [])
            stretches.append(Session(row.since_ms, row.until_ms))
            own[row.peer] = stretches
    return {peer: tuple(stretches) for peer, stretches in own.items()}
