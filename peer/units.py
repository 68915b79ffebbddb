"""Which work this peer does next: a core without clock, network or chance.

Units stand on one line, epoch after epoch. A *window* of them is open, from the oldest that the
chosen lineage does not list in full. Who does which is computed by everybody from the same members
(`rendezvous`), so nothing is negotiated; a peer speaks only when it takes a unit out of order.

A peer is given, first to last: its open units, its own and those inherited from a lost peer, oldest
first; if it has none, other peers' units that are overdue (with a `Claim`); its own beyond the
window; and if there are none either, the youngest open units of others (with a `Claim`). What it
inherited goes not before older units of its own: after a mass departure that is a window and more,
and the oldest open unit waited for all of it. It also claims units of its own that it begins so
late that others might take them. It is never given a sequence that is listed, that it trained, or
that it was given before, unless its learner died over it (`Abandoned`).

A unit that passes from one peer to another, both of them there, may be half done: it rests for
MOVED_INTERVALS, unless it is listed first. So do all open ones for whoever was away or is new.
Known weakness: a lost peer's last contribution may still be in flight and be listed later; its
units are then trained twice (`UnitsStatus.twice_sequences` counts what of that was mine).
"""

import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Final, assert_never

from dugnad.averaging.coverage import EPOCHS_AHEAD_MAX, mask_pieces
from dugnad.averaging.formats import UnitPiece
from dugnad.averaging.speed import class_weight
from dugnad.dht.ids import PeerId
from dugnad.peer.contract import Capabilities, Contract, can_take
from dugnad.peer.rendezvous import PARTICIPANTS_MAX, Ownership, Participant, owner
from dugnad.peer.unitclaims import ClaimTable, Hold
from dugnad.peer.unitevents import (
    Abandoned,
    Action,
    Adopted,
    Claim,
    Claimed,
    Covered,
    Event,
    Interval,
    OpenUnit,
    Participants,
    PeerBack,
    PeerLost,
    Returned,
    SwarmSpeed,
    TookOver,
    Trained,
    Uncovered,
    UnitsStatus,
    WasAway,
    WorkItem,
)
from dugnad.peer.unitlag import ListingLag
from dugnad.peer.unitplan import Unit, UnitPlan
from dugnad.peer.unitreport import Sight, status_of
from dugnad.peer.unittable import UnitTable, lowest

__all__ = [
    "Abandoned",
    "Action",
    "Adopted",
    "Capabilities",
    "Claim",
    "Claimed",
    "Contract",
    "Covered",
    "Event",
    "Interval",
    "OpenUnit",
    "Participant",
    "Participants",
    "PeerBack",
    "PeerLost",
    "Returned",
    "SwarmSpeed",
    "TookOver",
    "Trained",
    "Uncovered",
    "Unit",
    "UnitPlan",
    "Units",
    "UnitsStatus",
    "WasAway",
    "WorkItem",
    "can_take",
    "owner",
]

WINDOW_INTERVALS: Final = 6.0
"""The window holds what the swarm does in this many merge intervals. Work is listed one to two
intervals after it was trained, so a peer that was given less than its share still has three to
spare."""
OVERDUE_INTERVALS: Final = 3.0
"""Others may take a unit this many intervals after it should have been listed: twice the usual
delay."""
LAG_INTERVALS: Final = 2.0
"""Work is listed within so many intervals at the most, where nothing is slow."""
MOVED_INTERVALS: Final = 4.0
"""A unit that another may have begun is left alone so long: what it had trained is listed by then.
Without it each change of a speed class had work done twice (benchmarks/coverage.py)."""
CLAIM_INTERVALS: Final = 6.0
"""A claim holds this long; whoever claimed a unit and did not get it listed loses it again."""
WINDOW_UNITS_PER_PEER: Final = 2
"""The window has at least this many units for each participant, whatever speeds are known."""
WINDOW_UNITS_MIN: Final = 8
WINDOW_UNITS_MAX: Final = 1024
"""Bound of the window: 1024 units are ten milliseconds of looking through, and a thousand peers'
work."""
AHEAD_UNITS_MAX: Final = 16_384
"""How far beyond the floor a peer with nothing else to do looks for units of its own."""
AHEAD_EPOCHS_MAX: Final = EPOCHS_AHEAD_MAX // 2
"""Nor further than half of the epochs beyond the oldest unfinished one for which credit is given:
others may see an older one than I do."""
OWNERS_COMPUTED_MAX: Final = 64
"""Owners computed anew in one look that could as well go on later: 64 of 64 take about 8 ms."""
DRAWS_MAX: Final = 64 * OWNERS_COMPUTED_MAX
"""Draws of participants for units whenever the shares change, as many as that."""
OVERDUE_UNITS_MAX: Final = 32
"""Overdue units weighed at one time, the oldest ones."""
WANTED_MAX: Final = 65_536
"""Sequences given out in one answer."""
INTERVAL_DEFAULT_S: Final = 16.0
"""The merge interval before any was measured (the figure of DESIGN.md's examples)."""


class Units:
    """What this peer is to train, of all that is open. Peers that were told the same share the work
    without overlap; peers that differ for a moment overlap in the units that differ."""

    def __init__(
        self, me: PeerId, plan: UnitPlan, contract: Contract, *, sequence_tokens: int
    ) -> None:
        self._me = me
        self._plan = plan
        self._contract = contract
        self._sequence_tokens = sequence_tokens
        self._table = UnitTable(plan, contract.attempts)
        self._ownership = Ownership(plan.seed)
        self._classes: dict[PeerId, int] = {}
        self._lost: dict[PeerId, None] = {}
        self._vanished: dict[PeerId, None] = {}
        self._claims = ClaimTable(self._vanished, self._table.closed)
        self._rest: dict[int, float] = {}
        self._inherited: dict[int, None] = {}
        self._due: dict[int, float] = {}
        self._opened_to = 0
        self._merge_s = INTERVAL_DEFAULT_S
        self._lag = ListingLag()
        self._tokens_per_s = 0.0
        self._ahead_from = 0

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take note of an event; returns what the shell is to do. `now` is in monotonic seconds."""
        match event:
            case Participants():
                self._participants(event, now)
            case PeerLost():
                return self._peer_lost(event, now)
            case PeerBack(peer):
                self._lost.pop(peer, None)
                self._vanished.pop(peer, None)
                self._share(now)
            case WasAway(ago_s):
                self._open_window(now)
                self._move(self._opened(), now - ago_s)
            case Interval(seconds):
                self._merge_s = seconds if seconds > 0.0 else self._merge_s
            case SwarmSpeed(tokens_per_s):
                self._tokens_per_s = tokens_per_s if tokens_per_s > 0.0 else self._tokens_per_s
            case Claimed(peer, units):
                self._claimed(peer, units, now)
            case Trained(piece):
                self._trained((piece,), now)
            case Returned(pieces):
                self._trained(pieces, now)
            case Abandoned(pieces):
                self._ahead_from = 0
                for position, bits in self._table.places(pieces):
                    self._table.abandon(position, bits)
            case Covered() | Uncovered() | Adopted():
                self._listed(event, now)
            case _:
                assert_never(event)
        return []

    def next_work(self, sequences_wanted: int, now: float) -> tuple[list[WorkItem], list[Action]]:
        """Work for my learner, about as many sequences as wanted, and what has to be said about it.

        May return fewer while there is more: a request is served from the first kind of work that
        there is (see the module), so that nothing is claimed while something of my own is left.
        Units that may not be split are given whole. Nothing at all comes back only when everything
        within bounds is listed or in hand.
        """
        self._open_window(now)
        wanted = min(sequences_wanted, WANTED_MAX)
        if wanted <= 0:
            return [], []
        for units, claim in (
            (self._own_open(now), False),
            (self._overdue(now), True),
            (self._own_ahead(), False),
            (self._youngest(now), True),
        ):
            items, positions = self._give(units, wanted)
            if items:
                return items, self._claim(positions if claim else self._late(positions, now), now)
        return [], []

    def outstanding(self) -> tuple[UnitPiece, ...]:
        """What my learner was given and has not trained, ascending: lost when it dies."""
        given = sorted((p, s.given) for p, s in self._table.items() if s.given)
        return tuple(piece for position, bits in given for piece in self._pieces(position, bits))

    @property
    def held(self) -> int:
        """Units that memory is kept for."""
        return len(self._table)

    def unlisted(self) -> tuple[Unit, ...]:
        """Units that my learner trained to the end and nobody lists yet, ascending."""
        done = sorted(p for p, s in self._table.items() if s.trained and self._table.done(p))
        return tuple(self._plan.unit(position) for position in done)

    def owner_of(self, unit: Unit) -> PeerId | None:
        """Who is to do a unit as far as I know, claims aside; None when nobody takes part."""
        return self._ownership.owner(*unit)

    def status(self, now: float) -> UnitsStatus:
        """Counts for people; see `UnitsStatus`."""
        return status_of(self.sight(now))

    def sight(self, now: float) -> Sight:
        """What I see of the work, for `unitreport`."""
        self._open_window(now)
        rows = (self._table, self._claims, self._owner, self._due, list(self._opened()))
        return Sight(self._me, now, self._plan, *rows)

    # --- who takes part -----------------------------------------------------------------------

    def _participants(self, event: Participants, now: float) -> None:
        if (classes := event.classes(PARTICIPANTS_MAX)) != self._classes:
            self._classes = classes
            self._share(now)

    def _share(self, now: float) -> None:
        """Compute anew who has which unit. What was inherited and is not mine any more is let
        go."""
        self._open_window(now)
        before = {p: self._owner(p) for p in self._opened() if self._known_owner(p)}
        weights = {p: class_weight(c) for p, c in self._classes.items() if p not in self._lost}
        self._ownership.change(weights)
        self._ahead_from = 0
        for position in [p for p in self._inherited if not self._owned(p)]:
            del self._inherited[position]
        moved, drawn = [], 0
        for position, was in before.items():
            drawn += 0 if self._known_owner(position) else len(weights)
            if drawn > DRAWS_MAX:
                break
            if was in weights and self._owner(position) != was:
                moved.append(position)
        self._move(moved, now)

    def _known_owner(self, position: int) -> bool:
        return self._ownership.known(*self._plan.unit(position))

    def _move(self, positions: Iterable[int], since: float) -> None:
        """Units pass from one that is there to another: they are due later, and rest till then."""
        until = since + MOVED_INTERVALS * self._interval_s
        for position in positions:
            self._due[position] = max(self._due.get(position, until), until)
            self._rest[position] = until

    def _rests(self, position: int, now: float) -> bool:
        return now < self._rest.get(position, now)

    def _peer_lost(self, event: PeerLost, now: float) -> list[Action]:
        lost = event.peer
        if lost == self._me:
            return []
        self._open_window(now)
        held = [p for p in self._opened() if self._holder(p, now) == lost]
        for gone in (self._lost,) if event.left else (self._lost, self._vanished):
            gone[lost] = None
            while len(gone) > PARTICIPANTS_MAX:
                del gone[next(iter(gone))]
        self._share(now)
        for position in held:  # whoever has it now is given the usual time before it is overdue
            self._due[position] = max(self._due.get(position, now), now)
        mine = [p for p in held if self._mine(p, now)]
        self._inherited.update(dict.fromkeys(mine))
        if not mine:
            return []
        return [TookOver(lost, tuple(self._plan.unit(p) for p in mine))]

    def _owner(self, position: int) -> PeerId | None:
        return self._ownership.owner(*self._plan.unit(position))

    def _holder(self, position: int, now: float) -> PeerId | None:
        """Who is to do a unit: whoever claimed it, else its owner."""
        return self._claims.holder(position, now) or self._owner(position)

    def _mine(self, position: int, now: float) -> bool:
        holder = self._holder(position, now)
        return holder == self._me or holder is None

    def _owned(self, position: int) -> bool:
        return self._owner(position) in (self._me, None)

    # --- what is listed and trained -----------------------------------------------------------

    @property
    def _interval_s(self) -> float:
        """The merge interval, or longer where listing takes more of them than usual."""
        return max(self._merge_s, self._lag.seconds / LAG_INTERVALS)

    def _trained(self, pieces: Iterable[UnitPiece], now: float) -> None:
        for position, bits in self._table.places(pieces):
            self._table.train(position, bits)
            self._lag.trained(position, now)

    def _listed(self, event: Covered | Uncovered | Adopted, now: float) -> None:
        if isinstance(event, Adopted):
            self._table.rise(max(event.epochs_done, 0) * self._plan.units_per_epoch)
        for position, bits in self._table.places(event.pieces):
            match event:
                case Covered(maker=maker):
                    self._lag.listed(position, now)
                    self._table.cover(position, bits, None if maker is None else maker == self._me)
                case Adopted():
                    self._table.cover(position, bits & ~self._table.covered(position), None)
                case Uncovered():
                    self._table.uncover(position, bits)
                    if position < self._opened_to:
                        self._due.setdefault(position, now)
        self._table.advance()
        floor = self._table.floor
        self._claims.forget_below(floor)
        for table in (self._due, self._inherited, self._rest):
            for position in [p for p in table if p < floor and self._table.closed(p)]:
                del table[position]

    # --- the window ---------------------------------------------------------------------------

    def _window(self) -> int:
        """Units in the window."""
        sequences = WINDOW_INTERVALS * self._interval_s * self._tokens_per_s / self._sequence_tokens
        units = min(sequences / self._plan.unit_sequences, WINDOW_UNITS_MAX)
        least = max(WINDOW_UNITS_MIN, WINDOW_UNITS_PER_PEER * len(self._classes))
        return min(max(math.ceil(units), least), WINDOW_UNITS_MAX)

    def _opened(self) -> Iterator[int]:
        """Open units of the window, ascending."""
        return self._table.open_units(self._window())

    def _open_window(self, now: float) -> None:
        """Note for units that enter the window when they are due: when the swarm will have come so
        far."""
        floor = self._table.floor
        stop = floor + self._window()
        unit_tokens = self._plan.unit_sequences * self._sequence_tokens
        unit_s = unit_tokens / self._tokens_per_s if self._tokens_per_s else 0.0
        for position in range(max(self._opened_to, floor), stop):
            self._due[position] = now + (position - floor) * unit_s
        self._opened_to = max(self._opened_to, stop)

    def _own_open(self, now: float) -> Iterator[int]:
        """My open units, oldest first, then inherited ones beyond the window. Once there is one,
        computes few owners more."""
        found, computed = False, 0
        for position in self._opened():
            computed += not self._known_owner(position)
            if found and computed > OWNERS_COMPUTED_MAX:
                break
            if self._rests(position, now) and position not in self._inherited:
                continue
            if self._mine(position, now):
                found = True
                yield position
        yield from sorted(p for p in self._inherited if self._mine(p, now))

    def _overdue(self, now: float) -> Iterator[int]:
        """Overdue units of others: first those whose next owner I would be. Everybody else leaves
        them to me for one more interval, so that two seldom take the same."""
        mine = now - OVERDUE_INTERVALS * self._interval_s
        anyones = mine - self._interval_s
        inherits: list[int] = []
        others: list[int] = []
        for position in self._opened():
            if len(inherits) + len(others) == OVERDUE_UNITS_MAX:
                break
            due = self._due.get(position, now)
            kept = self._claims.holder(position, now) is not None or self._rests(position, now)
            if kept or due >= mine or not self._table.free(position):
                continue
            if self._ownership.heir(*self._plan.unit(position)) == self._me:
                inherits.append(position)
            elif due < anyones:
                others.append(position)
        yield from self._claimable(inherits + others, now)

    def _own_ahead(self) -> Iterator[int]:
        """My own units beyond the window, as far as one look may go; the next look goes on
        there."""
        floor = self._table.floor
        start = max(floor + self._window(), self._ahead_from)
        units = min(AHEAD_UNITS_MAX, AHEAD_EPOCHS_MAX * self._plan.units_per_epoch)
        computed = 0
        for position in range(start, floor + min(units, self._table.held_max)):
            self._ahead_from = position
            computed += not self._known_owner(position)
            if computed > OWNERS_COMPUTED_MAX:
                return
            if position not in self._claims and self._owned(position):
                yield position

    def _youngest(self, now: float) -> Iterator[int]:
        """Open units of others, from the one that its owner will come to last."""
        units = list(self._opened())
        yield from self._claimable(
            (p for p in reversed(units) if self._holder(p, now) == self._owner(p)), now
        )

    def _claimable(self, positions: Iterable[int], now: float) -> Iterator[int]:
        """As many as I may still claim."""
        left = self._claims.room(self._me, now)
        for position in positions:
            if left <= 0:
                return
            if self._table.free(position):
                left -= 1
                yield position

    # --- giving and claiming ------------------------------------------------------------------

    def _give(self, units: Iterator[int], wanted: int) -> tuple[list[WorkItem], list[int]]:
        items: list[WorkItem] = []
        positions: list[int] = []
        for position in units:
            bits = self._table.free(position)
            if self._contract.splittable:
                bits = lowest(bits, wanted)
            if not bits or not self._table.give(position, bits):
                continue
            wanted -= bits.bit_count()
            items += self._items(position, bits)
            positions.append(position)
            if wanted <= 0:
                break
        return items, positions

    def _items(self, position: int, bits: int) -> Iterator[WorkItem]:
        unit = self._plan.unit(position)
        sequences = self._plan.sequences_of(*unit)
        for piece in self._pieces(position, bits):
            chosen = tuple(sequences[piece.start : piece.stop])
            yield WorkItem(*unit, piece.start, piece.stop, chosen)

    def _pieces(self, position: int, bits: int) -> Iterator[UnitPiece]:
        unit = self._plan.unit(position)
        yield from mask_pieces(*unit, bits)

    def _late(self, positions: list[int], now: float) -> list[int]:
        """Units of my own that others will soon be free to take, as many as I may claim: they have
        to hear that I have begun, or the work of a peer that fell behind would all be done
        twice."""
        if len(self._ownership.participants) < 2:
            return []
        limit = now - (OVERDUE_INTERVALS - 1.0) * self._interval_s
        late = [p for p in positions if self._due.get(p, now) < limit and p not in self._claims]
        return late[: self._claims.room_late(self._me, now)]

    def _claim(self, positions: list[int], now: float) -> list[Action]:
        if not positions:
            return []
        self._claims.take(positions, Hold(self._me, now + CLAIM_INTERVALS * self._interval_s))
        return [Claim(tuple(self._plan.unit(p) for p in positions))]

    def _claimed(self, peer: PeerId, units: tuple[Unit, ...], now: float) -> None:
        """Respect a claim on an open unit. Of two claims the better placed one holds, for everybody
        the same; a peer whose claim ran out cannot claim that unit again."""
        self._open_window(now)
        if peer == self._me or peer not in self._classes:
            return
        left = self._claims.room_of(peer, now)
        hold = Hold(peer, now + CLAIM_INTERVALS * self._interval_s)
        for unit in units[:left]:
            if left <= 0 or not self._plan.has(*unit, 1):
                return
            position = self._plan.position(*unit)
            if self._table.closed(position) or position not in self._due:
                continue
            first_of = partial(self._first_of, unit)
            left -= self._claims.respect(position, hold, now, first_of)

    def _first_of(self, unit: Unit, one: PeerId, other: PeerId) -> bool:
        return self._ownership.first_of(*unit, [one, other]) == one
