"""Preparing as a duty, and training on what was prepared, around daemons that exist in memory."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dugnad.averaging.formats import Prepares
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId, RunId
from dugnad.peer import clock
from dugnad.peer.corpus import SHARD_BYTES, DataIndex, ShardStore, TokenFile
from dugnad.peer.crowdrelay import CrowdRelay
from dugnad.peer.daemon import Daemon
from dugnad.peer.larder import Larder
from dugnad.peer.parttext import PartText
from dugnad.peer.preparedunits import BATCH_UNITS, Prepared, block_of, name_of_block, signed
from dugnad.peer.preparer import LOOK_S, RATE_ROWS, Preparer, rest_s
from dugnad.peer.pull import PullError
from dugnad.peer.roles import Duties
from dugnad.peer.trainer import LearnerPlan
from dugnad.peer.unitplan import UnitPlan
from dugnad.peer.unittable import UnitTable

RUN = RunId(bytes(range(32)))
ME, OTHER, THIRD = (Identity.ephemeral(bytes([n]) * 32) for n in (1, 2, 3))
TEXT = random.Random(3).randbytes(SHARD_BYTES + 20_000)
PARTS = [TEXT[:SHARD_BYTES], TEXT[SHARD_BYTES:]]
INDEX = DataIndex(len(TEXT), tuple(hashlib.sha256(part).digest() for part in PARTS))
CONTEXT = 64


class World:
    """A daemon with a run of two shards; `others` are live."""

    def __init__(self, folder: Path, *, whole: bool = True) -> None:
        self.sent: list[Prepares] = []
        self.said: list[str] = []
        self.kept: dict[str, bytes] = {}
        self.served: dict[bytes, bytes] = {}
        self.asked: list[list[PeerId]] = []
        self.arrived = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []
        self.table = UnitTable(UnitPlan(RUN, 16_000, 4), attempts=3)
        shards = ShardStore(folder, INDEX)
        plan = LearnerPlan(cast(Any, None), cast(Any, None), cast(Any, None), shards.tokens_path)
        self.trainer = SimpleNamespace(plan=plan)
        self.daemon = SimpleNamespace(
            identity=ME,
            run_id=RUN,
            boot=5,
            shards=shards,
            settings=SimpleNamespace(cpu_share=1.0),
            manifest=SimpleNamespace(
                unit_sequences=4, data=SimpleNamespace(held_out_start=16_000, context=CONTEXT)
            ),
            averager=SimpleNamespace(live=lambda: (OTHER.peer, THIRD.peer)),
            swarm=SimpleNamespace(
                roster=None,
                send=lambda p, m: self.sent.append(m),
                puller=SimpleNamespace(block=self.pull),
            ),
            duty=SimpleNamespace(advertised=lambda: ("prepare",), duties=Duties(("prepare",))),
            vitals=SimpleNamespace(synced=True),
            units=SimpleNamespace(sight=lambda now: SimpleNamespace(table=self.table)),
            training=SimpleNamespace(trainer=self.trainer, arrived=self.arrived.set),
            happenings=SimpleNamespace(refused=lambda p, why: self.said.append(why)),
            store=SimpleNamespace(call=self.call),
            steward=SimpleNamespace(free=asyncio.Event()),
            note=lambda kind, text: self.said.append(text),
            own=lambda work, name: self.tasks.append(asyncio.ensure_future(work)),
        )
        daemon = cast(Daemon, self.daemon)
        self.daemon.relay = CrowdRelay(daemon)
        self.larder = self.daemon.larder = Larder(daemon)
        self.preparer = self.daemon.preparer = Preparer(daemon)
        self.preparer.peers_changed()
        if whole:
            self.preparer._text = text_in(folder / "whole")

    async def call(self, work: Any) -> Any:  # Any: what the store is asked
        return work(SimpleNamespace(kept=self.kept.get, keep=self.kept.__setitem__))

    async def pull(self, peers: Sequence[PeerId], name: bytes, size: int) -> bytes:
        self.asked.append(list(peers))
        if name not in self.served:
            raise PullError("nobody has it")
        return self.served[name]

    def hear(self, maker: Identity, batch: int, digests: Sequence[bytes]) -> None:
        said = Prepared(maker.peer, batch, tuple(digests))
        self.preparer.heard(maker.peer, Prepares((signed(said, RUN, maker),)))


def text_in(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(TEXT)
    return os.open(path, os.O_RDONLY)


def true_blocks(world: World, batch: int = 0) -> list[bytes]:
    text = text_in(world.daemon.shards.folder / "true")
    units = range(batch * BATCH_UNITS, (batch + 1) * BATCH_UNITS)
    return [block_of(text, world.larder.plan, unit, CONTEXT) for unit in units]


async def test_a_preparer_says_which_blocks_it_made_and_serves_them_by_hash(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.preparer._look()
    assert await world.preparer._prepare_one()
    blocks = true_blocks(world)
    assert world.preparer.block(name_of_block(blocks[3])) == blocks[3]
    assert world.preparer.block(bytes(32)) is None
    assert len(world.sent) == 2, "both that are live are told"
    assert world.preparer.tokens == BATCH_UNITS * 4 * CONTEXT
    other = World(tmp_path / "other")
    other.preparer.heard(ME.peer, world.sent[0])
    rows = cast(list[dict[str, Any]], other.preparer.view()["prepared"])
    assert [row["pending"] for row in rows] == [world.preparer.tokens]
    world.sent.clear()
    world.preparer.met(OTHER.peer)
    assert [len(message.rows) for message in world.sent] == [1]


async def test_what_my_text_contradicts_is_named_whether_it_came_before_the_text_or_after(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    wrong = [hashlib.sha256(bytes([n])).digest() for n in range(BATCH_UNITS)]
    for maker in (OTHER, THIRD):
        world.hear(maker, 0, wrong)
    assert not world.preparer.core.any_agreed()
    assert len(world.said) == 2
    assert "is not the text's" in world.said[0]
    names = [name_of_block(block) for block in true_blocks(world, 1)]
    world.hear(OTHER, 1, names)
    assert len(world.said) == 2
    world.preparer.heard(OTHER.peer, Prepares((b"nonsense",)))
    assert len(world.said) == 3
    rows = cast(list[dict[str, Any]], world.preparer.view()["prepared"])
    assert {row["disputed"] for row in rows} == {BATCH_UNITS * 4 * CONTEXT}


def test_a_peer_that_floods_is_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, whole=False)
    monkeypatch.setattr(clock, "now", lambda: 5.0)
    row = signed(Prepared(OTHER.peer, 0, (bytes(32),) * BATCH_UNITS), RUN, OTHER)
    for _ in range(RATE_ROWS):
        world.preparer.heard(OTHER.peer, Prepares((row,)))
    world.preparer.heard(OTHER.peer, Prepares((b"nonsense",)))
    assert world.said == []
    world.preparer.gone(OTHER.peer)
    world.preparer.heard(OTHER.peer, Prepares((b"nonsense",)))
    assert len(world.said) == 1


async def test_a_lie_that_was_trained_on_is_named_when_the_text_comes(tmp_path: Path) -> None:
    world = World(tmp_path, whole=False)
    blocks = true_blocks(world)
    blocks[5] = bytes(len(blocks[5]))
    names = [name_of_block(block) for block in blocks]
    for maker in (OTHER, THIRD):
        world.hear(maker, 0, names)
    world.served = dict(zip(names, blocks, strict=True))
    assert await world.larder._fetch(5)
    assert await world.larder._fetch(6)
    world.preparer._text = text_in(tmp_path / "whole")
    world.preparer._check_taken()
    assert world.said == ["its block of unit 0/5 is not the text's"] * 2
    assert not world.larder.promises()


async def test_a_paused_preparer_prepares_nothing_until_its_owner_lets_it(tmp_path: Path) -> None:
    world = World(tmp_path)
    asked, free = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        asked.set()
        await free.wait()

    world.daemon.steward = SimpleNamespace(free=SimpleNamespace(wait=wait))
    world.daemon.shards.tokens_path.write_bytes(TEXT)
    world.larder.whole.set()
    task = asyncio.create_task(world.preparer.run())
    async with asyncio.timeout(5.0):
        await asked.wait()
        assert world.preparer.core.own() == []
        asked.clear()
        free.set()
        await asked.wait()
    assert len(world.preparer.core.own()) == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_it_rests_for_the_share_of_the_time_that_its_owner_lends() -> None:
    assert rest_s(0.2, 0.25) == pytest.approx(0.6)
    assert rest_s(0.2, 1.0) == 0.0
    assert rest_s(0.0, 0.25) == LOOK_S


async def test_what_was_earned_survives_a_restart_and_a_damaged_memory_is_said(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    world.preparer._look()
    assert await world.preparer._prepare_one()
    for position in range(1_000):
        world.table.cover(position, world.table.all_of(position), by_me=False)
    world.table.advance()
    world.preparer._look()
    await world.preparer.save()
    again = World(tmp_path)
    again.kept = world.kept
    await again.preparer._restore()
    assert again.preparer.core.earned() == world.preparer.core.earned()
    assert again.preparer.core.earned()[0].pending == world.preparer.tokens
    again.kept = {"preparation": b"\xc1"}
    await again.preparer._restore()
    assert "is forgotten" in again.said[0]


async def test_a_wanted_unit_comes_as_a_block_that_two_agree_on_and_may_then_be_read(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, whole=False)
    assert not world.larder.promises()
    blocks = true_blocks(world)
    names = [name_of_block(block) for block in blocks]
    world.served = dict(zip(names, blocks, strict=True))
    world.hear(OTHER, 0, names)
    assert not await world.larder._fetch(5), "one peer's word is not enough"
    world.hear(THIRD, 0, names)
    assert world.larder.promises()
    assert not world.larder.has((0, 5))
    await world.larder.begin()
    async with asyncio.timeout(5.0):
        await world.arrived.wait()
    assert world.larder.has((0, 5))
    assert not world.larder.has((0, 6))
    assert {tuple(sorted(one)) for one in world.asked} == {tuple(sorted((OTHER.peer, THIRD.peer)))}
    found = TokenFile.open(world.trainer.plan.tokens)
    numbers = world.larder.plan.sequences_of(0, 5)
    assert found.sequences(numbers, CONTEXT).tobytes() == blocks[5], "as a learner reads them"
    for number, part in enumerate(PARTS):
        world.daemon.shards.put(number, part)
        await world.larder.shard_in(number, part)
    await world.larder.finish()
    assert world.larder.has((9, 7)), "now all of it is here"
    assert world.trainer.plan.tokens == world.daemon.shards.tokens_path
    assert found.data.tobytes() == TEXT, "who mapped the parts reads the whole"
    assert world.daemon.shards.tokens_path.read_bytes() == TEXT
    await asyncio.gather(*world.tasks)


async def test_a_text_that_became_whole_meanwhile_is_not_opened_in_parts(tmp_path: Path) -> None:
    world = World(tmp_path, whole=False)
    for number, part in enumerate(PARTS):
        world.daemon.shards.put(number, part)
    await asyncio.gather(world.larder.finish(), world.larder.begin())
    assert world.trainer.plan.tokens == world.daemon.shards.tokens_path
    assert world.daemon.shards.tokens_path.read_bytes() == TEXT
    assert not world.larder.text.path.exists()
    assert world.tasks == []


async def test_a_block_that_nobody_has_is_waited_for_without_harm(tmp_path: Path) -> None:
    world = World(tmp_path, whole=False)
    names = [name_of_block(block) for block in true_blocks(world)]
    for maker in (OTHER, THIRD):
        world.hear(maker, 0, names)
    assert not await world.larder._fetch(5)
    assert "could not be fetched" in world.said[0]
    assert not world.larder.has((0, 5))


def test_a_text_in_parts_keeps_nothing_of_a_block_once_the_shards_are_there(tmp_path: Path) -> None:
    shards = ShardStore(tmp_path, INDEX)
    shards.put(1, PARTS[1])
    text = PartText(shards)
    text.put_block([0], CONTEXT, bytes(CONTEXT + 1))  # before it is open: nowhere
    path = text.open()
    assert path.read_bytes()[SHARD_BYTES:] == PARTS[1], "what is stored is in it"
    text.put_block([2], CONTEXT, b"x" * (CONTEXT + 1))
    assert path.read_bytes()[2 * CONTEXT : 3 * CONTEXT + 1] == b"x" * (CONTEXT + 1)
    with pytest.raises(ValueError, match="a block of 3 bytes for 1 sequences"):
        text.put_block([2], CONTEXT, b"abc")
    shards.put(0, PARTS[0])
    text.fill()
    text.put_block([2], CONTEXT, b"x" * (CONTEXT + 1))  # it comes too late
    text.publish()
    text.put_block([2], CONTEXT, b"x" * (CONTEXT + 1))
    assert shards.tokens_path.read_bytes() == TEXT
    assert not path.exists()
    path.write_bytes(b"of a daemon that was killed")
    again = PartText(shards)
    again.fill()
    again.publish()
    assert not path.exists()
