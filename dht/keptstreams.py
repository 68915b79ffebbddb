"""Direct streams between two transfers: a new one costs both ends a handshake, one at hand nothing.

Whoever opened a stream gives it back when both sides know that a transfer is over, and it is handed
out for the next one. What waits is bounded in number and in time, for all protocols here; the
serving end waits a little longer (REST_S), so that the opener is the one that ends it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol

from dugnad.dht.ids import PeerId

KEPT_S: Final = 60.0
"""Transfers between two peers are rarely further apart while a run merges, and no router forgets a
connection so soon."""
REST_S: Final = KEPT_S + 30.0
"""For the next transfer at the serving end: the opener may be late with ending it."""
KEPT_PER_PEER_MAX: Final = 4
"""Of one protocol to one peer: as many as transfer at once (`peer.transferwire`)."""
KEPT_MAX: Final = 96
"""In all; a descriptor and some 50 kB each. A fifth of all streams, so that there is room for those
that others keep with us."""
RESTING_PER_PEER_MAX: Final = 2 * KEPT_PER_PEER_MAX
"""At the serving end, of one protocol: twice what a peer should keep, since the end of one may
reach us after the beginning of the next."""
RESTING_MAX: Final = 96
"""In all, of one protocol: with what we keep ourselves less than there may be streams, so that a
transfer finds room. More than that end at once."""


class Waiting(Protocol):
    """A stream that can be kept."""

    @property
    def peer(self) -> PeerId:
        """Who is at the other end."""
        ...

    def is_quiet(self) -> bool:
        """Whether it is open, and nothing has come that nobody has read: not its end either."""
        ...

    def abort(self) -> None:
        """Give it up."""
        ...


class KeptStreams:
    """Streams that wait; the one given back last is the first to go out again."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._waiting: OrderedDict[Waiting, tuple[str, float]] = OrderedDict()
        """With its protocol and when it was given back, the oldest first."""

    def __len__(self) -> int:
        return len(self._waiting)

    def keep(self, protocol: str, stream: Waiting) -> None:
        """Let it wait; the oldest ends where there are too many."""
        if not stream.is_quiet():
            stream.abort()
            return
        same = [one for one in self._waiting if self._is(one, stream.peer, protocol)]
        if len(same) >= KEPT_PER_PEER_MAX:
            self._end(same[0])
        elif len(self._waiting) >= KEPT_MAX:
            self.end_oldest()
        self._waiting[stream] = protocol, self._clock()

    def take(self, peer: PeerId, protocol: str) -> Waiting | None:
        """A stream to this peer that still works as far as this machine knows."""
        self.end_old()
        for one in reversed([*self._waiting]):
            if self._is(one, peer, protocol):
                del self._waiting[one]
                if one.is_quiet():
                    return one
                one.abort()
        return None

    def end_old(self) -> float | None:
        """End those that have waited for KEPT_S; seconds until the next one has, None without."""
        while self._waiting:
            since = next(iter(self._waiting.values()))[1]
            left = since + KEPT_S - self._clock()
            if left > 0.0:
                return left
            self.end_oldest()
        return None

    def end_oldest(self) -> None:
        """End the one that has waited for longest, if any waits."""
        if self._waiting:
            self._end(next(iter(self._waiting)))

    def end_all(self) -> None:
        """End all."""
        while self._waiting:
            self.end_oldest()

    def _end(self, stream: Waiting) -> None:
        del self._waiting[stream]
        stream.abort()

    def _is(self, stream: Waiting, peer: PeerId, protocol: str) -> bool:
        return stream.peer == peer and self._waiting[stream][0] == protocol
