"""Where this peer can be reached: its link, and what to do when the machine moves to another
network."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dugnad.dht.addresses import parse_address
from dugnad.dht.link import format_link
from dugnad.dht.p2pd import SubstrateError
from dugnad.dht.reach import is_loopback, on_interfaces
from dugnad.peer.linkfile import write_link

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon

LOOK_S: Final = 5.0
"""Between two looks at our addresses; one question to p2pd, on a Unix socket."""
IN_LINK: Final = 3
"""Addresses in a link: more make it long and help nobody."""
IN_ADVERT: Final = 8
UNSPECIFIED: Final = ("/ip4/0.0.0.0", "/ip6/::")


class Whereabouts:
    """Tells others our addresses, again whenever they change."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._known: Sequence[str] = ()
        self._here = _outside_hosts()

    async def run(self) -> None:
        """Look for a change, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self._look()

    async def tell(self) -> None:
        """Print and publish the link by which others can join."""
        daemon = self._daemon
        self._known = await daemon.swarm.substrate.addresses()
        link = format_link(daemon.run_id, self._known[:IN_LINK])
        daemon.report.link = link
        print(link, flush=True)
        if daemon.settings.link_file:
            write_link(Path(daemon.settings.link_file), link)
        if daemon.page is not None:
            daemon.page.linked(link)

    async def _look(self) -> None:
        daemon = self._daemon
        here = _outside_hosts()
        if not here:
            return  # no network at this moment: streams end by their silence
        if gone := {host for host in map(_host, self._known) if host} & (self._here - here):
            # Connections from an address that is no longer ours are dead, and libp2p would go on
            # using (and telling) them until its keep-alive has failed, for most of a minute.
            daemon.note("network", f"this machine is no longer at {', '.join(sorted(gone))}")
            await daemon.swarm.restart(daemon.note)
        self._here = here
        try:
            now = await daemon.swarm.substrate.addresses()
        except SubstrateError:
            return  # p2pd is being restarted
        if set(now) == set(self._known):
            return
        await self.tell()
        daemon.note("network", f"this peer's addresses are now {', '.join(now[:IN_LINK])}")
        daemon.swarm.advertise(addresses=tuple(now[:IN_ADVERT]))
        daemon.reachability.moved()
        await daemon.neighbours.reopen()


def _host(address: str) -> str | None:
    return parse_address(address).value("ip4", "ip6")


def _outside_hosts() -> frozenset[str]:
    """This machine's addresses on networks, by the operating system's word."""
    every = [place for host in UNSPECIFIED for place in on_interfaces(parse_address(host))]
    found = [place.value("ip4", "ip6") for place in every if not is_loopback(place)]
    return frozenset(host for host in found if host)
