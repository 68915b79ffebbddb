"""Everything between this daemon and the others: substrate, roster, messages and transfers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from dugnad.averaging import formats as fm
from dugnad.averaging.tree import Vector
from dugnad.averaging.worker import Commit, Kept
from dugnad.dht.addresses import parse_address
from dugnad.dht.advert import Advert
from dugnad.dht.direct import DirectTransport
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.p2pd import SubstrateError
from dugnad.dht.records import verify_ed25519
from dugnad.dht.roster import MESH_MAX, Roster, RosterConfig
from dugnad.dht.roster_crowd import LINKS_MIN
from dugnad.dht.roster_events import Known, MyAdvert
from dugnad.dht.substrate import SeedReport, Substrate, SubstrateConfig
from dugnad.peer import clock
from dugnad.peer.anchorpull import AnchorPull
from dugnad.peer.fartransport import FarTransport
from dugnad.peer.flow import Rates
from dugnad.peer.links import Links
from dugnad.peer.messenger import Messenger
from dugnad.peer.pacedstream import stream_time
from dugnad.peer.pull import Puller
from dugnad.peer.pushing import push
from dugnad.peer.rostershell import RosterAction, RosterShell
from dugnad.peer.transferwire import (
    BUDDY_PROTOCOL,
    CONTRIBUTE_PROTOCOL,
    PULL_PROTOCOL,
    Traffic,
)
from dugnad.peer.uplink import Uplink

PUSH_TIMEOUT_S = 3600.0
"""A bound on everything; the averager knows how long a contribution is of use."""


@dataclass(frozen=True, slots=True)
class SwarmHooks:
    """Whom the network side tells. None of them may block."""

    on_roster: Callable[[RosterAction], None]
    on_message: Callable[[PeerId, fm.Message], None]
    on_refused: Callable[[PeerId, str], None]


class Swarm:
    """The network side of one daemon. In order: open, (fetch the manifest,) start, leave, close."""

    def __init__(self, config: SubstrateConfig, identity: Identity, hooks: SwarmHooks) -> None:
        self.substrate = Substrate(config, identity)
        self.far = FarTransport(self.substrate, self._far_places)
        self.bulk = DirectTransport(
            self.far,
            identity,
            config.runtime,
            protocols=(CONTRIBUTE_PROTOCOL, BUDDY_PROTOCOL, PULL_PROTOCOL),
            hosts=config.hosts,
            listen=not config.outbound_only,
        )
        self.identity = identity
        self.hooks = hooks
        self.traffic = Traffic(uplink=Uplink())
        self.reports: list[SeedReport] = []
        self._restarting = False
        self.links: Links | None = None
        self.roster: Roster | None = None
        self.shell: RosterShell | None = None
        self.messenger: Messenger | None = None
        self.puller: Puller | None = None
        self.anchor_pull = AnchorPull()

    async def open(self, run: RunId | None) -> list[SeedReport]:
        """Start libp2p and dial the seeds."""
        self.reports = await self.substrate.start()
        await self.bulk.start()
        meter = Rates(stream_time, lambda peer: self.roster.rtt(peer) if self.roster else None)
        self.puller = Puller(self.bulk, run, traffic=self.traffic, meter=meter)
        return self.reports

    async def restart(self, note: Callable[[str, str], None]) -> None:
        """Start a new p2pd on the same key and port; when that fails it is tried again later."""
        if self._restarting:
            return
        self._restarting = True
        try:
            await self.substrate.restart()
        except SubstrateError as error:
            note("network", f"the libp2p daemon does not come back yet: {error}")
        finally:
            self._restarting = False

    async def meet(self, addresses: Sequence[str]) -> None:
        """Dial more seeds: those that answer count as the link's own."""
        self.reports += await self.substrate.dial_seeds(addresses)

    def seeds(self) -> list[PeerId]:
        """Peers of the seeds that answered."""
        found = [parse_address(one.address).peer for one in self.reports if one.ok]
        return list(dict.fromkeys(peer for peer in found if peer is not None))

    async def start(
        self,
        run: RunId,
        advert: Advert,
        admitted: frozenset[PeerId] | None,
        mesh_max: int = MESH_MAX,
    ) -> None:
        """Begin to take part: roster and messages."""
        config = RosterConfig(
            run=run,
            software=advert.software,
            admitted=admitted,
            mesh_max=mesh_max,
            links=min(LINKS_MIN, mesh_max // 2),
        )
        self.roster = Roster(config, self.identity, advert, random.Random(advert.boot))
        self.shell = RosterShell(
            self.roster, self.substrate, self.hooks.on_roster, clock.now, clock.wall_ms
        )
        self.messenger = Messenger(
            self.far,
            run,
            verify_ed25519,
            self.hooks.on_message,
            self.hooks.on_refused,
            brief=self.is_far,
        )
        await self.messenger.start()
        await self.shell.start()
        for report in self.reports:
            self.know(report.address, "link")

    def know(self, address: str, source: str) -> None:
        """Tell the roster of an address somebody named."""
        try:
            peer = parse_address(address).peer
        except ValueError:
            return  # a remembered file or a foreign advert with something else in it
        if peer is not None and self.shell is not None:
            self.shell.feed(Known(peer, (address,), source))

    def is_far(self, peer: PeerId) -> bool:
        """Whether this is a crowd and the peer no neighbour in it."""
        roster = self.roster
        return roster is not None and roster.crowded and peer not in roster.neighbours()

    def _far_places(self, peer: PeerId) -> tuple[str, ...]:
        """Where a member of a crowd that is no neighbour is dialled; nowhere in a mesh."""
        return self.roster.addresses(peer) if self.roster is not None and self.is_far(peer) else ()

    def advertise(self, **changes: object) -> None:
        """Change what we say about ourselves."""
        if self.shell is not None and self.roster is not None:
            advert = msgspec.structs.replace(self.roster.my_advert, **changes)
            self.shell.feed(MyAdvert(advert))

    async def leave(self) -> None:
        """Say good-bye."""
        if self.shell is not None:
            await self.shell.leave()

    async def close(self) -> None:
        """End everything; nothing of it is left behind."""
        if self.shell is not None:
            await self.shell.close()
        if self.messenger is not None:
            await self.messenger.close()
        await self.bulk.close()

    # -- what the averager asks ----------------------------------------------------------------

    def send(self, peer: PeerId, message: fm.Message) -> None:
        """Queue a control message."""
        if isinstance(message, fm.Heads) and message.reply and self.is_far(peer):
            return  # in a crowd heads are compared with neighbours
        if self.messenger is not None:
            self.messenger.send(peer, message)

    def waiting(self, peer: PeerId) -> bool:
        """Whether a control message to a live peer is not yet written to its stream."""
        return self.messenger is not None and self.messenger.waiting(peer)

    async def push(
        self,
        peer: PeerId,
        contribution: fm.Contribution,
        pieces: tuple[fm.UnitPiece, ...],
        payload: bytes,
    ) -> str:
        """Send a contribution; the refusal or ''. Raises TransportError."""
        meter = self.links.meter(contribution.fragment) if self.links is not None else None
        refusal = await push(
            self.bulk,
            peer,
            contribution,
            pieces,
            payload,
            PUSH_TIMEOUT_S,
            traffic=self.traffic,
            meter=meter,
        )
        if self.links is not None and not refusal:
            self.links.taken(peer, contribution.fragment, contribution.codec, len(payload))
        return refusal

    async def lend(self, peer: PeerId, draft: Kept, timeout_s: float) -> str:
        """Bring a draft to a neighbour; the refusal or ''. Raises TransportError."""
        made, pieces = draft.contribution, draft.pieces
        return await push(
            self.bulk,
            peer,
            made,
            pieces,
            draft.payload,
            timeout_s,
            traffic=self.traffic,
            protocol=BUDDY_PROTOCOL,
        )

    async def payload(self, peers: Sequence[PeerId], header: fm.Header, size: int) -> Commit:
        """A commit's payload. Raises PullError."""
        assert self.puller is not None, "not open"
        began, before = clock.now(), self.traffic.received
        payload = await self.puller.payload(peers, header, size)
        if self.links is not None:
            self.links.fetched(self.traffic.received - before, clock.now() - began)
        return payload

    async def anchors(
        self, peers: Sequence[PeerId], header: fm.Header, size: int
    ) -> tuple[Vector, Vector]:
        """A commit's parameters and momentum. Raises PullError."""
        assert self.puller is not None, "not open"
        return await self.anchor_pull.anchors(self.puller, peers, header, size)
