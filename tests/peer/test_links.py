"""A daemon's links: what is measured, chosen, told and shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dugnad.averaging.codecs import CODECS
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId
from dugnad.dht.protocol import PROTOCOL
from dugnad.peer.daemon import Daemon
from dugnad.peer.links import MOVING_S, Links
from dugnad.peer.pacedstream import Traffic, stream_time
from dugnad.peer.ratelimit import BYTES_PER_MBIT
from dugnad.peer.uplink import Uplink

from .virtual_time import pass_time, run_virtual  # noqa: TID252  the tests are no installed package

ME, HOME, OTHER = (Identity.ephemeral(bytes([n]) * 32).peer for n in (1, 2, 3))
SIZES = (400_000, 200_000)
INTERVAL_S = 20.0


@dataclass
class World:
    """The parts of a daemon that its links look at."""

    codec: str = "auto"
    upload_mbit: float = 0.0
    downlinks: dict[PeerId, int] = field(default_factory=dict)
    uplinks: dict[PeerId, int] = field(default_factory=dict)
    live: dict[PeerId, bool] = field(default_factory=dict)
    told: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    traffic: Traffic = field(default_factory=lambda: Traffic(uplink=Uplink()))

    def links(self) -> Links:
        roster = SimpleNamespace(
            rtt=lambda peer: 0.05,
            trips=[0.1] * 98 + [0.9, 0.9],
            advert=lambda peer: SimpleNamespace(
                down_bytes_per_s=self.downlinks.get(peer, 0),
                up_bytes_per_s=self.uplinks.get(peer, 0),
            ),
        )
        swarm = SimpleNamespace(
            traffic=self.traffic, roster=roster, advertise=lambda **rates: self.told.append(rates)
        )
        daemon = SimpleNamespace(
            identity=SimpleNamespace(peer=ME),
            manifest=SimpleNamespace(
                protocol=PROTOCOL,
                table=SimpleNamespace(sizes=SIZES),
                exchange=SimpleNamespace(hand_in_codec="int8", commit_codec="float32"),
            ),
            settings=SimpleNamespace(codec=self.codec, upload_mbit=self.upload_mbit),
            swarm=swarm,
            averager=SimpleNamespace(
                fragments=[
                    SimpleNamespace(core=SimpleNamespace(view=SimpleNamespace(live=self.live)))
                    for _ in SIZES
                ]
            ),
            happenings=SimpleNamespace(label=lambda peer: peer.hex()[:6]),
            note=lambda kind, text: self.notes.append(text),
        )
        return Links(cast(Daemon, daemon))


async def carry(links: Links, rate: float, size: int = 200_000) -> None:
    """A contribution goes to the home at this rate."""
    flow = links.begin(HOME, 0)
    flow.sent(10_000, stream_time())
    for arrived in range(10_000, size + 1, 10_000):
        flow.sent(10_000, stream_time())  # one piece ahead, so that the line never runs dry
        await pass_time(10_000 / rate)
        flow.arrived(arrived, stream_time())
    links.end(HOME, flow)


def test_the_codec_follows_what_hand_ins_were_seen_to_take() -> None:
    async def story() -> None:
        links = World().links()
        first = links.hand_in(0, HOME, INTERVAL_S)
        assert CODECS[first].encoded_size(SIZES[0]) <= 0.7 * 125_000 * INTERVAL_S
        await carry(links, 20_000.0)
        await carry(links, 20_000.0)
        assert links.rate(HOME) < 125_000
        leaner = links.hand_in(0, HOME, INTERVAL_S)
        assert list(CODECS).index(leaner) > list(CODECS).index(first)
        assert "Mbit/s" in links.carried_to(HOME).reason

    run_virtual(story())


def test_a_codec_that_the_owner_set_is_kept_to_and_the_runs_codec_is_the_richest() -> None:
    async def story() -> None:
        assert World(codec="topk-25").links().hand_in(0, HOME, INTERVAL_S) == "topk-25"
        assert World().links().hand_in(0, HOME, 1e6) == "int8"
        assert World().links().hand_in(0, None, 0.1) == "int8"
        slow = World(upload_mbit=0.3).links().hand_in(0, HOME, INTERVAL_S)
        size = CODECS[slow].encoded_size(SIZES[0])
        assert size <= 0.3 * BYTES_PER_MBIT * INTERVAL_S * SIZES[0] / sum(SIZES)

    run_virtual(story())


def test_a_fragment_is_busy_while_its_contribution_moves() -> None:
    async def story() -> None:
        links = World().links()
        flow = links.begin(HOME, 0)
        assert links.busy(0)
        assert not links.busy(1)
        assert links.moving(0, HOME)
        assert not links.moving(0, OTHER)
        await pass_time(MOVING_S + 0.1)
        assert not links.busy(0), "its home may be gone"
        flow.sent(10, stream_time())
        flow.arrived(10, stream_time())
        assert links.busy(0)
        links.end(HOME, flow)
        assert not links.busy(0)

    run_virtual(story())


def test_a_line_that_carries_more_than_a_payload_is_not_taken_for_a_slow_one() -> None:
    links = World().links()
    links.fetched(13_000, 0.6)  # a small model's, and most of it the way there and back
    links.tell()
    assert links.control.down.rate == 0.0, "unknown"
    links.fetched(13_000 + 137_000, 0.6)  # a shard came besides
    assert links.control.down.rate == pytest.approx(250_000.0)
    links.fetched(50_000, 3.0)
    assert links.control.down.rate < 125_000.0, "a line that became slow"
    before = links.control.down.rate
    links.fetched(13_000, 0.6)
    assert links.control.down.rate == before


def test_a_slow_line_among_better_ones_offers_no_homes_duty() -> None:
    async def story() -> None:
        world = World(live={HOME: True, OTHER: True}, uplinks={HOME: 10**6, OTHER: 10**6})
        links = world.links()
        assert links.fit_for_home(0, INTERVAL_S), "nothing is known of its line yet"
        links.control.link(HOME).rate = 50_000.0
        assert not links.fit_for_home(0, INTERVAL_S)
        assert links.fit_for_home(0, 100 * INTERVAL_S), "it has the time"
        world.uplinks[HOME], world.live[OTHER] = 50_000, False
        assert links.fit_for_home(0, INTERVAL_S), "who takes no duty is no better"

    run_virtual(story())


def test_what_is_served_to_others_teaches_the_link_to_them() -> None:
    async def story() -> None:
        links = World().links()
        meter = links.serving()
        flow = meter.begin(HOME)
        flow.sent(10_000, stream_time())
        for arrived in range(10_000, 300_001, 10_000):
            flow.sent(10_000, stream_time())
            await pass_time(10_000 / 40_000.0)
            flow.arrived(arrived, stream_time())
        meter.end(HOME, flow)
        assert links.rate(HOME) == pytest.approx(40_000.0, rel=0.2)
        assert not links.busy(0), "it is no contribution"

    run_virtual(story())


def test_what_is_saved_is_counted_for_each_link_and_in_all() -> None:
    async def story() -> None:
        links = World().links()
        for peer in (HOME, OTHER):
            links.taken(peer, 0, "int4", CODECS["int4"].encoded_size(SIZES[0]))
        saved = 4 * SIZES[0] - CODECS["int4"].encoded_size(SIZES[0])
        assert links.carried_to(HOME).saved_bytes == saved
        assert links.carried_to(ME).saved_bytes == 2 * saved
        assert links.carried_to(HOME).bits == pytest.approx(4.25, abs=0.01)

    run_virtual(story())


def test_a_commit_follows_what_members_say_of_their_lines_and_the_slow_are_named_once() -> None:
    async def story() -> None:
        world = World(downlinks={HOME: 10**8, OTHER: 1000})
        links = world.links()
        assert links.commit(0, [HOME], INTERVAL_S) == "float32"
        for _ in range(3):
            links.commit(0, [HOME, OTHER], INTERVAL_S)
        assert links.behind == (OTHER,)
        assert len(world.notes) == 1

    run_virtual(story())


def test_our_line_is_told_when_it_has_changed() -> None:
    async def story() -> None:
        world = World()
        links = world.links()
        links.tell()
        assert world.told == []
        links.fetched(1_000_000, 1.0)
        links.tell()
        links.fetched(1_010_000, 1.0)
        links.tell()
        assert world.told == [{"up_bytes_per_s": 0, "down_bytes_per_s": 1_000_000}]

    run_virtual(story())


def test_the_slowest_of_a_hundred_heartbeats_is_shown() -> None:
    async def story() -> None:
        assert World().links().control_p99_s() == 0.9

    run_virtual(story())
