"""The requests that come in on a stream of bulk data: one at a time, or read ahead of answers."""

from __future__ import annotations

import asyncio

from dugnad.dht.frames import FrameError, read_frame
from dugnad.dht.ports import TransportError
from dugnad.dht.records import RecordError, decode
from dugnad.peer.transferwire import (
    REQUEST_BYTES_MAX,
    REQUESTS_HELD_MAX,
    Got,
    PacedStream,
    Refusal,
    Request,
    Stalled,
)


class Asked:
    """The requests of one stream, read while answers are sent: words of progress lie between."""

    def __init__(self, ears: PacedStream, line: PacedStream) -> None:
        """`ears` and `line` are the same stream; what is told is the line's."""
        self._ears, self._line = ears, line
        self._held: asyncio.Queue[Request | Refusal | TransportError] = asyncio.Queue(
            REQUESTS_HELD_MAX
        )

    async def read(self) -> None:
        """Until the stream ends, or somebody asks for what cannot be."""
        try:
            while True:
                request = await next_request(self._ears)
                if isinstance(request, Got):
                    self._line.heard(request.total)
                else:
                    await self._held.put(request)
        except (Refusal, TransportError) as end:
            await self._held.put(end)

    async def next(self, idle_s: float) -> Request:
        """The next one; what ended the reading; Stalled when nothing comes for so long."""
        try:
            async with asyncio.timeout(idle_s):
                found = await self._held.get()
        except TimeoutError:
            raise Stalled(f"nothing was asked for {idle_s:g} s") from None
        if isinstance(found, Refusal | TransportError):
            raise found
        return found


async def next_request(line: PacedStream, header: bytes = b"") -> Request:
    """The next request; Refusal when it is none, TransportError when no more come. `header` is what
    was read of it."""
    try:
        data = await read_frame(line, REQUEST_BYTES_MAX, header)
        request: Request = decode(data, Request, REQUEST_BYTES_MAX)  # type: ignore[arg-type]
    except FrameError as fault:
        raise Refusal(str(fault)) from None
    except RecordError as fault:
        raise Refusal(fault.reason) from None
    return request
