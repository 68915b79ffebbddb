"""How long listing takes, and that what is merely under way is not overdue."""

import pytest

from dugnad.averaging.formats import UnitPiece
from dugnad.peer import unitlag
from dugnad.peer.unitlag import ListingLag
from dugnad.peer.units import Covered, Trained

from .unit_world import A, B, units, work  # noqa: TID252  the world is no installed package


def test_the_delay_is_averaged_over_units_that_were_trained_here() -> None:
    lag = ListingLag()
    lag.listed(7, 50.0)
    assert lag.seconds == 0.0
    lag.trained(1, 10.0)
    lag.trained(1, 15.0)  # another part of the same unit
    lag.listed(1, 20.0)
    assert lag.seconds == 10.0
    lag.trained(2, 30.0)
    lag.listed(2, 50.0)
    assert lag.seconds == pytest.approx(12.0)
    lag.listed(2, 90.0)
    assert lag.seconds == pytest.approx(12.0)


def test_what_is_watched_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unitlag, "WAITING_MAX", 1)
    lag = ListingLag()
    lag.trained(1, 0.0)
    lag.trained(2, 0.0)
    lag.listed(2, 9.0)
    assert lag.seconds == 0.0


def test_where_listing_is_slow_others_are_given_longer_before_their_units_are_taken() -> None:
    """An interval of 10 s, but 80 s until a unit is listed: overdue is after 3 x 40 s."""
    quick, slow = units(others=[B]), units(others=[B])
    for core, listed_at in ((quick, 5.0), (slow, 80.0)):
        (item,) = work(core, 4)
        core.handle(Trained(item.piece), 0.0)
        core.handle(Covered((item.piece,), A), listed_at)
    mine = [UnitPiece(0, n, 0, 4) for n in range(24) if quick.owner_of((0, n)) == A]
    taken = {}
    for core in (quick, slow):
        core.handle(Covered(tuple(mine), A), 85.0)
        _, actions = core.next_work(400, 100.0)
        taken[id(core)] = [unit for action in actions for unit in action.units]
    assert taken[id(quick)]
    assert not taken[id(slow)]
