"""Exchange messages over the in-memory transport: order, faults of others, bounds, a clean end."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from dugnad.averaging.formats import (
    FORMAT,
    MESSAGE_BYTES_MAX,
    NO_DIGEST,
    Ack,
    Announce,
    Checkpoint,
    Claims,
    CommitRecord,
    Commits,
    Contribution,
    Header,
    HeadRow,
    Heads,
    Input,
    Message,
    WantCommits,
    Witness,
    sign_record,
)
from dugnad.dht.frames import write_frame
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId, RunId, short
from dugnad.dht.memory import MemoryNetwork, MemoryTransport
from dugnad.dht.ports import DialError, Stream, StreamEnded, Transport
from dugnad.dht.records import encode, verify_ed25519
from dugnad.dht.substrate import Substrate, SubstrateConfig
from dugnad.peer import messenger as limits
from dugnad.peer.messenger import EXCHANGE_PROTOCOL, Messenger

from .virtual_time import (  # noqa: TID252  a helper of these tests
    pass_time,
    run_virtual,
    until,
)

RUN = RunId(hashlib.sha256(b"messenger").digest())
OTHER_RUN = RunId(hashlib.sha256(b"another run").digest())
IDS = [Identity.ephemeral(bytes([number]) * 32) for number in range(1, 4)]
WAIT_S = 20.0


def contribution(maker: Identity, seq: int = 1) -> Contribution:
    record = Contribution(
        peer=maker.peer,
        fragment=0,
        seq=seq,
        base=0,
        base_digest=NO_DIGEST,
        tokens=64,
        steps=1,
        speed_class=4,
        eligible=True,
        codec="int8",
        payload_root=NO_DIGEST,
        payload_bytes=0,
        pieces_root=NO_DIGEST,
    )
    return sign_record(record, RUN, maker)


def commit(
    home: Identity,
    contributions: Sequence[Contribution] = (),
    acks: Sequence[Ack] = (),
    *,
    run: RunId = RUN,
) -> CommitRecord:
    header = Header(
        format=FORMAT,
        run=run,
        kind="merge",
        fragment=0,
        version=1,
        parent=NO_DIGEST,
        home=home.peer,
        boot=1,
        time_ms=1,
        members_root=NO_DIGEST,
        inputs_root=NO_DIGEST,
        inputs_count=len(contributions),
        tokens_total=0,
        eta_bits=0,
        mu_bits=0,
        codec="int8",
        payload_root=NO_DIGEST,
        payload_bytes=0,
        theta_root=NO_DIGEST,
        momentum_root=NO_DIGEST,
        seqs_root=NO_DIGEST,
    )
    inputs = tuple(Input(one, (), 1.0, (1.0,)) for one in contributions)
    return CommitRecord(sign_record(header, run, home), inputs, tuple(acks))


def ack(maker: Identity) -> Ack:
    return sign_record(Ack(maker.peer, 0, 1, NO_DIGEST), RUN, maker)


def heads(number: int) -> Heads:
    return Heads((HeadRow(0, number, NO_DIGEST),))


def want(number: int) -> WantCommits:
    return WantCommits(number, NO_DIGEST, ())


@dataclass
class Member:
    """A peer's messenger and what it was told."""

    transport: Transport
    got: list[tuple[PeerId, Message]] = field(default_factory=list)
    refused: list[tuple[PeerId, str]] = field(default_factory=list)
    checks: int = 0
    messenger: Messenger = field(init=False)

    def __post_init__(self) -> None:
        self.messenger = Messenger(
            self.transport,
            RUN,
            self._verify,
            lambda peer, message: self.got.append((peer, message)),
            lambda peer, reason: self.refused.append((peer, reason)),
            clock=asyncio.get_running_loop().time,
        )

    @property
    def peer(self) -> PeerId:
        return self.transport.peer

    def messages(self) -> list[Message]:
        return [message for _, message in self.got]

    def _verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        self.checks += 1
        return verify_ed25519(peer, message, signature)


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[MemoryNetwork, Member, Member]]:
    """Two connected members that hold each other for live."""
    network = MemoryNetwork(asyncio.get_running_loop().time)
    one, two = (Member(network.join(each.peer)) for each in IDS[:2])
    network.connect(one.peer, two.peer)
    await one.messenger.start()
    await two.messenger.start()
    one.messenger.peer_up(two.peer)
    two.messenger.peer_up(one.peer)
    try:
        yield network, one, two
    finally:
        for member in (one, two):
            await member.messenger.close()
            await member.transport.close()


@asynccontextmanager
async def raw() -> AsyncIterator[tuple[Stream, Member]]:
    """A stream on which a test can write anything, and the member that reads it."""
    async with pair() as (_, one, two):
        stream = await one.transport.open(two.peer, EXCHANGE_PROTOCOL, 1.0)
        yield stream, two


async def test_messages_of_all_kinds_arrive_in_order() -> None:
    record = commit(IDS[0], [contribution(IDS[0]), contribution(IDS[2])], [ack(IDS[2])])
    point = Checkpoint(record, (), ())
    sent: list[Message] = [
        heads(1),
        Announce(record),
        Witness(ack(IDS[1])),
        want(7),
        Claims(((0, 5),)),
        Commits(0, (record,), point),
        heads(2),
    ]
    async with pair() as (_, one, two):
        for message in sent:
            one.messenger.send(two.peer, message)
        await until(lambda: len(two.got) == len(sent))
        assert two.messages() == sent
        assert {peer for peer, _ in two.got} == {one.peer}
        assert not two.refused
        assert one.messenger.counts.sent == two.messenger.counts.received == len(sent)


async def test_a_long_message_checked_in_a_thread_does_not_lose_its_place() -> None:
    many = commit(IDS[0], [contribution(IDS[2], seq) for seq in range(40)])
    async with pair() as (_, one, two):
        sent: list[Message] = [want(1), Announce(many), want(2), heads(3)]
        for message in sent:
            one.messenger.send(two.peer, message)
        await until(lambda: len(two.got) == len(sent))
        assert two.messages() == sent


async def test_a_record_that_comes_again_is_not_checked_again() -> None:
    record = commit(IDS[0], [contribution(IDS[0])], [ack(IDS[2])])
    async with pair() as (_, one, two):
        one.messenger.send(two.peer, Announce(record))
        one.messenger.send(two.peer, Commits(0, (record,)))
        await until(lambda: len(two.got) == 2)
        assert two.checks == 3


def bad(record: Contribution) -> Contribution:
    return msgspec.structs.replace(record, tokens=record.tokens + 1)


FORGED = msgspec.structs.replace(commit(IDS[0]).header, home=IDS[2].peer)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Announce(commit(IDS[0], [bad(contribution(IDS[2]))])), "the contribution of"),
        (Announce(CommitRecord(FORGED, ())), f"the header of {short(IDS[2].peer)} is not signed"),
        (Announce(commit(IDS[0], run=OTHER_RUN)), "another run"),
        (Commits(0, (commit(IDS[0]), CommitRecord(FORGED, ()))), "the header of"),
        (Commits(0, (), Checkpoint(CommitRecord(FORGED, ()), (), ())), "the header of"),
        (
            Announce(commit(IDS[0], [bad(contribution(IDS[2], seq)) for seq in range(30)])),
            "the contribution of",
        ),
        (Witness(Ack(IDS[2].peer, 0, 1, NO_DIGEST, bytes(64))), "the ack of"),
    ],
    ids=["contribution", "header", "run", "commits", "checkpoint", "many", "witness"],
)
async def test_a_message_without_good_signatures_is_refused_with_the_reason(
    message: Message, reason: str
) -> None:
    async with raw() as (stream, two):
        await write_frame(stream, encode(message))
        await write_frame(stream, encode(want(1)))
        await until(lambda: bool(two.got))
        assert two.messages() == [want(1)]  # the stream goes on
        assert [peer for peer, _ in two.refused] == [IDS[0].peer]
        assert reason in two.refused[0][1]


async def test_of_bad_acks_only_the_acks_are_dropped() -> None:
    forged = Ack(IDS[1].peer, 0, 1, NO_DIGEST, bytes(64))
    good = ack(IDS[2])
    record = commit(IDS[0], [contribution(IDS[0])], [forged, good])
    clean = commit(IDS[0], [contribution(IDS[0])], [good])
    point = Checkpoint(record, (), ())
    async with raw() as (stream, two):
        await write_frame(stream, encode(Announce(record)))
        await write_frame(stream, encode(Commits(0, (record,), point)))
        await until(lambda: len(two.got) == 2)
        expected = Commits(0, (clean,), Checkpoint(clean, (), ()))
        assert two.messages() == [Announce(clean), expected]
        assert not two.refused


def test_a_broken_stream_is_opened_again_and_what_was_queued_arrives() -> None:
    async def scenario() -> None:
        async with pair() as (network, one, two):
            one.messenger.send(two.peer, want(0))
            await until(lambda: len(two.got) == 1)
            assert isinstance(one.transport, MemoryTransport)
            one.transport.break_streams()
            for number in range(1, 6):
                one.messenger.send(two.peer, want(number))
            await until(lambda: len(two.got) == 6, limits.BACKOFF_MAX_S)
            assert two.messages() == [want(number) for number in range(6)]
            del network

    run_virtual(scenario())


class DeafTransport(MemoryTransport):
    """Fails to open streams, and notes when it was asked to."""

    def __init__(self, network: MemoryNetwork, peer: PeerId) -> None:
        super().__init__(network, peer)
        self.asked: list[float] = []

    async def open(self, peer: PeerId, protocol: str, timeout_s: float) -> Stream:
        self.asked.append(asyncio.get_running_loop().time())
        raise DialError(peer, [("", "deaf")])


def test_a_peer_that_cannot_be_reached_is_tried_with_growing_pauses() -> None:
    async def scenario() -> None:
        transport = DeafTransport(MemoryNetwork(), IDS[0].peer)
        one = Member(transport)
        await one.messenger.start()
        one.messenger.peer_up(IDS[1].peer)
        await pass_time(1)
        assert not transport.asked  # nothing to say, nothing to open
        one.messenger.send(IDS[1].peer, want(1))
        await pass_time(60)
        gaps = [b - a for a, b in zip(transport.asked, transport.asked[1:], strict=False)]
        assert gaps[0] == pytest.approx(limits.BACKOFF_FIRST_S)
        assert gaps[-1] == pytest.approx(limits.BACKOFF_MAX_S)
        assert gaps == sorted(gaps)
        await one.messenger.close()

    run_virtual(scenario())


def test_a_peer_that_sends_rubbish_is_cut_off_for_a_minute() -> None:
    async def scenario() -> None:
        async with raw() as (stream, two):
            for _ in range(limits.FAULTS_MAX + 1):
                await write_frame(stream, b"\xc1rubbish")
            with pytest.raises(StreamEnded):
                await stream.read(1)
            assert len(two.refused) == limits.FAULTS_MAX + 2
            assert "not a valid" in two.refused[0][1]
            assert "cut off" in two.refused[-1][1]

    async def comes_back() -> None:
        async with pair() as (_, one, two):
            stream = await one.transport.open(two.peer, EXCHANGE_PROTOCOL, 1.0)
            for _ in range(limits.FAULTS_MAX + 1):
                await write_frame(stream, b"\xc1")
            await until(lambda: "cut off" in str(two.refused[-1:]))
            one.messenger.send(two.peer, want(1))
            await pass_time(limits.CUT_OFF_S - 1)
            assert not two.got
            for number in range(2, 5):
                one.messenger.send(two.peer, want(number))
                await pass_time(limits.BACKOFF_MAX_S)
            assert want(4) in two.messages()

    run_virtual(scenario())
    run_virtual(comes_back())


async def test_a_frame_over_the_limit_ends_the_stream() -> None:
    async with raw() as (stream, two):
        await stream.write((MESSAGE_BYTES_MAX + 1).to_bytes(4, "big"))
        with pytest.raises(StreamEnded):
            await stream.read(1)
        assert "announced" in two.refused[0][1]


def test_a_flood_is_read_at_the_agreed_pace_and_fills_nothing() -> None:
    async def scenario() -> None:
        async with raw() as (stream, two):
            clock = asyncio.get_running_loop().time
            count = round(3 * limits.MESSAGES_PER_S)
            unread, start = 0, clock()
            for number in range(count):
                await write_frame(stream, encode(Heads((HeadRow(0, number, NO_DIGEST),) * 30)))
                unread = max(unread, number - len(two.got))
            await until(lambda: len(two.got) == count)
            assert clock() - start == pytest.approx(2, abs=0.2)  # the first second's worth at once
            assert unread < 100  # what the stream itself holds

    run_virtual(scenario())


def test_messages_that_come_before_the_peer_is_live_wait_for_it() -> None:
    async def scenario() -> None:
        async with pair() as (_, one, two):
            two.messenger.peer_down(one.peer)
            one.messenger.send(two.peer, want(1))
            await pass_time(1)
            assert not two.got
            two.messenger.peer_up(one.peer)
            await until(lambda: len(two.got) == 1, 0.1)

    run_virtual(scenario())


def test_a_stranger_is_not_listened_to_for_long() -> None:
    async def scenario() -> None:
        async with pair() as (network, _, two):
            stranger = network.join(IDS[2].peer)
            network.connect(stranger.peer, two.peer)
            stream = await stranger.open(two.peer, EXCHANGE_PROTOCOL, 1.0)
            await write_frame(stream, encode(want(1)))
            async with asyncio.timeout(limits.STRANGER_S + 0.1):
                with pytest.raises(StreamEnded):
                    await stream.read(1)
            assert not two.got
            await stranger.close()

    run_virtual(scenario())


def test_a_peer_that_goes_takes_its_queue_and_streams_along() -> None:
    async def scenario() -> None:
        async with pair() as (network, one, two):
            one.messenger.send(two.peer, want(0))
            await until(lambda: len(two.got) == 1)
            network.kill(two.peer)
            for number in range(5):
                one.messenger.send(two.peer, want(number))
            await pass_time(0.1)
            one.messenger.peer_down(two.peer)
            assert one.messenger.counts.dropped == 5
            one.messenger.send(two.peer, want(1))
            assert one.messenger.counts.dropped == 6
            await two.messenger.close()
            assert not [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]

    run_virtual(scenario())


async def test_a_message_that_no_peer_would_take_is_not_sent() -> None:
    async with pair() as (_, one, two):
        row = HeadRow(0, 1, bytes(1 << 20))
        one.messenger.send(two.peer, Heads((row,) * 5))
        one.messenger.send(two.peer, want(1))
        await until(lambda: bool(two.got))
        assert two.messages() == [want(1)]
        assert one.messenger.counts.dropped == 1


def test_close_leaves_no_task_of_a_busy_messenger() -> None:
    async def scenario() -> None:
        async with pair() as (_, one, two):
            for number in range(1000):
                one.messenger.send(two.peer, want(number))
            await pass_time(0.5)
            await two.messenger.close()
            await one.messenger.close()
            await one.messenger.close()
            assert not [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            one.messenger.peer_up(two.peer)
            one.messenger.send(two.peer, want(1))

    run_virtual(scenario())


@pytest.mark.slow
async def test_over_libp2p_messages_arrive_and_go_on_after_a_restart(tmp_path: Path) -> None:
    substrates = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        identity = Identity.create(folder / "key")
        config = SubstrateConfig(folder / "key", folder / "run", ("127.0.0.1",), address_book=False)
        substrates.append(Substrate(config, identity))
    members = [Member(substrate) for substrate in substrates]
    one, two = members
    try:
        for substrate in substrates:
            await substrate.start()
        await substrates[0].dial(two.peer, await substrates[1].addresses(), WAIT_S)
        for member, other in ((one, two), (two, one)):
            await member.messenger.start()
            member.messenger.peer_up(other.peer)
        for number in range(100):
            one.messenger.send(two.peer, want(number))
            two.messenger.send(one.peer, want(number))
        await until(lambda: len(two.got) == len(one.got) == 100)
        assert one.messages() == two.messages() == [want(number) for number in range(100)]
        await substrates[1].restart()
        for number in range(100, 200):
            one.messenger.send(two.peer, want(number))
        await until(lambda: want(199) in two.messages())
        numbers = [
            message.fragment for message in two.messages() if isinstance(message, WantCommits)
        ]
        assert numbers == sorted(numbers)
    finally:
        for member in members:
            await member.messenger.close()
            await member.transport.close()
