"""One direction of a link: its own latency distribution, and the line that its messages wait in.

With jitter each directed link has a median latency of its own, drawn once, and each message a
log-normal factor on it; without, each message draws anew between the same bounds. Either way they
overtake each other as they do across streams. What a host sends shares its uplink, what it receives
its downlink: a message waits until the bytes before it are through.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Final

from dugnad.simulation.settings import Weather

LATENCY_MAX_FACTOR: Final = 20.0
"""A message takes at most so many medians: a log-normal tail has no end, a connection has."""
REORDER_TRIPS: Final = 4.0
"""A message held back is overtaken by everything of the next so many medians."""
GAPS_MAX: Final = 64
"""Gaps of a line that are remembered: each is before a message that is under way."""


class Link(random.Random):
    """One direction: a generator of its own, and what was drawn for the link from it."""

    def __init__(self, drawn: random.Random, source: bytes, target: bytes) -> None:
        super().__init__()
        self.setstate(drawn.getstate())
        self.source = source
        self.target = target
        self.median_s: float | None = None

    def trip(self, weather: Weather) -> float:
        """Seconds that the next message is under way, waiting aside."""
        if not weather.jitter:
            taken = self.uniform(weather.latency_low_s, weather.latency_high_s)
        else:
            taken = self._own_median(weather) * min(
                math.exp(self.gauss(0.0, weather.jitter)), LATENCY_MAX_FACTOR
            )
        if weather.reorder and self.random() < weather.reorder:
            taken += self._own_median(weather) * self.uniform(1.0, REORDER_TRIPS)
        return taken

    def _own_median(self, weather: Weather) -> float:
        """Seconds that a message takes on this link more often than not; drawn once."""
        if self.median_s is None:
            self.median_s = self.uniform(weather.latency_low_s, weather.latency_high_s)
        return self.median_s


@dataclass(slots=True)
class Line:
    """One host's up- or downlink: first come, first served."""

    free_at: float = 0.0
    longest_wait_s: float = 0.0
    """The longest that a message waited for those before it."""
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """Times before ``free_at`` in which nothing comes yet, earliest first."""

    def passes(self, size: int, rate: float, at: float, now: float) -> float:
        """Seconds until ``size`` bytes that come at ``at`` are through at ``rate`` bytes a second.

        Said at ``now``, when they are sent: what is sent later may come before them, and passes in
        a gap. One message that is under way for long holds up nobody else's.
        """
        taken = size / rate
        begin = self._begin(at, taken, now)
        self.longest_wait_s = max(self.longest_wait_s, begin - at)
        return begin + taken - at

    def _begin(self, at: float, taken: float, now: float) -> float:
        self.gaps = [gap for gap in self.gaps[-GAPS_MAX:] if gap[1] > now]
        for index, (low, high) in enumerate(self.gaps):
            begin = max(low, at)
            if begin + taken <= high:
                rest = ((low, begin), (begin + taken, high))
                self.gaps[index : index + 1] = [one for one in rest if one[0] < one[1]]
                return begin
        begin = max(at, self.free_at)
        if begin > max(self.free_at, now):
            self.gaps.append((self.free_at, begin))
        self.free_at = begin + taken
        return begin
