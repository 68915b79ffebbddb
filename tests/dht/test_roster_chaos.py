"""Random faults in the in-memory world; afterwards every view must equal the truth. A failing seed
replays.
"""

import random

import pytest

from dugnad.dht.roster_events import DuplicateIdentity, PeerLost

from .roster_world import World, mesh, peer_id  # noqa: TID252  the world is no installed package

SETTLE_S = 20.0
"""After all faults: pauses between dials have grown to at most 8 s meanwhile (1.25 x 8, and a
second try).
"""
PAIRS_S = 45.0
"""Until peers that know of each other through others also have a stream: pauses up to 16 s."""

FAULTS = ("streams", "stream", "kill", "quiet", "hang", "cut", "one way", "restart", "heal")


def chaos(seed: int) -> World:
    """A mesh of three to five peers, three to eight faults close together, then healed lines."""
    rng = random.Random(seed)
    size = rng.choice([3, 4, 5])
    world = mesh(seed, size)
    for _ in range(rng.randrange(3, 9)):
        fault(world, rng, size)
        world.run(rng.choice([0.05, 0.3, 1.0, 4.0]) * rng.random())
    world.heal()
    return world


def fault(world: World, rng: random.Random, size: int) -> None:
    kind = rng.choice(FAULTS)
    one, other = rng.sample(range(size), 2)
    living = sum(node.alive for node in world.nodes.values())
    match kind:
        case "streams":
            world.cut_streams(one)
        case "stream":
            world.cut_streams(one, other)
        case "kill" | "quiet" if living > 2:
            world.kill(one, quietly=kind == "quiet")
        case "hang" if world.nodes[one].alive:
            world.hang(one, rng.uniform(0.2, 9.0))
        case "cut" | "one way":
            world.cut(one, other, both=kind == "cut")
        case "restart":
            if world.nodes[one].alive:
                world.kill(one, quietly=rng.random() < 0.5)
            world.add(one)
            world.introduce(one, *(name for name in range(size) if name != one))
        case _:
            world.heal()


def assert_settles(seed: int) -> World:
    world = chaos(seed)
    world.run(SETTLE_S)
    assert world.agreed(), f"seed {seed}"
    for node in world.nodes.values():
        assert not node.said(DuplicateIdentity), f"seed {seed}"
    return world


@pytest.mark.parametrize("seed", range(4))
def test_after_faults_every_view_equals_the_truth(seed: int) -> None:
    assert_settles(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 500, 50))
def test_after_faults_every_view_equals_the_truth_for_many_seeds(first: int) -> None:
    for seed in range(first, first + 50):
        assert_settles(seed)


@pytest.mark.slow
def test_in_the_end_each_pair_has_exactly_one_stream() -> None:
    for seed in range(1000, 1050):
        world = assert_settles(seed)
        world.run(PAIRS_S)
        living = [name for name, node in world.nodes.items() if node.alive]
        for one in living:
            for other in living:
                if one < other:
                    assert world.streams_between(one, other) == 1, f"seed {seed}: {one}, {other}"


@pytest.mark.slow
def test_the_same_seed_replays_exactly() -> None:
    assert assert_settles(77).digest == assert_settles(77).digest


@pytest.mark.slow
def test_a_full_mesh_of_sixty_four_forms_at_once_and_loses_one_in_half_a_second() -> None:
    world = World(1)
    for name in range(64):
        world.add(name)
    for name in range(1, 64):
        world.introduce(name, 0)
    world.run(3.0)
    assert world.agreed()
    world.kill(5)
    world.run(1.0)
    assert world.agreed()
    lost = [at for node in world.nodes.values() if node.alive for at, _ in node.said(PeerLost)]
    assert len(lost) == 63
    assert all(
        world.nodes[n].lost_at[peer_id(5)] <= 103.0 + 0.03 + 0.5 for n in range(64) if n != 5
    )
