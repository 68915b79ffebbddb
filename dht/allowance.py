"""How much one peer may bring in some time."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

from dugnad.dht.ids import PeerId

PEERS_MAX: Final = 4096
"""Peers that are remembered, the newest heard: as many as a daemon knows of a crowd."""


class Allowance:
    """At most ``most`` things of each peer in ``span_s`` seconds. A core: the time is passed in."""

    def __init__(self, most: int, span_s: float) -> None:
        self._most, self._span_s = most, span_s
        self._taken: OrderedDict[PeerId, deque[float]] = OrderedDict()

    def take(self, peer: PeerId, now: float) -> bool:
        """Whether a peer may bring one more thing; only then it is counted."""
        recent = self._taken.setdefault(peer, deque(maxlen=self._most))
        self._taken.move_to_end(peer)
        if len(self._taken) > PEERS_MAX:
            self._taken.popitem(last=False)
        if len(recent) == self._most and now - recent[0] < self._span_s:
            return False
        recent.append(now)
        return True

    def forget(self, peer: PeerId) -> None:
        """The peer is gone."""
        self._taken.pop(peer, None)
