"""A neighbour that keeps what this peer has not handed in yet, and hands it in if this peer dies.

Every few seconds each fragment's progress is drafted (`peer.handin`) in the richest codec that a
part of the line carries, and brought to one neighbour. Off unless its owner sets `buddy_s`. As a
neighbour this peer keeps others' drafts within bounds (`peer.buddybox`), and when the roster loses
their maker it hands them in where the fragment is merged: whichever form of the contribution
arrives first is taken, and the other is refused for its number.
"""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from dugnad.averaging.codecs import CODECS
from dugnad.averaging.formats import Contribution, UnitPiece
from dugnad.averaging.linkcontrol import richest
from dugnad.averaging.worker import Kept
from dugnad.dht.advert import SLOW_BYTES_PER_S
from dugnad.dht.ids import PeerId
from dugnad.dht.ports import TransportError
from dugnad.dht.records import verify_ed25519
from dugnad.peer import clock
from dugnad.peer.buddybox import BuddyBox
from dugnad.peer.limits import QUOTA_DAYS
from dugnad.peer.serving import Serving
from dugnad.peer.transfer import ContributionServer

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon

LINE_SHARE: Final = 0.25
"""Share of the upload that drafts may take: the hand-ins themselves go first."""
QUOTA_SHARE: Final = 0.8
"""Drafts stop when this share of the traffic quota is used: the rest is for what must be sent."""
PUSH_S: Final = 10.0
"""A neighbour that takes longer than a few drafts' time is of no use."""
RETRY_S: Final = 1.0
"""Between two looks at what became of a lost peer's draft: its home may have been lost, too."""
OFFER_S: Final = 600.0
"""After this a draft is let go, whatever the fragment's interval: merging stands still."""


class Buddy:
    """Both sides of one daemon. Belongs to its event loop."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.every_s = daemon.settings.buddy_s
        self.box = BuddyBox()
        self.sent = 0
        """Drafts that a neighbour has taken."""
        self.listed_tokens = 0
        """Tokens of lost peers' drafts that were listed."""
        self._refused_by: PeerId | None = None

    # -- as the maker --------------------------------------------------------------------------

    async def run(self) -> None:
        """Bring drafts to a neighbour, until cancelled."""
        while self.every_s:
            await asyncio.sleep(self.every_s)
            for p in range(len(self.daemon.averager.fragments)):
                buddy = self.neighbour()
                if buddy is None or not self._quota_left():
                    break
                with suppress(asyncio.QueueFull):  # the lane is stuck: next time
                    kept = await self.daemon.averager.draft(p, self._codec())
                    if kept is not None:
                        await self._bring(buddy, kept)

    def neighbour(self) -> PeerId | None:
        """Who keeps this peer's drafts: another one for each peer, the same as long as it lives."""
        me = self.daemon.identity.peer
        others = sorted(
            self.daemon.averager.live(), key=lambda peer: hashlib.sha256(me + peer).digest()
        )
        willing = [peer for peer in others if peer != self._refused_by]
        return next(iter([*willing, *others]), None)

    def _quota_left(self) -> bool:
        """Whether there is traffic to spare for what is not needed if nobody dies."""
        steward = self.daemon.steward
        quota = steward.limits.quota_gb * 1e9
        used = steward.usage.within(QUOTA_DAYS, clock.wall_ms())
        return not quota or used < QUOTA_SHARE * quota

    def _codec(self) -> str:
        settings, traffic = self.daemon.settings, self.daemon.swarm.traffic
        rate = traffic.push_bytes_per_s or float(SLOW_BYTES_PER_S)
        if settings.upload_mbit:
            rate = min(rate, traffic.up.rate)
        names = list(CODECS)
        names = names[names.index(self.daemon.manifest.exchange.hand_in_codec) :]
        budget = rate * self.every_s * LINE_SHARE
        return richest(names, self.daemon.manifest.table.sizes, budget) or names[-1]

    async def _bring(self, buddy: PeerId, kept: Kept) -> None:
        try:
            refusal = await self.daemon.swarm.lend(buddy, kept, PUSH_S)
        except TransportError:
            refusal = "it was not reached"
        self._refused_by = buddy if refusal else None
        self.sent += not refusal

    # -- as the neighbour ----------------------------------------------------------------------

    def lost(self, maker: PeerId) -> None:
        """The roster lost a peer: what lies here of it is handed in."""
        for kept in self.box.take(maker):
            self.daemon.own(self._hand_in(kept), "hand in for a lost peer")

    def left(self, maker: PeerId) -> None:
        """A peer has left, and handed in itself."""
        self.box.take(maker)

    async def serve(self) -> None:
        """Take drafts from now on."""
        daemon = self.daemon
        server = ContributionServer(
            daemon.swarm.bulk,
            daemon.run_id,
            Serving(daemon).size_of,
            self._take,
            verify_ed25519,
            traffic=daemon.swarm.traffic,
            drafts=True,
        )
        await server.start()

    async def _take(self, made: Contribution, pieces: tuple[UnitPiece, ...], payload: bytes) -> str:
        maker = PeerId(made.peer)
        if not self.daemon.manifest.admits(maker):
            return "this run does not admit its maker"
        if not self._quota_left():
            return "this machine's traffic quota is nearly used up"
        return self.daemon.orders.refusal(maker) or self.box.keep(Kept(made, pieces, payload))

    async def _hand_in(self, kept: Kept) -> None:
        """Offer a lost peer's draft to whoever merges its fragment, and to the next one when that
        one is lost, too, until it is listed or cannot be any more."""
        daemon, made = self.daemon, kept.contribution
        label = daemon.happenings.label(PeerId(made.peer))
        accepted, reason, until = None, "", clock.now() + OFFER_S
        while clock.now() < until:
            view = daemon.averager.fragments[made.fragment].core.view
            if view.lineage.listing(view.head, (made.peer, made.seq)) is not None:
                self.listed_tokens += made.tokens
                text = f"{label}: its last draft is listed, {made.tokens} tokens"
                daemon.note("buddy", text, fragment=made.fragment, tokens=made.tokens)
                return
            if fault := view.lineage.judge_contribution(made, view.head, fresh_seq=True):
                reason = fault
                break
            home = view.current_home()
            if home is not None and home != accepted:
                reason = await self._offer(home, kept)
                accepted = None if reason else home
            await asyncio.sleep(RETRY_S)
        daemon.note("buddy", f"{label}: its last draft is not listed: {reason}")

    async def _offer(self, home: PeerId, kept: Kept) -> str:
        """Why ``home`` does not take a draft; '' when it does."""
        daemon, made = self.daemon, kept.contribution
        if home == daemon.identity.peer:
            return await daemon.averager.contribution_in(made, kept.pieces, kept.payload)
        try:
            return await daemon.swarm.push(home, made, kept.pieces, kept.payload)
        except TransportError as error:
            return str(error)
