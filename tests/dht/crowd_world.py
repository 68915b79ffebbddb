"""What the tests of the crowd share: a world whose meshes hold four."""

from dugnad.dht.messages import Message, Ping, Pong
from dugnad.dht.roster import RosterConfig
from dugnad.dht.roster_events import PeerLost
from dugnad.simulation.rosters import Daemon

from .roster_world import (  # noqa: TID252  the world is no installed package
    RUN,
    Node,
    World,
)

MESH = 4
SMALL = RosterConfig(RUN, "world 1", mesh_max=MESH, links=2)


def crowd(seed: int, size: int, *, spread_s: float = 5.0, outbound: int = 0) -> World:
    """`size` peers that know the first; the last `outbound` of them take no connections."""
    world = World(seed)
    for name in range(size):
        shy = name >= size - outbound
        reachable = "outbound" if shy else "direct"
        world.add(name, config=SMALL, dialable=not shy, reachable=reachable)  # type: ignore[arg-type]
        if name:
            world.introduce(name, 0)
        world.run(spread_s / size)
    settle(world, 30.0)
    return world


def settle(world: World, limit_s: float) -> None:
    """Runs until all views are the truth."""
    until = world.now + limit_s
    while not world.agreed():
        assert world.now < until, "views differ still"
        world.run(0.5)


def living(world: World) -> list[Node]:
    return [node for node in world.nodes.values() if node.alive]


def lost(world: World, name: int) -> list[PeerLost]:
    """What living nodes said of this one."""
    peer = world.nodes[name].peer
    said = (one for node in living(world) for _, one in node.said(PeerLost))
    return [one for one in said if isinstance(one, PeerLost) and one.peer == peer]


def inject(world: World, name: int, message: Message) -> None:
    """A node says something on all its streams that no honest roster would."""
    node = world.nodes[name]
    for number in list(node.lines):
        world.rosters._send(node, number, message)


class Ear:
    """Hears what all rosters say to each other, heartbeats left out."""

    def __init__(self, world: World) -> None:
        self.heard: list[Message] = []
        self._send = world.rosters._send
        world.rosters._send = self._listen  # type: ignore[method-assign]

    def _listen(self, daemon: Daemon, stream: int, message: Message) -> None:
        if not isinstance(message, Ping | Pong):
            self.heard.append(message)
        self._send(daemon, stream, message)
