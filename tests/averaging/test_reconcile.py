"""Reconciliation: the asker ends with the other's names, within bounds, whatever it is answered."""

import hashlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dugnad.averaging import reconcile
from dugnad.averaging.reconcile import (
    LAST,
    LISTED_MAX,
    ROUNDS_MAX,
    WHOLE,
    Range,
    Reconciliation,
    Summary,
    fingerprint,
    summarise,
    within,
)


def names(*numbers: int) -> list[bytes]:
    return sorted(hashlib.sha256(b"%d" % n).digest() for n in numbers)


def search(own: Sequence[bytes], theirs: Sequence[bytes]) -> Reconciliation:
    """A whole reconciliation with an honest peer."""
    mine, held = Reconciliation(own), sorted(theirs)
    while asked := mine.request():
        assert mine.answer([summarise(held, part) for part in asked]) == ""
    return mine


@given(st.sets(st.integers(0, 400)), st.sets(st.integers(0, 400)))
def test_whoever_asks_finds_exactly_what_the_other_holds_and_it_lacks(
    own: set[int], theirs: set[int]
) -> None:
    found = search(names(*own), names(*theirs))
    assert sorted(found.missing) == names(*(theirs - own))
    assert found.complete


@given(st.lists(st.sets(st.integers(0, 300)), min_size=2, max_size=4))
def test_peers_that_ask_each_other_in_turn_end_with_the_same_set(sets: list[set[int]]) -> None:
    held = [set(names(*one)) for one in sets]
    for _ in range(2):
        for n, own in enumerate(held):
            own |= set(search(sorted(own), sorted(held[n - 1])).missing)
    everything = set(names(*set().union(*sets)))
    assert all(own == everything for own in held)


def test_a_few_differences_among_many_take_a_few_rounds() -> None:
    many = names(*range(20_000))
    found = search(many[5:], many)
    assert found.missing == many[:5]
    assert found.rounds <= 6
    assert search(many, many).rounds == 1


def test_names_that_share_56_bits_are_listed_together() -> None:
    twins = [b"\x01" * 8 + bytes([n]) * 24 for n in range(LISTED_MAX + 8)]
    found = search([], twins)
    assert found.missing == twins[:LISTED_MAX]
    assert not found.complete  # more of them than a list holds


def test_a_range_holds_its_edges() -> None:
    edges = [bytes(32), b"\xff" * 32]
    assert within(edges, WHOLE) == edges
    assert within(edges, Range(0, 0)) == edges[:1]
    assert within(edges, Range(LAST, LAST)) == edges[1:]


def test_a_peer_that_always_differs_is_given_up_after_the_bound() -> None:
    mine = Reconciliation(())
    while asked := mine.request():
        many = [Summary(10_000, b"x" * 16) for _ in asked]
        if mine.answer(many):
            break
    assert mine.rounds <= ROUNDS_MAX
    assert not mine.complete


def test_more_than_the_bound_is_found_in_several_reconciliations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reconcile, "MISSING_MAX", 100)
    theirs, own = names(*range(230)), list[bytes]()
    rounds = 0
    while not (found := search(own, theirs)).complete:
        assert len(found.missing) <= 100
        own, rounds = sorted({*own, *found.missing}), rounds + 1
    assert sorted({*own, *found.missing}) == theirs
    assert rounds == 2


ONE = names(1)


@pytest.mark.parametrize(
    ("told", "fault"),
    [
        ([], "0 summaries of 1 ranges"),
        ([Summary(1, fingerprint(ONE))], "without the list"),
        ([Summary(2, fingerprint(ONE), (*ONE, *ONE))], "out of order"),
        ([Summary(1, b"x" * 16, tuple(ONE))], "another fingerprint"),
        ([Summary(3, fingerprint(ONE), tuple(ONE))], "without the list"),
    ],
)
def test_an_answer_that_cannot_be_ends_the_search_with_nothing_kept(
    told: list[Summary], fault: str
) -> None:
    mine = Reconciliation(())
    mine.request()
    assert fault in mine.answer(told)
    assert mine.missing == []
    assert mine.request() == ()
    assert not mine.complete
