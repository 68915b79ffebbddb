"""What the learner will train on next: sequences of claimed units, in the order they were given."""

from collections import deque
from dataclasses import dataclass

from dugnad.peer.learner.protocol import QUEUED_SEQUENCES_MAX, Piece, Work


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one step, and which part of which unit they are."""

    sequences: list[int]
    pieces: tuple[Piece, ...]


class WorkQueue:
    """First in, first out, over at most QUEUED_SEQUENCES_MAX sequences; `len` counts sequences."""

    def __init__(self) -> None:
        self._works: deque[Work] = deque()
        self._taken = 0  # of the first work
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, work: Work) -> None:
        """Queue a unit's sequences. OverflowError when the daemon gives more than it may."""
        if self._count + len(work.sequences) > QUEUED_SEQUENCES_MAX:
            raise OverflowError(f"more than {QUEUED_SEQUENCES_MAX} sequences queued")
        if work.sequences:
            self._works.append(work)
            self._count += len(work.sequences)

    def take(self, count: int) -> Batch:
        """Remove and return the next `count` sequences, or as many as there are."""
        sequences: list[int] = []
        pieces: list[Piece] = []
        while self._works and len(sequences) < count:
            work = self._works[0]
            start = self._taken
            stop = min(len(work.sequences), start + count - len(sequences))
            sequences += work.sequences[start:stop]
            pieces.append(Piece(work.epoch, work.index, work.start + start, work.start + stop))
            self._taken = stop
            if stop == len(work.sequences):
                self._works.popleft()
                self._taken = 0
        self._count -= len(sequences)
        return Batch(sequences, tuple(pieces))
