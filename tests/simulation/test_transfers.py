"""Whole anchors come in pieces from several donors; who serves bad ones is named, nobody else."""

from __future__ import annotations

import pytest

from dugnad.dht.ids import PeerId
from dugnad.simulation.people import SimPeer, peer_of
from dugnad.simulation.settings import Weather, WorldSettings
from dugnad.simulation.stage import Stage


def stage(weather: Weather = Weather(), *, until: float = 30.0, peers: int = 4) -> Stage:  # noqa: B008  frozen
    made = Stage(
        WorldSettings(
            seed=3,
            interval_s=2.0,
            step_s=0.5,
            roster=True,
            units=True,
            pieces=True,
            weather=weather,
        )
    )
    for number in range(peers):
        made.add(number)
    made.gossip()
    made.run(until)
    return made


def joins(world: Stage, number: int = 9, within_s: float = 12.0) -> SimPeer:
    """A newcomer comes and stands where the swarm stands."""
    newcomer = world.add(number)
    world.run(world.now + within_s)
    assert newcomer.fragments[0].core.head.version >= 5
    return newcomer


def test_a_newcomers_anchors_come_from_several_donors_through_their_uplinks() -> None:
    world = stage(Weather(up_bytes_s=50_000.0))
    joins(world)
    assert world.transfers.finished == 1
    assert world.transfers.spread[0] > 1
    assert world.transfers.faults(0) == []
    assert world.transfers.named == {}


def test_a_donor_of_bad_pieces_is_named_and_the_anchors_are_right_all_the_same() -> None:
    world = stage()
    world.until[("corrupt", peer_of(1))] = float("inf")
    world.until[("corrupt", peer_of(2))] = float("inf")
    joins(world)
    assert 1 <= len(world.transfers.named) <= 2
    assert set(world.transfers.named) <= {peer_of(1), peer_of(2)}
    assert not world.transfers.faults(1)
    assert not set(world.donors) & set(world.transfers.named)


def test_a_swarm_of_liars_brings_nobody_up_and_all_that_served_are_named() -> None:
    world = stage()
    for number in range(4):
        world.until[("corrupt", peer_of(number))] = float("inf")
    newcomer = world.add(9)
    world.run(world.now + 4.0)
    assert newcomer.fragments[0].core.head.version == 0
    assert set(world.transfers.named) == {peer_of(number) for number in range(4)}


@pytest.mark.parametrize("who", ["donor", "third"])
def test_a_death_during_the_transfer_costs_a_moment_and_no_piece(who: str) -> None:
    world = stage(Weather(up_bytes_s=20_000.0), until=40.0)
    newcomer = world.add(9)
    job = _wait_for_a_draw(world)
    drawing = sorted(job)
    idle = [sim.peer for sim in world.alive() if sim.peer not in (*drawing, newcomer.peer)]
    world.kill(drawing[0] if who == "donor" else (idle or drawing)[0])
    world.run(world.now + 12.0)
    assert newcomer.fragments[0].core.head.version >= 5
    assert world.transfers.named == {}


def _wait_for_a_draw(world: Stage) -> set[PeerId]:
    """Run until a transfer is under way; who brings its pieces."""
    found: set[PeerId] = set()
    draw = world.transfers._draw

    def watched(job: object, donor: PeerId) -> None:
        found.add(donor)
        draw(job, donor)  # type: ignore[arg-type]

    world.transfers._draw = watched  # type: ignore[method-assign]
    for _ in range(1000):
        if found:
            return found
        world.run(world.now + 0.02)
    raise AssertionError("nothing is fetched as a whole")


def test_a_newcomer_that_dies_during_its_transfer_leaves_nothing_behind() -> None:
    world = stage(until=40.0)
    newcomer = world.add(9)
    _wait_for_a_draw(world)
    world.kill(newcomer.peer)
    world.run(world.now + 20.0)
    assert world.transfers.finished == 0
    assert len(world.heads()) == 1


def test_a_wrong_name_or_a_missing_one_is_a_fault() -> None:
    world = stage(until=5.0)
    world.transfers.named[peer_of(0)] = 1
    world.transfers.lies[peer_of(1)] = 2
    assert world.transfers.faults(2) == [
        "0 is named for bad pieces and served none",
        "1 served 2 bad pieces and is named for 0",
        "1 donors are named for bad pieces, not 2",
    ]
