"""Messages take times of their link's own distribution, wait in line, and overtake each other."""

from __future__ import annotations

import random
import statistics

import pytest

from dugnad.averaging import events as ev
from dugnad.simulation.links import GAPS_MAX, LATENCY_MAX_FACTOR, Line, Link
from dugnad.simulation.network import Network
from dugnad.simulation.people import peer_of
from dugnad.simulation.play import Play
from dugnad.simulation.runner import play
from dugnad.simulation.scenario import ScenarioError, draw
from dugnad.simulation.settings import Weather, WorldSettings
from dugnad.simulation.stage import Stage

HEAD = 'title = "a test"\nseconds = 600\n'


def net(weather: Weather) -> Network:
    world = Stage(WorldSettings(seed=1, weather=weather))
    return Network(weather, world.rng, lambda: 0.0)


def medians(network: Network, source: int, target: int) -> float:
    link = network.link(peer_of(source), peer_of(target))
    return statistics.median(network.latency(link) for _ in range(400))


def test_each_direction_of_a_link_has_a_latency_of_its_own() -> None:
    network = net(Weather(latency_low_s=0.01, latency_high_s=0.5, jitter=0.2))
    there, back = medians(network, 0, 1), medians(network, 1, 0)
    assert min(there, back) >= 0.01
    assert abs(there - back) > 0.01
    assert medians(network, 0, 1) == pytest.approx(there, rel=0.2)


def test_times_on_one_link_spread_and_have_an_end() -> None:
    link = Link(random.Random(b"seed"), b"a", b"b")
    weather = Weather(latency_low_s=0.1, latency_high_s=0.1, jitter=2.0)
    trips = [link.trip(weather) for _ in range(2000)]
    assert max(trips) <= 0.1 * LATENCY_MAX_FACTOR + 1e-9
    assert min(trips) < 0.02
    assert statistics.median(trips) == pytest.approx(0.1, rel=0.2)


def test_a_held_back_message_is_overtaken() -> None:
    link = Link(random.Random(b"seed"), b"a", b"b")
    still = Weather(latency_low_s=0.1, latency_high_s=0.1, jitter=0.0)
    assert {link.trip(still) for _ in range(10)} == {0.1}
    reordered = Weather(latency_low_s=0.1, latency_high_s=0.1, jitter=0.0, reorder=0.5)
    trips = [link.trip(reordered) for _ in range(200)]
    assert 60 < sum(one >= 0.2 for one in trips) < 140


def test_a_message_waits_until_the_bytes_before_it_are_through() -> None:
    line = Line()
    assert line.passes(1000, 1000.0, 5.0, 5.0) == pytest.approx(1.0)
    assert line.passes(500, 1000.0, 5.0, 5.0) == pytest.approx(1.5)
    assert line.longest_wait_s == pytest.approx(1.0)
    assert line.passes(500, 1000.0, 9.0, 9.0) == pytest.approx(0.5)


def test_a_message_that_is_under_way_for_long_holds_up_nobody_elses() -> None:
    line = Line()
    assert line.passes(1000, 1000.0, 8.0, 0.0) == pytest.approx(1.0)  # sent first, there last
    assert line.passes(1000, 1000.0, 0.5, 0.1) == pytest.approx(1.0)
    assert line.passes(500, 1000.0, 1.0, 0.2) == pytest.approx(1.0)  # behind the second
    assert line.passes(1000, 1000.0, 7.5, 0.3) == pytest.approx(2.5)  # the first begins at 8
    assert line.passes(1000, 1000.0, 6.5, 0.4) == pytest.approx(1.0)
    assert line.longest_wait_s == pytest.approx(1.5)


def test_gaps_of_the_past_are_forgotten_and_the_rest_has_a_bound() -> None:
    line = Line()
    for n in range(2 * GAPS_MAX):
        line.passes(100, 1000.0, float(n), float(n) - 0.5)
    assert len(line.gaps) <= 2
    for n in range(2 * GAPS_MAX):
        line.passes(100, 1000.0, 1000.0 + n, 500.0)
    assert len(line.gaps) <= GAPS_MAX + 1


def test_all_that_a_host_sends_shares_its_uplink_and_no_other() -> None:
    weather = Weather(latency_low_s=0.1, latency_high_s=0.1, jitter=0.0, up_bytes_s=1000.0)
    network = net(weather)
    times = []
    for source, target in ((0, 1), (0, 2), (3, 2)):
        network.weigh(1000)
        times.append(network.latency(network.link(peer_of(source), peer_of(target))))
    assert times == pytest.approx([1.1, 2.1, 1.1])
    assert network.latency(network.link(peer_of(0), peer_of(1))) == pytest.approx(0.1)


def test_bytes_wait_once_however_many_trips_go_before_them() -> None:
    weather = Weather(latency_low_s=0.1, latency_high_s=0.1, jitter=0.0, up_bytes_s=1000.0)
    network = net(weather)
    network.weigh(1000)
    assert network.latency(network.link(peer_of(0), peer_of(1)), 3) == pytest.approx(1.3)


def test_what_is_fetched_goes_through_its_donors_uplink() -> None:
    world = Stage(WorldSettings(seed=1, weather=Weather(up_bytes_s=10_000.0)))
    for number in range(2):
        world.add(number)
    world.run(12.0)
    assert world.heads() != {world.alive()[0].fragments[0].core.view.lineage.genesis.digest}
    sent = {sim.peer: world.net.up[sim.peer].free_at for sim in world.alive()}
    donor = world.peers[peer_of(0)]
    header = donor.fragments[0].core.head.record
    assert header is not None
    obtain = ev.Obtain(donor.fragments[0].core.head.digest, header.header, (donor.peer,), False)
    world._obtain(world.peers[peer_of(1)], 0, obtain)
    waited = world.net.up[donor.peer].free_at - max(world.now, sent[donor.peer])
    assert waited == pytest.approx(obtain.header.payload_bytes / 10_000.0)


def test_all_that_a_host_receives_shares_its_downlink() -> None:
    weather = Weather(latency_low_s=0.1, latency_high_s=0.1, jitter=0.0, down_bytes_s=1000.0)
    network = net(weather)
    times = []
    for source in (0, 1):
        network.weigh(1000)
        times.append(network.latency(network.link(peer_of(source), peer_of(2))))
    assert times == pytest.approx([1.1, 2.1])


def test_real_messages_wait_in_a_scenario_with_thin_uplinks() -> None:
    text = 'title = "thin"\nseconds = 20\n[weather]\nup_bytes_s = 4000.0\n'
    act = Play(draw("thin", text, 1))
    act.begin()
    act.stage.run(20.0)
    assert max(line.longest_wait_s for line in act.stage.net.up.values()) > 0.1
    assert len(act.stage.merged_at[0]) >= 3


def arrivals(swing: float, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    people = f"[people]\narrivals_per_min = 20\npeers_max = 64\nday_s = 600\nday_swing = {swing}\n"
    act = Play(draw("day", HEAD + "[swarm]\npeers = 1\nstep_s = 1000.0\n" + people, 4))
    came: list[float] = []
    monkeypatch.setattr(Stage, "add", lambda stage, _number, **_: came.append(stage.now))
    monkeypatch.setattr(Play, "_live", lambda *_: None)
    act.begin()
    act.stage.run(599.0)
    return came[1:]


def test_volunteers_come_by_day_and_stay_away_by_night(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    came = arrivals(0.9, monkeypatch)
    assert sum(at < 300 for at in came) > 2 * sum(at >= 300 for at in came) > 0
    even = arrivals(0.0, monkeypatch)
    assert sum(at < 300 for at in even) < 1.5 * sum(at >= 300 for at in even)


def test_a_machine_that_speeds_up_does_more_steps() -> None:
    event = '[[event]]\nat_s = 1\ndo = "speed"\nwho = "0"\nfactor = 4.0\n'
    act = Play(draw("speed", 'title = "speed"\nseconds = 20\n' + event, 1))
    act.begin()
    act.stage.run(20.0)
    steps = {sim.number: sim.step for sim in act.stage.alive()}
    assert steps[0] > 3 * steps[1]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[people]\nday_swing = 1.5\n", "day_swing"),
        ("[weather]\nreorder = 1.5\n", "reorder"),
        ('[[event]]\nat_s = 1\ndo = "speed"\nfactor = 0.0\n', "factor"),
    ],
)
def test_impossible_numbers_are_refused(text: str, fault: str) -> None:
    with pytest.raises(ScenarioError, match=fault):
        draw("bad", HEAD + text, 0)


@pytest.mark.slow
def test_thin_lines_give_the_same_run_for_the_same_seed() -> None:
    text = 'title = "thin"\nseconds = 20\n[weather]\nup_bytes_s = 4000.0\nreorder = 0.2\n'
    assert play(draw("thin", text, 1)).digest == play(draw("thin", text, 1)).digest
