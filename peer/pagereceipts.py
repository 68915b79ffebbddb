"""The receipts of one peer, for the public pages: read from the disk, judged by the lineages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from dugnad.averaging.coverage import unit_fragment
from dugnad.averaging.formats import CommitRecord, Input
from dugnad.averaging.node import Node
from dugnad.dashboard.contributor import Receipt
from dugnad.dashboard.live import TooManyReaders
from dugnad.dht.ids import PeerId, RunId, parse_peer, peer_text
from dugnad.peer.creditrows import CreditRow, credits_of
from dugnad.peer.manifest import Manifest
from dugnad.peer.store import Receipt as Row
from dugnad.peer.store import Store

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon

T = TypeVar("T")

RECEIPTS_MAX: Final = 100
"""In one answer: the newest, as many as a page shows."""
READERS_MAX: Final = 16
"""Strangers who wait for the disk at the same time; it is read for one of them at a time, so that
the promises of the exchange wait for no more than one answer."""


class ReceiptSource(Protocol):
    """What the receipts of a page are looked up in."""

    @property
    def run_id(self) -> RunId:
        """The run."""
        ...

    @property
    def manifest(self) -> Manifest:
        """What the run is."""
        ...

    async def stored(self, work: Callable[[Store], T]) -> T:
        """What `work` finds in the store."""
        ...

    def chain(self, fragment: int) -> Mapping[int, Node]:
        """The newest versions of the chosen lineage, as far as they are in memory."""
        ...

    def settled(self, fragment: int) -> int:
        """The newest version of a fragment that is settled."""
        ...


class DaemonReceipts:
    """The receipts of a daemon."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    @property
    def run_id(self) -> RunId:
        """The run."""
        return self._daemon.run_id

    @property
    def manifest(self) -> Manifest:
        """What the run is."""
        return self._daemon.manifest

    async def stored(self, work: Callable[[Store], T]) -> T:
        """What `work` finds in the store."""
        await self._daemon.ledger.flush()
        return await self._daemon.store.call(work)

    def chain(self, fragment: int) -> Mapping[int, Node]:
        """The newest versions of the chosen lineage, as far as they are in memory."""
        shells = self._daemon.averager.fragments
        if fragment >= len(shells):
            return {}
        core = shells[fragment].core
        return {node.version: node for node in core.view.lineage.ancestors(core.head)}

    def settled(self, fragment: int) -> int:
        """The newest version of a fragment that is settled."""
        return self._daemon.ledger.fold.settled(fragment)


class PageReceipts:
    """Looks receipts up in a store, and says what became of them."""

    def __init__(self, source: ReceiptSource) -> None:
        self._source = source
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def receipts(self, peer: str, limit: int) -> Sequence[Receipt]:
        """The newest receipts of ``peer``, newest first; none when that is no key.

        `credited` are the tokens of units that are credited in the fragment of the contribution and
        that nobody had covered before. Where the disk does not know the latter (of receipts from
        before this peer came), it is what could be credited, and the reason says so.

        Raises TooManyReaders, and StoreError when the disk cannot be read.
        """
        try:
            key = parse_peer(peer)
        except ValueError:
            return ()
        if self._waiting >= READERS_MAX:
            raise TooManyReaders
        wanted = max(0, min(limit, RECEIPTS_MAX))
        self._waiting += 1
        try:
            async with self._turn:
                found, known = await self._source.stored(lambda one: _found(one, key, wanted))
        finally:
            self._waiting -= 1
        chains = {p: self._source.chain(p) for p in {row.fragment for row, _ in found}}
        made = (
            self._made(key, row, (commit, known.get(row.digest)), chains[row.fragment])
            for row, commit in found
        )
        return [one for one in made if one is not None]

    def _made(
        self,
        key: PeerId,
        row: Row,
        listed: tuple[CommitRecord | None, CreditRow | None],
        chain: Mapping[int, Node],
    ) -> Receipt | None:
        commit, credit = listed
        one = _input(commit, key, row.seq) if commit is not None else None
        if commit is None or one is None:
            return None  # the commit was forgotten between two looks
        home = PeerId(commit.header.home)
        builder = _builder(home, row.version, chain)
        witness = builder or _acknowledged(home, commit, chain.get(row.version))
        status, reason = self._judged(row, one, chain, key == home and builder is None)
        manifest = self._source.manifest
        sequences = _eligible(one, self._source.run_id, len(manifest.table.fragments))
        credited, why = _credited(sequences * manifest.data.context, credit)
        if status == "refused":
            credited, why = 0, ""
        return Receipt(
            at_ms=row.time_ms,
            fragment=row.fragment,
            version=row.version,
            seq=row.seq,
            tokens=row.tokens,
            credited=credited,
            status=status,
            reason="; ".join(one for one in (reason, why) if one),
            home=peer_text(home),
            witness=peer_text(witness) if witness else "",
            commit=row.digest.hex(),
        )

    def _judged(
        self, row: Row, one: Input, chain: Mapping[int, Node], unwitnessed: bool
    ) -> tuple[str, str]:
        chosen = chain.get(row.version)
        if one.refusal:
            return "refused", one.refusal
        if chosen is not None and chosen.digest != row.digest:
            return "refused", "another version was chosen"
        if row.version > self._source.settled(row.fragment):
            return "provisional", "newer merges have to build on it first"
        if unwitnessed and chosen is not None:
            return "provisional", "no other peer has confirmed it yet"
        return "settled", ""


Found = tuple[list[tuple[Row, CommitRecord | None]], dict[bytes, CreditRow]]


def _found(store: Store, peer: PeerId, limit: int) -> Found:
    """The newest receipts with their commits, and what is known of their credit."""
    commits: dict[bytes, CommitRecord | None] = {}
    rows = store.receipts(peer, limit)
    for row in rows:
        if row.digest not in commits:
            commits[row.digest] = store.commit(row.digest)
    return [(row, commits[row.digest]) for row in rows], credits_of(store, peer, commits)


def _credited(eligible: int, credit: CreditRow | None) -> tuple[int, str]:
    """Tokens credited, of those that could be, and why not all of them."""
    if credit is None:
        return eligible, "what others had trained before is not known here" if eligible else ""
    credited = min(eligible, credit.tokens)
    before = eligible - credited
    return credited, f"{before:,} tokens of it were trained by others before" if before else ""


def _input(commit: CommitRecord, peer: PeerId, seq: int) -> Input | None:
    for one in commit.inputs:
        if one.contribution.peer == peer and one.contribution.seq == seq:
            return one
    return None


def _eligible(one: Input, run: RunId, fragments: int) -> int:
    """Sequences of units that are credited in the fragment of this contribution."""
    own = one.contribution.fragment
    return sum(
        piece.stop - piece.start
        for piece in one.pieces
        if unit_fragment(run, piece.epoch, piece.index, fragments) == own
    )


def _builder(home: PeerId, version: int, chain: Mapping[int, Node]) -> PeerId | None:
    """The first other home that built on a version: the witness that settles credit."""
    while (node := chain.get(version := version + 1)) is not None and node.record is not None:
        if node.record.header.home != home:
            return PeerId(node.record.header.home)
    return None


def _acknowledged(home: PeerId, commit: CommitRecord, node: Node | None) -> PeerId | None:
    """A peer other than the home that said it computed the same."""
    acked = [ack.peer for ack in commit.acks] + sorted(node.witnesses if node is not None else ())
    return next((PeerId(peer) for peer in acked if peer != home), None)
