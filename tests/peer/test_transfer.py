"""Handing bulk data over: what a home takes and refuses, and what a donor serves."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from dugnad.averaging.formats import (
    Contribution,
    sign_record,
)
from dugnad.dht.frames import read_frame, write_frame
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.memory import MemoryTransport
from dugnad.dht.ports import DialError, Stream, Transport, TransportError
from dugnad.dht.records import encode, verify_ed25519
from dugnad.dht.substrate import Substrate, SubstrateConfig
from dugnad.peer.pull import Puller
from dugnad.peer.pushing import push
from dugnad.peer.transfer import ContributionServer, PullServer
from dugnad.peer.transferwire import (
    ANSWER_BYTES_MAX,
    BUDDY_PROTOCOL,
    CONTRIBUTE_PROTOCOL,
    CONTRIBUTIONS_PER_PEER_MAX,
    OFFER_BYTES_MAX,
    PULL_PROTOCOL,
    PULLS_PER_PEER_MAX,
    GetCommits,
    GetLeaves,
    GetPieces,
    GetShard,
    Here,
    NotHere,
    Offer,
    Traffic,
)

from .transfer_world import (  # noqa: TID252  the world is no installed package
    BIG,
    CALM,
    HELD,
    HOME,
    ME,
    PIECES,
    RUN,
    WAIT_S,
    Held,
    Inbox,
    Shelf,
    identity,
    made_commit,
    made_contribution,
    made_payload,
    size_of,
    swarm,
    world,
)


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


async def test_a_draft_is_taken_from_its_maker_only_and_is_no_contribution() -> None:
    contributions, drafts = Inbox(), Inbox()
    payload = made_payload()
    made = made_contribution(payload)
    answers = {}
    for sender in (ME, identity(9)):
        _, (transport, home) = await world(sender, HOME)
        for inbox, kind in ((contributions, False), (drafts, True)):
            server = ContributionServer(home, RUN, size_of, inbox.take, verify_ed25519, drafts=kind)
            await server.start()
        answers[sender.peer] = await push(
            transport, HOME.peer, made, PIECES, payload, WAIT_S, protocol=BUDDY_PROTOCOL
        )
    assert answers[ME.peer] == ""
    assert "from its maker only" in answers[identity(9).peer]
    assert drafts.taken == [(made, PIECES, payload)]
    assert contributions.taken == []


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
    theta, momentum = await Puller(mine, RUN, CALM).anchors(
        peers, held.header, held.state.theta.size
    )
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
