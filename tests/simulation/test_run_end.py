"""The end of a run on a bad network: everybody stops at one last version, and nothing is lost."""

from __future__ import annotations

import random

import pytest

from dugnad.simulation.settings import SEQUENCE_TOKENS
from dugnad.simulation.world import Weather, World, WorldSettings, peer_of

STORM = Weather(loss=0.08, duplication=0.1, send_loss=0.2, fetch_loss=0.2)
BUDGET = 60 * 4 * SEQUENCE_TOKENS
"""Four peers make 16 steps a second in all: the end comes after about 15 s."""


def swarm(seed: int, *, peers: int = 4, fragments: int = 1, weather: Weather = STORM) -> World:
    world = World(
        WorldSettings(seed=seed, fragments=fragments, token_budget=BUDGET, weather=weather)
    )
    for number in range(peers):
        world.add(number)
    world.gossip()
    return world


def ended(world: World, p: int) -> bool:
    views = [sim.fragments[p].core.view for sim in world.alive()]
    return all(view.ended() for view in views) and len(world.heads(p)) == 1


def run_to_the_end(world: World, limit_s: float = 120.0) -> None:
    while world.now < limit_s:
        world.run(world.now + 1.0)
        if all(ended(world, p) for p in range(world.settings.fragments)):
            return
    raise AssertionError("the run does not end")


@pytest.mark.parametrize("seed", range(12))
def test_all_stop_at_the_first_version_that_reaches_the_budget(seed: int) -> None:
    world = swarm(seed, fragments=2)
    run_to_the_end(world)
    for p in range(2):
        head = world.alive()[0].fragments[p].core.head
        parent = world.alive()[0].fragments[p].core.view.lineage.nodes[head.parent]
        assert parent.tokens_total < BUDGET <= head.tokens_total
    versions = {d: c.header.version for d, c in world.checks.commits.items()}
    merges = [list(times) for times in world.merged_at]
    world.run(world.now + 60.0)
    assert [list(times) for times in world.merged_at] == merges, "a version after the last"
    assert {d: c.header.version for d, c in world.checks.commits.items()} == versions
    assert all(ended(world, p) for p in range(2))


@pytest.mark.parametrize("seed", range(6))
def test_nobody_builds_on_a_last_version_whatever_is_killed(seed: int) -> None:
    world = swarm(seed)
    world.run(8.0 + random.Random(seed).uniform(0.0, 8.0))
    world.kill(peer_of(seed % 4))
    run_to_the_end(world)
    for record in world.checks.commits.values():
        parent = world.checks.commits.get(record.header.parent)
        assert parent is None or parent.header.tokens_total < BUDGET


@pytest.mark.parametrize("seed", range(4))
def test_a_late_joiner_learns_that_the_run_has_ended_and_merges_nothing(seed: int) -> None:
    world = swarm(seed)
    run_to_the_end(world)
    count = len(world.merged_at[0])
    world.add(9)
    world.run(world.now + 40.0)
    newcomer = world.peers[peer_of(9)].fragments[0]
    assert newcomer.core.view.ended()
    assert len(world.heads()) == 1
    assert len(world.merged_at[0]) == count


@pytest.mark.parametrize("seed", range(4))
def test_two_sides_of_a_partition_that_both_end_agree_on_one_end(seed: int) -> None:
    world = swarm(seed, weather=Weather())
    world.run(11.0)
    world.split({peer_of(0), peer_of(1)}, {peer_of(2), peer_of(3)})
    world.run(60.0)
    assert all(sim.fragments[0].core.view.ended() for sim in world.alive())
    assert len(world.heads()) == 2
    world.heal()
    world.run(90.0)
    assert ended(world, 0)


def test_an_ended_exchange_asks_for_no_timer() -> None:
    world = swarm(1, weather=Weather())
    run_to_the_end(world)
    world.run(world.now + 30.0)
    for sim in world.alive():
        assert sim.fragments[0].core.deadline is None


def test_who_leaves_after_the_end_has_nothing_to_hand_over() -> None:
    from dugnad.averaging import events as ev

    world = swarm(2, weather=Weather())
    run_to_the_end(world)
    world.run(world.now + 5.0)
    core = world.alive()[0].fragments[0].core
    core.handle(ev.LeaveNow(), world.now)
    assert core.left()
