"""The arithmetic of the coverage benchmark; its swarm is that of churn.py, tested there."""

from __future__ import annotations

import pytest
from _churnfigures import Sample, Span
from _coveragefigures import EpochShape, listed, trained

from dugnad.averaging.coverage import unit_fragment
from dugnad.averaging.formats import UnitPiece
from dugnad.dht.ids import RunId

RUN = RunId(bytes(32))


def test_each_sequence_counts_once_and_only_where_its_unit_is_credited() -> None:
    shape = EpochShape(epoch=0, sequences=12, fragments=2)
    one, other = (next(i for i in range(99) if unit_fragment(RUN, 0, i, 2) == p) for p in (0, 1))
    pieces = [
        (0, UnitPiece(0, one, 0, 4)),
        (1, UnitPiece(0, one, 0, 4)),  # the same hand-in, in the fragment that does not count it
        (0, UnitPiece(0, one, 2, 4)),  # two of it again
        (1, UnitPiece(0, other, 1, 3)),
        (0, UnitPiece(1, one, 0, 4)),  # another epoch
    ]
    found = listed(pieces, RUN, shape)
    assert (found.covered, found.listings) == (6, 8)
    assert found.share == 0.5
    assert found.duplicates == pytest.approx(2 / 12)


def test_tokens_of_all_lives_count_and_waking_is_no_new_life() -> None:
    def span(started: bool, *tokens: int) -> Span:
        samples = [Sample(float(n), count, True) for n, count in enumerate(tokens)]
        return Span(0, 0.0, started=started, samples=samples)

    assert trained([]) == 0
    lives = [span(True, 0, 50, 100), span(False, 120, 130), span(True, 0, 7), span(True)]
    assert trained(lives) == 130 + 7
