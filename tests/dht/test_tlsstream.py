"""One stream over TLS, end to end: turns, quiet, and what ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dugnad.dht import tlsstream
from dugnad.dht.direct import _client_context, _server_context
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId
from dugnad.dht.ports import StreamEnded
from dugnad.dht.tlsstream import TlsStream, when_ready

WAIT_S = 10.0
TURN = 32 * 1024
PEER = PeerId(b"peer")


@contextlib.asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[tuple[TlsStream, TlsStream]]:
    """Both ends of a stream."""
    server_tls = _server_context(Identity.ephemeral(b"1" * 32), folder)
    plain = socket.socketpair()
    for one in plain:
        one.setblocking(False)
    ends = (
        _client_context().wrap_socket(plain[0], do_handshake_on_connect=False),
        server_tls.wrap_socket(plain[1], server_side=True, do_handshake_on_connect=False),
    )
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*(when_ready(one, one.do_handshake) for one in ends))
        mine, theirs = (TlsStream(one, PEER, lambda stream: None) for one in ends)
        try:
            yield mine, theirs
        finally:
            mine.abort()
            theirs.abort()


async def until_told(stream: TlsStream, *, quiet: bool) -> None:
    """Waits until the stream says so."""
    while stream.is_quiet() != quiet:  # noqa: ASYNC110  the kernel has no event for this
        await asyncio.sleep(0)


async def test_both_directions_carry_more_than_the_kernel_holds_at_the_same_time(
    tmp_path: Path,
) -> None:
    up, down = os.urandom(2_000_003), os.urandom(1_500_001)
    async with pair(tmp_path) as (mine, theirs):
        _, _, got_up, got_down = await asyncio.gather(
            mine.write(up), theirs.write(down), theirs.read(len(up)), mine.read(len(down))
        )
    assert got_up == up
    assert got_down == down


@pytest.mark.parametrize("writes", [False, True])
async def test_others_have_a_turn_after_so_many_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, writes: bool
) -> None:
    monkeypatch.setattr(tlsstream, "TURN_BYTES", TURN)
    monkeypatch.setattr(tlsstream, "SEND_BYTES", TURN // 2)
    moved, marks = 0, []

    def counting(self: ssl.SSLSocket, *args: object) -> int:
        nonlocal moved
        count: int = was(self, *args)
        moved += count
        return count

    async with pair(tmp_path) as (mine, theirs):
        if not writes:
            await mine.write(bytes(3 * TURN))  # the kernel holds all of it
        name = "write" if writes else "read"
        was = getattr(ssl.SSLSocket, name)
        monkeypatch.setattr(ssl.SSLSocket, name, counting)
        work = asyncio.create_task(mine.write(bytes(3 * TURN)) if writes else read(theirs))
        while not work.done():
            await asyncio.sleep(0)
            marks.append(moved)
        await work
    assert moved == 3 * TURN
    assert max(b - a for a, b in zip([0, *marks], marks, strict=False)) <= TURN


async def read(stream: TlsStream) -> None:
    await stream.read(3 * TURN)


async def test_a_stream_is_quiet_until_something_comes(tmp_path: Path) -> None:
    async with pair(tmp_path) as (mine, theirs):
        assert theirs.is_quiet()
        await mine.write(b"abc")
        await until_told(theirs, quiet=False)
        assert await theirs.read(3) == b"abc"
        assert theirs.is_quiet()
        reading = asyncio.create_task(theirs.read(1))
        await asyncio.sleep(0)
        assert not theirs.is_quiet()  # somebody uses it
        await mine.write(b"x")
        assert await reading == b"x"
        assert theirs.is_quiet()


async def test_the_rest_of_a_record_that_is_at_hand_is_not_quiet(tmp_path: Path) -> None:
    async with pair(tmp_path) as (mine, theirs):
        await mine.write(b"headcontent")
        assert await theirs.read(4) == b"head"
        assert not theirs.is_quiet()
        assert theirs.at_hand(7) == b"content"
        assert theirs.is_quiet()


@pytest.mark.parametrize("kindly", [False, True])
async def test_the_other_sides_end_is_not_quiet(tmp_path: Path, *, kindly: bool) -> None:
    async with pair(tmp_path) as (mine, theirs):
        if not kindly:
            mine.abort()
        closing = asyncio.create_task(mine.close())
        await until_told(theirs, quiet=False)
        with pytest.raises(StreamEnded):
            await theirs.read(1)
        await closing


async def test_what_waits_while_tls_ends_says_nothing_in_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(tmp_path) as (mine, theirs):
        writing = asyncio.create_task(mine.write(bytes(4_000_000)))
        await asyncio.sleep(0)
        monkeypatch.setattr(mine._tls, "_sslobj", None)  # both sides have said the end
        reading = asyncio.create_task(theirs.read(4_000_000))
        with pytest.raises(StreamEnded, match="TLS has ended"):
            await writing
        with pytest.raises(StreamEnded, match="TLS has ended"):
            await mine.read(2000)
        mine.abort()
        with pytest.raises(StreamEnded):
            await reading


async def test_giving_a_stream_up_ends_what_waits_on_it(tmp_path: Path) -> None:
    async with pair(tmp_path) as (mine, theirs):
        reading = asyncio.create_task(mine.read(1))
        writing = asyncio.create_task(mine.write(bytes(4_000_000)))
        for _ in range(10):
            await asyncio.sleep(0)
        mine.abort()
        for one in (reading, writing):
            with pytest.raises(StreamEnded):
                await one
        assert mine._socket.fileno() == -1
        assert not mine.is_quiet()
        with pytest.raises(StreamEnded):  # what was sent before comes first
            await theirs.read(4_000_000)


async def test_close_sends_what_is_unsent_and_then_the_end(tmp_path: Path) -> None:
    async with pair(tmp_path) as (mine, theirs):
        await mine.write(b"last words")
        closing = asyncio.create_task(mine.close())
        assert await theirs.read(10) == b"last words"
        with pytest.raises(StreamEnded):
            await theirs.read(1)
        await closing
