"""One crowd, from its first moment to its last: streams, dials and rumours of its member here.

The control streams, their hellos and heartbeats are what they are in a mesh, and `roster_liveness`
goes on to judge them; what it finds becomes events of the crowd's core (`roster_crowd`), and what
that one wants becomes dials, messages and ends of streams. `roster_crowdtalk` proves rumours.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from dugnad.dht.advert import Advert
from dugnad.dht.ids import PeerId
from dugnad.dht.messages import (
    RUMOURS,
    TAG_BYTES,
    Adverts,
    AdvertUpdate,
    Gone,
    Talk,
    WantAdverts,
    sign_gone,
)
from dugnad.dht.roster_crowd import Crowd, Manner
from dugnad.dht.roster_crowd_events import (
    Changed,
    Close,
    CrowdAction,
    CrowdEvent,
    Dial,
    Heard,
    LinkUp,
    Lost,
    Parted,
    Tell,
    Tick,
    Unreached,
)
from dugnad.dht.roster_crowdtalk import CrowdTalk
from dugnad.dht.roster_events import Action, Send
from dugnad.dht.roster_gossip import FRESH_S, Gossip
from dugnad.dht.roster_liveness import Liveness
from dugnad.dht.roster_members import DOUBT_S, Members
from dugnad.dht.roster_own import Own
from dugnad.dht.roster_presence import Presence
from dugnad.dht.roster_rumours import ORDER_BITS, ORDER_MASK, Rumours, TablePart, rumour
from dugnad.dht.roster_table import Entry, State, Table
from dugnad.dht.roster_wants import Wants, tags_of

PERIOD_MIN_S: Final = 0.1
PERIOD_MAX_S: Final = 0.3
"""News of a daemon's crowd is collected for so long: thousands of members are not in motion there,
and a lost member's work waits."""
SHUFFLE_S: Final = 20.0
"""Each member dials another one so often: a peer whose neighbours all vanished with it is found out
in as long, in the mean."""
SYNC_S: Final = 5.0
GREET_SIZE: Final = 256
"""Members that are compared: 32 in so long, 80 B/s; and 3 kB with each new neighbour."""
SAY_S: Final = 30.0
"""What changed in our own advert is told to the crowd at most so often: everybody fetches it."""
SWEEP_S: Final = 60.0
CONFIRM_S: Final = 2.0
"""For a member that was called gone to answer us: two losses of a first packet."""
CONFIRMS_MAX: Final = 32
"""Such dials at once; when many vanish together the last of them are known some seconds later."""


class CrowdLife:
    """Appends to `out`; its owner calls `act` after each event, and at `deadlines`."""

    def __init__(
        self,
        own: Own,
        table: Table,
        liveness: Liveness,
        gossip: Gossip,
        presence: Presence,
        out: list[Action],
        rng: random.Random,
    ) -> None:
        self._own = own
        self._table = table
        self._liveness = liveness
        self._gossip = gossip
        self._presence = presence
        self._out = out
        self.members = Members(own.peer)
        self.core = Crowd(
            self.members.mine,
            own.advert.incarnation,
            rng,
            Manner(
                own.config.links,
                own.config.links_max,
                PERIOD_MIN_S,
                PERIOD_MAX_S,
                SHUFFLE_S,
                SYNC_S,
                GREET_SIZE,
                watches=False,
            ),
        )
        self._wants = Wants()
        self._talk = CrowdTalk(own, self.members, self._wants)
        self._todo: deque[CrowdEvent] = deque()
        self._numbers: dict[int, int] = {}
        self._dialling: set[int] = set()
        self._confirming: set[int] = set()
        self._refute: int | None = None
        self._said: tuple[float, int] = (0.0, own.advert.seq)
        self._sweep_at = 0.0

    def start(self, up: Mapping[PeerId, Advert], now: float, *, whole: bool) -> None:
        """Who is up is a member, each stream a link. `whole`: that is all there is to know."""
        fresh = self._gossip.take_news()
        self._said = (now, self._own.advert.seq)
        self._sweep_at = now + SWEEP_S
        table = array("I", [0])
        for peer, advert in up.items():
            slot = self.members.proven(advert)
            member = self.members.get(slot)
            if slot is None or member is None:
                continue
            table.extend([0] * (slot + 1 - len(table)))
            table[slot] = 0 if peer in fresh else member.order
            if not member.can_dial:
                self.core.shut.add(slot)
        self.core.adopt(table)
        self.core.has_table = whole
        self.see_links(now, kept=True)
        for peer in sorted(fresh):
            slot = self.members.slot(peer)
            if slot is not None and slot in self.core.links:
                self._feed(Heard(slot, Rumours((rumour(slot, self._order(slot)),))), now)

    # --- questions

    def deadlines(self) -> Iterator[float]:
        """When `act` has something to do."""
        yield self.core.deadline
        yield from self._wants.deadlines()
        for slot in self.members.doubtful:
            member = self.members.get(slot)
            if member is not None:
                yield member.doubt_until

    # --- what neighbours say

    def message(
        self, entry: Entry, message: Talk | WantAdverts | Adverts, now: float
    ) -> str | None:
        """A message on an established stream; the fault for which to refuse its sender."""
        self.see_links(now)
        slot = self.members.slot(entry.peer)
        if slot is None or slot not in self.core.links:
            return None
        match message:
            case Talk():
                return self._talked(message, entry, slot, now)
            case WantAdverts(tags):
                found = self._talk.adverts(tags_of(tags))
                self._send(entry, Adverts(found))
            case Adverts(adverts):
                asked = self._wants.answered(slot)
                for advert in adverts:
                    news = asked.get(advert.peer[:TAG_BYTES], True)
                    if (fault := self._proof(advert, entry.peer, slot, now, news=news)) is not None:
                        return fault
        return None

    def _talked(self, talk: Talk, entry: Entry, slot: int, now: float) -> str | None:
        gone = [one for one in talk.gone if not self._contradicts(one, now)]
        doubts = len(self.members.doubtful)
        talk = msgspec.structs.replace(talk, gone=tuple(gone))
        message = self._talk.decode(talk, slot, now)
        if isinstance(message, str):
            return message
        if len(self.members.doubtful) > doubts:
            self.core.hasten(now)
        self._feed(Heard(slot, message), now)
        return None

    def _contradicts(self, gone: Gone, now: float) -> bool:
        """Word of a loss that we know better: of ourselves, or of somebody whom we hear."""
        own = self._own
        if gone.peer == own.peer:
            now_meant = gone.by != own.peer and gone.incarnation >= own.advert.incarnation
            if now_meant and self._talk.believed(gone, now):
                self._refute = own.advert.incarnation
            return True
        heard = self._table.get(gone.peer)
        if gone.by == gone.peer or heard is None:
            return False
        if not self._liveness.hears(heard, now, FRESH_S):
            return False
        if gone.incarnation == heard.incarnation:
            self._send(heard, Talk(RUMOURS, self._known(), 0, b"", (gone,)))
        return True

    def _proof(
        self, advert: Advert, by: PeerId, link: int, now: float, *, news: bool = True
    ) -> str | None:
        """Somebody's advert from a neighbour. The fault for which to refuse that one, or None."""
        if advert.peer == self._own.peer:
            self._gossip.about_me(advert, by, now)
            return None
        known = self.members.of(advert.peer)
        if known is not None and advert.order <= known.advert.order:
            return None
        if not self._own.admits(advert.peer) or not self._own.may_reach(advert):
            return None
        fault = self._own.fault(advert)
        if fault is not None:
            return fault
        self._prove(advert, link, now, news=news)
        return None

    def _prove(self, advert: Advert, link: int, now: float, *, news: bool = True) -> int | None:
        """Takes a verified advert into the crowd; its slot, or None without a place for it."""
        core = self.core
        slot = self.members.proven(advert)
        member = self.members.get(slot)
        if slot is None or member is None:
            return None
        (core.shut.discard if member.can_dial else core.shut.add)(slot)
        self._presence.touch(advert.peer)
        codes = (rumour(slot, 2 * advert.incarnation),)
        if link in core.links:
            self._feed(Heard(link, Rumours(codes) if news else TablePart(codes, False)), now)
        return slot

    # --- time

    def act(self, now: float) -> None:
        """Whatever the last event, or time, brought."""
        self.see_links(now)
        self._see_dials(now)
        self._pass_on(now)
        self._speak(now)
        self._see_confirms(now)
        for slot in self.members.settled(now):
            self._confirm(slot, now)
        if self.core.deadline <= now:
            self._feed(Tick(), now)
        self._drain(now)
        self._ask(now)
        if now >= self._sweep_at:
            self._sweep(now)

    def jumped(self, now: float) -> None:
        """We stood still: nobody is lost by what we did not hear meanwhile."""
        self.members.wait(now + DOUBT_S)

    def leave(self) -> None:
        """Signed word that we go, to each neighbour."""
        own = self._own
        gone = sign_gone(own.peer, own.advert.incarnation, own.signer, own.config.run)
        for entry in self._table.listening():
            self._send(entry, Talk(RUMOURS, self._known(), 0, b"", (gone,)))

    # --- links

    def see_links(self, now: float, *, kept: bool = False) -> None:
        """Streams that came and went since we looked last."""
        core = self.core
        linked: set[int] = set()
        for entry in list(self._table):
            if entry.state is State.SUSPECT and (slot := self.members.slot(entry.peer)) is not None:
                linked.add(slot)
            stream = entry.main() if entry.state is State.LIVE else None
            if stream is None or entry.advert is None:
                continue
            slot = self.members.proven(entry.advert)
            if slot is None:
                continue
            linked.add(slot)
            if slot not in core.links or self._numbers.get(slot) != stream.number:
                ours = slot in self._dialling and not kept
                self._numbers[slot] = stream.number
                self._feed(LinkUp(slot, stream.outgoing, not ours), now)
                self._greet_lost(slot)
            if self._order(slot) > core.order_of(slot):
                self._prove(entry.advert, slot, now)
        for slot in [one for one in core.links if one not in linked]:
            entry_of = self._table.get(self.members.slots.peer(slot))
            self._numbers.pop(slot, None)
            if entry_of is not None and entry_of.state in (State.LOST, State.LEFT):
                self._lose(slot, now)
            else:
                self._feed(Parted(slot), now)

    def _greet_lost(self, slot: int) -> None:
        """A new neighbour that was called gone is told so, and asked for all that it knows: the
        swarm may have been in two."""
        core = self.core
        if core.order_of(slot) & 1:
            core.show(slot, (slot,))
            self._perform(core.ask_table(slot))

    def _lose(self, slot: int, now: float) -> None:
        """A member that was sought in vain: our signed word, unless we hear nobody ourselves."""
        member = self.members.get(slot)
        peer = self.members.slots.peer(slot)
        if member is None:
            return
        if not any(one.peer != peer for one in self._table.listening()):
            self._feed(Parted(slot), now)
            return
        if member.gone is None:
            own = self._own
            gone = sign_gone(peer, member.advert.incarnation, own.signer, own.config.run)
            self.members.end(slot, gone, now, 0.0)
        self._presence.touch(peer, "not reached")
        self._feed(Lost(slot), now)

    def _see_dials(self, now: float) -> None:
        """Dials of the core that ended."""
        for slot in sorted(self._dialling):
            entry = self._table.get(self.members.slots.peer(slot))
            if entry is not None and entry.dialled():
                if entry.established():
                    self._dialling.discard(slot)
                continue
            self._dialling.discard(slot)
            self._feed(Unreached(slot), now)
            state = entry.state if entry is not None else State.UNKNOWN
            if state in (State.KNOWN, State.LOST):
                self._lose(slot, now)

    def _confirm(self, slot: int, now: float) -> None:
        """A member did not refute that it is gone: we look ourselves, if it can be dialled.

        Word of it may not have come through: of a member that accuses many not all is passed on.
        """
        member, peer = self.members.get(slot), self.members.slots.peer(slot)
        entry = self._table.ensure(peer, now) if member is not None else None
        if member is None or entry is None or not member.can_dial:
            self._touch(slot)
        elif entry.state is State.LIVE or len(self._confirming) >= CONFIRMS_MAX:
            self.members.doubt(slot, now + CONFIRM_S / 4)
        else:
            self.members.doubt(slot, now + 2 * CONFIRM_S)
            self._confirming.add(slot)
            self._gossip.adopt_quietly(entry, member.advert)
            if not entry.streams:
                self._liveness.dial(entry, CONFIRM_S, now)

    def _see_confirms(self, now: float) -> None:
        for slot in sorted(self._confirming):
            entry = self._table.get(self.members.slots.peer(slot))
            if entry is not None and entry.dialled():
                if entry.established():
                    self._confirming.discard(slot)
                continue
            self._confirming.discard(slot)
            member = self.members.get(slot)
            if member is not None and member.gone is not None:
                self.members.doubt(slot, now)
                self.members.doubtful.discard(slot)
                self._touch(slot)
            if entry is not None and entry.last_seen is None:
                entry.retry_at = None  # never a neighbour: those who were look for it

    # --- word

    def _pass_on(self, now: float) -> None:
        """Adverts that peers of a mesh told us of."""
        for by, advert in self._gossip.take_heard():
            slot = self.members.slot(by)
            if slot is not None and slot in self.core.links:
                self._proof(advert, by, slot, now)

    def _speak(self, now: float) -> None:
        """Our own incarnation rises: to refute, or since our advert says something new."""
        own, core = self._own, self.core
        at, seq = self._said
        if self._refute is not None and own.outlive(self._refute, now):
            self._refute = None
            self._gossip.send_all(AdvertUpdate(own.advert))
        elif own.advert.seq > seq and now >= at + SAY_S:
            own.outlive(own.advert.incarnation, now, at_once=True)
            self._gossip.send_all(AdvertUpdate(own.advert))
        if 2 * own.advert.incarnation > core.own_rumour & ORDER_MASK:
            self._said = (now, own.advert.seq)
            core.restate(2 * own.advert.incarnation, now)

    def _ask(self, now: float) -> None:
        links = self.core.links
        self._wants.keep(set(links), now)
        for slot in links:
            tags = self._wants.request(slot, now)
            entry = self._table.get(self.members.slots.peer(slot))
            if tags and entry is not None:
                self._send(entry, WantAdverts(tags))

    # --- the core

    def _feed(self, event: CrowdEvent, now: float) -> None:
        for action in self.core.handle(event, now):
            self._perform(action, now)

    def _drain(self, now: float) -> None:
        for _ in range(len(self._todo)):
            self._feed(self._todo.popleft(), now)

    def _perform(self, action: CrowdAction, now: float = 0.0) -> None:
        peer_of = self.members.slots.peer
        match action:
            case Changed(codes):
                for code in codes:
                    self._touch(code >> ORDER_BITS)
            case Tell(slot, message):
                entry = self._table.get(peer_of(slot))
                if entry is not None:
                    for talk in self._talk.encode(message, self._known()):
                        self._send(entry, talk)
            case Close(slot):
                entry = self._table.get(peer_of(slot))
                self._numbers.pop(slot, None)
                if entry is not None:
                    self._liveness.part(entry, "a member of the crowd", now)
            case Dial(slot, deadline_s):
                self._dial(slot, deadline_s, now)

    def _dial(self, slot: int, deadline_s: float, now: float) -> None:
        member = self.members.get(slot)
        peer = self.members.slots.peer(slot)
        entry = self._table.ensure(peer, now) if member is not None else None
        shut = entry is None or entry.banned_until > now or not self._own.admits(peer)
        if entry is None or member is None or shut:
            self._todo.append(Unreached(slot))
            return
        self._gossip.adopt_quietly(entry, member.advert)
        self._dialling.add(slot)
        if not entry.streams:
            self._liveness.dial(entry, deadline_s, now)

    def _sweep(self, now: float) -> None:
        self._sweep_at = now + SWEEP_S
        used = {*self.core.links, *self._dialling, *self._confirming}
        for slot in self.members.sweep(now, used):
            self.core.forget(slot)

    # --- helpers

    def _order(self, slot: int) -> int:
        member = self.members.get(slot)
        return member.order if member is not None else 0

    def _touch(self, slot: int) -> None:
        if slot != self.members.mine:
            self._presence.touch(self.members.slots.peer(slot))

    def _known(self) -> int:
        return len(self._presence.up) + 1

    def _send(self, entry: Entry, message: Talk | WantAdverts | Adverts) -> None:
        stream = entry.main()
        if stream is not None:
            self._out.append(Send(entry.peer, stream.number, message))
