"""Who took which units out of order: the claims that are respected, each until it runs out.

A part of the core of work units (`units`): no clock, no network. A claim of a lost peer, or one
that ran out, holds nothing, but stays known until its unit is closed: whoever claimed a unit and
did not get it listed cannot claim it again.
"""

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Final

from dugnad.dht.ids import PeerId

CLAIMS_MAX: Final = 8
"""Units of others that I hold by claim at one time."""
CLAIMS_LATE_MAX: Final = 4 * CLAIMS_MAX
"""And with my own that I begin late: small units, trained and not listed yet, are twenty and more;
what is not claimed of them others do again."""
CLAIMS_RESPECTED_MAX: Final = 2 * CLAIMS_LATE_MAX
"""Units that another may hold by claim, as far as I see: it may have heard of listings that I have
not. More would be a way to keep work from being done."""


@dataclass(frozen=True, slots=True)
class Hold:
    """A peer holds a unit until then (monotonic seconds)."""

    peer: PeerId
    until: float


class ClaimTable:
    """Claims by position of the unit. `lost` are peers whose claims hold nothing, `closed` says of
    a position that nothing is left to do there; both are read whenever they are needed."""

    def __init__(self, lost: Container[PeerId], closed: Callable[[int], bool]) -> None:
        self._lost = lost
        self._closed = closed
        self._holds: dict[int, Hold] = {}

    def __contains__(self, position: object) -> bool:
        """Whether anybody ever claimed it, as long as it is open."""
        return position in self._holds

    def holder(self, position: int, now: float) -> PeerId | None:
        """Whose claim on a unit holds; None without one."""
        hold = self._holds.get(position)
        if hold is None or now >= hold.until or hold.peer in self._lost:
            return None
        return hold.peer

    def take(self, positions: Iterable[int], hold: Hold) -> None:
        """Note a claim of mine."""
        self._holds.update(dict.fromkeys(positions, hold))

    def respect(
        self, position: int, hold: Hold, now: float, better: Callable[[PeerId, PeerId], bool]
    ) -> bool:
        """Note another's claim, unless the one that stands is as good; `better(a, b)`: a's is the
        better placed. Nobody can claim the same unit again."""
        known = self._holds.get(position)
        if known is not None and known.peer == hold.peer:
            return False
        holder = self.holder(position, now)
        if holder is not None and not better(hold.peer, holder):
            return False
        self._holds[position] = hold
        return True

    def room(self, me: PeerId, now: float) -> int:
        """How many units of others I may still claim."""
        return max(CLAIMS_MAX - self.count(me, now), 0)

    def room_late(self, me: PeerId, now: float) -> int:
        """How many of my own that I begin late."""
        return max(CLAIMS_LATE_MAX - self.count(me, now), 0)

    def room_of(self, peer: PeerId, now: float) -> int:
        """How many more claims of another are respected."""
        return max(CLAIMS_RESPECTED_MAX - self.count(peer, now), 0)

    def count(self, peer: PeerId, now: float) -> int:
        """Open units that a peer holds by claims that have not run out."""
        return sum(
            hold.peer == peer and now < hold.until and not self._closed(position)
            for position, hold in self._holds.items()
        )

    def forget_below(self, floor: int) -> None:
        """Drop claims on closed units below the floor."""
        for position in [p for p in self._holds if p < floor and self._closed(p)]:
            del self._holds[position]
