"""The exchange cores on a bad network: conservation and one-lineage rules after every event.

The world checks itself after each event (``dugnad.simulation.checks``); a test here says what
happens to the swarm and what must have come of it in the end.
"""

from __future__ import annotations

import itertools
import os
import random

import numpy as np
import pytest

from dugnad.averaging.events import Adopt
from dugnad.simulation.checks import Violation
from dugnad.simulation.world import Weather, World, WorldSettings, peer_of

FRESH = int(os.environ["TEST_SEED"]) * 100
STORM = Weather(loss=0.08, duplication=0.1, send_loss=0.2, fetch_loss=0.2)


def swarm(seed: int, peers: int = 4, weather: Weather | None = None, fragments: int = 1) -> World:
    """A swarm of ``peers`` that has just started."""
    world = World(WorldSettings(seed=seed, fragments=fragments, weather=weather or Weather()))
    for number in range(peers):
        world.add(number)
    world.gossip()
    return world


def settle_on_one_head(world: World, p: int = 0, within_s: float = 20.0) -> bool:
    """Let the world run until all live peers have one head of fragment ``p``."""
    end = world.now + within_s
    while world.now < end:
        world.run(world.now + 0.2)
        if len(world.heads(p)) == 1:
            return True
    return False


def gaps(world: World, p: int = 0) -> list[float]:
    """Seconds between commits of a fragment."""
    times = world.merged_at[p]
    return [b - a for a, b in itertools.pairwise(times)]


@pytest.mark.parametrize("seed", range(5))
def test_a_calm_swarm_merges_every_interval_and_agrees(seed: int) -> None:
    world = swarm(seed)
    world.run(60.0)
    assert len(world.merged_at[0]) >= 12
    assert max(gaps(world)) < 1.5 * world.settings.interval_s
    assert settle_on_one_head(world)


def test_a_lone_peer_merges_its_own_work() -> None:
    world = swarm(1, peers=1)
    world.run(30.0)
    assert len(world.merged_at[0]) >= 6
    head = world.alive()[0].fragments[0].core.head
    assert head.seqs[peer_of(0)].seq >= 6


@pytest.mark.parametrize("seed", range(40))
def test_killing_any_peer_leaves_no_long_gap(seed: int) -> None:
    world = swarm(seed)
    world.run(20.0 + random.Random(seed).uniform(0.0, 5.0))
    world.kill(peer_of(seed % 4))
    world.run(60.0)
    # one interval, plus noticing (0.5 s), plus an heir's question and its merge
    assert max(gaps(world)) < 2.0 * world.settings.interval_s
    assert settle_on_one_head(world)


@pytest.mark.parametrize("seed", range(20))
def test_a_minority_killed_at_once_does_not_stop_the_rest(seed: int) -> None:
    world = swarm(seed, peers=5)
    world.run(20.0 + random.Random(seed).uniform(0.0, 5.0))
    world.kill(peer_of(seed % 5))
    world.kill(peer_of((seed + 1) % 5))
    world.run(70.0)
    # half of the members' weight is still there, so nobody waits three times as long
    assert max(gaps(world)) < 2.5 * world.settings.interval_s
    assert settle_on_one_head(world)


@pytest.mark.parametrize("seed", range(10))
def test_a_newcomer_takes_over_the_state_and_is_listed_soon(seed: int) -> None:
    world = swarm(seed)
    world.run(60.0)
    world.add(9)
    world.run(72.0)
    newcomer = world.peers[peer_of(9)].fragments[0]
    assert newcomer.core.head.version >= 13
    assert peer_of(9) in newcomer.core.head.seqs


@pytest.mark.parametrize("seed", range(10))
def test_all_start_at_once_and_become_one_swarm(seed: int) -> None:
    world = swarm(seed, peers=4, weather=STORM)
    world.run(40.0)
    assert settle_on_one_head(world)


@pytest.mark.parametrize("seed", range(10))
def test_a_short_partition_heals_without_losing_or_doubling_work(seed: int) -> None:
    world = swarm(seed)
    world.run(20.0)
    world.split({peer_of(0), peer_of(1)}, {peer_of(2), peer_of(3)})
    world.run(30.0)  # two or three merges a side: fewer than F
    world.heal()
    world.run(50.0)
    assert settle_on_one_head(world)
    for sim in world.alive():
        assert np.abs(sim.fragments[0].given_up).max() == 0.0


@pytest.mark.parametrize("seed", range(10))
def test_a_home_that_sleeps_and_wakes_with_old_inputs_changes_nothing(seed: int) -> None:
    world = swarm(seed)
    world.run(20.0 + seed / 3.0)
    home = world.alive()[0].fragments[0].core.view.current_home()
    assert home is not None
    world.freeze(home, 30.0)
    before = world.alive()[0].fragments[0].core.head.version
    world.run(80.0)
    assert world.alive()[0].fragments[0].core.head.version > before + 8
    assert settle_on_one_head(world)


@pytest.mark.parametrize("seed", range(10))
def test_a_leaving_peer_hands_its_last_work_to_somebody_else(seed: int) -> None:
    from dugnad.averaging.events import LeaveNow

    world = swarm(seed)
    world.run(21.0 + seed / 4.0)
    leaver = world.peers[peer_of(seed % 4)]
    world._tell(leaver, 0, LeaveNow())
    world.run(world.now + 2.0)
    core = leaver.fragments[0].core
    assert core.left()
    last = max(core.contributor.own)
    world.kill(leaver.peer)
    world.run(world.now + 12.0)
    head = world.alive()[0].fragments[0].core.head
    assert head.seqs[leaver.peer].seq == last


@pytest.mark.parametrize("seed", range(60))
def test_chaos_keeps_every_promise_and_the_swarm_goes_on(seed: int) -> None:
    survive(seed, seconds=25.0, calm=12.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(100, 112), *range(FRESH, FRESH + 12)])
def test_long_chaos_keeps_every_promise_and_the_swarm_goes_on(seed: int) -> None:
    survive(seed, seconds=90.0, calm=30.0)


def survive(seed: int, *, seconds: float, calm: float) -> None:
    """Chaos, then calm: one head of each fragment, and merging goes on."""
    world = swarm(seed, peers=2 + seed % 4, weather=STORM, fragments=2)
    chaos(world, world.rng("chaos"), seconds=seconds)
    world.heal()
    world.run(world.now + calm)
    for p in range(2):
        merges = len(world.merged_at[p])
        assert settle_on_one_head(world, p), f"seed {seed}: heads differ after healing"
        world.run(world.now + 10.0)
        assert len(world.merged_at[p]) > merges, f"seed {seed}: merging stopped"


def chaos(world: World, rng: random.Random, *, seconds: float) -> None:
    """Kill, restart, add, freeze, split and heal at random moments."""
    number, end = len(world.peers), world.now + seconds
    while world.now < end:
        world.run(world.now + rng.expovariate(0.25))
        alive, draw = world.alive(), rng.random()
        dead = sorted(s.number for s in world.peers.values() if not s.alive)
        if draw < 0.25 and len(alive) > 1:
            world.kill(rng.choice(alive).peer)
        elif draw < 0.4 and dead:
            world.restart(peer_of(rng.choice(dead)))
        elif draw < 0.55 and len(alive) < 7:
            world.add(number)
            number += 1
        elif draw < 0.75:
            world.freeze(rng.choice(alive).peer, rng.choice([1.0, 5.0, 20.0]))
        elif draw < 0.9 and len(alive) > 1:
            peers = [sim.peer for sim in alive]
            rng.shuffle(peers)
            cut = rng.randrange(1, len(peers))
            world.split(set(peers[:cut]), set(peers[cut:]))
        else:
            world.heal()


def test_equal_seeds_give_equal_traces() -> None:
    first, second, other = swarm(5, weather=STORM), swarm(5, weather=STORM), swarm(6, weather=STORM)
    for world in (first, second, other):
        world.run(25.0)
    assert first.digest() == second.digest() != other.digest()


def test_the_checker_notices_progress_that_is_counted_twice() -> None:
    world = swarm(2)
    world.run(20.0)
    sim = world.alive()[0]
    sim.fragments[0].worker.buffers.residual += np.float32(0.01)
    with pytest.raises(Violation, match="not conserved"):
        world.run(30.0)


def test_the_checker_notices_a_contribution_listed_twice() -> None:
    world = swarm(3)
    world.run(20.0)
    digest = world.alive()[0].fragments[0].core.head.digest
    record = world.checks.commits[digest]
    again = record.__class__(
        record.header.__class__(
            **{
                **{f: getattr(record.header, f) for f in record.header.__struct_fields__},
                "parent": digest,
            }
        ),
        record.inputs,
    )
    with pytest.raises(Violation, match="twice"):
        world.checks.committed(again, b"x" * 32)


def test_the_checker_notices_a_peer_that_goes_back_to_what_its_head_builds_on() -> None:
    world = swarm(1)
    world.run(20.0)
    sim = world.alive()[0]
    head = sim.fragments[0].core.head
    parent = world.checks.commits[head.digest].header.parent
    with pytest.raises(Violation, match="went back"):
        world.checks.adopted(sim, 0, head.digest, Adopt(parent, head.version - 1, (), (), False))
