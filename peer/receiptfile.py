"""The file of a run's receipts: written as a stream, read as one, judged by whoever reads it.

After a line of magic come records, each four bytes of length (big-endian) and that many of msgpack:
an *opening* (format, the manifest, and on which commit the first ones of each fragment stand), the
statements about whose machines the peers are, ascending by their hashes, the commits with their
inputs in ascending order of (fragment, version, digest), and a *closing* (how many commits they
are, SHA-256 of everything before it, SHA-256 of the board that follows from them). Acks
are left out, since peers hear different ones: equal sets make equal files, byte by byte.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, BinaryIO, Final

import msgspec

from dugnad.averaging.formats import DIGEST_BYTES, FRAGMENTS_MAX, MESSAGE_BYTES_MAX, CommitRecord
from dugnad.averaging.statements import STATEMENT_BYTES_MAX
from dugnad.dht.records import RecordError, decode, encode

MAGIC: Final = b"dugnad receipts\n"
FORMAT: Final = 1
"""Version of the layout; a reader refuses any other."""
MANIFEST_MAX: Final = 4 << 20
"""Bytes of a manifest, as in `dugnad.peer.manifest`."""
OPENING_BYTES_MAX: Final = MANIFEST_MAX + 48 * FRAGMENTS_MAX + 64
RECORD_BYTES_MAX: Final = max(OPENING_BYTES_MAX, MESSAGE_BYTES_MAX)
"""One record: a commit is as long as it may be where peers hand it over."""
_LENGTH_BYTES: Final = 4

_Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class Beginning(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The commit (or version 0) on which the first commits of a fragment stand."""

    version: _Count
    digest: _Digest


class Opening(
    msgspec.Struct, frozen=True, array_like=True, tag="receipts", forbid_unknown_fields=True
):
    """The first record. The SHA-256 of `manifest` is the run id."""

    format: _Count
    manifest: Annotated[bytes, msgspec.Meta(max_length=MANIFEST_MAX)]
    starts: Annotated[tuple[Beginning, ...], msgspec.Meta(max_length=FRAGMENTS_MAX)]


class Listed(msgspec.Struct, frozen=True, array_like=True, tag="commit"):
    """One commit with its inputs."""

    commit: CommitRecord


class Stated(
    msgspec.Struct, frozen=True, array_like=True, tag="statement", forbid_unknown_fields=True
):
    """One statement (`dugnad.averaging.statements`) by which the board is read."""

    record: Annotated[bytes, msgspec.Meta(max_length=STATEMENT_BYTES_MAX)]


class Closing(msgspec.Struct, frozen=True, array_like=True, tag="end", forbid_unknown_fields=True):
    """The last record: a file without it was cut."""

    commits: _Count
    sha256: _Digest
    board_sha256: _Digest


Record = Opening | Stated | Listed | Closing


class FileFault(Exception):
    """What is wrong with a file of receipts; `reason` is safe to print."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Placed:
    """A record and where in the file it is: its number (the opening is 0) and its first byte."""

    number: int
    offset: int
    record: Record


class ReceiptWriter:
    """Writes one file, record by record. OSError as usual."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.commits = 0

    def open(self, manifest: bytes, starts: tuple[Beginning, ...]) -> None:
        """Write the beginning."""
        self._put(MAGIC)
        self._frame(Opening(FORMAT, manifest, starts))

    def state(self, statement: bytes) -> None:
        """Write a statement; all of them stand before the first commit."""
        assert not self.commits, "statements come first"
        self._frame(Stated(statement))

    def add(self, commit: CommitRecord) -> None:
        """Write a commit, without its acks."""
        self._frame(Listed(CommitRecord(commit.header, commit.inputs)))
        self.commits += 1

    def end(self, board: bytes) -> None:
        """Write the closing, and force all of it to the disk."""
        board_sha256 = hashlib.sha256(board).digest()
        self._frame(Closing(self.commits, self._hash.digest(), board_sha256))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _frame(self, record: Record) -> None:
        data = encode(record)
        assert len(data) <= RECORD_BYTES_MAX, "a record that no reader would take"
        self._put(len(data).to_bytes(_LENGTH_BYTES, "big") + data)

    def _put(self, data: bytes) -> None:
        self._hash.update(data)
        self._file.write(data)


class ReceiptReader:
    """Reads one file. Each method raises FileFault with the place, or OSError as usual."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def records(self) -> Iterator[Placed]:
        """All records; ends after a closing with nothing behind it whose hash holds."""
        self._file.seek(0)
        total = hashlib.sha256()
        magic = self._file.read(len(MAGIC))
        if magic != MAGIC:
            raise FileFault("it is not a file of receipts: it begins with other bytes")
        total.update(magic)
        number, commits = 0, 0
        while True:
            offset = self._file.tell()
            raw = self._raw(number)
            record = _decoded(raw[_LENGTH_BYTES:], number)
            if isinstance(record, Closing):
                self._check_end(record, commits, total.digest())
                yield Placed(number, offset, record)
                return
            commits += isinstance(record, Listed)
            late = isinstance(record, Stated) and commits > 0
            if late or isinstance(record, Opening) != (number == 0):
                raise FileFault(f"record {number} is not of the kind that is due there")
            total.update(raw)
            yield Placed(number, offset, record)
            number += 1

    def commit_at(self, offset: int) -> CommitRecord:
        """The commit that a walk found at this byte."""
        self._file.seek(offset)
        record = _decoded(self._raw(1)[_LENGTH_BYTES:], 1)
        if not isinstance(record, Listed):
            raise FileFault("the file changed while it was read")
        return record.commit

    def _raw(self, number: int) -> bytes:
        """Length and body of the record at this place."""
        head = self._file.read(_LENGTH_BYTES)
        size = int.from_bytes(head, "big")
        if len(head) == _LENGTH_BYTES and size > RECORD_BYTES_MAX:
            raise FileFault(
                f"record {number} is too long: it claims {size} bytes, "
                f"{RECORD_BYTES_MAX} are possible"
            )
        body = self._file.read(size) if len(head) == _LENGTH_BYTES else b""
        if len(head) < _LENGTH_BYTES or len(body) < size:
            raise FileFault(f"the file is truncated: it ends before the end of record {number}")
        return head + body

    def _check_end(self, closing: Closing, commits: int, sha256: bytes) -> None:
        if closing.commits != commits:
            raise FileFault(f"it says that it holds {closing.commits} commits, it holds {commits}")
        if closing.sha256 != sha256:
            raise FileFault("its bytes are not those that were written: the SHA-256 differs")
        if self._file.read(1):
            raise FileFault("there is something behind its end")


def _decoded(data: bytes, number: int) -> Record:
    try:
        record: Record = decode(data, Record, RECORD_BYTES_MAX)  # type: ignore[arg-type]
    except RecordError as error:
        raise FileFault(f"record {number} cannot be read: {error.reason}") from None
    return record
