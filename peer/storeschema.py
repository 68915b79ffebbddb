"""The tables of the store, and its errors in words that a person can act on."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from dugnad.dht.records import RecordError

SCHEMA_VERSION: Final = 1
"""Format of the file, in SQLite's ``user_version``; a newer one is refused."""

SCHEMA: Final = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL)",
    # The blobs are msgpack: header, inputs, acks of one CommitRecord. `time_ms` is commit time.
    "CREATE TABLE commits (digest BLOB PRIMARY KEY, fragment INTEGER NOT NULL,"
    " version INTEGER NOT NULL, parent BLOB NOT NULL, time_ms INTEGER NOT NULL,"
    " tokens INTEGER NOT NULL, header BLOB NOT NULL, inputs BLOB NOT NULL, acks BLOB NOT NULL)",
    "CREATE INDEX commits_by_version ON commits (fragment, version)",
    "CREATE TABLE receipts (peer BLOB NOT NULL, fragment INTEGER NOT NULL,"
    " version INTEGER NOT NULL,"
    " digest BLOB NOT NULL REFERENCES commits (digest) ON DELETE CASCADE,"
    " seq INTEGER NOT NULL, tokens INTEGER NOT NULL, PRIMARY KEY (peer, digest, seq))"
    " WITHOUT ROWID",
    "CREATE INDEX receipts_by_commit ON receipts (digest)",
    "CREATE TABLE seqs (fragment INTEGER PRIMARY KEY, seq INTEGER NOT NULL)",
    "CREATE TABLE promises (fragment INTEGER NOT NULL, parent BLOB NOT NULL,"
    " version INTEGER NOT NULL, digest BLOB NOT NULL, record BLOB NOT NULL,"
    " payload BLOB NOT NULL, PRIMARY KEY (fragment, parent))",
    "CREATE TABLE heads (fragment INTEGER PRIMARY KEY, version INTEGER NOT NULL,"
    " digest BLOB NOT NULL)",
    "CREATE TABLE in_flight (fragment INTEGER NOT NULL, seq INTEGER NOT NULL,"
    " base INTEGER NOT NULL, record BLOB NOT NULL, payload BLOB NOT NULL,"
    " fraction REAL NOT NULL, PRIMARY KEY (fragment, seq))",
    "CREATE TABLE peers (peer BLOB PRIMARY KEY, addresses BLOB NOT NULL,"
    " seen_ms INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE adverts (peer BLOB PRIMARY KEY, advert BLOB NOT NULL,"
    " seen_ms INTEGER NOT NULL) WITHOUT ROWID",
    # AUTOINCREMENT: a number is never used again, although old events are deleted.
    "CREATE TABLE events (number INTEGER PRIMARY KEY AUTOINCREMENT, time_ms INTEGER NOT NULL,"
    " kind TEXT NOT NULL, text TEXT NOT NULL)",
    "CREATE TABLE counters (name TEXT PRIMARY KEY, amount INTEGER NOT NULL) WITHOUT ROWID",
)

ErrorKind = Literal[
    "disk_full", "corrupt", "newer", "other_run", "locked", "no_access", "io", "bound"
]


class StoreError(Exception):
    """The store cannot do what was asked. ``kind`` is for programs, ``reason`` and ``fix`` for
    people. Nothing was deleted, and what was asked has not happened in part."""

    def __init__(self, kind: ErrorKind, reason: str, fix: str) -> None:
        super().__init__(f"{reason}; {fix}")
        self.kind = kind
        self.reason = reason
        self.fix = fix

    @property
    def disk_full(self) -> bool:
        """Whether room on the disk would help."""
        return self.kind == "disk_full"


_PRIMARY_CODE: Final = 0xFF
"""SQLite's extended result codes keep the primary one in the low byte."""
_KINDS: Final[dict[int, ErrorKind]] = {
    sqlite3.SQLITE_FULL: "disk_full",
    sqlite3.SQLITE_CORRUPT: "corrupt",
    sqlite3.SQLITE_NOTADB: "corrupt",
    sqlite3.SQLITE_BUSY: "locked",
    sqlite3.SQLITE_LOCKED: "locked",
    sqlite3.SQLITE_PERM: "no_access",
    sqlite3.SQLITE_READONLY: "no_access",
    sqlite3.SQLITE_CANTOPEN: "no_access",
    sqlite3.SQLITE_IOERR: "io",
}
_FIXES: Final[dict[ErrorKind, str]] = {
    "disk_full": "free some room on that disk; dugnad goes on by itself",
    "corrupt": "move the file away and start again: the swarm has what it held, except for"
    " contributions under way",
    "locked": "end the other program that has it open",
    "no_access": "check that the folder exists and that you may write there",
    "io": "check the disk",
}
_WORDS: Final[dict[ErrorKind, str]] = {
    "disk_full": "no room on the disk for {path}",
    "corrupt": "{path} is damaged ({cause})",
    "locked": "{path} is in use by another program",
    "no_access": "{path} cannot be opened or written ({cause})",
    "io": "the disk under {path} reports an error ({cause})",
}
_FULL_ERRNOS: Final = (errno.ENOSPC, errno.EDQUOT)


def disk_error(kind: ErrorKind, path: Path, cause: object) -> StoreError:
    """The error of that kind about ``path``, in words."""
    return StoreError(kind, _WORDS[kind].format(path=path, cause=cause), _FIXES[kind])


def os_error(error: OSError, path: Path) -> StoreError:
    """The store error that an error of the operating system amounts to."""
    if error.errno in _FULL_ERRNOS:
        return disk_error("disk_full", path, error)
    if isinstance(error, PermissionError | FileNotFoundError | NotADirectoryError):
        return disk_error("no_access", path, error.strerror)
    return disk_error("io", path, error.strerror)


@contextmanager
def store_errors(path: Path) -> Iterator[None]:
    """Turn SQLite's errors, and rows that cannot be decoded, into :class:`StoreError`."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
        kind = _KINDS.get(code & _PRIMARY_CODE)
        if kind is None:  # a mistake in a statement of ours
            raise
        raise disk_error(kind, path, error) from error
    except RecordError as error:
        raise disk_error("corrupt", path, error) from error
