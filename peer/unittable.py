"""Which sequences of which unit are covered, given out and trained: bit masks by unit.

Units stand on one line by their position (`UnitPlan.position`). Below the *floor* every unit is
closed unless it is held here and says otherwise; from the floor on nothing is covered unless it is
held here. So memory grows with what is open, not with what was ever done.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from dugnad.averaging.formats import UnitPiece
from dugnad.peer.unitplan import UnitPlan

HELD_UNITS_MAX: Final = 65_536
"""Units of which anything is remembered, about 300 bytes each: a day of units of a second, for a
peer that nobody lists all day. Beyond it nothing is given out and foreign coverage is not noted."""
HELD_BITS_MAX: Final = 1 << 28
"""The same bound for runs with large units, in bits of a mask: 32 MB a mask."""
KEPT_BEHIND_UNITS: Final = 2048
"""Closed units whose masks are kept below the floor, so that a switch of lineage finds what I
trained: twice the largest window, far more than the four versions that a switch goes back."""
LAYERS_MAX: Final = 4
"""Times that one sequence may be listed in a lineage and still be told apart; more count as this
many."""


@dataclass(slots=True)
class UnitState:
    """Masks over the sequences of one unit.

    `layers[k]`: listed more than k times. `others`: listed by somebody else. `given`: handed to my
    learner, not trained yet. `trained`: by my learner. `tries`: learners that died over it here.
    """

    layers: list[int] = field(default_factory=list)
    others: int = 0
    given: int = 0
    trained: int = 0
    tries: int = 0

    @property
    def covered(self) -> int:
        """What is listed at all."""
        return self.layers[0] if self.layers else 0

    @property
    def twice(self) -> int:
        """How many sequences I trained that somebody else is listed for."""
        return (self.trained & self.others).bit_count()


class UnitTable:
    """The state of all units of a run, as one peer sees it. Bounded by HELD_UNITS_MAX."""

    __slots__ = ("_attempts", "_plan", "_reopened", "_states", "_twice", "floor", "held_max")

    def __init__(self, plan: UnitPlan, attempts: int) -> None:
        self._plan = plan
        self._attempts = attempts
        self._states: dict[int, UnitState] = {}
        self._reopened: set[int] = set()
        self._twice = 0  # of units that are forgotten
        self.floor = 0
        self.held_max = min(HELD_UNITS_MAX, HELD_BITS_MAX // plan.unit_sequences)

    def __len__(self) -> int:
        return len(self._states)

    def places(self, pieces: Iterable[UnitPiece]) -> Iterator[tuple[int, int]]:
        """Position and mask of the pieces that name something that exists."""
        for piece in pieces:
            if 0 <= piece.start < piece.stop and self._plan.has(
                piece.epoch, piece.index, piece.stop
            ):
                yield self._plan.position(piece.epoch, piece.index), mask(piece.start, piece.stop)

    def size(self, position: int) -> int:
        """Sequences in the unit at `position`."""
        return self._plan.size_of(*self._plan.unit(position))

    def all_of(self, position: int) -> int:
        """The mask of a whole unit."""
        return (1 << self.size(position)) - 1

    def covered(self, position: int) -> int:
        """The mask of what the lineage lists of a unit."""
        state = self._states.get(position)
        if state is not None:
            return state.covered
        return self.all_of(position) if position < self.floor else 0

    def free(self, position: int) -> int:
        """The mask of what my learner may be given: not listed, not given out, not trained by
        me."""
        state = self._states.get(position)
        if state is None:
            return 0 if position < self.floor else self.all_of(position)
        if state.tries >= self._attempts:
            return 0
        return self.all_of(position) & ~(state.covered | state.given | state.trained)

    def given(self, position: int) -> int:
        """The mask of what my learner has in hand."""
        state = self._states.get(position)
        return state.given if state is not None else 0

    def done(self, position: int) -> bool:
        """Whether all of a unit was trained here or is listed, and not all of it is listed."""
        state, whole = self._states.get(position), self.all_of(position)
        if state is None or state.covered == whole:
            return False
        return state.covered | state.trained == whole

    def closed(self, position: int) -> bool:
        """Whether nothing is left to do: all of it is listed, or this peer has tried often
        enough."""
        state = self._states.get(position)
        if state is None:
            return position < self.floor
        return state.tries >= self._attempts or state.covered == self.all_of(position)

    def held(self, position: int) -> UnitState | None:
        """What is remembered of a unit, if anything."""
        return self._states.get(position)

    def cover(self, position: int, bits: int, by_me: bool | None) -> None:
        """The lineage lists `bits` of a unit (once more); None: what I trained counts as mine."""
        state = self._state(position)
        if state is None:
            return
        if not by_me:
            state.others |= bits if by_me is False else bits & ~state.trained
        for layer, seen in enumerate(state.layers):
            state.layers[layer], bits = seen | bits, seen & bits
        if bits and len(state.layers) < LAYERS_MAX:
            state.layers.append(bits)
        self._sort(position)

    def uncover(self, position: int, bits: int) -> None:
        """The lineage no longer lists `bits` of a unit (once less)."""
        state = self._state(position)
        if state is None:
            return
        for layer in reversed(range(len(state.layers))):
            taken = state.layers[layer] & bits
            state.layers[layer] ^= taken
            bits ^= taken
        while state.layers and not state.layers[-1]:
            state.layers.pop()
        state.others &= state.covered
        self._sort(position)

    def give(self, position: int, bits: int) -> bool:
        """Note that my learner was given `bits`; False when the table is full."""
        state = self._state(position)
        if state is not None:
            state.given |= bits
        return state is not None

    def train(self, position: int, bits: int) -> None:
        """Note that my learner trained `bits`."""
        state = self._state(position)
        if state is None:
            return
        state.given &= ~bits
        state.trained |= bits

    def abandon(self, position: int, bits: int) -> None:
        """My learner died before it handed `bits` in. Only what it had not finished counts as a
        try."""
        state = self._states.get(position)
        if state is None:
            return
        if state.given & bits:
            state.tries += 1
        state.given &= ~bits
        state.trained &= ~bits
        self._sort(position)

    def advance(self) -> None:
        """Move the floor up over closed units and forget what is far below it."""
        start = self.floor
        while self.floor in self._states and self.closed(self.floor):
            self.floor += 1
        if self.floor == start:
            return
        edge = self.floor - KEPT_BEHIND_UNITS
        for position in [p for p in self._states if p < edge and p not in self._reopened]:
            self._twice += self._states.pop(position).twice

    def rise(self, floor: int) -> None:
        """Everything below `floor` is covered, says somebody who was here before us."""
        if floor <= self.floor:
            return
        self.floor = floor
        for position in [p for p in self._states if p < floor]:
            self._states[position].layers = [self.all_of(position)]
        self._reopened.clear()
        self.advance()

    def open_units(self, window: int) -> Iterator[int]:
        """Positions of open units: those reopened below the floor, then those of `window` from
        it."""
        for position in sorted(self._reopened):
            if not self.closed(position):
                yield position
        for position in range(self.floor, self.floor + window):
            if not self.closed(position):
                yield position

    def open_batches(self, size: int, limit: int) -> list[tuple[int, bool]]:
        """The first `limit` batches of `size` units, counted along the line of all units, of which
        any is open, ascending; and whether anything of one is listed."""
        first = self.floor // size
        below = {p // size for p in self._reopened if not self.closed(p)}
        found = [(batch, True) for batch in sorted(below) if batch < first][:limit]
        batch = first
        while len(found) < limit:
            units = range(batch * size, (batch + 1) * size)
            if not all(map(self.closed, units)):
                found.append((batch, any(map(self.covered, units))))
            batch += 1
        return found

    def given_up(self) -> int:
        """Units that this peer tried as often as the contract allows and that are not covered."""
        return sum(
            state.tries >= self._attempts and state.covered != self.all_of(position)
            for position, state in self._states.items()
        )

    def twice(self) -> int:
        """Sequences that I trained though somebody else is listed for them."""
        return self._twice + sum(state.twice for state in self._states.values())

    def covered_sequences(self, first: int, last: int) -> int:
        """Listed sequences of the units at the positions [first, last)."""
        below = min(self.floor, last)
        count = self._sequences_before(below) - self._sequences_before(min(first, below))
        for position, state in self._states.items():
            if first <= position < last:
                count += state.covered.bit_count()
                count -= self.size(position) if position < self.floor else 0
        return count

    def end(self) -> int:
        """One above the last position that anything is remembered of."""
        return max(self.floor, max(self._states, default=-1) + 1)

    def items(self) -> Iterator[tuple[int, UnitState]]:
        """All that is remembered, in no order."""
        yield from self._states.items()

    def _sequences_before(self, position: int) -> int:
        plan = self._plan
        epochs, units = divmod(position, plan.units_per_epoch)
        return epochs * plan.sequences + min(units * plan.unit_sequences, plan.sequences)

    def _state(self, position: int) -> UnitState | None:
        state = self._states.get(position)
        if state is None:
            if position >= self.floor + self.held_max or len(self._states) >= self.held_max:
                return None
            layers = [self.all_of(position)] if position < self.floor else []
            state = self._states[position] = UnitState(layers)
        return state

    def _sort(self, position: int) -> None:
        """Keep the set of units that are open below the floor."""
        if position < self.floor and not self.closed(position):
            self._reopened.add(position)
        else:
            self._reopened.discard(position)


def mask(start: int, stop: int) -> int:
    """The mask with the bits [start, stop) set."""
    return (1 << stop) - (1 << start)


def lowest(bits: int, count: int) -> int:
    """The lowest `count` ones of a mask."""
    if bits.bit_count() <= count:
        return bits
    kept = 0
    for _ in range(count):
        one = bits & -bits
        kept |= one
        bits ^= one
    return kept
