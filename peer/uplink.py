"""How fast this machine sends bulk data to all peers together: below what its line carries.

A core: the time is passed in. The uplink of a home is the narrowest part of most ways, and all
that is sent shares it, heartbeats too. So one bucket paces all bulk streams, and no more of their
bytes are under way than the line carries in a round trip and QUEUE_S. Unknown means slow: the pace
begins at SLOW_BYTES_PER_S and doubles for as long as everything sent arrives; once bytes pile up it
is set to PACE of what does arrive, and from there it tries a little more now and then.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from dugnad.averaging.linkrate import RATE_MAX
from dugnad.dht.advert import SLOW_BYTES_PER_S
from dugnad.peer.flow import PACE, RTT_FIRST_S
from dugnad.peer.ratelimit import Bucket

LOOK_S: Final = 0.2
"""Between two judgements: two round trips of most ways."""
SPAN_S: Final = 1.0
"""What arrives is measured over this long: words of it come in bunches, after a lost packet above
all."""
QUEUE_S: Final = 0.1
"""What may wait in the line, in seconds of its rate: heartbeats wait behind it. A home router holds
twice as much and more."""
RISE_FIRST: Final = 2.0
"""Per look while the line was never full: from 1 Mbit/s to a gigabit in two seconds."""
RISE: Final = 1.05
"""Per look later: a line that doubled is filled after three seconds of sending."""
USED: Final = 0.6
"""While something is under way all the time, the pace rises only where so much of it arrives."""
FALL_MIN: Final = 0.5
"""In one look it falls by half at most: one lost packet can hold up everything behind it. Half of
what the pace was before it began to fall is soon tried again: a stall is not a slower line."""
STEP_S: Final = 0.025
"""Of the pace sent in one go: what waits for its turn takes up room of the others."""
STEP_BYTES_MIN: Final = 4 << 10
"""Three packets. Smaller steps cost more timers than they tell."""
SPAN_MIN_S: Final = 0.4
"""Over less than this it is not: then the line is judged at a later look."""
UNDER_WAY_MIN: Final = 64 << 10
"""Some short steps: with less the line would stand still between looks."""
FULL: Final = UNDER_WAY_MIN // 4
"""Room for less than this: bytes pile up."""
STALLED_S: Final = 0.25
"""Without progress for so long: the kernel repeats a lost packet after 0.2 s or more."""
DRAINED: Final = 2 << 10
"""With less than this under way the line carries all that it is given."""
RATE_MIN: Final = 16_000.0
"""An eighth of a megabit: what a modem gave. Less would stall every transfer."""


class Uplink:
    """The pace of one machine's bulk data, bytes a second."""

    def __init__(self) -> None:
        self.rate = float(SLOW_BYTES_PER_S)
        self.bucket = Bucket(self.rate)
        self._under_way: dict[int, tuple[int, float]] = {}
        """Stream -> bytes under way, and when some arrived last."""
        self._waiting: dict[int, int] = {}
        """Stream -> bytes that have leave to go and wait for their turn in the bucket."""
        self._arrived = 0
        self._marks: deque[tuple[float, int]] = deque()
        self._judged_at = float("-inf")
        self._paced = False
        self._rising = True
        self._falling = False
        self._tried = 0.0
        """Up to this pace it rises quickly after a fall."""

    @property
    def full(self) -> bool:
        """Whether the line has shown its limit: before, `rate` is only a beginning."""
        return not self._rising

    def under_way(self, now: float) -> int:
        """Bytes that were sent and have not arrived, of streams on which something moves.

        One on which nothing does waits for a lost packet, and so says nothing about queues; where
        nothing moves at all the line is broken.
        """
        rows = self._under_way.values()
        moving = [size for size, moved_at in rows if now - moved_at < STALLED_S]
        return sum(moving) if moving else sum(size for size, _ in rows)

    def room(self, now: float) -> int:
        """Bytes that may be sent now."""
        return max(0, self._fitting(now) - sum(self._waiting.values()))

    def step(self, size: int) -> int:
        """How many of `size` bytes to send in one go."""
        return max(STEP_BYTES_MIN, min(size, int(self.rate * STEP_S)))

    def take(self, size: int, now: float) -> float:
        """`size` bytes are about to go; seconds to wait before they do."""
        wait = self.bucket.take(size, now)
        self._paced = self._paced or wait > 0.0
        return wait

    def moved(
        self, stream: int, arrived: int, under_way: int, now: float, waiting: int = 0
    ) -> None:
        """Of a stream so many more bytes have arrived, so many are under way, and so many wait for
        their turn: those take up room and are no queue in the line, however many streams wait.
        """
        if waiting:
            self._waiting[stream] = waiting
        else:
            self._waiting.pop(stream, None)
        self._arrived += max(0, arrived)
        before, moved_at = self._under_way.get(stream, (0, now))
        if arrived > 0 or not before:
            moved_at = now
        self._under_way[stream] = (under_way, moved_at)
        drained = self.under_way(now) < DRAINED
        if drained or not self._marks:
            self._marks = deque([(now, self._arrived)])
        else:
            self._marks.append((now, self._arrived))
            while now - self._marks[1][0] >= SPAN_S:
                self._marks.popleft()
        if now - self._judged_at >= LOOK_S:
            self._judge(drained)
            self._judged_at, self._paced = now, False

    def ended(self, stream: int) -> None:
        """A stream is done; what it had under way is of no interest any more."""
        self._under_way.pop(stream, None)
        self._waiting.pop(stream, None)

    def _judge(self, drained: bool) -> None:
        (since, before), (now, arrived) = self._marks[0], self._marks[-1]
        long = now - since >= SPAN_MIN_S
        given = (arrived - before) / (now - since) if long else 0.0
        if long and self._fitting(now) < FULL:
            if not self._falling:
                self._tried = FALL_MIN * self.rate
            self._rising, self._falling = False, True
            fitting = max(PACE * given, FALL_MIN * self.rate, RATE_MIN)
            self.rate = min(self.rate, fitting)
        elif self._paced and (drained or given >= USED * self.rate / self._rise):
            self._falling = False
            self.rate = min(RATE_MAX, self.rate * self._rise)
        self.bucket.rate = self.rate

    @property
    def _rise(self) -> float:
        if self._rising:
            return RISE_FIRST
        return max(RISE, min(RISE_FIRST, self._tried / self.rate))

    def _fitting(self, now: float) -> int:
        return max(0, self._window() - self.under_way(now))

    def _window(self) -> int:
        return max(UNDER_WAY_MIN, int(self.rate * (RTT_FIRST_S + QUEUE_S)))
