"""The public page's tables in a store: roll-ups by minute, hour and day, and what else it shows.

They are made when a page first asks for them: a daemon without one has none, and a version that
does not know them does not mind. Losing them costs charts, nothing that the exchange must know.
"""

from __future__ import annotations

from collections.abc import Iterable
from sqlite3 import Connection
from typing import Final

from dugnad.dashboard.history import DAY_BARS_MAX, HAPPENINGS_MAX, PARTS_MAX, SESSION_PEERS_MAX
from dugnad.dashboard.historyrows import (
    BarRow,
    HappeningRow,
    HistoryChange,
    HistoryRows,
    RollupRow,
    SessionRow,
    TotalRow,
)
from dugnad.peer.storefile import StoreFile

PAGE_SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS page_rollups (size TEXT NOT NULL, series TEXT NOT NULL,"
    " start_ms INTEGER NOT NULL, at_ms INTEGER NOT NULL, tokens INTEGER NOT NULL,"
    " value REAL NOT NULL, low REAL NOT NULL, high REAL NOT NULL, n INTEGER NOT NULL,"
    " PRIMARY KEY (size, series, start_ms)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS page_bars (size TEXT NOT NULL, start_ms INTEGER NOT NULL,"
    " peer TEXT NOT NULL, tokens INTEGER NOT NULL,"
    " PRIMARY KEY (size, start_ms, peer)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS page_sessions (peer TEXT NOT NULL, since_ms INTEGER NOT NULL,"
    " until_ms INTEGER NOT NULL, PRIMARY KEY (peer, since_ms)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS page_happenings (n INTEGER PRIMARY KEY, at_ms INTEGER NOT NULL,"
    " kind TEXT NOT NULL, text TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS page_totals (name TEXT PRIMARY KEY, amount INTEGER NOT NULL)"
    " WITHOUT ROWID",
)
_READ_MAX: Final = {
    "page_rollups": 4 * 7000,  # four series of at most 6 540 roll-ups
    "page_bars": 2 * DAY_BARS_MAX * PARTS_MAX,
    "page_sessions": 50 * SESSION_PEERS_MAX,
    "page_happenings": HAPPENINGS_MAX,
    "page_totals": 16,
}
"""Rows read back of a table: what a history holds at most, should the file hold more."""
_DATED: Final = {
    "page_rollups": "at_ms",
    "page_bars": "start_ms",
    "page_sessions": "since_ms",
    "page_happenings": "at_ms",
}


class PageTables:
    """A page's history in the file of a store. Every method raises StoreError."""

    def __init__(self, store: StoreFile) -> None:
        self._store = store

    def write(self, change: HistoryChange) -> None:
        """Write what changed, all or nothing."""
        rows = change.rows
        with self._store.batch() as db:
            _make(db)
            _replace(db, "page_rollups", 9, rows.rollups)
            _replace(db, "page_bars", 4, rows.bars)
            _replace(db, "page_sessions", 3, rows.sessions)
            _replace(db, "page_happenings", 4, rows.happenings)
            _replace(db, "page_totals", 2, rows.totals)
            for table, condition, keys in (
                ("page_rollups", "size = ? AND series = ? AND start_ms < ?", change.old_rollups),
                ("page_bars", "size = ? AND start_ms < ?", change.old_bars),
                ("page_sessions", "peer = ? AND since_ms < ?", change.old_sessions),
                ("page_sessions", "peer = ?", [(peer,) for peer in change.old_peers]),
                ("page_happenings", "n < ?", [(change.old_happenings,)]),
            ):
                db.executemany(f"DELETE FROM {table} WHERE {condition}", list(keys))

    def read(self, now_ms: int) -> HistoryRows:
        """All rows, oldest first. What was dated after now, by a clock that was wrong, is deleted:
        it would stand in the way of what is measured next."""
        with self._store.batch() as db:
            _make(db)
            for table, column in _DATED.items():
                db.execute(f"DELETE FROM {table} WHERE {column} > ?", (now_ms,))
            return HistoryRows(
                tuple(map(RollupRow._make, _newest(db, "page_rollups", "start_ms"))),
                tuple(map(BarRow._make, _newest(db, "page_bars", "start_ms"))),
                tuple(map(SessionRow._make, _newest(db, "page_sessions", "since_ms"))),
                tuple(map(HappeningRow._make, _newest(db, "page_happenings", "n"))),
                tuple(map(TotalRow._make, _newest(db, "page_totals", "name"))),
            )

    def clear(self) -> None:
        """Forget all of it."""
        with self._store.batch() as db:
            for table in _READ_MAX:
                db.execute(f"DELETE FROM {table}")


def _make(db: Connection) -> None:
    for statement in PAGE_SCHEMA:
        db.execute(statement)


def _replace(db: Connection, table: str, columns: int, rows: Iterable[tuple[object, ...]]) -> None:
    marks = ", ".join("?" * columns)
    db.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", list(rows))


def _newest(db: Connection, table: str, order: str) -> list[tuple[object, ...]]:
    statement = f"SELECT * FROM {table} ORDER BY {order} DESC LIMIT ?"
    return db.execute(statement, (_READ_MAX[table],)).fetchall()[::-1]
