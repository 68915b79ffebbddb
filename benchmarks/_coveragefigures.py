"""The figures of `coverage.py`, computed from commits and from what peers said. Pure.

What is listed is counted here from the commits' inputs alone, with none of the code by which a peer
counts it, so that a mistake there shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from _churnfigures import Span

from dugnad.averaging.coverage import unit_fragment
from dugnad.averaging.formats import UnitPiece
from dugnad.dht.ids import RunId


@dataclass(frozen=True, slots=True)
class Listed:
    """Of one epoch: its sequences, how many are listed at all, and how many listings there are."""

    sequences: int
    covered: int
    listings: int

    @property
    def share(self) -> float:
        """Share of the epoch that is listed."""
        return self.covered / self.sequences

    @property
    def duplicates(self) -> float:
        """Listings of what was listed already, as a share of the epoch."""
        return (self.listings - self.covered) / self.sequences


def listed(pieces: Iterable[tuple[int, UnitPiece]], run: RunId, shape: EpochShape) -> Listed:
    """What (fragment, piece) pairs of one lineage list of an epoch, each unit where it counts."""
    seen: set[tuple[int, int]] = set()
    listings = 0
    for fragment, piece in pieces:
        if piece.epoch != shape.epoch:
            continue
        if unit_fragment(run, piece.epoch, piece.index, shape.fragments) != fragment:
            continue
        listings += piece.stop - piece.start
        seen.update((piece.index, place) for place in range(piece.start, piece.stop))
    return Listed(shape.sequences, len(seen), listings)


@dataclass(frozen=True, slots=True)
class EpochShape:
    """Which epoch, of how many sequences, in a run of how many fragments."""

    epoch: int
    sequences: int
    fragments: int


def trained(spans: Sequence[Span]) -> int:
    """Tokens that one peer trained in all its lives, as far as it was asked before each end.

    A daemon counts from its start; a life that began with waking goes on counting.
    """
    total = newest = 0
    for span in spans:
        if span.started:
            total, newest = total + newest, 0
        newest = max([newest, *(one.tokens for one in span.samples)])
    return total + newest
