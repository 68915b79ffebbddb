"""The direct path: who gets through, and that everything else goes over the other transport."""

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dugnad.dht import direct
from dugnad.dht.certificate import peer_of_certificate
from dugnad.dht.direct import DirectTransport, Greeting
from dugnad.dht.frames import read_frame, write_frame
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId
from dugnad.dht.memory import MemoryNetwork
from dugnad.dht.ports import Stream
from dugnad.dht.records import encode

pytestmark = pytest.mark.slow

BULK = "/dugnad/test/bulk/1"
TALK = "/dugnad/test/talk/1"
WAIT_S = 10.0


class Clock:
    """Seconds that the test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@contextlib.asynccontextmanager
async def pair(
    folder: Path, clock: Clock, *, listen: bool = True
) -> AsyncIterator[tuple[DirectTransport, DirectTransport]]:
    """Two connected peers; the second serves both protocols by telling who asks."""
    network = MemoryNetwork()
    made = []
    for seed in (b"1", b"2"):
        identity = Identity.ephemeral(seed * 32)
        base = network.join(identity.peer)
        one = DirectTransport(
            base,
            identity,
            folder,
            protocols=(BULK,),
            hosts=("127.0.0.1",),
            listen=listen,
            clock=clock,
        )
        await one.start()
        made.append(one)
    for protocol in (BULK, TALK):
        await made[1].accept(protocol, tell)
    await made[0].dial(made[1].peer, await made[1].addresses(), WAIT_S)
    try:
        yield made[0], made[1]
    finally:
        for one in made:
            await one.close()


async def tell(stream: Stream) -> None:
    """Says who is at the other end."""
    await stream.write(stream.peer)


async def said(one: DirectTransport, two: DirectTransport, protocol: str = BULK) -> bytes:
    """What the second peer says to the first."""
    async with asyncio.timeout(WAIT_S):
        stream = await one.open(two.peer, protocol, WAIT_S)
        try:
            return await stream.read(32)
        finally:
            stream.abort()


async def test_bulk_goes_directly_and_talk_does_not(tmp_path: Path) -> None:
    async with pair(tmp_path, Clock()) as (one, two):
        assert await said(one, two) == one.peer
        assert (one.counts.direct, one.counts.fallen_back) == (1, 0)
        assert one.is_direct(two.peer)
        assert await said(one, two, TALK) == one.peer
        assert one.counts.direct == 1


async def test_the_key_of_the_certificate_does_not_stay_on_the_disk(tmp_path: Path) -> None:
    async with pair(tmp_path, Clock()):
        assert not os.listdir(tmp_path)


async def test_a_peer_that_listens_nowhere_is_served_over_the_other_way(tmp_path: Path) -> None:
    async with pair(tmp_path, Clock(), listen=False) as (one, two):
        assert await said(one, two) == one.peer
        assert (one.counts.direct, one.counts.fallen_back) == (0, 1)


async def test_after_a_failure_the_direct_way_rests_and_is_tried_again(tmp_path: Path) -> None:
    clock = Clock()
    async with pair(tmp_path, clock) as (one, two):
        servers, two._servers = two._servers, []
        assert await said(one, two) == one.peer
        two._servers = servers
        assert await said(one, two) == one.peer
        assert (one.counts.direct, one.counts.fallen_back) == (0, 2)
        clock.now += direct.PAUSE_FIRST_S + 1
        assert await said(one, two) == one.peer
        assert one.counts.direct == 1


async def test_a_peer_that_restarted_is_asked_for_its_new_place(tmp_path: Path) -> None:
    async with pair(tmp_path, Clock()) as (one, two):
        await said(one, two)
        two._tickets.clear()
        two._ticket_of.clear()
        assert await said(one, two) == one.peer
        assert (one.counts.direct, one.counts.fallen_back) == (2, 0)


async def test_somebody_else_at_the_place_is_not_believed(tmp_path: Path) -> None:
    async with pair(tmp_path, Clock()) as (one, two):
        await said(one, two)
        one._paths[two.peer].places = (("127.0.0.1", one.port),)
        await one.accept(BULK, tell)
        assert await said(one, two) == one.peer  # the right one is asked again
        assert one.counts.direct == 2


async def test_a_second_connection_resumes_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proofs: list[bytes] = []

    def proof(der: bytes) -> PeerId:
        proofs.append(der)
        return peer_of_certificate(der)

    monkeypatch.setattr(direct, "peer_of_certificate", proof)
    async with pair(tmp_path, Clock()) as (one, two):
        for _ in range(3):
            assert await said(one, two) == one.peer
        assert (one.counts.direct, len(proofs)) == (3, 1)
        folder = tmp_path / "again"
        folder.mkdir()
        assert two._server_tls is not None
        two._server_tls = direct._server_context(Identity.ephemeral(b"2" * 32), folder)
        assert await said(one, two) == one.peer, "it has forgotten all sessions, and proves itself"
        assert (one.counts.direct, len(proofs)) == (4, 2)


async def test_a_session_with_one_peer_lets_no_other_pose_as_it(tmp_path: Path) -> None:
    async with pair(tmp_path, Clock()) as (one, two):
        await said(one, two)
        assert one._paths[two.peer].session is not None
        folder = tmp_path / "other"
        folder.mkdir()
        two._server_tls = direct._server_context(Identity.ephemeral(b"3" * 32), folder)
        assert await said(one, two) == one.peer
        assert (one.counts.direct, one.counts.fallen_back) == (1, 1)
        assert one._paths[two.peer].session is None


@pytest.mark.parametrize("greeting", [b"", b"nonsense", encode(Greeting(bytes(32), BULK))])
async def test_without_a_ticket_nobody_gets_in(tmp_path: Path, greeting: bytes) -> None:
    async with pair(tmp_path, Clock()) as (_, two):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        reader, writer = await asyncio.open_connection("127.0.0.1", two.port, ssl=context)
        writer.write(len(greeting).to_bytes(4, "big") + greeting)
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()


async def test_a_stranger_that_says_nothing_is_let_go_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "HANDSHAKE_S", 0.1)
    async with pair(tmp_path, Clock()) as (_, two):
        with socket.create_connection(("127.0.0.1", two.port)) as mute:
            mute.setblocking(False)
            async with asyncio.timeout(WAIT_S):
                assert await asyncio.get_running_loop().sock_recv(mute, 1) == b""


async def test_a_bad_answer_about_the_place_is_survived(tmp_path: Path) -> None:
    async with pair(tmp_path, Clock()) as (one, two):

        async def lie(stream: Stream) -> None:
            await read_frame(stream, 0)
            await write_frame(stream, b"\xc1")

        two._base._handlers[direct.DIRECT_PROTOCOL] = lie  # type: ignore[attr-defined]
        assert await said(one, two) == one.peer
        assert one.counts.fallen_back == 1
