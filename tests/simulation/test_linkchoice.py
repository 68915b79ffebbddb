"""Simulated peers whose links decide hand in with what these carry."""

from __future__ import annotations

from dugnad.averaging import events as ev
from dugnad.averaging.linkrate import Delivery
from dugnad.simulation.linkchoice import LinkChoices
from dugnad.simulation.people import SimPeer, peer_of
from dugnad.simulation.settings import Weather, WorldSettings
from dugnad.simulation.stage import Stage


def swarm(weather: Weather, *, until: float = 24.0) -> Stage:
    world = Stage(WorldSettings(seed=2, peers=3, size=2048, codec="auto", weather=weather))
    for number in range(3):
        world.add(number)
    world.gossip()
    world.run(until)
    return world


def links_of(world: Stage) -> LinkChoices:
    assert world.links is not None
    return world.links


def away(world: Stage) -> SimPeer:
    """A peer that is not home, so that its hand-in has a way to go."""
    return next(
        sim for sim in world.alive() if sim.fragments[0].core.view.current_home() != sim.peer
    )


def test_lines_without_end_carry_the_richest_codec() -> None:
    assert set(links_of(swarm(Weather(), until=14.0)).chosen) == {"int8"}


def test_thin_lines_make_hand_ins_lean_and_the_swarm_goes_on() -> None:
    world = swarm(Weather(up_bytes_s=2000.0), until=40.0)
    assert set(links_of(world).chosen) > {"int8"}
    assert len(world.merged_at[0]) >= 4
    codecs = {
        one.contribution.codec
        for record in world.ledger.chain(world.best(0))
        for one in record.inputs
    }
    assert len(codecs) > 1


def merges(world: Stage) -> set[str]:
    return {record.header.codec for record in world.ledger.chain(world.best(0))}


def test_merges_go_as_lean_as_the_others_downlinks() -> None:
    assert merges(swarm(Weather(), until=14.0)) == {"int8"}
    assert merges(swarm(Weather(down_bytes_s=2000.0), until=30.0)) == {"int4"}


def test_a_hand_in_waits_while_the_last_one_is_under_way() -> None:
    world = swarm(Weather(), until=10.0)
    links, sim = links_of(world), away(world)
    home = sim.fragments[0].core.view.current_home()
    assert home is not None
    slow = Delivery(4000, 8.0)
    links.sent(sim, 0, ev.SendContribution(1, home), slow)
    assert links.hand_in(sim, 0) is None
    assert links.of(sim).link(home).rate != slow.rate
    world.run(world.now + 8.5)
    assert links.hand_in(sim, 0) is not None


def test_a_new_life_knows_nothing_of_its_links() -> None:
    world = swarm(Weather(up_bytes_s=2500.0), until=16.0)
    sim = world.peers[peer_of(1)]
    assert links_of(world).of(sim).uplink > 0.0
    world.kill(sim.peer)
    assert links_of(world).of(world.restart(sim.peer)).uplink == 0.0
