"""Server-sent events: numbered news for pages that stay open.

The hub keeps the last thousand frames once, encoded. A reader is a place in that ring, so a slow
one costs nothing: when its place has been overwritten it is told to `reset` (fetch the page again)
and goes on from the newest. Frames are written at most once a second to each reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from typing import Final

import msgspec
from aiohttp import web

from dugnad.dashboard import events as ev

RING_MAX: Final = 1000
"""Frames kept: a minute of a lively swarm, so that a reader whose line drops misses nothing."""
FRAME_BYTES_MAX: Final = 8192
"""Longer news is announced without its content."""
HEARTBEAT_S: Final = 15.0
"""A comment that keeps proxies and readers from thinking that the line is dead."""
PACE_S: Final = 1.0
"""A person reads no faster, and two hundred readers then cost two hundred writes a second."""
WRITE_S: Final = 30.0
"""A reader that takes nothing for so long is gone."""
READERS_MAX: Final = 512
"""Open streams; each holds a socket and about 128 KiB unsent at most, half of it our batch."""
BATCH_BYTES_MAX: Final = 65_536
"""Written at once to a reader who was away; the next batch waits until this one is taken."""
RETRY_MS: Final = 3000
LAST_ID_CHARS_MAX: Final = 40

_PEERS_INLINE_MAX: Final = 16


class TooManyReaders(Exception):
    """All places are taken."""


class Hub:
    """The ring and its readers, until `close`. `session` is drawn anew by each process: numbers of
    an earlier one mean nothing.
    """

    def __init__(self) -> None:
        self.session = secrets.token_hex(4)
        self.readers = 0
        self.resets = 0
        self.newest = 0
        self._frames: deque[tuple[int, bytes]] = deque(maxlen=RING_MAX)
        self._news = asyncio.Event()
        self._closing = asyncio.Event()
        self._writing: set[asyncio.Transport] = set()

    def publish(self, n: int, event: ev.AnyEvent) -> None:
        """Keep `event` under number `n` (rising) and wake the readers."""
        assert n > self.newest, "numbers of news rise"
        self.newest = n
        self._frames.append((n, self._frame(n, event)))
        self._news.set()
        self._news = asyncio.Event()

    def _frame(self, n: int, event: ev.AnyEvent) -> bytes:
        data = msgspec.json.encode(_told(event))
        if len(data) > FRAME_BYTES_MAX:
            data = msgspec.json.encode({"type": "changed", "at_ms": event.at_ms})
        return b"id: %b-%d\ndata: %b\n\n" % (self.session.encode(), n, data)

    def since(self, last: int) -> list[tuple[int, bytes]] | None:
        """Numbers and frames after number `last`, a batch at most; None when some of them are kept
        no longer.
        """
        if last == self.newest:
            return []
        if not self._frames or last > self.newest or last < self._frames[0][0] - 1:
            return None
        batch: list[tuple[int, bytes]] = []
        size = 0
        for n, frame in self._frames:
            if n <= last:
                continue
            size += len(frame)
            if batch and size > BATCH_BYTES_MAX:
                break
            batch.append((n, frame))
        return batch

    def place(self, last_id: str) -> int | None:
        """The number in a `Last-Event-ID`; None when it is of another process or malformed."""
        session, _, number = last_id[:LAST_ID_CHARS_MAX].partition("-")
        if session != self.session or not (number.isascii() and number.isdigit()):
            return None
        return int(number)

    def close(self) -> None:
        """End all streams at once; those stuck in a write lose their connection."""
        self._closing.set()
        self._news.set()
        for transport in self._writing:
            transport.abort()

    def reopen(self) -> None:
        """Take readers again after `close`: another server serves the same news."""
        self._closing = asyncio.Event()

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Answer `request` with news until the reader goes or the hub closes."""
        if self.readers >= READERS_MAX or self._closing.is_set():
            raise TooManyReaders
        self.readers += 1
        try:
            return await self._serve(request)
        finally:
            self.readers -= 1

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-cache, no-transform",
                "X-Accel-Buffering": "no",
            }
        )
        asked = request.headers.get("Last-Event-ID") or request.query.get("after", "")
        last = self.place(asked) if asked else self.newest
        await response.prepare(request)
        with contextlib.suppress(ConnectionError, TimeoutError):  # the reader is gone
            await self._write(request, response, b"retry: %d\n\n" % RETRY_MS)
            while not self._closing.is_set():
                last = await self._turn(request, response, last)
        return response

    async def _turn(
        self, request: web.Request, response: web.StreamResponse, last: int | None
    ) -> int:
        """Write what is new, or wait for it; the reader's new place."""
        news = self._news
        batch = self.since(last) if last is not None else None
        if batch is None:
            self.resets += 1
            reset = b"event: reset\nid: %b-%d\ndata: {}\n\n"
            batch = [(self.newest, reset % (self.session.encode(), self.newest))]
        if not batch:
            if not await _within(news, HEARTBEAT_S):
                await self._write(request, response, b": still here\n\n")
            return last or 0
        last = batch[-1][0]
        await self._write(request, response, b"".join(frame for _, frame in batch))
        if last == self.newest:
            await _within(self._closing, PACE_S)  # let news gather
        return last

    async def _write(self, request: web.Request, response: web.StreamResponse, data: bytes) -> None:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError
        self._writing.add(transport)
        try:
            async with asyncio.timeout(WRITE_S):
                await response.write(data)
        finally:
            self._writing.discard(transport)


async def _within(news: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await news.wait()
    except TimeoutError:
        return False
    return True


def _told(event: ev.AnyEvent) -> object:
    """What a page is told: the event, without tables that it would fetch anyway."""
    match event:
        case ev.BoardComputed():
            return {"type": "board", "at_ms": event.at_ms, "receipts": event.board.receipts}
        case ev.PeerChanged() if len(event.rows) > _PEERS_INLINE_MAX:
            return {"type": "peers", "at_ms": event.at_ms, "count": len(event.rows)}
        case _:
            return event
