"""Work units that pass from one peer to another, and what is shown of open ones."""

from dugnad.averaging.formats import UnitPiece
from dugnad.peer.unitreport import open_units_of
from dugnad.peer.units import (
    Claimed,
    Covered,
    Participants,
    PeerLost,
    TookOver,
    Trained,
    Units,
    WasAway,
)

from .unit_world import A, B, C, units, whole, work  # noqa: TID252  the world is no package


def front(core: Units, now: float, wanted: int = 200) -> set[tuple[int, int]]:
    """Units of the window that the core gives, none of them by claim."""
    items, actions = core.next_work(wanted, now)
    assert not actions
    return {(i.epoch, i.index) for i in items if (i.epoch, i.index) < (0, 24)}


def test_a_unit_that_passes_to_me_from_a_peer_that_is_there_waits_until_it_would_be_listed() -> (
    None
):
    core = units(others=[B])
    of_b = {(0, n) for n in range(24) if core.owner_of((0, n)) == B}
    core.handle(Participants(b"d", ((A, 12), (B, 10))), 1.0)
    moved = {unit for unit in of_b if core.owner_of(unit) == A}
    assert moved
    assert front(core, 1.0) == {(0, n) for n in range(24)} - of_b
    listed = min(moved)
    core.handle(Covered(whole([listed]), B), 5.0)
    given = front(core, 1.0 + 4 * 10.0)
    assert given == moved - {listed}


def test_a_unit_that_passes_between_two_others_is_not_overdue_meanwhile() -> None:
    core = units(others=[B, C])
    before = {(0, n): core.owner_of((0, n)) for n in range(24)}
    due = {(one.epoch, one.index): one.overdue_s for one in open_units_of(core.sight(1.0), 24)}
    core.handle(Participants(b"d", ((A, 10), (B, 10), (C, 12))), 1.0)
    moved = {u for u, was in before.items() if was == B and core.owner_of(u) == C}
    assert moved
    shown = {(one.epoch, one.index): one.overdue_s for one in open_units_of(core.sight(1.0), 24)}
    assert all(shown[unit] == min(due[unit], -40.0) for unit in moved)
    assert all(shown[u] == due[u] for u, was in before.items() if core.owner_of(u) == was)


def test_units_that_moved_and_whose_peer_is_then_lost_do_not_wait() -> None:
    core = units(others=[B, C])
    core.handle(Participants(b"d", ((A, 14), (B, 10), (C, 10))), 1.0)
    core.handle(PeerLost(B), 2.0)
    (action,) = core.handle(PeerLost(C), 2.0)
    assert isinstance(action, TookOver)
    assert set(action.units) <= front(core, 2.0)


def test_what_a_peer_has_and_what_it_inherits_it_does_oldest_first() -> None:
    core = units(others=[B, C])
    for lost in (B, C):
        (action,) = core.handle(PeerLost(lost), 2.0)
        assert isinstance(action, TookOver)
    given = [(item.epoch, item.index) for item in work(core, 24 * 4, 2.0)]
    assert given == [(0, n) for n in range(24)]


def test_who_was_away_begins_beyond_what_others_may_have_begun() -> None:
    core = units(others=[B])
    mine = {(0, n) for n in range(24) if core.owner_of((0, n)) == A}
    core.handle(WasAway(), 1.0)
    items, actions = core.next_work(8, 1.0)
    assert not actions
    assert min((i.epoch, i.index) for i in items) >= (0, 24)
    items, _ = core.next_work(200, 41.0)  # late by now, so the oldest are claimed
    assert {(i.epoch, i.index) for i in items} == mine


def test_a_peer_that_leaves_in_order_keeps_what_it_claimed_last() -> None:
    core = units(others=[B])
    of_b = [(0, n) for n in range(24) if core.owner_of((0, n)) == B]
    core.handle(Claimed(B, tuple(of_b[:2])), 1.0)
    (action,) = core.handle(PeerLost(B, left=True), 2.0)
    assert action == TookOver(B, tuple(of_b[2:]))
    assert not front(core, 2.0) & set(of_b[:2])
    lost = units(others=[B])
    lost.handle(Claimed(B, tuple(of_b[:2])), 1.0)
    (action,) = lost.handle(PeerLost(B), 2.0)
    assert action == TookOver(B, tuple(of_b))


def test_what_is_trained_to_the_end_and_not_listed_is_named_before_leaving() -> None:
    core = units()
    items = work(core, 10)  # two units and a half
    for item in items:
        core.handle(Trained(item.piece), 0.0)
    assert core.unlisted() == ((0, 0), (0, 1))
    core.handle(Covered((UnitPiece(0, 0, 0, 4), UnitPiece(0, 2, 2, 4)), B), 1.0)
    assert core.unlisted() == ((0, 1), (0, 2))


def test_the_oldest_open_units_are_shown_with_how_far_they_came() -> None:
    core = units(others={B})
    mine = work(core, 6)  # one unit and half of the next
    core.handle(Trained(mine[0].piece), 0.0)
    other = next(u for u in ((0, i) for i in range(24)) if core.owner_of(u) == B)
    core.handle(Claimed(B, (other,)), 1.0)
    shown = {(one.epoch, one.index): one for one in open_units_of(core.sight(2.0), 24)}
    assert list(shown) == [(0, n) for n in range(24)]
    first = shown[0, mine[0].index]
    assert (first.holder, first.trained, first.in_hand, first.listed) == (A, 4, 0, 0)
    assert shown[0, mine[1].index].in_hand == 2
    assert (shown[other].holder, shown[other].claimed) == (B, True)
    assert shown[0, 23].overdue_s < shown[0, 0].overdue_s == 2.0
    assert [one.index for one in open_units_of(core.sight(2.0), 2)] == [0, 1]
    assert open_units_of(core.sight(2.0), -1) == []
    status = core.status(2.0)
    assert (status.open, status.claimed, status.trained) == (24, 2, 1)
    assert (status.epoch_sequences, status.epoch_listed) == (400, 0)
