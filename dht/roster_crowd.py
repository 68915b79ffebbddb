"""The crowd: who is in a swarm of more than a full mesh. A pure core.

Each member keeps streams with a few others, drawn at random, and knows of everybody. A rumour (who
came, who is gone) goes over each of those streams once; news is collected for a *period*, short
where much happens. Neighbours watch each other: who is silent, or whose stream ended, is dialled
once more, and if that fails called gone. Whoever hears that of itself comes back with a higher
incarnation. What was missed all the same is
found by comparing a few members now and then (`Sync`).

Random graphs of this degree stay connected while far more than a few in a hundred vanish at once;
one link is exchanged now and then, so that a graph that fell apart grows together.

Peers are slots (`roster_rumours`); `now` is monotonic seconds. Rumours are not signed: an advert,
fetched where it is needed, proves that a peer is of this run.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

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
from dugnad.dht.roster_rumours import (
    ORDER_BITS,
    ORDER_MASK,
    RUMOURS_MAX,
    SLOTS_MAX,
    CrowdMessage,
    Full,
    Greet,
    Rumours,
    Sync,
    TablePart,
    rumour,
)

LINKS_MIN: Final = 3
"""Streams that a member sees to itself; with those it accepts about four. Each more costs half of
all rumours once again: with 4 the roster of a swarm in much motion passed 1 kB/s.
"""
LINKS_MAX: Final = 6
"""Streams that it accepts (DESIGN.md section 6)."""
BEAT_S: Final = 2.0
"""A neighbour hears from us at least so often."""
SILENCE_S: Final = 5.0
"""Two beats and a half: one may be late by a retransmission, two may not."""
REDIAL_S: Final = 1.0
"""For the last attempt to reach a neighbour before it is called gone."""
DIAL_S: Final = 5.0
DIALS_MAX: Final = 4
PERIOD_MIN_S: Final = 0.5
PERIOD_MAX_S: Final = BEAT_S
STALE_SHARE: Final = 0.003
"""News is collected for as long as this share of the members changes: a rumour takes two to three
periods to reach all, so views are about 1 % old at worst."""
CATCH_UP_S: Final = 10.0
"""On a new stream each side tells the news of so long: longer than a rumour takes to reach all."""
RECENT_MAX: Final = 512
"""Batches of news that are kept for that: 50 a second."""
QUEUE_MAX: Final = 4 * RUMOURS_MAX
"""Rumours that wait for one neighbour; the oldest go first, `Sync` finds them again."""
SYNC_S: Final = 20.0
SYNC_SIZE: Final = 32
"""Members to compare at once, about 1 kB: 60 B/s."""
SHUFFLE_S: Final = 120.0
RATE_S: Final = 20.0
"""Over this time the rate of rumours is averaged."""
DRAWS_MAX: Final = 64
GROW: Final = 1024


@dataclass(slots=True)
class _Link:
    """A stream with a neighbour."""

    outgoing: bool
    heard: float
    sent: float
    extra: bool = False  # accepted only to hand over the table
    greeted: bool = False
    queue: dict[int, int] = field(default_factory=dict)
    redial_until: float | None = None


class Crowd:
    """`handle` each event, perform the actions in order, `Tick` at `deadline`."""

    def __init__(self, me: int, incarnation: int, rng: random.Random) -> None:
        self.me = me
        self.deadline = 0.0
        self.links: dict[int, _Link] = {}
        self.has_table = False
        self._order = 2 * incarnation
        self._rng = rng
        self._view = array("I")
        self._count = 0
        self._dials: dict[int, float] = {}
        self._named: list[int] = []
        self._table_from: int | None = None
        self._recent: deque[tuple[float, tuple[int, ...]]] = deque(maxlen=RECENT_MAX)
        self._rate = 0.0
        self._rated_at = 0.0
        self._compared = 0
        self._sync_at = 0.0
        self._shuffle_at = 0.0
        self._shuffling = False
        self._left = False
        self._started = False
        self._out: list[CrowdAction] = []
        self._takes: dict[type, Callable[[int, _Link, CrowdMessage, float], None]] = {
            Greet: self._greet,
            TablePart: self._table_part,
            Sync: self._sync,
            Full: self._full,
        }

    # --- questions

    @property
    def orders(self) -> array[int]:
        """By slot: 0 unknown, even here, odd gone. Not to be changed."""
        return self._view

    @property
    def own_rumour(self) -> int:
        """What we say of ourselves."""
        return rumour(self.me, self._order)

    @property
    def count(self) -> int:
        """Live members in our view, without ourselves."""
        return self._count

    def here(self, slot: int) -> bool:
        """Whether a member is live in our view."""
        order = self._view[slot] if slot < len(self._view) else 0
        return order != 0 and not order & 1

    # --- events

    def adopt(self, table: array[int]) -> None:
        """Takes a whole table (`orders`, live members only) as known: of the mesh that grew too
        large, or of a former life.
        """
        self._view = table[:]
        if self.me < len(table):
            self._view[self.me] = 0
        self._count = len(table) - self._view.count(0)
        self.has_table = True

    def handle(self, event: CrowdEvent, now: float) -> list[CrowdAction]:
        """Takes one event; says what is to be done, in order."""
        out = self._out = []
        if not self._started:
            self._start(now)
        if self._left:
            return out
        kind = type(event)
        if kind is Heard:
            assert isinstance(event, Heard)
            link = self.links.get(event.slot)
            if link is not None:
                link.heard = now
                link.redial_until = None
                message = event.message
                if type(message) is Rumours:
                    if message.codes:
                        self._learn(message.codes, link, now)
                else:
                    self._takes[type(message)](event.slot, link, message, now)
        elif kind is Tick:
            self._tick(now)
        else:
            self._rarely(event, now)
        return out

    def _start(self, now: float) -> None:
        self._started = True
        self.deadline = now + self._rng.random() * PERIOD_MIN_S
        self._rated_at = now
        self._sync_at = now + SYNC_S * (1 + self._rng.random())
        self._compared = self._rng.randrange(SLOTS_MAX)
        self._shuffle_at = now + SHUFFLE_S * (0.5 + self._rng.random())

    def _rarely(self, event: CrowdEvent, now: float) -> None:
        match event:
            case LinkUp(slot, outgoing):
                self._dials.pop(slot, None)
                self._link_up(slot, outgoing, now)
            case LinkDown(slot):
                link = self.links.get(slot)
                if link is not None and not self.here(slot):
                    self._drop(slot)
                elif link is not None and link.redial_until is None:
                    self._redial(slot, link, now)
            case Unreached(slot):
                self._unreached(slot, now)
            case Named(slots):
                self._named = [slot for slot in slots if slot != self.me][:DRAWS_MAX]
                self._find(now)
            case Leave():
                gone = (rumour(self.me, self._order | 1),)
                for slot in self.links:
                    self._out += (Tell(slot, Rumours(gone)), Close(slot))
                self.links.clear()
                self._left = True
            case _:
                raise AssertionError("judged before")

    # --- streams

    def _link_up(self, slot: int, outgoing: bool, now: float) -> None:
        if slot in self.links:  # both dialled, or a redial that came through: the same neighbour
            link = self.links[slot]
            link.heard, link.redial_until = now, None
        else:
            extra = not outgoing and len(self.links) >= LINKS_MAX
            link = self.links[slot] = _Link(outgoing, now, now, extra)
        wants = not self.has_table and self._table_from is None
        if wants:
            self._table_from = slot
        self._out.append(Tell(slot, Greet(self._order, wants)))

    def _greet(self, slot: int, link: _Link, message: CrowdMessage, now: float) -> None:
        assert isinstance(message, Greet)
        self._learn((rumour(slot, message.order),), link, now)
        if message.wants_table:
            self._hand_over(slot)
        if link.extra:
            self._out += (Tell(slot, Full()), Close(slot))
            self._drop(slot)
        elif not link.greeted:
            link.greeted = True
            if not message.wants_table:
                for _, codes in self._recent:
                    link.queue.update((code >> ORDER_BITS, code) for code in codes)
            self._shuffled(slot)

    def _shuffled(self, newest: int) -> None:
        """After a shuffle one older link goes, if enough stay."""
        if not self._shuffling or len(self.links) <= LINKS_MIN:
            return
        self._shuffling = False
        oldest = next(slot for slot in self.links if slot != newest)
        self._out += (Tell(oldest, Full()), Close(oldest))
        self._drop(oldest)

    def _hand_over(self, slot: int) -> None:
        codes = [rumour(one, order) for one, order in enumerate(self._view) if order]
        codes = [code for code in codes if not code & 1]
        for first in range(0, max(1, len(codes)), RUMOURS_MAX):
            part = tuple(codes[first : first + RUMOURS_MAX])
            last = first + RUMOURS_MAX >= len(codes) and self.has_table
            self._out.append(Tell(slot, TablePart(part, last)))

    def _table_part(self, slot: int, link: _Link, message: CrowdMessage, now: float) -> None:
        assert isinstance(message, TablePart)
        self._learn(message.codes, link, now, spread=False)
        self.has_table = self.has_table or message.last

    def _full(self, slot: int, link: _Link, message: CrowdMessage, now: float) -> None:
        self._out.append(Close(slot))
        self._drop(slot)
        self._find(now)

    def _drop(self, slot: int) -> None:
        del self.links[slot]
        if self._table_from == slot:
            self._table_from = None

    def _redial(self, slot: int, link: _Link, now: float) -> None:
        link.redial_until = now + REDIAL_S
        self._out.append(Dial(slot, REDIAL_S))

    def _unreached(self, slot: int, now: float) -> None:
        was_dialled = self._dials.pop(slot, None) is not None
        link = self.links.get(slot)
        if link is not None and link.redial_until is not None:
            self._drop(slot)
            order = self._view[slot] if slot < len(self._view) else 0
            if self.here(slot):
                self._learn((rumour(slot, order | 1),), None, now)
        if slot in self._named:
            self._named.remove(slot)
        if was_dialled:
            self._find(now)

    def _find(self, now: float, wanted: int = LINKS_MIN) -> None:
        """Dials members at random until there are neighbours enough."""
        lacking = wanted - len(self.links) - len(self._dials)
        for _ in range(min(lacking, DIALS_MAX - len(self._dials))):
            slot = self._draw()
            if slot is None:
                return
            self._dials[slot] = now + DIAL_S
            self._out.append(Dial(slot, DIAL_S))

    def _draw(self) -> int | None:
        view, size = self._view, len(self._view)
        if self._count:
            for _ in range(DRAWS_MAX):
                slot = int(self._rng.random() * size)
                order = view[slot]
                if order and not order & 1 and slot not in self.links and slot not in self._dials:
                    return slot
        free = [slot for slot in self._named if slot not in self.links and slot not in self._dials]
        return free[int(self._rng.random() * len(free))] if free else None

    # --- rumours

    def _learn(
        self, codes: tuple[int, ...], link: _Link | None, now: float, *, spread: bool = True
    ) -> None:
        view, me = self._view, self.me
        queue = link.queue if link is not None else None
        fresh: dict[int, int] = {}
        for code in codes:
            slot, order = code >> ORDER_BITS, code & ORDER_MASK
            if slot >= len(view):
                if slot >= SLOTS_MAX:
                    continue
                view.frombytes(bytes(view.itemsize * (slot + GROW - len(view))))
            before = view[slot]
            if order > before:
                if slot == me:
                    self._about_me(order, now)
                    continue
                view[slot] = order
                was, is_here = before != 0 and not before & 1, not order & 1
                self._count += is_here - was
                fresh[slot] = code
            if queue and queue.get(slot, 0) <= code:
                queue.pop(slot, None)  # the neighbour knows
        if fresh:
            known = tuple(fresh.values())
            self._out.append(Changed(known))
            if spread:
                self._spread(fresh, known, link, now)

    def _spread(
        self, fresh: dict[int, int], codes: tuple[int, ...], source: _Link | None, now: float
    ) -> None:
        self._rate += len(codes) / RATE_S
        self._recent.append((now, codes))
        for other in self.links.values():
            if other is not source:
                other.queue.update(fresh)

    def _about_me(self, order: int, now: float) -> None:
        """Somebody calls us gone, or knows us from a former life: a higher incarnation is proof."""
        if order > self._order:
            self._order = (order | 1) + 1
            code = rumour(self.me, self._order)
            self._spread({self.me: code}, (code,), None, now)

    def _sync(self, slot: int, link: _Link, message: CrowdMessage, now: float) -> None:
        """A neighbour lists some members: we learn of those, it of what we know better."""
        assert isinstance(message, Sync)
        self._learn(message.codes, link, now)
        for code in message.codes:
            one, order = code >> ORDER_BITS, code & ORDER_MASK
            if one < len(self._view) and self._view[one] > order:
                link.queue[one] = rumour(one, self._view[one])

    # --- time

    def period(self) -> float:
        """How long news is collected."""
        wanted = STALE_SHARE * (self._count + 1) / max(self._rate, 1e-9)
        return min(PERIOD_MAX_S, max(PERIOD_MIN_S, wanted))

    def _tick(self, now: float) -> None:
        passed, self._rated_at = now - self._rated_at, now
        self._rate *= max(0.0, 1.0 - passed / RATE_S)
        while self._recent and self._recent[0][0] < now - CATCH_UP_S:
            self._recent.popleft()
        for slot, link in list(self.links.items()):
            if now - link.heard >= SILENCE_S and link.redial_until is None:
                self._redial(slot, link, now)
            elif link.redial_until is not None and link.redial_until + REDIAL_S <= now:
                self._unreached(slot, now)  # the dialler gave no answer
                continue
            if link.queue or now - link.sent >= BEAT_S - 0.01:
                self._flush(slot, link, now)
        for slot, until in list(self._dials.items()):
            if until + REDIAL_S <= now:
                del self._dials[slot]
        if len(self.links) < LINKS_MIN:
            self._find(now)
        if not self.has_table and self._table_from is None and self.links:
            self._table_from = next(iter(self.links))
            self._out.append(Tell(self._table_from, Greet(self._order, True)))
        if self.links and now >= self._sync_at:
            self._sync_at = now + SYNC_S
            self._compare()
        if now >= self._shuffle_at:
            self._shuffle_at = now + SHUFFLE_S
            self._shuffling = True
            self._find(now, len(self.links) + 1)
        self.deadline = now + self.period()

    def _flush(self, slot: int, link: _Link, now: float) -> None:
        link.sent = now
        queue = link.queue
        while len(queue) > QUEUE_MAX:
            del queue[next(iter(queue))]
        if len(queue) <= RUMOURS_MAX:
            self._out.append(Tell(slot, Rumours(tuple(queue.values()))))
            queue.clear()
            return
        first = tuple(queue.values())[:RUMOURS_MAX]
        for code in first:
            del queue[code >> ORDER_BITS]
        self._out.append(Tell(slot, Rumours(first)))

    def _compare(self) -> None:
        """Shows the next few members to one neighbour: against rumours that were missed."""
        size = len(self._view)
        codes: list[int] = []
        for _ in range(size):
            if len(codes) >= SYNC_SIZE:
                break
            self._compared = (self._compared + 1) % size
            order = self._view[self._compared]
            if order and not order & 1:
                codes.append(rumour(self._compared, order))
        slot = list(self.links)[int(self._rng.random() * len(self.links))]
        self._out.append(Tell(slot, Sync(tuple(codes))))
