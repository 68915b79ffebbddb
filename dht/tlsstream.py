"""Streams over TLS 1.3 sockets, on the event loop: in turns of a fraction of a millisecond.

OpenSSL reads and writes the socket itself, straight from and into the caller's memory, and gives
the interpreter's lock away meanwhile. To hand it to threads cost a quarter more (11 of 51 ms of CPU
for 15 MB each way): two changes of threads for each burst, and a change of the lock's holder for
each record.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from dugnad.dht.ids import PeerId
from dugnad.dht.sockets import SocketStream, unsent_bytes

T = TypeVar("T")

TURN_BYTES: Final = 256 * 1024
"""Moved at once, in about 0.3 ms; then everybody else on the event loop has a turn, and a close or
abort takes effect."""
RECORD_BYTES: Final = 16 * 1024
"""Content of a TLS record at most, and of one call of OpenSSL that reads."""
SHORT_BYTES: Final = 1024
"""A read of less takes a whole record: frames come in two reads, their length first."""
SEND_BYTES: Final = TURN_BYTES // 2
"""One call of OpenSSL: eight TLS records. An interrupted call must be repeated with equal bytes, so
a turn is a whole number of them."""


class TlsStream(SocketStream):
    """A `Stream` on a connection of its own, so nothing else waits behind what it holds unsent."""

    UNSENT_MAX = None

    def __init__(
        self, connection: socket.socket, peer: PeerId, forget: Callable[[SocketStream], None]
    ) -> None:
        assert isinstance(connection, ssl.SSLSocket), "TLS comes first"
        super().__init__(connection, peer, forget)
        self.step = 0
        self._tls = connection
        self._used = False
        self._ahead = memoryview(b"")
        """The rest of a TLS record of which a short read wanted the beginning."""
        self._keep: Callable[[TlsStream], None] | None = None

    @property
    def used(self) -> bool:
        """Whether it has carried a transfer that we began."""
        return self._used

    def keep_with(self, keep: Callable[[TlsStream], None]) -> None:
        """Give it to `keep` whenever it rests; else it ends then."""
        self._keep = keep

    def rest(self) -> None:
        """A transfer is over at both ends: the stream may be given out again."""
        self._used = True
        if self._keep is not None:
            self._keep(self)
        else:
            self.abort()

    def is_quiet(self) -> bool:
        """Whether it is open, nobody uses it, and nothing has come that nobody has read."""
        if self._ended or self._closing or self._reading or self._writing:
            return False
        if self._ahead or self._tls.pending():
            return False
        try:
            socket.socket.recv(self._tls, 1, socket.MSG_PEEK)  # beside TLS: an end shows, too
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def at_hand(self, n: int) -> bytes | None:
        """Exactly `n` bytes if they have been received already."""
        if n > len(self._ahead) or self._reading or self._ended or self._closing:
            return None
        data, self._ahead = bytes(self._ahead[:n]), self._ahead[n:]
        return data

    def unsent(self) -> int:
        """Bytes, encrypted, that the other machine has not acknowledged; 0 where it cannot be
        told, and after the end."""
        return unsent_bytes(self._socket) if self._socket.fileno() >= 0 else 0

    async def _receive(self, view: memoryview) -> int:
        if self._ahead or len(view) < SHORT_BYTES:
            return await self._receive_short(view)
        got = await when_ready(self._tls, partial(self._read_some, view[:TURN_BYTES]))
        if got == TURN_BYTES:
            await asyncio.sleep(0)
        return got

    async def _receive_short(self, view: memoryview) -> int:
        """From what is at hand, else from one record, whose rest is at hand then."""
        if not self._ahead:
            room = memoryview(bytearray(RECORD_BYTES))
            self._ahead = room[: await when_ready(self._tls, partial(self._read, room))]
        count = min(len(view), len(self._ahead))
        view[:count], self._ahead = self._ahead[:count], self._ahead[count:]
        return count

    async def _send(self, view: memoryview) -> None:
        at = 0
        while at < len(view):
            sent = await when_ready(
                self._tls, partial(self._write_some, view[at : at + TURN_BYTES])
            )
            at += sent
            if sent == TURN_BYTES:
                await asyncio.sleep(0)

    async def _linger(self) -> bool:
        """Ends our direction, and waits until the other machine has all of it.

        Then the connection may go at once: what the other side still writes is answered by a reset,
        which takes nothing from what its kernel holds for its reader.
        """
        with contextlib.suppress(OSError):
            self._tls.unwrap()  # an error: it waits for the same word of the other side
        self._shut(socket.SHUT_WR)
        await self._sent()
        return True

    def _shut(self, how: int) -> None:
        # Not SSLSocket's own: a reader would then be given the bytes as they are on the line.
        socket.socket.shutdown(self._tls, how)

    # What follows does not use recv_into and send: once TLS has ended they go on in plain.

    def _read(self, room: memoryview) -> int:
        """Bytes of one record, or 0 at the end. SSLWantReadError if none are here."""
        return self._tls.read(RECORD_BYTES, room)  # type: ignore[return-value]  # a count

    def _read_some(self, view: memoryview) -> int:
        """Bytes that are here, at most a view full; 0 at the end. SSLWantReadError if none are."""
        got = count = self._read(view)
        size, read = len(view), self._read
        with contextlib.suppress(ssl.SSLWantReadError):
            while count and got < size:
                count = read(view[got:])
                got += count
        return got

    def _write_some(self, view: memoryview) -> int:
        """How many bytes, in whole parts, could be handed over at once. SSLWantWriteError if not
        even one part could: it has to be repeated."""
        at = self._tls.write(view[:SEND_BYTES])
        with contextlib.suppress(ssl.SSLWantWriteError):
            while at < len(view):
                at += self._tls.write(view[at : at + SEND_BYTES])
        return at


async def when_ready(connection: ssl.SSLSocket, work: Callable[[], T]) -> T:
    """What `work` on the socket returns, repeated whenever the socket is ready for it. OSError when
    it breaks or has ended."""
    while True:
        try:
            return work()
        except ssl.SSLWantWriteError:
            await _wait_ready(connection, reading=False)
        except ssl.SSLWantReadError:
            await _wait_ready(connection, reading=True)
        except ValueError as error:  # what `ssl` raises where there is no TLS any more
            raise OSError("TLS has ended") from error


async def _wait_ready(connection: socket.socket, *, reading: bool) -> None:
    """Waits until a socket can be read or written; one waiter of each kind at a time."""
    loop = asyncio.get_running_loop()
    number = connection.fileno()
    if number < 0:
        raise OSError("the socket is closed")
    add, remove = (
        (loop.add_reader, loop.remove_reader) if reading else (loop.add_writer, loop.remove_writer)
    )
    ready = loop.create_future()
    add(number, _resolve, ready)
    try:
        await ready
    finally:
        remove(number)


def _resolve(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
