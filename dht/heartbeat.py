"""What the heartbeats with one peer teach: round-trip time, clock difference, how long silence is
normal.
"""

import statistics
from collections import deque
from typing import Final

# The bounds of DESIGN.md section 6: below 3 s a busy machine is called lost, above 10 s work waits
# too long.
SILENCE_MIN_S: Final = 3.0
SILENCE_MAX_S: Final = 10.0
# Guess, to be measured: eight deviations above the usual gap.
SILENCE_SPREADS: Final = 8.0
# Guess: on lines with a heavy tail the spread of usual gaps says little about the longest.
SILENCE_LONGEST: Final = 1.5
HEARTBEAT_S: Final = 1.0

_GAPS_KEPT: Final = 32  # half a minute: follows a machine that becomes busy
_GAPS_NEEDED: Final = 4
_TRIPS_KEPT: Final = 16
_PINGS_OPEN_MAX: Final = 16
_HELLO_TRIP_S: Final = (
    2.0  # a hello says the time but not how long it travelled: worse than any ping
)


class Heartbeat:
    """Statistics of one peer, in the seconds of whoever calls; every table is bounded."""

    def __init__(self) -> None:
        self.silence_s = SILENCE_MIN_S
        self._gaps: deque[float] = deque(maxlen=_GAPS_KEPT)
        self._ping_at: float | None = None
        self._trips: deque[tuple[float, float]] = deque(
            maxlen=_TRIPS_KEPT
        )  # (round trip, clock difference)
        self._open: dict[int, float] = {}
        self.trip_s = 0.0
        """The newest round trip."""
        self.lost = 0
        """Pings on streams that still stood SILENCE_MAX_S later without an answer."""

    def pinged(self, number: int, now: float) -> None:
        """We sent a ping."""
        self._open[number] = now
        while (oldest := next(iter(self._open))) != number:
            if now - self._open[oldest] < SILENCE_MAX_S:
                break
            del self._open[oldest]
            self.lost += 1
        if len(self._open) > _PINGS_OPEN_MAX:
            del self._open[next(iter(self._open))]

    def answered(self, number: int, peer_wall_s: float, now: float, wall_s: float) -> bool:
        """A pong came: `peer_wall_s` is the peer's clock when it answered, `wall_s` ours now.
        False: not asked for.
        """
        sent = self._open.pop(number, None)
        if sent is None:
            return False
        self.trip_s = trip = max(0.0, now - sent)
        self._trips.append((trip, peer_wall_s - (wall_s - trip / 2)))
        return True

    def said_hello(self, peer_wall_s: float, wall_s: float) -> None:
        """A hello came: a first, coarse idea of the peer's clock."""
        self._trips.append((_HELLO_TRIP_S, peer_wall_s - wall_s))

    def beat(self, now: float) -> None:
        """The peer's own ping came: learn how long its pauses usually are."""
        if self._ping_at is not None:
            self._gaps.append(now - self._ping_at)
        self._ping_at = now
        if len(self._gaps) >= _GAPS_NEEDED:
            usual = statistics.median(self._gaps)
            spread = statistics.median(abs(gap - usual) for gap in self._gaps)
            longest = SILENCE_LONGEST * max(self._gaps)
            silence = max(usual + SILENCE_SPREADS * spread, longest, SILENCE_MIN_S)
            self.silence_s = min(SILENCE_MAX_S, silence)

    def paused(self) -> None:
        """The stream was renewed, or we ourselves stood still: the next gap says nothing."""
        self._ping_at = None
        self._open.clear()

    @property
    def rtt_s(self) -> float | None:
        """The usual round trip; None before the first answer."""
        trips = [trip for trip, _ in self._trips if trip < _HELLO_TRIP_S]
        return statistics.median(trips) if trips else None

    @property
    def clock_s(self) -> float | None:
        """The peer's clock minus ours, from the quickest round trip (the least asymmetric one)."""
        return min(self._trips)[1] if self._trips else None
