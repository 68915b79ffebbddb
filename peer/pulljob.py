"""One transfer of leaves from several donors: what is to come, cut into batches, and who fetches.

The pool of batches that nobody is fetching, and the donors that are still to be tried.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dugnad.dht.ids import PeerId
from dugnad.peer.transferwire import (
    PIECES_BYTES_MAX,
    Blame,
    GetPieces,
    Kind,
    PacedStream,
    first_bad_leaf,
)

BATCHES_PER_DONOR: Final = 4
"""A transfer is cut into at least so many batches for each donor where there are several, so that a
fast one can do more than its share; fewer than that where a batch would be less than a leaf."""


@dataclass(slots=True, eq=False)
class Part:
    """One of the things that a job fetches, where it is received, and its hashes once known."""

    kind: Kind
    root: bytes
    leaf_bytes: int
    view: memoryview
    hashes: tuple[bytes, ...] | None = None

    @property
    def count(self) -> int:
        """Number of leaves."""
        return -(-len(self.view) // self.leaf_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Consecutive leaves that one request asks for."""

    part: Part
    first: int
    count: int

    @property
    def view(self) -> memoryview:
        """Where they are received."""
        start, stop = self.first, self.first + self.count
        return self.part.view[start * self.part.leaf_bytes : stop * self.part.leaf_bytes]

    def bad_leaf(self) -> int | None:
        """Index of the first leaf that is not what its hash says."""
        assert self.part.hashes is not None
        hashes = self.part.hashes[self.first : self.first + self.count]
        bad = first_bad_leaf(self.view, self.part.leaf_bytes, hashes)
        return None if bad is None else self.first + bad


class Job:
    """One transfer: the pool of batches nobody is fetching, and the donors."""

    def __init__(
        self,
        fragment: int,
        digest: bytes,
        parts: Sequence[Part],
        peers: Sequence[PeerId],
        workers: int,
    ) -> None:
        self.fragment, self.digest, self.parts = fragment, digest, parts
        self.peers = deque(peers)
        self.pool = deque(batch for part in parts for batch in batches(part, workers))
        self.remaining = len(self.pool)
        self.lines: set[PacedStream] = set()
        self.blame: list[Blame] = []
        self.finished = asyncio.Event()
        self._workers = workers
        self._returned = asyncio.Event()
        if not workers or not self.remaining:
            self.finished.set()

    def request(self, batch: Batch) -> GetPieces:
        """What to ask for it; the last one of a donor for now when nothing else is left."""
        part, last = batch.part, not self.pool
        return GetPieces(
            part.kind, self.fragment, self.digest, batch.first, batch.count, True, last
        )

    def next(self, room: int) -> Batch:
        """A batch to ask for, of at most `room` bytes or of one leaf; the rest of it goes back."""
        batch = self.pool.popleft()
        count = max(1, room // batch.part.leaf_bytes)
        if count < batch.count:
            rest = Batch(batch.part, batch.first + count, batch.count - count)
            self.pool.appendleft(rest)
            self.remaining += 1
            batch = Batch(batch.part, batch.first, count)
        return batch

    def done(self) -> None:
        """A batch is here and verified."""
        self.remaining -= 1
        if not self.remaining:
            self.finished.set()

    def put_back(self, batches: Sequence[Batch]) -> None:
        """Their donor will not deliver."""
        self.pool.extendleft(reversed(batches))
        if batches:
            self._returned.set()

    def leave(self) -> None:
        """A worker has no donor left."""
        self._workers -= 1
        if not self._workers:
            self.finished.set()

    async def wants_more(self, patience_s: float) -> bool:
        """Waits until there is work; False when all is here.

        Whoever waits has a donor with nothing to do, so donors that give nothing for `patience_s`
        are cut, which returns their batches.
        """
        while self.remaining and not self.pool:
            self._returned.clear()
            try:
                async with asyncio.timeout(patience_s):
                    await self._returned.wait()
            except TimeoutError:
                self._cut_stalled(patience_s)
        return self.remaining > 0

    def _cut_stalled(self, patience_s: float) -> None:
        since = asyncio.get_running_loop().time() - patience_s
        for line in tuple(self.lines):
            if line.moved_at <= since:
                line.cut(f"nothing moved for {patience_s:g} s while other donors waited")


def batches(part: Part, workers: int) -> list[Batch]:
    """The part cut into batches: small enough for an answer and to go round."""
    fitting = PIECES_BYTES_MAX // part.leaf_bytes
    shares = BATCHES_PER_DONOR * workers if workers > 1 else 1
    step = max(1, min(fitting, -(-part.count // shares)))
    return [
        Batch(part, first, min(step, part.count - first)) for first in range(0, part.count, step)
    ]
