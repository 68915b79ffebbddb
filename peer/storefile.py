"""The SQLite file under the store: opening and checking it, transactions, loose values."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self

from dugnad.dht.ids import RunId, run_text
from dugnad.peer.storeschema import (
    SCHEMA,
    SCHEMA_VERSION,
    StoreError,
    disk_error,
    os_error,
    store_errors,
)

BUSY_TIMEOUT_S: Final = 5.0
"""Wait for another process (``dugnad leaderboard``, a backup) that reads or checkpoints."""
META_BYTES_MAX: Final = 64 << 20
"""One loose value: the largest is the base of the credit fold."""


class StoreFile:
    """An open file with the tables of :data:`~dugnad.peer.storeschema.SCHEMA`."""

    def __init__(self, path: Path, connection: sqlite3.Connection, *, fresh: bool) -> None:
        self.path = path
        self.fresh = fresh
        """The file was made just now: a home without its promises has no duty until one head
        has passed (schedules.md R9)."""
        self._db = connection

    @classmethod
    def open(cls, path: Path, run: RunId | None = None) -> Self:
        """Open or make the store at ``path``; with ``run``, make sure that it belongs to it.

        StoreError when it is damaged, by a newer version, another run's, or cannot be opened.
        """
        try:
            fresh = not path.exists() or path.stat().st_size == 0
        except OSError as error:
            raise os_error(error, path) from error
        with store_errors(path):
            connection = sqlite3.connect(
                path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
        store = cls(path, connection, fresh=fresh)
        try:
            with store_errors(path):
                store._prepare(run)
        except BaseException:
            connection.close()
            raise
        return store

    def close(self) -> None:
        """Close the file; the store cannot be used any more."""
        self._db.close()

    def _prepare(self, run: RunId | None) -> None:
        db = self._db
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise StoreError(
                "newer",
                f"{self.path} was written by a newer version (format {version})",
                f"update dugnad, or use another data folder (this one reads {SCHEMA_VERSION})",
            )
        if version == 0:
            if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise disk_error("corrupt", self.path, "its tables are not dugnad's")
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        else:
            self._check_integrity()
        db.execute("PRAGMA journal_mode = WAL").fetchall()
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA foreign_keys = ON")
        if version == 0:
            with self._transaction(durable=True):
                for statement in SCHEMA:
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        self._check_run(run)

    def _check_integrity(self) -> None:
        found = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise disk_error("corrupt", self.path, found)

    def _check_run(self, run: RunId | None) -> None:
        if run is None:
            return
        stored = self._meta("run")
        if stored is None:
            self._set_meta("run", run)
        elif stored != run:
            raise StoreError(
                "other_run",
                f"{self.path} belongs to run {run_text(RunId(stored))}",
                "use another data folder for this run",
            )

    @contextmanager
    def _transaction(self, *, durable: bool = False) -> Iterator[None]:
        """All or nothing; with ``durable``, on the disk when the block is left."""
        with store_errors(self.path):
            if durable:
                self._db.execute("PRAGMA synchronous = FULL")
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            finally:
                if durable:
                    self._db.execute("PRAGMA synchronous = NORMAL")

    @contextmanager
    def batch(self) -> Iterator[sqlite3.Connection]:
        """All or nothing, for tables of others in this file (the public page's)."""
        with self._transaction():
            yield self._db

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Everything read in the block is of one moment; nothing is to be written in it."""
        with store_errors(self.path):
            self._db.execute("BEGIN")
            try:
                yield
            finally:
                self._db.execute("ROLLBACK")

    def _meta(self, key: str) -> bytes | None:
        with store_errors(self.path):
            row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else bytes(row[0])

    def _set_meta(self, key: str, value: bytes) -> None:
        assert len(value) <= META_BYTES_MAX, "a value that could not be read back"
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))
