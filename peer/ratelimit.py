"""How fast bulk data may flow, and how much of it has flowed this month.

Both are cores: the time is passed in. `Bucket` says how long to wait before a step of bytes;
`Usage` counts bytes by day.
"""

from dataclasses import dataclass, field
from typing import Final

DAY_MS: Final = 86_400_000
DAYS_KEPT: Final = 31
"""One more than the quota looks back: a day is counted in full."""
BURST_S: Final = 0.1
"""So much of a second's allowance may flow at once: short enough that nobody's call stutters."""
BYTES_PER_MBIT: Final = 125_000


@dataclass(slots=True)
class Bucket:
    """An allowance that fills at `rate` bytes a second; a rate of 0 means no limit.

    What is taken beyond it is owed, and whoever comes next waits for all that is owed: so the mean
    rate holds whatever the size of the steps.
    """

    rate: float = 0.0
    level: float = 0.0
    at: float | None = None

    def step(self, size: int) -> int:
        """How many of `size` bytes to move in one go: never more than a burst, at least 1 KiB."""
        if not self.rate:
            return size
        return max(1024, min(size, int(self.rate * BURST_S)))

    def take(self, size: int, now: float) -> float:
        """Takes `size` bytes; seconds to wait before they are moved."""
        if not self.rate:
            return 0.0
        room = self.rate * BURST_S
        passed = 0.0 if self.at is None else max(0.0, now - self.at)
        start = room if self.at is None else self.level
        self.level = min(room, start + passed * self.rate) - size
        self.at = now
        return max(0.0, -self.level / self.rate)


@dataclass(slots=True)
class Usage:
    """Bytes that went up and down, by day since 1970 (UTC). Days older than DAYS_KEPT are
    dropped."""

    days: dict[int, int] = field(default_factory=dict)
    seen: int = 0
    """The counter at the last look: it counts from the daemon's start."""

    def count(self, total: int, wall_ms: int) -> None:
        """The traffic counters' sum is now `total`; it only rises within one daemon."""
        day = wall_ms // DAY_MS
        moved, self.seen = max(0, total - self.seen), total
        if moved:
            self.days[day] = self.days.get(day, 0) + moved
        for old in [one for one in self.days if not day - DAYS_KEPT < one <= day + 1]:
            del self.days[old]

    def within(self, days: int, wall_ms: int) -> int:
        """Bytes in the last `days` days, today included. A day that a wrong clock put into the
        future counts, too."""
        first = wall_ms // DAY_MS - days + 1
        return sum(size for day, size in self.days.items() if day >= first)
