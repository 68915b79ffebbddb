"""Who is alive: the state of each peer and every transition between states. Part of the roster's
core.

A peer whose last stream ends, or that is silent too long, is a *suspect*: it is dialled once, at
once, with a short deadline. If that fails everybody else is told (`LostNotice`), which is also the
question whether somebody else hears it; without an answer it is *lost*, with one *indirect*. Lost
and never reached peers are dialled with growing pauses, later one of them a minute. If all streams
end together, the fault is taken to be ours, and nobody is lost for a while.

Weakness: a member that lies can vouch for a dead peer and so keep it *indirect*; the deadline on
commits passes over such a peer.
"""

import random
import statistics
from collections.abc import Callable, Iterator
from typing import Final

from dugnad.dht.ids import PeerId, short
from dugnad.dht.messages import LostNotice, Message, WhoSees
from dugnad.dht.roster_events import (
    Action,
    CloseStream,
    Dial,
    Note,
    PeerLeft,
    PeerLost,
    PeerUp,
    SelfSuspect,
    Send,
)
from dugnad.dht.roster_own import Own
from dugnad.dht.roster_table import Entry, State, Table

REDIAL_S: Final = 0.3
"""A suspect has this long to be reached again (DESIGN.md section 6)."""
REDIAL_TRIPS: Final = 4.0
REDIAL_MAX_S: Final = 2.0
"""Where its usual round trip is longer than 75 ms it has so many of them, within bounds: a dial
takes two to four, and on such a line nobody would ever be reached again in time."""
VOUCH_S: Final = 0.15
"""Others have this long to say that they hear it: a round trip on most lines. 0.45 s from end to
loss.
"""
VOUCH_MAX_S: Final = 1.0
VOUCH_TRIPS: Final = 1.5
"""Where usual round trips are longer than 0.1 s the wait grows with them, within bounds."""
DIAL_S: Final = 10.0
"""For first contacts: relays and slow lines. A refusal comes much earlier."""
DIAL_LATE_S: Final = 2.0
"""A shell that has not answered so long after the deadline is taken to have failed."""
DIALS_MAX: Final = 16
"""First contacts under way at once; suspects are dialled in any case."""
DIAL_PAUSE_S: Final = 1.0
"""Between two dials of one peer, whatever gossip says."""
RETRY_FIRST_S: Final = 1.0
RETRY_MAX_S: Final = 60.0
RETRY_JITTER: Final = 0.25
GIVE_UP_S: Final = 600.0
"""After ten minutes in vain a peer rests: it is dialled when it is named again, or in its turn."""
LOOK_BACK_S: Final = 60.0
"""One of those that rest is dialled each minute, in turn: two halves of a swarm that were apart for
long, or a machine whose network was down, would else never meet again."""
REFUSED_RETRY_S: Final = 60.0
TURN_S: Final = 0.5
"""The greater id waits this long before it dials a peer learned by gossip: the other one dials at
once.
"""
ALL_ENDED_S: Final = 0.2
GRACE_S: Final = 5.0
"""Long enough to restart the substrate on the same port and to be dialled or dial again."""
GRACE_RETRY_S: Final = 0.5
JUMP_MEMORY_S: Final = 10.0
"""After a jump of our clock we know why all streams ended."""


class Liveness:
    """States and transitions. Appends actions to `out`; its owner feeds it and calls `tick`."""

    def __init__(self, own: Own, table: Table, out: list[Action], rng: random.Random) -> None:
        self._own = own
        self._me = own.peer
        self._table = table
        self._out = out
        self._rng = rng
        self._grace_until = float("-inf")
        self._jumped_at = float("-inf")
        self.look_back_at: float | None = None
        """When the next of the resting peers is dialled; None: nobody rests."""
        self.elsewhere: Callable[[PeerId], bool] = lambda peer: False
        """Whether the crowd sees to a peer: it is dialled when the crowd wants it."""
        self.fresh: set[PeerId] = set()
        """Peers of which others should hear that we hear them; emptied by the owner."""

    # --- what happened

    def up(self, entry: Entry, boot: int, now: float) -> None:
        """An accepted hello: the peer is live through a stream of our own."""
        assert entry.advert is not None, "a hello brings an advert"
        if entry.counted and entry.boot not in (None, boot):
            self._out.append(PeerLost(entry.peer, "restarted"))
            entry.enter(State.LOST, "restarted", now)
        counted, entry.boot = entry.counted, boot
        entry.enter(State.LIVE, "connected", now)
        entry.last_seen, entry.retry_at, entry.retry_s, entry.ended_at = now, None, 0.0, None
        self.fresh.add(entry.peer)
        if not counted:
            self._out.append(PeerUp(entry.peer, entry.advert))

    def heard(self, entry: Entry, now: float) -> None:
        """Something came on an established stream."""
        entry.last_seen = now
        if entry.state is State.SUSPECT:
            entry.enter(State.LIVE, "heard again", now)
            self.fresh.add(entry.peer)
        elif entry.state is State.INDIRECT:
            entry.enter(State.LIVE, "heard again", now)

    def ended(self, entry: Entry, reason: str, now: float) -> None:
        """Its last established stream ended."""
        entry.ended_at = now
        self.suspect(entry, f"stream ended: {reason}", now)
        self._suspect_myself(now)

    def suspect(self, entry: Entry, reason: str, now: float) -> None:
        """One redial at once; the verdict follows in `tick`."""
        if entry.state is not State.LIVE:
            return
        entry.enter(State.SUSPECT, reason, now)
        redial_s = _redial_s(entry)
        entry.verdict_at = max(now + redial_s, self._grace_until)
        self.note("suspect", reason, entry.peer)
        if entry.can_dial:
            self._dial(entry, redial_s, now)

    def dial_failed(self, entry: Entry, reason: str, now: float) -> None:
        """A dial led to nothing."""
        entry.dial_until = None
        self.not_reached(entry, reason, now)

    def not_reached(self, entry: Entry, reason: str, now: float) -> None:
        """A dial, or a stream without a hello, led to nothing: the next try comes after a longer
        pause.
        """
        if entry.dialled():
            return  # another try is under way
        if entry.state in (State.LIVE, State.SUSPECT, State.LEFT):
            return  # reached meanwhile, or the verdict is due anyway
        self.note("not reached", reason, entry.peer)
        if entry.vouchers and entry.state in (State.KNOWN, State.LOST):
            self._indirect(entry, now)
            return
        if entry.state is State.INDIRECT:
            self._ask(entry, WhoSees(entry.peer), now)
        elif entry.state is State.KNOWN:
            entry.reason = f"not reached: {reason}"
        self._retry_later(entry, now)

    def lose(self, entry: Entry, reason: str, now: float) -> None:
        """The peer is lost; it is looked for with growing pauses."""
        counted = entry.counted
        entry.enter(State.LOST, reason, now)
        for stream in entry.established():
            self.close(entry, stream.number, reason)
        entry.vouchers.clear()
        if counted:
            self._out.append(PeerLost(entry.peer, reason))
        entry.retry_s, entry.give_up_at = 0.0, now + GIVE_UP_S
        self._retry_later(entry, now)
        self._forget_vouches_of(entry.peer, now)

    def leave(self, entry: Entry, reason: str, now: float) -> None:
        """The peer left on purpose; nobody looks for it."""
        counted = entry.counted
        entry.enter(State.LEFT, reason, now)
        for number in list(entry.streams):
            self.close(entry, number, reason)
        entry.vouchers.clear()
        entry.retry_at = None
        if counted:
            self._out.append(PeerLeft(entry.peer))
        self._forget_vouches_of(entry.peer, now)

    def refuse(self, entry: Entry, reason: str, now: float, *, ban_s: float = 0.0) -> None:
        """We will have none of it, or it none of us: closed, and tried again in a minute."""
        counted = entry.counted
        entry.enter(State.REFUSED, reason, now)
        entry.banned_until = now + ban_s
        for number in list(entry.streams):
            self.close(entry, number, reason)
        entry.vouchers.clear()
        self.note("refused", reason, entry.peer)
        if counted:
            self._out.append(PeerLost(entry.peer, reason))
            if not self._own.crowded:
                self._tell(LostNotice(entry.peer, entry.incarnation, self._me))
        if entry.give_up_at <= now:
            entry.give_up_at = now + GIVE_UP_S
        entry.retry_at = now + REFUSED_RETRY_S
        self._forget_vouches_of(entry.peer, now)

    def named(self, entry: Entry, now: float) -> None:
        """A link, memory or the address book names the peer: dial it soon, however long we tried
        before.
        """
        if (
            entry.state in (State.LIVE, State.SUSPECT)
            or entry.banned_until > now
            or not entry.can_dial
            or self.elsewhere(entry.peer)
        ):
            return
        entry.retry_s, entry.give_up_at = 0.0, now + GIVE_UP_S
        self._dial_soon(entry, now, now)

    def dial(self, entry: Entry, deadline_s: float, now: float) -> None:
        """The crowd wants a stream with the peer."""
        self._dial(entry, deadline_s, now)

    def part(self, entry: Entry, reason: str, now: float, *, again: bool = False) -> None:
        """Its streams end, and nobody says that it is lost; dialled `again` later, or not."""
        for number in list(entry.streams):
            self.close(entry, number, reason)
        if entry.counted:
            entry.enter(State.KNOWN, reason, now)
        entry.retry_at = None
        if again:
            self._retry_later(entry, now)

    def crowded(self, entry: Entry, now: float) -> None:
        """The swarm became a crowd: nobody vouches any more, and only the crowd dials members."""
        entry.vouchers.clear()
        if entry.state is State.INDIRECT:
            entry.enter(State.KNOWN, "a member of the crowd", now)
        if self.elsewhere(entry.peer) and entry.state is not State.SUSPECT:
            entry.retry_at = None

    def stop(self, reason: str, now: float) -> None:
        """We go: all streams closed, nothing waited for, nobody judged."""
        for entry in self._table:
            for number in list(entry.streams):
                self.close(entry, number, reason)
            entry.enter(State.KNOWN, reason, now)
            entry.retry_at = entry.dial_until = entry.probe = None

    # --- what others say

    def vouch(self, entry: Entry, by: PeerId, now: float, *, newer: bool) -> None:
        """`by` hears the peer. `newer`: with an advert that we did not have."""
        if entry.state is State.REFUSED or (entry.state is State.LEFT and not newer):
            return
        if entry.state is State.LEFT:
            entry.enter(State.KNOWN, f"back, says {short(by)}", now)
        entry.vouchers.add(by)
        if entry.state is State.SUSPECT and entry.answer_at is not None:
            self._indirect(entry, now)
        elif entry.state is State.INDIRECT:
            entry.answer_at = None
            if newer and entry.can_dial:
                self._dial_soon(entry, now, now)
        elif entry.state in (State.KNOWN, State.LOST):
            self._meet(entry, now)

    def unvouch(
        self, entry: Entry, by: PeerId, now: float, why: str = "not heard by anybody"
    ) -> None:
        """`by` no longer hears the peer."""
        entry.vouchers.discard(by)
        if entry.state is State.INDIRECT and not entry.vouchers:
            self.lose(entry, why, now)

    def notice(
        self, entry: Entry, by: PeerId, incarnation: int, now: float, *, fresh_s: float
    ) -> bool:
        """`by` says the peer is lost. True: we hear it at this moment and should say so."""
        if self.hears(entry, now, fresh_s):
            entry.vouchers.discard(by)
            return True
        if entry.state is State.LIVE and incarnation >= entry.incarnation:
            self.suspect(entry, f"silent, and {short(by)} cannot reach it", now)
        self.unvouch(entry, by, now)
        return False

    def hears(self, entry: Entry, now: float, fresh_s: float) -> bool:
        """Whether the peer is live through our own stream and was heard within `fresh_s`."""
        return entry.state is State.LIVE and now - entry.heard_at() <= fresh_s

    # --- time

    def dials_full(self) -> bool:
        """Whether all places for first contacts are taken."""
        return sum(1 for entry in self._table if entry.dial_until is not None) >= DIALS_MAX

    def deadlines(self, entry: Entry, now: float, *, dials_full: bool) -> Iterator[float]:
        """When this entry wants `tick`."""
        for moment in (entry.verdict_at, entry.answer_at, entry.dial_until):
            if moment is not None:
                yield moment
        if entry.retry_at is not None:
            # While all dialling places are taken the next one is tried when a dial ends.
            yield max(entry.retry_at, now + GRACE_RETRY_S) if dials_full else entry.retry_at
        if entry.state is State.LIVE:
            yield entry.heard_at() + entry.heartbeat.silence_s

    def tick(self, entry: Entry, now: float) -> None:
        """Whatever is due for this entry."""
        if entry.dial_until is not None and entry.dial_until <= now:
            self.dial_failed(entry, "the dialler gave no answer", now)
        if entry.state is State.LIVE and entry.heard_at() + entry.heartbeat.silence_s <= now:
            self.suspect(entry, f"silent for {entry.heartbeat.silence_s:.1f} s", now)
        if entry.verdict_at is not None and entry.verdict_at <= now:
            entry.verdict_at = None
            entry.vouchers.clear()
            if self._own.crowded:  # its other neighbours are not ours: the crowd asks itself
                self.lose(entry, entry.reason, now)
                return
            self._ask(entry, LostNotice(entry.peer, entry.incarnation, self._me), now)
        if entry.answer_at is not None and entry.answer_at <= now:
            entry.answer_at = None
            if not entry.vouchers:
                self.lose(entry, entry.reason, now)
        if entry.retry_at is not None and entry.retry_at <= now:
            self._retry(entry, now)

    def look_back(self, now: float) -> None:
        """Dial one of those given up, if it is time for that."""
        resting = [entry for entry in self._table if self._rests(entry)]
        if not resting:
            self.look_back_at = None
        elif self.look_back_at is None or self.look_back_at <= now:
            due = self.look_back_at is not None
            self.look_back_at = now + LOOK_BACK_S * (1 + RETRY_JITTER * self._rng.random())
            if due and not self.dials_full():
                longest = min(resting, key=lambda one: (one.dialled_at or 0.0, one.peer))
                self._dial(longest, DIAL_S, now)

    def jumped(self, now: float) -> None:
        """We stood still: nobody is judged by what we missed; suspects are looked for anew."""
        self._jumped_at = now
        for entry in self._table:
            entry.heartbeat.paused()
            for stream in entry.streams.values():
                stream.heard_at = stream.opened_at = now
            if entry.dial_until is not None:
                entry.dial_until = now + DIAL_LATE_S
            if entry.state is State.SUSPECT:
                entry.enter(State.LIVE, entry.reason, now)
                self.suspect(entry, f"{entry.reason} (before our clock jumped)", now)
            elif entry.answer_at is not None:
                entry.answer_at = now + VOUCH_S

    # --- helpers that others use too

    def close(self, entry: Entry, number: int, reason: str) -> None:
        """Forgets a stream and closes it."""
        if entry.streams.pop(number, None) is not None:
            if entry.probe is not None and number in (entry.probe.old, entry.probe.new):
                entry.probe = None
            self._out.append(CloseStream(entry.peer, number, reason))

    def note(self, kind: str, text: str, peer: PeerId | None = None) -> None:
        """One line for the log."""
        self._out.append(Note(kind, text, peer))

    # --- inside

    def _rests(self, entry: Entry) -> bool:
        """Whether a peer was given up. A name never met counts only while nobody is there."""
        return (
            entry.state in (State.KNOWN, State.LOST)
            and entry.can_dial
            and not entry.streams
            and entry.retry_at is None
            and entry.dial_until is None
            and (entry.last_seen is not None or not self._table.counted())
            and not self.elsewhere(entry.peer)
        )

    def _suspect_myself(self, now: float) -> None:
        recent = [
            entry
            for entry in self._table
            if entry.state is State.SUSPECT
            and entry.ended_at is not None
            and now - entry.ended_at <= ALL_ENDED_S
        ]
        if len(recent) < 2 or now < self._grace_until or self._table.listening():
            return
        self._grace_until = now + GRACE_S
        for entry in recent:
            entry.verdict_at = self._grace_until
            entry.retry_at = now + GRACE_RETRY_S
        if now - self._jumped_at > JUMP_MEMORY_S:
            self._out.append(SelfSuspect(f"all {len(recent)} streams ended within {ALL_ENDED_S} s"))

    def _indirect(self, entry: Entry, now: float) -> None:
        assert entry.advert is not None, "a vouch brings an advert"
        counted = entry.counted
        entry.enter(State.INDIRECT, f"heard by {short(min(entry.vouchers))}, not by us", now)
        if (
            counted
        ):  # it was live here a moment ago; our own stream, if it still hangs there, is of no use
            for stream in entry.established():
                self.close(entry, stream.number, "silent")
            entry.retry_s, entry.give_up_at = 0.0, now + GIVE_UP_S
        else:
            self._out.append(PeerUp(entry.peer, entry.advert))
        self._retry_later(entry, now)

    def _meet(self, entry: Entry, now: float) -> None:
        """Somebody hears a peer that we never met or lost: dial it, or take the word for it."""
        if entry.give_up_at <= now:
            entry.retry_s, entry.give_up_at = 0.0, now + GIVE_UP_S
        if entry.can_dial:
            turn = TURN_S if entry.state is State.KNOWN and self._me > entry.peer else 0.0
            self._dial_soon(entry, now + turn, now)
        elif not entry.streams:
            self._indirect(entry, now)

    def _ask(self, entry: Entry, question: Message, now: float) -> None:
        if entry.state is State.INDIRECT:
            entry.vouchers.clear()  # answers must be fresh
        entry.answer_at = now + self._answer_s()
        self._tell(question)

    def _answer_s(self) -> float:
        """How long an answer may take: far-apart peers need longer than `VOUCH_S`."""
        trips = [entry.heartbeat.rtt_s for entry in self._table.listening()]
        usual = statistics.median([trip for trip in trips if trip is not None] or [0.0])
        return min(VOUCH_MAX_S, max(VOUCH_S, VOUCH_TRIPS * usual))

    def _tell(self, message: Message) -> None:
        for other in self._table.listening():
            stream = other.main()
            if stream is not None and other.state is State.LIVE:
                self._out.append(Send(other.peer, stream.number, message))

    def _forget_vouches_of(self, peer: PeerId, now: float) -> None:
        for entry in self._table:
            if peer in entry.vouchers:
                entry.vouchers.discard(peer)
                if entry.state is State.INDIRECT and not entry.vouchers and entry.answer_at is None:
                    self._ask(entry, WhoSees(entry.peer), now)

    def _dial(self, entry: Entry, deadline_s: float, now: float) -> None:
        if entry.dial_until is None:
            entry.dial_until, entry.dialled_at = now + deadline_s + DIAL_LATE_S, now
            self._out.append(Dial(entry.peer, entry.addresses, deadline_s))

    def _dial_soon(self, entry: Entry, at: float, now: float) -> None:
        """Dials at `at` if it may be dialled then, unless a dial is due earlier."""
        if entry.dialled():
            return
        if entry.dialled_at is not None:
            at = max(at, entry.dialled_at + DIAL_PAUSE_S)
        if entry.retry_at is None or at < entry.retry_at:
            entry.retry_at = max(at, now)

    def _retry(self, entry: Entry, now: float) -> None:
        """The pause is over: dial, or, where that is pointless, ask who still hears it."""
        entry.retry_at = None
        if entry.streams or entry.state in (State.LIVE, State.LEFT):
            return
        if entry.state is not State.SUSPECT and self.elsewhere(entry.peer):
            return
        in_grace = entry.state is State.SUSPECT
        if not entry.can_dial:
            if entry.state is State.INDIRECT:
                self._ask(entry, WhoSees(entry.peer), now)
                self._retry_later(entry, now)
        elif self.dials_full() and not in_grace:
            entry.retry_at = now + GRACE_RETRY_S
        else:
            self._dial(entry, GRACE_RETRY_S if in_grace else DIAL_S, now)
            if in_grace:
                entry.retry_at = now + GRACE_RETRY_S

    def _retry_later(self, entry: Entry, now: float) -> None:
        if self.elsewhere(entry.peer):
            entry.retry_at = None
            return
        if now >= entry.give_up_at and entry.state is not State.INDIRECT:
            entry.retry_at = None
            return
        if entry.state is State.REFUSED:
            entry.retry_at = now + REFUSED_RETRY_S
            return
        entry.retry_s = min(RETRY_MAX_S, entry.retry_s * 2 or RETRY_FIRST_S)
        entry.retry_at = now + entry.retry_s * (1 + RETRY_JITTER * self._rng.random())


def _redial_s(entry: Entry) -> float:
    """How long a suspect has to be reached again."""
    return min(REDIAL_MAX_S, max(REDIAL_S, REDIAL_TRIPS * (entry.heartbeat.rtt_s or 0.0)))
