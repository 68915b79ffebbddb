"""One transfer of bulk data under way: how much may be under way at once, and what it teaches.

A core: the time is passed in. Bytes are *under way* from when they are sent (or asked for) until
the word that they arrived. No more of them are under way than the link carries in a round trip and
QUEUE_S, so what waits in routers and sockets, and with it what a heartbeat waits for, is bounded;
and a line that has become quicker is filled by the same window, so it shows at once. When a first
part has shown what the line gives, the rest is paced at PACE of that by a bucket: below the line's
rate nothing queues at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from dugnad.averaging.linkcontrol import LINKS_MAX
from dugnad.averaging.linkrate import Delivery, LinkRate
from dugnad.dht.ids import PeerId
from dugnad.peer.ratelimit import Bucket

QUEUE_S: Final = 0.2
"""What may wait in the line's queues, in seconds of the learned rate."""
WINDOW_BYTES_MIN: Final = 32 << 10
"""Two of the shortest steps that a receiver tells of: with less under way the line would stand
still between them."""
RTT_FIRST_S: Final = 0.1
"""Of a peer whose heartbeats have told nothing yet."""
PACE: Final = 0.9
"""Of the line's rate (algorithms.md 7.2: 80 to 90 %)."""
SHOWN_S: Final = 0.25
"""So long bytes must have come in without a pause of ours before they tell a rate: longer than
the time slices of a busy machine and the bunching of a line's acknowledgements ..."""
SHOWN_TRIPS: Final = 3.0
SHOWN_S_MIN: Final = 0.02
"""... but on a short way only a few round trips: a local network carries a hand-in in less."""
SHOWN_MARKS: Final = 4
"""And at least so many words of it, the first one included."""
TRIPS_TELLING: Final = 2.0
"""A transfer without words in between tells a rate when it took so many round trips and more."""


class Flow:
    """One transfer over one link. Bytes, and seconds of whoever calls."""

    def __init__(self, link: LinkRate, rtt_s: float | None, now: float) -> None:
        self.rate = link.assumed
        self.under_way = 0
        self._rtt_s = RTT_FIRST_S if rtt_s is None else rtt_s
        self._window = _window(self.rate, self._rtt_s)
        self._shown_s = min(SHOWN_S, max(SHOWN_S_MIN, SHOWN_TRIPS * self._rtt_s))
        self._bucket = Bucket()
        self._began = self.moved_at = now
        self._arrived = 0
        self._marks: deque[tuple[float, int]] = deque()
        """When how much had arrived, while nothing of ours held it up; SHOWN_S of them."""
        self._held = False
        self._paused = False
        self._shown = False

    @property
    def window(self) -> int:
        """Bytes that may be under way. Within one transfer it only grows: a line that has become
        slower has this much in its queues once."""
        return self._window

    def room(self) -> int:
        """Bytes that may be sent (or asked for) now; 0: the next word of progress comes first."""
        return max(0, self._window - self.under_way)

    def sent(self, size: int, now: float) -> float:
        """`size` bytes are about to go; the seconds to wait before they do."""
        if not self.under_way and self._arrived:
            self.paused()  # whatever it was that let the line run dry
        self.under_way += size
        wait = self._bucket.take(size, now)
        if wait > 0.0:
            self.paused()
        return wait

    def paused(self) -> None:
        """Something of ours held it up (a pace, an owner's limit): the line could do more."""
        self._held = self._paused = True

    def arrived(self, total: int, now: float) -> None:
        """The other side has `total` bytes by now; less than before, or more than were sent, is
        its mistake and says nothing."""
        size = total - self._arrived
        if not 0 < size <= self.under_way:
            return
        self._arrived, self.under_way, self.moved_at = total, self.under_way - size, now
        if self._paused:
            self._marks.clear()
            self._paused = False
        self._marks.append((now, total))
        while len(self._marks) > SHOWN_MARKS and now - self._marks[1][0] >= self._shown_s:
            self._marks.popleft()
        since, before = self._marks[0]
        long = len(self._marks) >= SHOWN_MARKS and now - since >= self._shown_s
        if long and self._show((total - before) / (now - since)):
            self._marks = deque([(now, total)])

    def _show(self, rate: float) -> bool:
        """What comes in while nothing of ours holds it up: the line's rate where a window takes
        longer than its way, so that some of it queues; else the window was too small for it.
        Whether it has grown, so that the next measurement must begin anew."""
        self.rate, self._shown = rate, True
        queued = self._window / rate - self._rtt_s > QUEUE_S / 2.0
        self._bucket.rate = PACE * rate if queued else 0.0
        before, fitting = self._window, _window(rate, self._rtt_s)
        self._window = max(before, fitting)
        return fitting > before

    def delivery(self, now: float) -> Delivery:
        """What the whole transfer teaches, once its last byte has arrived."""
        if self._shown:
            return Delivery(self._arrived, self._arrived / self.rate)
        seconds = now - self._began
        if self._held or seconds < max(self._shown_s, TRIPS_TELLING * self._rtt_s):
            return Delivery(self._arrived, seconds, telling=False)  # it carried at least so much
        return Delivery(self._arrived, seconds - self._rtt_s)


def _window(rate: float, rtt_s: float) -> int:
    return max(WINDOW_BYTES_MIN, int(rate * (rtt_s + QUEUE_S)))


class Meter(Protocol):
    """Who knows the links: makes a flow for each transfer, and learns from it at its end."""

    def begin(self, peer: PeerId) -> Flow:
        """A transfer to (or from) this peer begins now."""
        ...

    def end(self, peer: PeerId, flow: Flow) -> None:
        """It has ended, whatever became of it."""
        ...


class Rates:
    """A meter that remembers what each link gave, of LINKS_MAX peers the newest."""

    def __init__(
        self,
        clock: Callable[[], float],
        rtt: Callable[[PeerId], float | None] = lambda peer: None,
    ) -> None:
        """`rtt` is what heartbeats say of a peer, seconds; None where they say nothing."""
        self._clock, self._rtt = clock, rtt
        self._links: dict[PeerId, LinkRate] = {}

    def begin(self, peer: PeerId) -> Flow:
        """A flow by what the link gave last."""
        link = self._links.pop(peer, None) or LinkRate()
        self._links[peer] = link
        while len(self._links) > LINKS_MAX:
            del self._links[next(iter(self._links))]
        return Flow(link, self._rtt(peer), self._clock())

    def end(self, peer: PeerId, flow: Flow) -> None:
        """Learn from it."""
        if peer in self._links:
            self._links[peer].learn(flow.delivery(self._clock()))

    def rate(self, peer: PeerId) -> float:
        """Bytes a second of the link; 0 while unknown."""
        return self._links[peer].rate if peer in self._links else 0.0
