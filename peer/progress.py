"""What the learner has trained and not handed in yet, for each fragment: steps and unit pieces.

A step is part of the next contribution of every fragment, so each fragment has its own place in
one log. Work of a contribution that comes back (rule 8) goes with the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from dugnad.averaging.formats import PIECES_MAX, UnitPiece
from dugnad.averaging.worker import Progress

STEPS_MAX: Final = 100_000
"""Steps in the log: a day at one a second. Beyond it the oldest are given up for credit."""


@dataclass(frozen=True, slots=True)
class DoneStep:
    """One optimiser step and the sequences it trained on."""

    step: int
    pieces: tuple[UnitPiece, ...]


@dataclass(slots=True)
class Sent:
    """The work behind one contribution, kept until it is settled for good."""

    steps: int
    pieces: tuple[UnitPiece, ...]
    back: bool = False
    carried: bool = False
    """It came back and went along with a later contribution."""


@dataclass(slots=True)
class ProgressLog:
    """The log, and each fragment's place in it."""

    fragments: int
    sequence_tokens: int
    steps: deque[DoneStep] = field(default_factory=deque)
    place: list[int] = field(default_factory=list)
    sent: list[dict[int, Sent]] = field(default_factory=list)
    waiting: list[tuple[int, tuple[UnitPiece, ...]]] = field(default_factory=list)
    """Per fragment: steps and pieces that did not fit into the last contribution."""

    def __post_init__(self) -> None:
        self.place = [0] * self.fragments
        self.sent = [{} for _ in range(self.fragments)]
        self.waiting = [(0, ()) for _ in range(self.fragments)]

    def trained(self, step: int, pieces: Iterable[UnitPiece]) -> None:
        """The learner reports a step; steps rise."""
        self.steps.append(DoneStep(step, tuple(pieces)))
        oldest = min(self.place)
        while self.steps and (self.steps[0].step <= oldest or len(self.steps) > STEPS_MAX):
            self.steps.popleft()

    def take(
        self, fragment: int, seq: int, step: int, *, speed_class: int, eligible: bool
    ) -> Progress | None:
        """The work of contribution ``seq``, copied out after ``step``; None when there is none."""
        steps, pieces = self._ready(fragment, step)
        self.place[fragment] = max(self.place[fragment], step)
        for one in self.sent[fragment].values():
            if one.back and not one.carried:
                one.carried = True
                steps, pieces = steps + one.steps, [*one.pieces, *pieces]
        joined = coalesced(pieces)
        now, later = joined[:PIECES_MAX], joined[PIECES_MAX:]
        self.waiting[fragment] = (1 if later else 0, later)
        if not now or steps < 1:
            self.waiting[fragment] = (steps, joined)
            return None
        self.sent[fragment][seq] = Sent(steps, now)
        tokens = sum(p.stop - p.start for p in now) * self.sequence_tokens
        return Progress(tokens, min(steps, tokens), now, speed_class, eligible)

    def _ready(self, fragment: int, step: int) -> tuple[int, list[UnitPiece]]:
        steps, waiting = self.waiting[fragment]
        pieces = list(waiting)
        for one in self.steps:
            if self.place[fragment] < one.step <= step:
                steps += 1
                pieces += one.pieces
        return steps, pieces

    def settled(self, fragment: int, seq: int, share: float) -> tuple[UnitPiece, ...]:
        """A contribution's share is back (1), or is not any more (0): pieces that came back now."""
        one = self.sent[fragment].get(seq)
        if one is None or one.back == (share == 1.0):
            return ()
        one.back = share == 1.0
        return one.pieces if one.back else ()

    def take_back(self, fragment: int, seq: int) -> None:
        """Contribution ``seq`` was a draft: its work goes with the next one of that number."""
        one = self.sent[fragment].pop(seq, None)
        if one is not None:
            steps, pieces = self.waiting[fragment]
            self.waiting[fragment] = (steps + one.steps, (*one.pieces, *pieces))

    def forget(self, fragment: int, seq: int) -> None:
        """Settled for good. What came back and was not carried yet waits for the next hand-in."""
        one = self.sent[fragment].pop(seq, None)
        if one is not None and one.back and not one.carried:
            steps, pieces = self.waiting[fragment]
            self.waiting[fragment] = (steps + one.steps, (*pieces, *one.pieces))

    def abandon(self, step: int = 0, counts: Sequence[bool] = ()) -> tuple[UnitPiece, ...]:
        """The learner died: what no fragment has handed in is gone, and is to be trained again.

        A new one goes on from its state after ``step``: what was trained until then stays, for the
        fragments that ``counts`` names, to be handed in.
        """
        stays = [p for p, one in enumerate(counts) if one]
        newest = max([*self.place, step] if stays else self.place)
        lost = coalesced([p for one in self.steps if one.step > newest for p in one.pieces])
        last = self.steps[-1].step if self.steps else 0
        for p, place in enumerate(self.place):
            if p not in stays:
                self.place[p] = max(place, last)
        self.steps = deque(one for one in self.steps if stays and one.step <= step)
        return lost

    def take_up(
        self, steps: Iterable[DoneStep], places: Sequence[int], counts: Sequence[bool], step: int
    ) -> tuple[UnitPiece, ...]:
        """Another daemon's learner goes on from its state after ``step``: what of its work is in
        the parameters and not handed in. Before anything is trained."""
        self.place = [place if one else step for place, one in zip(places, counts, strict=True)]
        oldest = min(self.place)
        self.steps = deque(one for one in steps if oldest < one.step <= step)
        return coalesced([piece for one in self.steps for piece in one.pieces])


def coalesced(pieces: Iterable[UnitPiece]) -> tuple[UnitPiece, ...]:
    """The same sequences in as few pieces as possible, ascending; overlaps are counted once."""
    found: list[UnitPiece] = []
    for piece in sorted(pieces, key=lambda p: (p.epoch, p.index, p.start)):
        last = found[-1] if found else None
        if (
            last
            and (last.epoch, last.index) == (piece.epoch, piece.index)
            and (piece.start <= last.stop)
        ):
            found[-1] = UnitPiece(last.epoch, last.index, last.start, max(last.stop, piece.stop))
        else:
            found.append(piece)
    return tuple(found)
