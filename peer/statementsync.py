"""Statements on the disk and between two peers: what a keeper and an observer both do."""

from __future__ import annotations

import random
from typing import Final

from dugnad.averaging.dispute import Said
from dugnad.averaging.reconcile import Reconciliation
from dugnad.averaging.statements import EXCUSED, HELD_MAX, STATEMENT_BYTES_MAX, StatementSet
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.records import decode, encode
from dugnad.peer import clock
from dugnad.peer.pull import Puller
from dugnad.peer.store import Store
from dugnad.peer.transferwire import STATEMENTS_MAX

KEY: Final = "statements"
FETCHES_MAX: Final = 16
"""Requests for records after one comparison: some 900 records; the rest comes with the next."""
_FILE_BYTES_MAX: Final = HELD_MAX * (STATEMENT_BYTES_MAX + 4) + 8


async def take_statements(
    held: StatementSet, puller: Puller, peer: PeerId, rng: random.Random
) -> str:
    """Take from `peer` the statements that are not held; its first fault, or ''. PullError."""
    search = Reconciliation(held.names())
    while asked := search.request():
        if fault := search.answer(await puller.statement_summaries(peer, asked)):
            return fault
    missing = search.missing
    rng.shuffle(missing)  # those that are refused each time must not stand in the way
    for start in range(0, min(len(missing), FETCHES_MAX * STATEMENTS_MAX), STATEMENTS_MAX):
        names = missing[start : start + STATEMENTS_MAX]
        now = clock.wall_ms()
        for record in await puller.statements(peer, names):
            fault = held.take(record, now)
            if fault and fault not in EXCUSED:
                return fault
    return ""


def stored_statements(store: Store) -> tuple[bytes, ...]:
    """What a store has kept of them, in the order of their names. RecordError when damaged."""
    data = store.kept(KEY)
    return decode(data, tuple[bytes, ...], _FILE_BYTES_MAX) if data is not None else ()


def stored_said(store: Store, run: RunId) -> Said:
    """What the board is to be read by, as a store has kept it. RecordError when damaged."""
    held = StatementSet(run, lambda peer: True)
    for record in stored_statements(store):
        held.take(record, clock.wall_ms())
    return held.said()


def keep_statements(store: Store, held: StatementSet) -> None:
    """Write down what is held."""
    store.keep(KEY, encode(held.everything()))
