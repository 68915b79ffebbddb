"""Pulling over the in-memory twin: what arrives, from whom, and who is dropped and named."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np
import pytest

from dugnad.averaging.codecs import CODECS, leaf_bounds
from dugnad.averaging.formats import (
    CommitRecord,
    Input,
    header_digest,
    inputs_root,
)
from dugnad.averaging.worker import Commit
from dugnad.dht.frames import read_frame, write_frame
from dugnad.dht.ids import RunId
from dugnad.dht.ports import Stream
from dugnad.dht.records import encode
from dugnad.peer.pull import Puller, PullPolicy
from dugnad.peer.transfer import PullServer
from dugnad.peer.transferwire import (
    ANSWER_BYTES_MAX,
    COMMITS_BYTES_MAX,
    PULLS_PER_PEER_MAX,
    Blame,
    Here,
    NotHere,
    PullError,
)

from .transfer_world import (  # noqa: TID252  the world is no installed package
    BIG,
    CALM,
    HELD,
    ME,
    QUICK,
    RUN,
    SIZE,
    WAIT_S,
    Held,
    Shelf,
    identity,
    made_commit,
    made_contribution,
    made_header,
    made_payload,
    swarm,
    world,
)


@pytest.fixture(scope="module")
def liar() -> Shelf:
    """Serves the true hashes of BIG and pieces in which one bit is wrong."""
    payload = bytearray(BIG.commit.payload)
    for start, _ in leaf_bounds(CODECS["int8"], BIG.state.theta.size):
        payload[start] ^= 1
    bad = Commit("int8", bytes(payload), BIG.commit.leaves)
    return Shelf(Held(BIG.header, bad, BIG.state))


async def test_a_payload_is_drawn_from_all_donors() -> None:
    shelves = [Shelf(BIG) for _ in range(4)]
    meet = await swarm(*shelves)
    found = await meet.puller().payload(meet.peers, BIG.header, BIG.state.theta.size)
    assert found == BIG.commit
    assert all(shelf.asked > 1 for shelf in shelves)
    assert meet.blame == []
    assert len(found.payload) < meet.traffic.received < len(found.payload) + 10_000


async def test_the_state_of_three_fragments_comes_from_two_donors() -> None:
    fragments = [made_commit(number) for number in range(3)]
    meet = await swarm(Shelf(*fragments), Shelf(*fragments))
    puller = meet.puller()
    for held in fragments:
        theta, momentum = await puller.anchors(meet.peers, held.header, SIZE)
        assert theta.tobytes() == held.state.theta.tobytes()
        assert momentum.tobytes() == held.state.momentum.tobytes()
        assert theta.flags.writeable
        assert momentum.dtype == np.float32
    assert meet.blame == []


async def test_many_fragments_at_once_do_not_overrun_one_donor() -> None:
    fragments = [made_commit(number, 1000) for number in range(3 * PULLS_PER_PEER_MAX)]
    meet = await swarm(Shelf(*fragments))
    puller = meet.puller()
    jobs = [puller.anchors(meet.peers, held.header, 1000) for held in fragments]
    found = await asyncio.gather(*jobs)
    assert [f[0].tobytes() for f in found] == [h.state.theta.tobytes() for h in fragments]


async def test_a_donor_with_bad_pieces_is_named_and_the_others_complete(liar: Shelf) -> None:
    meet = await swarm(liar, Shelf(BIG), liar)
    found = await meet.puller().payload(meet.peers, BIG.header, BIG.state.theta.size)
    assert found == BIG.commit
    assert {one.peer for one in meet.blame} == {meet.peers[0], meet.peers[2]}
    assert all(one.lied and "leaf" in one.reason for one in meet.blame)


async def test_a_transfer_fails_naming_everybody_when_nobody_is_honest(liar: Shelf) -> None:
    meet = await swarm(liar, Shelf())
    with pytest.raises(PullError, match="none of 2 donors") as failure:
        await meet.puller().payload(meet.peers, BIG.header, BIG.state.theta.size)
    assert [one.lied for one in sorted(failure.value.blame, key=lambda one: one.lied)] == [
        False,
        True,
    ]
    assert list(failure.value.blame) == meet.blame


async def test_a_donor_with_another_list_of_hashes_is_named() -> None:
    leaves = (b"x" * 32, *BIG.commit.leaves[1:])
    false = Shelf(Held(BIG.header, Commit("int8", BIG.commit.payload, leaves), BIG.state))
    short = Shelf(Held(BIG.header, Commit("int8", b"", leaves[1:]), BIG.state))
    meet = await swarm(false, short, Shelf(BIG))
    found = await meet.puller().payload(meet.peers, BIG.header, BIG.state.theta.size)
    assert found == BIG.commit
    assert {one.peer for one in meet.blame} <= set(meet.peers[:2])
    assert all(one.lied for one in meet.blame)


class Dying(Shelf):
    """Dies when it is asked for the third time."""

    def __init__(self, *held: Held) -> None:
        super().__init__(*held)
        self.die: Callable[[], None] = lambda: None

    def commit(self, fragment: int, digest: bytes) -> Commit | None:
        if self.asked == 2:
            self.die()
        return super().commit(fragment, digest)


async def test_a_donor_that_dies_half_way_costs_nothing_but_its_batches() -> None:
    dying = Dying(BIG)
    meet = await swarm(dying, Shelf(BIG))
    dying.die = lambda: meet.network.kill(meet.peers[0])
    found = await meet.puller().payload(meet.peers, BIG.header, BIG.state.theta.size)
    assert found == BIG.commit
    assert [(one.peer, one.lied) for one in meet.blame] == [(meet.peers[0], False)]


async def test_a_spare_donor_takes_the_place_of_one_that_failed() -> None:
    empty = [Shelf() for _ in range(6)]
    meet = await swarm(*empty, Shelf(HELD))
    assert await meet.puller().payload(meet.peers, HELD.header, SIZE) == HELD.commit
    assert {one.peer for one in meet.blame} == set(meet.peers[:6])
    assert {one.reason for one in meet.blame} == {"that payload is not here"}


async def frozen(stream: Stream) -> None:
    """Proves that it has BIG, then gives nothing any more."""
    await read_frame(stream, 1000)
    leaves = b"".join(BIG.commit.leaves)
    await write_frame(stream, encode(Here(len(leaves))))
    await stream.write(leaves)
    await stream.read(1 << 20)


async def test_a_frozen_donor_is_cut_once_another_one_waits() -> None:
    meet = await swarm(frozen, Shelf(BIG))
    patient = PullPolicy(open_s=WAIT_S, idle_s=60.0, patience_s=0.02)
    found = await meet.puller(patient).payload(meet.peers, BIG.header, BIG.state.theta.size)
    assert found == BIG.commit
    assert [one.peer for one in meet.blame] == [meet.peers[0]]
    assert "while other donors waited" in meet.blame[0].reason


async def test_a_frozen_donor_alone_is_dropped_after_the_idle_time() -> None:
    meet = await swarm(frozen)
    with pytest.raises(PullError, match=r"nothing for 0\.05 s"):
        await meet.puller(QUICK).payload(meet.peers, BIG.header, BIG.state.theta.size)


async def test_a_header_that_does_not_fit_the_fragment_is_not_asked_for() -> None:
    meet = await swarm(Shelf(HELD))
    for header in (made_header(codec="zip"), HELD.header):
        with pytest.raises(PullError, match="do not fit"):
            await meet.puller().payload(meet.peers, header, SIZE + 1)
    with pytest.raises(PullError, match="nobody"):
        await meet.puller().payload([], HELD.header, SIZE)


def answering(*frames: bytes, then: bytes = b"") -> Callable[[Stream], Awaitable[None]]:
    """A donor that answers one request with these frames, whatever it is."""

    async def handler(stream: Stream) -> None:
        await read_frame(stream, 1000)
        for frame in frames:
            await write_frame(stream, frame)
        await stream.write(then)
        await stream.read(1 << 20)

    return handler


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        encode(float("nan")),
        encode(["h", float("nan")]),
        encode(["h", -1]),
        encode(["n", "x" * 500]),
        b"x" * (ANSWER_BYTES_MAX + 1),
        encode(Here(1 << 62)),
    ],
)
async def test_a_donor_that_answers_garbage_is_dropped(frame: bytes) -> None:
    meet = await swarm(answering(frame), Shelf(HELD))
    assert await meet.puller().payload(meet.peers[:2], HELD.header, SIZE) == HELD.commit
    with pytest.raises(PullError):
        await meet.puller(QUICK).shard(meet.peers[:1], 0, b"s" * 32)
    with pytest.raises(PullError):
        await meet.puller(QUICK).commits(meet.peers[:1], 0, b"s" * 32, 3)


async def test_the_reason_of_a_foreign_donor_is_printable() -> None:
    meet = await swarm(answering(encode(NotHere("\x1b[31mboo\n"))))
    with pytest.raises(PullError, match=r"\?\[31mboo\?"):
        await meet.puller().shard(meet.peers, 0, b"s" * 32)


async def test_the_manifest_is_the_one_of_the_run() -> None:
    text = b"a manifest"
    false, good = Shelf(), Shelf()
    false.text, good.text = b"another", text
    network, (mine, *others) = await world(ME, identity(10), identity(11))
    run = RunId(hashlib.sha256(text).digest())
    for transport, donor in zip(others, (false, good), strict=True):
        await PullServer(transport, run, donor).start()
    blame: list[Blame] = []
    puller = Puller(mine, policy=CALM, blamed=blame.append)
    peers = [transport.peer for transport in others]
    assert await puller.manifest(peers, run) == text
    assert [(one.peer, one.lied) for one in blame] == [(peers[0], True)]
    with pytest.raises(PullError, match="not here"):
        await puller.manifest(peers, RUN)
    assert network.connected(ME.peer, peers[0])


async def test_a_prepared_unit_comes_by_its_hash_and_a_wrong_one_names_its_donor() -> None:
    block = b"tokens of a unit"
    name = hashlib.sha256(block).digest()
    shelves = [Shelf(), Shelf()]
    shelves[0].blocks[name] = b"another of 16 by"
    shelves[1].blocks[name] = block
    meet = await swarm(*shelves)
    assert await meet.puller().block(meet.peers, name, len(block)) == block
    assert [(one.peer, one.lied) for one in meet.blame] == [(meet.peers[0], True)]
    shelves[1].blocks[name] = block + b" and more"
    with pytest.raises(PullError, match="where at most 16 can be due"):
        await meet.puller().block(meet.peers[1:], name, len(block))


async def test_shards_come_by_hash_from_the_first_peer_that_has_them() -> None:
    shards = {number: bytes([number]) * 50_000 for number in range(4)}
    hashes = {number: hashlib.sha256(data).digest() for number, data in shards.items()}
    shelves = [Shelf(), Shelf()]
    for shelf in shelves:
        shelf.shards = dict(shards)
    meet = await swarm(*shelves)
    puller = meet.puller()
    found = [await puller.shard(meet.peers, number, hashes[number]) for number in shards]
    assert found == list(shards.values())
    assert [shelf.asked for shelf in shelves] == [4, 0]
    shelves[0].shards[2] = b"damaged"
    assert await puller.shard(meet.peers, 2, hashes[2]) == shards[2]
    assert [(one.peer, one.lied) for one in meet.blame] == [(meet.peers[0], True)]
    with pytest.raises(PullError):
        await puller.shard(meet.peers, 9, b"s" * 32)


def made_input(number: int) -> Input:
    return Input(made_contribution(made_payload(), seq=number), (), 1.0, (1.0,))


def made_chain(count: int, inputs: int = 2) -> tuple[CommitRecord, ...]:
    """Newest first."""
    parent = b"g" * 32
    chain: list[CommitRecord] = []
    for version in range(1, count + 1):
        listed = tuple(made_input(number) for number in range(inputs))
        header = made_header(
            0,
            parent,
            version=version,
            inputs_count=inputs,
            inputs_root=inputs_root(RUN, listed),
        )
        chain.insert(0, CommitRecord(header, listed))
        parent = header_digest(header, RUN)
    return tuple(chain)


CHAIN = made_chain(6)
NEWEST = header_digest(CHAIN[0].header, RUN)


async def test_a_chain_of_commits_comes_newest_first() -> None:
    shelf = Shelf()
    shelf.chain = CHAIN
    meet = await swarm(shelf)
    assert await meet.puller().commits(meet.peers, 0, NEWEST, 4) == CHAIN[:4]
    assert await meet.puller().commits(meet.peers, 0, NEWEST, 1000) == CHAIN


def with_nan(commit: CommitRecord) -> CommitRecord:
    listed = (msgspec.structs.replace(commit.inputs[0], clip=float("nan")), *commit.inputs[1:])
    return msgspec.structs.replace(commit, inputs=listed)


@pytest.mark.parametrize(
    ("chain", "reason"),
    [
        ((CHAIN[1],), "not the one that was due"),
        ((CHAIN[0], CHAIN[2]), "not the one that was due"),
        ((msgspec.structs.replace(CHAIN[0], inputs=CHAIN[0].inputs[:1]),), "not as many"),
        (
            (msgspec.structs.replace(CHAIN[0], inputs=CHAIN[0].inputs[::-1]),),
            "inputs do not match",
        ),
        ((with_nan(CHAIN[0]),), "clip factor"),
    ],
)
async def test_what_is_not_the_chain_is_refused(
    chain: tuple[CommitRecord, ...], reason: str
) -> None:
    shelf, good = Shelf(), Shelf()
    shelf.chain, good.chain = chain, CHAIN
    meet = await swarm(shelf, good)
    assert await meet.puller().commits(meet.peers, 0, NEWEST, 4) == CHAIN[:4]
    assert [one.peer for one in meet.blame] == meet.peers[:1]
    assert reason in meet.blame[0].reason
    assert meet.blame[0].lied


async def test_more_commits_than_fit_an_answer_are_cut_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = len(encode(CHAIN[0]))
    monkeypatch.setattr("dugnad.peer.transfer.COMMITS_BYTES_MAX", 2 * size + size // 2)
    shelf = Shelf()
    shelf.chain = CHAIN
    meet = await swarm(shelf)
    assert await meet.puller().commits(meet.peers, 0, NEWEST, 6) == CHAIN[:2]
    assert 100 * size < COMMITS_BYTES_MAX


async def test_a_commit_of_another_run_is_refused() -> None:
    shelf = Shelf()
    shelf.chain = CHAIN
    meet = await swarm(shelf)
    puller = Puller(meet.mine, RunId(b"o" * 32), CALM)
    with pytest.raises(PullError, match="another run"):
        await puller.commits(meet.peers, 0, NEWEST, 4)
