"""Whether others can reach this peer, as they see it: each knocks on the other's door when asked.

Stream `/dugnad/reach/1`: an empty frame, answered by one `Knocks`. Only addresses that the asker's
own signed advert lists are tried, so nobody can have us knock at a third party's door more often
than the roster would; and a knock is no more than a TCP connection, opened and closed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from dugnad.dht.frames import read_frame, write_frame
from dugnad.dht.ids import PeerId, short
from dugnad.dht.ports import Stream, Transport, TransportError
from dugnad.dht.reach import places_of, probe_all
from dugnad.dht.records import RecordError, decode, encode
from dugnad.peer import clock

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon

REACH_PROTOCOL: Final = "/dugnad/reach/1"
KNOCK_S: Final = 3.0
ASK_S: Final = 10.0
AGAIN_S: Final = 600.0
"""Routers forget, people forward ports: asked again this often."""
SOON_S: Final = 60.0
"""While nobody could say, or nobody could reach us."""
FIRST_S: Final = 5.0
ASKED: Final = 3
"""Peers asked at a time: one may sit behind the same router, another behind a wall."""
SERVE_S: Final = 20.0
"""One peer's doors are tried at most this often."""
SERVED_MAX: Final = 64
KNOCKS_MAX: Final = 16
KNOCKS_BYTES_MAX: Final = 8192
Reachable = Literal["direct", "outbound", "unknown"]


class Knocks(msgspec.Struct, frozen=True, array_like=True):
    """Addresses that were tried, each with why nothing answered ('' when something did)."""

    rows: Annotated[
        tuple[
            tuple[
                Annotated[str, msgspec.Meta(max_length=256)],
                Annotated[str, msgspec.Meta(max_length=120)],
            ],
            ...,
        ],
        msgspec.Meta(max_length=KNOCKS_MAX),
    ] = ()


@dataclass(frozen=True, slots=True)
class Reach:
    """What the asked peers found. `text` says it in a line for the person who runs this."""

    reachable: Reachable
    text: str


def judged(answers: Mapping[PeerId, Knocks]) -> Reach:
    """What several peers' knocks come to. One who gets through is proof; those who tried nothing
    (no address known to them yet, or too busy) do not count."""
    tried = {peer: found.rows for peer, found in answers.items() if found.rows}
    if not tried:
        return Reach("unknown", "no peer has tried to reach it yet")
    reached = [peer for peer, rows in tried.items() if any(not why for _, why in rows)]
    failed = [(peer, rows[0]) for peer, rows in tried.items() if peer not in reached]
    text = f"{len(reached)} of {len(tried)} peers that tried reached it"
    if failed:
        peer, (address, why) = failed[0]
        text += f"; {short(peer)} tried {address}: {why}"
    return Reach("direct" if reached else "outbound", text)


class Doorman:
    """Serves others: tries the addresses of whoever asks."""

    def __init__(self) -> None:
        self._served: dict[PeerId, float] = {}

    def due(self, peer: PeerId, now: float) -> bool:
        """Whether this peer's turn has come again."""
        if now - self._served.get(peer, -SERVE_S) < SERVE_S:
            return False
        self._served.pop(peer, None)
        self._served[peer] = now
        while len(self._served) > SERVED_MAX:
            del self._served[next(iter(self._served))]
        return True


class Reachability:
    """Asks others, answers others, and tells the swarm. Belongs to the daemon's event loop."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._doorman = Doorman()
        self._rng = random.Random(daemon.boot)
        self._moved = asyncio.Event()
        outbound = daemon.settings.outbound_only
        self.found = (
            Reach("outbound", "outbound only, as set")
            if outbound
            else Reach("unknown", "no peer has tried to reach it yet")
        )

    async def serve(self, transport: Transport) -> None:
        """From now on answer whoever asks."""
        await transport.accept(REACH_PROTOCOL, self._answer)

    def moved(self) -> None:
        """Our addresses have changed: what was found before says nothing any more."""
        self._moved.set()

    async def run(self) -> None:
        """Ask now and then, until cancelled. A peer that takes no connections asks nobody."""
        if self._daemon.settings.outbound_only:
            return
        pause = FIRST_S
        while True:
            await self._rest(pause)
            if peers := self._daemon.relay.near(self._daemon.averager.live()):
                self._tell(judged(await self._ask(peers)))
            pause = AGAIN_S if self.found.reachable == "direct" else SOON_S

    async def _rest(self, seconds: float) -> None:
        """Until it is time, or shortly after our addresses have changed."""
        try:
            async with asyncio.timeout(seconds):
                await self._moved.wait()
        except TimeoutError:
            return
        self._moved.clear()
        await asyncio.sleep(FIRST_S)  # others are to hear of the new addresses first

    def _tell(self, found: Reach) -> None:
        daemon = self._daemon
        if found.reachable != self.found.reachable:
            daemon.note("network", f"others reach this peer: {found.reachable}; {found.text}")
            daemon.swarm.advertise(reachable=found.reachable)
        self.found = found

    async def _ask(self, peers: Sequence[PeerId]) -> dict[PeerId, Knocks]:
        chosen = self._rng.sample(peers, min(ASKED, len(peers)))
        answers = await asyncio.gather(*(self._ask_one(peer) for peer in chosen))
        return dict(zip(chosen, answers, strict=True))

    async def _ask_one(self, peer: PeerId) -> Knocks:
        """What one peer found; nothing when it does not answer, or speaks an older release."""
        try:
            async with asyncio.timeout(ASK_S):
                stream = await self._daemon.swarm.substrate.open(peer, REACH_PROTOCOL, ASK_S)
                try:
                    await write_frame(stream, b"")
                    answer = await read_frame(stream, KNOCKS_BYTES_MAX)
                finally:
                    await stream.close()
            return decode(answer, Knocks, KNOCKS_BYTES_MAX)
        except (TransportError, TimeoutError, RecordError):
            return Knocks()

    async def _answer(self, stream: Stream) -> None:
        await read_frame(stream, 0)
        roster = self._daemon.swarm.roster
        advert = roster.advert(stream.peer) if roster is not None else None
        rows: list[tuple[str, str]] = []
        if advert is not None and self._doorman.due(stream.peer, clock.now()):
            places, rows = places_of(stream.peer, advert.addresses)
            knocked = [place for place in places if place.value("tcp") is not None]
            answering, silent = await probe_all(knocked, KNOCK_S)
            rows = [*((str(place), "") for place in answering), *silent, *rows]
        short_rows = tuple((address[:256], why[:120]) for address, why in rows[:KNOCKS_MAX])
        await write_frame(stream, encode(Knocks(short_rows)))
