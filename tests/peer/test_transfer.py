"""Bulk data between daemons, in memory: what arrives, what is refused, who is named."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dugnad.averaging.buffers import AnchorState
from dugnad.averaging.codecs import CODECS, leaf_bounds
from dugnad.averaging.formats import (
    FORMAT,
    NO_DIGEST,
    CommitRecord,
    Contribution,
    Header,
    Input,
    UnitPiece,
    header_digest,
    inputs_root,
    pieces_root,
    sign_record,
)
from dugnad.averaging.tree import LEAF_PARAMS, leaf_hashes, root, root_of
from dugnad.averaging.worker import Commit
from dugnad.dht.frames import read_frame, write_frame
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.memory import MemoryNetwork, MemoryTransport
from dugnad.dht.ports import DialError, Stream, Transport, TransportError
from dugnad.dht.records import encode, verify_ed25519
from dugnad.dht.substrate import Substrate, SubstrateConfig
from dugnad.peer.transfer import ContributionServer, PullServer, push
from dugnad.peer.transferpull import Puller, PullPolicy
from dugnad.peer.transferwire import (
    ANSWER_BYTES_MAX,
    COMMITS_BYTES_MAX,
    CONTRIBUTE_PROTOCOL,
    CONTRIBUTIONS_PER_PEER_MAX,
    OFFER_BYTES_MAX,
    PULL_PROTOCOL,
    PULLS_PER_PEER_MAX,
    Blame,
    GetCommits,
    GetLeaves,
    GetPieces,
    GetShard,
    Here,
    NotHere,
    Offer,
    PullError,
    Traffic,
)

RUN = RunId(hashlib.sha256(b"a run").digest())
ME = Identity.ephemeral(b"m" * 32)
HOME = Identity.ephemeral(b"h" * 32)
SIZE = 200_000
WAIT_S = 5.0
QUICK = PullPolicy(open_s=WAIT_S, idle_s=0.05, patience_s=0.02)
CALM = PullPolicy(open_s=WAIT_S, idle_s=WAIT_S, patience_s=WAIT_S)


def identity(number: int) -> Identity:
    return Identity.ephemeral(bytes([number]) * 32)


# --- contributions ----------------------------------------------------------------------------


PIECES = (UnitPiece(0, 3, 0, 8), UnitPiece(0, 4, 2, 5))


def made_payload(size: int = SIZE, codec: str = "int8") -> bytes:
    values = np.random.default_rng(1).standard_normal(size).astype(np.float32)
    return CODECS[codec].encode(values)


def made_contribution(payload: bytes, **changes: object) -> Contribution:
    codec = CODECS["int8"]
    fields: dict[str, object] = {
        "peer": ME.peer,
        "fragment": 0,
        "seq": 7,
        "base": 1,
        "base_digest": b"b" * 32,
        "tokens": 1000,
        "steps": 3,
        "speed_class": 20,
        "eligible": True,
        "codec": "int8",
        "payload_root": root(payload, leaf_bounds(codec, SIZE)),
        "payload_bytes": len(payload),
        "pieces_root": pieces_root(RUN, PIECES),
    }
    made = Contribution(**(fields | changes))  # type: ignore[arg-type]  # a table of mixed types
    return sign_record(made, RUN, ME)


def size_of(fragment: int, codec: str) -> int | None:
    return CODECS[codec].encoded_size(SIZE) if fragment == 0 else None


@dataclass
class Inbox:
    """What a home took and what it refused."""

    answer: str = ""
    taken: list[tuple[Contribution, tuple[UnitPiece, ...], bytes]] = field(default_factory=list)
    refused: list[tuple[PeerId, str]] = field(default_factory=list)

    async def take(self, made: Contribution, pieces: tuple[UnitPiece, ...], payload: bytes) -> str:
        self.taken.append((made, pieces, payload))
        return self.answer

    def refuse(self, peer: PeerId, reason: str) -> None:
        self.refused.append((peer, reason))


async def world(*peers: Identity) -> tuple[MemoryNetwork, list[MemoryTransport]]:
    """Transports of these peers, the first connected to the others."""
    network = MemoryNetwork()
    transports = [network.join(peer.peer) for peer in peers]
    for other in transports[1:]:
        await transports[0].dial(other.peer, await other.addresses(), WAIT_S)
    return network, transports


async def with_home(
    inbox: Inbox, idle_s: float = WAIT_S, traffic: Traffic | None = None
) -> MemoryTransport:
    """My transport, connected to a home that serves contributions."""
    _, (mine, home) = await world(ME, HOME)
    told = inbox.refuse
    server = ContributionServer(
        home, RUN, size_of, inbox.take, verify_ed25519, refused=told, idle_s=idle_s, traffic=traffic
    )
    await server.start()
    return mine


async def pushed(inbox: Inbox, made: Contribution, payload: bytes) -> str:
    mine = await with_home(inbox)
    return await push(mine, HOME.peer, made, PIECES, payload, WAIT_S)


async def test_a_contribution_arrives_whole_and_both_ends_count_its_bytes() -> None:
    inbox, sent, received = Inbox(), Traffic(), Traffic()
    payload = made_payload()
    made = made_contribution(payload)
    mine = await with_home(inbox, traffic=received)
    assert await push(mine, HOME.peer, made, PIECES, payload, WAIT_S, traffic=sent) == ""
    assert inbox.taken == [(made, PIECES, payload)]
    assert inbox.refused == []
    assert len(payload) < sent.sent < len(payload) + 1000
    assert received.received == sent.sent


async def test_a_buddy_may_hand_in_what_another_peer_made() -> None:
    inbox = Inbox()
    buddy = identity(9)
    _, (transport, home) = await world(buddy, HOME)
    await ContributionServer(home, RUN, size_of, inbox.take, verify_ed25519).start()
    payload = made_payload()
    made = made_contribution(payload)
    assert await push(transport, HOME.peer, made, PIECES, payload, WAIT_S) == ""
    assert inbox.taken[0][0].peer == ME.peer


async def test_what_the_taker_says_reaches_the_sender() -> None:
    inbox = Inbox(answer="stale: its base is 3 versions old")
    payload = made_payload()
    assert await pushed(inbox, made_contribution(payload), payload) == inbox.answer
    assert inbox.refused == [(ME.peer, inbox.answer)]


FORGED = msgspec.structs.replace(made_contribution(made_payload()), signature=b"s" * 64)
OTHER_RUN = sign_record(made_contribution(made_payload()), RunId(b"o" * 32), ME)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (FORGED, "signature does not hold"),
        (OTHER_RUN, "signature does not hold"),
        (made_contribution(made_payload(), payload_root=b"r" * 32), "does not match its root"),
        (made_contribution(made_payload(), pieces_root=b"r" * 32), "unit pieces"),
        (made_contribution(made_payload(), payload_bytes=10), "a payload of 10 bytes where"),
        (made_contribution(made_payload(), payload_bytes=1 << 40), "bytes where"),
        (made_contribution(made_payload(), fragment=5), "no fragment 5"),
        (made_contribution(made_payload(), codec="zip\n"), "no fragment 0 with codec 'zip"),
        (made_contribution(made_payload(), base_digest=b"short"), "wrong length"),
        (made_contribution(made_payload(), tokens=-1), "a contribution with a"),
    ],
)
async def test_a_wrong_contribution_is_refused_with_the_reason(
    made: Contribution, reason: str
) -> None:
    inbox = Inbox()
    answer = await pushed(inbox, made, made_payload())
    assert reason in answer
    assert inbox.refused == [(ME.peer, answer)]
    assert inbox.taken == []


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", "not a valid Offer"),
        (b"\xc1garbage", "not a valid Offer"),
        (encode([1, 2]), "not a valid Offer"),
        (encode(float("nan")), "not a valid Offer"),
        (encode([[float("nan")] * 15, []]), "not a valid Offer"),
        (b"\x91" * 5000, "not a valid Offer"),
    ],
)
async def test_garbage_instead_of_a_contribution_is_refused(frame: bytes, reason: str) -> None:
    inbox = Inbox()
    mine = await with_home(inbox)
    stream = await mine.open(HOME.peer, CONTRIBUTE_PROTOCOL, WAIT_S)
    await write_frame(stream, frame)
    assert reason in (await read_frame(stream, 1000)).decode()
    stream.abort()


async def test_an_oversized_frame_is_refused_before_it_is_read() -> None:
    inbox = Inbox()
    mine = await with_home(inbox)
    stream = await mine.open(HOME.peer, CONTRIBUTE_PROTOCOL, WAIT_S)
    await stream.write((OFFER_BYTES_MAX + 1).to_bytes(4, "big"))
    assert "at most" in (await read_frame(stream, 1000)).decode()
    stream.abort()


async def test_a_sender_that_stops_half_way_is_cut_and_told() -> None:
    inbox = Inbox()
    mine = await with_home(inbox, idle_s=0.02)
    payload = made_payload()
    stream = await mine.open(HOME.peer, CONTRIBUTE_PROTOCOL, WAIT_S)
    await write_frame(stream, encode(Offer(made_contribution(payload), PIECES)))
    await stream.write(payload[: len(payload) // 2])
    assert "nothing for 0.02 s" in (await read_frame(stream, 1000)).decode()
    assert len(inbox.refused) == 1
    stream.abort()


async def test_of_one_peer_only_a_few_contributions_are_received_at_once() -> None:
    """The others wait unread, and are served when their turn comes."""
    inbox = Inbox()
    mine = await with_home(inbox)
    payload = made_payload()
    offer = encode(Offer(made_contribution(payload), PIECES))
    streams = []
    for _ in range(CONTRIBUTIONS_PER_PEER_MAX):
        streams.append(await mine.open(HOME.peer, CONTRIBUTE_PROTOCOL, WAIT_S))
        await write_frame(streams[-1], offer)
    waiting = asyncio.create_task(
        push(mine, HOME.peer, made_contribution(payload), PIECES, payload, WAIT_S)
    )
    for _ in range(20):
        await asyncio.sleep(0)
    assert not waiting.done()
    assert inbox.taken == []
    for stream in streams:
        stream.abort()
    assert await waiting == ""


async def test_a_push_without_an_answer_is_a_transport_error() -> None:
    network, (mine, home) = await world(ME, HOME)
    payload = made_payload()
    made = made_contribution(payload)
    with pytest.raises(DialError):
        await push(mine, HOME.peer, made, PIECES, payload, WAIT_S)

    async def silent(stream: Stream) -> None:
        await stream.read(len(payload) * 2)

    await home.accept(CONTRIBUTE_PROTOCOL, silent)
    with pytest.raises(TransportError, match=r"within 0\.02 s|nothing for 0\.02 s"):
        await push(mine, HOME.peer, made, PIECES, payload, 0.02)
    pushing = asyncio.create_task(push(mine, HOME.peer, made, PIECES, payload, WAIT_S))
    for _ in range(5):
        await asyncio.sleep(0)
    network.kill(HOME.peer)
    with pytest.raises(TransportError):
        await pushing


async def test_an_answer_before_the_payload_was_sent_is_no_acceptance() -> None:
    _, (mine, home) = await world(ME, HOME)

    async def hasty(stream: Stream) -> None:
        await write_frame(stream, b"")

    await home.accept(CONTRIBUTE_PROTOCOL, hasty)
    payload = made_payload()
    with pytest.raises(TransportError, match="before all of it"):
        await push(mine, HOME.peer, made_contribution(payload), PIECES, payload, WAIT_S)


# --- pulling ----------------------------------------------------------------------------------


def made_header(fragment: int = 0, parent: bytes = b"p" * 32, **changes: object) -> Header:
    fields: dict[str, object] = {
        "format": FORMAT,
        "run": RUN,
        "kind": "merge",
        "fragment": fragment,
        "version": 1,
        "parent": parent,
        "home": HOME.peer,
        "boot": 1,
        "time_ms": 1,
        "members_root": NO_DIGEST,
        "inputs_root": inputs_root(RUN, ()),
        "inputs_count": 0,
        "tokens_total": 1,
        "eta_bits": 0,
        "mu_bits": 0,
        "codec": "int8",
        "payload_root": NO_DIGEST,
        "payload_bytes": 0,
        "theta_root": NO_DIGEST,
        "momentum_root": NO_DIGEST,
        "seqs_root": NO_DIGEST,
    }
    header = Header(**(fields | changes))  # type: ignore[arg-type]  # a table of mixed types
    return sign_record(header, RUN, HOME)


@dataclass
class Held:
    """A commit as peers hold it."""

    header: Header
    commit: Commit
    state: AnchorState

    @property
    def digest(self) -> bytes:
        return header_digest(self.header, RUN)


def made_commit(fragment: int = 0, size: int = SIZE) -> Held:
    chance = np.random.default_rng(fragment)
    theta, momentum = chance.standard_normal((2, size)).astype(np.float32)
    state = AnchorState.of(theta, momentum)
    codec = CODECS["int8"]
    payload = codec.encode(momentum)
    leaves = leaf_hashes(payload, leaf_bounds(codec, size))
    header = made_header(
        fragment,
        payload_root=root_of(leaves),
        payload_bytes=len(payload),
        theta_root=state.theta_root,
        momentum_root=state.momentum_root,
    )
    return Held(header, Commit("int8", payload, leaves), state)


class Shelf:
    """A donor that holds what the test gives it."""

    def __init__(self, *held: Held) -> None:
        self.held = {(one.header.fragment, one.digest): one for one in held}
        self.text: bytes | None = None
        self.shards: dict[int, bytes] = {}
        self.chain: tuple[CommitRecord, ...] = ()
        self.asked = 0

    def manifest(self) -> bytes | None:
        return self.text

    def commit(self, fragment: int, digest: bytes) -> Commit | None:
        self.asked += 1
        held = self.held.get((fragment, digest))
        return held.commit if held else None

    def anchor(self, fragment: int, digest: bytes) -> AnchorState | None:
        self.asked += 1
        held = self.held.get((fragment, digest))
        return held.state if held else None

    def shard(self, number: int) -> bytes | None:
        self.asked += 1
        return self.shards.get(number)

    def commits(self, fragment: int, digest: bytes, count: int) -> tuple[CommitRecord, ...]:
        return self.chain[:count]


@dataclass
class Swarm:
    """Me and donors that serve."""

    network: MemoryNetwork
    mine: MemoryTransport
    peers: list[PeerId]
    blame: list[Blame] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)

    def puller(self, policy: PullPolicy = CALM) -> Puller:
        return Puller(self.mine, policy, blamed=self.blame.append, traffic=self.traffic)


async def swarm(*donors: Shelf | Callable[[Stream], Awaitable[None]]) -> Swarm:
    """Donors are served by a `PullServer`, handlers as they are."""
    network, (mine, *others) = await world(ME, *(identity(10 + i) for i in range(len(donors))))
    for transport, donor in zip(others, donors, strict=True):
        if isinstance(donor, Shelf):
            await PullServer(transport, RUN, donor, idle_s=WAIT_S).start()
        else:
            await transport.accept(PULL_PROTOCOL, donor)
    return Swarm(network, mine, [transport.peer for transport in others])


HELD = made_commit()
BIG = made_commit(1, 20 * LEAF_PARAMS + 5)


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
    payload = await meet.puller().payload(meet.peers, BIG.header, BIG.state.theta.size)
    assert payload == BIG.commit.payload
    assert all(shelf.asked > 1 for shelf in shelves)
    assert meet.blame == []
    assert len(payload) < meet.traffic.received < len(payload) + 10_000


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
    payload = await meet.puller().payload(meet.peers, BIG.header, BIG.state.theta.size)
    assert payload == BIG.commit.payload
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
    payload = await meet.puller().payload(meet.peers, BIG.header, BIG.state.theta.size)
    assert payload == BIG.commit.payload
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
    payload = await meet.puller().payload(meet.peers, BIG.header, BIG.state.theta.size)
    assert payload == BIG.commit.payload
    assert [(one.peer, one.lied) for one in meet.blame] == [(meet.peers[0], False)]


async def test_a_spare_donor_takes_the_place_of_one_that_failed() -> None:
    empty = [Shelf() for _ in range(6)]
    meet = await swarm(*empty, Shelf(HELD))
    assert await meet.puller().payload(meet.peers, HELD.header, SIZE) == HELD.commit.payload
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
    payload = await meet.puller(patient).payload(meet.peers, BIG.header, BIG.state.theta.size)
    assert payload == BIG.commit.payload
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
    assert await meet.puller().payload(meet.peers[:2], HELD.header, SIZE) == HELD.commit.payload
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
    puller = Puller(mine, CALM, blamed=blame.append)
    peers = [transport.peer for transport in others]
    assert await puller.manifest(peers, run) == text
    assert [(one.peer, one.lied) for one in blame] == [(peers[0], True)]
    with pytest.raises(PullError, match="not here"):
        await puller.manifest(peers, RUN)
    assert network.connected(ME.peer, peers[0])


async def test_shards_come_by_hash_and_begin_at_different_peers() -> None:
    shards = {number: bytes([number]) * 50_000 for number in range(4)}
    hashes = {number: hashlib.sha256(data).digest() for number, data in shards.items()}
    shelves = [Shelf(), Shelf()]
    for shelf in shelves:
        shelf.shards = dict(shards)
    meet = await swarm(*shelves)
    puller = meet.puller()
    found = [await puller.shard(meet.peers, number, hashes[number]) for number in shards]
    assert found == list(shards.values())
    assert [shelf.asked for shelf in shelves] == [2, 2]
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


# --- the serving end alone --------------------------------------------------------------------


async def ask(stream: Stream, request: object) -> Here | NotHere:
    frame = request if isinstance(request, bytes) else encode(request)
    await write_frame(stream, frame)
    answer = await read_frame(stream, ANSWER_BYTES_MAX)
    return msgspec.msgpack.decode(answer, type=Here | NotHere)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (GetPieces("payload", 0, HELD.digest, 3, 2), "there are 4 leaves"),
        (GetPieces("payload", 1, BIG.digest, 0, 21), "more than"),
        (GetPieces("theta", 0, b"u" * 32, 0, 1), "theta is not here"),
        (GetLeaves("momentum", 1, HELD.digest), "momentum is not here"),
        (GetShard(3), "it is not here"),
        (GetCommits(0, HELD.digest, 3), "it is not here"),
    ],
)
async def test_a_request_that_cannot_be_served_leaves_the_stream_usable(
    request_: object, reason: str
) -> None:
    meet = await swarm(Shelf(HELD, BIG))
    stream = await meet.mine.open(meet.peers[0], PULL_PROTOCOL, WAIT_S)
    answer = await ask(stream, request_)
    assert isinstance(answer, NotHere)
    assert reason in answer.reason
    assert await ask(stream, GetLeaves("payload", 0, HELD.digest)) == Here(4 * 32)
    stream.abort()


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        encode(float("nan")),
        encode(["p", "payload", 0, HELD.digest, -1, 1]),
        encode(["p", "payload", 0, HELD.digest, 0, 0]),
        encode(["p", "payload", 0, HELD.digest, float("nan"), 1]),
        encode(["l", "everything", 0, HELD.digest]),
        encode(["l", "theta", 0, b"short"]),
        encode(["c", 0, HELD.digest, 65]),
        encode(["s", 1 << 40]),
        encode(["z"]),
        b"x" * 300,
    ],
)
async def test_a_malformed_request_is_refused_and_ends_the_stream(frame: bytes) -> None:
    meet = await swarm(Shelf(HELD))
    stream = await meet.mine.open(meet.peers[0], PULL_PROTOCOL, WAIT_S)
    assert isinstance(await ask(stream, frame), NotHere)
    with pytest.raises(TransportError):
        await stream.read(1)


async def test_a_peer_has_only_a_few_transfers_at_once() -> None:
    meet = await swarm(Shelf(HELD))
    streams: list[Stream] = []
    request = GetLeaves("payload", 0, HELD.digest)
    for _ in range(PULLS_PER_PEER_MAX):
        streams.append(await meet.mine.open(meet.peers[0], PULL_PROTOCOL, WAIT_S))
        assert isinstance(await ask(streams[-1], request), Here)
    streams.append(await meet.mine.open(meet.peers[0], PULL_PROTOCOL, WAIT_S))
    answer = await ask(streams[-1], request)
    assert isinstance(answer, NotHere)
    assert "busy" in answer.reason
    for stream in streams:
        stream.abort()


async def test_a_reader_that_does_not_read_is_cut() -> None:
    _, (mine, other) = await world(ME, identity(10))
    traffic = Traffic()
    await PullServer(other, RUN, Shelf(BIG), idle_s=0.02, traffic=traffic).start()
    stream = await mine.open(other.peer, PULL_PROTOCOL, WAIT_S)
    await write_frame(stream, encode(GetPieces("payload", 1, BIG.digest, 0, 15)))
    await read_frame(stream, ANSWER_BYTES_MAX)
    while other._tasks:  # the handler's end is the event; there is nothing else to see it by
        await asyncio.wait(other._tasks, timeout=WAIT_S)
    with pytest.raises(TransportError):
        await stream.read(1 << 20)
    assert traffic.sent < 1 << 20


# --- libp2p -----------------------------------------------------------------------------------


async def substrates(folder: Path) -> list[Substrate]:
    made = []
    for name in ("one", "two"):
        place = folder / name
        place.mkdir()
        key = Identity.create(place / "key")
        config = SubstrateConfig(place / "key", place / "run", hosts=("127.0.0.1",))
        made.append(Substrate(config, key))
    return made


async def moved(mine: Transport, peers: Sequence[PeerId], held: Held) -> None:
    theta, momentum = await Puller(mine, CALM).anchors(peers, held.header, held.state.theta.size)
    assert theta.tobytes() == held.state.theta.tobytes()
    assert momentum.tobytes() == held.state.momentum.tobytes()


@pytest.mark.slow
async def test_four_megabytes_and_a_contribution_move_over_libp2p(tmp_path: Path) -> None:
    one, two = await substrates(tmp_path)
    held = made_commit(0, 500_000)
    inbox = Inbox()
    try:
        await asyncio.gather(one.start(), two.start())
        await PullServer(two, RUN, Shelf(held)).start()
        server = ContributionServer(two, RUN, size_of, inbox.take, verify_ed25519)
        await server.start()
        await one.dial(two.peer, await two.addresses(), WAIT_S)
        await moved(one, [two.peer], held)
        payload = made_payload()
        good = made_contribution(payload)
        assert await push(one, two.peer, good, PIECES, payload, WAIT_S) == ""
        for _ in range(5):
            answer = await push(one, two.peer, FORGED, PIECES, payload, WAIT_S)
            assert "signature" in answer
        assert [taken[2] for taken in inbox.taken] == [payload]
    finally:
        await asyncio.gather(one.close(), two.close())
