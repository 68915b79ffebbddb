"""The figures of `churn.py`, computed from what was seen. Pure: no clock, no files, no processes.

Times are seconds of the wall clock, all on one machine. A peer is *alive* from its first answer
after a start (or from SIGCONT) until the next fault. What it could do is its own speed in the calm
minute before the first fault, or, in `goodput_alive_now`, its median speed while it trained.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

WINDOW_S: Final = 6.0
"""Survivors' tokens are counted this long before a departure and as long after it: long enough for
some hundred steps, short enough to lie between two faults."""
SPEED_WINDOW_S: Final = 3.0
"""Windows in which a peer's own speed is read."""
BOOTSTRAPS: Final = 2000
SETTLED_S: Final = 90.0
"""The first of a life is left out of slopes: caches fill, and the learner's allocator settles."""
LIVED_S: Final = 150.0
"""A life must have been watched this long for a slope: half of what is left holds the median
against the two to three samples of the probe that a new machine runs once."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a peer said at one moment."""

    at: float
    tokens: int
    """Trained since its daemon started."""
    training: bool


@dataclass(frozen=True, slots=True)
class Use:
    """What a peer held at one moment: megabytes resident of all its processes and of the daemon
    alone, and descriptors."""

    at: float
    rss_mb: float
    daemon_mb: float
    fds: int


@dataclass(slots=True)
class Span:
    """One life of a peer: from its first answer (or its waking) to the next fault or the end.

    ``asked`` is when it was started or woken; ``listed`` when a contribution of it was first listed
    afterwards.
    """

    peer: int
    asked: float
    begin: float | None = None
    end: float | None = None
    started: bool = True
    listed: float | None = None
    samples: list[Sample] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Merge:
    """A commit of the lineage: when it was made, and whose tokens it lists."""

    fragment: int
    at: float
    tokens: dict[int, int]


@dataclass(frozen=True, slots=True)
class Departure:
    """A fault as it was carried out."""

    at: float
    peer: int
    kind: str


def tokens_between(samples: Sequence[Sample], begin: float, end: float) -> float | None:
    """Tokens trained from ``begin`` to ``end``, interpolated; None if not watched throughout."""
    at = _counter(samples)
    first, last = at(begin), at(end)
    return None if first is None or last is None else last - first


def _counter(samples: Sequence[Sample]) -> Callable[[float], float | None]:
    times = [one.at for one in samples]

    def at(moment: float) -> float | None:
        right = bisect_left(times, moment)
        if right == 0 or right == len(times):
            return None
        a, b = samples[right - 1], samples[right]
        return a.tokens + (b.tokens - a.tokens) * (moment - a.at) / (b.at - a.at)

    return at


def trains_throughout(span: Span, begin: float, end: float) -> bool:
    """Whether this life was training from ``begin`` to ``end``."""
    inside = [one for one in span.samples if begin <= one.at <= end]
    whole = span.begin is not None and span.begin <= begin
    return whole and (span.end is None or span.end >= end) and all(s.training for s in inside)


def own_speed(spans: Sequence[Span], begin: float, end: float) -> float:
    """Median tokens a second over windows in which these lives of one peer trained; 0 if none."""
    found = []
    for span in spans:
        at = max(begin, span.begin or begin)
        while at + SPEED_WINDOW_S <= min(end, span.end or end):
            if trains_throughout(span, at, at + SPEED_WINDOW_S):
                got = tokens_between(span.samples, at, at + SPEED_WINDOW_S)
                if got is not None:
                    found.append(got / SPEED_WINDOW_S)
            at += SPEED_WINDOW_S
    return median(found) if found else 0.0


def alive_seconds(spans: Sequence[Span], begin: float, end: float) -> float:
    """How long these lives lasted between ``begin`` and ``end``."""
    return sum(
        max(0.0, min(end, span.end if span.end is not None else end) - max(begin, span.begin))
        for span in spans
        if span.begin is not None
    )


def listed_tokens(merges: Sequence[Merge], begin: float, end: float) -> float:
    """Tokens listed between two moments: the mean over the fragments, each of which lists all."""
    inside = [one for one in merges if begin <= one.at < end]
    fragments = {one.fragment for one in merges}
    return sum(sum(one.tokens.values()) for one in inside) / max(1, len(fragments))


def participation(
    merges: Sequence[Merge], spans: Sequence[Span], begin: float, end: float
) -> float | None:
    """How often a peer that trained throughout is listed in a commit or in the next one.

    Throughout: from one merge before until the next one is made. As the simulator counts it.
    """
    hits = asked = 0
    for p in sorted({one.fragment for one in merges}):
        chain = [one for one in merges if one.fragment == p]
        for before, one, after in zip(chain, chain[1:], chain[2:], strict=False):
            if not begin <= before.at or after.at > end:
                continue
            for span in spans:
                if trains_throughout(span, before.at, after.at):
                    asked += 1
                    hits += span.peer in one.tokens or span.peer in after.tokens
    return hits / asked if asked else None


def dips(departures: Sequence[Departure], spans: Sequence[Span]) -> list[float]:
    """For each departure: by what share the others' tokens a second fell (negative: they rose)."""
    found = []
    for one in departures:
        begin, end = one.at - WINDOW_S, one.at + WINDOW_S
        others = [s for s in spans if s.peer != one.peer and trains_throughout(s, begin, end)]
        before = [tokens_between(s.samples, begin, one.at) for s in others]
        after = [tokens_between(s.samples, one.at, end) for s in others]
        pairs = [
            (b, a) for b, a in zip(before, after, strict=True) if b is not None and a is not None
        ]
        total = sum(b for b, _ in pairs)
        if total > 0:
            found.append(1.0 - sum(a for _, a in pairs) / total)
    return found


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Median with its 95 % bootstrap interval; ValueError for no values."""
    if not values:
        raise ValueError("no values")
    rng = random.Random(seed)
    drawn = sorted(median(rng.choices(values, k=len(values))) for _ in range(BOOTSTRAPS))
    cut = BOOTSTRAPS // 40
    return median(values), drawn[cut], drawn[-cut - 1]


def p95(values: Sequence[float]) -> float:
    """The 95th percentile, the larger neighbour; ValueError for no values."""
    if not values:
        raise ValueError("no values")
    rows = sorted(values)
    return rows[min(len(rows) - 1, int(0.95 * len(rows)))]


def slope_per_minute(points: Sequence[tuple[float, float]]) -> float:
    """Theil-Sen: the median slope of all pairs, per minute; 0 for fewer than two points."""
    found = [
        60.0 * (y1 - y0) / (x1 - x0)
        for i, (x0, y0) in enumerate(points)
        for x1, y1 in points[i + 1 :]
        if x1 > x0
    ]
    return median(found) if found else 0.0


def slopes(spans: Sequence[Span], value: Callable[[Use], float]) -> list[float]:
    """Of every life that was long enough: by how much ``value`` rose in a minute."""
    found = []
    for span in spans:
        if not span.uses or not span.started:
            continue
        first = span.uses[0].at + SETTLED_S
        kept = [one for one in span.uses if one.at >= first]
        if kept and kept[-1].at - kept[0].at >= LIVED_S - SETTLED_S:
            found.append(slope_per_minute([(one.at, value(one)) for one in kept]))
    return found
