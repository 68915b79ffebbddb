"""Thousands of peers of one crowd under a virtual clock: the core `roster_crowd`, and only that.

Discrete events on one heap, all chance from the seed. Every stream keeps its order; a lost packet
is sent again by the transport and so comes late. Who crashes falls silent without a word, who
leaves says good-bye. Newcomers know a few peers that the address book named, live at least a
minute.
"""

from __future__ import annotations

import gc
import hashlib
import heapq
import random
import struct
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from dugnad.dht.roster_crowd import Crowd
from dugnad.dht.roster_crowd_events import (
    Changed,
    Close,
    CrowdAction,
    CrowdEvent,
    Dial,
    Heard,
    Leave,
    LinkDown,
    LinkUp,
    Named,
    Tell,
    Tick,
    Unreached,
)
from dugnad.dht.roster_rumours import ORDER_BITS, ORDER_MASK, CrowdMessage, size_of

FRAME_BYTES: Final = 4
"""Length in front of each message of a control stream."""
RETRANSMIT_S: Final = 0.3
"""A lost packet comes so much later (TCP's usual smallest timeout and a round trip), or twice."""
LINE_BYTES_PER_S: Final = 1_250_000.0
"""Each peer's line: 10 Mbit/s."""
BOOK_AGE_S: Final = 60.0
"""The address book names peers that have been there so long."""
SEEDS: Final = 4
_TICK: Final = Tick()


@dataclass(frozen=True, slots=True)
class CrowdPlan:
    """A crowd and what happens to it."""

    peers: int
    churn_per_min: float
    """Share of the peers that join or leave each minute: half of it each, so the size stays."""
    seconds: float = 600.0
    loss: float = 0.01
    crashes: float = 0.5
    """Share of departures without a good-bye."""
    sampled: int = 64
    sample_s: float = 5.0
    young_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Look:
    """The crowd at one moment: who is there, how wrong views are, what was sent so far."""

    at_s: float
    members: int
    error: float
    """Of the sampled views, in the mean."""
    roster_bytes: int
    """All bytes that all have sent since the beginning."""


@dataclass(slots=True)
class Figures:
    """What was measured."""

    errors: list[float] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    missing: int = 0
    ghosts: int = 0
    looked: int = 0
    detected_s: list[float] = field(default_factory=list)
    false_losses: int = 0
    """Times that a member took a live one for gone (each reader counts)."""
    false_now: int = 0
    """Live members, of age, that sampled peers took for gone at the last look."""
    events: int = 0
    messages: int = 0
    joined: int = 0
    crashed: int = 0
    left: int = 0


class CrowdWorld:
    """The peers, the lines and the queue of what happens next."""

    def __init__(self, plan: CrowdPlan, seed: int) -> None:
        self.plan = plan
        self.now = 0.0
        self.figures = Figures()
        self.cores: list[Crowd | None] = []
        self.born: list[float] = []
        self.died: list[float] = []
        self.sent_bytes: list[int] = []
        self.line_s: list[float] = []
        self._live: list[int] = []
        self._place: dict[int, int] = {}
        self._undetected: dict[int, float] = {}
        self._queue: list[tuple[float, int, int, CrowdEvent]] = []
        self._count = 0
        self._arrives: dict[int, float] = {}
        self._rng = random.Random(f"crowd/{seed}")
        self._digest = hashlib.sha256()

    # --- the swarm

    def begin(self) -> None:
        """All peers of the beginning, knowing each other and linked at random."""
        size = self.plan.peers
        for _ in range(size):
            self._add()
        table = array("I", (self._core(one).own_rumour & ORDER_MASK for one in range(size)))
        for one in range(size):
            self._core(one).adopt(table)
            self._push(self._rng.random() * 2.0, one, _TICK)

    def join(self) -> None:
        """A newcomer with a few addresses out of the book."""
        slot = self._add()
        self.figures.joined += 1
        old = [one for one in self._live if self.born[one] <= self.now - BOOK_AGE_S or not self.now]
        pool = old or self._live[:-1]
        seeds = tuple(self._rng.choice(pool) for _ in range(SEEDS))
        self._feed(slot, Named(seeds))
        self._push(self._core(slot).deadline, slot, _TICK)

    def depart(self) -> None:
        """One peer goes, with or without a word."""
        slot = self._live[int(self._rng.random() * len(self._live))]
        if self._rng.random() < self.plan.crashes:
            self.figures.crashed += 1
        else:
            self.figures.left += 1
            self._feed(slot, Leave())
        self.died[slot] = self._undetected[slot] = self.now
        self.cores[slot] = None
        place = self._place.pop(slot)
        last = self._live.pop()
        if last != slot:
            self._live[place] = last
            self._place[last] = place

    def live(self) -> list[int]:
        """Slots of those who are there."""
        return self._live

    def degree(self) -> float:
        """Streams of a live peer, in the mean."""
        return sum(len(self._core(slot).links) for slot in self._live) / max(1, len(self._live))

    @property
    def digest(self) -> str:
        """All that happened, as one number."""
        return self._digest.hexdigest()

    # --- time

    def run(self, until: float) -> None:
        """Lets virtual time pass."""
        queue, cores, pop = self._queue, self.cores, heapq.heappop
        while queue and queue[0][0] <= until:
            at, _, slot, event = pop(queue)
            core = cores[slot]
            if core is None:
                if type(event) is LinkUp:
                    self._cut(slot, event.slot)
                continue
            self.now = at
            self._feed(slot, event)
            if event is _TICK:
                self._push(core.deadline, slot, _TICK)
        self.now = until

    def look(self) -> None:
        """How wrong the views of some peers are now."""
        plan, figures = self.plan, self.figures
        old = [one for one in self._live if self.now - self.born[one] >= plan.young_s]
        truth = np.zeros(len(self.cores), dtype=bool)
        truth[self._live] = True
        of_age = np.array(self.born) <= self.now - plan.young_s
        figures.false_now, first = 0, len(figures.errors)
        for slot in self._rng.sample(old, min(plan.sampled, len(old))):
            orders = np.frombuffer(self._core(slot).orders, dtype=np.uint32)[: len(truth)]
            seen = np.zeros(len(truth), dtype=bool)
            seen[: len(orders)] = (orders != 0) & (orders & 1 == 0)
            seen[slot] = True
            odd = np.zeros(len(truth), dtype=bool)
            odd[: len(orders)] = orders & 1 == 1
            figures.false_now += int((truth & of_age & odd).sum())
            missing, ghosts = int((truth & ~seen).sum()), int((seen & ~truth).sum())
            figures.missing += missing
            figures.ghosts += ghosts
            figures.looked += 1
            figures.errors.append((missing + ghosts) / len(self._live))
        sent, found = sum(self.sent_bytes), figures.errors[first:]
        error = sum(found) / max(1, len(found))
        figures.looks.append(Look(self.now, len(self._live), error, sent))
        counts = (figures.events, figures.missing, figures.ghosts, sent)
        self._digest.update(struct.pack("<d4Q", self.now, *counts))

    # --- inside

    def _add(self) -> int:
        slot = len(self.cores)
        core = Crowd(slot, 1 + int(self.now), random.Random(self._rng.getrandbits(62)))
        self.cores.append(core)
        self.born.append(self.now)
        self.died.append(float("inf"))
        self.sent_bytes.append(0)
        self.line_s.append(min(0.3, self._rng.lognormvariate(-3.5, 0.6)))  # median 30 ms a side
        self._place[slot] = len(self._live)
        self._live.append(slot)
        return slot

    def _core(self, slot: int) -> Crowd:
        core = self.cores[slot]
        assert core is not None, "asked of a peer that is gone"
        return core

    def _feed(self, slot: int, event: CrowdEvent) -> None:
        self.figures.events += 1
        core = self._core(slot)
        for action in core.handle(event, self.now):
            if type(action) is Tell:
                self._send(slot, action.slot, action.message)
            elif type(action) is Changed:
                self._noticed(action.codes)
            else:
                self._perform(slot, action)

    def _noticed(self, codes: tuple[int, ...]) -> None:
        """When somebody first knew that a peer is gone, truly or falsely."""
        for code in codes:
            if code & 1:
                slot = code >> ORDER_BITS
                at = self._undetected.pop(slot, None)
                if at is not None:
                    self.figures.detected_s.append(self.now - at)
                elif self.cores[slot] is not None:
                    self.figures.false_losses += 1

    def _perform(self, slot: int, action: CrowdAction) -> None:
        match action:
            case Dial(other, deadline_s):
                trip = 2.0 * self._delay(slot, other)
                if self.cores[other] is None or trip > deadline_s:
                    self._push(self.now + deadline_s, slot, Unreached(other))
                    return
                self._push(self.now + trip, slot, LinkUp(other, True))
                self._push(self.now + 0.75 * trip, other, LinkUp(slot, False))
            case Close(other):
                self._push(self._arrival(slot, other, 0), other, LinkDown(slot))

    def _cut(self, slot: int, other: int) -> None:
        """A dial whose target died meanwhile."""
        self._push(self.now + 1.0, other, Unreached(slot))

    def _send(self, slot: int, other: int, message: CrowdMessage) -> None:
        size = size_of(message) + FRAME_BYTES
        self.figures.messages += 1
        self.sent_bytes[slot] += size
        if self.cores[other] is not None:
            self._push(self._arrival(slot, other, size), other, Heard(slot, message))

    def _arrival(self, slot: int, other: int, size: int) -> float:
        at = self.now + self._delay(slot, other) + size / LINE_BYTES_PER_S
        key = slot << ORDER_BITS | other
        at = max(at, self._arrives.get(key, 0.0))
        self._arrives[key] = at
        return at

    def _delay(self, slot: int, other: int) -> float:
        delay = self.line_s[slot] + self.line_s[other]
        draw = self._rng.random()
        if draw < self.plan.loss:
            delay += RETRANSMIT_S * (3.0 if draw < self.plan.loss**2 else 1.0)
        return delay

    def _push(self, at: float, slot: int, event: CrowdEvent) -> None:
        self._count += 1
        heapq.heappush(self._queue, (at, self._count, slot, event))


def play_crowd(
    plan: CrowdPlan, seed: int, tick: Callable[[float], None] = lambda _: None
) -> CrowdWorld:
    """The whole rehearsal: churn at random moments, a look at views now and then.

    Millions of objects live, none in a cycle: the collector of cycles pauses meanwhile.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _play(plan, seed, tick)
    finally:
        if collecting:
            gc.enable()


def _play(plan: CrowdPlan, seed: int, tick: Callable[[float], None]) -> CrowdWorld:
    world = CrowdWorld(plan, seed)
    world.begin()
    rng = random.Random(f"churn/{seed}")
    per_s = plan.peers * plan.churn_per_min / 60.0
    next_look, at = plan.young_s, rng.expovariate(per_s)
    while min(at, next_look) <= plan.seconds:
        if next_look <= at:
            world.run(next_look)
            world.look()
            tick(world.now / plan.seconds)
            next_look += plan.sample_s
            continue
        world.run(at)
        if rng.random() < 0.5:
            world.join()
        else:
            world.depart()
        at += rng.expovariate(per_s)
    world.run(plan.seconds)
    return world
