"""The exchange of one fragment: an asynchronous, leaderless all-reduce (DESIGN.md section 8).

``Exchange.handle(event, now) -> actions`` is all there is: no clock, no randomness, no I/O. It
joins four parts over one shared view: the *contributor* (my own progress), the *home* (merging,
when it is my turn), the *follower* (what others merged) and the *joiner* (sides that went on
apart). The daemon and the simulator run it alike.

States of one version at one peer: waiting (before it is due) -> handing in -> collecting, when I
am home, or waiting for the home -> head. What fails: the home dies or hangs (succession), my
stream breaks (resend to whoever is home), a header without payload (another one wins), two
lineages (the heavier head wins and everything is settled again on it).
"""

from __future__ import annotations

from typing import Final, assert_never

from dugnad.averaging.contributor import Contributor
from dugnad.averaging.events import (
    AckIn,
    Action,
    Broadcast,
    CommitIn,
    CommitsIn,
    CommitsWanted,
    ContributionIn,
    Event,
    HandedIn,
    HeadIn,
    LearnerState,
    LeaveNow,
    Merged,
    Obtained,
    ObtainFailed,
    Ordered,
    Pace,
    PeerDown,
    PeerUp,
    Send,
    SendDone,
    SendLost,
    SendMoves,
    Signed,
    SignFailed,
    SignRefused,
    Timer,
)
from dugnad.averaging.follower import Follower
from dugnad.averaging.formats import Announce, Checkpoint, Witness, header_digest
from dugnad.averaging.history import History, recall
from dugnad.averaging.home import Home
from dugnad.averaging.joiner import Joiner
from dugnad.averaging.lineage import Lineage
from dugnad.averaging.node import Node
from dugnad.averaging.view import ExchangeSettings, View
from dugnad.dht.ids import PeerId

CLOCK_JUMP_S: Final = 10.0
"""A timer later than this by itself means that the machine slept (the roster's suspicion time)."""
QUIET_S: Final = 2.0
"""After a sleep: time for the others' heads to arrive before any duty is taken up."""
POLL_S: Final = 0.25
"""What is due and cannot be done yet (something is under way) is looked at again this much later;
normally an event comes first."""
HOLD_S: Final = 5.0
"""A home whose promise could not be written tries again after this; others may pass it over."""
NO_PAST: Final = History()
"""Of a head nothing but its tables is there."""
TURNS_MAX: Final = 64
"""Rounds of one event until nothing changes any more; a guard against a loop in the rules."""


class Exchange:
    """The core for one fragment. ``deadline`` says when to send the next :class:`Timer`."""

    def __init__(self, settings: ExchangeSettings) -> None:
        lineage = Lineage(settings.lineage)
        self.view = View(settings=settings, lineage=lineage, head=lineage.genesis)
        self.view.held.add(lineage.genesis.digest)
        self.contributor = Contributor(self.view)
        self.joiner = Joiner(self.view)
        self.home = Home(self.view, self.contributor, self.joiner)
        self.follower = Follower(self.view, self.joiner)
        self.deadline: float | None = None
        self._started = False

    def resume(self, point: Checkpoint, digest: bytes, past: History = NO_PAST) -> str:
        """Before the first event: stand at a head from the disk, whose anchors the shell holds.

        Says why its ``past`` cannot be its past, or ''; then it is left out.
        """
        reason = recall(self.view.lineage, point, digest, past)
        self.view.head = self.view.lineage.nodes[digest]
        self.view.held = {digest}
        self.contributor.skip_listed()
        return reason

    @property
    def head(self) -> Node:
        """The commit that this peer builds on."""
        return self.view.head

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in one event at local time ``now`` (seconds, monotonic) and say what to do."""
        view = self.view
        view.out = []
        self._clock(now)
        self._take(event)
        for _ in range(TURNS_MAX):
            if not self._turn():
                break
        self.deadline = self._next_deadline()
        return view.out

    def _clock(self, now: float) -> None:
        view = self.view
        late = self.deadline is not None and now - self.deadline > CLOCK_JUMP_S
        if not self._started:
            self._started = True
            view.seen_at = now
            view.due_at = now + view.interval_s * (1.0 + view.settings.phase)
        view.now = now
        if late:  # the machine slept: drop duties, ask for heads first
            view.quiet_until = now + QUIET_S
            view.passed.clear()
            self.home.new_head()
            view.out.append(Broadcast(self.follower.heads(reply=True)))

    def _take(self, event: Event) -> None:
        view = self.view
        match event:
            case Timer():
                pass
            case PeerUp(peer, can_home):
                self._peer_up(peer, can_home)
            case PeerDown(peer):
                self._peer_down(peer)
            case Pace(interval_s, wall_offset_s):
                self._pace(interval_s, wall_offset_s)
            case LearnerState(ready):
                self.contributor.ready = ready
            case HandedIn():
                self.contributor.handed_in(event)
            case SendDone(seq, to, refusal):
                self.contributor.send_done(seq, to, refusal)
            case SendLost(seq, to):
                self.contributor.send_lost(seq, to)
            case SendMoves(_, to):
                self.home.moves(to)
            case ContributionIn():
                self.home.arrived(event)
            case Merged():
                self.home.merged(event)
            case Signed():
                self.home.signed(event)
                self.follower.seen.setdefault(event.digest, view.now)
                self.follower.dirty = True
            case SignRefused(parent):
                self.home.signing = False
                view.promised.setdefault(parent, b"")
            case SignFailed():
                self.home.signing, self.home.hold_until = False, view.now + HOLD_S
            case CommitIn(sender, record):
                self.follower.commit_in(sender, record)
            case CommitsIn():
                self.follower.commits_in(event)
            case AckIn():
                self.follower.ack_in(event)
            case HeadIn():
                self.follower.head_in(event)
            case CommitsWanted():
                self.follower.wanted(event)
            case Obtained(digest):
                self.follower.obtained(digest)
            case ObtainFailed():
                self.follower.obtain_failed(event)
            case Ordered(stopped, banned):
                self._ordered(stopped, banned)
            case LeaveNow():
                view.leaving = True
                self.home.hand_over()
            case _:
                assert_never(event)

    def found_good(self, message: Announce | Witness) -> bool:
        """Whether a commit or an ack that was just read is good: the lineage took it."""
        lineage = self.view.lineage
        if isinstance(message, Announce):
            return lineage.get(header_digest(message.commit.header, lineage.rules.run)) is not None
        node = lineage.get(message.ack.digest)
        return node is not None and node.member(message.ack.peer)

    def _ordered(self, stopped: bool, banned: frozenset[PeerId]) -> None:
        self.view.stopped, self.view.banned = stopped, banned
        self.contributor.revision += 1
        self.home.ordered()

    def _peer_up(self, peer: PeerId, can_home: bool) -> None:
        view = self.view
        if peer not in view.live:
            view.out.append(Send(peer, self.follower.heads(reply=True)))
        view.live[peer] = can_home
        self.follower.dirty = True

    def _peer_down(self, peer: PeerId) -> None:
        view = self.view
        self.home.home_lost(peer)
        view.live.pop(peer, None)
        self.contributor.forget_peer(peer)
        self.joiner.peer_down(peer)
        for holders in view.holders.values():
            holders.pop(peer, None)
        self.follower.dirty = True

    def _pace(self, interval_s: float, wall_offset_s: float) -> None:
        view = self.view
        view.wall_offset_s = wall_offset_s
        if interval_s != view.interval_s:
            view.due_at += interval_s - view.interval_s
            view.interval_s = interval_s

    def _turn(self) -> bool:
        """One round over the parts; True when there may be more to do."""
        if self.joiner.look():
            self.follower.dirty = True
        if self.follower.act():
            self.contributor.settle()
            self.home.new_head()
            return True
        before = len(self.view.out)
        self.contributor.act()
        home = self.view.current_home()
        self.home.act()
        if self.view.current_home() != home:
            self.contributor.act()  # what is open goes to the next one at once
        return len(self.view.out) > before and self.follower.dirty

    def _next_deadline(self) -> float | None:
        parts = (self.contributor, self.home, self.follower, self.joiner)
        times = [part.deadline() for part in parts]
        found = [one for one in times if one is not None]
        if not found:
            return None
        now = self.view.now
        return min(found) if min(found) > now else now + POLL_S

    def left(self) -> bool:
        """After :class:`LeaveNow`: whether everything is handed in and in other hands."""
        return self.contributor.delivered()
