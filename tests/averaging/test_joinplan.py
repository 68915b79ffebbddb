"""What a join lists: the work of both sides, once (DESIGN.md rule 11)."""

import pytest

from dugnad.averaging import joinplan
from dugnad.averaging.join import AMENDED
from dugnad.averaging.joinplan import JoinPlan, plan
from dugnad.averaging.lineage import Lineage
from dugnad.averaging.node import Node
from dugnad.averaging.outer import float_of
from dugnad.averaging.pruning import VERSIONS_KEPT

from .exchange_makers import RULES, A, B, C, D, named  # noqa: TID252  a helper of these tests
from .join_makers import add, branch, join_of, made_on  # noqa: TID252  a helper of these tests


@pytest.fixture
def lineage() -> Lineage:
    return Lineage(RULES)


@pytest.fixture
def fork(lineage: Lineage) -> Node:
    return branch(lineage, lineage.genesis, [A, B, C, D], 2)[-1]


def planned(lineage: Lineage, head: Node, other: Node) -> JoinPlan:
    made = plan(lineage, head, other)
    assert made is not None
    return made


def keys(made: JoinPlan) -> set[tuple[bytes, int]]:
    return {(one.contribution.peer, one.contribution.seq) for one in made.inputs}


def amendments(made: JoinPlan) -> dict[tuple[bytes, int], float]:
    return {
        (one.contribution.peer, one.contribution.seq): one.clip
        for one in made.inputs
        if one.refusal == AMENDED
    }


def test_all_that_the_other_side_listed_since_the_fork_is_listed(
    lineage: Lineage, fork: Node
) -> None:
    head = branch(lineage, fork, [A, B], 7)[-1]
    other = branch(lineage, fork, [C, D], 6)[-1]
    made = planned(lineage, head, other)
    assert keys(made) == {(peer, seq) for peer in (C, D) for seq in range(3, 9)}
    assert list(made.inputs) == sorted(
        made.inputs, key=lambda one: (one.contribution.peer, one.contribution.seq)
    )
    assert not amendments(made)
    assert made.left_out == 0


def test_the_share_of_the_other_side_follows_from_the_squared_weights(
    lineage: Lineage, fork: Node
) -> None:
    head = branch(lineage, fork, [A, B, C], 6)[-1]
    other = branch(lineage, fork, [D], 6)[-1]
    assert float_of(planned(lineage, head, other).alpha_bits) == pytest.approx(0.1)
    assert float_of(planned(lineage, other, head).alpha_bits) == 0.5  # never more than half


def test_equal_sides_meet_half_way(lineage: Lineage, fork: Node) -> None:
    head = branch(lineage, fork, [A, B], 6)[-1]
    other = branch(lineage, fork, [C, D], 6)[-1]
    assert float_of(planned(lineage, head, other).alpha_bits) == 0.5


def test_newcomers_on_the_other_side_move_nothing(lineage: Lineage, fork: Node) -> None:
    head = branch(lineage, fork, [A, B], 6)[-1]
    stranger = b"\xee" * 32
    other = branch(lineage, fork, [stranger], 6)[-1]
    made = planned(lineage, head, other)
    assert float_of(made.alpha_bits) == 0.0
    assert len(made.inputs) == 6


def test_what_was_under_way_at_the_fork_and_listed_on_both_sides_counts_once(
    lineage: Lineage, fork: Node
) -> None:
    ours = add(lineage, fork, [made_on(fork, peer, 3) for peer in (A, B, C)], A)
    head = branch(lineage, ours, [A, B], 6)[-1]
    theirs = add(lineage, fork, [made_on(fork, peer, 3) for peer in (C, D)], D)
    other = branch(lineage, theirs, [C, D], 6)[-1]
    made = planned(lineage, head, other)
    assert (C, 3) not in keys(made)
    assert {(C, 4), (D, 3)} <= keys(made)


def test_what_a_maker_took_back_on_its_own_side_does_not_count_on_the_other(
    lineage: Lineage, fork: Node
) -> None:
    ours = add(lineage, fork, [made_on(fork, peer, 3) for peer in (A, B, C)], A)
    head = branch(lineage, ours, [A, B], 6)[-1]
    theirs = add(lineage, fork, [made_on(fork, D, 3)], D)  # without C's, which waits in vain
    theirs = add(lineage, theirs, [made_on(theirs, D, 4)], D)
    other = branch(lineage, theirs, [C, D], 6)[-1]
    made = planned(lineage, head, other)
    assert amendments(made) == {(C, 3): 0.0}


def test_what_a_maker_on_this_side_took_back_is_not_listed_of_the_other(
    lineage: Lineage, fork: Node
) -> None:
    ours = add(lineage, fork, [made_on(fork, A, 3)], A)  # B's was handed to the other side
    ours = add(lineage, ours, [made_on(ours, A, 4)], A)
    head = branch(lineage, ours, [A, B], 6)[-1]
    theirs = add(lineage, fork, [made_on(fork, peer, 3) for peer in (B, C, D)], D)
    other = branch(lineage, theirs, [C, D], 6)[-1]
    made = planned(lineage, head, other)
    assert (B, 3) not in keys(made)
    assert {(C, 3), (D, 3)} <= keys(made)


def test_what_may_still_be_listed_where_its_maker_stands_is_taken_in(
    lineage: Lineage, fork: Node
) -> None:
    head = branch(lineage, fork, [A, B, C], 7)[-1]
    theirs = branch(lineage, fork, [D], 6)[-1]
    late = made_on(head, A, 50)  # made where A stands, handed to the other side's home
    other = add(lineage, theirs, [made_on(theirs, D, 9)], D)
    assert other.version == head.version
    other = add(lineage, other, [made_on(other, D, 10), late], D)
    made = planned(lineage, head, other)
    assert (A, 50) in keys(made)


def test_an_input_without_a_side_counts_where_it_is_listed(lineage: Lineage, fork: Node) -> None:
    head = branch(lineage, fork, [A, B], 6)[-1]
    theirs = add(lineage, fork, [made_on(fork, peer, 3) for peer in (C, D)], D)
    other = branch(lineage, theirs, [D], 6)[-1]  # of C nothing more was heard
    assert (C, 3) in keys(planned(lineage, head, other))


def test_a_second_join_lists_only_what_is_new(lineage: Lineage, fork: Node) -> None:
    head = branch(lineage, fork, [A, B], 6)[-1]
    other = branch(lineage, fork, [C, D], 6)[-1]
    first = planned(lineage, head, other)
    record = join_of(lineage, head, other, A)
    node = lineage.add(record, named(record))
    later = branch(lineage, other, [C, D], 5)[-1]
    made = planned(lineage, node, later)
    assert keys(made) == {(peer, seq) for peer in (C, D) for seq in range(9, 14)}
    assert not keys(made) & keys(first)
    assert plan(lineage, node, other) is None


def test_of_too_much_the_newest_is_listed_and_the_rest_is_counted(
    lineage: Lineage, fork: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joinplan, "JOIN_INPUTS_MAX", 5)
    head = branch(lineage, fork, [A, B], 6)[-1]
    other = branch(lineage, fork, [D], 8)[-1]
    made = planned(lineage, head, other)
    assert keys(made) == {(D, seq) for seq in range(6, 11)}
    assert made.left_out == 3


def test_a_fork_that_is_not_known_any_more_cannot_be_joined(lineage: Lineage, fork: Node) -> None:
    head = branch(lineage, fork, [A, B], VERSIONS_KEPT + 5)[-1]
    other = branch(lineage, fork, [D], 6)[-1]
    lineage.prune(head, [other.digest])
    assert plan(lineage, head, other) is None
