"""What every transport promises, run over the in-memory twin (fast) and over libp2p (slow)."""

import asyncio
import contextlib
import hashlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dugnad.dht.direct import DirectTransport
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId
from dugnad.dht.memory import MemoryNetwork
from dugnad.dht.ports import (
    STREAMS_PER_PEER_MAX,
    UNSENT_BYTES_MAX,
    AddressBook,
    DialError,
    Stream,
    StreamEnded,
    Transport,
)
from dugnad.dht.substrate import Substrate, SubstrateConfig

ECHO = "/dugnad/test/echo/1"
HOLD = "/dugnad/test/hold/1"
WAIT_S = 10.0


@dataclass
class Pair:
    """Two transports that can reach each other but are not connected yet."""

    one: Transport
    two: Transport
    books: tuple[AddressBook, AddressBook]
    kill_two: Callable[[], None]

    async def connect(self) -> None:
        await self.one.dial(self.two.peer, await self.two.addresses(), WAIT_S)


@pytest.fixture(
    params=[
        "memory",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("libp2p", "direct")),
    ]
)
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    if request.param == "memory":
        network = MemoryNetwork()
        peers = [PeerId(bytes([number]) * 32) for number in (1, 2)]
        one, two = (network.join(peer) for peer in peers)
        books = (network.book(peers[0]), network.book(peers[1]))
        yield Pair(one, two, books, lambda: network.kill(two.peer))
        await one.close()
        await two.close()
        return
    if request.param == "direct":
        async with direct_pair(tmp_path) as found:
            yield found
        return
    first, second = make_substrate(tmp_path / "1"), make_substrate(tmp_path / "2")
    await asyncio.gather(first.start(), second.start())
    try:
        yield Pair(first, second, (first, second), lambda: os.kill(second.p2pd_pid, signal.SIGKILL))
    finally:
        await asyncio.gather(first.close(), second.close())


@contextlib.asynccontextmanager
async def direct_pair(folder: Path) -> AsyncIterator[Pair]:
    """Direct TLS streams for every protocol of these tests, beside the in-memory transport."""
    network, made = MemoryNetwork(), []
    for seed in (b"1", b"2"):
        identity = Identity.ephemeral(seed * 32)
        base = network.join(identity.peer)
        direct = DirectTransport(
            base, identity, folder, protocols=(ECHO, HOLD), hosts=("127.0.0.1",)
        )
        await direct.start()
        made.append((base, direct))

    def kill_two() -> None:
        network.kill(made[1][0].peer)
        made[1][1].abort()

    books = (network.book(made[0][0].peer), network.book(made[1][0].peer))
    yield Pair(made[0][1], made[1][1], books, kill_two)
    for base, direct in made:
        await direct.close()
        await base.close()


def make_substrate(folder: Path) -> Substrate:
    folder.mkdir()
    identity = Identity.create(folder / "key")
    config = SubstrateConfig(identity=folder / "key", runtime=folder / "run", hosts=("127.0.0.1",))
    return Substrate(config, identity)


async def echo(stream: Stream) -> None:
    """Returns every byte until the other side ends."""
    while True:
        await stream.write(await stream.read(1))


class Held:
    """A handler that hands its streams to the test and keeps them open."""

    def __init__(self) -> None:
        self.streams: asyncio.Queue[Stream] = asyncio.Queue()

    async def __call__(self, stream: Stream) -> None:
        await self.streams.put(stream)
        await asyncio.Event().wait()

    async def next(self) -> Stream:
        async with asyncio.timeout(WAIT_S):
            return await self.streams.get()


async def opened(pair: Pair) -> tuple[Stream, Stream]:
    """Both ends of a stream from one to two."""
    held = Held()
    await pair.two.accept(HOLD, held)
    await pair.connect()
    stream = await pair.one.open(pair.two.peer, HOLD, WAIT_S)
    await stream.write(b"!")
    other = await held.next()
    assert await other.read(1) == b"!"
    return stream, other


async def test_what_is_written_is_echoed_and_both_ends_know_each_other(pair: Pair) -> None:
    await pair.two.accept(ECHO, echo)
    await pair.connect()
    stream = await pair.one.open(pair.two.peer, ECHO, WAIT_S)
    await stream.write(b"neighbours")
    assert await stream.read(4) == b"neig"
    assert await stream.read(6) == b"hbours"
    assert stream.peer == pair.two.peer
    await stream.close()


async def test_the_accepting_side_learns_who_opened(pair: Pair) -> None:
    _, other = await opened(pair)
    assert other.peer == pair.one.peer


async def test_streams_can_be_opened_against_the_direction_of_the_dial(pair: Pair) -> None:
    await pair.one.accept(ECHO, echo)
    await pair.connect()
    stream = await pair.two.open(pair.one.peer, ECHO, WAIT_S)
    await stream.write(b"x")
    assert await stream.read(1) == b"x"
    stream.abort()


async def test_nothing_to_read_is_read_at_once(pair: Pair) -> None:
    stream, _ = await opened(pair)
    assert await stream.read(0) == b""
    await stream.read_into(memoryview(bytearray()))


async def test_eight_mebibytes_arrive_in_place_and_unchanged(pair: Pair) -> None:
    stream, other = await opened(pair)
    sent = hashlib.shake_128(b"seed").digest(8 << 20)
    writing = asyncio.create_task(stream.write(memoryview(sent)))
    got = bytearray(len(sent))
    wide: Any = memoryview(got).cast("f")  # Any: the port speaks of bytes
    async with asyncio.timeout(WAIT_S):
        await other.read_into(wide)
        await writing
    assert got == sent


async def test_a_close_delivers_everything_and_then_the_end(pair: Pair) -> None:
    stream, other = await opened(pair)
    closing = asyncio.create_task(write_and_close(stream, bytes(100_000)))
    async with asyncio.timeout(WAIT_S):
        assert await other.read(100_000) == bytes(100_000)
        with pytest.raises(StreamEnded):
            await other.read(1)
        await closing


async def write_and_close(stream: Stream, data: bytes) -> None:
    await stream.write(data)
    await stream.close()


async def test_an_end_in_the_middle_of_a_read_is_a_stream_ended(pair: Pair) -> None:
    stream, other = await opened(pair)
    reading = asyncio.create_task(other.read(10))
    await write_and_close(stream, b"half")
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(StreamEnded):
            await reading


async def test_writing_to_an_ended_stream_is_a_stream_ended(pair: Pair) -> None:
    stream, other = await opened(pair)
    await other.close()
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(StreamEnded):
            await write_for_ever(stream)
    await stream.close()


async def write_for_ever(stream: Stream) -> None:
    while True:
        await stream.write(bytes(UNSENT_BYTES_MAX))


async def test_an_abort_wakes_the_reader_on_both_sides(pair: Pair) -> None:
    stream, other = await opened(pair)
    readings = [asyncio.create_task(end.read(1)) for end in (stream, other)]
    await asyncio.sleep(0)
    stream.abort()
    async with asyncio.timeout(WAIT_S):
        for reading in readings:
            with pytest.raises(StreamEnded):
                await reading


async def test_a_close_beside_a_waiting_reader_ends_that_reader(pair: Pair) -> None:
    stream, _ = await opened(pair)
    reading = asyncio.create_task(stream.read(1))
    await asyncio.sleep(0)
    async with asyncio.timeout(WAIT_S):
        await stream.close()
        with pytest.raises(StreamEnded):
            await reading


async def test_closing_and_aborting_again_does_nothing(pair: Pair) -> None:
    stream, _ = await opened(pair)
    for _ in range(2):
        await stream.close()
        stream.abort()
    with pytest.raises(StreamEnded):
        await stream.read(1)
    with pytest.raises(StreamEnded):
        await stream.write(b"x")


async def test_a_killed_peer_ends_its_streams_soon(pair: Pair) -> None:
    stream, _ = await opened(pair)
    reading = asyncio.create_task(stream.read(1))
    await asyncio.sleep(0)
    pair.kill_two()
    async with asyncio.timeout(1.0):
        with pytest.raises(StreamEnded):
            await reading


async def test_after_a_kill_opening_fails_with_a_reason(pair: Pair) -> None:
    stream, _ = await opened(pair)
    pair.kill_two()
    with pytest.raises(StreamEnded):
        await stream.read(1)
    with pytest.raises(DialError) as caught:
        await pair.one.open(pair.two.peer, HOLD, 1.0)
    assert caught.value.reasons


async def test_a_writer_waits_for_a_reader_that_does_not_read(pair: Pair) -> None:
    stream, other = await opened(pair)
    total = 64 << 20  # far above every buffer on the way
    writing = asyncio.create_task(stream.write(bytes(total)))
    done, _ = await asyncio.wait((writing,), timeout=0.2)
    assert not done
    target = memoryview(bytearray(1 << 20))
    async with asyncio.timeout(WAIT_S):
        for _ in range(total // len(target)):
            await other.read_into(target)
        await writing


async def test_an_unknown_protocol_is_refused_with_the_reason(pair: Pair) -> None:
    await pair.connect()
    with pytest.raises(DialError, match="does not speak this protocol"):
        await pair.one.open(pair.two.peer, "/dugnad/test/none/1", WAIT_S)


async def test_a_handler_that_returns_closes_and_one_that_fails_ends_only_its_stream(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(stream: Stream) -> None:
        if await stream.read(1) == b"x":
            raise ZeroDivisionError("a bug in a handler")
        await stream.write(b"fine")

    await pair.two.accept(HOLD, answer)
    await pair.connect()
    for letter, good in ((b"x", False), (b"a", True)):
        stream = await pair.one.open(pair.two.peer, HOLD, WAIT_S)
        await stream.write(letter)
        async with asyncio.timeout(WAIT_S):
            if good:
                assert await stream.read(4) == b"fine"
            with pytest.raises(StreamEnded):
                await stream.read(1)
        await stream.close()
    assert "a stream handler failed" in caplog.text


async def test_a_peer_gets_no_more_streams_than_its_share(pair: Pair) -> None:
    held = Held()
    await pair.two.accept(HOLD, held)
    await pair.connect()
    streams = [
        await pair.one.open(pair.two.peer, HOLD, WAIT_S) for _ in range(STREAMS_PER_PEER_MAX)
    ]
    others = [await held.next() for _ in streams]
    extra = await pair.one.open(pair.two.peer, HOLD, WAIT_S)
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(StreamEnded):
            await extra.read(1)
    others[0].abort()
    again = await pair.one.open(pair.two.peer, HOLD, WAIT_S)
    await held.next()
    for stream in (extra, again, *streams):
        stream.abort()


async def test_dialling_gives_the_reason_for_each_address(pair: Pair) -> None:
    right = (await pair.one.addresses())[0]
    stranger = Identity.ephemeral(b"s" * 32).peer
    place = right.rpartition("/p2p/")[0]
    addresses = ["/ip4/127.0.0.1/tcp/1", "/ip4/999.0.0.1/tcp/1", right, place]
    with pytest.raises(DialError) as caught:
        await pair.two.dial(stranger, addresses, WAIT_S)
    reasons = dict(caught.value.reasons)
    assert "refused" in reasons["/ip4/127.0.0.1/tcp/1"]
    assert "not an address" in reasons["/ip4/999.0.0.1/tcp/1"]
    assert "names another peer" in reasons[right]
    assert "wrong peer id" in reasons[place]


async def test_dialling_without_an_address_or_oneself_fails(pair: Pair) -> None:
    with pytest.raises(DialError, match="no address is known"):
        await pair.one.dial(pair.two.peer, [], 1.0)
    with pytest.raises(DialError, match="our own peer id"):
        await pair.one.dial(pair.one.peer, await pair.one.addresses(), 1.0)


async def test_dialling_a_connected_peer_again_is_fine(pair: Pair) -> None:
    await pair.connect()
    await pair.connect()


async def test_opening_to_a_stranger_fails_in_time(pair: Pair) -> None:
    with pytest.raises(DialError):
        await pair.one.open(Identity.ephemeral(b"s" * 32).peer, ECHO, 0.3)


async def test_addresses_name_their_peer_and_can_be_dialled(pair: Pair) -> None:
    for address in await pair.two.addresses():
        assert address.startswith("/ip4/127.0.0.1/")
    await pair.one.dial(pair.two.peer, (await pair.two.addresses())[:1], WAIT_S)


async def test_a_closed_transport_opens_nothing(pair: Pair) -> None:
    await pair.connect()
    await pair.one.close()
    await pair.one.close()
    with pytest.raises(DialError):
        await pair.one.open(pair.two.peer, ECHO, 1.0)


async def test_the_address_book_keeps_one_value_for_each_peer(pair: Pair) -> None:
    await pair.connect()
    await settle_book(pair)
    one, two = pair.books
    assert await one.store("adverts", b"from one", 120)
    assert await two.store("adverts", b"from two", 120)
    assert await two.store("adverts", b"two again", 121)
    expected = {pair.one.peer: b"from one", pair.two.peer: b"two again"}
    assert await one.get("adverts") == await two.get("adverts") == expected
    assert await one.get("nothing") == {}


async def settle_book(pair: Pair) -> None:
    """Lets the DHT nodes of two connected substrates meet."""
    if isinstance(pair.one, Substrate):
        assert await pair.one.meet([pair.two.peer]) == 1


@pytest.mark.slow
async def test_an_entry_ends_with_its_time_to_live(pair: Pair) -> None:
    await pair.connect()
    await settle_book(pair)
    await pair.books[0].store("short", b"gone", 0.05)
    await asyncio.sleep(0.1)
    assert await pair.books[1].get("short") == {}
