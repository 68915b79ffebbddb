"""Small signed records that every peer of a run should hold, since boards are read by them.

Of each slot (a peer's owner) the greatest record is kept, so that two peers that heard the same
records, in whatever order, hold the same and give it the same names. What is held is found by
others through ranges of its names (:mod:`dugnad.averaging.reconcile`). Pure: the clock, and which
peers have receipts, are passed in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from dugnad.averaging.owners import BOND_BYTES_MAX, Bond, bond_fault
from dugnad.dht.ids import PeerId
from dugnad.dht.records import RecordError, Verifier, decode, encode, verify_ed25519

STATEMENT_BYTES_MAX: Final = BOND_BYTES_MAX
HELD_MAX: Final = 16_384
"""Records held: about 5 MB, and one for each peer that a board keeps apart."""
UNLISTED_MAX: Final = 1024
"""Of these, records about peers without a receipt: newcomers, or keys that cost nothing."""
AHEAD_MS: Final = 86_400_000
"""A record dated further ahead than a day is refused: no clock is that wrong, and its maker could
hardly ever replace it."""
HELD_ALREADY: Final = "a newer statement, or the same one, is held"
AHEAD: Final = "a statement dated more than a day ahead"
FULL: Final = "too many statements are held"
CROWDED: Final = "too many statements about peers without a receipt"
EXCUSED: Final = (HELD_ALREADY, AHEAD, FULL, CROWDED)
"""Refusals that are nobody's fault: what is held, who has receipts and what the time is differ
between two peers."""

Statement = Bond
"""What a set holds."""


class StatementSet:
    """The records that one peer holds. `listed` says whether a peer has receipts."""

    def __init__(
        self, listed: Callable[[PeerId], bool], verifier: Verifier = verify_ed25519
    ) -> None:
        self._listed = listed
        self._verifier = verifier
        self._bonds: dict[PeerId, Bond] = {}
        self._by_name: dict[bytes, bytes] = {}
        self._names: list[bytes] | None = None
        self.changes = 0
        """Rises with each record that is taken."""

    def take(self, data: bytes, now_ms: int) -> str:
        """Keep a record from foreign bytes; why not, or ''."""
        try:
            record = decode(data, Statement, STATEMENT_BYTES_MAX)
        except RecordError as error:
            return error.reason
        if record.number > now_ms + AHEAD_MS:
            return AHEAD
        held = self._bonds.get(PeerId(record.peer))
        if held is not None and held.order >= record.order:
            return HELD_ALREADY
        if fault := bond_fault(record, self._verifier):
            return fault
        if held is None and (fault := self._no_room(PeerId(record.peer))):
            return fault
        self._put(record, held)
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

    def bonds(self) -> Iterable[Bond]:
        """The newest bond of each peer, ended ones included."""
        return self._bonds.values()

    def bond(self, peer: PeerId) -> Bond | None:
        """The newest bond of a peer."""
        return self._bonds.get(peer)

    def _no_room(self, peer: PeerId) -> str:
        if len(self._bonds) >= HELD_MAX:
            return FULL
        if not self._listed(peer):
            unlisted = sum(not self._listed(one) for one in self._bonds)
            if unlisted >= UNLISTED_MAX:
                return CROWDED
        return ""

    def _put(self, record: Bond, before: Bond | None) -> None:
        if before is not None:
            del self._by_name[_name(encode(before))]
        data = encode(record)
        self._bonds[PeerId(record.peer)] = record
        self._by_name[_name(data)] = data
        self._names = None
        self.changes += 1


def _name(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
