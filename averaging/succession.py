"""Who merges the next version, and how long to wait for it (DESIGN.md rules 1, 4 and 9).

The order of homes is a hash over the parent's eligible members, the same for everybody who knows
the parent; the live roster only skips, it never adds. Waiting times are learned from what was
seen: median + k * MAD, between bounds.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection, Iterable
from functools import lru_cache
from statistics import median
from typing import Final

from dugnad.averaging.node import Node
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.records import encode, framed

MAD_FACTOR: Final = 4.0
"""k of median + k * MAD: about 2.7 standard deviations of a normal spread (MAD = 0.674 sigma)."""
ORDERS_MAX: Final = 1024
"""Orders remembered: a few per fragment."""
SAMPLES_MAX: Final = 32
"""Delays remembered: the last few minutes of a fragment."""
SAMPLES_MIN: Final = 4
"""Fewer delays than this say nothing about their spread."""


def home_order(
    run: RunId, fragment: int, parent: Node, live: Iterable[PeerId]
) -> tuple[list[PeerId], bool]:
    """Peers in the order in which they may merge the version after ``parent``.

    The second value says whether they are the parent's eligible members (True) or, where it names
    none, whoever is live (False).
    """
    eligible = [PeerId(row.peer) for row in parent.members if row.eligible]
    ruled = bool(eligible)
    peers = eligible if ruled else sorted(set(live))
    return ranked(run, fragment, parent.version + 1, peers), ruled


def ranked(run: RunId, fragment: int, version: int, peers: Collection[PeerId]) -> list[PeerId]:
    """``peers`` by SHA-256(tag, run, fragment, version, peer)."""
    return list(_ranked(run, fragment, version, tuple(sorted(peers))))


@lru_cache(ORDERS_MAX)
def _ranked(run: RunId, fragment: int, version: int, peers: tuple[PeerId, ...]) -> list[PeerId]:
    # asked for at every event, and the same until the head or the roster changes

    def key(peer: PeerId) -> bytes:
        body = encode((fragment, version, peer))
        return hashlib.sha256(framed("home/1", run, body)).digest()

    return sorted(peers, key=key)


class LearnedDelay:
    """A waiting time learned from past ones: median + k * MAD within [low, high] seconds."""

    def __init__(self, *, low: float, high: float, first: float) -> None:
        self.low, self.high, self.first = low, high, first
        self.samples: deque[float] = deque(maxlen=SAMPLES_MAX)

    def add(self, seconds: float) -> None:
        """Remember one observed delay; negative ones count as none."""
        self.samples.append(max(0.0, seconds))

    @property
    def learned(self) -> bool:
        """Whether enough was seen to say how it spreads."""
        return len(self.samples) >= SAMPLES_MIN

    def typical(self) -> float:
        """The median of what was seen, or the first guess."""
        return median(self.samples) if self.samples else self.first

    def limit(self) -> float:
        """How long to wait before something counts as late."""
        if not self.learned:
            return min(max(self.first, self.low), self.high)
        middle = median(self.samples)
        spread = median(abs(one - middle) for one in self.samples)
        return min(max(middle + MAD_FACTOR * spread, self.low), self.high)
