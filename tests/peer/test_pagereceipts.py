"""Receipts for strangers: judged by the lineage, and looked up for few at a time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from dugnad.averaging import formats as fm
from dugnad.averaging.coverage import unit_fragment
from dugnad.dashboard.live import TooManyReaders
from dugnad.dht.ids import peer_text
from dugnad.peer.creditrows import CreditRow, keep_credits
from dugnad.peer.manifest import Manifest
from dugnad.peer.pagereceipts import READERS_MAX
from dugnad.peer.store import Receipt as StoredReceipt
from dugnad.peer.store import Store

from .page_world import (  # noqa: TID252  the world is no installed package
    HOSTILE,
    ME,
    A,
    B,
    Peer,
    header_of,
    make_manifest,
    nothing_waits,
    page_of,
    turn,
)


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    """A small run's manifest."""
    return make_manifest()


@pytest.fixture
async def peer(manifest: Manifest) -> Peer:
    """A daemon that is just starting, alone."""
    return Peer(manifest)


async def test_receipts_are_judged_by_the_lineage(peer: Peer) -> None:
    digests = []
    for version, home in enumerate((A, A, ME, A, A, A), start=1):
        action, record = peer.merge(0, version, home, {A: 64})
        peer.store.commits[action.digest] = record
        digests.append(action.digest)
        peer.store.rows.insert(0, StoredReceipt(0, version, action.digest, version, 64, 5))
    other = fm.CommitRecord(header_of(peer.run, 0, 6, B), record.inputs)
    peer.store.commits[b"other"] = other
    peer.store.rows.append(StoredReceipt(0, 6, b"other", 6, 64, 5))
    peer.store.rows.append(StoredReceipt(0, 1, b"forgotten", 1, 64, 5))
    peer.daemon.ledger = ledger(4)
    found = await page_of(peer).receipts.receipts(peer_text(A), 100)
    judged = [(one.version, one.status) for one in found]
    assert judged == [
        (6, "provisional"),
        (5, "provisional"),
        (4, "provisional"),
        (3, "settled"),
        (2, "settled"),
        (1, "settled"),
        (6, "refused"),
    ]
    assert found[2].reason.startswith("no other peer has confirmed it yet")
    assert found[4].witness == peer_text(ME)
    assert found[0].commit == digests[-1].hex()
    assert found[-1].credited == 0
    assert {one.credited for one in found} <= {0, 64}
    assert len(await page_of(peer).receipts.receipts(peer_text(A), 2)) == 2


def ledger(settled: int) -> Any:  # Any: stands in for a ledger
    return SimpleNamespace(fold=SimpleNamespace(settled=lambda p: settled), flush=nothing_waits)


async def test_what_others_had_trained_before_is_not_credited_and_said(peer: Peer) -> None:
    context = peer.daemon.manifest.data.context
    own = peer.daemon.manifest
    mine = [
        index
        for index in range(8)
        if unit_fragment(peer.run, 0, index, len(own.table.fragments)) == 0
    ]
    pieces = (fm.UnitPiece(0, mine[0], 0, 3),)
    action, record = peer.merge(0, 1, A, {A: 3 * context})
    one = record.inputs[0]
    made = fm.CommitRecord(record.header, (msgspec.structs.replace(one, pieces=pieces),))
    peer.store.commits[action.digest] = made
    seq = one.contribution.seq
    peer.store.rows.append(StoredReceipt(0, 1, action.digest, seq, 3 * context, 5))
    peer.daemon.ledger = ledger(1)
    page = page_of(peer).receipts
    (unknown,) = await page.receipts(peer_text(A), 1)
    assert unknown.credited == 3 * context
    assert "is not known here" in unknown.reason
    store = cast(Store, peer.store)
    keep_credits(store, [CreditRow(action.digest, A, context, 2 * context)])
    (told,) = await page.receipts(peer_text(A), 1)
    assert told.credited == context
    assert f"{2 * context:,} tokens of it were trained by others before" in told.reason


async def test_whoever_has_no_key_has_no_receipts(peer: Peer) -> None:
    assert await page_of(peer).receipts.receipts(HOSTILE, 10) == ()


async def test_few_strangers_wait_for_the_disk_at_once(peer: Peer) -> None:
    peer.store.gate = asyncio.Event()
    receipts = page_of(peer).receipts
    waiting = [
        asyncio.ensure_future(receipts.receipts(peer_text(A), 1)) for _ in range(READERS_MAX)
    ]
    await turn()
    with pytest.raises(TooManyReaders):
        await receipts.receipts(peer_text(A), 1)
    peer.store.gate.set()
    assert await asyncio.gather(*waiting) == [[]] * READERS_MAX
