"""Coverage and credit beside a simulated swarm: the daemon's fold, followed head by head.

Each peer's fold goes along with its head, undoing and applying; in the end it must equal the fold
of the whole lineage from version 0, and credit must be what was merged, each sequence once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from dugnad.averaging import formats as fm
from dugnad.averaging.board import Board
from dugnad.averaging.credit import CreditError, CreditFold, CreditRules, unit_fragment
from dugnad.averaging.events import Adopt
from dugnad.dht.ids import PeerId, peer_text
from dugnad.simulation.ledger import Ledger
from dugnad.simulation.people import SimPeer
from dugnad.simulation.settings import RUN, SEQUENCE_TOKENS

EPOCH_UNITS: Final = 4096
"""Units of one sequence each per simulated epoch: a short scenario stays in the first."""


class Credits:
    """The folds of one stage."""

    def __init__(self, ledger: Ledger, fragments: int, horizon: int) -> None:
        self.ledger = ledger
        self.rules = CreditRules(RUN, fragments, SEQUENCE_TOKENS, 1, EPOCH_UNITS, horizon)
        self.folds: dict[tuple[PeerId, int], CreditFold] = {}
        self.units = 0
        self._whole: dict[tuple[bytes, ...], tuple[Board, dict[str, int]]] = {}
        """Heads -> what the whole lineages come to; live peers mostly have the same."""

    def piece(self, stop: int) -> fm.UnitPiece:
        """The next unit, which nobody has; more than one sequence of it is a lie."""
        epoch, index = divmod(self.units, EPOCH_UNITS)
        self.units += 1
        return fm.UnitPiece(epoch, index, 0, stop)

    def adopted(self, sim: SimPeer, p: int, adopt: Adopt) -> None:
        """A head changed: its peer's fold goes along, from the start where it has to."""
        life = (sim.peer, sim.born)
        fold = self.folds.setdefault(life, CreditFold(self.rules))
        applied = [(fm.header_digest(one.header, RUN), one) for one in adopt.applied]
        try:
            if adopt.gap or not applied:
                raise CreditError("the way from the old head is not known")
            fold.follow(p, applied)
        except CreditError:
            fold.reset(p)
            fold.follow(p, self._lineage(adopt.digest))

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
            for peer in self._merged(p, (record for _, record in lineage)):
                merged[peer] = merged.get(peer, 0) + SEQUENCE_TOKENS
        return whole.board(), {peer_text(PeerId(peer)): n for peer, n in merged.items()}

    def _lineage(self, digest: bytes) -> list[tuple[bytes, fm.CommitRecord]]:
        chain = self.ledger.chain(digest)[::-1]
        return [(fm.header_digest(one.header, RUN), one) for one in chain]

    def _merged(self, p: int, records: Iterable[fm.CommitRecord]) -> Iterable[bytes]:
        """The maker of each sequence of fragment ``p``'s units that these commits list."""
        fragments = self.rules.fragments
        for record in records:
            for one in record.inputs:
                for piece in () if one.refusal else one.pieces:
                    mine = unit_fragment(RUN, piece.epoch, piece.index, fragments) == p
                    if mine and piece.stop == 1:
                        yield one.contribution.peer
