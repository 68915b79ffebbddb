"""Who did what: coverage and credit as a fold over the chosen lineages (DESIGN.md sections 7, 11).

A unit is credited in the one fragment that it hashes to, to whoever's contribution covered its
sequences first on the chosen lineage of that fragment; what was covered before is counted as
*twice*. Credit is provisional until its commit lies F versions below the head, and a home's own
inputs until another peer has confirmed the commit: with an ack, or by building on it.

Nothing here judges signatures or roots: the exchange does, before a commit reaches the fold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from dugnad.averaging.board import FORMULA, Basis, Board, Tally, make_board
from dugnad.averaging.coverage import (
    CreditRules,
    UnitShares,
    mask_pieces,
    net_pieces,
    unit_fragment,
)
from dugnad.averaging.creditchain import UNDO_MAX, CreditChain, CreditError
from dugnad.averaging.dispute import Said, judged
from dugnad.averaging.foldstate import FoldState, state_fault
from dugnad.averaging.formats import Ack, CommitRecord, HeadRow, UnitPiece
from dugnad.dht.ids import PeerId

__all__ = [
    "UNDO_MAX",
    "Board",
    "CoverageChange",
    "CreditError",
    "CreditFold",
    "CreditRules",
    "EpochCoverage",
    "FoldState",
    "unit_fragment",
]

MISSING_MAX: Final = 4096
"""Commits named in one answer of :meth:`CreditFold.missing`; the rest is named when asked again."""


@dataclass(frozen=True, slots=True)
class CoverageChange:
    """Runs of sequences that became covered and uncovered; disjoint."""

    covered: tuple[UnitPiece, ...] = ()
    uncovered: tuple[UnitPiece, ...] = ()


@dataclass(frozen=True, slots=True)
class EpochCoverage:
    """How far one epoch is: units covered in full of all, sequences covered of all."""

    epoch: int
    units: int
    units_covered: int
    sequences: int
    sequences_covered: int


class CreditFold:
    """The fold of one run. Fragments are independent: their commits may come in any order."""

    def __init__(self, rules: CreditRules) -> None:
        if rules.horizon >= UNDO_MAX:
            raise ValueError(f"a horizon of {rules.horizon} versions; below {UNDO_MAX} is possible")
        self.rules = rules
        shares = UnitShares(rules)
        self._chains = [CreditChain(rules, fragment, shares) for fragment in range(rules.fragments)]

    def apply(self, commit: CommitRecord, digest: bytes) -> CoverageChange:
        """Add the next commit of its fragment's lineage; CreditError when it does not follow."""
        chain = self._chain(commit.header.fragment)
        chain.check_next(commit)
        return CoverageChange(covered=chain.apply(commit, digest))

    def undo(self, digest: bytes) -> CoverageChange:
        """Take back the newest commit of a fragment; CreditError when ``digest`` names no such."""
        for chain in self._chains:
            if chain.journal and chain.journal[-1].digest == digest:
                return CoverageChange(uncovered=chain.undo())
        raise CreditError("it is not the newest commit of a fragment, or too old to be undone")

    def follow(
        self, fragment: int, lineage: Sequence[tuple[bytes, CommitRecord]]
    ) -> CoverageChange:
        """Go over to ``lineage``, (digest, commit) oldest first: undo what is not on it, apply it.

        Its first commit must follow one that can still be reached by undoing; else CreditError,
        with nothing changed: fetch what lies between, or :meth:`reset` and replay from the store.
        """
        chain = self._chain(fragment)
        todo = chain.plan(lineage)
        if not todo:
            return CoverageChange()
        keep = todo[0][1].header.version - 1
        undone: list[UnitPiece] = []
        while chain.version > keep:
            undone.extend(chain.undo())
        done = [piece for digest, commit in todo for piece in chain.apply(commit, digest)]
        return CoverageChange(*net_pieces(done, undone))

    def reset(self, fragment: int) -> CoverageChange:
        """Forget a fragment, to replay it from version 0; says what is uncovered in open epochs."""
        old = self._chain(fragment)
        runs = (mask_pieces(epoch, index, mask) for epoch, index, mask in old.coverage.masks())
        self._chains[fragment] = CreditChain(self.rules, fragment, old.shares)
        return CoverageChange(uncovered=tuple(piece for run in runs for piece in run))

    def acknowledge(self, ack: Ack) -> bool:
        """Note an ack that came after its commit; whether it says anything new."""
        if not 0 <= ack.fragment < self.rules.fragments:
            return False
        entry = self._chains[ack.fragment].entry(ack.digest)
        peer = PeerId(ack.peer)
        if entry is None or peer == entry.home or peer in entry.acked:
            return False
        entry.acked.add(peer)
        return True

    def witnessed(self, digest: bytes) -> tuple[bool, str]:
        """Whether somebody other than its home confirmed a recent commit, and who or why not."""
        for chain in self._chains:
            entry = chain.entry(digest)
            if entry is not None:
                return chain.witnessed(entry)
        return False, "it is not among the newest commits of this lineage"

    def tip(self, fragment: int) -> tuple[int, bytes]:
        """(version, digest) of the newest commit applied; the digest is empty at version 0."""
        chain = self._chain(fragment)
        return chain.version, chain.digest

    def settled(self, fragment: int) -> int:
        """The newest version of ``fragment`` that lies F versions below the newest applied."""
        return self._chain(fragment).settled

    def missing(self, heads: Iterable[HeadRow]) -> tuple[tuple[int, int], ...]:
        """(fragment, version) of the commits that the fold lacks to reach ``heads``, oldest first.

        A head on another branch of known length is named itself: follow its lineage.
        """
        wanted: list[tuple[int, int]] = []
        for row in heads:
            chain = self._chain(row.fragment)
            if row.version > chain.version:
                room = MISSING_MAX - len(wanted)
                stop = min(row.version, chain.version + room)
                wanted.extend((row.fragment, v) for v in range(chain.version + 1, stop + 1))
            elif row.version and row.digest != chain.digest and chain.entry(row.digest) is None:
                wanted.append((row.fragment, row.version))
        return tuple(wanted[:MISSING_MAX])

    def covered(self, epoch: int, index: int) -> int:
        """Covered sequences of a unit, as bits."""
        fragment = unit_fragment(self.rules.run, epoch, index, self.rules.fragments)
        return self._chains[fragment].coverage.mask(epoch, index)

    def covered_pieces(self) -> Iterator[UnitPiece]:
        """All covered runs of epochs that are not behind everywhere: the start of a work core."""
        for epoch in self.open_epochs():
            for index in range(self.rules.units):
                yield from mask_pieces(epoch, index, self.covered(epoch, index))

    def open_epochs(self) -> range:
        """Epochs from the first that is not behind in every fragment to the last one touched."""
        first = min(chain.coverage.done for chain in self._chains)
        tops = [max(c.coverage.done - 1, c.coverage.newest_epoch) for c in self._chains]
        return range(first, max(first, max(tops)) + 1)

    def coverage(self, epoch: int) -> EpochCoverage:
        """How far ``epoch`` is."""
        masks = [self.covered(epoch, index) for index in range(self.rules.units)]
        return EpochCoverage(
            epoch=epoch,
            units=self.rules.units,
            units_covered=sum(chain.coverage.full_units(epoch) for chain in self._chains),
            sequences=self.rules.epoch_sequences,
            sequences_covered=sum(mask.bit_count() for mask in masks),
        )

    @property
    def units_covered(self) -> int:
        """Units of all epochs that are covered in full."""
        return sum(chain.units for chain in self._chains)

    def earned(self, fragment: int) -> dict[bytes, dict[PeerId, tuple[int, int]]]:
        """Of the newest commits of a fragment, by digest: what each of their makers has in them,
        (tokens that nobody had covered before, tokens that others had).
        """
        return {
            entry.digest: {peer: (one.tokens, one.twice) for peer, one in entry.earned.items()}
            for entry in self._chain(fragment).journal
        }

    @property
    def units_settled(self) -> int:
        """Units whose covering in full cannot change any more."""
        return sum(chain.units_settled for chain in self._chains)

    @property
    def twice_tokens(self) -> int:
        """Tokens that were listed although they were covered already."""
        return sum(chain.twice for chain in self._chains)

    def lists(self, peer: PeerId) -> bool:
        """Whether a receipt of ``peer`` was folded (and counted apart)."""
        return any(chain.lists(peer) for chain in self._chains)

    def board(self, said: Said | None = None) -> Board:
        """The leaderboard: a function of the commits applied and of what is said of their makers,
        and of nothing else.
        """
        totals: dict[PeerId, Tally] = {}
        for chain in self._chains:
            chain.add_to(totals)
        basis = Basis(
            as_of_ms=max(chain.settled_ms for chain in self._chains),
            receipts=sum(c.receipts + sum(e.receipts for e in c.journal) for c in self._chains),
            refused=sum(c.refused + sum(e.refused for e in c.journal) for c in self._chains),
            versions=tuple(chain.version for chain in self._chains),
            settled=tuple(chain.settled for chain in self._chains),
        )
        said = said or Said()
        fair, claims = judged(totals, said.verdicts)
        return make_board(fair, basis, said.owners, claims)

    def snapshot(self) -> FoldState:
        """The base of the fold: all but the newest UNDO_MAX commits of each fragment.

        Two folds of the same lineages have equal snapshots; whoever restores one and applies the
        commits above it has the same board.
        """
        return FoldState(FORMULA, self.rules.run, tuple(c.state() for c in self._chains))

    @classmethod
    def restore(cls, rules: CreditRules, state: FoldState) -> CreditFold:
        """The fold that stands at ``state``; CreditError when it is malformed or another run's.

        A state says nothing about its own truth: take one of your own disk, or whose root
        (:func:`~dugnad.averaging.foldstate.fold_root`) several members name.
        """
        fold = cls(rules)
        fault = state_fault(state, rules.run, rules.fragments)
        if fault:
            raise CreditError(fault)
        for chain, row in zip(fold._chains, state.fragments, strict=True):
            chain.restore(row)
        return fold

    def _chain(self, fragment: int) -> CreditChain:
        if not 0 <= fragment < self.rules.fragments:
            raise CreditError(f"fragment {fragment} of {self.rules.fragments}")
        return self._chains[fragment]
