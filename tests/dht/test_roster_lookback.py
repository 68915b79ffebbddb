"""Peers given up long ago are still looked for, one a minute: who was apart meets again."""

from itertools import pairwise

import pytest

from dugnad.dht.roster import Roster
from dugnad.dht.roster_events import Dial, DialFailed, Known, StreamDown, Timer
from dugnad.dht.roster_liveness import GIVE_UP_S, LOOK_BACK_S, RETRY_JITTER, RETRY_MAX_S

from .roster_cases import connect, lone_roster, only  # noqa: TID252  the tests are no installed package
from .roster_world import WALL_START_MS, mesh, peer_id  # noqa: TID252  as above

PAUSE_MAX_S = LOOK_BACK_S * (1 + RETRY_JITTER)


def run(roster: Roster, now: float, until: float) -> list[tuple[float, Dial]]:
    """All dials fail at once; when they were asked for."""
    dials: list[tuple[float, Dial]] = []
    while roster.deadline is not None and roster.deadline <= until:
        now = max(now, roster.deadline)
        actions = roster.handle(Timer(WALL_START_MS + round(now * 1000)), now)
        for dial in only(Dial, actions):
            dials.append((now, dial))
            actions += roster.handle(DialFailed(dial.peer, "no answer"), now)
    return dials


def lost(roster: Roster, *numbers: int) -> None:
    """These were there and are gone."""
    for number in numbers:
        connect(roster, number, number, 0.0)
        roster.handle(Known(peer_id(number), (f"/memory/{number}",)), 0.0)
    for number in numbers:
        roster.handle(StreamDown(peer_id(number), number, "reset"), 1.0)


def test_a_peer_given_up_is_dialled_again_every_minute_or_so() -> None:
    roster = lone_roster()
    lost(roster, 1)
    times = [at for at, _ in run(roster, 1.0, 5 * GIVE_UP_S)]
    late = [at for at in times if at > GIVE_UP_S + 2 * RETRY_MAX_S]
    assert len(late) > 30
    gaps = [b - a for a, b in pairwise(late)]
    assert min(gaps) >= LOOK_BACK_S
    assert max(gaps) <= PAUSE_MAX_S + 0.1


def test_several_given_up_take_turns_and_are_not_dialled_more_often_in_all() -> None:
    roster = lone_roster()
    lost(roster, 1, 2, 3)
    late = [(at, d.peer) for at, d in run(roster, 1.0, 4 * GIVE_UP_S) if at > 2 * GIVE_UP_S]
    assert len(late) <= 2 * GIVE_UP_S / LOOK_BACK_S + 1
    for first in range(0, len(late) - 3, 3):
        assert {peer for _, peer in late[first : first + 3]} == {peer_id(n) for n in (1, 2, 3)}


def test_a_name_never_met_is_looked_for_only_while_nobody_is_there() -> None:
    roster = lone_roster()
    roster.handle(Known(peer_id(1), ("/memory/1",)), 0.0)
    assert any(at > 2 * GIVE_UP_S for at, _ in run(roster, 0.0, 3 * GIVE_UP_S))
    connect(roster, 2, 2, 3 * GIVE_UP_S)
    dials = only(Dial, roster.handle(Timer(WALL_START_MS), 3 * GIVE_UP_S + 2.0))
    assert not dials
    assert roster.deadline is not None
    assert roster.deadline < 3 * GIVE_UP_S + 5.0  # a heartbeat, and no dial of 1


@pytest.mark.slow
def test_halves_that_were_apart_for_a_quarter_of_an_hour_meet_again() -> None:
    world = mesh(5, 4)
    for one in (0, 1):
        for other in (2, 3):
            world.cut(one, other)
    world.run(GIVE_UP_S + 400.0)
    assert len(world.nodes[0].roster.live()) == 1
    world.heal()
    world.run(PAUSE_MAX_S + 15.0)
    assert world.agreed()
