"""What a link carries, learned from what it carried: bytes and seconds of real transfers.

A link is one direction to one peer. A transfer that something else than the line slowed down (its
sender's pace, its owner's limit, or that it was so short that the way there took most of the time)
says only that the line carries at least so much. Until anything was carried a link counts as slow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from dugnad.dht.advert import SLOW_BYTES_PER_S

NEW_WEIGHT: Final = 0.7
"""Of the newest transfer. After a line has halved or doubled, two transfers bring the estimate to
within a tenth of it; one that was spoilt by a lost packet costs one lean hand-in."""
SECONDS_MIN: Final = 1e-4
"""Below this a clock says nothing about a rate."""
RATE_MAX: Final = 1.25e10
"""100 Gbit/s: what a memory copy on the same machine may look like, and no line is above it."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """Bytes that reached a peer, and the seconds that the line took for them, round trip aside.

    `telling`: nothing but the line decided how long it took.
    """

    size: int
    seconds: float
    telling: bool = True

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return min(RATE_MAX, self.size / max(self.seconds, SECONDS_MIN))


@dataclass(slots=True)
class LinkRate:
    """The estimate of one link. `rate` is bytes a second, 0 while unknown."""

    rate: float = 0.0
    deliveries: int = 0

    @property
    def assumed(self) -> float:
        """Bytes a second to reckon with: unknown means slow."""
        return self.rate or float(SLOW_BYTES_PER_S)

    def learn(self, found: Delivery) -> None:
        """Take in one transfer; sizes or times that are none change nothing."""
        if found.size <= 0 or not math.isfinite(found.seconds) or found.seconds < 0.0:
            return
        self.deliveries += 1
        if not found.telling and found.rate <= self.assumed:
            return
        if not self.rate:
            self.rate = found.rate
        else:
            self.rate += NEW_WEIGHT * (found.rate - self.rate)
