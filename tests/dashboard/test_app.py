"""The web application over real loopback sockets: addresses, headers, live news, shutdown."""

import asyncio
import socket
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator, Sequence

import aiohttp
import msgspec
import pytest

from dugnad.averaging.board import board_json
from dugnad.dashboard import events as ev
from dugnad.dashboard.app import DashboardError, DashboardServer
from dugnad.dashboard.assets import assets
from dugnad.dashboard.contributor import Receipt
from dugnad.dashboard.feed import RunFeed

from .run_world import NOW_MS, checked, ids, story  # noqa: TID252  the world is no installed package

pytestmark = pytest.mark.slow

A = ids(1)[0]
PATHS = (
    "/",
    "/?x=time&y=log",
    "/events",
    "/peers",
    "/peers?sort=name&q=otter",
    "/leaderboard",
    "/leaderboard?me=otter&period=day",
    f"/peer/{A}",
)
DATA = (
    "/leaderboard.json",
    "/leaderboard.csv",
    "/api/v1/snapshot",
    "/api/chart/loss.svg",
    "/api/chart/contributions.svg?size=narrow",
    "/api/chart/peers.csv",
    "/metrics",
)


class Store:
    """A host's receipts: it remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    async def receipts(self, peer: str, limit: int) -> Sequence[Receipt]:
        """One."""
        self.asked.append((peer, limit))
        return (
            (
                Receipt(
                    at_ms=NOW_MS,
                    fragment=0,
                    version=3,
                    seq=7,
                    tokens=4321,
                    credited=4321,
                    status="settled",
                ),
            )
            if peer == A
            else ()
        )


@pytest.fixture
def store() -> Store:
    """The receipts of the feed."""
    return Store()


@pytest.fixture
def feed(store: Store) -> RunFeed:
    """A run of three hours."""
    feed = RunFeed(store)
    for event in story():
        feed.publish(event)
    return feed


@pytest.fixture
async def server(feed: RunFeed) -> AsyncIterator[DashboardServer]:
    """Its pages."""
    server = DashboardServer(feed, "127.0.0.1", 0)
    await server.start()
    yield server
    await server.close()


@pytest.fixture
async def client(server: DashboardServer) -> AsyncIterator[aiohttp.ClientSession]:
    """A browser without a script."""
    async with aiohttp.ClientSession(server.address) as session:
        yield session


@pytest.mark.parametrize("path", [*PATHS, *DATA])
async def test_every_address_answers_safely(client: aiohttp.ClientSession, path: str) -> None:
    async with client.get(path) as answer:
        body = await answer.text()
        assert answer.status == 200
        assert "default-src" in answer.headers["Content-Security-Policy"]
        assert "unsafe" not in answer.headers["Content-Security-Policy"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert "Set-Cookie" not in answer.headers
        assert not [name for name in answer.headers if name.startswith("Access-Control")]
    if path in PATHS:
        checked(body)
    if ".svg" in path:
        ET.fromstring(body)


@pytest.mark.parametrize("path", [*PATHS, *DATA])
async def test_only_reading_is_possible(client: aiohttp.ClientSession, path: str) -> None:
    async with client.head(path) as answer:
        assert (answer.status, await answer.read()) == (200, b"")
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        async with client.request(method, path, data=b"x" * 10_000) as answer:
            assert answer.status == 405
            assert answer.headers["Allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/api/chart/nothing.svg",
        "/static/../app.py",
        "/static/x.css",
        "/v1/status",
        "/peer/" + "%3Cscript%3E" * 20,
    ],
)
async def test_what_does_not_exist_is_a_page_that_says_so(
    client: aiohttp.ClientSession, path: str
) -> None:
    async with client.get(path) as answer:
        page = checked(await answer.text())
        assert answer.status == 404
        assert "Content-Security-Policy" in answer.headers
    assert not [one for one in page.of("script") if not one.get("src")]


async def test_static_files_may_be_kept_for_ever(client: aiohttp.ClientSession) -> None:
    for asset in assets().values():
        async with client.get(f"/static/{asset.name}") as answer:
            assert await answer.read() == asset.data
            assert answer.content_type == asset.kind
            assert "immutable" in answer.headers["Cache-Control"]


async def test_a_snapshot_is_sent_once(client: aiohttp.ClientSession, feed: RunFeed) -> None:
    async with client.get("/api/v1/snapshot") as answer:
        etag, body = answer.headers["ETag"], msgspec.json.decode(await answer.read())
    assert body["tokens"] == feed.state().tokens == 600_000
    assert body["fragments"]["1"]["version"] == 30
    assert body["next"] == etag.strip('"')
    async with client.get("/api/v1/snapshot", headers={"If-None-Match": etag}) as answer:
        assert (answer.status, await answer.read()) == (304, b"")


async def test_the_board_has_the_same_bytes_as_everywhere(
    client: aiohttp.ClientSession, feed: RunFeed
) -> None:
    board = feed.state().board
    assert board is not None
    async with client.get("/leaderboard.json") as answer:
        assert await answer.read() == board_json(board)


async def test_a_contributors_page_shows_the_receipts_of_the_host(
    client: aiohttp.ClientSession, store: Store
) -> None:
    async with client.get(f"/peer/{A}") as answer:
        assert "4.32 k" in await answer.text()
    assert store.asked == [(A, 100)]


async def read_until(stream: aiohttp.StreamReader, wanted: bytes) -> bytes:
    """What came, to the end of the line with `wanted`."""
    got: list[bytes] = []
    async with asyncio.timeout(5):
        while not got or wanted not in got[-1]:
            got.append(await stream.readline())
    return b"".join(got)


async def test_a_reader_hears_news_and_goes_on_where_it_was(
    client: aiohttp.ClientSession, feed: RunFeed
) -> None:
    async with client.get("/api/v1/events") as answer:
        assert answer.content_type == "text/event-stream"
        await read_until(answer.content, b"retry: 3000")
        feed.publish(ev.Happened(at_ms=NOW_MS, kind="k", text="first"))
        got = await read_until(answer.content, b"first")
    last = got.split(b"id: ")[1].split(b"\n")[0].decode()
    feed.publish(ev.Happened(at_ms=NOW_MS, kind="k", text="second"))
    async with client.get("/api/v1/events", headers={"Last-Event-ID": last}) as answer:
        got = await read_until(answer.content, b"second")
        assert b"first" not in got
        assert b"reset" not in got
    async with client.get("/api/v1/events?after=other-5") as answer:
        assert b"event: reset" in await read_until(answer.content, b"reset")


async def test_it_closes_at_once_with_streams_open(feed: RunFeed) -> None:
    server = DashboardServer(feed, "127.0.0.1", 0)
    await server.start()
    async with aiohttp.ClientSession(server.address) as client:
        streams = [await client.get("/api/v1/events") for _ in range(5)]
        for stream in streams:
            await read_until(stream.content, b"retry")
        assert feed.hub.readers == 5
        begin = asyncio.get_running_loop().time()
        await server.close()
        assert asyncio.get_running_loop().time() - begin < 0.5
        for stream in streams:
            stream.close()
    await server.close()


async def test_a_reader_that_takes_nothing_delays_neither_news_nor_the_end(feed: RunFeed) -> None:
    server = DashboardServer(feed, "127.0.0.1", 0)
    await server.start()
    loop = asyncio.get_running_loop()
    with socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.setblocking(False)
        await loop.sock_connect(stuck, ("127.0.0.1", server.port))
        await loop.sock_sendall(stuck, b"GET /api/v1/events HTTP/1.1\r\nHost: x\r\n\r\n")
        async with (
            aiohttp.ClientSession(server.address) as client,
            client.get("/api/v1/events") as answer,
        ):
            await read_until(answer.content, b"retry")
            for n in range(900):
                feed.publish(ev.SampleText(at_ms=NOW_MS, text=f"{n} " + "word " * 790))
            await read_until(answer.content, b"899 word")
        begin = loop.time()
        await server.close()
        assert loop.time() - begin < 0.5


async def test_a_page_is_compressed_for_whoever_takes_that(client: aiohttp.ClientSession) -> None:
    async with client.get("/", headers={"Accept-Encoding": "gzip"}) as answer:
        assert answer.headers["Content-Encoding"] == "gzip"
        assert int(answer.headers["Content-Length"]) < len(await answer.read()) / 3
        assert answer.headers["Server"] == "dugnad"
    async with client.get("/", headers={"Accept-Encoding": "identity"}) as answer:
        assert "Content-Encoding" not in answer.headers
        checked(await answer.text())


async def test_a_taken_port_is_said_clearly() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(DashboardError, match="in use") as caught:
            await DashboardServer(RunFeed(), "127.0.0.1", port).start()
    assert f"127.0.0.1:{port}" in caught.value.reason
    assert "another port" in caught.value.fix


async def test_several_runs_have_a_page_that_lists_them(feed: RunFeed) -> None:
    server = DashboardServer({"one": feed, "two": RunFeed()}, "127.0.0.1", 0)
    await server.start()
    try:
        async with aiohttp.ClientSession(server.address) as client:
            async with client.get("/") as answer:
                page = checked(await answer.text())
            assert {"/run/one/", "/run/two/"} <= {one["href"] for one in page.of("a")}
            async with client.get("/run/one/") as answer:
                run = checked(await answer.text())
                assert "Content-Security-Policy" in answer.headers
            for one in run.of("a"):
                if one["href"].startswith("/"):
                    async with client.get(one["href"]) as answer:
                        assert answer.status == 200, one["href"]
            async with client.get("/run/three/") as answer:
                assert answer.status == 404
    finally:
        await server.close()
