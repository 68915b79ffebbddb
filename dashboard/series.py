"""A measurement over time in bounded memory: recent values as they came, older ones rolled up.

A `Series` is a value: `add` returns a new one. A run of years keeps about 6 000 points.
"""

from __future__ import annotations

from typing import Final

import msgspec

RECENT_MAX: Final = 600
"""Values kept as they came: ten minutes of one a second, and as many as a chart draws."""
MINUTES_MAX: Final = 1440
"""A day of minutes."""
HOURS_MAX: Final = 1440
"""Sixty days of hours."""
DAYS_MAX: Final = 3660
"""Ten years of days."""
MINUTE_MS: Final = 60_000
HOUR_MS: Final = 3_600_000
DAY_MS: Final = 86_400_000


class Point(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One value, or the roll-up of `n` of them: mean `value`, lowest and highest.

    `at_ms` is when the (last) value was measured, `tokens` how many tokens the run had merged then.
    """

    at_ms: int
    tokens: int
    value: float
    low: float
    high: float
    n: int = 1

    @classmethod
    def of(cls, at_ms: int, tokens: int, value: float) -> Point:
        """A single value."""
        return cls(at_ms, tokens, value, value, value)

    def with_next(self, other: Point) -> Point:
        """The roll-up of this and a later one."""
        n = self.n + other.n
        return Point(
            at_ms=max(self.at_ms, other.at_ms),
            tokens=max(self.tokens, other.tokens),
            value=self.value + (other.value - self.value) * (other.n / n),
            low=min(self.low, other.low),
            high=max(self.high, other.high),
            n=n,
        )


class Series(msgspec.Struct, frozen=True, array_like=True):
    """Points by age, each tuple oldest first: as measured, by minute, by hour, by day (UTC).

    Every roll-up covers all values since its oldest point, so the tuples overlap; `points` joins
    them. After a restart there are roll-ups only.
    """

    recent: tuple[Point, ...] = ()
    minutes: tuple[Point, ...] = ()
    hours: tuple[Point, ...] = ()
    days: tuple[Point, ...] = ()

    def add(self, point: Point) -> Series:
        """The series with one more value; one older than the last counts as measured then."""
        last = self.last
        if last is not None and point.at_ms < last.at_ms:
            point = msgspec.structs.replace(point, at_ms=last.at_ms)
        return Series(
            recent=(*self.recent[-RECENT_MAX + 1 :], point),
            minutes=_rolled(self.minutes, point, MINUTE_MS, MINUTES_MAX),
            hours=_rolled(self.hours, point, HOUR_MS, HOURS_MAX),
            days=_rolled(self.days, point, DAY_MS, DAYS_MAX),
        )

    def points(self) -> list[Point]:
        """Oldest to newest, each stretch of time in the finest form that is still kept."""
        joined: list[Point] = []
        since = None
        for finer in (self.recent, self.minutes, self.hours, self.days):
            older = finer if since is None else [p for p in finer if p.at_ms < since]
            joined[:0] = older
            if finer:
                since = finer[0].at_ms if since is None else min(since, finer[0].at_ms)
        return joined

    @property
    def last(self) -> Point | None:
        """The newest value; of an earlier process the newest minute."""
        rows = self.recent or self.minutes
        return rows[-1] if rows else None

    def mean(self, now_ms: int, window_ms: int) -> float | None:
        """The mean of the recent values of the last `window_ms`; None where there is none."""
        rows = self.recent or self.minutes
        values = [(p.value * p.n, p.n) for p in rows if p.at_ms >= now_ms - window_ms]
        return sum(v for v, _ in values) / sum(n for _, n in values) if values else None


def _rolled(rows: tuple[Point, ...], point: Point, size_ms: int, limit: int) -> tuple[Point, ...]:
    if rows and rows[-1].at_ms // size_ms == point.at_ms // size_ms:
        return (*rows[:-1], rows[-1].with_next(point))
    return (*rows[-limit + 1 :], point)
