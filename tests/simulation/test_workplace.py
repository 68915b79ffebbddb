"""Simulated learners train what their own units cores give them; holes and lost work are seen."""

from __future__ import annotations

import pytest

from dugnad.peer.units import Participants, Units
from dugnad.simulation.checks import Violation
from dugnad.simulation.people import peer_of
from dugnad.simulation.runner import play
from dugnad.simulation.scenario import draw, text_of
from dugnad.simulation.settings import WorldSettings
from dugnad.simulation.stage import Stage
from dugnad.simulation.workplace import Workplace


def stage(peers: int = 4, *, until: float = 30.0, seed: int = 3) -> Stage:
    made = Stage(WorldSettings(seed=seed, roster=True, units=True))
    for number in range(peers):
        made.add(number)
    made.gossip()
    made.run(until)
    return made


def work_of(world: Stage) -> Workplace:
    assert world.work is not None
    return world.work


def listed(world: Stage) -> set[tuple[int, int, int]]:
    return world.credits.listed([world.best(0)])


def test_peers_in_a_calm_network_share_the_work_without_overlap() -> None:
    world = stage()
    assert sum(work_of(world).trained.values()) > 300
    assert work_of(world).twice() < 12  # before the first head everybody owns everything
    assert work_of(world).still_open([(0, 0), (0, 1), (0, 2)], listed(world)) == []
    assert work_of(world).unlisted(listed(world), 0.0) == []


def test_what_a_peer_hands_in_is_what_it_trained() -> None:
    world = stage()
    trained = set(work_of(world).trained)
    assert listed(world) <= trained
    assert len(listed(world)) > 250


def test_work_that_is_listed_after_all_once_it_went_along_again_hides_no_later_work() -> None:
    world = stage()
    sim = world.alive()[0]
    back = max(sim.log.sent[0])
    assert world.give_back(sim, 0, back, 1.0)  # as if it had come back
    world.run(world.now + 6.0)
    assert sim.log.sent[0][back].carried
    assert world.give_back(sim, 0, back, 0.0) == ()
    since = world.now
    world.run(world.now + 40.0)
    assert work_of(world).unlisted(listed(world), since) == []
    assert world.ledger.listed_steps[world.best(0)] + world.pending(0) <= world.made


def test_the_units_of_a_dead_peer_are_taken_over() -> None:
    world = stage()
    open_then = work_of(world).oldest_open(listed(world), 16)
    world.kill(peer_of(1))
    world.run(world.now + 40.0)
    assert work_of(world).still_open(open_then, listed(world)) == []
    assert work_of(world).unlisted(listed(world), world.now - 30.0) == []
    assert work_of(world).takeovers > 0


def test_a_newcomer_trains_once_it_is_level_with_the_swarm() -> None:
    world = stage()
    newcomer = world.add(9)
    desk = work_of(world).desks[newcomer.peer]
    world.run(world.now + 0.5)
    assert newcomer.step == 0
    world.run(world.now + 10.0)
    assert desk.synced
    assert newcomer.step > 5
    given = [(piece.epoch, piece.index) for piece in desk.units.outstanding()]
    assert all(unit > (0, 60) for unit in given)


def test_a_restarted_peer_knows_from_its_disk_what_is_listed() -> None:
    world = stage()
    peer = peer_of(1)
    world.kill(peer)
    world.restart(peer)
    before = work_of(world).desks[peer].units.status(world.now).covered_sequences
    assert before > 200


def test_work_that_nobody_takes_over_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Units, "_overdue", lambda *_: iter(()))
    monkeypatch.setattr(Units, "_youngest", lambda *_: iter(()))
    monkeypatch.setattr(Units, "_peer_lost", lambda *_: [])
    monkeypatch.setattr(Units, "_participants", _nobody_goes)
    result = play(draw("kill-any", text_of("kill-any"), 1))
    assert any("is open since the healing" in one.what for one in result.violations)


def _nobody_goes(self: Units, event: Participants, now: float) -> None:
    """Who ever took part has its share for ever."""
    self._classes.update(event.members + event.newcomers)
    self._share(now)


def test_work_that_is_not_listed_is_noticed() -> None:
    world = stage()
    assert work_of(world).unlisted(set(), 0.0)[0].endswith("trained are not listed")


def test_a_table_of_units_over_its_bound_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dugnad.simulation.workplace.HELD_UNITS_MAX", 10)
    with pytest.raises(Violation, match="table of units"):
        stage()
