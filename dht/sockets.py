"""Streams over the Unix sockets of the libp2p daemon: reads in place, bounded writes, clean ends.

Plain non-blocking sockets and `loop.sock_*`: a StreamReader would copy every byte twice more, and
keeps a descriptor open after a failed dial.
"""

import asyncio
import contextlib
import fcntl
import logging
import socket
import sys
import termios
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from dugnad.dht import control
from dugnad.dht.ids import PeerId, short
from dugnad.dht.p2pd import read_message
from dugnad.dht.ports import (
    STREAMS_PER_PEER_MAX,
    UNSENT_BYTES_MAX,
    Handler,
    StreamEnded,
    TransportError,
)

log = logging.getLogger(__name__)

# How long `close` waits for the daemon to take what is unsent (the other side may have stopped
# reading).
CLOSE_TIMEOUT_S = 5.0
# Time between our last byte and the end of the stream: the other daemon copies a byte in well under
# a millisecond when idle; with every core taken it may wait for a few time slices.
LINGER_S = 0.05
_POLL_S = 0.005
# The daemon sends the stream's header at once; anything slower is a daemon in trouble.
HEADER_TIMEOUT_S = 5.0
# Half of the usual limit of 1024 descriptors a process.
STREAMS_MAX = 512
_BACKLOG = 128
_ACCEPT_PAUSE_S = 0.1
_DRAIN_BYTES = 16 * 1024


class SocketStream:
    """A `Stream` on a connected Unix socket whose other end is the libp2p daemon.

    `_receive`, `_send` and `_linger` are what another kind of socket does otherwise.
    """

    UNSENT_MAX: int | None = UNSENT_BYTES_MAX
    """Bytes that the socket may hold unsent; None leaves it to the kernel."""

    def __init__(
        self, connection: socket.socket, peer: PeerId, forget: Callable[["SocketStream"], None]
    ) -> None:
        self.peer = peer
        self._socket = connection
        self._forget = forget
        self._loop = asyncio.get_running_loop()
        self._reading = False
        self._writing = False
        self._closing = False
        self._ended = False
        self._reader_left = asyncio.Event()
        # The kernel doubles the value and counts its own overhead: about 64 KiB of content fit.
        if self.UNSENT_MAX is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.UNSENT_MAX)

    def __repr__(self) -> str:
        return f"SocketStream({short(self.peer)}{', ended' if self._ended else ''})"

    async def read(self, n: int) -> bytes:
        """Exactly `n` bytes, or StreamEnded."""
        buffer = bytearray(n)
        await self.read_into(memoryview(buffer))
        return bytes(buffer)

    async def read_into(self, target: memoryview) -> None:
        """Fills `target` completely, straight from the socket, or StreamEnded."""
        view = target.cast("B") if target.format != "B" or target.ndim != 1 else target
        got, size = 0, view.nbytes
        self._check_open()
        with self._read_alone():
            while got < size:
                count = await self._receive(view[got:])
                if not count:
                    raise StreamEnded(f"{short(self.peer)} ended the stream, {size - got} B short")
                got += count

    async def write(self, data: bytes | memoryview) -> None:
        """Sends `data`; returns when at most `UNSENT_BYTES_MAX` of it wait in the socket."""
        self._check_open()
        with self._write_alone():
            await self._send(memoryview(data).cast("B"))

    async def close(self) -> None:
        """Sends what is unsent and the end of the stream; gives up after `CLOSE_TIMEOUT_S`."""
        if self._closing or self._ended:
            return
        self._closing = True
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                if not await self._linger():
                    self._shut(socket.SHUT_WR)
                    await self._read_to_end()
        except (OSError, TimeoutError, StreamEnded):
            log.debug("stream to %s did not close cleanly", short(self.peer))
        finally:
            self.abort()

    def abort(self) -> None:
        """Gives the stream up at once. Pending reads and writes raise StreamEnded."""
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(OSError):
            self._shut(socket.SHUT_RDWR)  # wakes pending operations, which then close
        self._forget(self)
        self._close_if_idle()

    async def _linger(self) -> bool:
        """Lets what we wrote arrive before the end does; whether the other side ended meanwhile.

        p2pd closes both directions of a stream at once, and about once in 10 000 times (measured on
        a loaded machine) that becomes a reset, which drops what the other p2pd has not handed over.
        """
        await self._sent()
        try:
            async with asyncio.timeout(LINGER_S):
                await self._read_to_end()
        except TimeoutError:
            return False
        return True

    async def _sent(self) -> None:
        """Waits until the other end of the socket has taken what was written."""
        while unsent_bytes(self._socket):  # noqa: ASYNC110  # the kernel has no event for this
            await asyncio.sleep(_POLL_S)

    async def _read_to_end(self) -> None:
        """Takes what still comes, until the daemon has passed on our end of the stream.

        A socket closed with bytes unread makes the daemon reset the stream, and the reset overtakes
        what the other side has not read yet. A reader that waits at this moment does it for us.
        """
        while self._reading:
            self._reader_left.clear()
            await self._reader_left.wait()
        with self._read_alone():
            rest = memoryview(bytearray(_DRAIN_BYTES))
            while await self._receive(rest):
                pass

    async def _receive(self, view: memoryview) -> int:
        """Waits for bytes and puts them into `view`: how many, 0 at the end. Raises OSError."""
        return await self._loop.sock_recv_into(self._socket, view)

    async def _send(self, view: memoryview) -> None:
        """Hands all of `view` to the kernel, waiting while its buffer is full. Raises OSError."""
        await self._loop.sock_sendall(self._socket, view)

    def _shut(self, how: int) -> None:
        """Ends one or both directions. Raises OSError."""
        self._socket.shutdown(how)

    def _check_open(self) -> None:
        if self._ended or self._closing:
            raise StreamEnded(f"the stream to {short(self.peer)} is closed")

    @contextlib.contextmanager
    def _read_alone(self) -> Iterator[None]:
        assert not self._reading, "two tasks read one stream"
        self._reading = True
        try:
            yield
        except OSError as error:
            raise StreamEnded(f"the stream to {short(self.peer)} broke: {error}") from error
        finally:
            self._reading = False
            self._reader_left.set()
            self._close_if_idle()

    @contextlib.contextmanager
    def _write_alone(self) -> Iterator[None]:
        assert not self._writing, "two tasks write one stream"
        self._writing = True
        try:
            yield
        except OSError as error:
            raise StreamEnded(f"the stream to {short(self.peer)} broke: {error}") from error
        finally:
            self._writing = False
            self._close_if_idle()

    def _close_if_idle(self) -> None:
        """Closes the descriptor of an ended stream, unless the event loop still watches it."""
        if self._ended and not self._reading and not self._writing:
            self._socket.close()


def unsent_bytes(connection: socket.socket) -> int:
    """Bytes that the other end has not taken yet; 0 where the system does not tell."""
    try:
        answer = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
    except OSError:
        return 0
    return int.from_bytes(answer, sys.byteorder)


class StreamTable:
    """All open streams of a transport, and the bounds on how many others may open."""

    def __init__(self) -> None:
        self._streams: set[SocketStream] = set()
        self._incoming: Counter[PeerId] = Counter()

    def __len__(self) -> int:
        return len(self._streams)

    def adopt(self, connection: socket.socket, peer: PeerId) -> SocketStream:
        """A stream that we opened."""
        stream = SocketStream(connection, peer, self.forget)
        self.add(stream)
        return stream

    def add(self, stream: SocketStream) -> None:
        """Count a stream that we opened, until it is given to `forget`."""
        self._streams.add(stream)

    def forget(self, stream: SocketStream) -> None:
        """It has ended."""
        self._streams.discard(stream)

    def admit(
        self, connection: socket.socket, peer: PeerId, kind: type[SocketStream] = SocketStream
    ) -> SocketStream | None:
        """A stream that `peer` opened; None if it has too many."""
        if self._incoming[peer] >= STREAMS_PER_PEER_MAX or len(self._streams) >= STREAMS_MAX:
            return None
        stream = kind(connection, peer, self._forget_incoming)
        self._streams.add(stream)
        self._incoming[peer] += 1
        return stream

    @property
    def is_full(self) -> bool:
        """Whether no more streams may be opened."""
        return len(self._streams) >= STREAMS_MAX

    def abort_all(self) -> None:
        """Gives every stream up."""
        for stream in tuple(self._streams):
            stream.abort()

    def _forget_incoming(self, stream: SocketStream) -> None:
        self._streams.discard(stream)
        self._incoming[stream.peer] -= 1
        if not self._incoming[stream.peer]:
            del self._incoming[stream.peer]


class StreamListener:
    """The Unix socket at which the daemon delivers incoming streams, one task for each."""

    def __init__(self, path: Path, table: StreamTable) -> None:
        self.path = path
        self.handlers: dict[str, Handler] = {}
        self._table = table
        self._server: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begins to listen. Its folder must be private: who can connect can pose as any peer."""
        self.path.unlink(missing_ok=True)
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.setblocking(False)
        self._server = server
        server.bind(str(self.path))
        server.listen(_BACKLOG)
        self._accepting = asyncio.create_task(
            accept_each(server, self._take), name="stream listener"
        )

    async def close(self) -> None:
        """Stops listening and cancels the handlers. Idempotent."""
        tasks = [*self._serving, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._accepting = None
        if self._server is not None:
            self._server.close()
            self._server = None
            self.path.unlink(missing_ok=True)

    def _take(self, connection: socket.socket) -> None:
        if len(self._serving) >= STREAMS_MAX:
            connection.close()
            return
        task = asyncio.create_task(self._serve(connection), name="incoming stream")
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, connection: socket.socket) -> None:
        try:
            stream, handler = await self._greet(connection)
        except (control.ControlError, OSError, TimeoutError) as error:
            log.debug("refused a stream: %s", error)
            connection.close()
            return
        except BaseException:
            connection.close()
            raise
        await run_handler(stream, handler)

    async def _greet(self, connection: socket.socket) -> tuple[SocketStream, Handler]:
        """Reads whose stream it is; ControlError if we do not serve it."""
        async with asyncio.timeout(HEADER_TIMEOUT_S):
            remote = control.parse_stream_info(await read_message(connection))
        handler = self.handlers.get(remote.protocol)
        if handler is None:
            raise control.ControlError(f"no handler for {remote.protocol!r}")
        if remote.peer is None:
            raise control.ControlError("the peer has no Ed25519 identity")
        stream = self._table.admit(connection, remote.peer)
        if stream is None:
            raise control.ControlError(f"{short(remote.peer)} has too many streams open")
        return stream, handler


async def accept_each(server: socket.socket, take: Callable[[socket.socket], None]) -> None:
    """Hands each incoming connection, which does not block, to `take`, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, _ = await loop.sock_accept(server)
        except OSError as error:  # out of descriptors: whoever waits will wait a little longer
            log.warning("cannot accept a stream: %s", error)
            await asyncio.sleep(_ACCEPT_PAUSE_S)
            continue
        connection.setblocking(False)
        take(connection)


async def run_handler(stream: SocketStream, handler: Handler) -> None:
    """Serves one incoming stream to its end, whatever becomes of the handler."""
    try:
        await handler(stream)
        await stream.close()
    except TransportError as error:
        log.debug("stream ended: peer=%s: %s", short(stream.peer), error)
    except Exception:  # the driver of foreign-facing handlers: one bad stream must not end us
        log.exception("a stream handler failed: peer=%s", short(stream.peer))
    finally:
        stream.abort()
