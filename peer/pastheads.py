"""What a restarted daemon knows of the versions below its heads: a root with tables now and then,
and the commits above it from the store."""

from __future__ import annotations

from typing import Final

from dugnad.averaging.formats import Checkpoint, header_digest
from dugnad.averaging.history import History
from dugnad.averaging.pruning import VERSIONS_KEPT
from dugnad.dht.ids import RunId
from dugnad.dht.records import RecordError, decode, encode
from dugnad.peer.store import Store

ROOT_EVERY: Final = 128
"""Versions between two roots. The oldest that memory would keep begins the past; a restart costs
the replay of what is above it, about 0.1 ms a commit of a small swarm."""
ROOTS_KEPT: Final = VERSIONS_KEPT // ROOT_EVERY
"""Together they reach as far back as memory does."""
ROOTS_BYTES_MAX: Final = 32 << 20
"""Tables of eight roots; a swarm of 64 peers with a week's visitors comes to a megabyte."""


def keep_root(store: Store, fragment: int, point: Checkpoint) -> None:
    """Keep the tables of a head as a root, if the last one lies far enough below it."""
    version = point.commit.header.version
    newest = store.kept(f"roots/{fragment}/newest")
    if newest is not None and abs(version - int.from_bytes(newest, "big")) < ROOT_EVERY:
        return
    store.keep(f"roots/{fragment}", encode((*_roots(store, fragment), point)[-ROOTS_KEPT:]))
    store.keep(f"roots/{fragment}/newest", version.to_bytes(8, "big"))


def past_of(store: Store, run: RunId, point: Checkpoint, head: bytes) -> History:
    """The commits up to the head ``point`` that the store has, above the oldest root they stand on.

    ``head`` is its digest.
    """
    fragment = point.commit.header.fragment
    lowest = max(0, point.commit.header.version - VERSIONS_KEPT)
    chain = store.lineage(fragment, head, lowest)
    below = {record.header.parent: at for at, (_, record) in enumerate(chain)}
    if chain and chain[0][1].header.version == 1:
        return History(tuple(chain))
    for root in _roots(store, fragment):
        digest = header_digest(root.commit.header, run)
        if digest in below:
            return History(tuple(chain[below[digest] :]), (root, digest))
    return History()


def _roots(store: Store, fragment: int) -> tuple[Checkpoint, ...]:
    data = store.kept(f"roots/{fragment}")
    if data is None:
        return ()
    try:
        return decode(data, tuple[Checkpoint, ...], ROOTS_BYTES_MAX)
    except RecordError:
        return ()
