"""What each receipt was credited, in a table of the store: for pages that explain a number.

It follows from a commit and its ancestors, so a row never changes, whichever lineage is chosen. The
fold knows it of its newest commits only; here it stays as long as the receipt.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from dugnad.dht.ids import PeerId
from dugnad.peer.store import Store

_TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS credits (digest BLOB NOT NULL, peer BLOB NOT NULL,"
    " tokens INTEGER NOT NULL, twice INTEGER NOT NULL, PRIMARY KEY (digest, peer)) WITHOUT ROWID"
)


class CreditRow(NamedTuple):
    """Of what `peer` has in commit `digest`: tokens that nobody had covered before, and others."""

    digest: bytes
    peer: bytes
    tokens: int
    twice: int


def keep_credits(store: Store, rows: Iterable[CreditRow]) -> None:
    """Write rows. StoreError as usual."""
    with store.batch() as db:
        db.execute(_TABLE)
        db.executemany("INSERT OR REPLACE INTO credits VALUES (?, ?, ?, ?)", list(rows))


def forget_credits(store: Store) -> None:
    """Forget the rows of commits that are not stored any more. StoreError as usual."""
    with store.batch() as db:
        db.execute(_TABLE)
        db.execute("DELETE FROM credits WHERE digest NOT IN (SELECT digest FROM commits)")


def credits_of(store: Store, peer: PeerId, digests: Iterable[bytes]) -> dict[bytes, CreditRow]:
    """The rows of a peer in these commits, by digest, as far as they are known."""
    found: dict[bytes, CreditRow] = {}
    with store.batch() as db:
        db.execute(_TABLE)
        for digest in digests:
            row = db.execute(
                "SELECT * FROM credits WHERE digest = ? AND peer = ?", (digest, peer)
            ).fetchone()
            if row is not None:
                found[digest] = CreditRow(*row)
    return found
