"""Who keeps a peer's drafts, and what becomes of them when it dies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from dugnad.averaging.formats import Contribution, UnitPiece
from dugnad.averaging.worker import Kept
from dugnad.dht.ids import PeerId
from dugnad.dht.ports import TransportError
from dugnad.peer import buddy
from dugnad.peer.buddy import QUOTA_SHARE, Buddy
from dugnad.peer.limits import Limits

ME, A, B, C = (PeerId(bytes([n]) * 32) for n in range(1, 5))
DRAFT = Kept(
    Contribution(
        peer=A,
        fragment=0,
        seq=7,
        base=3,
        base_digest=b"b" * 32,
        tokens=64,
        steps=2,
        speed_class=0,
        eligible=True,
        codec="int8",
        payload_root=b"r" * 32,
        payload_bytes=10,
        pieces_root=b"p" * 32,
    ),
    (UnitPiece(0, 1, 0, 4),),
    bytes(10),
)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits."""
    monkeypatch.setattr(buddy, "RETRY_S", 0.0)


class Daemon(SimpleNamespace):
    """What a buddy asks of its daemon, in memory."""

    def __init__(self, live: tuple[PeerId, ...] = (A, B, C), used: int = 0) -> None:
        self.notes: list[str] = []
        self.pushed: list[PeerId] = []
        self.merged: list[Kept] = []
        self.home: PeerId | None = B
        self.broken = 0
        self.refusal = ""
        self.tasks: list[asyncio.Task[None]] = []
        self.listed, self.fault = False, ""
        self.looked = asyncio.Event()
        lineage = SimpleNamespace(listing=self._listing, judge_contribution=self._judge)
        view = SimpleNamespace(current_home=lambda: self.home, lineage=lineage, head=None)
        shell = SimpleNamespace(core=SimpleNamespace(view=view))
        super().__init__(
            settings=SimpleNamespace(buddy_s=5.0, upload_mbit=0.0),
            identity=SimpleNamespace(peer=ME),
            averager=SimpleNamespace(
                live=lambda: live, fragments=[shell], contribution_in=self._merge
            ),
            swarm=SimpleNamespace(push=self._push, lend=self._lend),
            steward=SimpleNamespace(
                limits=Limits(quota_gb=1.0),
                usage=SimpleNamespace(within=lambda days, now: used),
            ),
            manifest=SimpleNamespace(admits=lambda peer: peer != C),
            orders=SimpleNamespace(refusal=lambda peer: ""),
            happenings=SimpleNamespace(label=lambda peer: "someone"),
        )

    def _listing(self, head: object, key: object) -> object:
        self.looked.set()
        return DRAFT if self.listed else None

    def _judge(self, made: object, head: object, *, fresh_seq: bool) -> str:
        return self.fault

    async def looks(self, count: int) -> None:
        """Until the buddy has looked at its draft so often."""
        for _ in range(count):
            self.looked.clear()
            await self.looked.wait()

    async def _push(self, to: PeerId, *what: object) -> str:
        self.pushed.append(to)
        if self.broken:
            self.broken -= 1
            raise TransportError("the line broke")
        return self.refusal

    async def _lend(self, to: PeerId, draft: Kept, timeout_s: float) -> str:
        return await self._push(to)

    async def _merge(
        self, made: Contribution, pieces: tuple[UnitPiece, ...], payload: bytes
    ) -> str:
        self.merged.append(Kept(made, pieces, payload))
        return self.refusal

    def note(self, kind: str, text: str, **data: object) -> None:
        self.notes.append(text)

    def own(self, work: Awaitable[None], name: str) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def idle(self) -> None:
        await asyncio.gather(*self.tasks)


def of(daemon: Daemon) -> Buddy:
    return Buddy(cast(Any, daemon))


async def test_one_neighbour_keeps_the_drafts_until_it_refuses() -> None:
    daemon = Daemon()
    one = of(daemon)
    first = one.neighbour()
    assert first in (A, B, C)
    assert first is not None
    await one._bring(first, DRAFT)
    assert (one.neighbour(), one.sent) == (first, 1)
    daemon.refusal = "drafts of 4 others lie here already"
    await one._bring(first, DRAFT)
    assert one.neighbour() not in (None, first)
    daemon.broken = 1
    second = one.neighbour()
    assert second is not None
    await one._bring(second, DRAFT)
    assert one.neighbour() == first, "it is asked again when the other is away"
    assert one.sent == 1
    assert of(Daemon(live=())).neighbour() is None
    alone = of(Daemon(live=(A,)))
    alone._refused_by = A
    assert alone.neighbour() == A, "the only one there is, is asked again"


async def test_a_lost_peers_draft_goes_to_whoever_merges_and_a_left_ones_is_dropped() -> None:
    daemon = Daemon()
    one = of(daemon)
    assert await one._take(DRAFT.contribution, DRAFT.pieces, DRAFT.payload) == ""
    one.left(A)
    one.lost(A)
    assert not daemon.tasks, "it handed in itself when it left"
    assert one.box.keep(DRAFT) == ""
    one.lost(A)
    await daemon.looks(3)
    assert daemon.pushed == [B], "it is brought there once"
    daemon.listed = True
    await daemon.idle()
    assert one.listed_tokens == 64
    assert daemon.notes == ["someone: its last draft is listed, 64 tokens"]


async def test_it_is_merged_here_when_this_peer_is_home() -> None:
    daemon = Daemon()
    daemon.home = ME
    one = of(daemon)
    one.box.keep(DRAFT)
    one.lost(A)
    await daemon.looks(3)
    daemon.listed = True
    await daemon.idle()
    assert daemon.merged == [DRAFT]
    assert not daemon.pushed


async def test_it_goes_to_the_heir_when_the_home_that_took_it_is_lost() -> None:
    daemon = Daemon()
    one = of(daemon)
    one.box.keep(DRAFT)
    one.lost(A)
    for home in (None, C):
        await daemon.looks(3)
        daemon.home = home
    await daemon.looks(3)
    daemon.listed = True
    await daemon.idle()
    assert daemon.pushed == [B, C]


async def test_what_was_not_taken_is_offered_again() -> None:
    daemon = Daemon()
    daemon.broken = 2
    one = of(daemon)
    one.box.keep(DRAFT)
    one.lost(A)
    await daemon.looks(5)
    assert daemon.pushed == [B, B, B]
    daemon.listed = True
    await daemon.idle()


async def test_a_draft_that_cannot_be_listed_any_more_is_let_go_with_the_reason() -> None:
    daemon = Daemon()
    daemon.fault = "it is stale"
    one = of(daemon)
    one.box.keep(DRAFT)
    one.lost(A)
    await daemon.idle()
    assert not daemon.pushed
    assert daemon.notes == ["someone: its last draft is not listed: it is stale"]
    assert one.listed_tokens == 0


async def test_drafts_stop_before_the_quota_is_used_up_and_strangers_are_refused() -> None:
    spent = of(Daemon(used=int(1e9 * QUOTA_SHARE)))
    assert not spent._quota_left()
    assert "quota" in await spent._take(DRAFT.contribution, DRAFT.pieces, DRAFT.payload)
    one = of(Daemon(used=int(1e9 * QUOTA_SHARE) - 1))
    assert one._quota_left()
    stranger = msgspec.structs.replace(DRAFT.contribution, peer=C)
    assert "does not admit" in await one._take(stranger, DRAFT.pieces, DRAFT.payload)
    assert await one._take(DRAFT.contribution, DRAFT.pieces, DRAFT.payload) == ""
