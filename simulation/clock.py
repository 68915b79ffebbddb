"""Virtual time: one heap of (time, number, what), and a generator for whatever is named."""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable
from typing import Final

from dugnad.simulation.checks import Violation

AT_ONCE_MAX: Final = 100_000
"""Things that happen at one moment; a few hundred do when a large swarm starts."""


class Clock:
    """A clock that jumps from one thing to do to the next. Seconds; equal seeds, equal chance."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.counter = 0

    def rng(self, *names: object) -> random.Random:
        """A generator of its own for whatever the names name."""
        text = "/".join(str(name) for name in (self.seed, *names))
        return random.Random(hashlib.sha256(text.encode()).digest())

    def later(self, delay: float, what: Callable[[], None]) -> None:
        """Do ``what`` in ``delay`` virtual seconds."""
        self.counter += 1
        heapq.heappush(self.heap, (self.now + delay, self.counter, what))

    def run(self, until: float) -> None:
        """Let the virtual clock run to ``until``."""
        at_once = 0
        while self.heap and self.heap[0][0] <= until:
            at, _, what = heapq.heappop(self.heap)
            at_once = at_once + 1 if at == self.now else 0
            if at_once > AT_ONCE_MAX:
                raise Violation(f"time stands still at {at:.3f} s: a core asks again and again")
            self.now = at
            what()
        self.now = until
