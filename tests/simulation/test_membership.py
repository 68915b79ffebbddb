"""Simulated peers find out by their own rosters who is there, and act on nothing else."""

from __future__ import annotations

import pytest

from dugnad.averaging import formats as fm
from dugnad.dht.heartbeat import SILENCE_MIN_S
from dugnad.simulation.checks import Violation
from dugnad.simulation.people import peer_of
from dugnad.simulation.settings import Weather, WorldSettings
from dugnad.simulation.stage import Stage

CALM = Weather(detect_low_s=0.0, detect_high_s=0.0)


def stage(peers: int = 4, *, until: float = 10.0, seed: int = 3, weather: Weather = CALM) -> Stage:
    made = Stage(WorldSettings(seed=seed, roster=True, weather=weather))
    for number in range(peers):
        made.add(number)
    made.gossip()
    made.run(until)
    return made


def seen_by(world: Stage, number: int) -> list[int]:
    return sorted(world.peers[peer].number for peer in world.peers[peer_of(number)].live)


def test_who_is_there_is_what_the_exchange_cores_are_told() -> None:
    world = stage()
    for sim in world.alive():
        assert seen_by(world, sim.number) == [n for n in range(4) if n != sim.number]
        assert set(sim.fragments[0].core.view.live) == sim.live


def test_a_death_that_ends_streams_is_known_within_a_second() -> None:
    world = stage()
    world.kill(peer_of(1))
    assert seen_by(world, 0) == [1, 2, 3]
    world.run(world.now + 1.0)
    assert [seen_by(world, n) for n in (0, 2, 3)] == [[2, 3], [0, 3], [0, 2]]


def test_a_death_without_a_word_is_known_by_silence_and_no_earlier() -> None:
    world = stage()
    world.kill(peer_of(1), quietly=True)
    world.run(world.now + SILENCE_MIN_S - 1.1)  # the last heartbeat was up to a second old
    assert all(1 in seen_by(world, n) for n in (0, 2, 3))
    world.run(world.now + 3.5)
    assert [seen_by(world, n) for n in (0, 2, 3)] == [[2, 3], [0, 3], [0, 2]]


def test_a_split_is_known_by_silence_and_its_sides_meet_again() -> None:
    world = stage()
    cut = world.part([peer_of(0)], [peer_of(1), peer_of(2), peer_of(3)])
    world.run(world.now + 1.5)
    assert seen_by(world, 0) == [1, 2, 3]
    world.run(world.now + 4.5)
    assert seen_by(world, 0) == []
    assert seen_by(world, 1) == [2, 3]
    world.join(cut)
    world.run(world.now + 12.0)
    assert [world.members.fault(sim) for sim in world.alive() if world.members] == [""] * 4


def test_a_false_end_of_a_stream_loses_nobody_whom_others_hear() -> None:
    world = stage()
    world.false_end(peer_of(0), [peer_of(1)], 6.0)
    world.run(world.now + 3.0)
    assert seen_by(world, 1) == [0, 2, 3]
    assert world.members is not None
    assert not world.members.rosters.daemons[1].roster.rtt(peer_of(9))


@pytest.mark.parametrize("asleep", [False, True])
def test_who_stood_still_says_that_its_clock_jumped(asleep: bool) -> None:
    world = stage()
    world.freeze(peer_of(2), 12.0, asleep=asleep)
    world.run(world.now + 8.0)
    assert 2 not in seen_by(world, 0)
    world.run(world.now + 12.0)
    assert world.members is not None
    assert world.members.jumps[peer_of(2)] == 1
    assert seen_by(world, 0) == [1, 2, 3]
    assert seen_by(world, 2) == [0, 1, 3]


def test_timers_of_a_closed_laptop_wait_for_what_was_left_of_them() -> None:
    for asleep in (False, True):
        world = stage(1)
        fragment = world.peers[peer_of(0)].fragments[0]
        while fragment.core.deadline is None or fragment.core.deadline < world.now + 1.0:
            world.run(world.now + 0.1)
        left, events = fragment.core.deadline - world.now, fragment.events
        world.freeze(peer_of(0), 100.0, asleep=asleep)
        world.run(world.now + 100.0 + 0.9 * left)
        assert (fragment.events == events) == asleep
        world.run(world.now + 0.2 * left)
        assert fragment.events > events


def test_a_second_machine_with_somebodys_key_is_told_and_the_first_goes_on() -> None:
    world = stage()
    assert world.members is not None
    machine = world.members.double(world.peers[peer_of(1)])
    world.run(world.now + 12.0)
    assert machine in world.members.turned_away
    assert not world.members.undetected(12.0)
    assert world.peers[peer_of(1)].alive
    assert seen_by(world, 0) == [1, 2, 3]


def test_a_second_machine_that_nobody_tells_is_a_fault() -> None:
    world = stage()
    assert world.members is not None
    world.members.double(world.peers[peer_of(1)])
    assert "was not told" in world.members.undetected(12.0)[0]


def test_a_dead_libp2p_daemon_is_started_anew_at_the_rosters_word() -> None:
    world = stage()
    world.lose_substrate(peer_of(0), 60.0)
    world.run(world.now + 12.0)
    assert not any(world.net.is_cut(peer_of(0), peer_of(n)) for n in (1, 2, 3))
    assert seen_by(world, 0) == [1, 2, 3]
    assert seen_by(world, 1) == [0, 2, 3]


def test_peers_behind_nat_know_of_each_other_by_the_others_word() -> None:
    world = Stage(WorldSettings(seed=3, roster=True))
    world.outbound = {2, 3}
    for number in range(4):
        world.add(number)
    world.run(15.0)
    assert seen_by(world, 3) == [0, 1, 2]
    world.kill(peer_of(2))
    world.run(20.0)
    assert seen_by(world, 3) == [0, 1]


def test_a_message_from_a_peer_that_is_not_up_yet_waits_a_little() -> None:
    world = stage(2)
    one, two = world.peers[peer_of(0)], world.peers[peer_of(1)]
    assert world.members is not None
    events = two.fragments[0].events
    two.live.discard(one.peer)
    heads = one.fragments[0].core.follower.heads()
    world._deliver(one.peer, two.peer, heads, 0)
    assert two.fragments[0].events == events
    world.members._up(two, one.peer, can_home=True)
    assert two.fragments[0].events > events + 1
    assert isinstance(heads, fm.Heads)


def test_a_view_that_is_wrong_in_the_end_is_noticed() -> None:
    world = stage()
    assert world.members is not None
    sim = world.peers[peer_of(0)]
    assert world.members.fault(sim) == ""
    sim.live.discard(peer_of(2))
    assert world.members.fault(sim) == "peer 0 is wrong about whether [2] are there"


def test_more_streams_with_one_peer_than_allowed_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dugnad.simulation.rosters.STREAMS_PER_PEER_MAX", 0)
    with pytest.raises(Violation, match="holds 1 streams with one peer"):
        stage()


def test_a_bad_network_makes_streams_late_and_loses_nothing_on_them() -> None:
    world = stage(weather=Weather(loss=0.2), until=30.0)
    assert all(world.members.fault(sim) == "" for sim in world.alive() if world.members)


def test_equal_seeds_give_equal_rosters() -> None:
    first, second, other = stage(), stage(), stage(seed=4)
    assert first.digest() == second.digest()
    assert first.digest() != other.digest()
