"""The substrate: libp2p streams and the swarm's address book behind our two ports.

`Substrate` assembles the libp2p daemon (`p2pd`), the streams over its Unix sockets (`sockets`) and
hivemind's DHT (`book`) into one object that starts, restarts and ends as a whole. Importing this
module is cheap; hivemind is loaded when a substrate starts.
"""

import asyncio
import contextlib
import errno
import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dugnad.dht import book, control
from dugnad.dht.addresses import Address, parse_address
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId, peer_text
from dugnad.dht.p2pd import (
    LOCAL_TIMEOUT_S,
    P2pd,
    P2pdSettings,
    SubstrateError,
    dial_reasons,
    listen_addresses,
    plain_reason,
)
from dugnad.dht.ports import DialError, Handler, Stream
from dugnad.dht.reach import (
    ANY_HOSTS,
    by_preference,
    can_bind,
    free_port,
    is_loopback,
    on_interfaces,
    places_of,
    probe_all,
)
from dugnad.dht.sockets import STREAMS_MAX, StreamListener, StreamTable

__all__ = ["SeedReport", "Substrate", "SubstrateConfig", "SubstrateError"]

log = logging.getLogger(__name__)

# A seed that does not answer in this time is reported dead; the others are tried at the same time.
SEED_TIMEOUT_S = 10.0
# Once a seed has answered, the others get this long: one that is frozen takes the connection and
# then says nothing, which cost a restarted peer all of SEED_TIMEOUT_S.
SEED_GRACE_S = 2.0
# A TCP handshake that takes longer is given up: two losses at 300 ms, or no such host.
PROBE_TIMEOUT_S = 3.0
# Addresses that worked, kept to redial at once: a swarm of some hundred peers, 16 addresses each.
_KNOWN_PEERS_MAX = 1024
# The path of a Unix socket is limited to 108 bytes on Linux, 104 elsewhere; our names take 13.
_RUNTIME_PATH_BYTES_MAX = 90


@dataclass(frozen=True, slots=True)
class SubstrateConfig:
    """How a peer takes part in the network.

    `runtime` is a private folder for Unix sockets (a short path); it is made with mode 0700 and
    leftovers of an earlier process are removed from it. `port` 0 means any free port, kept across
    restarts. With `quic` p2pd may connect a pair through it, and then the end of a killed peer is
    only noticed by its silence; over TCP the kernel tells at once.
    """

    identity: Path
    runtime: Path
    hosts: tuple[str, ...] = ANY_HOSTS
    port: int = 0
    announce: tuple[str, ...] = ()
    seeds: tuple[str, ...] = ()
    nat_port_map: bool = False
    outbound_only: bool = False
    relay: bool = False
    quic: bool = True
    address_book: bool = True
    clock_offset_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SeedReport:
    """What came of dialling one seed; `reason` is empty when it worked."""

    address: str
    ok: bool
    reason: str


class Substrate:
    """A `Transport` and an `AddressBook` over libp2p: one a process, several in tests."""

    _live = 0  # started substrates in this process: hivemind's stray tasks are swept with the last

    def __init__(self, config: SubstrateConfig, identity: Identity) -> None:
        self.config = config
        self.identity = identity
        self.port = config.port
        self.seed_reports: list[SeedReport] = []
        self._p2pd: P2pd | None = None
        self._streams = StreamTable()
        self._listener = StreamListener(config.runtime / "streams.sock", self._streams)
        self._book = book.DhtBook(identity, client_only=config.outbound_only)
        self._known: dict[PeerId, tuple[Address, ...]] = {}
        self._started = False

    @property
    def peer(self) -> PeerId:
        """Who we are."""
        return self.identity.peer

    @property
    def died(self) -> "asyncio.Future[str]":
        """Resolves with p2pd's last output if it ends by itself; then call `restart`."""
        assert self._p2pd is not None, "not started"
        assert self._p2pd.died is not None, "not started"
        return self._p2pd.died

    @property
    def p2pd_pid(self) -> int:
        """The process id of the libp2p daemon, 0 when it does not run."""
        return self._p2pd.pid if self._p2pd is not None else 0

    def set_clock_offset(self, seconds: float) -> None:
        """How far the swarm's clock is ahead of ours, as measured; holds for the whole process."""
        book.set_clock_offset(seconds)

    async def start(self) -> list[SeedReport]:
        """Starts everything and dials the seeds; dead seeds are reported, not an error.

        SubstrateError if the libp2p daemon cannot run, for example because the port is taken.
        """
        assert not self._started, "a substrate starts once"
        self._started = True
        Substrate._live += 1
        self.set_clock_offset(self.config.clock_offset_s)
        try:
            _prepare_folder(self.config.runtime)
            await self._listener.start()
            await self._start_daemon()
            self.seed_reports = await self.dial_seeds(self.config.seeds)
        except BaseException:
            await self.close()
            raise
        return self.seed_reports

    async def restart(self) -> list[SeedReport]:
        """Starts a new p2pd on the same key and port, after the old one died or fell silent.

        All streams end; handlers stay. Peers known before are asked to find us again.
        """
        assert self._started, "not started"
        nodes = self._book.nodes
        await self._book.close()
        self._streams.abort_all()
        if self._p2pd is not None:
            await self._p2pd.close()
        await self._start_daemon()
        for protocol in self._listener.handlers:
            await self._announce_handler(protocol)
        self.seed_reports = await self.dial_seeds(self.config.seeds)
        await self._redial(nodes)
        return self.seed_reports

    async def close(self) -> None:
        """Ends all streams, the DHT node and p2pd, and removes the sockets. Idempotent."""
        if not self._started:
            return
        self._started = False
        await self._book.close()
        await self._listener.close()
        self._streams.abort_all()
        if self._p2pd is not None:
            await self._p2pd.close()
        Substrate._live -= 1
        if Substrate._live == 0:
            await book.end_stray_tasks()

    # Transport

    async def dial(self, peer: PeerId, addresses: Sequence[str], timeout_s: float) -> None:
        """Connects to `peer`: TCP first, then QUIC, then relays. DialError with every reason."""
        if peer == self.peer:
            raise DialError(peer, [("", "that is our own peer id")])
        deadline = time.monotonic() + timeout_s
        if peer in await self._connected(timeout_s):
            return
        places, reasons = places_of(peer, addresses)
        for places_alike in by_preference(places):
            left = deadline - time.monotonic()
            if left <= 0:
                reasons += [
                    (str(place), "no answer in time (not tried: the time was up)")
                    for place in places_alike
                ]
                continue
            open_places, closed = await probe_all(places_alike, min(left, PROBE_TIMEOUT_S))
            reasons += closed
            if open_places and not (failed := await self._connect(peer, open_places, deadline)):
                self._remember(peer, places)
                return
            reasons += failed if open_places else []
        raise DialError(peer, reasons)

    async def open(self, peer: PeerId, protocol: str, timeout_s: float) -> Stream:
        """Opens a stream to a connected peer, or one whose address is known. DialError if not."""
        if len(self._streams) >= STREAMS_MAX:
            raise DialError(peer, [("", f"all {STREAMS_MAX} streams are in use")])
        deadline = time.monotonic() + timeout_s
        known = self._known.get(peer)
        if known and peer not in await self._connected(timeout_s):
            # Left to itself p2pd would wait for its slowest address, and then refuse to try again.
            left = max(deadline - time.monotonic(), 0.0)
            await self.dial(peer, [str(address) for address in known], left)
        left = max(deadline - time.monotonic(), 0.001)
        request = control.open_stream(peer, protocol, _whole_seconds(left))
        try:
            connection, response = await self._ask(request, left, keep=True)
        except control.ControlError as error:
            raise DialError(peer, dial_reasons(error.reason)) from error
        except TimeoutError as error:
            raise DialError(peer, [("", f"no answer within {timeout_s:.1f} s")]) from error
        except OSError as error:
            raise DialError(peer, [("", "the libp2p daemon is not running")]) from error
        if response.stream is None or response.stream.peer != peer:
            connection.close()
            raise DialError(peer, [("", "somebody else answered")])
        return self._streams.adopt(connection, peer)

    async def accept(self, protocol: str, handler: Handler) -> None:
        """From now on, across restarts too, serves incoming streams of `protocol`."""
        assert protocol not in self._listener.handlers, f"{protocol} is served already"
        self._listener.handlers[protocol] = handler
        await self._announce_handler(protocol)

    async def addresses(self) -> list[str]:
        """Where others can reach us: what is announced, else our interfaces, TCP first.

        SubstrateError while p2pd does not answer.
        """
        if self.config.outbound_only:
            return []
        try:
            _, response = await self._ask(control.identify(), LOCAL_TIMEOUT_S)
        except (control.ControlError, OSError, TimeoutError) as error:
            raise SubstrateError(f"p2pd does not say where it listens: {error}") from error
        found = response.identity.addresses if response.identity is not None else ()
        places = [place for address in found for place in on_interfaces(address)]
        outside = [place for place in places if not is_loopback(place)] or places
        outside.sort(key=lambda place: (place.is_quic, place.value("ip4") is None))
        unique = dict.fromkeys(str(place.without_peer()) for place in outside)
        return [f"{place}/p2p/{peer_text(self.peer)}" for place in unique]

    async def peers(self) -> set[PeerId]:
        """The peers that we have a connection to at this moment; empty if p2pd is not running."""
        return await self._connected(LOCAL_TIMEOUT_S)

    async def disconnect(self, peer: PeerId) -> None:
        """Ends the connection to `peer` with all its streams; nothing happens if there is none."""
        with contextlib.suppress(control.ControlError, OSError, TimeoutError):
            await self._ask(control.disconnect(peer), LOCAL_TIMEOUT_S)

    # AddressBook

    async def store(self, key: str, value: bytes, ttl_s: float) -> bool:
        """Stores `value` (≤ 2 KiB) under `key`, sealed as ours; False if nobody took it."""
        return self.config.address_book and await self._book.store(key, value, ttl_s)

    async def get(self, key: str) -> dict[PeerId, bytes]:
        """The values under `key` by the peer who signed each; empty if none is found in time."""
        return await self._book.get(key) if self.config.address_book else {}

    async def meet(self, peers: Sequence[PeerId]) -> int:
        """Makes connected peers known to our part of the address book; how many answered."""
        return await self._book.meet(peers, SEED_TIMEOUT_S) if self.config.address_book else 0

    # Inside

    async def _start_daemon(self) -> None:
        config = self.config
        if not config.outbound_only:
            self.port = free_port(config.hosts, self.port)
        try:
            binary = book.p2pd_path()
        except FileNotFoundError as error:
            raise SubstrateError(str(error)) from error
        hosts = tuple(host for host in config.hosts if can_bind(host))
        settings = P2pdSettings(
            binary=binary,
            identity=config.identity.absolute(),
            folder=config.runtime.absolute(),
            listen=() if config.outbound_only else self._places(hosts),
            announce=config.announce,
            nat_port_map=config.nat_port_map,
            relay=config.relay,
            client_only=config.outbound_only,
        )
        self._p2pd = P2pd(settings)
        await self._p2pd.start()
        if config.address_book:
            await self._start_book(f"/unix{settings.socket_path}")
        log.info("p2pd runs: pid=%s port=%s", self._p2pd.pid, self.port)

    def _places(self, hosts: tuple[str, ...]) -> tuple[str, ...]:
        """Where p2pd listens: TCP, and QUIC on the same port unless it is switched off."""
        both = listen_addresses(hosts, self.port, self.port)
        return both if self.config.quic else both[::2]

    async def _start_book(self, control_address: str) -> None:
        try:
            await self._book.start(control_address)
        except Exception as error:  # hivemind's own exceptions have no common base
            raise SubstrateError(f"the address book does not start: {error!r}") from error

    async def _announce_handler(self, protocol: str) -> None:
        listener = parse_address(f"/unix{self._listener.path.absolute()}")
        try:
            await self._ask(control.handle_streams(listener, protocol), LOCAL_TIMEOUT_S)
        except (control.ControlError, OSError, TimeoutError) as error:
            raise SubstrateError(f"p2pd does not take streams of {protocol}: {error}") from error

    async def dial_seeds(self, seeds: Sequence[str]) -> list[SeedReport]:
        """Dials these addresses at once, and asks whoever answers for the address book."""
        reports = await self._reports(seeds)
        live = [parse_address(report.address).peer for report in reports if report.ok]
        if live and self.config.address_book:
            await self._book.meet([peer for peer in live if peer], SEED_TIMEOUT_S)
        return list(reports)

    async def _reports(self, seeds: Sequence[str]) -> list[SeedReport]:
        """What came of dialling all seeds at once, in their order."""
        tasks = [asyncio.create_task(self._dial_seed(seed), name="dial a seed") for seed in seeds]
        pending, grace = set(tasks), False
        try:
            while pending and not grace:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                grace = any(task.result().ok for task in done)
            if pending:
                _, pending = await asyncio.wait(pending, timeout=SEED_GRACE_S)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [
            SeedReport(seed, False, "no answer while another seed answered")
            if task.cancelled()
            else task.result()
            for seed, task in zip(seeds, tasks, strict=True)
        ]

    async def _dial_seed(self, seed: str) -> SeedReport:
        try:
            peer = parse_address(seed).peer
        except ValueError as error:
            return SeedReport(seed, False, str(error))
        if peer is None:
            return SeedReport(seed, False, "the address does not end in the /p2p/ id of a peer")
        try:
            await self.dial(peer, [seed], SEED_TIMEOUT_S)
        except DialError as error:
            return SeedReport(seed, False, "; ".join(reason for _, reason in error.reasons))
        return SeedReport(seed, True, "")

    async def _redial(self, peers: Sequence[PeerId]) -> None:
        """After a restart: back to whom we knew, as far as their addresses are known."""

        async def again(peer: PeerId) -> PeerId | None:
            try:
                await self.dial(peer, [str(a) for a in self._known.get(peer, ())], PROBE_TIMEOUT_S)
            except DialError:
                return None
            return peer

        found = await asyncio.gather(*(again(peer) for peer in peers))
        if (back := [peer for peer in found if peer is not None]) and self.config.address_book:
            await self._book.meet(back, SEED_TIMEOUT_S)

    async def _connect(
        self, peer: PeerId, places: Sequence[Address], deadline: float
    ) -> list[tuple[str, str]]:
        """Lets p2pd connect; the reasons of failure, empty when connected."""
        left = max(deadline - time.monotonic(), 0.001)
        bare = [place.without_peer() for place in places]
        try:
            await self._ask(control.connect(peer, bare, _whole_seconds(left)), left)
        except control.ControlError as error:
            tried = {str(place) for place in bare}
            detailed = [pair for pair in dial_reasons(error.reason) if pair[0] in tried]
            return detailed or [(str(place), plain_reason(error.reason)) for place in bare]
        except TimeoutError:
            return [(str(place), "no answer in time") for place in bare]
        except OSError:
            return [("", "the libp2p daemon is not running")]
        return []

    async def _ask(
        self, message: bytes, timeout_s: float, *, keep: bool = False
    ) -> tuple[socket.socket, control.Response]:
        if self._p2pd is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "the libp2p daemon is not running")
        return await self._p2pd.request(message, timeout_s, keep=keep)

    async def _connected(self, timeout_s: float) -> set[PeerId]:
        try:
            wait_s = min(timeout_s, LOCAL_TIMEOUT_S)
            _, response = await self._ask(control.list_peers(), wait_s)
        except (control.ControlError, OSError, TimeoutError):
            return set()
        return {remote.peer for remote in response.peers if remote.peer is not None}

    def _remember(self, peer: PeerId, places: Sequence[Address]) -> None:
        self._known.pop(peer, None)
        self._known[peer] = tuple(places)
        if len(self._known) > _KNOWN_PEERS_MAX:
            del self._known[next(iter(self._known))]


def _prepare_folder(folder: Path) -> None:
    """Makes the private folder, or sweeps what an earlier process left in it."""
    if len(bytes(folder.absolute())) > _RUNTIME_PATH_BYTES_MAX:
        raise SubstrateError(f"the path of the runtime folder is too long for sockets: {folder}")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    for leftover in folder.glob("*.sock"):
        leftover.unlink(missing_ok=True)


def _whole_seconds(seconds: float) -> int:
    """p2pd counts its deadlines in whole seconds; ours is the exact one."""
    return max(1, int(seconds + 0.999))
