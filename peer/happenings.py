"""What happens to a daemon: peers come and go, messages arrive, heads change. Each is passed on to
the parts that it concerns, and noted for the people who watch.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from dugnad.averaging import events as ev
from dugnad.averaging import formats as fm
from dugnad.averaging.credit import CoverageChange
from dugnad.dht import roster_events as ro
from dugnad.dht.advert import Advert
from dugnad.dht.ids import PeerId, name_of, short
from dugnad.peer import clock
from dugnad.peer.assembly import save_point
from dugnad.peer.errors import UserError
from dugnad.peer.store import StoreError
from dugnad.peer.units import (
    Claim,
    Claimed,
    Covered,
    PeerBack,
    PeerLost,
    TookOver,
    Uncovered,
    WasAway,
)

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon


REMEMBER: Final = "remember fragment"
"""Name of the tasks that write a new head to the disk; the daemon waits for them at its end."""


class Happenings:
    """The callbacks of one daemon's parts."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self._anchors_due: dict[int, ev.Adopt] = {}
        self._saving = asyncio.Lock()

    def core_note(self, fragment: int, note: ev.Note) -> None:
        self.daemon.note(note.kind, f"fragment {fragment}: {note.text}")

    def refused(self, peer: PeerId, reason: str) -> None:
        self.daemon.note("refused", f"{self.label(peer)}: {reason}")

    def label(self, peer: PeerId) -> str:
        """A peer's name and the end of its key."""
        advert = (
            self.daemon.swarm.roster.advert(peer) if self.daemon.swarm.roster is not None else None
        )
        name = advert.label if advert is not None else name_of(peer)
        return f"{name} ({short(peer)})"

    def roster_said(self, action: object) -> None:
        match action:
            case ro.PeerUp(peer, advert):
                self.peer_up(peer, advert)
            case ro.PeerLost(peer, reason):
                self.peer_gone(peer, f"is lost: {reason}", "lost")
            case ro.PeerLeft(peer):
                self.peer_gone(peer, "left", "left")
            case ro.PeerChanged(peer, advert):
                self.daemon.averager.peer_up(peer, can_home=advert.can_home)
                self.daemon.vitals.roster_changed()
            case ro.SelfSuspect(reason):
                self.daemon.note("network", f"all streams ended at once: {reason}")
                self.daemon.own(self.daemon.swarm.restart(self.daemon.note), "restart p2pd")
            case ro.DuplicateIdentity(peer, reason):
                self.duplicate(peer, reason)
            case ro.ClockOffset(seconds):
                self.daemon.swarm.substrate.set_clock_offset(seconds)
                self.daemon.vitals.clock_offset_s = seconds
            case ro.ClockJumped(seconds):
                self.daemon.note("clock", f"this machine slept for {seconds:.0f} s")
                self.daemon.units.handle(WasAway(), clock.now())
            case ro.Note(kind, text):
                self.daemon.journal.add(kind, text)
                if kind == "refused":
                    self.daemon.orders.shut_out(clock.now())

    def peer_up(self, peer: PeerId, advert: Advert) -> None:
        self.daemon.note("peer", f"{self.label(peer)} is here", peer=short(peer))
        assert self.daemon.swarm.messenger is not None
        self.daemon.swarm.messenger.peer_up(peer)
        if self.daemon.relay.near([peer]):
            self.daemon.orders.tell(peer)
            self.daemon.evaluator.met(peer)
            self.daemon.preparer.met(peer)
        if not self.daemon.averager.live():
            self.daemon.vitals.met_at = clock.now()
        self.daemon.averager.peer_up(peer, can_home=advert.can_home)
        self.daemon.units.handle(PeerBack(peer), clock.now())
        self.daemon.vitals.roster_changed()
        if self.daemon.page is not None:
            self.daemon.page.peer_up(peer)

    def peer_gone(self, peer: PeerId, how: str, kind: str) -> None:
        seen = clock.now()
        assert self.daemon.swarm.messenger is not None
        self.daemon.swarm.messenger.peer_down(peer)
        self.daemon.vitals.heard.pop(peer, None)
        self.daemon.averager.peer_down(peer)
        if kind == "lost":
            self.daemon.buddy.lost(peer)
        else:
            self.daemon.buddy.left(peer)
        self.daemon.evaluator.gone(peer)
        self.daemon.preparer.gone(peer)
        actions = self.daemon.units.handle(PeerLost(peer, left=kind == "left"), seen)
        taken = sum(len(one.units) for one in actions if isinstance(one, TookOver))
        self.daemon.training.took_over(actions)
        self.daemon.vitals.roster_changed()
        takeover_s = clock.now() - seen
        self.daemon.vitals.last_takeover_s = takeover_s
        text = f"{self.label(peer)} {how}"
        if taken:
            text += f"; {taken} of its units are mine now"
        self.daemon.note(kind, text, peer=short(peer), units=taken, takeover_s=takeover_s)
        if self.daemon.page is not None:
            reason = how.removeprefix("is lost: ") if kind == "lost" else ""
            self.daemon.page.peer_gone(peer, kind, reason, taken)

    def duplicate(self, peer: PeerId, reason: str) -> None:
        self.daemon.note("identity", f"{self.label(peer)}: two daemons use one key: {reason}")
        if peer == self.daemon.identity.peer:
            self.daemon.failure = UserError(
                "E028",
                f"another daemon in the swarm uses this identity: {reason}",
                "stop one of them, or give this one a data folder of its own (--home)",
            )
            self.daemon.leaving.set()

    def message_in(self, sender: PeerId, message: fm.Message) -> None:
        self.daemon.relay.hear(sender, message, self.take)

    def take(self, sender: PeerId, message: fm.Message) -> bool:
        """Give a message to whom it concerns; whether it was found good."""
        match message:
            case fm.Word(data):
                self.daemon.orders.heard(sender, data)
            case fm.Challenge() | fm.Answer():
                self.daemon.vitals.examination.heard(sender, message)
            case fm.Told(data):
                return self.daemon.statements.told(sender, data)
            case fm.Scores():
                return self.daemon.evaluator.heard(sender, message)
            case fm.Prepares():
                return self.daemon.preparer.heard(sender, message)
            case fm.Claims(units):
                self.daemon.units.handle(Claimed(sender, units), clock.now())
            case fm.PeerClaims(peer):
                # of somebody who left, or is not known yet: no fault of who told it
                if self.daemon.relay.claims(message):
                    return False
                self.daemon.units.handle(Claimed(peer, message.units), clock.now())
            case _:
                return self._exchange(sender, message)
        return True

    def _exchange(self, sender: PeerId, message: fm.Message) -> bool:
        if isinstance(message, fm.Witness):
            self.daemon.ledger.acked(message.ack)
        if isinstance(message, fm.Heads):
            self.daemon.vitals.heard_heads(sender, message)
        self.daemon.averager.message_in(sender, message)
        return self.daemon.relay.good(message)

    def keep_for_me(self) -> None:
        """Before leaving: what was trained and is not listed yet is on its way, so others need not
        do it."""
        if units := self.daemon.units.unlisted():
            self.claim(Claim(units))

    def claim(self, claim: Claim) -> None:
        self.daemon.relay.say(fm.Claims(tuple(claim.units[: fm.CLAIMS_MAX])))

    def coverage_changed(self, change: CoverageChange) -> None:
        now = clock.now()
        if change.uncovered:
            self.daemon.units.handle(Uncovered(change.uncovered), now)
        if change.covered:
            self.daemon.units.handle(Covered(change.covered), now)

    def adopted(self, p: int, action: ev.Adopt, header: fm.Header) -> None:
        """A fragment has a new head: credit, disk, and what people see."""
        core = self.daemon.averager.fragments[p].core
        node = core.view.lineage.get(action.digest)
        if node is None:
            return
        self.daemon.ledger.adopted(p, core.view.lineage, node)
        self.daemon.vitals.merged(p, action, header)
        self.daemon.evaluator.adopted(p, action, node.tokens_total)
        if self.daemon.page is not None:
            self.daemon.page.adopted(p, action)
        rows = [(fm.header_digest(one.header, self.daemon.run_id), one) for one in action.applied]
        if action.gap and node.record is not None:
            rows.append((action.digest, node.record))
        self.daemon.own(self.remember(p, action, rows), f"{REMEMBER} {p}")

    async def remember(
        self, p: int, action: ev.Adopt, rows: list[tuple[bytes, fm.CommitRecord]]
    ) -> None:
        head = fm.HeadRow(p, action.version, action.digest)
        try:
            await self.daemon.store.adopted(rows, (head,))
            self._anchors_due[p] = action
            await self.save_anchors()
        except StoreError as error:
            self.daemon.note("disk", f"{error.reason}; {error.fix}")

    async def save_anchors(self) -> None:
        """Write the newest anchors of each fragment; a slow disk skips versions, never queues."""
        async with self._saving:
            while self._anchors_due:
                p, action = self._anchors_due.popitem()
                shell = self.daemon.averager.fragments[p]
                state = shell.worker.states.get(action.digest)
                node = shell.core.view.lineage.get(action.digest)
                point = shell.core.view.lineage.checkpoint(node) if node is not None else None
                if state is None or point is None:
                    continue
                await self.daemon.store.call(
                    lambda store, p=p, point=point: save_point(store, p, point)  # type: ignore[misc]
                )
                await asyncio.to_thread(
                    self.daemon.anchor_files.save,
                    p,
                    action.version,
                    action.digest,
                    state.theta,
                    state.momentum,
                )
