"""What the tests of the roster share: one roster alone, and what it says."""

import random
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from dugnad.dht.advert import Advert
from dugnad.dht.ids import RunId
from dugnad.dht.messages import Hello, Refused
from dugnad.dht.records import encode
from dugnad.dht.roster import Roster, RosterConfig
from dugnad.dht.roster_events import (
    Action,
    MessageIn,
    PeerLost,
    Send,
    StreamUp,
)

from .roster_world import (  # noqa: TID252  the world is no installed package
    RUN,
    WALL_START_MS,
    FakeSigner,
    World,
    fake_verify,
    peer_id,
)

ME = 1000
SEEDS = range(6)
A = TypeVar("A")


def lone_roster(config: RosterConfig | None = None) -> Roster:
    advert = Advert(peer=peer_id(ME), boot=1, at_ms=WALL_START_MS)
    return Roster(
        config or RosterConfig(RUN, "test 1"),
        FakeSigner(peer_id(ME)),
        advert,
        random.Random(1),
        fake_verify,
    )


def hello_of(number: int, *, boot: int = 5, run: RunId = RUN, **changes: object) -> Hello:
    """The hello of a peer that is not simulated."""
    peer = peer_id(number)
    draft = Advert(peer=peer, boot=boot, at_ms=WALL_START_MS)
    other = Roster(
        RosterConfig(run, "test 1"),
        FakeSigner(peer),
        msgspec.structs.replace(draft, **changes),
        random.Random(1),
        fake_verify,
    )
    advert = other.my_advert
    data = encode(advert)
    return Hello(run, advert.protocol, "test 1", boot, advert.incarnation, data, WALL_START_MS)


def connect(roster: Roster, number: int, stream: int, now: float) -> list[Action]:
    peer = peer_id(number)
    roster.handle(StreamUp(peer, stream, outgoing=False), now)
    return roster.handle(MessageIn(peer, stream, hello_of(number)), now)


def only(kind: type[A], actions: Iterable[object]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def refusals(actions: list[Action]) -> list[Refused]:
    return only(Refused, (send.message for send in only(Send, actions)))


def losses(world: World, *, of: int | None = None) -> list[PeerLost]:
    """What living nodes declared lost."""
    found = [
        lost
        for node in world.nodes.values()
        if node.alive
        for lost in only(PeerLost, (action for _, action in node.log))
    ]
    return found if of is None else [lost for lost in found if lost.peer == peer_id(of)]


# --- coming together
