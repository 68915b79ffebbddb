"""Small signed records that every peer of a run should hold, since boards are read by them.

Of each slot (a peer's owner; what one examiner says of a peer) the greatest record is kept, so that
two peers that heard the same records, in whatever order, hold the same and give it the same names.
What is held is found by others through ranges of its names (:mod:`dugnad.averaging.reconcile`).
Pure: the clock, and which peers have receipts, are passed in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from dugnad.averaging.dispute import Said
from dugnad.averaging.owners import BOND_BYTES_MAX, Bond, bond_fault, owners_of
from dugnad.averaging.verdicts import (
    KEPT_PER_PEER,
    VERDICT_BYTES_MAX,
    Verdict,
    by_peer,
    verdict_fault,
)
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.records import RecordError, Verifier, decode, encode, verify_ed25519

STATEMENT_BYTES_MAX: Final = max(BOND_BYTES_MAX, VERDICT_BYTES_MAX)
HELD_MAX: Final = 16_384
"""Records held: about 5 MB, six for each of 2700 peers."""
UNLISTED_MAX: Final = 1024
"""Of these, records about peers without a receipt: newcomers, or keys that cost nothing."""
AHEAD_MS: Final = 86_400_000
"""A record dated further ahead than a day is refused: no clock is that wrong, and its maker could
hardly ever replace it."""
RECOUNT_MS: Final = 60_000
"""Between two looks at which of the unlisted have receipts by now: a thousand look-ups."""
HELD_ALREADY: Final = "a newer statement, or the same one, is held"
AHEAD: Final = "a statement dated more than a day ahead"
FULL: Final = "too many statements are held"
CROWDED: Final = "too many statements about peers without a receipt"
UNKNOWN: Final = "a verdict of or about a peer without a receipt"
EXCUSED: Final = (HELD_ALREADY, AHEAD, FULL, CROWDED, UNKNOWN)
"""Refusals that are nobody's fault: what is held, who has receipts and what the time is differ
between two peers."""

Statement = Bond | Verdict
"""What a set holds."""
_NOBODY: Final = PeerId(b"")


class StatementSet:
    """The records that one peer holds. `listed` says whether a peer has receipts."""

    def __init__(
        self, run: RunId, listed: Callable[[PeerId], bool], verifier: Verifier = verify_ed25519
    ) -> None:
        self._run = run
        self._listed = listed
        self._verifier = verifier
        self._held: dict[PeerId, dict[PeerId, Statement]] = {}
        """Peer -> examiner (or nobody: the bond) -> record."""
        self._unlisted: set[PeerId] = set()
        """Peers that had no receipt when something about them was taken."""
        self._recounted_ms = 0
        self._by_name: dict[bytes, bytes] = {}
        self._names: list[bytes] | None = None
        self.changes = 0
        """Rises with each record that is taken."""

    def take(self, data: bytes, now_ms: int) -> str:
        """Keep a record from foreign bytes; why not, or ''."""
        try:
            record: Statement = decode(data, Statement, STATEMENT_BYTES_MAX)  # type: ignore[arg-type]
        except RecordError as error:
            return error.reason
        if record.number > now_ms + AHEAD_MS:
            return AHEAD
        held = self._held.get(PeerId(record.peer), {})
        before = held.get(_slot(record))
        if before is not None and not _greater(record, before):
            return HELD_ALREADY
        if isinstance(record, Bond):
            fault = bond_fault(record, self._verifier)
        else:
            fault = verdict_fault(record, self._run, self._verifier)
        if fault := fault or self._no_room(record, before, now_ms):
            return fault
        if isinstance(record, Verdict) and before is None:
            before = _least(held)
            if before is not None and before.order >= record.order:
                return HELD_ALREADY
        self._put(record, before)
        return ""

    def names(self) -> Sequence[bytes]:
        """The SHA-256 of each record held, ascending."""
        if self._names is None:
            self._names = sorted(self._by_name)
        return self._names

    def get(self, names: Iterable[bytes]) -> tuple[bytes, ...]:
        """The records of these names that are held."""
        return tuple(self._by_name[name] for name in names if name in self._by_name)

    def everything(self) -> tuple[bytes, ...]:
        """All records, in the order of their names: to keep on the disk."""
        return self.get(self.names())

    def bond(self, peer: PeerId) -> Bond | None:
        """The newest bond of a peer."""
        found = self._held.get(peer, {}).get(_NOBODY)
        return found if isinstance(found, Bond) else None

    def verdicts(self, peer: PeerId) -> tuple[Verdict, ...]:
        """What is said of a peer's speed."""
        return tuple(v for v in self._held.get(peer, {}).values() if isinstance(v, Verdict))

    def said(self) -> Said:
        """All that the board reads by."""
        records = [one for held in self._held.values() for one in held.values()]
        return Said(
            owners_of(one for one in records if isinstance(one, Bond)),
            by_peer(one for one in records if isinstance(one, Verdict)),
        )

    def _no_room(self, record: Statement, before: Statement | None, now_ms: int) -> str:
        peer = PeerId(record.peer)
        if isinstance(record, Verdict) and not (
            self._listed(peer) and self._listed(PeerId(record.examiner))
        ):
            return UNKNOWN
        if before is not None:
            return ""
        if len(self._by_name) >= HELD_MAX:
            return FULL
        if not self._listed(peer):
            self._recount(now_ms)
            if len(self._unlisted) >= UNLISTED_MAX:
                return CROWDED
            self._unlisted.add(peer)
        return ""

    def _recount(self, now_ms: int) -> None:
        """Where it is crowded, see now and then who has receipts by now."""
        if len(self._unlisted) >= UNLISTED_MAX and now_ms >= self._recounted_ms + RECOUNT_MS:
            self._recounted_ms = now_ms
            self._unlisted = {one for one in self._unlisted if not self._listed(one)}

    def _put(self, record: Statement, before: Statement | None) -> None:
        held = self._held.setdefault(PeerId(record.peer), {})
        if before is not None:
            del self._by_name[_name(encode(before))]
            del held[_slot(before)]
        data = encode(record)
        held[_slot(record)] = record
        self._by_name[_name(data)] = data
        self._names = None
        self.changes += 1


def _slot(record: Statement) -> PeerId:
    """Whose word it is, of all that is said about a peer; nobody's for the one bond."""
    return _NOBODY if isinstance(record, Bond) else PeerId(record.examiner)


def _greater(record: Statement, before: Statement) -> bool:
    if isinstance(record, Bond) and isinstance(before, Bond):
        return record.order > before.order
    if isinstance(record, Verdict) and isinstance(before, Verdict):
        return record.order > before.order
    raise AssertionError("records of two kinds share no slot")


def _least(held: dict[PeerId, Statement]) -> Verdict | None:
    """The verdict that has to go for another one; None while there is room."""
    found = [one for one in held.values() if isinstance(one, Verdict)]
    return min(found, key=lambda one: one.order) if len(found) >= KEPT_PER_PEER else None


def _name(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
