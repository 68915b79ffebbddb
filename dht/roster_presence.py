"""Who is up, as the roster tells it, when two know: our own streams and the crowd.

In a mesh the parts of the roster tell it themselves, and here it is only written down. In a crowd
what they tell is taken out again and told anew from the state of both sources: a neighbour whose
stream ends in peace stays up, and so does one that others hear.
"""

from __future__ import annotations

from typing import Final

from dugnad.dht.advert import Advert
from dugnad.dht.ids import PeerId, short
from dugnad.dht.roster_events import Action, PeerChanged, PeerLeft, PeerLost, PeerUp
from dugnad.dht.roster_members import Member, Members
from dugnad.dht.roster_own import Own
from dugnad.dht.roster_table import Entry, Table

LEFT: Final = "said good-bye"


class Presence:
    """Appends to `out`. `up` is who was told to be up, with the advert that was told."""

    def __init__(self, own: Own, table: Table, out: list[Action]) -> None:
        self._own = own
        self._table = table
        self._out = out
        self.up: dict[PeerId, Advert] = {}
        self._touched: dict[PeerId, str] = {}
        self._told = 0

    def touch(self, peer: PeerId, reason: str = "") -> None:
        """Something about a peer may have changed; `reason`: why it is lost, if it is."""
        if peer != self._own.peer and not self._touched.get(peer):
            self._touched[peer] = reason

    def mesh(self) -> None:
        """What the mesh tells in this event is what is up."""
        for action in self._out[self._told :]:
            match action:
                case PeerUp(peer, advert) | PeerChanged(peer, advert):
                    self.up[peer] = advert
                case PeerLost(peer) | PeerLeft(peer):
                    self.up.pop(peer, None)
                case _:
                    pass
        self._told = len(self._out)

    def intercept(self) -> list[PeerId]:
        """Takes back what our own streams alone said; peers whose streams ended for good."""
        rest, ended = self._out[: self._told], list[PeerId]()
        for action in self._out[self._told :]:
            match action:
                case PeerUp(peer) | PeerChanged(peer):
                    self.touch(peer)
                case PeerLost(peer, reason):
                    self._touched[peer] = reason
                    ended.append(peer)
                case PeerLeft(peer):
                    self._touched[peer] = LEFT
                    ended.append(peer)
                case _:
                    rest.append(action)
        self._out[:] = rest
        self._told = len(self._out)
        return ended

    def done(self) -> None:
        """The event is over: its actions are the shell's."""
        self._told = 0

    def tell(self, members: Members | None, now: float) -> None:
        """Says what changed; `members`: the crowd's word, if there is one."""
        touched, self._touched = self._touched, {}
        for peer, reason in touched.items():
            entry, member = self._table.get(peer), members.of(peer) if members else None
            advert = self._advert(entry, member, now)
            was = self.up.get(peer)
            if was is not None and (advert is None or advert.boot != was.boot):
                del self.up[peer]
                self._out.append(self._farewell(peer, member, reason, restarted=advert is not None))
            if advert is None:
                continue
            if peer not in self.up:
                self._out.append(PeerUp(peer, advert))
            elif was is not None and advert.order > was.order:
                self._out.append(PeerChanged(peer, advert))
            self.up[peer] = advert

    def _farewell(
        self, peer: PeerId, member: Member | None, reason: str, *, restarted: bool
    ) -> PeerLost | PeerLeft:
        gone = member.gone if member is not None else None
        if restarted:
            return PeerLost(peer, "restarted")
        if reason == LEFT or (gone is not None and gone.by == peer):
            return PeerLeft(peer)
        if gone is not None and gone.by != self._own.peer:
            return PeerLost(peer, f"not reached by {short(gone.by)}")
        return PeerLost(peer, reason or "not reached")

    def _advert(self, entry: Entry | None, member: Member | None, now: float) -> Advert | None:
        """What a peer that is up says of itself; None when it is not."""
        if entry is not None and entry.counted and entry.advert is not None:
            newer = member is not None and member.advert.order > entry.advert.order
            if newer and member is not None and member.advert.boot == entry.advert.boot:
                return member.advert
            return entry.advert
        if member is None or not member.stands(now):
            return None
        return member.advert if self._own.admits(member.advert.peer) else None
