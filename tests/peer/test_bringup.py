"""Getting the text: from whom, how many shards at once, and when training need not wait for it."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from dugnad.dht.ids import PeerId
from dugnad.peer import bringup, clock
from dugnad.peer.bringup import EARLY_S, SHARDS_AT_ONCE, _fetch_data, _something_to_train
from dugnad.peer.corpus import SHARD_BYTES, DataIndex, ShardStore
from dugnad.peer.daemon import Daemon
from dugnad.peer.pull import PullError
from dugnad.peer.ratelimit import Bucket

from .virtual_time import until  # noqa: TID252  tests are no installed package

SHARDS = 6
TEXT = random.Random(1).randbytes((SHARDS - 1) * SHARD_BYTES + 5_000)
PARTS = [TEXT[n * SHARD_BYTES : (n + 1) * SHARD_BYTES] for n in range(SHARDS)]
INDEX = DataIndex(len(TEXT), tuple(hashlib.sha256(part).digest() for part in PARTS))
A, B, C = (PeerId(bytes([n]) * 32) for n in (1, 2, 3))


class World:
    """A daemon that has nothing of its text yet."""

    def __init__(self, folder: Path, *, rate: float = 0.0) -> None:
        self.live: list[PeerId] = [A]
        self.asked: list[tuple[PeerId, ...]] = []
        self.under_way = self.most_under_way = 0
        self.stored: list[int] = []
        self.began = self.finished = self.looked = 0
        self.agreed = False
        self.whole = asyncio.Event()
        self.said: list[str] = []
        self.daemon = cast(
            Daemon,
            SimpleNamespace(
                reason="",
                shards=ShardStore(folder, INDEX),
                manifest=SimpleNamespace(data=SimpleNamespace(index=INDEX)),
                averager=SimpleNamespace(live=lambda: tuple(self.live)),
                swarm=SimpleNamespace(
                    traffic=SimpleNamespace(down=Bucket(rate)),
                    puller=SimpleNamespace(shard=self.pull),
                ),
                larder=SimpleNamespace(
                    whole=self.whole,
                    promises=self.promises,
                    begin=self.begin,
                    shard_in=self.shard_in,
                    finish=self.finish,
                ),
                duty=SimpleNamespace(trains=True),
                note=lambda kind, text: self.said.append(text),
            ),
        )

    async def pull(self, peers: Sequence[PeerId], number: int, sha256: bytes) -> bytes:
        self.asked.append(tuple(peers))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        for _ in range(5):
            await asyncio.sleep(0)
        self.under_way -= 1
        if not peers:
            raise PullError("there is nobody to ask")
        assert INDEX.hashes[number] == sha256
        return PARTS[number]

    async def shard_in(self, number: int, data: bytes) -> None:
        self.stored.append(number)
        self.live = [A, B, C]  # others come while it is at it

    def promises(self) -> bool:
        self.looked += 1
        return self.agreed

    async def begin(self) -> None:
        self.began += 1

    async def finish(self) -> None:
        self.finished += 1


async def test_the_text_comes_from_all_that_are_there_by_then(tmp_path: Path) -> None:
    world = World(tmp_path)
    await _fetch_data(world.daemon)
    assert sorted(world.stored) == list(range(SHARDS))
    assert world.finished == 1
    assert world.most_under_way == SHARDS_AT_ONCE
    assert world.daemon.shards.missing() == []
    assert {one[0] for one in world.asked[SHARDS_AT_ONCE:]} <= {A, B, C}
    assert {len(one) for one in world.asked[SHARDS_AT_ONCE:]} == {3}


async def test_one_shard_comes_at_a_time_where_the_owner_limits_the_rate(tmp_path: Path) -> None:
    world = World(tmp_path, rate=1e9)
    await _fetch_data(world.daemon)
    assert world.most_under_way == 1
    assert {one[0] for one in world.asked} == {A, B, C}, "each from another donor"


async def test_the_first_shard_is_asked_for_as_soon_as_somebody_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bringup, "NOBODY_S", 0.001)
    world = World(tmp_path)
    world.live = []
    task = asyncio.create_task(_fetch_data(world.daemon))
    async with asyncio.timeout(5.0):
        await until(lambda: "nobody is there" in world.daemon.reason)
        assert not world.asked
        world.live = [B]
        await task
    assert world.asked[0] == (B,)
    assert world.daemon.reason == "fetching the data"


async def test_a_text_that_the_owner_s_limit_makes_slow_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bringup, "LOOK_S", 0.001)
    monkeypatch.setattr(clock, "now", lambda: 0.0)  # no time passes
    world = World(tmp_path, rate=len(TEXT) / (EARLY_S + 1.0))
    task = asyncio.create_task(_something_to_train(world.daemon))
    await until(lambda: world.looked > 2)  # until something is agreed on
    world.agreed = True
    async with asyncio.timeout(5.0):
        await task
    assert world.began == 1


async def test_a_text_that_may_be_here_in_a_moment_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bringup, "LOOK_S", 0.001)
    monkeypatch.setattr(clock, "now", lambda: 0.0)
    world = World(tmp_path, rate=len(TEXT) / (EARLY_S - 1.0))
    world.agreed = True
    task = asyncio.create_task(_something_to_train(world.daemon))
    for _ in range(20):
        await asyncio.sleep(0)
    world.whole.set()
    async with asyncio.timeout(5.0):
        await task
    assert not world.began
