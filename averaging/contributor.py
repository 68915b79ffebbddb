"""One peer's own contributions to one fragment: when to hand in, where to send, what comes back.

Rules 2, 3 and 8 of DESIGN.md section 8. A contribution is in one place at a time: in flight,
listed, or returned; which of them follows from the chain of the head alone, so that a switch of
lineage only has to ask again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from dugnad.averaging.events import (
    CancelSend,
    Forget,
    HandedIn,
    HandIn,
    SendContribution,
    Settle,
)
from dugnad.averaging.formats import Contribution, UnitPiece
from dugnad.averaging.view import View
from dugnad.dht.ids import PeerId

IN_FLIGHT_MAX: Final = 4
"""Contributions under way at once: S = 2 versions may still list one, plus one being made."""
RESEND_S: Final = 0.5
"""A failed sending is tried again this much later; the roster tells of a real loss sooner."""
EMPTY_RETRY_SHARE: Final = 0.25
"""A learner without progress is asked again after this share of an interval."""


@dataclass(slots=True)
class Own:
    """One of my contributions."""

    contribution: Contribution
    pieces: tuple[UnitPiece, ...]
    share: float = 0.0
    """What part of it is back in the residual."""
    settled_at: int = 0
    """The head's version when that changed last."""
    sent: dict[PeerId, str] = field(default_factory=dict)
    """Peer -> 'sending', 'accepted', 'refused' or 'lost'."""
    retry_at: float = 0.0


class Contributor:
    """Decides about my own contributions; reads the shared view, appends actions to it."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.own: dict[int, Own] = {}
        self.making: int | None = None
        self.next_seq = view.settings.first_seq
        self.ready = False
        self.ask_at = 0.0
        self.last_base: bytes | None = None
        self.final_made = False
        self.revision = 0
        """Rises when :meth:`open` may have changed."""
        self._open: tuple[tuple[int, bytes], list[int]] | None = None

    def handed_in(self, event: HandedIn) -> None:
        """The learner's progress is encoded (or there was none)."""
        if event.seq != self.making:
            return
        self.making = None
        if event.contribution is None:
            self.ask_at = self.view.now + self.view.interval_s * EMPTY_RETRY_SHARE
            self.final_made = self.final_made or self.view.leaving
            return
        self.own[event.seq] = Own(event.contribution, event.pieces)
        self.revision += 1
        self.last_base = event.contribution.base_digest
        if self.view.leaving:
            self.final_made = True

    def adopt(self, own: Own) -> None:
        """Take on a contribution of mine that :class:`HandIn` did not ask for."""
        self.own[own.contribution.seq] = own
        self.revision += 1

    def send_done(self, seq: int, to: PeerId, refusal: str) -> None:
        """The receiver answered."""
        own = self.own.get(seq)
        if own is not None:
            own.sent[to] = "refused" if refusal else "accepted"
            if refusal:
                self.view.note("refused", f"a contribution was refused: {refusal}")

    def send_lost(self, seq: int, to: PeerId) -> None:
        """The stream broke; it may or may not have arrived, and sending twice does no harm."""
        own = self.own.get(seq)
        if own is not None and own.sent.get(to) == "sending":
            own.sent[to] = "lost"
            own.retry_at = self.view.now + RESEND_S

    def settle(self) -> None:
        """Ask the head's chain again what became of each contribution (rule 8).

        One is forgotten F versions after its window closed, or after what became of it changed
        last: until then a switch or a join that says otherwise can still be followed.
        """
        view = self.view
        self.revision += 1
        self.skip_listed()
        rules = view.settings.lineage
        for seq in sorted(self.own):
            own = self.own[seq]
            c = own.contribution
            share = view.lineage.returned_share(view.head, (c.peer, seq), c.base)
            if share != own.share:
                own.share, own.settled_at = share, view.head.version
                view.out.append(Settle(seq, share))
            since = max(c.base + rules.staleness, own.settled_at)
            if view.head.version > since + rules.horizon:
                listed = view.lineage.listing(view.head, (c.peer, seq))
                if share == 0.0 and listed is None:
                    view.note("given up", f"contribution {seq}: nobody knows whether it is listed")
                elif listed is not None and listed.contribution.payload_root != c.payload_root:
                    view.note("given up", f"contribution {seq}: an older draft of it was listed")
                del self.own[seq]
                view.out.append(Forget(seq))

    def skip_listed(self) -> None:
        """Go on above what was listed: this disk may be an older copy of one that went on.

        Commits known and not adopted yet count, too (a peer that catches up is due at once), and
        so do the numbers that were under way when the copy was made and are listed nowhere.
        """
        view = self.view
        row = view.head.seqs.get(view.me)
        known = (
            key[1] for n in view.lineage.nodes.values() for key in n.listed if key[0] == view.me
        )
        listed = max(known, default=0)
        listed = max(listed, row.seq if row is not None else 0)
        if listed >= self.next_seq:
            self.next_seq = listed + 1 + IN_FLIGHT_MAX

    def open(self) -> list[int]:
        """Seqs that the version after the head may still list and that it does not list yet."""
        state = (self.revision, self.view.head.digest)
        if self._open is None or self._open[0] != state:  # asked for several times an event
            self._open = (state, self._find_open())
        return self._open[1]

    def _find_open(self) -> list[int]:
        view = self.view
        if view.stopped or view.me in view.banned:
            return []
        return [
            seq
            for seq, own in sorted(self.own.items())
            if own.share == 0.0
            and not view.lineage.judge_contribution(own.contribution, view.head, fresh_seq=True)
        ]

    def act(self) -> None:
        """Hand in when due; send what is open to whoever is home, and to nobody else."""
        view = self.view
        if view.now >= view.quiet_until:
            self._hand_in()
            self._stop_sending()
            self._send()

    def _hand_in(self) -> None:
        view = self.view
        due = view.now >= view.due_at and view.now >= self.ask_at
        wanted = due and self.last_base != view.head.digest
        if view.leaving:
            wanted = not self.final_made
        if not wanted or not self.ready or self.making is not None or view.ended():
            return
        in_flight = sum(1 for own in self.own.values() if own.share == 0.0)
        if len(self.open()) >= IN_FLIGHT_MAX and in_flight >= IN_FLIGHT_MAX and not view.leaving:
            return
        self.skip_listed()
        self.making = self.next_seq
        self.next_seq += 1
        view.out.append(HandIn(self.making, view.head.version, view.head.digest))

    def _stop_sending(self) -> None:
        """End what is still under way to who was home before, or is settled by now: a slow line
        would carry it beside what counts, and make that late, too.
        """
        view, home = self.view, self.view.current_home()
        if home is None:
            return
        for seq, own in sorted(self.own.items()):
            wanted = None
            if home != view.me and seq in self.open():
                wanted = self._receiver(own, home)
            for to in [p for p, state in own.sent.items() if state == "sending" and p != wanted]:
                del own.sent[to]
                view.out.append(CancelSend(seq, to))

    def _send(self) -> None:
        view = self.view
        home = view.current_home()
        if home is None or home == view.me:
            return
        for seq in self.open():
            own = self.own[seq]
            to = self._receiver(own, home)
            if to is None:
                continue
            state = own.sent.get(to)
            if state is None or (state == "lost" and view.now >= own.retry_at):
                own.sent[to] = "sending"
                view.out.append(SendContribution(seq, to))

    def _receiver(self, own: Own, home: PeerId) -> PeerId | None:
        """Whom to send a contribution to: the home, or for who is leaving the first that takes it.

        Two that leave at once would else hand their last work to each other, and lose it.
        """
        if not self.view.leaving:
            return home
        order = [peer for peer in self.view.succession() if peer != self.view.me]
        return next((peer for peer in order if own.sent.get(peer) != "refused"), None)

    def forget_peer(self, peer: PeerId) -> None:
        """A lost peer has lost what it accepted, too."""
        for own in self.own.values():
            own.sent.pop(peer, None)

    def delivered(self) -> bool:
        """Whether everything that can still be listed is in somebody else's hands."""
        if not any(self.view.live.values()):  # nobody to hand it to: merged here, or kept
            return self.making is None and not self.open()
        unmade = self.view.leaving and self.ready and not self.final_made
        if self.making is not None or (unmade and not self.view.ended()):
            return False
        return all(self._taken(self.own[seq]) for seq in self.open())

    def _taken(self, own: Own) -> bool:
        """Whether somebody has it, or nobody takes it."""
        states = own.sent.values()
        if "accepted" in states:
            return True
        home = self.view.current_home()
        return "refused" in states and (home is None or self._receiver(own, home) is None)

    def deadline(self) -> float | None:
        """When :meth:`act` may have something new to do without any event."""
        view, times = self.view, []
        home = view.current_home()
        idle = self.ready and self.making is None and not view.ended()
        if idle and self.last_base != view.head.digest:
            times.append(max(view.due_at, self.ask_at, view.quiet_until))
        for seq in self.open():
            own = self.own[seq]
            to = self._receiver(own, home) if home is not None else None
            if to is not None and own.sent.get(to) == "lost":
                times.append(max(own.retry_at, view.quiet_until))
        return min(times) if times else None
