"""The members of a crowd, as far as they proved themselves: adverts, signed losses, doubts.

A rumour counts only with its proof: that a member is here, by its signed advert; that it is gone,
by the signed word of itself (it leaves) or of a member that looked for it in vain. So nobody can
invent members, and whoever accuses others is named. An accusation makes a member doubtful; it is
lost when it has not refuted it in time, and does not answer whoever doubts it.
"""

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Final

from dugnad.dht.advert import Advert
from dugnad.dht.ids import PeerId
from dugnad.dht.messages import TAG_BYTES, Gone
from dugnad.dht.records import RecordError
from dugnad.dht.roster_rumours import ORDER_MASK, Slots

MEMBERS_MAX: Final = 4096
"""Members that a daemon knows, gone ones included: 10 MB of adverts. Keys cost nothing, so there
must be an end."""
INCARNATION_MAX: Final = ORDER_MASK >> 1
"""A rumour has 31 bits for it: seconds of the wall clock until 2038."""
DOUBT_S: Final = 4.0
"""For a member that was called gone to say otherwise: a dozen hops of 0.3 s there and back."""
GONE_KEPT_S: Final = 600.0
"""Who is gone is remembered for so long, against rumours that are late."""
ACCUSATIONS_MAX: Final = 16
ACCUSED_S: Final = 60.0
"""An honest member sees its few neighbours end, and dials somebody now and then; of one that
accuses more than that in this time the rest is not heard."""


@dataclass(slots=True)
class Member:
    """One member. `gone`: the word that ended it, since `since`; doubtful until `doubt_until`."""

    advert: Advert
    gone: Gone | None = None
    since: float = 0.0
    doubt_until: float = 0.0
    accused: deque[float] = field(default_factory=lambda: deque(maxlen=ACCUSATIONS_MAX))
    """When it called others gone, lately."""

    @property
    def order(self) -> int:
        """What its rumours say: twice the incarnation, odd when it is gone."""
        return 2 * self.advert.incarnation + (self.gone is not None)

    @property
    def can_dial(self) -> bool:
        """Whether others can open a stream to it."""
        return bool(self.advert.addresses) and self.advert.reachable != "outbound"

    def stands(self, now: float) -> bool:
        """Whether it counts as here: nobody called it gone, or it may still say otherwise."""
        return self.gone is None or now < self.doubt_until


class Members:
    """By slot. Bounded; slots of those long gone are given back."""

    def __init__(self, me: PeerId) -> None:
        self.slots = Slots()
        self.mine = self.slots.of(me)
        self._members: dict[int, Member] = {}
        self.doubtful: set[int] = set()

    def get(self, slot: int | None) -> Member | None:
        """Who has this slot."""
        return self._members.get(slot) if slot is not None else None

    def of(self, peer: PeerId) -> Member | None:
        """A peer, if it ever proved itself."""
        return self.get(self.slot(peer))

    def slot(self, peer: PeerId) -> int | None:
        """Where a peer is, if it has a place."""
        slot = self.slots.tagged(peer[:TAG_BYTES])
        return slot if slot is not None and self.slots.peer(slot) == peer else None

    def here(self) -> list[tuple[int, Member]]:
        """Members that nobody called gone."""
        return [(slot, one) for slot, one in self._members.items() if one.gone is None]

    def proven(self, advert: Advert) -> int | None:
        """Takes a verified advert; the slot of its peer, or None when there is no place for it."""
        if not 0 < advert.incarnation <= INCARNATION_MAX:
            return None
        known = self.of(advert.peer)
        if known is None:
            if len(self._members) >= MEMBERS_MAX:
                return None
            try:
                slot = self.slots.of(advert.peer)
            except RecordError:
                return None
            self._members[slot] = Member(advert)
            return slot
        slot = self.slots.of(advert.peer)
        if advert.order > known.advert.order:
            if advert.incarnation > known.advert.incarnation:
                known.gone = None
                self.doubtful.discard(slot)
            known.advert = advert
        return slot

    def may_accuse(self, peer: PeerId, now: float) -> bool:
        """Counts an accusation; whether it is heard."""
        member = self.of(peer)
        if member is None:
            return False
        said = member.accused
        if len(said) == ACCUSATIONS_MAX and now - said[0] < ACCUSED_S:
            return False
        said.append(now)
        return True

    def end(self, slot: int, gone: Gone, now: float, doubt_s: float) -> None:
        """Takes a proven loss of the member's present incarnation."""
        member = self._members[slot]
        member.gone, member.since = gone, now
        member.doubt_until = now + doubt_s
        if doubt_s:
            self.doubtful.add(slot)

    def doubt(self, slot: int, until: float) -> None:
        """A member that was called gone has some time more."""
        self._members[slot].doubt_until = until
        self.doubtful.add(slot)

    def settled(self, now: float) -> list[int]:
        """Doubtful members whose time to refute is over; sorted."""
        over = sorted(s for s in self.doubtful if self._members[s].doubt_until <= now)
        self.doubtful.difference_update(over)
        return over

    def wait(self, until: float) -> None:
        """We did not run: nobody's time ends before this."""
        for slot in self.doubtful:
            member = self._members[slot]
            member.doubt_until = max(member.doubt_until, until)

    def sweep(self, now: float, used: Container[int] = ()) -> list[int]:
        """Forgets who is gone for long, but none of `used`; the slots that are free."""
        old = [
            slot
            for slot, one in self._members.items()
            if one.gone is not None and now - one.since >= GONE_KEPT_S and slot not in used
        ]
        for slot in old:
            del self._members[slot]
            self.doubtful.discard(slot)
            self.slots.free(slot)
        return old
