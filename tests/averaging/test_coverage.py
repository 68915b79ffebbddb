"""Masks of sequences and the runs that they are told in."""

import hashlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dugnad.averaging.coverage import (
    EPOCHS_AHEAD_MAX,
    Coverage,
    CreditRules,
    UnitShares,
    mask_pieces,
    net_pieces,
    unit_fragment,
)
from dugnad.averaging.formats import UnitPiece
from dugnad.dht.ids import RunId

RUN = RunId(hashlib.sha256(b"coverage").digest())


@given(st.integers(0, 2**70))
def test_runs_tell_exactly_the_bits_of_a_mask_and_never_touch(mask: int) -> None:
    found = list(mask_pieces(2, 5, mask))
    assert sum(((1 << (p.stop - p.start)) - 1) << p.start for p in found) == mask
    assert all(a.stop < b.start for a, b in itertools.pairwise(found))


def test_the_net_of_undoing_and_doing_again_is_nothing() -> None:
    added = [UnitPiece(0, 1, 0, 4), UnitPiece(0, 2, 1, 2)]
    removed = [UnitPiece(0, 1, 2, 6)]
    covered, uncovered = net_pieces(added, removed)
    assert covered == (UnitPiece(0, 1, 0, 2), UnitPiece(0, 2, 1, 2))
    assert uncovered == (UnitPiece(0, 1, 4, 6),)


def test_shares_count_what_each_fragment_owns() -> None:
    rules = CreditRules(RUN, fragments=4, sequence_tokens=1, unit_sequences=2, epoch_sequences=99)
    shares = UnitShares(rules)
    for epoch in (0, 7, 0):
        mine = [sum(unit_fragment(RUN, epoch, i, 4) == f for i in range(50)) for f in range(4)]
        assert [shares.count(epoch, f) for f in range(4)] == mine


def test_a_piece_far_beyond_the_oldest_open_epoch_waits_until_that_is_covered() -> None:
    rules = CreditRules(RUN, fragments=1, sequence_tokens=1, unit_sequences=2, epoch_sequences=2)
    coverage = Coverage(rules, 0, UnitShares(rules))
    far = UnitPiece(EPOCHS_AHEAD_MAX, 0, 0, 2)
    assert not coverage.cover(far).new
    assert coverage.cover(UnitPiece(0, 0, 0, 2)).completed
    assert coverage.cover(far).new == (far,)
    coverage.collapse(busy=())
    assert (coverage.done, coverage.mask(0, 0)) == (1, 0b11)


def test_epochs_without_a_unit_of_the_fragment_do_not_stand_in_the_way() -> None:
    rules = CreditRules(RUN, fragments=64, sequence_tokens=1, unit_sequences=2, epoch_sequences=2)
    first = next(e for e in range(1000) if unit_fragment(RUN, e, 0, 64) == 5)
    coverage = Coverage(rules, 5, UnitShares(rules))
    for _ in range(first // EPOCHS_AHEAD_MAX + 1):
        coverage.collapse(busy=())
    assert coverage.done == first
    assert coverage.cover(UnitPiece(first, 0, 0, 2)).completed


@pytest.mark.parametrize("name", ["fragments", "unit_sequences", "sequence_tokens", "horizon"])
def test_impossible_rules_are_refused(name: str) -> None:
    numbers = {"fragments": 2, "unit_sequences": 4, "sequence_tokens": 1, "horizon": 4}
    assert CreditRules(RUN, epoch_sequences=9, **numbers).units == 3
    with pytest.raises(ValueError, match=r"\b0 |least 1"):
        CreditRules(RUN, epoch_sequences=9, **{**numbers, name: 0})
