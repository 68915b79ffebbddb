"""Real rosters, several in one process, each over a p2pd of its own: one worker of `crowd.py`.

Commanded line by line (JSON) over its pipes. A side is what a daemon has of the network for its
roster: substrate, control streams, heartbeats, rumours; nothing is trained. The monotonic clock is
the machine's, so moments of different workers can be compared.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from dugnad.dht.addresses import parse_address
from dugnad.dht.advert import Advert
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.ports import Handler, Stream
from dugnad.dht.roster import MESH_MAX, Roster, RosterConfig
from dugnad.dht.roster_crowd import LINKS_MIN
from dugnad.dht.roster_events import Known, PeerLeft, PeerLost, PeerUp
from dugnad.dht.substrate import Substrate, SubstrateConfig
from dugnad.peer.rostershell import RosterAction, RosterShell

RUN: Final = RunId(b"a crowd of real rosters, 32 bytes"[:32])
SOFTWARE: Final = "crowd benchmark"
STARTS_AT_ONCE: Final = 2
"""Each start is a process: more at once only wait for each other."""
LINE_MAX: Final = 1 << 24


class _Counted:
    """A stream whose sent bytes are counted."""

    def __init__(self, stream: Stream, side: Side) -> None:
        self._stream = stream
        self._side = side
        self.peer = stream.peer
        self.read = stream.read
        self.read_into = stream.read_into
        self.close = stream.close
        self.abort = stream.abort

    async def write(self, data: bytes | memoryview) -> None:
        """Sends and counts."""
        self._side.sent += len(data)
        await self._stream.write(data)


class Side:
    """One peer's part: a `Transport` that counts, its roster, and when its view changed."""

    def __init__(self, folder: Path, seeds: Sequence[str], mesh_max: int) -> None:
        folder.mkdir(parents=True)
        self.identity = Identity.create(folder / "identity.key")
        self.substrate = Substrate(
            SubstrateConfig(
                identity=folder / "identity.key",
                runtime=folder / "run",
                hosts=("127.0.0.1",),
                seeds=tuple(seeds),
                quic=False,
                address_book=False,
            ),
            self.identity,
        )
        self.peer = self.identity.peer
        self.dial = self.substrate.dial
        self.addresses = self.substrate.addresses
        self.close = self.substrate.close
        self.sent = 0
        self.changes: list[tuple[float, str, str]] = []
        self.shell: RosterShell | None = None
        self._mesh_max = mesh_max

    async def start(self) -> None:
        """Dial the seeds and begin to take part."""
        reports = await self.substrate.start()
        boot = random.getrandbits(60) | 1
        advert = Advert(
            peer=self.peer,
            boot=boot,
            at_ms=_wall_ms(),
            software=SOFTWARE,
            reachable="direct",
            addresses=tuple(await self.addresses()),
        )
        links = min(LINKS_MIN, self._mesh_max // 2)
        config = RosterConfig(RUN, SOFTWARE, mesh_max=self._mesh_max, links=links)
        roster = Roster(config, self.identity, advert, random.Random(boot))
        self.shell = RosterShell(roster, self, self._heard, time.monotonic, _wall_ms)
        await self.shell.start()
        for one in reports:
            peer = parse_address(one.address).peer
            if peer is not None:
                self.shell.feed(Known(peer, (one.address,), "link"))

    def _heard(self, action: RosterAction) -> None:
        if isinstance(action, PeerUp | PeerLost | PeerLeft):
            why = action.reason if isinstance(action, PeerLost) else ""
            lost = "" if isinstance(action, PeerUp) else why or "left"
            self.changes.append((time.monotonic(), action.peer.hex(), lost))

    async def open(self, peer: PeerId, protocol: str, timeout_s: float) -> Stream:
        """A counted stream."""
        return _Counted(await self.substrate.open(peer, protocol, timeout_s), self)

    async def accept(self, protocol: str, handler: Handler) -> None:
        """Serves counted streams."""
        await self.substrate.accept(protocol, lambda stream: handler(_Counted(stream, self)))

    def told(self) -> dict[str, Any]:
        """Changes of the view since it was asked last, and what holds now."""
        assert self.shell is not None, "asked before the start"
        changes, self.changes = self.changes, []
        roster = self.shell.roster
        return {
            "peer": self.peer.hex(),
            "changes": changes,
            "links": len(roster.neighbours()),
            "crowded": roster.crowded,
            "sent": self.sent,
        }


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


async def _begin(side: Side, gate: asyncio.Semaphore) -> list[str]:
    async with gate:
        await side.start()
        return await side.addresses()


async def serve(folder: Path) -> None:
    """Obey until the pipe ends; then end all sides."""
    reader = asyncio.StreamReader(limit=LINE_MAX)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    sides: list[Side] = []
    gate = asyncio.Semaphore(STARTS_AT_ONCE)
    try:
        while line := await reader.readline():
            order = json.loads(line)
            answer: Any
            if order["do"] == "start":
                count = range(len(sides), len(sides) + order["count"])
                fresh = [Side(folder / str(n), order["seeds"], order["mesh_max"]) for n in count]
                sides += fresh
                answer = await asyncio.gather(*(_begin(side, gate) for side in fresh))
            else:
                answer = [side.told() for side in sides]
            print(json.dumps(answer), flush=True)
    finally:
        for side in sides:
            if side.shell is not None:
                await side.shell.close()
        await asyncio.gather(*(side.close() for side in sides))


DEFAULT_MESH: Final = MESH_MAX

if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
