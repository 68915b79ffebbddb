"""The table of units, against a plain count of listings."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dugnad.peer import unittable
from dugnad.peer.unitplan import UnitPlan
from dugnad.peer.unittable import LAYERS_MAX, UnitTable, mask

PLAN = UnitPlan(b"", 46, 4)  # twelve units an epoch, the last of two sequences
changes = st.lists(
    st.tuples(st.booleans(), st.integers(0, 25), st.integers(0, 3), st.integers(1, 4)), max_size=80
)


@given(changes)
def test_coverage_is_what_a_plain_count_of_listings_says(
    steps: list[tuple[bool, int, int, int]],
) -> None:
    table = UnitTable(PLAN, attempts=3)
    count: Counter[tuple[int, int]] = Counter()
    for cover, position, start, length in steps:
        stop = min(start + length, table.size(position))
        places = [(position, place) for place in range(start, stop)]
        if not places:
            continue
        if cover and all(count[place] < LAYERS_MAX for place in places):
            count.update(places)
            table.cover(position, mask(start, stop), by_me=False)
        elif not cover and all(count[place] > 0 for place in places):
            count.subtract(places)
            table.uncover(position, mask(start, stop))
        table.advance()
        for at in range(26):
            plain = sum(1 << n for n in range(4) if count[at, n] > 0)
            assert table.covered(at) == plain
            assert table.closed(at) == (plain == table.all_of(at))
        assert table.covered_sequences(0, 26) == sum(c > 0 for c in count.values())
        assert list(table.open_units(26 - table.floor)) == [
            at for at in range(26) if not table.closed(at)
        ]


def test_the_floor_passes_what_is_closed_and_nothing_else() -> None:
    table = UnitTable(PLAN, attempts=3)
    for position in (0, 1, 3):
        table.cover(position, table.all_of(position), by_me=True)
    table.advance()
    assert table.floor == 2
    table.cover(2, 0b1111, by_me=False)
    table.advance()
    assert table.floor == 4
    table.uncover(1, 0b0010)
    assert (table.free(0), table.free(1), table.free(5)) == (0, 0b0010, 0b1111)
    assert list(table.open_units(3)) == [1, 4, 5, 6]


def test_batches_with_open_units_are_told_however_far_the_others_have_gone_on() -> None:
    table = UnitTable(PLAN, attempts=3)
    assert table.open_batches(2, 3) == [(0, False), (1, False), (2, False)]
    for position in (0, 2, 3, 4, 5, 6):
        table.cover(position, table.all_of(position), by_me=False)
    table.advance()
    assert table.open_batches(2, 3) == [(0, True), (3, True), (4, False)]
    table.cover(1, table.all_of(1), by_me=False)
    table.advance()
    assert table.open_batches(2, 2) == [(3, True), (4, False)]
    table.uncover(2, 0b0001)
    assert table.open_batches(2, 2) == [(1, True), (3, True)]
    assert table.open_batches(2, 1) == [(1, True)]


def test_more_than_may_be_held_is_neither_noted_nor_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unittable, "HELD_UNITS_MAX", 5)
    table = UnitTable(PLAN, attempts=3)
    assert [table.give(position, 1) for position in range(7)] == [True] * 5 + [False] * 2
    table.cover(9, 1, by_me=False)
    assert len(table) == 5
    assert table.covered(9) == 0


def test_large_units_are_held_in_smaller_numbers() -> None:
    assert UnitTable(UnitPlan(b"", 1 << 30, 1 << 16), attempts=1).held_max == 4096
    assert UnitTable(UnitPlan(b"", 1 << 30, 64), attempts=1).held_max == 65_536
