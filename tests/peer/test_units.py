"""The core of work units, alone and as a small swarm under a moved clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dugnad.averaging.formats import UnitPiece
from dugnad.peer import unitclaims
from dugnad.peer.units import (
    Abandoned,
    Adopted,
    Claim,
    Claimed,
    Covered,
    Participants,
    PeerBack,
    PeerLost,
    Returned,
    SwarmSpeed,
    TookOver,
    Trained,
    Uncovered,
    UnitPlan,
    Units,
    WorkItem,
)

from .unit_world import (  # noqa: TID252  the world is no installed package
    CONTRACT,
    SEQUENCE_TOKENS,
    A,
    B,
    C,
    all_work,
    peer,
    units,
    work,
)


def test_a_lone_peer_is_given_the_units_in_order_and_in_parts() -> None:
    core = units()
    first = work(core, 6)
    assert [(i.index, i.start, i.stop) for i in first] == [(0, 0, 4), (1, 0, 2)]
    assert [(i.index, i.start, i.stop) for i in work(core, 3)] == [(1, 2, 4), (2, 0, 1)]
    plan = UnitPlan(b"seed", 400, 4)
    assert first[0].sequences == tuple(plan.sequences_of(0, 0))
    assert first[1].sequences == tuple(plan.sequences_of(0, 1)[:2])


def test_units_that_may_not_be_split_are_given_whole() -> None:
    core = units(splittable=False)
    assert [i.piece for i in work(core, 5)] == [UnitPiece(0, 0, 0, 4), UnitPiece(0, 1, 0, 4)]


def test_what_is_listed_or_trained_is_not_given() -> None:
    core = units()
    core.handle(Covered((UnitPiece(0, 0, 1, 3),), B), 0.0)
    core.handle(Trained(UnitPiece(0, 1, 0, 4)), 0.0)
    assert [i.piece for i in work(core, 3)] == [
        UnitPiece(0, 0, 0, 1),
        UnitPiece(0, 0, 3, 4),
        UnitPiece(0, 2, 0, 1),
    ]


def test_peers_that_know_the_same_share_without_overlap() -> None:
    cores = [units(p, others={A, B, C} - {p}) for p in (A, B, C)]
    given = [i.piece for core in cores for i in all_work(core) if (i.epoch, i.index) < (0, 24)]
    assert len(given) == len(set(given)) == 24


def test_an_epoch_goes_over_into_the_next() -> None:
    core = units(sequences=42)
    items = work(core, 60)
    assert [(i.epoch, i.index) for i in items[:12]] == [(0, n) for n in range(11)] + [(1, 0)]
    assert items[10].stop == 2
    core.handle(Covered(tuple(i.piece for i in items[:11]), A), 1.0)
    status = core.status(1.0)
    assert (status.epoch, status.epoch_progress, status.covered_sequences) == (1, 0.0, 42)


def test_what_was_returned_stays_mine_and_what_was_abandoned_is_given_again() -> None:
    core = units()
    items = work(core, 8)
    core.handle(Trained(items[0].piece), 1.0)
    core.handle(Returned((items[0].piece,)), 2.0)
    assert items[0].piece not in [i.piece for i in work(core, 8)]
    assert core.outstanding()[0] == items[1].piece
    core.handle(Abandoned((items[0].piece, *core.outstanding())), 3.0)
    assert [i.piece for i in work(core, 8)] == [i.piece for i in items]


def test_a_unit_over_which_learners_die_is_given_up() -> None:
    core = units(attempts=2)
    for _ in range(2):
        assert work(core, 4)[0].index == 0
        core.handle(Abandoned(core.outstanding()), 1.0)
    assert work(core, 4)[0].index == 1
    assert core.status(1.0).given_up == 1


def test_what_had_been_trained_when_the_learner_died_is_no_failed_attempt() -> None:
    core = units(attempts=1)
    item = work(core, 4)[0]
    core.handle(Trained(item.piece), 1.0)
    core.handle(Abandoned((item.piece,)), 2.0)
    assert work(core, 4) == [item]


def test_a_switch_of_lineage_opens_units_again_but_not_what_i_trained() -> None:
    core = units()
    items = work(core, 8)
    for item in items:
        core.handle(Trained(item.piece), 1.0)
    listed = tuple(i.piece for i in items)
    core.handle(Covered(listed, A), 2.0)
    core.handle(Covered((UnitPiece(0, 2, 0, 4),), B), 2.0)
    assert core.status(2.0).covered_sequences == 12
    core.handle(Uncovered((*listed, UnitPiece(0, 2, 0, 4))), 3.0)
    assert core.status(3.0).covered_sequences == 0
    assert core.status(3.0).trained_sequences == 8
    assert work(core, 4, 3.0)[0].piece == UnitPiece(0, 2, 0, 4)


def test_a_sequence_that_is_listed_twice_stays_listed_when_one_listing_goes() -> None:
    core = units()
    piece = UnitPiece(0, 0, 0, 4)
    core.handle(Covered((piece,), A), 0.0)
    core.handle(Covered((piece,), B), 0.0)
    core.handle(Uncovered((piece,)), 0.0)
    assert work(core, 1)[0].index == 1
    core.handle(Uncovered((piece,)), 0.0)
    assert work(core, 1)[0].index == 0


def test_when_a_peer_is_lost_its_open_units_are_taken_over_at_once_and_by_their_age() -> None:
    cores = [units(p, others={A, B, C} - {p}) for p in (A, B, C)]
    of_c = {unit for unit in ((0, n) for n in range(24)) if cores[0].owner_of(unit) == C}
    for core in cores[:2]:
        work(core, 4)
    taken: list[tuple[int, int]] = []
    for core in cores[:2]:
        (action,) = core.handle(PeerLost(C), 1.0)
        assert isinstance(action, TookOver)
        assert action.lost == C
        taken += action.units
        given = [(i.epoch, i.index) for i in all_work(core, 1.1) if (i.epoch, i.index) < (0, 24)]
        assert given == sorted(given)
        assert set(action.units) < set(given)
    assert sorted(taken) == sorted(of_c)


def test_a_peer_that_is_back_has_its_units_again() -> None:
    core = units(others=[B])
    before = [core.owner_of((0, n)) for n in range(24)]
    core.handle(PeerLost(B), 1.0)
    assert {core.owner_of((0, n)) for n in range(24)} == {A}
    core.handle(PeerBack(B), 2.0)
    assert [core.owner_of((0, n)) for n in range(24)] == before
    assert all(core.owner_of((i.epoch, i.index)) == A for i in all_work(core, 2.0))


def test_a_new_member_table_with_the_same_peers_moves_nothing() -> None:
    core = units(others=[B, C])
    before = [core.owner_of((0, n)) for n in range(60)]
    core.handle(Participants(b"d", ((C, 10), (A, 10)), ((B, 99),)), 1.0)  # bounded to class 10
    assert [core.owner_of((0, n)) for n in range(60)] == before


def test_an_idle_peer_works_ahead_and_does_not_claim_what_is_not_overdue() -> None:
    core = units(others=[B])
    items, actions = [], []
    for _ in range(40):
        got, said = core.next_work(4, 5.0)
        items += got
        actions += said
    assert not actions
    assert len({i.piece for i in items}) == 40
    assert max(i.index for i in items) > 24
    assert all(core.owner_of((i.epoch, i.index)) == A for i in items)


def own_open(core: Units) -> list[WorkItem]:
    """All of A's units in the window, trained; what is left there is B's."""
    mine = [(0, n) for n in range(24) if core.owner_of((0, n)) == A]
    items = work(core, 4 * len(mine))
    assert [(i.epoch, i.index) for i in items] == mine
    for item in items:
        core.handle(Trained(item.piece), 0.0)
    return items


def test_an_overdue_unit_of_another_is_taken_and_said_so_when_nothing_of_mine_is_open() -> None:
    core = units(others=[B])
    own_open(core)
    items, actions = core.next_work(4, 29.0)
    assert (items[0].epoch, items[0].index) > (0, 23)
    assert not actions
    items, actions = core.next_work(4, 100.0)
    first = min((0, n) for n in range(24) if core.owner_of((0, n)) == B)
    assert [(i.epoch, i.index) for i in items] == [first]
    assert actions == [Claim((first,))]


def test_others_than_the_next_owner_wait_an_interval_longer() -> None:
    cores = {p: units(p, others={A, B, C} - {p}) for p in (A, B)}
    of = {p: [(0, n) for n in range(24) if cores[A].owner_of((0, n)) == p] for p in (A, B, C)}
    for me, other in ((A, B), (B, A)):
        work(cores[me], 4 * len(of[me]))
        cores[me].handle(Claimed(other, tuple(of[other])), 0.0)
    first = of[C][0]
    due = 2.5 * first[1]
    early = {p: core.next_work(4, due + 31.0)[1] for p, core in cores.items()}
    heir = A if early[A] else B
    assert early == {heir: [Claim((first,))], ({A, B} - {heir}).pop(): []}
    (other,) = {A, B} - {heir}
    assert cores[other].next_work(4, due + 41.0)[1] == [Claim((first,))]


def test_a_peer_that_begins_late_says_so_before_others_take_its_unit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unitclaims, "CLAIMS_LATE_MAX", 8)
    core = units(others=[B])
    work(core, 1)
    mine = [(0, n) for n in range(24) if core.owner_of((0, n)) == A]
    items, actions = core.next_work(8, 200.0)
    assert (items[-1].epoch, items[-1].index) == mine[2]
    assert actions == [Claim(tuple(mine[:3]))]
    for _ in range(6):  # never more than eight claims at one time
        actions += core.next_work(8, 201.0)[1]
    assert sum(len(a.units) for a in actions) == 8
    alone = units()
    work(alone, 1)
    assert alone.next_work(8, 200.0)[1] == []


def test_a_claimed_unit_is_left_alone_until_the_claim_runs_out() -> None:
    core = units(others=[B])
    mine = next((0, n) for n in range(24) if core.owner_of((0, n)) == A)
    core.handle(Claimed(B, (mine,)), 0.0)
    first = work(core, 1, 1.0)[0]
    assert (first.epoch, first.index) != mine
    core.handle(Claimed(B, (mine,)), 50.0)  # does not make it longer
    again = work(core, 1, 61.0)[0]
    assert (again.epoch, again.index) == mine


def test_claims_of_strangers_and_too_many_claims_are_not_respected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unitclaims, "CLAIMS_RESPECTED_MAX", 32)
    core = units(others=[B])
    every = tuple((0, n) for n in range(24))
    core.handle(Claimed(C, every), 0.0)
    assert core.status(0.0).mine == sum(core.owner_of(u) == A for u in every)
    core = units(sequences=4000, others=[B])
    core.handle(SwarmSpeed(320.0), 0.0)  # a window of 48 units
    every = tuple((0, n) for n in range(48))
    core.handle(Claimed(B, every), 0.0)
    core.handle(Claimed(B, every[32:]), 0.0)
    assert core.status(0.0).mine == sum(core.owner_of(u) == A for u in every[32:])
    core.handle(Claimed(B, ((5, 10**9), (-1, 0))), 0.0)


def test_of_two_claims_everybody_keeps_the_same() -> None:
    unit = (0, 3)
    first, second = units(others=[B, C, peer(4)]), units(peer(4), others=[A, B, C])
    for core, order in ((first, (B, C)), (second, (C, B))):
        for who in order:
            core.handle(Claimed(who, (unit,)), 0.0)
    for core in (first, second):
        core.handle(PeerLost(B), 1.0)
    one, other = (core.status(1.0).mine for core in (first, second))
    # If B had held it, it is open to its owner again on both sides; if C holds it, on neither.
    holders = {
        sum(c.owner_of((0, n)) == me for n in range(24)) - count
        for c, me, count in ((first, A, one), (second, peer(4), other))
        if c.owner_of(unit) == me
    }
    assert len(holders) <= 1


def test_twice_counts_what_i_trained_and_somebody_else_is_listed_for() -> None:
    core = units()
    piece = UnitPiece(0, 0, 0, 4)
    core.handle(Trained(piece), 0.0)
    core.handle(Covered((UnitPiece(0, 0, 0, 2),), A), 1.0)
    assert core.status(1.0).twice_sequences == 0
    core.handle(Covered((UnitPiece(0, 0, 2, 4),), B), 1.0)
    core.handle(Covered((UnitPiece(0, 1, 0, 1),), B), 1.0)
    core.handle(Trained(UnitPiece(0, 1, 0, 1)), 2.0)
    assert core.status(2.0).twice_sequences == 3


def test_without_a_maker_what_i_trained_counts_as_listed_for_me() -> None:
    core = units()
    core.handle(Trained(UnitPiece(0, 0, 0, 4)), 0.0)
    core.handle(Covered((UnitPiece(0, 0, 0, 4), UnitPiece(0, 1, 0, 4))), 1.0)
    core.handle(Trained(UnitPiece(0, 1, 0, 4)), 2.0)
    assert core.status(2.0).twice_sequences == 4


def test_a_newcomer_adopts_what_is_listed_and_starts_where_the_swarm_is() -> None:
    core = units()
    core.handle(Adopted(7, (UnitPiece(7, 0, 0, 4), UnitPiece(7, 1, 0, 1))), 0.0)
    assert work(core, 4)[0].piece == UnitPiece(7, 1, 1, 4)
    status = core.status(0.0)
    assert (status.epoch, status.covered_sequences) == (7, 7 * 400 + 5)
    core.handle(Adopted(3), 1.0)  # older than what is known: nothing happens
    assert core.status(1.0).covered_sequences == 7 * 400 + 5


def test_nobody_known_means_all_is_mine() -> None:
    core = Units(A, UnitPlan(b"", 10, 4), CONTRACT, sequence_tokens=SEQUENCE_TOKENS)
    assert [i.index for i in work(core, 10)] == [0, 1, 2]


def test_a_peer_that_owns_nothing_takes_the_youngest_and_says_so() -> None:
    core = units(C, others=[])
    core.handle(Participants(b"c", ((A, 10), (B, 10))), 0.0)
    items, actions = core.next_work(4, 0.0)
    assert [i.index for i in items] == [23]
    assert actions == [Claim(((0, 23),))]


def test_pieces_that_name_nothing_change_nothing() -> None:
    core = units()
    before = core.status(0.0)
    for piece in (
        UnitPiece(-1, 0, 0, 1),
        UnitPiece(0, 100, 0, 1),
        UnitPiece(0, 0, 0, 5),
        UnitPiece(0, 0, 3, 3),
        UnitPiece(1 << 40, 0, 0, 1),
        UnitPiece(1 << 30, 0, 0, 1),
    ):
        core.handle(Covered((piece,), B), 0.0)
        core.handle(Uncovered((piece,)), 0.0)
        core.handle(Trained(piece), 0.0)
        core.handle(Abandoned((piece,)), 0.0)
    assert core.status(0.0) == before


@pytest.mark.slow
def test_memory_is_bounded_by_what_is_open() -> None:
    core = units(sequences=40_000)
    most = 0
    for index in range(9000):
        piece = UnitPiece(0, index, 0, 4)
        core.handle(Trained(piece), float(index))
        core.handle(Covered((piece,), A if index % 9 else B), float(index))
        if index % 500 == 0:
            most = max(most, core.status(float(index)).held)
    assert most <= 2100
    assert core.status(9000.0).covered_sequences == 36_000
    assert core.status(9000.0).twice_sequences == 4000
    core.handle(Uncovered((UnitPiece(0, 5, 0, 4),)), 9000.0)  # far below what is remembered
    assert core.status(9001.0).covered_sequences == 35_996
    assert work(core, 1, 9001.0)[0].index == 5
    core.handle(Covered((UnitPiece(0, 5, 0, 4),), B), 9002.0)
    assert core.status(9002.0).covered_sequences == 36_000


events = st.lists(
    st.one_of(
        st.tuples(st.just("work"), st.integers(1, 12)),
        st.tuples(st.just("train"), st.integers(0, 5)),
        st.tuples(st.sampled_from(["cover", "uncover"]), st.integers(0, 40)),
        st.tuples(st.sampled_from(["lose", "back", "member"]), st.integers(2, 4)),
        st.tuples(st.just("claim"), st.integers(0, 40)),
        st.tuples(st.just("wait"), st.integers(1, 60)),
    ),
    max_size=60,
)


@given(events)
def test_no_sequence_is_given_that_is_listed_or_was_given_whatever_happens(
    story: list[tuple[str, int]],
) -> None:
    core = units(sequences=82, others=[B, C])
    plan, now = UnitPlan(b"seed", 82, 4), 0.0
    given_out: set[tuple[int, int, int]] = set()
    listed: set[tuple[int, int]] = set()
    for what, number in story:
        unit = plan.unit(number)
        piece = UnitPiece(*unit, 0, plan.size_of(*unit))
        match what:
            case "work":
                for item in work(core, number, now):
                    places = {(item.epoch, item.index, n) for n in range(item.start, item.stop)}
                    assert not places & given_out
                    assert (item.epoch, item.index) not in listed
                    assert len(item.sequences) == len(places)
                    given_out |= places
            case "train":
                for one in core.outstanding()[:number]:
                    core.handle(Trained(one), now)
            case "cover" if unit not in listed:
                core.handle(Covered((piece,), B), now)
                listed.add(unit)
            case "uncover" if unit in listed:
                core.handle(Uncovered((piece,)), now)
                listed.remove(unit)
            case "lose":
                core.handle(PeerLost(peer(number)), now)
            case "back":
                core.handle(PeerBack(peer(number)), now)
            case "member":
                core.handle(Participants(b"n", ((A, 10), (peer(number), 12))), now)
            case "claim":
                core.handle(Claimed(B, (unit,)), now)
            case "wait":
                now += number
    expected = sum(plan.size_of(*unit) for unit in listed)
    assert core.status(now).covered_sequences == expected
