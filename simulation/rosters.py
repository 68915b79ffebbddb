"""Roster cores under virtual time, and the control streams between them.

A *machine* has a number, which is also its address; a *daemon* is one life of one machine. What is
sent on a stream arrives in order. While a way is cut it waits, as in a TCP connection, and dials
fail; a death is told by the end of the streams, or, when the machine itself is gone, by nothing.
Two machines may use one key. What a roster says to its daemon goes to the world.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from dugnad.dht import roster_events as ro
from dugnad.dht.advert import Advert, Reachable
from dugnad.dht.ids import PeerId
from dugnad.dht.messages import Message, decode_message, encode_message
from dugnad.dht.roster import Roster
from dugnad.dht.roster_table import PEERS_MAX, STREAMS_PER_PEER_MAX
from dugnad.simulation.checks import Violation
from dugnad.simulation.clock import Clock

UNSENT_MAX: Final = 256
"""Messages that wait in one direction of a stream; beyond it the daemon's shell ends the stream
(`peer.rostershell.QUEUE_MAX`)."""
ORDER_S: Final = 1e-6
"""What is sent on one stream arrives at least so far apart."""
REFUSED_SHARE: Final = 0.5
"""Of dials to a dead daemon: the machine answers that nobody listens; else nothing answers."""

TOLD_SHARE: Final = 0.5
"""Of streams of a machine that fell silent: it tells that they are gone when it is back; else its
address is a new one."""

Said = (
    ro.Dial
    | ro.PeerUp
    | ro.PeerLost
    | ro.PeerLeft
    | ro.PeerChanged
    | ro.SelfSuspect
    | ro.DuplicateIdentity
    | ro.ClockOffset
    | ro.ClockJumped
    | ro.Note
)
"""What a roster says to its daemon, and whom it dials."""


@dataclass(slots=True, eq=False)
class Daemon:
    """One life of one machine, as its control streams see it."""

    machine: int
    peer: PeerId
    roster: Roster
    dialable: bool = True
    skew_s: float = 0.0
    """Its wall clock is so wrong."""
    born_s: float = 0.0
    alive: bool = True
    frozen_until: float = 0.0
    asleep_since: float | None = None
    """Frozen with a closed lid: its timers stood still, and it answers no dial."""
    waiting: list[ro.Event] = field(default_factory=list)
    """What arrived while it was frozen."""
    up: set[PeerId] = field(default_factory=set)
    lines: dict[int, PeerId] = field(default_factory=dict)
    """Streams that this side holds."""
    told: set[int] = field(default_factory=set)
    """Those of them that the roster knows of."""
    timer: int = 0
    timer_for: float | None = None


@dataclass(slots=True, eq=False)
class Wire:
    """One control stream: who opened it to whom, and when the last bytes each way arrive."""

    opener: Daemon
    accepter: Daemon
    arrives: dict[int, float] = field(default_factory=dict)
    unsent: Counter[int] = field(default_factory=Counter)
    """Machine -> messages of its that wait for the way to be mended."""

    def other(self, one: Daemon) -> Daemon:
        """Who is at the other end."""
        return self.accepter if one is self.opener else self.opener


class Paths(Protocol):
    """The network below the streams."""

    def trip(self, source: Daemon, target: Daemon, size: int) -> float:
        """Seconds until a message of ``size`` bytes is there."""
        ...

    def is_cut(self, source: Daemon, target: Daemon) -> bool:
        """Whether nothing passes this way."""
        ...


class Listener(Protocol):
    """The daemons' other parts."""

    def heard(self, daemon: Daemon, event: ro.Event) -> None:
        """An event is about to go into a roster."""
        ...

    def said(self, daemon: Daemon, action: Said) -> None:
        """A roster says something to its daemon."""
        ...


class Rosters:
    """All daemons of one world, by machine."""

    def __init__(
        self, clock: Clock, paths: Paths, listener: Listener, rng: random.Random, wall_s: float
    ) -> None:
        """``wall_s`` is what a clock on the wall shows at virtual second 0."""
        self.daemons: dict[int, Daemon] = {}
        self.wires: dict[int, Wire] = {}
        self.messages = 0
        self.bytes = 0
        self._clock = clock
        self._paths = paths
        self._listener = listener
        self._rng = rng
        self._wall_s = wall_s
        self._count = 0
        self._stuck: dict[tuple[int, int], list[tuple[int, Daemon, ro.Event]]] = {}
        self._shy: dict[frozenset[int], float] = {}
        """Pairs of machines that cannot dial each other, and until when."""

    # -- lives -----------------------------------------------------------------------------------

    def start(self, daemon: Daemon) -> None:
        """A daemon starts on its machine, perhaps where one died."""
        before = self.daemons.get(daemon.machine)
        self.daemons[daemon.machine] = daemon
        for number, wire in list(self.wires.items()):
            old = before is wire.opener or before is wire.accepter
            if before is not None and old and self._rng.random() < TOLD_SHARE:
                down = ro.StreamDown(before.peer, number, "reset")
                self._carry(number, wire, before, down, 0)
        self.feed(daemon, self._timer(daemon))

    def introduce(self, daemon: Daemon, machines: Iterable[tuple[PeerId, int]], by: str) -> None:
        """Tell a roster where others are."""
        for peer, machine in machines:
            if peer != daemon.peer:
                self.feed(daemon, ro.Known(peer, (address(machine),), by))

    def stop(self, daemon: Daemon, *, quietly: bool = False) -> None:
        """The daemon is gone. Its streams end; ``quietly``: its machine, and nothing is heard."""
        daemon.alive = False
        daemon.waiting.clear()
        for number in list(daemon.lines):
            self._end(number, daemon, "reset", quietly=quietly)

    def freeze(self, daemon: Daemon, until: float, *, asleep: bool = False) -> None:
        """It does nothing until then, and then all at once; asleep: its timers stood still, too."""
        if asleep:
            daemon.asleep_since = self._clock.now
        daemon.frozen_until = max(daemon.frozen_until, until)
        self._clock.later(daemon.frozen_until - self._clock.now, partial(self._wake, daemon))

    def break_streams(self, daemon: Daemon, others: Collection[int], *, shy_s: float = 0.0) -> None:
        """The streams with these machines end on both sides; they cannot dial each other for
        ``shy_s``."""
        for other in others:
            if shy_s:
                self._shy[frozenset((daemon.machine, other))] = self._clock.now + shy_s
        for number in list(daemon.lines):
            wire = self.wires[number]
            far = wire.other(daemon)
            if far.machine in others:
                for end in (daemon, far):
                    self._bring(wire, end, ro.StreamDown(end.peer, number, "cut"), 0)

    def mended(self) -> None:
        """Ways may be open again: what waited there is on its way."""
        for pair in sorted(self._stuck):
            one, two = (self.daemons[machine] for machine in pair)
            if not self._paths.is_cut(one, two):
                for number, sender, event in self._stuck.pop(pair):
                    wire = self.wires.get(number)
                    if wire is not None:
                        wire.unsent[sender.machine] -= isinstance(event, ro.MessageIn)
                        self._carry(number, wire, sender, event, 0)

    # -- the core --------------------------------------------------------------------------------

    def feed(self, daemon: Daemon, event: ro.Event) -> None:
        """One event for one roster, at once or when it is awake; what it asks for is done."""
        if not daemon.alive:
            return
        if daemon.waiting or self._clock.now < daemon.frozen_until:
            daemon.waiting.append(event)
            return
        if isinstance(event, ro.MessageIn | ro.StreamDown):
            if event.stream not in daemon.lines:
                return  # closed here before it arrived
            if isinstance(event, ro.StreamDown):
                self._forget(event.stream, daemon)
        elif isinstance(event, ro.StreamUp):
            daemon.told.add(event.stream)
        self._listener.heard(daemon, event)
        for action in daemon.roster.handle(event, self._clock.now):
            self._perform(daemon, action)
        self._check(daemon, event)
        self._arm(daemon)

    def _wake(self, daemon: Daemon) -> None:
        if not daemon.alive or self._clock.now < daemon.frozen_until - ORDER_S:
            return
        since, daemon.asleep_since = daemon.asleep_since, None
        daemon.frozen_until = 0.0
        waiting, daemon.waiting = daemon.waiting, []
        late = [one for one in waiting if not (since is not None and isinstance(one, ro.Timer))]
        for event in late:
            self.feed(daemon, event)
        left = 0.0  # of what the timer had still to wait when the machine fell asleep
        if since is not None and daemon.roster.deadline is not None:
            left = max(0.0, daemon.roster.deadline - since)
        self._clock.later(left, lambda: self.feed(daemon, self._timer(daemon)))

    def _timer(self, daemon: Daemon) -> ro.Timer:
        return ro.Timer(round((self._wall_s + self._clock.now + daemon.skew_s) * 1000))

    def _arm(self, daemon: Daemon) -> None:
        deadline = daemon.roster.deadline
        if deadline == daemon.timer_for:
            return
        daemon.timer += 1
        daemon.timer_for = deadline
        if deadline is not None:
            ring = partial(self._ring, daemon, daemon.timer)
            self._clock.later(max(0.0, deadline - self._clock.now), ring)

    def _ring(self, daemon: Daemon, number: int) -> None:
        if daemon.alive and daemon.timer == number:
            daemon.timer_for = None
            self.feed(daemon, self._timer(daemon))

    def _check(self, daemon: Daemon, event: ro.Event) -> None:
        """What must hold after every event: one tale of who is up, tables within their bounds."""
        roster = daemon.roster
        if roster.deadline is not None and roster.deadline < self._clock.now:
            raise Violation(f"the roster of machine {daemon.machine} wants a timer in the past")
        if isinstance(event, ro.Timer | ro.StreamUp | ro.StreamDown | ro.Known):
            if roster.deadline is not None and set(roster.live()) != daemon.up:
                raise Violation(f"the roster of machine {daemon.machine} told another tale")
            if len(roster.known()) > PEERS_MAX:
                raise Violation(f"the roster's table of machine {daemon.machine} is over its bound")
        if isinstance(event, ro.StreamUp):
            held = sum(daemon.lines[number] == event.peer for number in daemon.told)
            if held > STREAMS_PER_PEER_MAX:
                raise Violation(f"machine {daemon.machine} holds {held} streams with one peer")

    def _perform(self, daemon: Daemon, action: ro.Action) -> None:
        match action:
            case ro.Dial(peer, addresses, deadline_s):
                self._listener.said(daemon, action)
                self._dial(daemon, peer, addresses, deadline_s)
            case ro.Send(_, stream, message):
                self._send(daemon, stream, message)
            case ro.CloseStream(_, stream, _):
                if stream in daemon.lines:
                    self._end(stream, daemon, "closed by the other side")
            case ro.PeerUp(peer):
                if peer in daemon.up:
                    raise Violation(f"machine {daemon.machine} was told twice that a peer is up")
                daemon.up.add(peer)
                self._listener.said(daemon, action)
            case ro.PeerLost(peer) | ro.PeerLeft(peer):
                if peer not in daemon.up:
                    raise Violation(f"machine {daemon.machine} lost a peer that was not up")
                daemon.up.discard(peer)
                self._listener.said(daemon, action)
            case _:
                self._listener.said(daemon, action)

    # -- streams ---------------------------------------------------------------------------------

    def _dial(
        self, daemon: Daemon, peer: PeerId, addresses: tuple[str, ...], deadline_s: float
    ) -> None:
        """Try the addresses until one leads to the peer; the answer comes within the deadline."""
        wait, reason = deadline_s, "no answer"
        for one in addresses:
            target = self.daemons.get(machine_at(one))
            if target is None or target is daemon or self._silent(daemon, target):
                continue
            if not target.alive or target.peer != peer:
                if self._rng.random() < REFUSED_SHARE:
                    wait, reason = self._round(daemon, target), "connection refused"
                continue
            trip = 2 * self._round(daemon, target)
            if trip <= deadline_s:
                self._clock.later(trip * 0.75, partial(self._opened, daemon, target, trip * 0.25))
                return
        failed = ro.DialFailed(peer, reason)
        self._clock.later(min(wait, deadline_s), partial(self.feed, daemon, failed))

    def _silent(self, daemon: Daemon, target: Daemon) -> bool:
        """Whether a dial gets no answer of any kind."""
        pair = frozenset((daemon.machine, target.machine))
        return (
            not target.dialable
            or target.asleep_since is not None
            or self._shy.get(pair, 0.0) > self._clock.now
            or self._paths.is_cut(daemon, target)
            or self._paths.is_cut(target, daemon)
        )

    def _round(self, one: Daemon, two: Daemon) -> float:
        return self._paths.trip(one, two, 0) + self._paths.trip(two, one, 0)

    def _opened(self, daemon: Daemon, target: Daemon, answer_s: float) -> None:
        """The other side has accepted; the opener hears of it a moment later."""
        if not daemon.alive or not target.alive:
            failed = ro.DialFailed(target.peer, "it ended")
            self._clock.later(answer_s, partial(self.feed, daemon, failed))
            return
        self._count += 1
        number, now = self._count, self._clock.now
        wire = self.wires[number] = Wire(daemon, target)
        wire.arrives = {daemon.machine: now + answer_s, target.machine: now}
        daemon.lines[number], target.lines[number] = target.peer, daemon.peer
        here = ro.StreamUp(target.peer, number, True)
        self._clock.later(answer_s, partial(self.feed, daemon, here))
        self.feed(target, ro.StreamUp(daemon.peer, number, False))

    def _send(self, daemon: Daemon, stream: int, message: Message) -> None:
        if stream not in daemon.lines:
            return
        data = encode_message(message)
        self.messages += 1
        self.bytes += len(data)
        event = ro.MessageIn(daemon.peer, stream, decode_message(data))
        self._carry(stream, self.wires[stream], daemon, event, len(data))

    def _carry(self, number: int, wire: Wire, sender: Daemon, event: ro.Event, size: int) -> None:
        """In order within a stream and direction; waits while the way is cut."""
        target = wire.other(sender)
        pair = (sender.machine, target.machine)
        if self._paths.is_cut(sender, target):
            if isinstance(event, ro.MessageIn):
                wire.unsent[sender.machine] += 1
                if wire.unsent[sender.machine] > UNSENT_MAX:
                    self._overrun(number, wire, sender)
                    return
            self._stuck.setdefault(pair, []).append((number, sender, event))
            return
        self._bring(wire, sender, event, size)

    def _bring(self, wire: Wire, sender: Daemon, event: ro.Event, size: int) -> None:
        """Over an open way, behind what is under way already."""
        target, now = wire.other(sender), self._clock.now
        trip = self._paths.trip(sender, target, size)
        at = max(now + trip, wire.arrives.get(target.machine, 0.0) + ORDER_S)
        wire.arrives[target.machine] = at
        self._clock.later(at - now, partial(self.feed, target, event))

    def _overrun(self, number: int, wire: Wire, sender: Daemon) -> None:
        """The shell ends a stream on which too much is unsent."""
        self._carry(number, wire, sender, ro.StreamDown(sender.peer, number, "reset"), 0)
        reason = f"over {UNSENT_MAX} messages are unsent"
        down = ro.StreamDown(wire.other(sender).peer, number, reason)
        self._clock.later(0.0, partial(self.feed, sender, down))

    def _end(self, number: int, daemon: Daemon, reason: str, *, quietly: bool = False) -> None:
        """This side is done with a stream; the other one hears of it, in order."""
        wire = self.wires[number]
        self._forget(number, daemon)
        if number in wire.other(daemon).lines and not quietly:
            down = ro.StreamDown(daemon.peer, number, reason)
            self._carry(number, wire, daemon, down, 0)

    def _forget(self, number: int, daemon: Daemon) -> None:
        daemon.lines.pop(number, None)
        daemon.told.discard(number)
        wire = self.wires[number]
        if number not in wire.other(daemon).lines:
            del self.wires[number]


def address(machine: int) -> str:
    """Where a machine is."""
    return f"/memory/{machine}"


def machine_at(text: str) -> int:
    """The machine at an address."""
    return int(text.rsplit("/", 1)[1])


def advert_of(
    peer: PeerId,
    machine: int,
    *,
    boot: int,
    at_ms: int,
    reachable: Reachable = "direct",
    can_home: bool = True,
    tokens_per_s: float = 0.0,
    speed_class: int = 0,
    dialable: bool = True,
) -> Advert:
    """What the daemon on a machine says of itself at its start."""
    return Advert(
        peer=peer,
        boot=boot,
        at_ms=at_ms,
        name=f"peer {machine}",
        reachable=reachable,
        can_home=can_home,
        roles=("train",),
        tokens_per_s=tokens_per_s,
        speed_class=speed_class,
        addresses=(address(machine),) if dialable else (),
    )
