"""Coverage and credit beside a simulated swarm: the daemon's fold, followed head by head.

Each peer's fold goes along with its head, undoing and applying; in the end it must equal the fold
of the whole lineage from version 0, and credit must be what was merged, each sequence once.
"""

from __future__ import annotations

from collections.abc import Iterable

from dugnad.averaging import formats as fm
from dugnad.averaging.board import Board
from dugnad.averaging.credit import (
    CoverageChange,
    CreditError,
    CreditFold,
    CreditRules,
    unit_fragment,
)
from dugnad.averaging.events import Adopt
from dugnad.dht.ids import PeerId, peer_text
from dugnad.simulation.ledger import Ledger
from dugnad.simulation.people import SimPeer
from dugnad.simulation.settings import EPOCH_SEQUENCES, RUN, SEQUENCE_TOKENS, UNIT_SEQUENCES


class Credits:
    """The folds of one stage."""

    def __init__(self, ledger: Ledger, fragments: int, horizon: int) -> None:
        self.ledger = ledger
        self.rules = CreditRules(
            RUN, fragments, SEQUENCE_TOKENS, UNIT_SEQUENCES, EPOCH_SEQUENCES, horizon
        )
        self.folds: dict[tuple[PeerId, int], CreditFold] = {}
        self.units = 0
        self._whole: dict[tuple[bytes, ...], tuple[Board, dict[str, int]]] = {}
        """Heads -> what the whole lineages come to; live peers mostly have the same."""

    def piece(self) -> fm.UnitPiece:
        """The next sequence, which nobody has."""
        epoch, place = divmod(self.units, EPOCH_SEQUENCES)
        self.units += 1
        index, start = divmod(place, UNIT_SEQUENCES)
        return fm.UnitPiece(epoch, index, start, start + 1)

    def begin(self, sim: SimPeer, heads: dict[int, bytes]) -> list[fm.UnitPiece]:
        """A peer starts at heads from its disk; what their lineages list."""
        fold = self.folds[(sim.peer, sim.born)] = CreditFold(self.rules)
        for p, digest in sorted(heads.items()):
            fold.follow(p, self._lineage(digest))
        return list(fold.covered_pieces())

    def adopted(self, sim: SimPeer, p: int, adopt: Adopt) -> list[CoverageChange]:
        """A head changed: its peer's fold goes along, from the start where it has to. What that
        covered and uncovered, in order."""
        life = (sim.peer, sim.born)
        fold = self.folds.setdefault(life, CreditFold(self.rules))
        applied = [(fm.header_digest(one.header, RUN), one) for one in adopt.applied]
        try:
            if adopt.gap or not applied:
                raise CreditError("the way from the old head is not known")
            return [fold.follow(p, applied)]
        except CreditError:
            return [fold.reset(p), fold.follow(p, self._lineage(adopt.digest))]

    def listed(self, digests: list[bytes]) -> set[tuple[int, int, int]]:
        """(epoch, unit, place) of each sequence that these heads of all fragments list."""
        found: set[tuple[int, int, int]] = set()
        for p, digest in enumerate(digests):
            records = [record for _, record in self._lineage(digest)]
            for _, piece in self._merged(p, records):
                found.update((piece.epoch, piece.index, i) for i in range(piece.start, piece.stop))
        return found

    def fault(self, sim: SimPeer) -> str:
        """What is wrong with a peer's credit at the end, or ''."""
        heads = [fragment.core.head for fragment in sim.fragments]
        fold = self.folds.get((sim.peer, sim.born))
        if fold is None or any(fold.tip(p) != (h.version, h.digest) for p, h in enumerate(heads)):
            return ""  # it stands where its disk left it, or at version 0
        names = tuple(head.digest for head in heads)
        if names not in self._whole:
            self._whole[names] = self._fold(names)
        board, merged = self._whole[names]
        if board != fold.board():
            return "its credit is not the fold of its lineage"
        credited = board.tokens + board.provisional + board.twice
        if credited != sum(merged.values()):
            return f"{credited} tokens credited or counted twice, {sum(merged.values())} merged"
        if any(row.tokens + row.provisional > merged.get(row.peer, 0) for row in board.rows):
            return "a peer is credited with more than it merged"
        return ""

    def _fold(self, digests: tuple[bytes, ...]) -> tuple[Board, dict[str, int]]:
        """The board of whole lineages, and what each peer merged in them."""
        whole = CreditFold(self.rules)
        merged: dict[bytes, int] = {}
        for p, digest in enumerate(digests):
            lineage = self._lineage(digest)
            whole.follow(p, lineage)
            for peer, piece in self._merged(p, (record for _, record in lineage)):
                tokens = (piece.stop - piece.start) * SEQUENCE_TOKENS
                merged[peer] = merged.get(peer, 0) + tokens
        return whole.board(), {peer_text(PeerId(peer)): n for peer, n in merged.items()}

    def _lineage(self, digest: bytes) -> list[tuple[bytes, fm.CommitRecord]]:
        chain = self.ledger.chain(digest)[::-1]
        return [(fm.header_digest(one.header, RUN), one) for one in chain]

    def _merged(
        self, p: int, records: Iterable[fm.CommitRecord]
    ) -> Iterable[tuple[bytes, fm.UnitPiece]]:
        """Maker and piece of all of fragment ``p``'s units that these commits list."""
        fragments = self.rules.fragments
        for record in records:
            for one in record.inputs:
                for piece in () if one.refusal else one.pieces:
                    mine = unit_fragment(RUN, piece.epoch, piece.index, fragments) == p
                    if mine and piece.stop <= self.rules.unit_size(piece.index):
                        yield one.contribution.peer, piece
