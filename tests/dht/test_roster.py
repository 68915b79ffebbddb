"""The roster, alone in an in-memory world: one rule a test."""

from itertools import pairwise

import msgspec
import pytest

from dugnad.dht.advert import Advert
from dugnad.dht.ids import PeerId
from dugnad.dht.messages import LostNotice, PeersKnown
from dugnad.dht.roster import State
from dugnad.dht.roster_events import (
    ClockJumped,
    Dial,
    DialFailed,
    DuplicateIdentity,
    Known,
    LeaveNow,
    MessageIn,
    MyAdvert,
    PeerChanged,
    PeerLeft,
    PeerLost,
    PeerUp,
    SelfSuspect,
    Timer,
)
from dugnad.dht.roster_liveness import REDIAL_MAX_S

from .roster_cases import ME, SEEDS, connect, hello_of, lone_roster, losses, only  # noqa: TID252  the tests are no installed package
from .roster_world import (  # noqa: TID252  the world is no installed package
    WALL_START_MS,
    World,
    mesh,
    peer_id,
)


@pytest.mark.parametrize("seed", range(10))
def test_four_peers_started_at_once_from_the_same_addresses_form_one_mesh(seed: int) -> None:
    world = World(seed)
    for name in range(4):
        world.add(name)
    for name in range(4):
        world.introduce(name, *(other for other in range(4) if other != name))
    world.run(4.0)
    assert world.agreed()
    pairs = [(one, other) for one in range(4) for other in range(one)]
    assert [world.streams_between(*pair) for pair in pairs] == [1] * 6
    assert not losses(world)
    assert not any(node.said(DuplicateIdentity) for node in world.nodes.values())


@pytest.mark.parametrize("latency_s", [0.001, 0.05, 0.2])
def test_simultaneous_dials_leave_one_stream_and_never_flap(latency_s: float) -> None:
    for seed in SEEDS:
        world = World(seed, latency_s)
        world.add(0)
        world.add(1)
        world.introduce(0, 1)
        world.introduce(1, 0)
        world.run(6.0)
        assert world.streams_between(0, 1) == 1
        assert [len(node.said(PeerUp)) for node in world.nodes.values()] == [1, 1]
        assert not losses(world)


def test_everybody_finds_everybody_through_one_seed() -> None:
    world = mesh(3, 6)
    assert all(len(node.roster.live()) == 5 for node in world.nodes.values())
    assert all(
        node.roster.state(peer).state is State.LIVE
        for node in world.nodes.values()
        for peer in node.roster.live()
    )


def test_a_changed_advert_reaches_everybody() -> None:
    world = mesh(1, 4)
    advert = msgspec.structs.replace(world.nodes[0].roster.my_advert, tokens_per_s=250)
    world.feed(world.nodes[0], MyAdvert(advert))
    world.run(0.5)
    for name in (1, 2, 3):
        node = world.nodes[name]
        seen = node.roster.advert(peer_id(0))
        assert seen is not None
        assert seen.tokens_per_s == 250.0
        assert node.said(PeerChanged)


def test_peers_that_cannot_reach_each_other_know_of_each_other_through_a_third() -> None:
    world = World(5)
    world.add(0)
    for name in (1, 2):
        world.add(name, dialable=False, reachable="outbound")
        world.introduce(name, 0)
    world.run(3.0)
    assert world.agreed()
    assert world.nodes[1].roster.state(peer_id(2)).state is State.INDIRECT
    world.run(100.0)  # asked again and again, still there
    assert world.agreed()
    assert not losses(world)
    world.kill(2)
    world.run(1.0)
    assert world.agreed()


def test_a_voucher_that_dies_does_not_keep_an_unreachable_peer_alive() -> None:
    world = World(5)
    world.add(0)
    for name in (1, 2):
        world.add(name, dialable=False, reachable="outbound")
        world.introduce(name, 0)
    world.run(3.0)
    world.kill(0)
    world.run(8.0)
    assert world.nodes[1].roster.live() == ()


def test_a_peer_never_reached_is_dialled_with_growing_pauses_and_at_last_in_its_turn() -> None:
    roster, now, dials = lone_roster(), 0.0, list[float]()
    actions = roster.handle(Known(peer_id(1), ("/ip4/10.0.0.1/tcp/1",), "a link"), now)
    while now < 3000.0:
        for _ in only(Dial, actions):
            dials.append(now)
            roster.handle(DialFailed(peer_id(1), "connection refused"), now)
        assert roster.deadline is not None, "alone, it must go on looking"
        now = roster.deadline
        actions = roster.handle(Timer(WALL_START_MS), now)
    for _ in only(Dial, actions):
        roster.handle(DialFailed(peer_id(1), "connection refused"), now)
    pauses = [after - before for before, after in pairwise(dials)]
    assert 1.0 <= pauses[0] <= 1.25
    assert all(pause <= 75.0 for pause in pauses)
    assert all(pause >= 60.0 for pause, at in zip(pauses, dials, strict=False) if at > 600.0)
    assert "connection refused" in roster.state(peer_id(1)).reason
    again = roster.handle(Known(peer_id(1), (), "the address book"), now + 1.0)
    assert only(Dial, again)


# --- losing


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_killed_peer_is_lost_everywhere_within_half_a_second_of_its_streams_end(
    size: int,
) -> None:
    for seed in SEEDS:
        world = mesh(seed, size, latency_s=0.01)
        world.kill(size - 1)
        ended = world.now + 0.015  # the longest way to the last of them
        world.run(1.0)
        survivors = [node for node in world.nodes.values() if node.alive]
        assert all(node.lost_at[peer_id(size - 1)] <= ended + 0.5 for node in survivors)
        assert losses(world) == losses(world, of=size - 1)
        assert world.agreed()


@pytest.mark.slow
def test_a_hung_peer_is_lost_everywhere_within_the_silence_time_and_comes_back() -> None:
    for seed in SEEDS:
        world = mesh(seed, 4)
        hung_at = world.now
        world.hang(3, 20.0)
        world.run(19.0)
        times = [world.nodes[name].lost_at[peer_id(3)] - hung_at for name in range(3)]
        assert all(2.0 < time < 3.0 + 0.45 + 0.1 for time in times), times
        assert losses(world) == losses(world, of=3)
        world.run(15.0)
        assert world.agreed()


def test_a_machine_without_power_is_lost_within_the_silence_time() -> None:
    world = mesh(1, 4)
    world.kill(2, quietly=True)
    world.run(3.6)
    assert world.agreed()


def test_a_live_peer_whose_stream_is_cut_is_not_lost() -> None:
    for seed in SEEDS:
        world = mesh(seed, 3)
        world.cut_streams(0, 1)
        world.run(2.0)
        assert not losses(world)
        assert world.streams_between(0, 1) == 1


@pytest.mark.slow
def test_a_live_peer_that_only_we_cannot_reach_is_not_lost_while_others_hear_it() -> None:
    for seed in SEEDS:
        world = mesh(seed, 4)
        world.cut(0, 1)
        world.cut_streams(0, 1)
        world.run(20.0)
        assert not losses(world)
        assert world.nodes[0].roster.state(peer_id(1)).state is State.INDIRECT
        world.heal()
        world.run(40.0)
        assert world.nodes[0].roster.state(peer_id(1)).state is State.LIVE
        assert not losses(world)


def test_on_another_continent_a_cut_stream_loses_nobody_though_the_redial_is_too_slow() -> None:
    for seed in SEEDS:
        world = mesh(seed, 4, latency_s=0.15)
        world.run(5.0)
        world.cut_streams(0, 1)
        world.run(10.0)
        assert not losses(world)
        assert world.streams_between(0, 1) == 1


def test_on_a_slow_line_a_suspect_has_as_long_to_be_reached_as_a_dial_there_takes() -> None:
    for seed in SEEDS:  # only the two are there: nobody else's word can help
        world = mesh(seed, 2, latency_s=0.15)
        world.run(5.0)
        world.cut_streams(0, 1)
        world.run(10.0)
        assert not losses(world)
        world.kill(1)
        world.run(REDIAL_MAX_S + 0.5)
        assert losses(world) == losses(world, of=1) != []


def test_a_line_that_works_one_way_only_does_not_lose_a_peer_that_others_hear() -> None:
    world = mesh(2, 4)
    world.cut(0, 1, both=False)
    world.run(15.0)
    assert not losses(world)
    world.heal()
    world.run(30.0)
    assert world.agreed()
    assert world.streams_between(0, 1) == 1


def test_gossip_about_a_lost_peer_does_not_lose_it_and_it_refutes() -> None:
    world = mesh(4, 4)
    before = world.nodes[1].roster.my_advert.incarnation
    liar, hearer = world.nodes[0], world.nodes[2]
    (stream,) = set(liar.lines) & set(hearer.lines)
    notice = LostNotice(peer_id(1), before, liar.peer)
    world.feed(hearer, MessageIn(liar.peer, stream, notice))
    world.run(1.0)
    assert not losses(world)
    assert world.nodes[1].roster.my_advert.incarnation == before + 1
    seen = world.nodes[3].roster.advert(peer_id(1))
    assert seen is not None
    assert seen.incarnation == before + 1


def test_a_peer_that_says_good_bye_is_left_and_not_looked_for() -> None:
    world = mesh(6, 3)
    world.feed(world.nodes[2], LeaveNow())
    world.nodes[2].alive = False
    world.run(30.0)
    for name in (0, 1):
        node = world.nodes[name]
        assert [left.peer for left in only(PeerLeft, (a for _, a in node.log))] == [peer_id(2)]
        dials = [dial for at, dial in node.said(Dial) if at > 104.0]
        assert not dials
    assert not losses(world)


# --- our own fault


@pytest.mark.slow
def test_when_all_streams_end_at_once_we_suspect_ourselves_and_lose_nobody() -> None:
    for seed in SEEDS:
        world = mesh(seed, 4)
        world.cut(0, 1)
        world.cut(0, 2)
        world.cut(0, 3)
        world.cut_streams(0)
        world.run(3.0)
        node = world.nodes[0]
        assert len(node.said(SelfSuspect)) == 1
        assert not node.said(PeerLost)
        world.heal()
        world.run(10.0)
        assert not node.said(PeerLost)
        assert world.agreed()


def test_if_everybody_else_is_really_gone_they_are_lost_after_the_grace() -> None:
    world = mesh(1, 3)
    world.kill(1)
    world.kill(2)
    world.run(4.0)
    assert len(world.nodes[0].roster.live()) == 2
    world.run(2.0)
    assert world.nodes[0].roster.live() == ()


def test_a_peer_with_one_stream_does_not_suspect_itself() -> None:
    world = mesh(1, 2)
    world.kill(1)
    world.run(1.0)
    assert not world.nodes[0].said(SelfSuspect)


@pytest.mark.slow
def test_after_standing_still_a_peer_declares_nobody_lost() -> None:
    for seed in SEEDS:
        world = mesh(seed, 4)
        world.hang(0, 30.0)
        world.run(45.0)
        node = world.nodes[0]
        assert len(node.said(ClockJumped)) == 1
        assert not node.said(PeerLost)
        assert not node.said(SelfSuspect)
        assert world.agreed()


# --- restarts and doubles


def test_a_restarted_peer_is_lost_and_up_again_and_no_double() -> None:
    for seed in SEEDS:
        world = mesh(seed, 3)
        world.kill(1, quietly=seed % 2 == 0)
        world.run(0.2)
        world.add(1)
        world.introduce(1, 0, 2)
        world.run(4.0)
        assert world.agreed()
        for name in (0, 2):
            node = world.nodes[name]
            assert not node.said(DuplicateIdentity)
            assert [lost.peer for lost in only(PeerLost, (a for _, a in node.log))] == [peer_id(1)]
            known = node.roster.advert(peer_id(1))
            assert known is not None
            assert known.boot == world.nodes[1].roster.my_advert.boot


def test_a_second_daemon_with_the_same_key_is_found_by_others_and_told() -> None:
    for seed in SEEDS:
        world = mesh(seed, 3)
        world.run(10.0)
        double = world.add(9, identity=1)
        world.introduce(9, 0)
        world.run(5.0)
        found = only(DuplicateIdentity, (a for _, a in world.nodes[0].log))
        assert {double.peer for double in found} == {peer_id(1)}
        told = only(DuplicateIdentity, (a for _, a in double.log))
        assert told
        assert told[0].told_by == peer_id(0)
        assert not losses(world, of=1)  # the first one goes on undisturbed


def test_our_own_advert_from_another_living_daemon_shows_a_double() -> None:
    roster = lone_roster()
    connect(roster, 2, 1, 0.0)
    twin = hello_of(ME, boot=77, at_ms=WALL_START_MS + 60_000)
    advert = msgspec.msgpack.decode(twin.advert, type=Advert)
    actions = roster.handle(MessageIn(peer_id(2), 1, PeersKnown((advert,))), 60.0)
    assert only(DuplicateIdentity, actions)


def test_our_own_advert_from_a_former_life_is_outlived() -> None:
    roster = lone_roster()
    connect(roster, 2, 1, 0.0)
    former = hello_of(
        ME, boot=77, at_ms=WALL_START_MS - 9_000, incarnation=2 * WALL_START_MS // 1000
    )
    advert = msgspec.msgpack.decode(former.advert, type=Advert)
    actions = roster.handle(MessageIn(peer_id(2), 1, PeersKnown((advert,))), 1.0)
    assert not only(DuplicateIdentity, actions)
    assert roster.my_advert.incarnation > advert.incarnation


# --- strangers and bounds


def test_clocks_that_differ_by_half_a_minute_agree_after_correction() -> None:
    world = mesh(1, 5)
    skews = [30.0, -30.0, 0.0, 5.0, -2.0]
    for name, skew in enumerate(skews):
        world.nodes[name].skew_s = skew
    world.run(25.0)
    corrected = [skew + world.nodes[n].roster.clock_offset() for n, skew in enumerate(skews)]
    assert max(corrected) - min(corrected) < 0.2
    assert abs(corrected[0]) < 0.2  # the median clock, not the mean


def test_round_trips_are_measured() -> None:
    world = mesh(1, 3, latency_s=0.05)
    world.run(5.0)
    rtt = world.nodes[0].roster.rtt(peer_id(1))
    assert rtt is not None
    assert 0.05 < rtt < 0.15
    assert world.nodes[0].roster.rtt(PeerId(bytes(32))) is None


def test_the_same_seed_gives_the_same_history() -> None:
    def history(seed: int) -> str:
        world = mesh(seed, 4)
        world.cut_streams(1)
        world.kill(2)
        world.run(5.0)
        return world.digest

    assert history(7) == history(7)
    assert history(7) != history(8)
