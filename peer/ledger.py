"""Credit and coverage as the heads move: the fold over the chosen lineage, fed by adoptions.

A fragment whose history is not complete here (this peer joined late) is caught up in the
background: from the store, then from peers, commit by commit down the chain, each named by the
one above it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import takewhile
from typing import Final

from dugnad.averaging.board import Board
from dugnad.averaging.coverage import CreditRules
from dugnad.averaging.credit import CoverageChange, CreditFold
from dugnad.averaging.creditchain import CreditError
from dugnad.averaging.dispute import Said
from dugnad.averaging.formats import Ack, CommitRecord, signature_holds
from dugnad.averaging.lineage import Lineage
from dugnad.averaging.node import Node
from dugnad.averaging.receiptcheck import with_true_acks
from dugnad.dht.ids import PeerId
from dugnad.dht.records import verify_ed25519
from dugnad.peer.creditrows import CreditRow, forget_credits, keep_credits
from dugnad.peer.pull import PullError
from dugnad.peer.store import Store, StoreError
from dugnad.peer.storethread import StoreThread

BACK_MAX: Final = 30
"""Commits handed to the fold at each adoption: as far as it can undo."""
PAGE: Final = 64
"""Commits asked for at once when history is fetched."""
HISTORY_MAX: Final = 100_000
"""Commits fetched at most: a week of one every six seconds."""

UNWRITTEN_MAX: Final = 65_536
"""Credits that wait to be written: a thousand commits of sixty-four makers."""

FetchCommits = Callable[[Sequence[PeerId], int, bytes, int], Awaitable[tuple[CommitRecord, ...]]]


class Ledger:
    """The credit fold of one peer, and what it still lacks."""

    def __init__(
        self,
        rules: CreditRules,
        store: StoreThread,
        on_change: Callable[[CoverageChange], None],
        said: Callable[[], Said] = Said,
    ) -> None:
        self.fold = CreditFold(rules)
        self.store = store
        self.on_change = on_change
        self.said = said
        self.lacking: set[int] = set()
        self._credits: deque[CreditRow] = deque(maxlen=UNWRITTEN_MAX)
        self._noted: dict[int, set[bytes]] = {}
        """Fragment -> commits whose credit is noted, of those that the fold can undo."""
        self._flushing = asyncio.Lock()

    def adopted(self, fragment: int, lineage: Lineage, head: Node) -> None:
        """A fragment has a new head: fold what it lists, or note that history is missing."""
        chain: list[tuple[bytes, CommitRecord]] = []
        for node in lineage.ancestors(head):
            if node.record is None or len(chain) >= BACK_MAX:
                break
            chain.append((node.digest, node.record))
        try:
            change = self.fold.follow(fragment, chain[::-1])
        except CreditError:
            self.lacking.add(fragment)
            return
        self.lacking.discard(fragment)
        self._note(fragment)
        self.on_change(change)

    def _note(self, fragment: int) -> None:
        """Remember what the receipts of new commits were credited, until it is written."""
        earned = self.fold.earned(fragment)
        for digest in earned.keys() - self._noted.get(fragment, set()):
            rows = [CreditRow(digest, peer, *row) for peer, row in earned[digest].items()]
            self._credits.extend(rows)
        self._noted[fragment] = set(earned)

    async def flush(self) -> None:
        """Write what receipts were credited. StoreError, and then it is tried again."""
        async with self._flushing:
            rows = [self._credits.popleft() for _ in range(len(self._credits))]
            if not rows:
                return
            try:
                await self.store.call(lambda store: keep_credits(store, rows))
            except StoreError:
                self._credits.extendleft(reversed(rows))
                raise

    def acked(self, ack: Ack) -> None:
        """A witness ack arrived."""
        self.fold.acknowledge(ack)

    async def catch_up(
        self, fragment: int, head: tuple[bytes, bytes], peers: Sequence[PeerId], fetch: FetchCommits
    ) -> bool:
        """Complete a fragment's history below ``head`` (digest, parent) and fold all of it anew."""
        digest, _ = head
        version, base = self.fold.tip(fragment)
        above = await self.store.call(lambda store: store.lineage(fragment, digest, version))
        if version and above and above[0][1].header.parent == base:
            return self._follow(fragment, above)
        chain = await self.store.call(lambda store: store.lineage(fragment, digest))
        if not chain:
            return False
        while chain[0][1].header.version > 1 and len(chain) < HISTORY_MAX:
            parent = chain[0][1].header.parent
            if not peers:
                return False
            try:
                older = await fetch(peers, fragment, parent, PAGE)
            except PullError:
                return False
            older = await asyncio.to_thread(self._sound, older)
            if not older:
                return False
            named: list[tuple[bytes, CommitRecord]] = []
            for record in older:  # newest first
                named.append((parent, record))
                parent = record.header.parent
            await self.store.call(lambda store, rows=tuple(named): store.add_commits(rows))  # type: ignore[misc]
            chain = [*named[::-1], *chain]
        self.on_change(self.fold.reset(fragment))
        return self._follow(fragment, chain)

    def _sound(self, older: Sequence[CommitRecord]) -> tuple[CommitRecord, ...]:
        """Pulled commits up to the first that its home has not signed, with the acks that hold:
        digests cover neither, and whoever is given these receipts checks both.
        """
        run = self.fold.rules.run
        signed = takewhile(lambda one: signature_holds(one.header, run, verify_ed25519), older)
        return tuple(with_true_acks(one, run, verify_ed25519) for one in signed)

    def _follow(self, fragment: int, chain: Sequence[tuple[bytes, CommitRecord]]) -> bool:
        try:
            self.on_change(self.fold.follow(fragment, chain))
        except CreditError:
            return False
        self.lacking.discard(fragment)
        self._note(fragment)
        return True

    async def restore(self) -> None:
        """Begin with the base that was kept; what is above it follows from the heads."""
        state = await self.store.call(lambda store: store.load_fold())
        if state is None:
            return
        try:
            self.fold = CreditFold.restore(self.fold.rules, state)
        except CreditError:
            return  # of another formula: all is folded anew from the receipts
        pieces = tuple(self.fold.covered_pieces())
        self.on_change(CoverageChange(covered=pieces))

    async def keep(self, now_ms: int) -> None:
        """Keep the base of the fold, then forget receipts that are older than a week."""
        state = self.fold.snapshot()

        def work(store: Store) -> None:
            store.save_fold(state)
            store.prune(now_ms)
            forget_credits(store)

        await self.store.call(work)

    def board(self) -> Board:
        """The leaderboard of what is folded and said."""
        return self.fold.board(self.said())
