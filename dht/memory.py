"""The in-memory twin of the substrate: the same ports without sockets, processes or clocks.

What it does depends only on the order in which its callers act, so a test or a demonstration in one
process repeats exactly. `MemoryNetwork.kill` is the pulled cable.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from dugnad.dht.addresses import parse_address
from dugnad.dht.ids import PeerId, peer_text, short
from dugnad.dht.ports import (
    STREAMS_PER_PEER_MAX,
    UNSENT_BYTES_MAX,
    DialError,
    Handler,
    Stream,
    StreamEnded,
    TransportError,
)

log = logging.getLogger(__name__)

_FIRST_PORT = 4001


class MemoryNetwork:
    """The world in which memory transports meet. `now` (seconds) ages the entries of the book."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self._present: dict[PeerId, MemoryTransport] = {}
        self._ports: dict[PeerId, int] = {}
        self._links: set[frozenset[PeerId]] = set()
        self._entries: dict[str, dict[PeerId, tuple[bytes, float]]] = {}

    def join(self, peer: PeerId) -> "MemoryTransport":
        """A transport for `peer`, from now on reachable by others at its address."""
        assert peer not in self._present, f"{short(peer)} is here already"
        self._ports.setdefault(peer, _FIRST_PORT + len(self._ports))
        self._present[peer] = transport = MemoryTransport(self, peer)
        return transport

    def book(self, peer: PeerId) -> "MemoryAddressBook":
        """The address book as `peer` sees it."""
        return MemoryAddressBook(self, peer)

    def kill(self, peer: PeerId) -> None:
        """Ends a peer without a word: its streams break on both sides, unread bytes are lost."""
        transport = self._present.pop(peer, None)
        self._links = {link for link in self._links if peer not in link}
        if transport is not None:
            transport.break_streams()

    def address_of(self, peer: PeerId) -> str:
        """The multiaddr of a peer that joined at some time."""
        return f"/ip4/127.0.0.1/tcp/{self._ports[peer]}/p2p/{peer_text(peer)}"

    def reason_against(self, caller: PeerId, peer: PeerId, address: str) -> str:
        """Why `caller` cannot reach `peer` at `address`; empty if it can."""
        try:
            place = parse_address(address)
        except ValueError as error:
            return str(error)
        if place.value("p2p") is not None and place.peer != peer:
            return "the address names another peer"
        there = [who for who, port in self._ports.items() if str(port) == place.value("tcp")]
        if not there or there[0] not in self._present:
            return "connection refused (nobody listens there)"
        if there[0] != peer:
            return "wrong peer id (somebody else answers there)"
        return "" if caller in self._present else "this transport is closed"

    def connect(self, one: PeerId, other: PeerId) -> None:
        """From now on the two can open streams to each other."""
        self._links.add(frozenset((one, other)))

    def connected(self, one: PeerId, other: PeerId) -> "MemoryTransport | None":
        """The transport of `other` if the two are connected and both alive."""
        if frozenset((one, other)) in self._links and one in self._present:
            return self._present.get(other)
        return None

    def put(self, key: str, peer: PeerId, value: bytes, ttl_s: float) -> bool:
        """Keeps a value of a living peer."""
        if peer in self._present:
            self._entries.setdefault(key, {})[peer] = (value, self.now() + ttl_s)
        return peer in self._present

    def find(self, key: str, peer: PeerId) -> dict[PeerId, bytes]:
        """The unexpired values under `key`, for a living peer."""
        if peer not in self._present:
            return {}
        entries = self._entries.get(key, {})
        return {who: value for who, (value, expires) in entries.items() if expires > self.now()}


class MemoryAddressBook:
    """The `AddressBook` of one peer in a `MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, peer: PeerId) -> None:
        self._network = network
        self._peer = peer

    async def store(self, key: str, value: bytes, ttl_s: float) -> bool:
        """Stores our value under `key`; False if we are dead."""
        return self._network.put(key, self._peer, value, ttl_s)

    async def get(self, key: str) -> dict[PeerId, bytes]:
        """The values under `key` by peer."""
        return self._network.find(key, self._peer)


class MemoryTransport:
    """The `Transport` of one peer in a `MemoryNetwork`; made by `MemoryNetwork.join`."""

    def __init__(self, network: MemoryNetwork, peer: PeerId) -> None:
        self.peer = peer
        self._network = network
        self._handlers: dict[str, Handler] = {}
        self._streams: set[MemoryStream] = set()
        self._incoming: Counter[PeerId] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    async def dial(self, peer: PeerId, addresses: Sequence[str], timeout_s: float) -> None:
        """Connects at once, or DialError with the reason for each address."""
        if peer == self.peer:
            raise DialError(peer, [("", "that is our own peer id")])
        if self._network.connected(self.peer, peer) is not None:
            return
        reasons = []
        for address in addresses:
            reason = self._network.reason_against(self.peer, peer, address)
            if not reason:
                self._network.connect(self.peer, peer)
                return
            reasons.append((address, reason))
        raise DialError(peer, reasons)

    async def open(self, peer: PeerId, protocol: str, timeout_s: float) -> Stream:
        """Opens a stream to a connected peer; DialError with the reason if that is not possible."""
        other = self._network.connected(self.peer, peer)
        if other is None:
            raise DialError(peer, [("", "not connected")])
        if protocol not in other._handlers:
            raise DialError(peer, [("", "the peer does not speak this protocol")])
        there, back = _Pipe(), _Pipe()
        stream = MemoryStream(peer, back, there, self._streams.discard)
        self._streams.add(stream)
        other._serve(protocol, MemoryStream(self.peer, there, back, other._forget_incoming))
        return stream

    async def accept(self, protocol: str, handler: Handler) -> None:
        """From now on serves incoming streams of `protocol`."""
        assert protocol not in self._handlers, f"{protocol} is served already"
        self._handlers[protocol] = handler

    async def addresses(self) -> list[str]:
        """Our one address."""
        return [self._network.address_of(self.peer)]

    async def close(self) -> None:
        """Leaves the network and ends all streams and handlers. Idempotent."""
        self._network.kill(self.peer)
        self.break_streams()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def break_streams(self) -> None:
        """Breaks every stream, at both ends."""
        for stream in tuple(self._streams):
            stream.abort()

    def _serve(self, protocol: str, stream: "MemoryStream") -> None:
        self._incoming[stream.peer] += 1
        self._streams.add(stream)
        if self._incoming[stream.peer] > STREAMS_PER_PEER_MAX:
            stream.abort()
            return
        work = self._run(self._handlers[protocol], stream)
        task = asyncio.create_task(work, name="memory stream")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, handler: Handler, stream: "MemoryStream") -> None:
        try:
            await handler(stream)
            await stream.close()
        except TransportError as error:
            log.debug("stream ended: peer=%s: %s", short(stream.peer), error)
        except Exception:  # as in the substrate: one bad stream must not end the others
            log.exception("a stream handler failed: peer=%s", short(stream.peer))
        finally:
            stream.abort()

    def _forget_incoming(self, stream: "MemoryStream") -> None:
        self._streams.discard(stream)
        self._incoming[stream.peer] -= 1


class _Pipe:
    """One direction of a stream: a bounded buffer."""

    def __init__(self) -> None:
        self.buffer = bytearray()
        self.ended = False  # nothing more will come; what is here may be read
        self.broken = False  # and nobody will read
        self._changed = asyncio.Event()

    def change(self) -> None:
        """Wakes whoever waits at either end."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self) -> None:
        """Returns after the next change."""
        await self._changed.wait()


class MemoryStream:
    """One end of a stream between two memory transports."""

    def __init__(
        self,
        peer: PeerId,
        incoming: _Pipe,
        outgoing: _Pipe,
        forget: Callable[["MemoryStream"], None],
    ) -> None:
        self.peer = peer
        self._in = incoming
        self._out = outgoing
        self._forget = forget
        self._closed = False

    async def read(self, n: int) -> bytes:
        """Exactly `n` bytes, or StreamEnded."""
        target = bytearray(n)
        await self.read_into(memoryview(target))
        return bytes(target)

    async def read_into(self, target: memoryview) -> None:
        """Fills `target`, or StreamEnded."""
        view = target.cast("B") if target.format != "B" or target.ndim != 1 else target
        got, size = 0, view.nbytes
        self._check_open()
        while got < size:
            pipe = self._in
            if pipe.buffer and not self._closed:
                count = min(size - got, len(pipe.buffer))
                view[got : got + count] = pipe.buffer[:count]
                del pipe.buffer[:count]
                got += count
                pipe.change()
            elif pipe.ended or self._closed:
                raise StreamEnded(f"{short(self.peer)} ended the stream, {size - got} B short")
            else:
                await pipe.wait()

    async def write(self, data: bytes | memoryview) -> None:
        """Sends `data`, waiting while the buffer is full; StreamEnded if nobody will read it."""
        rest = memoryview(data).cast("B")
        self._check_open()
        while rest:
            if self._out.broken or self._closed:
                raise StreamEnded(f"the stream to {short(self.peer)} is closed")
            space = UNSENT_BYTES_MAX - len(self._out.buffer)
            if space:
                self._out.buffer += rest[:space]
                rest = rest[space:]
                self._out.change()
            else:
                await self._out.wait()

    async def close(self) -> None:
        """Ends the stream; what was written can still be read at the other side."""
        self._end(lose=False)

    def abort(self) -> None:
        """Ends the stream; what was not read is lost."""
        self._end(lose=True)

    def _check_open(self) -> None:
        if self._closed:
            raise StreamEnded(f"the stream to {short(self.peer)} is closed")

    def _end(self, *, lose: bool) -> None:
        if self._closed:
            return
        self._closed = True
        self._out.ended = self._in.ended = self._in.broken = True
        if lose:
            self._out.broken = True
            self._out.buffer.clear()
        self._in.buffer.clear()
        self._forget(self)
        self._in.change()
        self._out.change()
