"""An in-memory world for the roster alone: several cores, simulated streams, faults, one virtual
clock.

Everything comes from one seed; `World.digest` is the digest of all events and actions in order. A
*node* is one daemon (a boot of an identity); it may be killed, hung (its events wait, its streams
stay open) or doubled. A line between two nodes may be cut: what is sent meanwhile waits, as in a
TCP connection, and dials fail.
"""

import hashlib
import heapq
import random
from dataclasses import dataclass, field

from dugnad.dht.advert import Advert, Reachable
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.messages import Message, decode_message, encode_message
from dugnad.dht.roster import Roster, RosterConfig
from dugnad.dht.roster_events import (
    Action,
    CloseStream,
    Dial,
    DialFailed,
    Event,
    Known,
    MessageIn,
    PeerLeft,
    PeerLost,
    PeerUp,
    Send,
    StreamDown,
    StreamUp,
    Timer,
)

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


@dataclass
class Node:
    """One daemon."""

    name: int
    peer: PeerId
    roster: Roster
    wall_skew_s: float = 0.0
    alive: bool = True
    hung_until: float | None = None
    waiting: list[Event] = field(default_factory=list)
    dialable: bool = True
    ended_at: dict[PeerId, float] = field(default_factory=dict)
    lost_at: dict[PeerId, float] = field(default_factory=dict)
    up: set[PeerId] = field(default_factory=set)
    log: list[tuple[float, Action]] = field(default_factory=list)
    timer: float | None = None

    def said(self, kind: type[Action]) -> list[tuple[float, Action]]:
        return [(at, action) for at, action in self.log if isinstance(action, kind)]


@dataclass
class Wire:
    """One stream: the names of its two nodes, and when the last bytes of each direction arrive."""

    opener: int
    accepter: int
    arrives: dict[int, float] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)  # nodes for which it is over


class World:
    """Nodes, wires, the queue of what happens next."""

    def __init__(self, seed: int, latency_s: float = 0.02) -> None:
        self.rng = random.Random(seed)
        self.now = 100.0
        self.latency_s = latency_s
        self.nodes: dict[int, Node] = {}
        self.wires: dict[int, Wire] = {}
        self.cuts: set[tuple[int, int]] = set()  # directed: (from, to)
        self.blocked: dict[tuple[int, int], list[tuple[int, Event]]] = {}
        self.messages = 0
        self._queue: list[tuple[float, int, int, Event | str]] = []
        self._count = 0
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
        advert = Advert(
            peer=peer,
            boot=self.rng.getrandbits(60) | 1,
            at_ms=WALL_START_MS + round(self.now * 1000),
            name=f"peer {name}",
            reachable=reachable,
            addresses=(f"/memory/{name}",) if dialable else (),
        )
        roster = Roster(
            config or RosterConfig(RUN, "world 1"),
            FakeSigner(peer),
            advert,
            random.Random(self.rng.getrandbits(32)),
            fake_verify,
        )
        node = Node(name, peer, roster, dialable=dialable)
        restart = name in self.nodes
        self.nodes[name] = node
        if (
            restart and self.rng.random() < 0.5
        ):  # sometimes the new system tells that old streams are gone
            for number, wire in self.wires.items():
                if name in wire.ended and len(wire.ended) == 1:
                    self._end(number, wire, name, "reset")
        return node

    def introduce(self, name: int, *others: int) -> None:
        """The node is told of the others' addresses."""
        for other in others:
            peer = self.nodes[other].peer
            self.feed(self.nodes[name], Known(peer, (f"/memory/{other}",), "a link"))

    # --- faults

    def kill(self, name: int, *, quietly: bool = False) -> None:
        """The daemon is gone; its streams end, or, quietly, the machine just stops answering."""
        node = self.nodes[name]
        node.alive = False
        for number, wire in self.wires.items():
            if name in (wire.opener, wire.accepter) and name not in wire.ended:
                wire.ended.add(name)
                if not quietly:
                    self._end(number, wire, name, "reset")

    def hang(self, name: int, seconds: float) -> None:
        """SIGSTOP and, later, SIGCONT."""
        node = self.nodes[name]
        node.hung_until = self.now + seconds
        self._push(node.hung_until, name, "wake")

    def cut_streams(self, name: int, *others: int) -> None:
        """All streams between the node and the others end on both sides; dialling works."""
        for number, wire in list(self.wires.items()):
            ends = {wire.opener, wire.accepter}
            if name in ends and (not others or ends & set(others)) and not wire.ended:
                for end in sorted(ends):
                    other = (ends - {end}).pop()
                    wire.ended.add(end)
                    delay = self._delay()
                    event = StreamDown(self.nodes[other].peer, number, "cut")
                    self._push(self.now + delay, end, event)

    def cut(self, one: int, other: int, *, both: bool = True) -> None:
        """The line carries nothing (in one direction, or both); streams stay open."""
        self.cuts.add((one, other))
        if both:
            self.cuts.add((other, one))

    def heal(self) -> None:
        """All lines work; what waited arrives."""
        self.cuts.clear()
        blocked, self.blocked = self.blocked, {}
        for pair in sorted(blocked):
            for receiver, event in blocked[pair]:
                self._deliver(pair[0], receiver, event)

    # --- running

    def run(self, seconds: float) -> None:
        """Lets virtual time pass."""
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            at, _, name, event = heapq.heappop(self._queue)
            self.now = max(self.now, at)
            node = self.nodes[name]
            if not node.alive:
                continue
            if event == "wake":
                if node.hung_until is not None and node.hung_until <= self.now:
                    node.hung_until = None
                    waiting, node.waiting = node.waiting, []
                    if self.rng.random() < 0.5:
                        self.feed(node, self._timer_event(node))
                    for late in waiting:
                        self.feed(node, late)
                    self._set_timer(node, force=True)
            elif event == "timer":
                if node.timer is not None and node.timer <= self.now and node.hung_until is None:
                    node.timer = None
                    self.feed(node, self._timer_event(node))
            elif not isinstance(event, str):
                self.feed(node, event)
        self.now = end

    def feed(self, node: Node, event: Event) -> None:
        """One event for one node, unless it hangs."""
        if not node.alive:
            return
        if node.hung_until is not None:
            node.waiting.append(event)
            return
        if isinstance(event, MessageIn) and node.name in self.wires[event.stream].ended:
            return  # closed here, or broken before it arrived
        before = set(node.roster.live())
        actions = node.roster.handle(event, self.now)
        self._digest.update(repr((self.now, node.name, event, actions)).encode())
        self._check(node, before, actions)
        for action in actions:
            self._perform(node, action)
        self._set_timer(node)

    @property
    def digest(self) -> str:
        """What happened so far, all of it, as one number."""
        return self._digest.hexdigest()

    def streams_between(self, one: int, other: int) -> int:
        """Streams of the pair that both sides hold."""
        return sum(
            1
            for wire in self.wires.values()
            if {wire.opener, wire.accepter} == {one, other} and not wire.ended
        )

    def agreed(self) -> bool:
        """Whether each living node's view is the truth."""
        living = sorted(node.peer for node in self.nodes.values() if node.alive)
        return all(
            list(node.roster.live()) == [peer for peer in living if peer != node.peer]
            for node in self.nodes.values()
            if node.alive
        )

    # --- inside

    def _timer_event(self, node: Node) -> Timer:
        return Timer(WALL_START_MS + round((self.now + node.wall_skew_s) * 1000))

    def _check(self, node: Node, before: set[PeerId], actions: list[Action]) -> None:
        for action in actions:
            match action:
                case PeerUp(peer):
                    assert peer not in node.up, "up twice"
                    node.up.add(peer)
                    node.lost_at.pop(peer, None)
                case PeerLost(peer) | PeerLeft(peer):
                    assert peer in node.up, "lost though not up"
                    node.up.discard(peer)
                    node.lost_at[peer] = self.now
                case Send(message=message):
                    assert decode_message(encode_message(message)) == message
                    self.messages += 1
                case _:
                    pass
            if not isinstance(action, Send):
                node.log.append((self.now, action))
        assert tuple(sorted(node.up)) == node.roster.live() or node.roster.deadline is None
        deadline = node.roster.deadline
        assert deadline is None or deadline >= self.now

    def _perform(self, node: Node, action: Action) -> None:
        match action:
            case Dial(peer, addresses, deadline_s):
                self._dial(node, peer, addresses, deadline_s)
            case Send(_, stream, message):
                self._send(node, stream, message)
            case CloseStream(_, stream, _):
                wire = self.wires[stream]
                if node.name not in wire.ended:
                    wire.ended.add(node.name)
                    self._end(stream, wire, node.name, "closed by the other side")
            case _:
                pass

    def _dial(
        self, node: Node, peer: PeerId, addresses: tuple[str, ...], deadline_s: float
    ) -> None:
        name = int(addresses[0].rsplit("/", 1)[1])
        target = self.nodes.get(name)
        trip = 2 * (self._delay() + self._delay())
        path = {(node.name, name), (name, node.name)} & self.cuts
        if (
            target is None
            or path
            or not target.dialable
            or target.peer != peer
            or trip > deadline_s
        ):
            self._push(self.now + deadline_s, node.name, DialFailed(peer, "no answer"))
        elif not target.alive:
            late = self.rng.random() < 0.5
            delay = deadline_s if late else trip / 2
            self._push(self.now + delay, node.name, DialFailed(peer, "connection refused"))
        else:
            number = len(self.wires)
            self.wires[number] = Wire(node.name, name)
            here, there = self.now + trip, self.now + trip * 3 / 4
            self.wires[number].arrives = {node.name: here, name: there}
            self._push(here, node.name, StreamUp(peer, number, True))
            self._push(there, name, StreamUp(node.peer, number, False))

    def _send(self, node: Node, stream: int, message: Message) -> None:
        wire = self.wires[stream]
        if node.name not in wire.ended:
            event = MessageIn(node.peer, stream, message)
            receiver = wire.accepter if node.name == wire.opener else wire.opener
            self._deliver(node.name, receiver, event)

    def _end(self, number: int, wire: Wire, by: int, reason: str) -> None:
        receiver = wire.accepter if by == wire.opener else wire.opener
        self._deliver(by, receiver, StreamDown(self.nodes[by].peer, number, reason))

    def _deliver(self, sender: int, receiver: int, event: Event) -> None:
        """In order within a stream and direction; waits while the line is cut."""
        if (sender, receiver) in self.cuts:
            self.blocked.setdefault((sender, receiver), []).append((receiver, event))
            return
        assert isinstance(event, MessageIn | StreamDown)
        wire = self.wires[event.stream]
        at = max(self.now + self._delay(), wire.arrives.get(receiver, 0.0) + 1e-6)
        wire.arrives[receiver] = at
        self._push(at, receiver, event)

    def _delay(self) -> float:
        return self.latency_s * (0.5 + self.rng.random())

    def _set_timer(self, node: Node, *, force: bool = False) -> None:
        deadline = node.roster.deadline
        if deadline is not None and (force or node.timer is None or deadline != node.timer):
            node.timer = max(deadline, self.now)
            self._push(node.timer, node.name, "timer")

    def _push(self, at: float, name: int, event: Event | str) -> None:
        self._count += 1
        heapq.heappush(self._queue, (at, self._count, name, event))


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
