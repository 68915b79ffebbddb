"""The simulator's rosters alone: a few nodes, their streams, faults, one virtual clock.

Everything comes from one seed; `World.digest` is the digest of all events and actions in order. A
*node* is one daemon (a boot of an identity) with a log of what its roster said; it may be killed,
hung (its events wait, its streams stay open) or doubled. A line between two nodes may be cut: what
is sent meanwhile waits, as in a TCP connection, and dials fail.
"""

import hashlib
import random
from dataclasses import dataclass, field

from dugnad.dht.advert import Reachable
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.roster import Roster, RosterConfig
from dugnad.dht.roster_events import Action, Event, PeerLeft, PeerLost, PeerUp
from dugnad.simulation.clock import Clock
from dugnad.simulation.rosters import Daemon, Rosters, Said, advert_of

RUN = RunId(hashlib.sha256(b"roster world").digest())
WALL_START_MS = 1_800_000_000_000


class FakeSigner:
    """Signs by hashing: as good as a key in a world where nobody forges, and fifty times faster."""

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer

    def sign(self, message: bytes) -> bytes:
        return hashlib.sha512(self.peer + message).digest()


def fake_verify(peer: PeerId, message: bytes, signature: bytes) -> bool:
    return signature == hashlib.sha512(peer + message).digest()


def peer_id(number: int) -> PeerId:
    return PeerId(hashlib.sha256(b"peer %d" % number).digest())


@dataclass(slots=True, eq=False)
class Node(Daemon):
    """One daemon, and what its roster said."""

    lost_at: dict[PeerId, float] = field(default_factory=dict)
    log: list[tuple[float, Action]] = field(default_factory=list)

    def said(self, kind: type[Action]) -> list[tuple[float, Action]]:
        return [(at, action) for at, action in self.log if isinstance(action, kind)]


class World:
    """Nodes, what happens to them, and the lines between them."""

    def __init__(self, seed: int, latency_s: float = 0.02) -> None:
        self.rng = random.Random(seed)
        self.clock = Clock(seed)
        self.clock.now = 100.0
        self.latency_s = latency_s
        self.nodes: dict[int, Node] = {}
        self.cuts: set[tuple[int, int]] = set()  # directed: (from, to)
        self.rosters = Rosters(self.clock, self, self, self.rng, WALL_START_MS / 1000)
        self._digest = hashlib.sha256()

    # --- building

    def add(
        self,
        name: int,
        *,
        identity: int | None = None,
        dialable: bool = True,
        config: RosterConfig | None = None,
        reachable: Reachable = "direct",
    ) -> Node:
        """A daemon starts (at the current time). `identity` names its key, normally its own."""
        peer = peer_id(name if identity is None else identity)
        advert = advert_of(
            peer,
            name,
            boot=self.rng.getrandbits(60) | 1,
            at_ms=WALL_START_MS + round(self.now * 1000),
            reachable=reachable,
            dialable=dialable,
        )
        roster = Roster(
            config or RosterConfig(RUN, "world 1"),
            FakeSigner(peer),
            advert,
            random.Random(self.rng.getrandbits(32)),
            fake_verify,
        )
        node = self.nodes[name] = Node(name, peer, roster, dialable=dialable)
        self.rosters.start(node)
        return node

    def introduce(self, name: int, *others: int) -> None:
        """The node is told of the others' addresses."""
        named = [(self.nodes[other].peer, other) for other in others]
        self.rosters.introduce(self.nodes[name], named, "a link")

    # --- faults

    def kill(self, name: int, *, quietly: bool = False) -> None:
        """The daemon is gone; its streams end, or, quietly, the machine just stops answering."""
        self.rosters.stop(self.nodes[name], quietly=quietly)

    def hang(self, name: int, seconds: float) -> None:
        """SIGSTOP and, later, SIGCONT."""
        self.rosters.freeze(self.nodes[name], self.now + seconds)

    def cut_streams(self, name: int, *others: int) -> None:
        """All streams between the node and the others end on both sides; dialling works."""
        self.rosters.break_streams(self.nodes[name], others or tuple(self.nodes))

    def cut(self, one: int, other: int, *, both: bool = True) -> None:
        """The line carries nothing (in one direction, or both); streams stay open."""
        self.cuts.add((one, other))
        if both:
            self.cuts.add((other, one))

    def heal(self) -> None:
        """All lines work; what waited arrives."""
        self.cuts.clear()
        self.rosters.mended()

    # --- running

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return self.clock.now

    def run(self, seconds: float) -> None:
        """Lets virtual time pass."""
        self.clock.run(self.clock.now + seconds)

    def feed(self, node: Node, event: Event) -> None:
        """One event for one node, unless it hangs."""
        self.rosters.feed(node, event)

    @property
    def digest(self) -> str:
        """What happened so far, all of it, as one number."""
        return self._digest.hexdigest()

    def streams_between(self, one: int, other: int) -> int:
        """Streams of the pair that both sides hold."""
        return len(set(self.nodes[one].lines) & set(self.nodes[other].lines))

    def agreed(self) -> bool:
        """Whether each living node's view is the truth."""
        living = sorted(node.peer for node in self.nodes.values() if node.alive)
        return all(
            list(node.roster.live()) == [peer for peer in living if peer != node.peer]
            for node in self.nodes.values()
            if node.alive
        )

    # --- what the rosters ask of a world

    def trip(self, source: Daemon, target: Daemon, size: int) -> float:
        return self.latency_s * (0.5 + self.rng.random())

    def is_cut(self, source: Daemon, target: Daemon) -> bool:
        return (source.machine, target.machine) in self.cuts

    def heard(self, daemon: Daemon, event: Event) -> None:
        self._digest.update(repr((self.now, daemon.machine, event)).encode())

    def said(self, daemon: Daemon, action: Said) -> None:
        node = self.nodes[daemon.machine]
        self._digest.update(repr((self.now, daemon.machine, action)).encode())
        node.log.append((self.now, action))
        match action:
            case PeerUp(peer):
                node.lost_at.pop(peer, None)
            case PeerLost(peer) | PeerLeft(peer):
                node.lost_at[peer] = self.now
            case _:
                pass


def mesh(seed: int, size: int, *, latency_s: float = 0.02) -> World:
    """`size` peers that know the first, started within a second, and time to find each other."""
    world = World(seed, latency_s)
    for name in range(size):
        world.add(name)
    for name in range(1, size):
        world.introduce(name, 0)
        world.run(world.rng.random() / size)
    world.run(3.0)
    assert world.agreed(), "the mesh did not form"
    return world
