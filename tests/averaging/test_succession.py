"""The order of homes and learned waiting times."""

from collections import Counter

import pytest

from dugnad.averaging.lineage import Lineage
from dugnad.averaging.node import Node
from dugnad.averaging.succession import LearnedDelay, home_order, ranked
from dugnad.dht.ids import PeerId

from .exchange_makers import (  # noqa: TID252  a helper of these tests
    RULES,
    RUN,
    A,
    B,
    C,
    D,
    chain,
    commit,
    contribution,
    listing,
    named,
)


@pytest.fixture
def head() -> Node:
    return chain(Lineage(RULES), [A, B, C], 1)[-1]


def test_homes_are_the_parents_members_whoever_is_live(head: Node) -> None:
    order, ruled = home_order(RUN, 0, head, [D])
    assert ruled
    assert sorted(order) == [A, B, C]
    assert home_order(RUN, 0, head, [])[0] == order  # the roster adds nothing (S7)


def test_at_version_0_the_live_are_the_homes() -> None:
    order, ruled = home_order(RUN, 0, Lineage(RULES).genesis, [B, A, B])
    assert not ruled
    assert sorted(order) == [A, B]


def test_a_member_that_cannot_be_home_is_none() -> None:
    lineage = Lineage(RULES)
    inputs = [listing(contribution(A, 1, 0)), listing(contribution(B, 1, 0, eligible=False))]
    record = commit(lineage, lineage.genesis, inputs, A)
    node = lineage.add(record, named(record))
    assert home_order(RUN, 0, node, [A, B])[0] == [A]


def test_the_order_depends_on_version_and_fragment_and_on_nothing_else() -> None:
    orders = {tuple(ranked(RUN, p, v, (A, B, C, D))) for p in range(4) for v in range(8)}
    assert len(orders) > 8
    assert ranked(RUN, 0, 1, [D, C, B, A]) == ranked(RUN, 0, 1, [A, B, C, D])


def test_the_duty_goes_round() -> None:
    first = Counter(ranked(RUN, 0, v, (A, B, C, D))[0] for v in range(400))
    assert min(first[peer] for peer in (A, B, C, D)) > 70


def test_a_caller_cannot_spoil_the_remembered_order() -> None:
    before = ranked(RUN, 0, 1, (A, B))
    ranked(RUN, 0, 1, (A, B)).reverse()
    assert ranked(RUN, 0, 1, (A, B)) == before
    assert {type(peer) for peer in before} == {type(PeerId(b"x"))}


def test_a_delay_is_the_first_guess_until_enough_was_seen() -> None:
    delay = LearnedDelay(low=1.0, high=30.0, first=2.0)
    assert (delay.typical(), delay.limit()) == (2.0, 2.0)
    for _ in range(3):
        delay.add(9.0)
    assert (delay.typical(), delay.limit()) == (9.0, 2.0)
    delay.add(9.0)
    assert delay.limit() == 9.0


def test_a_delay_is_median_and_spread_within_bounds() -> None:
    delay = LearnedDelay(low=1.0, high=30.0, first=2.0)
    for seconds in (2.0, 3.0, 4.0, 5.0, 1000.0):  # one outlier moves neither
        delay.add(seconds)
    assert delay.limit() == 4.0 + 4.0 * 1.0
    for _ in range(40):
        delay.add(-5.0)
    assert delay.limit() == 1.0
    for _ in range(40):
        delay.add(500.0)
    assert delay.limit() == 30.0
    assert len(delay.samples) == 32
