"""What neighbours in a crowd say to each other, to and from the words of the crowd's core.

The core speaks of slots and believes what it is told. Here rumours get their proofs on the way out,
and on the way in only what is proven passes: a rumour of somebody unknown makes us want its advert,
a loss needs a signature, and of a peer that we hear ourselves nobody else need tell us.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from dugnad.dht.advert import Advert
from dugnad.dht.messages import (
    FULL,
    GREET,
    RUMOURS,
    SPARE,
    SYNC,
    TABLE,
    TAG_BYTES,
    TALK_GONE_MAX,
    Gone,
    Talk,
    gone_holds,
)
from dugnad.dht.roster_members import DOUBT_S, INCARNATION_MAX, Members
from dugnad.dht.roster_own import Own
from dugnad.dht.roster_rumours import (
    ORDER_BITS,
    ORDER_MASK,
    CrowdMessage,
    Full,
    Greet,
    Rumours,
    Spare,
    Sync,
    TablePart,
    rumour,
)
from dugnad.dht.roster_wants import Wants

_ROW: Final = struct.Struct(f"!{TAG_BYTES}sI")


class CrowdTalk:
    """Both directions, over one table of members."""

    def __init__(self, own: Own, members: Members, wants: Wants) -> None:
        self._own = own
        self._members = members
        self._wants = wants

    # --- out

    def encode(self, message: CrowdMessage, known: int) -> Iterator[Talk]:
        """The wire's messages for one of the core's; `known` live members, ourselves included."""
        match message:
            case Greet(order, wants_table):
                yield Talk(GREET, known, order & ~1 | wants_table)
            case Full():
                yield Talk(FULL, known)
            case Spare():
                yield Talk(SPARE, known)
            case TablePart(codes, last):
                yield Talk(TABLE, known, int(last), self._rows(codes))
            case Sync(codes):
                yield Talk(SYNC, known, 0, self._rows(codes))
            case Rumours(codes):
                yield from self._news(codes, known)

    def _rows(self, codes: tuple[int, ...]) -> bytes:
        peers = self._members.slots
        return b"".join(
            _ROW.pack(peers.peer(code >> ORDER_BITS)[:TAG_BYTES], code & ORDER_MASK)
            for code in codes
            if not code & 1
        )

    def _news(self, codes: tuple[int, ...], known: int) -> Iterator[Talk]:
        gone: list[Gone] = []
        for code in codes:
            member = self._members.get(code >> ORDER_BITS)
            if code & 1 and member is not None and member.gone is not None:
                gone.append(member.gone)  # else it is back: newer word of it is queued behind
        here = self._rows(codes)
        if here or gone:
            yield Talk(RUMOURS, known, 0, here, tuple(gone[:TALK_GONE_MAX]))
        for at in range(TALK_GONE_MAX, len(gone), TALK_GONE_MAX):
            yield Talk(RUMOURS, known, 0, b"", tuple(gone[at : at + TALK_GONE_MAX]))

    def adverts(self, tags: list[bytes]) -> tuple[Advert, ...]:
        """What we have of the peers whose keys start so, ourselves included."""
        found: list[Advert] = []
        for tag in tags:
            slot = self._members.slots.tagged(tag)
            if slot == self._members.mine:
                found.append(self._own.advert)
            elif (member := self._members.get(slot)) is not None and member.gone is None:
                found.append(member.advert)
        return tuple(found)

    # --- in

    def decode(self, talk: Talk, link: int, now: float) -> CrowdMessage | str:
        """The core's message, of what is proven; or the fault for which to refuse the neighbour.

        What is not proven yet is wanted of the neighbour (`Wants`).
        """
        codes: list[int] = []
        if len(talk.here) % _ROW.size:
            return "a list of rumours is cut short"
        for tag, order in _ROW.iter_unpack(talk.here):
            if order & 1 or not order:
                return "a live peer with the order of one that is gone"
            code = self._here(tag, order, link, news=talk.kind != TABLE)
            if code is not None:
                codes.append(code)
        for gone in talk.gone:
            code = self._gone(gone, now)
            if code is not None:
                codes.append(code)
        return self._message(talk, link, tuple(codes))

    def _message(self, talk: Talk, link: int, codes: tuple[int, ...]) -> CrowdMessage:
        if talk.kind == GREET:
            member = self._members.get(link)
            assert member is not None, "a neighbour proved itself in its hello"
            return Greet(2 * member.advert.incarnation, bool(talk.number & 1))
        if talk.kind == TABLE:
            return TablePart(codes, bool(talk.number))
        if talk.kind == SYNC:
            return Sync(codes)
        if talk.kind == FULL:
            return Full()
        return Spare() if talk.kind == SPARE else Rumours(codes)

    def _here(self, tag: bytes, order: int, link: int, *, news: bool) -> int | None:
        slot = self._members.slots.tagged(tag)
        if slot == self._members.mine:
            if order > 2 * self._own.advert.incarnation:  # a former life, or a second daemon
                self._wants.want(link, tag, news=news)
            return None
        member = self._members.get(slot)
        if slot is None or member is None or 2 * member.advert.incarnation < order:
            self._wants.want(link, tag, news=news)
            return None
        return rumour(slot, order)

    def _gone(self, gone: Gone, now: float) -> int | None:
        """The rumour of a loss that is proven and newer than what we know; None if it is not."""
        members = self._members
        member = members.of(gone.peer)
        if member is None or gone.incarnation != member.advert.incarnation:
            return None  # of another life, or of somebody whose advert will come
        slot = members.slots.of(gone.peer)
        if member.gone is None:
            if not self.believed(gone, now):
                return None
            members.end(slot, gone, now, 0.0 if gone.by == gone.peer else DOUBT_S)
        return rumour(slot, member.order)

    def believed(self, gone: Gone, now: float) -> bool:
        """Whether the word is signed, and its giver has not accused too many."""
        if gone.incarnation > INCARNATION_MAX:
            return False
        if not gone_holds(gone, self._own.config.run, self._own.verifier):
            return False
        return gone.by == gone.peer or self._members.may_accuse(gone.by, now)
