"""The fold of one fragment's lineage: who covered which sequences first, and who confirmed it.

It keeps a *base*, into which all but the newest commits are folded for good, and a *journal* of
commits that can be undone when the lineage is switched. ``dugnad.averaging.credit`` holds one for
each fragment; nothing here looks at another fragment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from dugnad.averaging.board import DAY_MS, POOL, RECENT_DAYS, Tally
from dugnad.averaging.coverage import Coverage, CreditRules, UnitShares
from dugnad.averaging.foldstate import PEERS_MAX, FragmentState, PeerTally
from dugnad.averaging.formats import CommitRecord, UnitPiece
from dugnad.dht.ids import PeerId

UNDO_MAX: Final = 32
"""Newest commits of a fragment that can be undone: eight horizons, so that a switch after a long
partition needs no replay. Older ones are folded into the base for good."""


GAP_MS_MAX: Final = 3_600_000
"""Between two contributions of a peer at most an hour counts as work: a machine that was switched
off saved nothing up, and one behind a broken line brings more than an hour's work seldom."""


class CreditError(ValueError):
    """A commit or a state that does not fit onto this fold; nothing was changed."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


@dataclass(slots=True)
class Entry:
    """One commit that can still be undone, and what it did."""

    digest: bytes
    parent: bytes
    version: int
    home: PeerId
    time_ms: int
    receipts: int
    final: bool = False
    """The run ended with it: nothing is built on it any more."""
    refused: int = 0
    earned: dict[PeerId, Tally] = field(default_factory=dict)
    covered: list[UnitPiece] = field(default_factory=list)
    acked: set[PeerId] = field(default_factory=set)

    @property
    def day(self) -> int:
        """The day of commit time on which its tokens count."""
        return self.time_ms // DAY_MS


@dataclass(slots=True)
class Waiting:
    """Tokens of a home for its own inputs in the newest folded commits, all made by itself."""

    home: PeerId
    tokens: int = 0
    days: dict[int, int] = field(default_factory=dict)


class CreditChain:
    """The fold of one fragment's lineage: a base, and a journal of what can be undone."""

    def __init__(self, rules: CreditRules, fragment: int, shares: UnitShares) -> None:
        self.rules = rules
        self.fragment = fragment
        self.shares = shares
        self.coverage = Coverage(rules, fragment, shares)
        self.journal: deque[Entry] = deque()
        self.base_version = 0
        self.base_digest = b""
        self.base_ms = 0
        self.receipts = 0
        self.refused = 0
        self.tallies: dict[PeerId, Tally] = {}
        self.waiting: Waiting | None = None

    @property
    def version(self) -> int:
        """The newest version applied."""
        return self.journal[-1].version if self.journal else self.base_version

    @property
    def digest(self) -> bytes:
        """The newest commit applied; empty at version 0."""
        return self.journal[-1].digest if self.journal else self.base_digest

    @property
    def settled(self) -> int:
        """The newest version that lies F versions below the newest applied, or that itself where
        the run has ended with it.
        """
        if self.journal and self.journal[-1].final:
            return self.version
        return max(self.base_version, self.version - self.rules.horizon)

    @property
    def settled_ms(self) -> int:
        """The commit time of the newest settled version."""
        times = (e.time_ms for e in reversed(self.journal) if e.version <= self.settled)
        return next(times, self.base_ms)

    @property
    def units(self) -> int:
        """Units of this fragment that are covered in full."""
        return sum(tally.units for tally in self._rows())

    @property
    def units_settled(self) -> int:
        """Those of them that a settled commit completed."""
        later = (e for e in self.journal if e.version > self.settled)
        return self.units - sum(tally.units for e in later for tally in e.earned.values())

    @property
    def twice(self) -> int:
        """Tokens that were listed although they were covered already."""
        return sum(tally.twice for tally in self._rows())

    def _rows(self) -> Iterator[Tally]:
        yield from self.tallies.values()
        for entry in self.journal:
            yield from entry.earned.values()

    def entry(self, digest: bytes) -> Entry | None:
        """The commit in the journal that ``digest`` names, if there is one."""
        return next((e for e in reversed(self.journal) if e.digest == digest), None)

    def check_next(self, commit: CommitRecord) -> None:
        """CreditError when ``commit`` does not follow the newest applied."""
        header = commit.header
        if header.version != self.version + 1:
            raise CreditError(f"version {header.version} does not follow version {self.version}")
        if self.digest and header.parent != self.digest:
            raise CreditError("its parent is not the newest commit applied")

    def plan(
        self, lineage: Sequence[tuple[bytes, CommitRecord]]
    ) -> Sequence[tuple[bytes, CommitRecord]]:
        """What of ``lineage`` is to be applied once the rest is undone."""
        digests = {e.version: e.digest for e in self.journal}
        digests[self.base_version] = self.base_digest
        shared = (n for n, (d, c) in enumerate(lineage, 1) if digests.get(c.header.version) == d)
        todo = lineage[max(shared, default=0) :]
        last: tuple[int, bytes] | None = None
        for digest, commit in todo:
            header = commit.header
            before = header.version - 1
            version, parent = last if last else (before, digests.get(before))
            if header.fragment != self.fragment or before != version or parent is None:
                raise CreditError("the lineage does not connect to what can be undone")
            if parent and header.parent != parent:
                raise CreditError("a commit of the lineage does not name the one before it")
            last = header.version, digest
        return todo

    def apply(self, commit: CommitRecord, digest: bytes) -> tuple[UnitPiece, ...]:
        """Add a checked commit; what it newly covered."""
        header = commit.header
        home = PeerId(header.home)
        entry = Entry(digest, header.parent, header.version, home, header.time_ms, 0)
        entry.final = 0 < self.rules.token_budget <= header.tokens_total
        entry.acked = {PeerId(a.peer) for a in commit.acks if a.digest == digest} - {home}
        for one in commit.inputs:
            entry.receipts += 1
            if one.refusal or one.contribution.fragment != self.fragment:
                entry.refused += 1
                continue
            earned = entry.earned.setdefault(PeerId(one.contribution.peer), Tally())
            self._claim(earned, PeerId(one.contribution.peer), one.contribution.tokens, entry)
            earned.contributions += 1
            earned.seen(header.time_ms, header.time_ms)
            for piece in one.pieces:
                done = self.coverage.cover(piece)
                entry.covered.extend(done.new)
                new = sum(run.stop - run.start for run in done.new)
                earned.tokens += new * self.rules.sequence_tokens
                earned.twice += done.twice * self.rules.sequence_tokens
                earned.units += done.completed
        self.journal.append(entry)
        if len(self.journal) > UNDO_MAX:
            self._fold_oldest()
        return tuple(entry.covered)

    def _claim(self, earned: Tally, peer: PeerId, tokens: int, entry: Entry) -> None:
        """Note the speed that a contribution implies: its tokens since the one before it. Before
        `earned` counts it, and before `entry` is in the journal.
        """
        before = next((e for e in reversed(self.journal) if peer in e.earned), None)
        tally = self.tallies.get(peer)
        last_ms = before.time_ms if before is not None else tally.last_ms if tally else 0
        if last_ms:
            earned.claimed += tokens
            gap_ms = 0 if earned.contributions else max(entry.time_ms - last_ms, 0)
            earned.span_ms += min(gap_ms, GAP_MS_MAX)

    def undo(self) -> tuple[UnitPiece, ...]:
        """Take back the newest commit of the journal; what it had covered."""
        entry = self.journal.pop()
        for piece in reversed(entry.covered):
            self.coverage.uncover(piece)
        return tuple(entry.covered)

    def witnessed(self, entry: Entry) -> tuple[bool, str]:
        """Whether somebody other than its home confirmed a commit, and who or why not."""
        later = (e.version for e in self.journal if e.version > entry.version)
        homes = {e.version: e.home for e in self.journal}
        builder = next((v for v in later if homes[v] != entry.home), None)
        if builder is not None:
            return True, f"the home of version {builder} built on it"
        if any(self.lists(peer) for peer in entry.acked):
            return True, "another contributor acknowledged it"
        if entry.acked:
            return False, "only peers that never contributed acknowledged it"
        return False, "nobody but its home has confirmed it"

    def _built_upon(self, entry: Entry) -> bool:
        """Whether a later commit on this chain has another home: the witness that everybody sees.

        Acks are not asked here. Peers know different ones, and the board must not differ.
        """
        return any(e.version > entry.version and e.home != entry.home for e in self.journal)

    def add_to(self, totals: dict[PeerId, Tally]) -> None:
        """Add this fragment to the totals of all peers."""
        for peer, tally in self.tallies.items():
            total = totals.setdefault(peer, Tally())
            total.work(tally)
            total.settle(tally.tokens, tally.days)
        if self.waiting is not None:
            total = totals.setdefault(self.waiting.home, Tally())
            if any(e.home != self.waiting.home for e in self.journal):
                total.settle(self.waiting.tokens, self.waiting.days)
            else:
                total.provisional += self.waiting.tokens
                total.unwitnessed += self.waiting.tokens
        for entry in self.journal:
            confirmed = self._built_upon(entry)
            for peer, earned in entry.earned.items():
                total = totals.setdefault(peer, Tally())
                total.work(earned)
                unwitnessed = peer == entry.home and not confirmed
                if unwitnessed or entry.version > self.settled:
                    total.provisional += earned.tokens
                    total.unwitnessed += earned.tokens if unwitnessed else 0
                elif earned.tokens:
                    total.settle(earned.tokens, {entry.day: earned.tokens})

    def lists(self, peer: PeerId) -> bool:
        """Whether a receipt of ``peer`` was folded."""
        return peer in self.tallies or any(peer in e.earned for e in self.journal)

    def _fold_oldest(self) -> None:
        entry = self.journal.popleft()
        confirmed = self._built_upon(entry)
        if self.waiting is not None and self.waiting.home != entry.home:
            tally = self._tally(self.waiting.home)
            tally.settle(self.waiting.tokens, self.waiting.days)
            _drop_old(tally.days)
            self.waiting = None
        for peer, earned in entry.earned.items():
            tally = self._tally(peer)
            tally.work(earned)
            days = {entry.day: earned.tokens} if earned.tokens else {}
            if peer != entry.home or confirmed:
                tally.settle(earned.tokens, days)
                _drop_old(tally.days)
            elif earned.tokens:
                self._wait(peer, entry.day, earned.tokens)
        self.base_version, self.base_digest = entry.version, entry.digest
        self.base_ms = entry.time_ms
        self.receipts += entry.receipts
        self.refused += entry.refused
        self.coverage.collapse({piece.epoch for e in self.journal for piece in e.covered})

    def _wait(self, home: PeerId, day: int, tokens: int) -> None:
        self.waiting = self.waiting or Waiting(home)
        self.waiting.tokens += tokens
        self.waiting.days[day] = self.waiting.days.get(day, 0) + tokens
        _drop_old(self.waiting.days)

    def _tally(self, peer: PeerId) -> Tally:
        if peer not in self.tallies and len(self.tallies) >= PEERS_MAX:
            peer = POOL
        return self.tallies.setdefault(peer, Tally())

    def state(self) -> FragmentState:
        """The base as a record."""
        waiting = self.waiting
        return FragmentState(
            fragment=self.fragment,
            version=self.base_version,
            digest=self.base_digest,
            time_ms=self.base_ms,
            receipts=self.receipts,
            refused=self.refused,
            done=self.coverage.done,
            masks=self.coverage.state(piece for e in self.journal for piece in e.covered),
            tallies=tuple(PeerTally.of(p, t) for p, t in sorted(self.tallies.items())),
            waiting_home=waiting.home if waiting else b"",
            waiting_tokens=waiting.tokens if waiting else 0,
            waiting_days=tuple(sorted(waiting.days.items())) if waiting else (),
        )

    def restore(self, state: FragmentState) -> None:
        """Start from a base; CreditError when its masks are impossible."""
        fault = self.coverage.restore(state.done, state.masks)
        if fault:
            raise CreditError(fault)
        self.base_version, self.base_digest = state.version, state.digest
        self.base_ms = state.time_ms
        self.receipts, self.refused = state.receipts, state.refused
        self.tallies = {PeerId(row.peer): row.tally() for row in state.tallies}
        if state.waiting_home:
            days = dict(state.waiting_days)
            self.waiting = Waiting(PeerId(state.waiting_home), state.waiting_tokens, days)


def _drop_old(days: dict[int, int]) -> None:
    """Forget the days that weigh nothing any more in the recent score."""
    newest = max(days, default=0)
    for day in [one for one in days if one < newest - RECENT_DAYS]:
        del days[day]
