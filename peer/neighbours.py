"""What a daemon does with the local network: listens from its start, asks when a link leads
nowhere, tells once it can be reached."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from dugnad.dht.addresses import parse_address
from dugnad.dht.reach import is_loopback, on_interfaces
from dugnad.peer.lan import Lan, LanError

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon

FIND_S: Final = 4.0
"""A neighbour answers within a second or two; a stale link is not waited for longer."""
GATHER_S: Final = 0.5
"""After the first neighbour, the others have this long."""


class Neighbours:
    """The daemon's ear and voice on the local network; silent where its owner or the place wants
    it."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._lan: Lan | None = None

    async def open(self) -> None:
        """Begin to listen, unless switched off or bound to this machine alone."""
        daemon, host = self._daemon, self._daemon.settings.listen.host
        if not daemon.settings.lan or host.startswith("127.") or host == "::1":
            return
        spoken = on_interfaces(parse_address(f"/ip4/{host}")) if ":" not in host else []
        hosts = [place.value("ip4") or "" for place in spoken if not is_loopback(place)]
        lan = Lan(daemon.run_id, daemon.identity.peer, self._heard, hosts)
        try:
            await lan.start()
        except LanError as error:
            daemon.note("lan", f"the local network cannot be asked: {error}")
            return
        self._lan = lan

    async def meet(self) -> None:
        """No peer of the link answered: dial those of the run that are near."""
        if self._lan is None or not await self._lan.some(FIND_S):
            return
        await asyncio.sleep(GATHER_S)
        found = list(self._lan.found)
        self._daemon.note("lan", f"{len(found)} addresses of this run on the local network")
        await self._daemon.swarm.meet(found)

    async def announce(self) -> None:
        """Others can come now; and what was heard before there was a roster is told to it."""
        daemon = self._daemon
        if self._lan is None:
            return
        for address in self._lan.found:
            daemon.swarm.know(address, "lan")
        if daemon.settings.outbound_only:
            return
        try:
            await self._lan.announce(await daemon.swarm.substrate.addresses())
        except LanError as error:
            daemon.note("lan", f"not announced on the local network: {error}")

    async def reopen(self) -> None:
        """The machine has other addresses: listen and speak there."""
        await self.close()
        self._lan = None
        await self.open()
        await self.announce()

    async def close(self) -> None:
        """Say good-bye. Idempotent."""
        if self._lan is not None:
            await self._lan.close()

    def _heard(self, address: str) -> None:
        self._daemon.swarm.know(address, "lan")
