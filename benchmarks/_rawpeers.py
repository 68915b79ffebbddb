"""The wire alone: the bytes of a float32 ring from each peer to the next, and no sums.

Over plain TCP, over direct TLS streams, or over libp2p's daemon.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any, Final

from dugnad.dht.direct import DirectTransport
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId
from dugnad.dht.ports import Stream
from dugnad.dht.substrate import Substrate, SubstrateConfig

PROTOCOL: Final = "/dugnad-bench/raw/1"
TIMEOUT_S: Final = 60.0
PIECE_BYTES: Final = 1 << 20


def ring_bytes(peers: int, params: int) -> int:
    """What each peer sends in a float32 all-reduce by a ring."""
    return 8 * (peers - 1) * params // peers


class StreamPeer:
    """Sends to the next peer and receives from the one before, over our transports."""

    def __init__(self, folder: Path, rank: int, peers: int, params: int, kind: str, host: str):
        """`kind` is "p2pd" or "tls"."""
        self._rank, self._peers, self._bytes = rank, peers, ring_bytes(peers, params)
        place = folder / str(rank)
        place.mkdir()
        identity = Identity.create(place / "key")
        config = SubstrateConfig(place / "key", place / "run", hosts=(host,), address_book=False)
        protocols = (PROTOCOL,) if kind == "tls" else ()
        self._substrate = Substrate(config, identity)
        self._transport = DirectTransport(
            self._substrate,
            identity,
            place / "run",
            protocols=protocols,
            hosts=(host,),
            listen=kind == "tls",
        )
        self._next: Stream | None = None
        self._before: Stream | None = None
        self._incoming: asyncio.Queue[Stream] = asyncio.Queue(1)
        self._sending = memoryview(bytearray(PIECE_BYTES))
        self._receiving = memoryview(bytearray(PIECE_BYTES))
        self._done = asyncio.Event()

    async def start(self) -> dict[str, Any]:
        """Start p2pd and serve."""
        await self._substrate.start()
        await self._transport.start()
        await self._transport.accept(PROTOCOL, self._serve)
        addresses = await self._transport.addresses()
        return {"peer": self._transport.peer.hex(), "addresses": addresses}

    async def meet(self, others: list[dict[str, Any]]) -> None:
        """Open the stream to the next peer."""
        after = others[(self._rank + 1) % self._peers]
        peer = PeerId(bytes.fromhex(after["peer"]))
        await self._transport.dial(peer, after["addresses"], TIMEOUT_S)
        self._next = await self._transport.open(peer, PROTOCOL, TIMEOUT_S)
        await self._next.write(b"!")
        self._before = await self._incoming.get()

    async def prepare(self, number: int) -> None:
        """Nothing."""

    async def run(self) -> None:
        """All bytes out and in."""
        await asyncio.gather(self._send(), self._receive())

    def sample(self, before: bool) -> list[float]:
        """Nothing is averaged."""
        return [0.0]

    async def close(self) -> None:
        """Stop p2pd."""
        self._done.set()
        await self._transport.close()

    async def _serve(self, stream: Stream) -> None:
        await stream.read(1)
        self._incoming.put_nowait(stream)
        await self._done.wait()

    async def _send(self) -> None:
        assert self._next is not None, "they have met"
        for at in range(0, self._bytes, PIECE_BYTES):
            await self._next.write(self._sending[: self._bytes - at])

    async def _receive(self) -> None:
        assert self._before is not None, "they have met"
        for at in range(0, self._bytes, PIECE_BYTES):
            await self._before.read_into(self._receiving[: self._bytes - at])


class TcpPeer:
    """The same over plain TCP: large blocking writes and reads in two threads."""

    def __init__(self, rank: int, peers: int, params: int, host: str) -> None:
        self._rank, self._peers, self._bytes = rank, peers, ring_bytes(peers, params)
        self._host = host
        self._server = socket.socket()
        self._sockets: list[socket.socket] = []

    async def start(self) -> dict[str, Any]:
        """Listen."""
        self._server.bind((self._host, 0))
        self._server.listen(1)
        return {"place": self._server.getsockname()}

    async def meet(self, others: list[dict[str, Any]]) -> None:
        """Connect to the next, accept the one before."""
        host, port = others[(self._rank + 1) % self._peers]["place"]
        out = socket.create_connection((host, port), TIMEOUT_S)
        into, _ = await asyncio.to_thread(self._server.accept)
        into.settimeout(TIMEOUT_S)
        self._sockets = [out, into]

    async def prepare(self, number: int) -> None:
        """Nothing."""

    async def run(self) -> None:
        """All bytes out and in."""
        await asyncio.gather(asyncio.to_thread(self._send), asyncio.to_thread(self._receive))

    def sample(self, before: bool) -> list[float]:
        """Nothing is averaged."""
        return [0.0]

    async def close(self) -> None:
        """Close the sockets."""
        for one in (*self._sockets, self._server):
            one.close()

    def _send(self) -> None:
        piece = memoryview(bytes(PIECE_BYTES))
        for at in range(0, self._bytes, PIECE_BYTES):
            self._sockets[0].sendall(piece[: self._bytes - at])

    def _receive(self) -> None:
        room, left = memoryview(bytearray(PIECE_BYTES)), self._bytes
        while left:
            got = self._sockets[1].recv_into(room[:left])
            if not got:
                raise ConnectionError("the peer before has ended")
            left -= got
