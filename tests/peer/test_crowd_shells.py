"""The network sides of nine daemons with a mesh of four: shells, messages, dials on demand, over
the in-memory transport in virtual time.
"""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from dugnad.averaging import formats as fm
from dugnad.dht.advert import Advert
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.memory import MemoryNetwork, MemoryTransport
from dugnad.dht.records import verify_ed25519
from dugnad.dht.roster import Roster, RosterConfig
from dugnad.dht.roster_events import Known, MyAdvert, PeerLeft, PeerLost, PeerUp
from dugnad.peer.crowdrelay import CrowdRelay
from dugnad.peer.daemon import Daemon
from dugnad.peer.fartransport import FarTransport
from dugnad.peer.messenger import IDLE_S, Messenger
from dugnad.peer.rostershell import RosterAction, RosterShell

from .virtual_time import (  # noqa: TID252  a helper of these tests
    pass_time,
    run_virtual,
    until,
)

RUN = RunId(hashlib.sha256(b"crowd shells").digest())
VIEW_S = 30.0


@dataclass
class Member:
    """One daemon without its exchange: what it was told, and what it did with that."""

    identity: Identity
    transport: MemoryTransport
    heard: list[tuple[PeerId, fm.Message]] = field(default_factory=list)
    lost: list[PeerId] = field(default_factory=list)
    dialled: list[PeerId] = field(default_factory=list)

    def __post_init__(self) -> None:
        clock = asyncio.get_running_loop().time
        config = RosterConfig(RUN, "test 1", mesh_max=4, links=2)
        rng = random.Random(self.peer[0])
        self.roster = Roster(config, self.identity, self.advert(()), rng)
        self.shell = RosterShell(self.roster, self.transport, self._said, clock, self.wall_ms)
        far = FarTransport(self.transport, self._places)
        self.messenger = Messenger(
            far, RUN, verify_ed25519, self._message, self._refused, clock=clock, brief=self.is_far
        )
        daemon: Any = SimpleNamespace(  # Any: stands in for a daemon
            run_id=RUN,
            identity=self.identity,
            averager=SimpleNamespace(live=self.roster.live, fragments=[]),
            swarm=SimpleNamespace(roster=self.roster, send=self.messenger.send),
        )
        self.relay = CrowdRelay(cast(Daemon, daemon))

    @property
    def peer(self) -> PeerId:
        return self.identity.peer

    def wall_ms(self) -> int:
        return 1_800_000_000_000 + round(asyncio.get_running_loop().time() * 1000)

    def advert(self, addresses: tuple[str, ...]) -> Advert:
        return Advert(peer=self.peer, boot=7, at_ms=self.wall_ms(), addresses=addresses)

    def is_far(self, peer: PeerId) -> bool:
        return self.roster.crowded and peer not in self.roster.neighbours()

    def far(self) -> list[PeerId]:
        return [peer for peer in self.roster.live() if self.is_far(peer)]

    async def start(self, seed: "Member | None") -> None:
        addresses = tuple(await self.transport.addresses())
        await self.messenger.start()
        await self.shell.start()
        self.shell.feed(MyAdvert(self.advert(addresses)))
        if seed is not None:
            self.shell.feed(Known(seed.peer, tuple(await seed.transport.addresses()), "a link"))

    async def close(self) -> None:
        await self.shell.close()
        await self.messenger.close()
        await self.transport.close()

    def _places(self, peer: PeerId) -> tuple[str, ...]:
        if not self.is_far(peer):
            return ()
        self.dialled.append(peer)
        return self.roster.addresses(peer)

    def _said(self, action: RosterAction) -> None:
        match action:
            case PeerUp(peer):
                self.messenger.peer_up(peer)
            case PeerLost(peer) | PeerLeft(peer):
                self.messenger.peer_down(peer)
                self.lost.append(peer)
            case _:
                pass

    def _message(self, sender: PeerId, message: fm.Message) -> None:
        self.relay.hear(sender, message, self._take)

    def _take(self, sender: PeerId, message: fm.Message) -> bool:
        self.heard.append((sender, message))
        return not isinstance(message, fm.PeerClaims) or not self.relay.claims(message)

    def _refused(self, peer: PeerId, reason: str) -> None:
        raise AssertionError(f"a message was refused: {reason}")


def agreed(members: list[Member]) -> bool:
    everybody = {member.peer for member in members}
    return all(set(one.roster.live()) == everybody - {one.peer} for one in members)


@asynccontextmanager
async def crowd(size: int) -> AsyncIterator[tuple[MemoryNetwork, list[Member]]]:
    network = MemoryNetwork(asyncio.get_running_loop().time)
    identities = [Identity.ephemeral(bytes([number]) * 32) for number in range(1, size + 1)]
    members = [Member(one, network.join(one.peer)) for one in identities]
    try:
        for number, member in enumerate(members):
            await member.start(members[0] if number else None)
            await pass_time(0.3)
        await until(lambda: agreed(members), VIEW_S)
        await pass_time(15.0)
        yield network, members
    finally:
        for member in members:
            await member.close()


def test_what_one_says_reaches_all_once_though_it_speaks_with_few() -> None:
    async def scenario() -> None:
        async with crowd(9) as (_, members):
            teller = next(one for one in members if one.far())
            message = fm.Told(b"a statement")
            teller.relay.say(message)
            await until(lambda: all(m.heard for m in members if m is not teller), 5.0)
            await pass_time(5.0)
            for member in members:
                assert [m for _, m in member.heard] == [message] * (member is not teller)
                sent = member.messenger.counts.sent
                assert sent <= len(member.roster.neighbours()) + 1, "once on each link"

    run_virtual(scenario())


def test_claims_reach_all_in_their_makers_name() -> None:
    async def scenario() -> None:
        async with crowd(7) as (_, members):
            maker = members[3]
            maker.relay.say(fm.Claims(((0, 4), (0, 5))))
            others = [member for member in members if member is not maker]
            await until(lambda: all(member.heard for member in others), 5.0)
            for member in others:
                _, message = member.heard[0]
                assert isinstance(message, fm.PeerClaims)
                assert (message.peer, message.units) == (maker.peer, ((0, 4), (0, 5)))

    run_virtual(scenario())


def test_an_answer_for_somebody_far_is_brought_by_a_dial_and_its_stream_ends_when_idle() -> None:
    async def scenario() -> None:
        async with crowd(8) as (_, members):
            one = next(member for member in members if member.far())
            peer = one.far()[0]
            other = next(member for member in members if member.peer == peer)
            heads = fm.Heads(())
            one.messenger.send(peer, heads)
            await until(lambda: (one.peer, heads) in other.heard, 5.0)
            assert peer in one.dialled
            await pass_time(1.1 * IDLE_S)
            again = len(other.heard)
            one.messenger.send(peer, heads)
            await until(lambda: len(other.heard) > again, 5.0)

    run_virtual(scenario())


def test_a_killed_member_and_a_newcomer_are_known_to_all() -> None:
    async def scenario() -> None:
        async with crowd(9) as (network, members):
            victim = members.pop(0)
            await victim.shell.close()
            await victim.messenger.close()
            network.kill(victim.peer)
            await until(lambda: agreed(members), VIEW_S)
            assert all(one.lost == [victim.peer] for one in members)
            late = Identity.ephemeral(b"l" * 32)
            members.append(Member(late, network.join(late.peer)))
            await members[-1].start(members[4])
            await until(lambda: agreed(members), VIEW_S)
            members[-1].relay.say(fm.Told(b"here I am"))
            await until(lambda: all(one.heard for one in members[:-1]), 5.0)

    run_virtual(scenario())
