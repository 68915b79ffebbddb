"""The crowd: who is in a swarm of more than a full mesh. A pure core.

Each member keeps streams with a few others, drawn at random, and knows of everybody. A rumour (who
came, who is gone) goes over each of those streams once. Neighbours watch each other; whoever hears
itself called gone comes back with a higher incarnation. What was missed all the same is found by
comparing some members (`Sync`). Random graphs of this degree stay connected while far more than a
few in a hundred vanish at once; one link is exchanged now and then. Peers are slots
(`roster_rumours`), `now` is monotonic seconds; whoever feeds rumours judges what they are worth.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

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
    Lost,
    Named,
    Parted,
    Tell,
    Tick,
    Unreached,
)
from dugnad.dht.roster_crowd_manner import (
    BEAT_S,
    DIAL_S,
    DIALS_MAX,
    DRAWS_MAX,
    HASTE_S,
    LINKS_MAX,
    LINKS_MIN,
    PERIOD_MAX_S,
    PERIOD_MIN_S,
    QUEUE_MAX,
    REDIAL_S,
    SHUFFLE_S,
    SILENCE_S,
    SYNC_S,
    SYNC_SIZE,
    THIN_S,
    USUAL,
    Link,
    Manner,
)
from dugnad.dht.roster_news import News
from dugnad.dht.roster_orders import Orders
from dugnad.dht.roster_rumours import (
    ORDER_BITS,
    ORDER_MASK,
    RUMOURS_MAX,
    SLOTS_MAX,
    CrowdMessage,
    Full,
    Greet,
    Rumours,
    Spare,
    Sync,
    TablePart,
    rumour,
)

__all__ = [
    "BEAT_S",
    "LINKS_MAX",
    "LINKS_MIN",
    "PERIOD_MAX_S",
    "PERIOD_MIN_S",
    "QUEUE_MAX",
    "REDIAL_S",
    "SHUFFLE_S",
    "SILENCE_S",
    "SYNC_S",
    "Crowd",
    "Manner",
]


class Crowd:
    """`handle` each event, perform the actions in order, `Tick` at `deadline`."""

    def __init__(
        self, me: int, incarnation: int, rng: random.Random, manner: Manner = USUAL
    ) -> None:
        self.me = me
        self.manner = manner
        self.deadline = 0.0
        self.links: dict[int, Link] = {}
        self.has_table = False
        self.roomy = False
        """Whether any number of streams is welcome: the crowd is about to be a mesh again."""
        self.shut: set[int] = set()
        """Members that nobody can dial."""
        self._order = 2 * incarnation
        self._rng = rng
        self._view = Orders()
        self._dials: dict[int, float] = {}
        self._named: list[int] = []
        self._table_from: int | None = None
        self._news = News()
        self._sync_at = 0.0
        self._shuffle_at = 0.0
        self._shuffling = False
        self._thin_at = 0.0
        self._left = False
        self._started = False
        self._out: list[CrowdAction] = []
        self._takes: dict[type, Callable[[int, Link, CrowdMessage, float], None]] = {
            Greet: self._greet,
            TablePart: self._table_part,
            Sync: self._sync,
            Full: self._full,
            Spare: self._spare,
        }

    # --- questions

    def order_of(self, slot: int) -> int:
        """What is known of a member: 0 nothing, even here, odd gone."""
        return self._view.of(slot)

    @property
    def orders(self) -> array[int]:
        """By slot: 0 unknown, even here, odd gone. Not to be changed."""
        return self._view.table

    @property
    def own_rumour(self) -> int:
        """What we say of ourselves."""
        return rumour(self.me, self._order)

    @property
    def count(self) -> int:
        """Live members in our view, without ourselves."""
        return self._view.count

    def here(self, slot: int) -> bool:
        """Whether a member is live in our view."""
        return self._view.here(slot)

    # --- events

    def restate(self, order: int, now: float) -> None:
        """We speak of ourselves anew, with a higher incarnation: everybody is to hear of it."""
        self._order = order
        self._spread({self.me: self.own_rumour}, (self.own_rumour,), None, now)

    def show(self, slot: int, others: tuple[int, ...]) -> None:
        """Tells a neighbour, with what is next sent to it, how these members are."""
        link = self.links[slot]
        for other in others:
            order = self._order if other == self.me else self.order_of(other)
            link.queue[other] = rumour(other, order)

    def ask_table(self, slot: int) -> CrowdAction:
        """What to tell a neighbour from whom we want the table (again)."""
        self._table_from = slot
        return Tell(slot, Greet(self._order, True))

    def hasten(self, now: float) -> None:
        """Dials somebody soon, to see: where one is gone, others may be."""
        self._shuffle_at = min(self._shuffle_at, now + HASTE_S * self._rng.random())

    def forget(self, slot: int) -> None:
        """Nothing is known of this member any more."""
        self._view.forget(slot)
        self.shut.discard(slot)
        for link in self.links.values():
            link.queue.pop(slot, None)

    def adopt(self, table: array[int]) -> None:
        """Takes a whole table (`orders`, live members only) as known: of the mesh that grew too
        large, or of a former life.
        """
        self._view.take(table, self.me)
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
        self.deadline = now + self._rng.random() * self.manner.period_min_s
        self._news.start(now)
        self._thin_at = now + THIN_S
        self._sync_at = now + self.manner.sync_s * (1 + self._rng.random())
        self._view.show_from(self._rng.randrange(SLOTS_MAX))
        self._shuffle_at = now + self.manner.shuffle_s * (0.5 + self._rng.random())

    def _rarely(self, event: CrowdEvent, now: float) -> None:
        match event:
            case LinkUp(slot, outgoing, kept):
                self._dials.pop(slot, None)
                self._link_up(slot, outgoing, kept, now)
            case Lost(slot):
                if slot in self.links:
                    self._drop(slot)
                self.accuse(slot, now)
            case Parted(slot):
                self._part(slot, now)
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

    def _link_up(self, slot: int, outgoing: bool, kept: bool, now: float) -> None:
        if slot in self.links:  # both dialled, or a redial that came through: the same neighbour
            link = self.links[slot]
            link.heard, link.redial_until, link.greeted = now, None, False
        else:
            extra = not outgoing and len(self.links) >= self.manner.links_max
            extra = extra and self.manner.watches  # else they go when they can: `_thin`
            mine = outgoing and not kept
            link = self.links[slot] = Link(outgoing, now, now, extra, mine)
        wants = not self.has_table and self._table_from is None
        if wants:
            self._table_from = slot
        self._out.append(Tell(slot, Greet(self._order, wants)))

    def _greet(self, slot: int, link: Link, message: CrowdMessage, now: float) -> None:
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
                link.queue.update((code >> ORDER_BITS, code) for code in self._news.recent())
                if self.manner.greet_size:
                    self._compare(slot, self.manner.greet_size)
            self._shuffled(slot)

    def _shuffled(self, newest: int) -> None:
        """After a shuffle one older link goes, if enough stay."""
        if not self._shuffling or len(self.links) <= self.manner.links_min:
            return
        self._shuffling = False
        oldest = next(slot for slot in self.links if slot != newest)
        self._out += (Tell(oldest, Full()), Close(oldest))
        self._drop(oldest)

    def _hand_over(self, slot: int) -> None:
        codes = self._view.live()
        for first in range(0, max(1, len(codes)), RUMOURS_MAX):
            part = tuple(codes[first : first + RUMOURS_MAX])
            last = first + RUMOURS_MAX >= len(codes) and self.has_table
            self._out.append(Tell(slot, TablePart(part, last)))

    def _table_part(self, slot: int, link: Link, message: CrowdMessage, now: float) -> None:
        assert isinstance(message, TablePart)
        self._learn(message.codes, link, now, spread=False)
        self._better(link, message.codes)
        self.has_table = self.has_table or message.last

    def _full(self, slot: int, link: Link, message: CrowdMessage, now: float) -> None:
        self._out.append(Close(slot))
        self._part(slot, now)

    def _part(self, slot: int, now: float) -> None:
        if slot in self.links:
            self._drop(slot)
            self._find(now)

    def _spare(self, slot: int, link: Link, message: CrowdMessage, now: float) -> None:
        if link.mine or self.roomy:
            return
        if len(self.links) > self.manner.links_min:
            self._out += (Tell(slot, Full()), Close(slot))
            self._drop(slot)
        else:
            self._find(now, len(self.links) + 1)

    def _thin(self, now: float) -> None:
        """Of too many streams some are chosen; of each other one its other end decides."""
        self._thin_at = now + THIN_S
        links, least = self.links, self.manner.links_min
        if self.roomy or len(links) <= self.manner.links_max:
            return
        mine = [slot for slot, link in links.items() if link.mine]
        rest = [slot for slot, link in links.items() if not link.mine]
        self._rng.shuffle(rest)
        wanted = max(0, least - len(mine))
        for slot in rest[:wanted]:
            links[slot].mine = True
        for slot in mine[least:]:
            links[slot].mine = False
        self._out += [Tell(slot, Spare()) for slot in (*mine[least:], *rest[wanted:])]

    def _drop(self, slot: int) -> None:
        del self.links[slot]
        if self._table_from == slot:
            self._table_from = None

    def _redial(self, slot: int, link: Link, now: float) -> None:
        link.redial_until = now + REDIAL_S
        self._out.append(Dial(slot, REDIAL_S))

    def _unreached(self, slot: int, now: float) -> None:
        was_dialled = self._dials.pop(slot, None) is not None
        link = self.links.get(slot)
        if link is not None and link.redial_until is not None:
            self._drop(slot)
            self.accuse(slot, now)
        if slot in self._named:
            self._named.remove(slot)
        if was_dialled:
            self._find(now)

    def accuse(self, slot: int, now: float) -> None:
        """Calls a live member gone."""
        if self.here(slot):
            self._learn((rumour(slot, self._view.of(slot) | 1),), None, now)

    def _find(self, now: float, wanted: int = 0) -> None:
        """Dials members at random until there are neighbours enough."""
        wanted = wanted or self.manner.links_min
        lacking = wanted - len(self.links) - len(self._dials)
        for _ in range(min(lacking, DIALS_MAX - len(self._dials))):
            slot = self._draw()
            if slot is None:
                return
            self._dials[slot] = now + DIAL_S
            self._out.append(Dial(slot, DIAL_S))

    def _draw(self) -> int | None:
        view, size = self._view.table, len(self._view.table)
        if self._view.count:
            for _ in range(DRAWS_MAX):
                slot = int(self._rng.random() * size)
                order = view[slot]
                if not order or order & 1 or slot in self.shut:
                    continue
                if slot not in self.links and slot not in self._dials:
                    return slot
        free = [slot for slot in self._named if slot not in self.links and slot not in self._dials]
        return free[int(self._rng.random() * len(free))] if free else None

    # --- rumours

    def _learn(
        self, codes: tuple[int, ...], link: Link | None, now: float, *, spread: bool = True
    ) -> None:
        view, me = self._view.table, self.me
        queue = link.queue if link is not None else None
        fresh: dict[int, int] = {}
        for code in codes:
            slot, order = code >> ORDER_BITS, code & ORDER_MASK
            if slot >= len(view):
                if slot >= SLOTS_MAX:
                    continue
                self._view.reach(slot)
            before = view[slot]
            if order > before:
                if slot == me:
                    self._about_me(order, now)
                    continue
                view[slot] = order
                was, is_here = before != 0 and not before & 1, not order & 1
                self._view.count += is_here - was
                fresh[slot] = code
            if queue and (held := queue.get(slot)) is not None and held <= code:
                del queue[slot]  # the neighbour knows
        if fresh:
            known = tuple(fresh.values())
            self._out.append(Changed(known))
            if spread:
                self._spread(fresh, known, link, now)

    def _spread(
        self, fresh: dict[int, int], codes: tuple[int, ...], source: Link | None, now: float
    ) -> None:
        self._news.add(codes, now)
        for other in self.links.values():
            if other is not source:
                other.queue.update(fresh)

    def _about_me(self, order: int, now: float) -> None:
        """Somebody calls us gone, or knows us from a former life: a higher incarnation is proof."""
        if order > self._order:
            self._order = (order | 1) + 1
            code = rumour(self.me, self._order)
            self._spread({self.me: code}, (code,), None, now)

    def _sync(self, slot: int, link: Link, message: CrowdMessage, now: float) -> None:
        """A neighbour lists some members: we learn of those, it of what we know better."""
        assert isinstance(message, Sync)
        self._learn(message.codes, link, now)
        self._better(link, message.codes)

    def _better(self, link: Link, codes: tuple[int, ...]) -> None:
        for code in codes:
            one, order = code >> ORDER_BITS, code & ORDER_MASK
            if self._view.of(one) > order:
                link.queue[one] = rumour(one, self._view.of(one))

    # --- time

    def period(self) -> float:
        """How long news is collected."""
        return self._news.period(self._view.count + 1, self.manner)

    def _tick(self, now: float) -> None:
        self._news.tick(now)
        watches = self.manner.watches
        for slot, link in list(self.links.items()):
            if watches and now - link.heard >= SILENCE_S and link.redial_until is None:
                self._redial(slot, link, now)
            elif link.redial_until is not None and link.redial_until + REDIAL_S <= now:
                self._unreached(slot, now)  # the dialler gave no answer
                continue
            if link.queue or (watches and now - link.sent >= BEAT_S - 0.01):
                self._flush(slot, link, now)
        for slot, until in list(self._dials.items()):
            if until + REDIAL_S <= now:
                del self._dials[slot]
        if len(self.links) < self.manner.links_min:
            self._find(now)
        if now >= self._thin_at:
            self._thin(now)
        if not self.has_table and self._table_from is None and self.links:
            self._table_from = next(iter(self.links))
            self._out.append(Tell(self._table_from, Greet(self._order, True)))
        if self.links and now >= self._sync_at:
            self._sync_at = now + self.manner.sync_s
            self._compare(list(self.links)[int(self._rng.random() * len(self.links))], SYNC_SIZE)
        if now >= self._shuffle_at:
            self._shuffle_at = now + self.manner.shuffle_s
            self._shuffling = True
            self._find(now, len(self.links) + 1)
        self.deadline = now + self.period()

    def _flush(self, slot: int, link: Link, now: float) -> None:
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

    def _compare(self, slot: int, limit: int) -> None:
        """Shows the next few members to one neighbour: against rumours that were missed."""
        self._out.append(Tell(slot, Sync(self._view.shown(limit))))
