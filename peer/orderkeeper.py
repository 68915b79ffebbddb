"""The organiser's word at one peer: kept on disk, passed on when it is new, obeyed at once.

It comes from the command line of the organiser, from peers (each tells a newcomer), and from the
address book. What was made before is never judged by it (:mod:`dugnad.averaging.orders`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from dugnad.averaging.events import Ordered
from dugnad.averaging.formats import Word
from dugnad.averaging.orders import (
    NEWER_HELD,
    NOTHING,
    ORDERS_BYTES_MAX,
    SAME_HELD,
    Orders,
    judge,
    read_orders,
)
from dugnad.dht.ids import PeerId, RunId, run_text
from dugnad.dht.ports import AddressBook
from dugnad.dht.records import RecordError, encode
from dugnad.dht.roster_events import Bans, Known
from dugnad.peer.errors import UserError
from dugnad.peer.paths import Home, read_bounded, write_private

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon

TOLD_S: Final = 1.0
"""A banned peer is told so long before its streams are closed: it says to its owner why."""
TOLD_TRIES: Final = 10
"""While the word to it still waits to be sent, the streams stay open that many times as long."""
LOOK_S: Final = 10.0
"""Between two looks into the address book by a peer that others refuse."""
COPIES: Final = 3
"""Entries of the newest orders in the address book; more peers need not store them again."""
ENTRY_BYTES_MAX: Final = 2048
"""What an entry of the address book holds. Longer orders (some twenty bans) go from peer to peer
only."""
TTL_S: Final = 1800.0
"""Looked after every two minutes by whoever lives."""


class OrderKeeper:
    """The orders that one daemon holds. All methods belong to its event loop."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.held = NOTHING
        self._closing: asyncio.TimerHandle | None = None
        self._tries = 0
        self._looking = False
        self._looked_at = float("-inf")

    def load(self) -> None:
        """Take up what the disk holds; orders that cannot be read are said and passed over."""
        daemon = self.daemon
        try:
            found = stored_orders(daemon.home, daemon.run_id, PeerId(daemon.manifest.organiser))
        except RecordError as error:
            daemon.note("organiser", f"the stored orders are not used: {error.reason}")
            return
        self.held = found
        self._feed()

    def joined(self) -> None:
        """The roster has begun: close it to who is banned."""
        self._close_streams()

    def close(self) -> None:
        """Nothing more is done later."""
        if self._closing is not None:
            self._closing.cancel()

    def stop_reason(self) -> str:
        """Why this peer is to train no more, or ''."""
        why = self.held.ban_of(self.daemon.identity.peer)
        if why is not None:
            return f"the organiser banned this peer: {why}"
        return f"the organiser stopped the run: {self.held.stop}" if self.held.stop else ""

    def refusal(self, peer: PeerId) -> str:
        """Why a peer's contribution is not taken, or ''."""
        why = self.held.ban_of(peer)
        return f"banned by the organiser: {why}" if why is not None else ""

    def take(self, data: bytes) -> str:
        """Orders from anywhere; why they do not replace those that are held, or ''."""
        daemon = self.daemon
        try:
            new = read_orders(data, daemon.run_id, PeerId(daemon.manifest.organiser))
        except RecordError as error:
            return error.reason
        if reason := judge(self.held, new):
            return reason
        before, self.held = self.held, new
        try:
            store_orders(daemon.home, daemon.run_id, new)
        except UserError as error:
            daemon.note("disk", f"{error.sentence}; {error.fix}")
        self._say(before)
        self._feed()
        for peer in daemon.relay.near(daemon.averager.live()):
            self.tell(peer)
        if self._closing is None:
            self._tries = 0
            self._close_later()
        self._look("newer orders into the address book")
        return ""

    def heard(self, sender: PeerId, data: bytes) -> None:
        """A peer told its orders; one that holds older ones is told ours."""
        reason = self.take(data)
        if reason == NEWER_HELD:
            self.tell(sender)
        elif reason not in ("", SAME_HELD):
            self.daemon.happenings.refused(sender, reason)

    def tell(self, peer: PeerId) -> None:
        """Tell a live peer what is held, if anything was ever ordered."""
        if self.held.number:
            self.daemon.swarm.send(peer, Word(encode(self.held)))

    def shut_out(self, now: float) -> None:
        """A peer refused us: if the organiser's word was lost, the address book may say why."""
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._look("orders in the address book")

    def _look(self, name: str) -> None:
        if not self._looking:
            self._looking = True
            self.daemon.own(self._use_book(), name)

    async def _use_book(self) -> None:
        substrate = self.daemon.swarm.substrate
        try:
            if near := self.daemon.relay.near(self.daemon.averager.live()):
                await substrate.meet(near)
            await self.use_book(substrate)
        finally:
            self._looking = False

    async def use_book(self, book: AddressBook) -> None:
        """Look for newer orders in the address book, and see that the newest are there."""
        key = f"dugnad/1/{run_text(self.daemon.run_id)}/orders"
        copies = 0
        for data in (await book.get(key)).values():
            reason = self.take(data)
            copies += reason in ("", SAME_HELD)
        mine = encode(self.held)
        if self.held.number and copies < COPIES and len(mine) <= ENTRY_BYTES_MAX:
            await book.store(key, mine, TTL_S)

    def _feed(self) -> None:
        banned = frozenset(PeerId(ban.peer) for ban in self.held.bans)
        self.daemon.averager.feed_all(Ordered(bool(self.held.stop), banned))

    def _close_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._closing = loop.call_later(TOLD_S, self._close_when_told)

    def _close_when_told(self) -> None:
        """The word to the banned has gone out, or does not go out."""
        self._tries += 1
        unsent = any(self.daemon.swarm.waiting(PeerId(ban.peer)) for ban in self.held.bans)
        if unsent and self._tries < TOLD_TRIES:
            self._close_later()
        else:
            self._close_streams()

    def _close_streams(self) -> None:
        self._closing = None
        shell, roster = self.daemon.swarm.shell, self.daemon.swarm.roster
        if shell is None or roster is None:
            return
        bans = {PeerId(ban.peer): self.refusal(PeerId(ban.peer)) for ban in self.held.bans}
        lifted = [peer for peer in roster.banned() if peer not in bans]
        shell.feed(Bans(bans))
        for peer in lifted:
            shell.feed(Known(peer, roster.addresses(peer), "the organiser"))

    def _say(self, before: Orders) -> None:
        note, label = self.daemon.note, self.daemon.happenings.label
        if self.held.stop and self.held.stop != before.stop:
            note("organiser", f"the organiser stopped the run: {self.held.stop}")
        for ban in self.held.bans:
            if before.ban_of(ban.peer) != ban.reason:
                note("organiser", f"{label(PeerId(ban.peer))} is banned: {ban.reason}")
        for ban in before.bans:
            if self.held.ban_of(ban.peer) is None:
                note("organiser", f"{label(PeerId(ban.peer))} is banned no more")


def stored_orders(home: Home, run: RunId, organiser: PeerId) -> Orders:
    """The orders in the data folder, NOTHING when there are none; RecordError for others."""
    try:
        data = read_bounded(home.run(run).orders, ORDERS_BYTES_MAX)
    except FileNotFoundError:
        return NOTHING
    except (OSError, ValueError) as error:
        raise RecordError(str(error)) from error
    return read_orders(data, run, organiser)


def store_orders(home: Home, run: RunId, orders: Orders) -> None:
    """Replace the orders in the data folder. UserError when the disk refuses."""
    write_private(home.run(run).orders, encode(orders))
