"""Peers of the same run on the local network, found by multicast DNS (zeroconf).

For a link whose peers have all gone: a neighbour that trains the same run is found without anybody
outside. What is heard is a hint and nothing more; whoever is dialled proves its key, and the roster
asks for the run. Only what a link says anyway is told: run, key, address and port.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from dugnad.dht.addresses import Address, parse_address
from dugnad.dht.ids import PeerId, RunId, parse_peer, parse_run, peer_text, run_text

if TYPE_CHECKING:
    from zeroconf import ServiceStateChange, Zeroconf

SERVICE: Final = "_dugnad._tcp.local."
VERSION: Final = "1"
FOUND_MAX: Final = 64
"""Peers heard of and remembered: as many as a swarm has."""
ASKED_MAX: Final = 16
"""Questions about a name under way at once; a network that shouts more names is not asked more."""
ASK_MS: Final = 3000
ADDRESSES_MAX: Final = 4
"""Of one machine: a name with more of them would have us knock on many doors."""
BYE_S: Final = 2.0


class LanError(Exception):
    """The local network cannot be asked here; the text says why."""


class Lan:
    """One run's announcements. In order: start, announce, close; `heard` is told each address."""

    def __init__(
        self,
        run: RunId,
        peer: PeerId,
        heard: Callable[[str], None],
        interfaces: Sequence[str],
    ) -> None:
        """`interfaces` are the addresses of this machine to speak on, at least one."""
        self.run, self.peer = run, peer
        self.found: dict[str, None] = {}
        """Multiaddresses of other peers of this run, the first heard first."""
        self._heard = heard
        self._interfaces = list(interfaces)
        self._asked: set[asyncio.Task[None]] = set()
        self._some = asyncio.Event()
        self._ending = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Begin to listen. LanError where multicast is not to be had."""
        from zeroconf import IPVersion
        from zeroconf.asyncio import AsyncServiceBrowser, AsyncZeroconf

        if not self._interfaces:
            raise LanError("this machine has no address of IPv4 on a network")
        try:  # named, since the default interface is the one with a route to everywhere
            self._zeroconf = AsyncZeroconf(interfaces=self._interfaces, ip_version=IPVersion.V4Only)
        except OSError as error:
            raise LanError(f"{error.strerror or error}") from error
        self._ending.push_async_callback(self._zeroconf.async_close)
        browser = AsyncServiceBrowser(self._zeroconf.zeroconf, SERVICE, handlers=[self._on_change])
        self._ending.push_async_callback(browser.async_cancel)

    async def announce(self, addresses: Sequence[str]) -> None:
        """Tell the local network where this peer listens; LanError when it cannot be told."""
        from zeroconf import Error
        from zeroconf.asyncio import AsyncServiceInfo

        places = [parse_address(text) for text in addresses]
        ports = {place.value("tcp") for place in places if tellable(place)} - {None}
        hosts = {place.value("ip4") for place in places if tellable(place)}
        if not ports:
            return
        name = f"{peer_text(self.peer)[-16:]}-{run_text(self.run)[:8]}"
        info = AsyncServiceInfo(
            SERVICE,
            f"{name}.{SERVICE}",
            addresses=[socket.inet_aton(host) for host in sorted(filter(None, hosts))][
                :ADDRESSES_MAX
            ],
            port=int(min(port for port in ports if port)),
            properties={
                "v": VERSION,
                "run": run_text(self.run),
                "peer": peer_text(self.peer),
            },
            server=f"{name}.local.",
        )
        try:
            await self._zeroconf.async_register_service(info, allow_name_change=True)
        except (Error, OSError) as error:
            raise LanError(f"{error}") from error

    async def some(self, seconds: float) -> Sequence[str]:
        """Addresses of peers of this run; waits for the first at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._some.wait()
        return list(self.found)

    async def close(self) -> None:
        """Say good-bye on the local network and end. Idempotent."""
        for task in list(self._asked):
            task.cancel()
        await asyncio.gather(*self._asked, return_exceptions=True)
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(BYE_S):
                await self._ending.aclose()

    # -- what is heard -------------------------------------------------------------------------

    def _on_change(
        self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        """A name came, changed or went; called in the event loop."""
        if state_change.name == "Removed" or len(self._asked) >= ASKED_MAX:
            return
        task = asyncio.get_running_loop().create_task(self._ask(zeroconf, name))
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)

    async def _ask(self, zeroconf: Zeroconf, name: str) -> None:
        from zeroconf import BadTypeInNameException
        from zeroconf.asyncio import AsyncServiceInfo

        try:
            info = AsyncServiceInfo(SERVICE, name)
            if not await info.async_request(zeroconf, ASK_MS) or info.port is None:
                return
        except (BadTypeInNameException, OSError):
            return
        hosts = [one for one in info.parsed_addresses() if ":" not in one]
        for address in addresses_of(self.run, self.peer, info.properties, hosts, info.port):
            if address not in self.found and len(self.found) < FOUND_MAX:
                self.found[address] = None
                self._heard(address)
                self._some.set()


def tellable(place: Address) -> bool:
    """Whether a neighbour could use the address: TCP over IPv4, not a relay's."""
    names = [name for name, _ in place.parts]
    return "ip4" in names and "tcp" in names and "p2p-circuit" not in names


def addresses_of(
    run: RunId,
    me: PeerId,
    properties: Mapping[bytes, bytes | None],
    hosts: Sequence[str],
    port: int,
) -> list[str]:
    """The multiaddresses that an announcement names, when it is of another peer of this run; it is
    a stranger's word and may say anything."""
    try:
        said = {
            key: (properties.get(key) or b"").decode("ascii") for key in (b"v", b"run", b"peer")
        }
        if said[b"v"] != VERSION or parse_run(said[b"run"]) != run:
            return []
        peer = parse_peer(said[b"peer"])
    except ValueError:
        return []
    if peer == me or not 0 < port < 65536:
        return []
    found = []
    for host in hosts[:ADDRESSES_MAX]:
        with contextlib.suppress(ValueError):
            text = f"/ip4/{host}/tcp/{port}/p2p/{peer_text(peer)}"
            parse_address(text)
            found.append(text)
    return found
