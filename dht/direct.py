"""A direct path for bulk data between peers that reach each other: TLS 1.3 beside libp2p.

libp2p's daemon costs some seven CPU seconds a gigabyte, a TLS socket two. `DirectTransport` is a
`Transport` over another one (libp2p's): streams of the protocols that it was given go over TCP
connections of their own, everything else, and whatever does not work, over the other one.

Who is who: the server proves its identity by its certificate (`dugnad.dht.certificate`), the client
shows a ticket that the server gave it over libp2p, which has authenticated both. Tickets are secret
between the two, travel only inside TLS to the proven server, and end with the server's process.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import msgspec

from dugnad.dht.addresses import parse_address
from dugnad.dht.certificate import CertificateError, make_certificate, peer_of_certificate
from dugnad.dht.frames import read_frame, write_frame
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId, short
from dugnad.dht.keptstreams import KeptStreams
from dugnad.dht.p2pd import SubstrateError
from dugnad.dht.ports import DialError, Handler, Stream, Transport, TransportError
from dugnad.dht.reach import can_bind, free_port
from dugnad.dht.records import RecordError, decode, encode
from dugnad.dht.sockets import SocketStream, StreamTable, accept_each, run_handler
from dugnad.dht.tlsstream import TlsStream, when_ready

__all__ = ["DIRECT_PROTOCOL", "DirectCounts", "DirectTransport"]

log = logging.getLogger(__name__)

DIRECT_PROTOCOL: Final = "/dugnad/direct/1"
"""Over libp2p: an empty frame asks where the direct port is; the answer is a `Direct`."""
TICKET_BYTES: Final = 32
PLACES_MAX: Final = 8
"""Addresses of a peer that are tried: its interfaces, two families."""
PEERS_MAX: Final = 1024
"""Peers whose tickets are kept, ours for them and theirs for us; as many as the roster knows."""
CONNECT_S: Final = 2.0
"""For one address: two losses of a first packet are one second each."""
HANDSHAKE_S: Final = 5.0
"""For TLS and the greeting: five round trips of a slow line."""
PENDING_MAX: Final = 64
"""Connections whose greeting has not come yet: each costs a descriptor and some 50 kB."""
PAUSE_FIRST_S: Final = 60.0
PAUSE_MAX_S: Final = 960.0
"""After a direct path failed libp2p's is used for so long, twice as long each time."""
ASK_AGAIN_S: Final = 5.0
"""A peer that cannot be asked may be connected a moment later."""
_BACKLOG: Final = 64
_GREETING_BYTES_MAX: Final = 512
_ANSWER_BYTES_MAX: Final = 1024
_OK: Final = b"ok"

_Ticket = Annotated[bytes, msgspec.Meta(min_length=TICKET_BYTES, max_length=TICKET_BYTES)]
_Place = tuple[
    Annotated[str, msgspec.Meta(max_length=45)], Annotated[int, msgspec.Meta(ge=1, le=65535)]
]


class Direct(msgspec.Struct, frozen=True, array_like=True):
    """Where a peer takes direct connections (IP address, port), and the asker's ticket there."""

    places: Annotated[tuple[_Place, ...], msgspec.Meta(max_length=PLACES_MAX)]
    ticket: _Ticket


class Greeting(msgspec.Struct, frozen=True, array_like=True):
    """The client's first frame inside TLS."""

    ticket: _Ticket
    protocol: Annotated[str, msgspec.Meta(max_length=128)]


@dataclass(slots=True)
class DirectCounts:
    """Streams that were opened, and how."""

    direct: int = 0
    again: int = 0
    """Instead of opening one: it was there from an earlier transfer."""
    fallen_back: int = 0


@dataclass(slots=True)
class _Path:
    """What is known of the direct way to a peer."""

    places: tuple[_Place, ...] = ()
    ticket: bytes = b""
    session: ssl.SSLSession | None = None
    """Of the connection on which the peer proved itself: the next ones resume it."""
    blocked_until: float = 0.0
    pause_s: float = PAUSE_FIRST_S


class DirectTransport:
    """A `Transport` that sends some protocols over TLS sockets of its own."""

    def __init__(
        self,
        base: Transport,
        identity: Identity,
        runtime: Path,
        *,
        protocols: Collection[str],
        hosts: Sequence[str],
        listen: bool = True,
        port: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`runtime` is a private folder, in which the key of the certificate lies for a moment.

        `hosts` are local addresses to listen on; nothing listens unless `listen`.
        """
        self.counts = DirectCounts()
        self.port = port
        self._base, self._identity, self._runtime = base, identity, runtime
        self._protocols = frozenset(protocols)
        self._hosts, self._listen, self._clock = tuple(hosts), listen, clock
        self._handlers: dict[str, Handler] = {}
        self._streams = StreamTable()
        self._kept = KeptStreams(clock)
        self._ending: asyncio.TimerHandle | None = None
        self._paths: OrderedDict[PeerId, _Path] = OrderedDict()
        self._tickets: OrderedDict[bytes, PeerId] = OrderedDict()
        self._ticket_of: dict[PeerId, bytes] = {}
        self._servers: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._greeting = 0
        self._server_tls: ssl.SSLContext | None = None
        self._client_tls = _client_context()

    # --- life

    async def start(self) -> None:
        """Listens, and answers others who ask where. Without a port they use the base."""
        if self._listen:
            self._server_tls = _server_context(self._identity, self._runtime)
            hosts = tuple(host for host in self._hosts if can_bind(host))
            try:
                self.port = free_port(hosts, self.port)
                for host in hosts:
                    self._servers.append(_listening(host, self.port))
            except (OSError, SubstrateError) as error:
                log.warning("no direct connections are taken: %s", error)
            for server in self._servers:
                self._own(accept_each(server, self._take), "direct listener")
        await self._base.accept(DIRECT_PROTOCOL, self._tell)

    async def close(self) -> None:
        """Stops listening, ends all direct streams, closes the base. Idempotent."""
        self.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self._servers:
            server.close()
        self._servers.clear()
        await self._base.close()

    def abort(self) -> None:
        """Gives all direct streams up at once, and no others come."""
        for task in self._tasks:
            task.cancel()
        if self._ending is not None:
            self._ending.cancel()
        self._kept.end_all()
        self._streams.abort_all()

    # --- Transport

    @property
    def peer(self) -> PeerId:
        """Who we are."""
        return self._base.peer

    async def dial(self, peer: PeerId, addresses: Sequence[str], timeout_s: float) -> None:
        """Connects over the base."""
        await self._base.dial(peer, addresses, timeout_s)

    async def addresses(self) -> list[str]:
        """The base's."""
        return await self._base.addresses()

    async def accept(self, protocol: str, handler: Handler) -> None:
        """Serves a protocol on both ways."""
        if protocol in self._protocols:
            self._handlers[protocol] = handler
        await self._base.accept(protocol, handler)

    async def open(self, peer: PeerId, protocol: str, timeout_s: float) -> Stream:
        """Opens a stream, directly if that works. DialError with the base's reasons if not."""
        deadline = self._clock() + timeout_s
        if protocol in self._protocols:
            kept = self._kept.take(peer, protocol)
            if isinstance(kept, TlsStream):
                self.counts.again += 1
                return kept
            path = self._path(peer)
            if path.blocked_until <= self._clock():
                try:
                    async with asyncio.timeout(timeout_s / 2):
                        stream = await self._open_directly(peer, path, protocol)
                except DialError as fault:  # it cannot even be asked
                    log.debug("cannot ask %s for a direct path: %s", short(peer), fault)
                    path.blocked_until = self._clock() + ASK_AGAIN_S
                except (TransportError, TimeoutError, OSError, CertificateError) as fault:
                    self._failed(peer, path, fault)
                else:
                    path.pause_s = PAUSE_FIRST_S
                    self.counts.direct += 1
                    stream.keep_with(partial(self._keep, protocol))
                    return stream
            self.counts.fallen_back += 1
        return await self._base.open(peer, protocol, max(deadline - self._clock(), 0.001))

    def is_direct(self, peer: PeerId) -> bool:
        """Whether bulk data to `peer` goes directly, as far as is known."""
        path = self._paths.get(peer)
        return path is not None and bool(path.ticket) and path.blocked_until <= self._clock()

    # --- the opening side

    def _path(self, peer: PeerId) -> _Path:
        path = self._paths.setdefault(peer, _Path())
        self._paths.move_to_end(peer)
        if len(self._paths) > PEERS_MAX:
            self._paths.popitem(last=False)
        return path

    def _failed(self, peer: PeerId, path: _Path, fault: Exception) -> None:
        log.debug("no direct path to %s for %.0f s: %s", short(peer), path.pause_s, fault)
        path.blocked_until = self._clock() + path.pause_s
        path.pause_s = min(2 * path.pause_s, PAUSE_MAX_S)
        path.ticket, path.session = b"", None

    def _keep(self, protocol: str, stream: TlsStream) -> None:
        """A transfer on this stream is over."""
        self._kept.keep(protocol, stream)
        if self._ending is None:
            self._end_old()

    def _end_old(self) -> None:
        """Ends what has waited for too long, now and whenever the next one has."""
        left = self._kept.end_old()
        loop = asyncio.get_running_loop()
        self._ending = None if left is None else loop.call_later(left, self._end_old)

    async def _open_directly(self, peer: PeerId, path: _Path, protocol: str) -> TlsStream:
        if self._streams.is_full:
            self._kept.end_oldest()
        if self._streams.is_full:
            raise TransportError("all streams are in use")
        asked = not path.ticket
        if asked:
            await self._ask(peer, path)
        try:
            return await self._connect(peer, path, protocol)
        except (TransportError, OSError, CertificateError):
            if asked:
                raise
        await self._ask(peer, path)  # it may have restarted: another port, no tickets
        return await self._connect(peer, path, protocol)

    async def _ask(self, peer: PeerId, path: _Path) -> None:
        """Asks over the base where the peer listens."""
        stream = await self._base.open(peer, DIRECT_PROTOCOL, HANDSHAKE_S)
        try:
            await write_frame(stream, b"")
            data = await read_frame(stream, _ANSWER_BYTES_MAX)
            found = decode(data, Direct, _ANSWER_BYTES_MAX)
        except RecordError as fault:
            raise TransportError(f"a bad answer: {fault.reason}") from None
        finally:
            stream.abort()
        if not found.places:
            raise TransportError("it takes no direct connections")
        path.places, path.ticket, path.session = found.places, found.ticket, None

    async def _connect(self, peer: PeerId, path: _Path, protocol: str) -> TlsStream:
        faults: list[str] = []
        for host, port in path.places:
            try:
                async with asyncio.timeout(CONNECT_S):
                    plain = await _connected(host, port)
            except (OSError, TimeoutError) as fault:
                faults.append(f"{host}: {fault or 'no answer'}")
                continue
            stream = await self._greet(plain, peer, path, protocol)
            path.places = ((host, port), *(p for p in path.places if p != (host, port)))
            return stream
        raise TransportError("; ".join(faults))

    async def _greet(
        self, plain: socket.socket, peer: PeerId, path: _Path, protocol: str
    ) -> TlsStream:
        """TLS, the server's proof, our ticket. Closes the socket if it fails."""
        tls = self._client_tls.wrap_socket(
            plain, do_handshake_on_connect=False, session=path.session
        )
        stream: TlsStream | None = None
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await when_ready(tls, tls.do_handshake)
                if not tls.session_reused:  # else it has proved to be who that session was with
                    found = peer_of_certificate(tls.getpeercert(binary_form=True) or b"")
                    if found != peer:
                        raise CertificateError(f"{short(found)} answers at its address")
                stream = TlsStream(tls, peer, self._streams.forget)
                self._streams.add(stream)
                await write_frame(stream, encode(Greeting(path.ticket, protocol)))
                if await read_frame(stream, _GREETING_BYTES_MAX) != _OK:
                    raise TransportError("it refused the ticket")
                if not tls.session_reused:  # each look at it makes a copy, a quarter of a ms
                    session = tls.session
                    path.session = session if session and session.has_ticket else None
                return stream
        except BaseException:
            path.session = None
            if stream is not None:
                stream.abort()
            tls.close()
            raise

    # --- the serving side

    async def _tell(self, stream: Stream) -> None:
        """Answers who asks where we listen."""
        await read_frame(stream, 0)
        places: tuple[_Place, ...] = ()
        if self._servers:
            hosts = (_host_of(address) for address in await self._base.addresses())
            unique = dict.fromkeys(host for host in hosts if host)
            places = tuple((host, self.port) for host in unique)[:PLACES_MAX]
        await write_frame(stream, encode(Direct(places, self._ticket_for(stream.peer))))

    def _ticket_for(self, peer: PeerId) -> bytes:
        """The peer's ticket; the same one until the table is full of newer ones."""
        ticket = self._ticket_of.get(peer)
        if ticket is None:
            ticket = self._ticket_of[peer] = secrets.token_bytes(TICKET_BYTES)
            self._tickets[ticket] = peer
            if len(self._tickets) > PEERS_MAX:
                _, oldest = self._tickets.popitem(last=False)
                del self._ticket_of[oldest]
        return ticket

    def _take(self, connection: socket.socket) -> None:
        if self._greeting >= PENDING_MAX:
            connection.close()
            return
        self._own(self._serve(connection), "direct stream")

    async def _serve(self, connection: socket.socket) -> None:
        self._greeting += 1
        try:
            stream, handler = await self._welcome(connection)
        except (TransportError, RecordError, OSError, TimeoutError) as fault:
            log.debug("refused a direct connection: %s", fault)
            return
        finally:
            self._greeting -= 1
        await run_handler(stream, handler)

    async def _welcome(self, connection: socket.socket) -> tuple[SocketStream, Handler]:
        """TLS and the client's ticket; whose stream it is and what serves it."""
        assert self._server_tls is not None, "nothing listens before it is made"
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tls = self._server_tls.wrap_socket(
            connection, server_side=True, do_handshake_on_connect=False
        )
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await when_ready(tls, tls.do_handshake)
                stranger = TlsStream(tls, PeerId(b""), lambda stream: None)
                greeting = decode(
                    await read_frame(stranger, _GREETING_BYTES_MAX), Greeting, _GREETING_BYTES_MAX
                )
                peer = self._tickets.get(greeting.ticket)
                handler = self._handlers.get(greeting.protocol)
                if peer is None or handler is None:
                    raise TransportError("no such ticket" if handler else "no such protocol")
                await write_frame(stranger, _OK)
                stream = self._streams.admit(tls, peer, TlsStream)
                if stream is None:
                    raise TransportError(f"{short(peer)} has too many streams open")
                return stream, handler
        except BaseException:
            tls.close()
            raise

    def _own(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # who it is says the certificate's identity, not a name
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _server_context(identity: Identity, folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 1  # a resumed connection costs both ends half of a new one
    certificate, key = make_certificate(identity)
    file = folder / "direct.pem"  # `ssl` takes them from files only
    file.unlink(missing_ok=True)
    file.touch(mode=0o600)
    try:
        file.write_bytes(certificate + key)
        context.load_cert_chain(file)
    finally:
        file.unlink()
    return context


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        server.setblocking(False)
        server.bind((host, port))
        server.listen(_BACKLOG)
    except OSError:
        server.close()
        raise
    return server


async def _connected(host: str, port: int) -> socket.socket:
    """A connected socket. Raises OSError, also when `host` is no IP address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    socket.inet_pton(family, host)
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(connection, (host, port))
    except BaseException:
        connection.close()
        raise
    return connection


def _host_of(address: str) -> str:
    """The IP address of a multiaddr of TCP; '' if it has none (relays, names)."""
    try:
        place = parse_address(address)
    except ValueError:
        return ""
    if place.is_quic or "p2p-circuit" in address:
        return ""
    return place.value("ip4") or place.value("ip6") or ""
