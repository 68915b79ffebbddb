"""Who is here, as an observer sees it: from whom answers it, and from whom those name.

An observer is in nobody's roster. It asks the peers that it can reach, in turn, and each tells whom
it holds live streams with. A peer is here while it answers, or while somebody who answers names it;
it is gone when neither is so. Pure: events in, changes out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from dugnad.dht.advert import Advert
from dugnad.dht.ids import PeerId

HERE_S: Final = 120.0
"""An answer counts for so long: one peer is asked each second, and a full mesh has 64. That a peer
vanished is known sooner, by the end of the connection and by what the others say."""
ASK_S: Final = 3.0
"""No peer is asked more often."""
RETRY_MAX_S: Final = 60.0
"""One that does not answer is asked less and less often, but at least so often."""
GIVE_UP_S: Final = 600.0
"""One that has been gone for so long is asked no more while others are here, who may name it."""
PEERS_MAX: Final = 1024
"""Peers remembered: anybody can make up keys. Those gone longest are forgotten first."""
_NEVER: Final = float("-inf")


@dataclass(frozen=True, slots=True)
class Told:
    """`by` answered: these are the adverts (verified) of itself and of those it sees live."""

    by: PeerId
    adverts: tuple[Advert, ...]
    left: tuple[PeerId, ...] = ()


@dataclass(frozen=True, slots=True)
class Silent:
    """`peer` was asked and gave no answer."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Named:
    """Verified adverts from a place that says nothing of whether their makers are here."""

    adverts: tuple[Advert, ...]


@dataclass(frozen=True, slots=True)
class Known:
    """A peer whose address is known from a link or from last time."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Told | Silent | Named | Known | Tick


@dataclass(frozen=True, slots=True)
class Came:
    """A peer is here."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Went:
    """A peer is here no longer. `left`: it said good-bye."""

    peer: PeerId
    left: bool
    reason: str


Change = Came | Went


@dataclass(slots=True)
class Sighting:
    """What is known of one peer; moments are those of the events, -inf is never."""

    advert: Advert | None = None
    here: bool = False
    since: float = 0.0
    seen: float = _NEVER
    answered: float = _NEVER
    failed: float = _NEVER
    failures: int = 0
    reason: str = ""
    asked: float = _NEVER

    @property
    def answers(self) -> bool:
        """Whether it answered when it was asked last."""
        return self.answered > self.failed


@dataclass(slots=True)
class _List:
    """What one peer said last."""

    at: float
    named: frozenset[PeerId]
    left: frozenset[PeerId] = field(default_factory=frozenset)


class Sightings:
    """The peers of a run as one observer sees them."""

    def __init__(self) -> None:
        self.peers: dict[PeerId, Sighting] = {}
        self._lists: dict[PeerId, _List] = {}

    def handle(self, event: Event, now: float) -> list[Change]:
        """Take an event; who came and went by it."""
        match event:
            case Told(by, adverts, left):
                one = self._sighting(by, now)
                one.answered, one.failures, one.reason = now, 0, ""
                self._take(adverts, now)
                named = frozenset(advert.peer for advert in adverts)
                self._lists[by] = _List(now, named, frozenset(left) - named)
            case Silent(peer, reason):
                one = self._sighting(peer, now)
                one.failed, one.reason = now, reason
                one.failures += 1
                self._lists.pop(peer, None)
            case Named(adverts):
                self._take(adverts, now)
            case Known(peer):
                self._sighting(peer, now)
            case Tick():
                pass
        return self._judge(now)

    def due(self, now: float, count: int) -> list[PeerId]:
        """Up to `count` peers to ask now, those asked longest ago first; they count as asked."""
        alone = not any(one.here for one in self.peers.values())
        rows = [(one.asked, peer) for peer, one in self.peers.items() if _may_ask(one, now, alone)]
        chosen = [peer for _, peer in sorted(rows)[:count]]
        for peer in chosen:
            self.peers[peer].asked = now
        return chosen

    def here(self) -> list[PeerId]:
        """Peers that are here, in the order of their keys."""
        return sorted(peer for peer, one in self.peers.items() if one.here)

    def answering(self) -> list[PeerId]:
        """Peers that answered when they were asked last, in the order of their keys."""
        return sorted(peer for peer, one in self.peers.items() if one.answers)

    def _take(self, adverts: Iterable[Advert], now: float) -> None:
        for advert in adverts:
            one = self._sighting(advert.peer, now)
            if one.advert is None or advert.order >= one.advert.order:
                one.advert = advert

    def _sighting(self, peer: PeerId, now: float) -> Sighting:
        found = self.peers.get(peer)
        if found is None:
            if len(self.peers) >= PEERS_MAX:
                oldest = min(self.peers, key=lambda p: (self.peers[p].here, self.peers[p].seen))
                del self.peers[oldest]
                self._lists.pop(oldest, None)
            found = self.peers[peer] = Sighting(since=now)
        return found

    def _judge(self, now: float) -> list[Change]:
        for by in [by for by, told in self._lists.items() if now - told.at >= HERE_S]:
            del self._lists[by]
        named = {p for by, told in self._lists.items() for p in told.named if p != by}
        left = {p for told in self._lists.values() for p in told.left}
        changes: list[Change] = []
        for peer, one in self.peers.items():
            answers = one.answers and now - one.answered < HERE_S
            here = answers or peer in named
            if here:
                one.seen = now if peer in named else one.answered
            if here == one.here:
                continue
            one.here, one.since = here, now
            if here:
                changes.append(Came(peer))
            else:
                gone = peer in left
                why = "" if gone else one.reason or "no peer names it any more"
                changes.append(Went(peer, gone, why))
        return changes


def _may_ask(one: Sighting, now: float, alone: bool) -> bool:
    if now - one.asked < ASK_S:
        return False
    if one.advert is not None and not one.advert.addresses and not one.answers:
        return False  # it takes no connections
    if not one.failures:
        return True
    if not one.here and not alone and now - max(one.seen, one.since) > GIVE_UP_S:
        return False
    return now - one.failed >= min(ASK_S * 2.0 ** min(one.failures, 8), RETRY_MAX_S)
