"""The duty of a home: collect contributions for the next version, close, and make the commit.

Rules 1, 4, 5 and 9 of DESIGN.md section 8. Anybody may receive contributions (rosters differ for
a moment); only who sees itself first in the order of succession closes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from dugnad.averaging.contributor import Contributor
from dugnad.averaging.events import (
    Broadcast,
    ContributionIn,
    DropPayload,
    Forward,
    Key,
    Merge,
    Merged,
    Sign,
    Signed,
)
from dugnad.averaging.formats import (
    FORMAT,
    INPUTS_MAX,
    NO_DIGEST,
    Announce,
    CommitRecord,
    Contribution,
    Header,
    HeadRow,
    Heads,
    UnitPiece,
    inputs_root,
    members_root,
    seqs_root,
)
from dugnad.averaging.join import ETA_BITS, JOIN, MERGE, MU_BITS
from dugnad.averaging.joiner import Joiner
from dugnad.averaging.node import seq_rows
from dugnad.averaging.speed import class_speed
from dugnad.averaging.succession import LearnedDelay
from dugnad.averaging.view import COMMIT_DELAY_MAX_S, COMMIT_DELAY_MIN_S, GRACE_SHARE, View
from dugnad.dht.ids import PeerId

INBOX_MAX: Final = 256
"""Contributions held per fragment: four versions of a full mesh of 64."""
PER_MAKER_MAX: Final = 8
"""Of them of one maker: it has four under way at most, and twice that around a switch of lineage.
Without this bound one key could fill the inbox alone."""
COMMIT_PIECES_MAX: Final = 1 << 15
"""Unit pieces that one commit lists: 1 MB at most, so that the commit fits into a message. What
does not fit waits for the next version, oldest base first."""
PROMISES_MAX: Final = 256
"""Promises remembered here; the store, which is asked before each signature, keeps all."""
QUERY_S: Final = 0.5
"""An heir waits this long for word of a commit that exists already."""
GRACE_MAX_S: Final = 30.0
"""Arrivals on home lines spread by seconds; an interval's share (next) bounds it, too."""
ALONE_FACTOR: Final = 3.0
"""With less than half of the members' weight a home waits this many commit delays (rule 9)."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A contribution that lies here, and since when."""

    contribution: Contribution
    pieces: tuple[UnitPiece, ...]
    at: float


Usable = dict[Key, tuple[Contribution, tuple[UnitPiece, ...]]]


class Home:
    """Decides about merging; reads the shared view and the contributor, appends actions."""

    def __init__(self, view: View, contributor: Contributor, joiner: Joiner) -> None:
        self.view = view
        self.contributor = contributor
        self.joiner = joiner
        self.inbox: dict[Key, Arrived] = {}
        self.refused: dict[Key, str] = {}
        """The last refusals, for the answer to their senders."""
        self.merging: bytes | None = None
        self.signing = False
        self.hold_until = 0.0
        self.duty_since: float | None = None
        self.asked_at: float | None = None
        self.work_since: float | None = None
        self.pass_at: float | None = None
        self.grace = LearnedDelay(low=0.05, high=GRACE_MAX_S, first=0.5)
        self._revision = 0
        self._usable: tuple[tuple[int, int, bytes], Usable] | None = None

    # -- what arrives --------------------------------------------------------------------------

    def arrived(self, event: ContributionIn) -> str:
        """Take a contribution in; returns why not, or ''. The sender is told the same words."""
        view, c = self.view, event.contribution
        key = (c.peer, c.seq)
        reason = self._fault(event)
        if reason:
            if key not in self.inbox:
                view.out.append(DropPayload(key, reason))
                self.refused[key] = reason
                while len(self.refused) > INBOX_MAX:
                    self.refused.pop(next(iter(self.refused)))
            return reason
        if key not in self.inbox:
            self.inbox[key] = Arrived(c, event.pieces, view.now)
            self._revision += 1
            if view.now >= view.due_at:
                self.grace.add(view.now - view.due_at)
        return ""

    def _fault(self, event: ContributionIn) -> str:
        view, c = self.view, event.contribution
        if c.peer == view.me:
            return "it is my own"
        if view.stopped:
            return "the organiser stopped the run"
        if c.peer in view.banned:
            return "its maker is banned by the organiser"
        reason = view.lineage.judge_contribution(c, view.head, fresh_seq=True)
        ahead = c.base - view.head.version
        if 0 < ahead <= view.settings.lineage.horizon:
            reason = ""  # its maker is ahead of me; I may be home of a version I do not know yet
        # judged before it can spoil a commit: everybody refuses one with an input that is not right
        reason = reason or view.lineage.judge_pieces(c, event.pieces)
        if not reason and view.leaving:
            reason = "this peer is leaving"
        if reason or (c.peer, c.seq) in self.inbox:
            return reason
        if len(self.inbox) >= INBOX_MAX:
            return "the inbox is full"
        if sum(peer == c.peer for peer, _ in self.inbox) >= PER_MAKER_MAX:
            return "too many contributions of its maker lie here"
        return ""

    def hand_over(self) -> None:
        """I am leaving: what lies here goes to whoever is home after me."""
        home = self.view.current_home()
        if home is None or home == self.view.me:
            return
        for key in sorted(self.inbox):
            self.view.out.append(Forward(key, home))

    def ordered(self) -> None:
        """The organiser has spoken: what lies here of banned makers goes."""
        self._revision += 1
        for key in sorted(self.inbox):
            if key[0] in self.view.banned:
                del self.inbox[key]
                self.view.out.append(DropPayload(key, "its maker is banned by the organiser"))

    def new_head(self) -> None:
        """The head changed: start over for the version after it."""
        self.duty_since = self.asked_at = self.work_since = self.pass_at = None
        self.view.passed.clear()
        self._sweep()

    def _sweep(self) -> None:
        view = self.view
        for key in sorted(self.inbox):
            c = self.inbox[key].contribution
            if c.base > view.head.version:
                continue
            reason = view.lineage.judge_contribution(c, view.head, fresh_seq=True)
            if reason:
                del self.inbox[key]
                self._revision += 1
                view.out.append(DropPayload(key, reason))

    # -- what is decided -----------------------------------------------------------------------

    def act(self) -> None:
        """Pass over a late home; close when it is mine to close."""
        view = self.view
        if view.now < view.quiet_until or self.joiner.waits():
            return
        self._pass_over()
        if view.current_home() != view.me or self.merging is not None or self.signing:
            if view.current_home() != view.me:
                self.duty_since = self.asked_at = None
            return
        join = self.joiner.act() if view.now >= self.hold_until else None
        if join is not None:
            self.merging = view.head.digest
            view.out.append(join)
            return
        usable = self.usable()
        if not usable or view.now < view.due_at:
            return
        if self.duty_since is None:
            self.duty_since = view.now
        if self._heir() and self.asked_at is None:
            self.asked_at = view.now
            row = HeadRow(view.settings.lineage.fragment, view.head.version, view.head.digest)
            view.out.append(Broadcast(Heads((row,), reply=True)))
        if view.now >= max(self._close_at(usable), self.hold_until):
            self.merging = view.head.digest
            keys = tuple(sorted(fitting(usable)))
            view.out.append(Merge(view.head.digest, view.head.version + 1, keys))

    def usable(self) -> Usable:
        """Everything that the next version may list: the inbox and my own."""
        state = (self._revision, self.contributor.revision, self.view.head.digest)
        if self._usable is None or self._usable[0] != state:  # asked for several times an event
            self._usable = (state, self._find_usable())
        return self._usable[1]

    def _find_usable(self) -> Usable:
        view = self.view
        if view.stopped:
            return {}
        found = {
            key: (one.contribution, one.pieces)
            for key, one in self.inbox.items()
            if not view.lineage.judge_contribution(one.contribution, view.head, fresh_seq=True)
        }
        for seq in self.contributor.open():
            own = self.contributor.own[seq]
            found[(own.contribution.peer, seq)] = (own.contribution, own.pieces)
        return found

    def _close_at(self, usable: Usable) -> float:
        """When to close with what is there (rules 4 and 9)."""
        view = self.view
        floor = view.seen_at + view.settings.lineage.merge_floor_ms / 1000.0
        start = max(view.due_at, self.duty_since or view.now, floor)
        if view.live and self._heir():
            start = max(start, (self.asked_at or view.now) + QUERY_S)
        fresh = {
            PeerId(peer)
            for (peer, _), (made, _) in usable.items()
            if made.base == view.head.version
        }
        if self._expected() <= fresh and (fresh or not view.live):
            return start
        grace = self._grace_s()
        if self._majority({PeerId(peer) for peer, _ in usable}):
            return start + grace
        return start + max(grace, ALONE_FACTOR * view.commit_delay.limit())

    def _grace_s(self) -> float:
        """How long after it is due a home waits for what is missing: as learned from arrivals, and
        a share of an interval at most."""
        longest = GRACE_SHARE * self.view.interval_s
        return min(longest, self.grace.limit()) if self.grace.learned else longest

    def patience(self) -> float:
        """Seconds after which a home that has not committed is passed over: as learned, but no less
        than it may wait for contributions (while nothing is learned, the longest that it may), or
        on slow lines everything would be sent again to its heir.
        """
        delay = self.view.commit_delay
        waits = self._grace_s() if delay.learned else GRACE_SHARE * self.view.interval_s
        return min(max(delay.limit(), waits + COMMIT_DELAY_MIN_S), COMMIT_DELAY_MAX_S)

    def _expected(self) -> set[PeerId]:
        """Who may still hand in what was learned on this head: live members, at version 0 whoever
        is live. What one of them made on an older head is late; if that were enough, everybody's
        next one would be late, too, and so on for ever.
        """
        view = self.view
        live = set(view.live) - view.banned
        members = {PeerId(row.peer) for row in view.head.members}
        expected = members & live if members else live
        if self.contributor.making is not None:
            expected.add(view.me)
        return expected

    def _heir(self) -> bool:
        """Whether somebody else would have had this duty, were it not lost or passed over."""
        return self.view.first_choice() != self.view.me

    def _majority(self, have: set[PeerId]) -> bool:
        """Whether ``have`` holds at least half of the members' weight (true at version 0)."""
        members = self.view.head.members
        total = sum(class_speed(row.speed_class) for row in members)
        mine = sum(class_speed(row.speed_class) for row in members if row.peer in have)
        return mine * 2 >= total

    def _pass_over(self) -> None:
        """Give up on a home that has not committed in time (rule 9)."""
        view = self.view
        waiting = bool(self.contributor.open()) or bool(self.usable())
        if not waiting or view.now < view.due_at:
            return
        if self.work_since is None:
            self.work_since = view.now
            self.pass_at = view.now + self.patience()
        home = view.current_home()
        if self.pass_at is None or view.now < self.pass_at or self._comes():
            return
        self.pass_at = view.now + self.patience()
        if home is None:
            view.passed.clear()  # everybody was passed over: begin again
        elif home != view.me:
            view.passed.add(home)
            view.note("succession", "a home has not committed in time and is passed over")
        elif (self.merging is not None or self.signing) and any(view.live.values()):
            # the others pass me over now: what I hold of my own goes to whoever they turn to
            view.passed.add(home)
            view.note("succession", "my own merge is late: my work goes to the next home, too")

    def _comes(self) -> bool:
        """Whether a commit on top of the head is being fetched: its home has not failed, its line
        is slow. A fetch that gets nowhere ends by itself; one that takes an interval is no use.
        """
        view = self.view
        if not view.first_try or view.now >= view.due_at + view.interval_s:
            return False
        nodes = (view.lineage.get(one) for one in (view.getting, view.getting_whole) if one)
        return any(node is not None and view.lineage.is_ancestor(view.head, node) for node in nodes)

    def moves(self, peer: PeerId) -> None:
        """My contribution to ``peer`` is on its way and moving: a home on a slow line has not
        stopped, and whoever came after it would have to be sent everything again.
        """
        if self.pass_at is not None and peer == self.view.current_home():
            self.pass_at = max(self.pass_at, self.view.now + self.patience())

    def home_lost(self, peer: PeerId) -> None:
        """A lost home is skipped at once; its heir gets a full delay of its own."""
        if self.work_since is not None and peer == self.view.current_home():
            self.pass_at = self.view.now + self.patience()

    # -- making the commit ---------------------------------------------------------------------

    def merged(self, event: Merged) -> None:
        """The numbers are there: write the header and have it promised and signed."""
        view = self.view
        self.merging = None
        for key, reason in event.bad:
            if self.inbox.pop(key, None) is not None:
                self._revision += 1
                view.out.append(DropPayload(key, reason))
        if view.now < view.quiet_until:
            return  # the machine slept over this merge: the others' heads first
        if event.other != NO_DIGEST and not event.inputs:
            self.joiner.failed()
        if event.parent != view.head.digest or not event.inputs or not view.may_home():
            view.passed.discard(view.me)  # I may try again, if it is still my turn
            return  # the head has changed meanwhile: what came in is merged on the new one
        self.signing = True
        view.out.append(Sign(self._header(event), event.inputs))

    def _header(self, event: Merged) -> Header:
        view, rules = self.view, self.view.settings.lineage
        head, joins = view.head, event.other != NO_DIGEST
        draft = Header(
            format=FORMAT,
            run=rules.run,
            kind=JOIN if joins else MERGE,
            fragment=rules.fragment,
            version=head.version + 1,
            parent=head.digest,
            home=view.me,
            boot=view.settings.boot,
            time_ms=max(view.wall_ms, head.time_ms + rules.merge_floor_ms),
            members_root=NO_DIGEST,
            inputs_root=inputs_root(rules.run, event.inputs),
            inputs_count=len(event.inputs),
            tokens_total=0,
            eta_bits=ETA_BITS if joins else view.settings.eta_bits,
            mu_bits=MU_BITS if joins else view.settings.mu_bits,
            codec=event.codec,
            payload_root=event.payload_root,
            payload_bytes=event.payload_bytes,
            theta_root=event.theta_root,
            momentum_root=event.momentum_root,
            seqs_root=NO_DIGEST,
            other=event.other,
            alpha_bits=event.alpha_bits,
        )
        node = view.lineage.child(CommitRecord(draft, event.inputs), b"", head)
        return msgspec.structs.replace(
            draft,
            members_root=members_root(rules.run, node.members),
            seqs_root=seqs_root(rules.run, seq_rows(node)),
            tokens_total=node.tokens_total,
        )

    def signed(self, event: Signed) -> None:
        """The header is promised: it exists from now on."""
        view = self.view
        self.signing = False
        header = event.record.header
        view.promised[header.parent] = event.digest
        while len(view.promised) > PROMISES_MAX:
            view.promised.pop(next(iter(view.promised)))
        if view.lineage.get(header.parent) is None:
            return
        view.lineage.add(event.record, event.digest)
        view.held.add(event.digest)
        view.out.append(Broadcast(Announce(event.record)))

    def deadline(self) -> float | None:
        """When :meth:`act` may have something new to do without any event."""
        view, times = self.view, []
        usable = self.usable()
        if not usable or self.joiner.waits():
            return None
        if self.work_since is None:
            times.append(max(view.due_at, view.quiet_until))
        elif self.pass_at is not None:
            times.append(self.pass_at)  # while a commit comes, that comes first
        mine = view.current_home() == view.me
        if mine and self.merging is None and not self.signing and self.duty_since is not None:
            times.append(max(self._close_at(usable), view.quiet_until, self.hold_until))
        elif mine and self.duty_since is None:
            times.append(max(view.due_at, view.quiet_until))
        return min(times) if times else None


def fitting(usable: Usable) -> list[Key]:
    """What of ``usable`` one commit can list, oldest base first; the rest waits a version."""
    chosen: list[Key] = []
    pieces = 0
    for key in sorted(usable, key=lambda k: (usable[k][0].base, k)):
        pieces += len(usable[key][1])
        if chosen and (pieces > COMMIT_PIECES_MAX or len(chosen) >= INPUTS_MAX):
            break
        chosen.append(key)
    return chosen
