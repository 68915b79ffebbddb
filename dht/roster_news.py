"""The news of a crowd at one member: how much there is, and what is new enough to be told again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from dugnad.dht.roster_crowd_manner import CATCH_UP_S, RATE_S, RECENT_MAX, STALE_SHARE, Manner


class News:
    """Counts rumours over `RATE_S` and keeps those of `CATCH_UP_S`."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, tuple[int, ...]]] = deque(maxlen=RECENT_MAX)
        self._rate = 0.0
        self._rated_at = 0.0

    def start(self, now: float) -> None:
        """From now on time passes."""
        self._rated_at = now

    def add(self, codes: tuple[int, ...], now: float) -> None:
        """These were told."""
        self._rate += len(codes) / RATE_S
        self._recent.append((now, codes))

    def recent(self) -> Iterator[int]:
        """What is told again on a new stream, oldest first."""
        for _, codes in self._recent:
            yield from codes

    def tick(self, now: float) -> None:
        """Time has passed."""
        passed, self._rated_at = now - self._rated_at, now
        self._rate *= max(0.0, 1.0 - passed / RATE_S)
        while self._recent and self._recent[0][0] < now - CATCH_UP_S:
            self._recent.popleft()

    def period(self, members: int, manner: Manner) -> float:
        """How long news is collected."""
        wanted = STALE_SHARE * members / max(self._rate, 1e-9)
        return min(manner.period_max_s, max(manner.period_min_s, wanted))
