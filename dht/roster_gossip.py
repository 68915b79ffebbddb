"""What peers tell each other about peers: adverts, who hears whom, refutations, good-byes.

Whoever gets a stream to a peer says so, once, to all who did not say the same. So everybody finds
everybody, and peers that cannot reach each other (both behind NAT) know of each other. Nobody is
believed to be lost by hearsay alone: an accusation makes us look for ourselves.
"""

from typing import Final

from dugnad.dht.advert import Advert
from dugnad.dht.heartbeat import HEARTBEAT_S
from dugnad.dht.ids import PeerId
from dugnad.dht.messages import (
    PEERS_KNOWN_MAX,
    AdvertUpdate,
    AliveNotice,
    Leaving,
    LostNotice,
    Message,
    PeersKnown,
)
from dugnad.dht.roster_events import Action, DuplicateIdentity, PeerChanged, Send
from dugnad.dht.roster_liveness import Liveness
from dugnad.dht.roster_own import Own
from dugnad.dht.roster_table import ControlStream, Entry, State, Table

FRESH_S: Final = 2.0 * HEARTBEAT_S
"""Heard within two heartbeats: we may say that a peer is alive."""
NEWS_S: Final = 0.1
"""Peers that come together are told of together."""


class Gossip:
    """Takes and gives word about peers; its owner calls `tell_news` at `news_at`."""

    def __init__(self, own: Own, table: Table, liveness: Liveness, out: list[Action]) -> None:
        self._own = own
        self._table = table
        self._liveness = liveness
        self._out = out
        self._news: set[PeerId] = set()
        self._heard: list[tuple[PeerId, Advert]] = []
        self.news_at: float | None = None

    # --- giving

    def send(self, entry: Entry, message: Message) -> None:
        """Sends on the peer's main stream, if it has one."""
        stream = entry.main()
        if stream is not None:
            self._out.append(Send(entry.peer, stream.number, message))

    def send_all(self, message: Message) -> None:
        """Sends to everybody with whom we hold a stream."""
        for entry in self._table.listening():
            self.send(entry, message)

    def catch_up(self, entry: Entry, stream: ControlStream, now: float) -> None:
        """All that a peer should know from us, on a new stream or the one left of two."""
        if self._own.crowded:
            self._out.append(Send(entry.peer, stream.number, AdvertUpdate(self._own.advert)))
            return
        heard = [
            other.advert
            for other in self._table.listening()
            if other.peer != entry.peer
            and other.advert is not None
            and self._liveness.hears(other, now, FRESH_S)
        ]
        messages = (
            AdvertUpdate(self._own.advert),
            PeersKnown(tuple(heard[:PEERS_KNOWN_MAX]), complete=True),
        )
        self._out.extend(Send(entry.peer, stream.number, message) for message in messages)

    def collect_news(self, now: float) -> None:
        """Peers that came, came back or changed are told of shortly."""
        if self._own.crowded:
            self._liveness.fresh.clear()  # the crowd has ways of its own
            return
        if self._liveness.fresh:
            self._news |= self._liveness.fresh
            self._liveness.fresh.clear()
            if self.news_at is None:
                self.news_at = now + NEWS_S

    def tell_news(self, now: float) -> None:
        """Tells each peer what it has not told us itself."""
        self.news_at = None
        subjects = [
            entry
            for entry in self._table.listening()
            if entry.peer in self._news and self._liveness.hears(entry, now, FRESH_S)
        ]
        self._news.clear()
        for reader in self._table.listening():
            adverts = tuple(
                entry.advert
                for entry in subjects
                if entry is not reader
                and entry.advert is not None
                and reader.peer not in entry.vouchers
            )
            if adverts:
                self.send(reader, PeersKnown(adverts[:PEERS_KNOWN_MAX]))

    def take_news(self) -> set[PeerId]:
        """Peers of which others were to hear; it is the caller's business now."""
        news, self._news = self._news | self._liveness.fresh, set()
        self._liveness.fresh.clear()
        self.news_at = None
        return news

    # --- taking

    def take_heard(self) -> list[tuple[PeerId, Advert]]:
        """What peers of a mesh told us while we are in a crowd: (teller, advert not judged yet)."""
        heard, self._heard = self._heard, []
        return heard

    def adopt_quietly(self, entry: Entry, advert: Advert) -> None:
        """Takes a verified advert of a peer that others vouch for."""
        if entry.advert is None or advert.order > entry.advert.order:
            entry.advert = advert
        entry.add_addresses(advert.addresses)

    def adopt(self, entry: Entry, advert: Advert) -> bool:
        """Takes a verified advert as the peer's own if it is newer, or from another boot than ours
        of it.
        """
        known = entry.advert
        if known is not None and advert.order <= known.order and advert.boot == known.boot:
            return False
        entry.advert = advert
        entry.add_addresses(advert.addresses)
        if entry.counted:
            self._out.append(PeerChanged(entry.peer, advert))
        return True

    def own_advert(self, entry: Entry, stream: ControlStream, advert: Advert) -> str | None:
        """The peer speaks of itself. The fault for which it is to be refused, or None."""
        if advert.peer != entry.peer or advert.boot != stream.boot:
            return "an advert update describes somebody else"
        if entry.advert is not None and advert.order <= entry.advert.order:
            return None
        fault = self._own.fault(advert)
        if fault is None and self.adopt(entry, advert):
            self._liveness.fresh.add(entry.peer)
        return fault

    def vouched(self, by: Entry, advert: Advert, now: float) -> str | None:
        """`by` hears the peer of this advert. The fault for which to refuse `by`, or None."""
        if advert.peer == self._own.peer:
            self.about_me(advert, by.peer, now)
            return None
        if self._own.crowded:
            self._heard.append((by.peer, advert))
            return None
        if not self._own.admits(advert.peer) or not self._own.may_reach(advert):
            return None  # its teller may be right to hear it
        known = self._table.get(advert.peer)
        newer = known is None or known.advert is None or advert.order > known.advert.order
        if newer:
            fault = self._own.fault(advert)
            if fault is not None:
                return fault
        entry = known or self._table.ensure(advert.peer, now)
        if entry is not None:
            if newer and not (entry.state is State.LIVE and entry.boot != advert.boot):
                self.adopt(
                    entry, advert
                )  # of a peer that we hear ourselves we know the boot better
            self._liveness.vouch(entry, by.peer, now, newer=newer)
        return None

    def peers_known(self, by: Entry, message: PeersKnown, now: float) -> str | None:
        """`by` hears all these peers, and with `complete` no others."""
        for advert in message.adverts:
            fault = self.vouched(by, advert, now)
            if fault is not None:
                return fault
        if message.complete and not self._own.crowded:
            named = {advert.peer for advert in message.adverts}
            for entry in self._table:
                if by.peer in entry.vouchers and entry.peer not in named:
                    self._liveness.unvouch(entry, by.peer, now)
        return None

    def lost_notice(self, by: Entry, notice: LostNotice, now: float) -> None:
        """Somebody is said to be lost: we ourselves, one we hear, or one to look for."""
        if notice.peer == self._own.peer:
            self.refute(notice.incarnation, now)
            return
        entry = self._table.get(notice.peer)
        if entry is None or entry is by or notice.by != by.peer:
            return
        if self._liveness.notice(entry, by.peer, notice.incarnation, now, fresh_s=FRESH_S):
            assert entry.advert is not None, "who is live said hello"
            self.send(by, AliveNotice(entry.advert))
            self.send(entry, notice)

    def who_sees(self, by: Entry, peer: PeerId, now: float) -> None:
        """`by` asks whether we hear a peer."""
        entry = self._table.get(peer)
        if entry is not None and entry is not by:
            entry.vouchers.discard(by.peer)
            if entry.advert is not None and self._liveness.hears(entry, now, FRESH_S):
                self.send(by, AliveNotice(entry.advert))

    def leaving(self, by: Entry, message: Leaving, now: float) -> None:
        """A good-bye, from the peer itself or passed on."""
        if message.peer == by.peer:
            self._liveness.leave(by, "said good-bye", now)
            if not self._own.crowded:
                self.send_all(message)
            return
        entry = self._table.get(message.peer)
        if entry is not None and message.incarnation >= entry.incarnation:
            entry.vouchers.discard(by.peer)
            if entry.state is State.INDIRECT and not entry.vouchers:
                self._liveness.leave(entry, "said good-bye", now)

    def refute(self, incarnation: int, now: float, *, at_once: bool = False) -> None:
        """We are here: a higher incarnation proves that this is our word and not an old advert."""
        if self._own.outlive(incarnation, now, at_once=at_once):
            self.send_all(AliveNotice(self._own.advert))

    def about_me(self, advert: Advert, by: PeerId, now: float) -> None:
        """An advert with our key that somebody holds."""
        if advert.boot == self._own.boot:
            return
        if self._own.is_double(advert):
            self._out.append(
                DuplicateIdentity(
                    self._own.peer, "another daemon with our key signs adverts", told_by=by
                )
            )
        self.refute(advert.incarnation, now)
