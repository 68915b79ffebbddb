"""The pages of a run for a host that takes no part in it: from receipts and from what is seen.

Whoever has a `RunWatch` says here what its store tells and whom it sees; this turns both into the
news of `dugnad.dashboard`, the same as a peer's page is told. It belongs to one event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from statistics import median
from typing import Final, Literal, TypeVar

from dugnad.averaging.board import machine_rows
from dugnad.averaging.node import Node
from dugnad.dashboard import events as ev
from dugnad.dashboard.feed import RunFeed
from dugnad.dashboard.history import History
from dugnad.dht.ids import RunId
from dugnad.peer.manifest import Manifest
from dugnad.peer.pagereceipts import PageReceipts
from dugnad.peer.pageviews import (
    head_adopted,
    lasting,
    run_described,
    standing_head,
    without_addresses,
)
from dugnad.peer.runwatch import Standing
from dugnad.peer.store import Store
from dugnad.peer.storethread import StoreThread

T = TypeVar("T")

GAPS_SHOWN: Final = 16
"""Gaps between merges of a fragment from which the next is expected."""
DUE_CHANGE_MS: Final = 500
"""A merge that is expected so much earlier or later is told anew."""


class WatchPage:
    """One run's pages. `begin` once; then whatever comes, in any order."""

    def __init__(self, manifest: Manifest, run: RunId, store: StoreThread) -> None:
        self.manifest = manifest
        self.run_id = run
        self.feed = RunFeed(PageReceipts(self))
        self.listed: dict[str, int] = {}
        """Tokens on the board, settled or not, by peer."""
        self._store = store
        self._standing: Standing | None = None
        self._rows: dict[str, ev.PeerRow] = {}
        self._due: dict[int, int] = {}
        self._link = ""

    # -- what the receipts of the page are looked up in ----------------------------------------

    async def stored(self, work: Callable[[Store], T]) -> T:
        """What `work` finds in the store."""
        return await self._store.call(work)

    def chain(self, fragment: int) -> Mapping[int, Node]:
        """The newest versions of a fragment's lineage."""
        chains = self._standing.chains if self._standing is not None else ()
        return chains[fragment] if fragment < len(chains) else {}

    def settled(self, fragment: int) -> int:
        """The newest version of a fragment that is settled."""
        return self._standing.settled[fragment] if self._standing is not None else 0

    # -- news ----------------------------------------------------------------------------------

    @property
    def standing(self) -> Standing | None:
        """How the run stood at the last look; None before the first."""
        return self._standing

    def begin(self, history: History | None, link: str, now_ms: int) -> None:
        """Take up a kept history and say what the run is."""
        if history is not None:
            self.feed = RunFeed(PageReceipts(self), history)
        self._link = link
        self.feed.publish(run_described(self.manifest, self.run_id, link, now_ms))

    def linked(self, link: str, now_ms: int) -> None:
        """Others can join by this link."""
        if link != self._link:
            self._link = link
            self.feed.publish(run_described(self.manifest, self.run_id, link, now_ms))

    def stands(self, standing: Standing, known: Iterable[str], now_ms: int) -> None:
        """The run stands so by its receipts; `known` are all peers that were heard of."""
        counted = self._counted_ms() if self._standing is None else 0
        self._standing = standing
        for one in standing.merges:
            if one.node.time_ms > counted:
                head = head_adopted(self.manifest, one.fragment, one.node, one.record, now_ms)
                self.feed.publish(head)
        for p, node in enumerate(standing.heads):
            shown = self.feed.state().heads.get(p)
            if node is not None and (shown is None or shown.digest != node.digest.hex()):
                told = standing_head(p, node, now_ms)
                if told is not None:
                    self.feed.publish(told)
        board = standing.board
        self.listed = {row.peer: row.tokens + row.provisional for row in machine_rows(board)}
        everybody = len({*self.listed, *known})
        self.feed.publish(
            ev.BoardComputed(
                at_ms=now_ms, board=board, peers_heard=len(self.listed), peers_known=everybody
            )
        )
        self._expect(now_ms)

    def _counted_ms(self) -> int:
        """Up to which commit time the kept history has counted merges: it was kept with its heads'
        speed, so at most a minute is counted twice or not.
        """
        history = self.feed.state().history
        last = history.peers.last or history.speed.last
        return last.at_ms if last is not None and history.tokens else 0

    def _expect(self, now_ms: int) -> None:
        """When the next merge of each fragment is due, by the gaps between the last."""
        assert self._standing is not None, "it stands somehow"
        for p, chain in enumerate(self._standing.chains):
            times = [chain[version].time_ms for version in sorted(chain)[-GAPS_SHOWN - 1 :]]
            if len(times) < 2:
                continue
            gap = median(later - earlier for earlier, later in pairwise(times))
            due_ms = times[-1] + round(gap)
            if abs(due_ms - self._due.get(p, 0)) >= DUE_CHANGE_MS:
                self._due[p] = due_ms
                self.feed.publish(ev.MergeDue(at_ms=now_ms, fragment=p, due_ms=due_ms))

    def came(self, row: ev.PeerRow, now_ms: int) -> None:
        """A peer is here."""
        self._rows[row.peer] = row
        self.feed.publish(ev.PeerSeen(at_ms=now_ms, row=row))

    def went(self, peer: str, left: bool, reason: str, now_ms: int) -> None:
        """A peer is here no longer."""
        self._rows.pop(peer, None)
        how: Literal["left", "lost"] = "left" if left else "lost"
        told = ev.PeerGone(at_ms=now_ms, peer=peer, how=how, reason=without_addresses(reason))
        self.feed.publish(told)

    def peers(self, rows: Iterable[ev.PeerRow], now_ms: int, *, everybody: bool) -> None:
        """What is known of peers now; told is what changed, times alone only with `everybody`."""
        changed = [
            row for row in rows if everybody or lasting(row) != lasting(self._rows.get(row.peer))
        ]
        self._rows.update((row.peer, row) for row in changed)
        if changed:
            self.feed.publish(ev.PeerChanged(at_ms=now_ms, rows=tuple(changed)))

    def measured(
        self,
        now_ms: int,
        *,
        train: tuple[int, float] | None,
        held_out: tuple[int, float] | None,
        speed: float | None,
    ) -> None:
        """Losses as (tokens, nats a token), and tokens a second of the swarm; None: not known."""
        if train is not None:
            self.feed.publish(ev.TrainLoss(at_ms=now_ms, tokens=train[0], loss=train[1]))
        if held_out is not None:
            tokens, loss = held_out
            self.feed.publish(ev.HeldOutLoss(at_ms=now_ms, tokens=tokens, loss=loss))
        if speed is not None:
            self.feed.publish(ev.Throughput(at_ms=now_ms, tokens_per_s=speed))
