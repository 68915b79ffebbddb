"""What a peer must still know after its power was cut: one SQLite file for each run.

Commits with their inputs, heads, promises (numbers and headers that were signed), contributions in
flight, peers met, adverts seen, events, counters and the base of the credit fold. Synchronous, and
used from one thread at a time: the daemon gives it an executor with a single worker.

A promise is on the disk before its method returns (``synchronous=FULL``). Everything else may lose
its last moments in a power cut, never its consistency, and nothing in a crash of the process (WAL).
Nothing is deleted to repair anything: a file that cannot be used is named, with what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from dugnad.averaging.foldstate import FoldState, decode_state
from dugnad.averaging.formats import ACKS_MAX, Ack, CommitRecord, Header, HeadRow, Input
from dugnad.dht.ids import PeerId
from dugnad.dht.records import decode, encode
from dugnad.peer.storefile import StoreFile
from dugnad.peer.storeschema import StoreError, store_errors

__all__ = ["InFlight", "Promise", "Receipt", "RememberedPeer", "Store", "StoreError", "StoredEvent"]

HISTORY_MIN: Final = 1024
"""Newest versions of a fragment that are kept whatever their age: as many as an exchange holds in
memory (``pruning.VERSIONS_KEPT``), so that whoever asks for the usual chain gets it."""
KEEP_DAYS: Final = 7
"""Full lists of inputs are kept a week (DESIGN.md section 11); then the fold's base stands in."""
IN_FLIGHT_MAX: Final = 64
"""Own contributions kept per fragment: those of the last F = 4 versions, with room for a long
time alone; each holds an encoded fragment."""
PROMISES_KEPT: Final = 1024
"""Signed headers remembered per fragment: a head is never so far back that more could matter."""
PEERS_MAX: Final = 1024
"""Peers remembered and adverts seen: a start tries a few dozen."""
EVENTS_MAX: Final = 5000
"""Events kept: a day of a lively swarm."""
EVENT_CHARS_MAX: Final = 500
COUNTERS_MAX: Final = 256
"""Names of counters: they come from this program, a few dozen."""
LINEAGE_MAX: Final = 100_000
"""Commits in one answer of :meth:`Store.lineage`: a week of one merge every six seconds."""
INTEGER_MAX: Final = (1 << 63) - 1
"""SQLite's largest integer; msgpack's goes to twice that, so a foreign number may be above."""
PIECE_BYTES_MAX: Final = 64 << 20
"""A row of ours when read back: far above any message, so that only damage exceeds it."""
_DAY_MS: Final = 86_400_000
_RECEIPTS_PER_QUERY_MAX: Final = 10_000


@dataclass(frozen=True, slots=True)
class InFlight:
    """An own contribution that is not settled yet. ``record`` is encoded by whoever keeps it;
    ``fraction`` is the share of it that is still under way."""

    fragment: int
    seq: int
    base: int
    record: bytes
    payload: bytes
    fraction: float = 1.0


@dataclass(frozen=True, slots=True)
class Promise:
    """The one header that this peer signs on top of ``parent``; ``record``: the encoded commit."""

    fragment: int
    parent: bytes
    version: int
    digest: bytes
    record: bytes = b""
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class RememberedPeer:
    """A peer met, with the addresses at which it was reached."""

    peer: PeerId
    addresses: tuple[str, ...]
    seen_ms: int


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """Something that happened, in plain words; ``number`` rises by one with each."""

    number: int
    time_ms: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """One input of a stored commit: what stands behind a number of the leaderboard."""

    fragment: int
    version: int
    digest: bytes
    seq: int
    tokens: int
    time_ms: int


class Store(StoreFile):
    """An open store. Every method raises :class:`StoreError` and no other error of the disk."""

    # Commits.

    def add_commits(self, commits: Iterable[tuple[bytes, CommitRecord]]) -> int:
        """Keep judged commits, all or none; how many are new. Acks of known ones are added."""
        added = 0
        with self._transaction():
            for digest, commit in commits:
                added += self._add_commit(digest, commit)
        return added

    def add_ack(self, ack: Ack) -> bool:
        """Keep an ack of a stored commit; whether it is new."""
        with self._transaction():
            return self._merge_acks(ack.digest, (ack,))

    def commit(self, digest: bytes) -> CommitRecord | None:
        """The stored commit called ``digest``."""
        with store_errors(self.path):
            row = self._db.execute(
                "SELECT header, inputs, acks FROM commits WHERE digest = ?", (digest,)
            ).fetchone()
        return None if row is None else self._record(row)

    def lineage(
        self, fragment: int, head: bytes, down_to: int = 0
    ) -> list[tuple[bytes, CommitRecord]]:
        """(digest, commit) on the chain of ``head``, versions above ``down_to``, oldest first.

        Shorter where a commit is not held: the first one returned then names a parent that is not.
        """
        found: list[tuple[bytes, CommitRecord]] = []
        digest = head
        while len(found) < LINEAGE_MAX:
            commit = self.commit(digest)
            if commit is None or commit.header.fragment != fragment:
                break
            if commit.header.version <= down_to:
                break
            found.append((digest, commit))
            digest = commit.header.parent
        return found[::-1]

    def digests(self, fragment: int, since_ms: int) -> list[bytes]:
        """Names of the stored commits of a fragment that are dated since then, ascending."""
        with store_errors(self.path):
            rows = self._db.execute(
                "SELECT digest FROM commits WHERE fragment = ? AND time_ms >= ?"
                " ORDER BY digest LIMIT ?",
                (fragment, since_ms, LINEAGE_MAX),
            ).fetchall()
        return [bytes(row[0]) for row in rows]

    def versions(self, fragment: int) -> int:
        """How many versions of a fragment have a stored commit."""
        with store_errors(self.path):
            row = self._db.execute(
                "SELECT count(DISTINCT version) FROM commits WHERE fragment = ?", (fragment,)
            ).fetchone()
        return int(row[0])

    def commits(self, fragment: int) -> Iterator[tuple[bytes, CommitRecord]]:
        """(digest, commit) of all stored commits of a fragment, by version and digest."""
        with store_errors(self.path):
            names = self._db.execute(
                "SELECT digest FROM commits WHERE fragment = ? ORDER BY version, digest",
                (fragment,),
            ).fetchall()
        for (digest,) in names:
            commit = self.commit(digest)
            if commit is not None:
                yield bytes(digest), commit

    def commits_after(self, row: int, limit: int = 64) -> list[tuple[int, bytes, CommitRecord]]:
        """(row, digest, commit) of stored commits in the order in which they came, those after
        ``row`` (0: from the first); rows rise.
        """
        with store_errors(self.path):
            rows = self._db.execute(
                "SELECT rowid, digest, header, inputs, acks FROM commits WHERE rowid > ?"
                " ORDER BY rowid LIMIT ?",
                (row, limit),
            ).fetchall()
        return [(int(n), bytes(digest), self._record((h, i, a))) for n, digest, h, i, a in rows]

    def receipts(self, peer: PeerId, limit: int = 100) -> list[Receipt]:
        """The newest inputs of ``peer`` in stored commits, newest first."""
        with store_errors(self.path):
            rows = self._db.execute(
                "SELECT r.fragment, r.version, r.digest, r.seq, r.tokens, c.time_ms"
                " FROM receipts r JOIN commits c ON c.digest = r.digest WHERE r.peer = ?"
                " ORDER BY c.time_ms DESC, r.fragment, r.digest LIMIT ?",
                (peer, min(limit, _RECEIPTS_PER_QUERY_MAX)),
            ).fetchall()
        return [Receipt(*row) for row in rows]

    # Promises.

    def issue_seq(self, fragment: int) -> int:
        """The next number of an own contribution of ``fragment``: never issued before, by anybody
        with this file, and on the disk before it is returned. Starts at 1."""
        with self._transaction(durable=True):
            row = self._db.execute(
                "INSERT INTO seqs VALUES (?, 1)"
                " ON CONFLICT (fragment) DO UPDATE SET seq = seq + 1 RETURNING seq",
                (fragment,),
            ).fetchone()
        return int(row[0])

    def last_seq(self, fragment: int) -> int:
        """The newest number issued for ``fragment``; 0 when none was."""
        with store_errors(self.path):
            row = self._db.execute(
                "SELECT seq FROM seqs WHERE fragment = ?", (fragment,)
            ).fetchone()
        return 0 if row is None else int(row[0])

    def raise_seq(self, fragment: int, listed: int) -> None:
        """Never issue ``listed`` or less: a lineage lists it, so this file is an older copy."""
        with self._transaction(durable=True):
            self._db.execute(
                "INSERT INTO seqs VALUES (?, ?)"
                " ON CONFLICT (fragment) DO UPDATE SET seq = max(seq, excluded.seq)",
                (fragment, listed),
            )

    def promise_header(self, promise: Promise) -> bool:
        """Whether this header may be signed on top of its parent; if so, no other ever.

        Durable before it returns True. The payload is kept for the newest promise of a fragment
        only: a home that died between promising and announcing announces it after its restart.
        """
        one = promise
        with self._transaction(durable=True):
            self._db.execute(
                "INSERT OR IGNORE INTO promises VALUES (?, ?, ?, ?, ?, ?)",
                (one.fragment, one.parent, one.version, one.digest, one.record, one.payload),
            )
            row = self._db.execute(
                "SELECT digest FROM promises WHERE fragment = ? AND parent = ?",
                (one.fragment, one.parent),
            ).fetchone()
            allowed = bytes(row[0]) == one.digest
            if allowed:
                self._thin_promises(one)
        return allowed

    def promises(self, fragment: int) -> list[Promise]:
        """The remembered promises of a fragment, oldest version first."""
        with store_errors(self.path):
            rows = self._db.execute(
                "SELECT * FROM promises WHERE fragment = ? ORDER BY version, rowid", (fragment,)
            ).fetchall()
        return [Promise(*row) for row in rows]

    # Heads, contributions in flight, the base of the fold.

    def set_heads(self, heads: Iterable[HeadRow]) -> None:
        """Remember the heads that the exchange has chosen."""
        with self._transaction():
            self._db.executemany(
                "INSERT OR REPLACE INTO heads VALUES (?, ?, ?)",
                [(head.fragment, head.version, head.digest) for head in heads],
            )

    def heads(self) -> tuple[HeadRow, ...]:
        """The remembered heads, ascending by fragment."""
        with store_errors(self.path):
            rows = self._db.execute("SELECT * FROM heads ORDER BY fragment").fetchall()
        return tuple(HeadRow(*row) for row in rows)

    def keep_in_flight(self, one: InFlight) -> None:
        """Keep, or replace, an own contribution. StoreError ``bound`` beyond IN_FLIGHT_MAX."""
        with self._transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO in_flight VALUES (?, ?, ?, ?, ?, ?)",
                (one.fragment, one.seq, one.base, one.record, one.payload, one.fraction),
            )
            count = self._db.execute(
                "SELECT count(*) FROM in_flight WHERE fragment = ?", (one.fragment,)
            ).fetchone()[0]
            if count > IN_FLIGHT_MAX:
                reason = f"over {IN_FLIGHT_MAX} contributions of fragment {one.fragment} unsettled"
                raise StoreError("bound", reason, "drop what is settled before keeping more")

    def set_fraction(self, fragment: int, seq: int, fraction: float) -> None:
        """Note which share of a contribution is still under way."""
        with self._transaction():
            self._db.execute(
                "UPDATE in_flight SET fraction = ? WHERE fragment = ? AND seq = ?",
                (fraction, fragment, seq),
            )

    def drop_in_flight(self, fragment: int, seq: int) -> None:
        """Forget a settled contribution."""
        with self._transaction():
            self._db.execute(
                "DELETE FROM in_flight WHERE fragment = ? AND seq = ?", (fragment, seq)
            )

    def in_flight(self) -> list[InFlight]:
        """Own contributions that are not settled, ascending by fragment and number."""
        with store_errors(self.path):
            rows = self._db.execute("SELECT * FROM in_flight ORDER BY fragment, seq").fetchall()
        return [InFlight(*row) for row in rows]

    def keep(self, key: str, value: bytes) -> None:
        """Keep a value under a key of this program (not for foreign keys)."""
        self._set_meta(f"kept/{key}", value)

    def kept(self, key: str) -> bytes | None:
        """The value kept under ``key``."""
        with store_errors(self.path):
            return self._meta(f"kept/{key}")

    def save_fold(self, state: FoldState) -> None:
        """Keep the base of the credit fold."""
        self._set_meta("fold", encode(state))

    def load_fold(self) -> FoldState | None:
        """The kept base of the credit fold; None when there is none."""
        data = self._meta("fold")
        with store_errors(self.path):
            return None if data is None else decode_state(data)

    # People and what happened.

    def remember_peer(self, peer: PeerId, addresses: tuple[str, ...], seen_ms: int) -> None:
        """Remember where a peer was reached; the longest unseen beyond PEERS_MAX are forgotten."""
        with self._transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO peers VALUES (?, ?, ?)", (peer, encode(addresses), seen_ms)
            )
            self._keep_newest("peers", PEERS_MAX)

    def remembered_peers(self, limit: int = PEERS_MAX) -> list[RememberedPeer]:
        """Peers met, the last seen first."""
        with store_errors(self.path):
            rows = self._db.execute(
                "SELECT * FROM peers ORDER BY seen_ms DESC, peer LIMIT ?", (limit,)
            ).fetchall()
            return [
                RememberedPeer(
                    PeerId(peer), decode(addresses, tuple[str, ...], PIECE_BYTES_MAX), seen
                )
                for peer, addresses, seen in rows
            ]

    def keep_advert(self, peer: PeerId, advert: bytes, seen_ms: int) -> None:
        """Keep the newest signed advert of a peer, as it came."""
        with self._transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO adverts VALUES (?, ?, ?)", (peer, advert, seen_ms)
            )
            self._keep_newest("adverts", PEERS_MAX)

    def adverts(self) -> list[tuple[PeerId, bytes, int]]:
        """(peer, advert, when seen), the newest first."""
        with store_errors(self.path):
            rows = self._db.execute("SELECT * FROM adverts ORDER BY seen_ms DESC, peer").fetchall()
        return [(PeerId(peer), advert, seen) for peer, advert, seen in rows]

    def add_event(self, time_ms: int, kind: str, text: str) -> int:
        """Keep an event on one printable line; its number. The oldest beyond EVENTS_MAX go."""
        line = "".join(c if c.isprintable() else " " for c in text[:EVENT_CHARS_MAX])
        with self._transaction():
            number = self._db.execute(
                "INSERT INTO events (time_ms, kind, text) VALUES (?, ?, ?)", (time_ms, kind, line)
            ).lastrowid
            assert number is not None, "an insert has a row id"
            self._db.execute("DELETE FROM events WHERE number <= ?", (number - EVENTS_MAX,))
        return number

    def events(self, since: int = 0, limit: int = EVENTS_MAX) -> list[StoredEvent]:
        """The newest events numbered above ``since``, oldest first."""
        with store_errors(self.path):
            rows = self._db.execute(
                "SELECT * FROM events WHERE number > ? ORDER BY number DESC LIMIT ?", (since, limit)
            ).fetchall()
        return [StoredEvent(*row) for row in rows[::-1]]

    def count(self, amounts: Mapping[str, int]) -> None:
        """Add to counters; they begin at 0. StoreError ``bound`` beyond COUNTERS_MAX names."""
        with self._transaction():
            self._db.executemany(
                "INSERT INTO counters VALUES (?, ?)"
                " ON CONFLICT (name) DO UPDATE SET amount = amount + excluded.amount",
                list(amounts.items()),
            )
            names = self._db.execute("SELECT count(*) FROM counters").fetchone()[0]
            if names > COUNTERS_MAX:
                raise StoreError("bound", "too many counters", "count under fewer names")

    def counters(self) -> dict[str, int]:
        """All counters by name."""
        with store_errors(self.path):
            rows = self._db.execute("SELECT name, amount FROM counters ORDER BY name").fetchall()
        return dict(rows)

    def prune(self, now_ms: int, keep_days: int = KEEP_DAYS) -> int:
        """Forget commits older than ``keep_days`` and not among the newest HISTORY_MIN versions of
        their fragment; how many went. Promises, heads and the fold's base stay."""
        with self._transaction():
            gone = self._db.execute(
                "DELETE FROM commits WHERE time_ms < ? AND version <= "
                "(SELECT max(version) FROM commits c WHERE c.fragment = commits.fragment) - ?",
                (now_ms - keep_days * _DAY_MS, HISTORY_MIN),
            ).rowcount
        with store_errors(self.path):
            self._db.execute("PRAGMA incremental_vacuum").fetchall()
        return gone

    def _add_commit(self, digest: bytes, commit: CommitRecord) -> bool:
        header = commit.header
        counted = [one.contribution for one in commit.inputs if not one.refusal]
        tokens = sum(c.tokens for c in counted)
        numbers = (header.fragment, header.version, header.time_ms, tokens)
        if max(*numbers, *(c.seq for c in counted)) > INTEGER_MAX:
            raise StoreError("bound", "a commit with a number that no file can hold", "refuse it")
        new = self._db.execute(
            "INSERT OR IGNORE INTO commits VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                digest,
                header.fragment,
                header.version,
                header.parent,
                header.time_ms,
                tokens,
                encode(header),
                encode(commit.inputs),
                encode(commit.acks[:ACKS_MAX]),
            ),
        ).rowcount
        if not new:
            self._merge_acks(digest, commit.acks)
            return False
        self._db.executemany(
            "INSERT OR IGNORE INTO receipts VALUES (?, ?, ?, ?, ?, ?)",
            [(c.peer, header.fragment, header.version, digest, c.seq, c.tokens) for c in counted],
        )
        return True

    def _merge_acks(self, digest: bytes, acks: tuple[Ack, ...]) -> bool:
        row = self._db.execute("SELECT acks FROM commits WHERE digest = ?", (digest,)).fetchone()
        if row is None:
            return False
        known = {ack.peer: ack for ack in decode(row[0], tuple[Ack, ...], PIECE_BYTES_MAX)}
        merged = {ack.peer: ack for ack in acks} | known
        if len(merged) == len(known) or len(known) >= ACKS_MAX:
            return False
        kept = tuple(merged[peer] for peer in sorted(merged))[:ACKS_MAX]
        self._db.execute("UPDATE commits SET acks = ? WHERE digest = ?", (encode(kept), digest))
        return True

    def _record(self, row: tuple[bytes, bytes, bytes]) -> CommitRecord:
        with store_errors(self.path):
            return CommitRecord(
                decode(row[0], Header, PIECE_BYTES_MAX),
                decode(row[1], tuple[Input, ...], PIECE_BYTES_MAX),
                decode(row[2], tuple[Ack, ...], PIECE_BYTES_MAX),
            )

    def _thin_promises(self, newest: Promise) -> None:
        """Keep one payload, and PROMISES_KEPT promises: nobody goes back that far."""
        self._db.execute(
            "UPDATE promises SET payload = x'' WHERE fragment = ? AND parent != ?",
            (newest.fragment, newest.parent),
        )
        self._db.execute(
            "DELETE FROM promises WHERE fragment = ? AND rowid NOT IN (SELECT rowid FROM promises"
            " WHERE fragment = ? ORDER BY rowid DESC LIMIT ?)",
            (newest.fragment, newest.fragment, PROMISES_KEPT),
        )

    def _keep_newest(self, table: str, rows_max: int) -> None:
        self._db.execute(
            f"DELETE FROM {table} WHERE peer IN"
            f" (SELECT peer FROM {table} ORDER BY seen_ms DESC, peer LIMIT -1 OFFSET ?)",
            (rows_max,),
        )
