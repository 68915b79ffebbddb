"""Rosters of more peers than a mesh holds, together in an in-memory world under virtual time."""

import random

import msgspec
import pytest

from dugnad.dht.messages import Adverts, Gone, Talk, WantAdverts, sign_gone
from dugnad.dht.roster import RosterConfig, State
from dugnad.dht.roster_crowding import DOWN_S, FADE_S
from dugnad.dht.roster_crowdlife import SAY_S
from dugnad.dht.roster_events import (
    Bans,
    DuplicateIdentity,
    LeaveNow,
    MyAdvert,
    PeerChanged,
    PeerLeft,
    PeerLost,
    PeerUp,
)
from dugnad.dht.roster_members import DOUBT_S

from .crowd_world import (  # noqa: TID252  the world is no installed package
    SMALL,
    Ear,
    crowd,
    inject,
    living,
    lost,
    settle,
)
from .roster_world import RUN, FakeSigner, World  # noqa: TID252  the same

FAR_S = 2 * DOUBT_S


def test_eight_peers_with_a_mesh_of_four_see_each_other_over_a_few_streams_each() -> None:
    world = crowd(1, 8)
    world.run(20.0)
    assert world.agreed()
    assert all(node.roster.crowded for node in living(world))
    streams = [len(node.roster.neighbours()) for node in living(world)]
    assert min(streams) >= SMALL.links
    assert sum(streams) / 8 < 4.5, "a mesh would be 7 each"
    ups = [len(node.said(PeerUp)) for node in living(world)]
    assert ups == [7] * 8, "each was told of each other once, whatever streams came and went"
    assert not any(node.said(PeerLost) for node in living(world))


def test_who_has_no_stream_with_a_member_knows_its_advert_address_and_state() -> None:
    world = crowd(2, 8)
    world.run(10.0)
    one = world.nodes[7]
    far = next(p for p in one.roster.live() if p not in one.roster.neighbours())
    advert = one.roster.advert(far)
    assert advert is not None
    assert advert.peer == far
    assert one.roster.addresses(far) == advert.addresses
    assert one.roster.state(far).state is State.INDIRECT
    assert far in one.roster.known()


def test_a_mesh_that_is_not_full_says_nothing_of_crowds() -> None:
    world = World(3)
    ear = Ear(world)
    for name in range(4):
        world.add(name, config=SMALL)
        if name:
            world.introduce(name, 0)
    world.run(8.0)
    assert world.agreed()
    assert not any(isinstance(one, Talk | WantAdverts | Adverts) for one in ear.heard)
    assert not any(node.roster.crowded for node in living(world))


def test_without_links_a_full_mesh_refuses_newcomers_as_ever() -> None:
    world = World(3)
    config = RosterConfig(RUN, "world 1", mesh_max=3)
    for name in range(4):
        world.add(name, config=config)
        if name:
            world.introduce(name, 0)
            world.run(2.0)
    assert len(world.nodes[0].roster.live()) == 2
    assert world.nodes[3].roster.state(world.nodes[0].peer).state is State.REFUSED


@pytest.mark.parametrize("quietly", [False, True])
def test_a_killed_member_is_lost_to_all_and_nobody_else_is(quietly: bool) -> None:
    world = crowd(4, 8)
    world.run(10.0)
    world.kill(0, quietly=quietly)
    settle(world, 20.0 + FAR_S)
    assert len(lost(world, 0)) == 7
    assert not any(lost(world, name) for name in range(1, 8))


def test_a_good_bye_reaches_members_without_a_stream() -> None:
    world = crowd(5, 8)
    world.run(10.0)
    world.feed(world.nodes[3], LeaveNow())
    world.run(0.2)
    world.kill(3)
    settle(world, 5.0)
    assert [len(node.said(PeerLeft)) for node in living(world)] == [1] * 7
    assert not lost(world, 3)


def test_a_member_that_starts_anew_is_told_to_all_as_lost_and_back() -> None:
    world = crowd(6, 7)
    world.kill(4)
    world.run(0.5)
    world.add(4, config=SMALL)
    world.introduce(4, 1)
    settle(world, 20.0)
    world.run(FAR_S)
    assert world.agreed()
    for node in living(world):
        if node.machine != 4:
            told = [type(a) for _, a in node.log if getattr(a, "peer", None) == world.nodes[4].peer]
            told = [kind for kind in told if kind in (PeerUp, PeerLost)]
            assert told == [PeerUp, PeerLost, PeerUp]


def test_what_changes_in_an_advert_reaches_all_within_a_minute() -> None:
    world = crowd(7, 6)
    world.run(SAY_S)
    node = world.nodes[2]
    changed = msgspec.structs.replace(node.roster.my_advert, tokens_per_s=77.0)
    world.feed(node, MyAdvert(changed))
    world.run(SAY_S + 10.0)
    for other in living(world):
        advert = other.roster.advert(node.peer)
        assert advert is not None
        assert advert.tokens_per_s == 77.0
        assert other is node or other.said(PeerChanged)
    assert not lost(world, 2)


def test_adverts_are_asked_for_where_a_rumour_came_first() -> None:
    world = crowd(8, 7)
    world.run(5.0)
    ear = Ear(world)
    world.add(7, config=SMALL)
    world.introduce(7, 4)
    settle(world, 10.0)
    assert any(isinstance(one, WantAdverts) for one in ear.heard)
    given = [a.peer for one in ear.heard if isinstance(one, Adverts) for a in one.adverts]
    newcomer = world.nodes[7].peer
    assert 1 <= given.count(newcomer) <= 7, "nobody is sent it twice"


def test_members_behind_nat_are_seen_by_all_and_dialled_by_none() -> None:
    world = crowd(9, 8, outbound=2)
    world.run(20.0)
    assert world.agreed()
    assert not any(lost(world, name) for name in (6, 7))
    assert all(len(world.nodes[name].roster.neighbours()) >= 1 for name in (6, 7))


def test_few_that_are_left_are_a_mesh_again_and_nobody_was_lost_by_that() -> None:
    world = crowd(10, 6)
    for name in (5, 4, 3):
        world.feed(world.nodes[name], LeaveNow())
        world.run(0.2)
        world.kill(name)
    settle(world, 10.0)
    world.run(DOWN_S + FADE_S + 5.0)
    assert world.agreed()
    assert not any(node.roster.crowded for node in living(world))
    assert [world.streams_between(*pair) for pair in ((0, 1), (0, 2), (1, 2))] == [1] * 3
    assert not any(node.said(PeerLost) for node in living(world))
    world.add(6, config=SMALL)
    world.add(7, config=SMALL)
    for name in (6, 7):
        world.introduce(name, 0)
    settle(world, 20.0)
    assert all(node.roster.crowded for node in living(world)), "and a crowd when more come"


def chaos(seed: int) -> None:
    """Four things that happen to a crowd; after each all views are to be the truth."""
    rng = random.Random(seed)
    world = crowd(seed, rng.randint(7, 10))
    newest = len(world.nodes)
    for _ in range(4):
        names = [node.machine for node in living(world)]
        what = rng.choice(("kill", "join", "halves", "alone", "streams", "hang"))
        if what == "kill" and len(names) > 6:
            world.kill(rng.choice(names), quietly=rng.random() < 0.5)
        elif what in ("halves", "alone"):
            rng.shuffle(names)
            cut = len(names) // 2 if what == "halves" else 1
            for one in names[:cut]:
                for other in names[cut:]:
                    world.cut(one, other)
            world.run(rng.choice((5.0, 40.0)))
            world.heal()
        elif what == "streams":
            world.cut_streams(rng.choice(names))
        elif what == "hang":
            world.hang(rng.choice(names), 12.0)
            world.run(12.0)
        else:
            world.add(newest, config=SMALL)
            world.introduce(newest, rng.choice(names))
            newest += 1
        world.run(1.0)
        settle(world, 180.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_whatever_befalls_a_crowd_its_members_end_with_one_true_view(seed: int) -> None:
    chaos(seed)


# --- what a member that lies can do


def test_a_member_falsely_called_gone_by_another_is_lost_to_nobody() -> None:
    world = crowd(11, 8)
    world.run(10.0)
    victim, liar = world.nodes[2], world.nodes[7]
    before = victim.roster.my_advert.incarnation
    word = sign_gone(victim.peer, before, FakeSigner(liar.peer), RUN)
    inject(world, 7, Talk(0, 10, 0, b"", (word,)))
    world.run(3 * DOUBT_S)
    assert victim.roster.my_advert.incarnation > before, "it heard of it and said otherwise"
    assert not lost(world, 2)
    assert world.agreed()


def test_a_loss_that_is_not_signed_by_its_teller_changes_nothing() -> None:
    world = crowd(12, 8)
    world.run(10.0)
    victim = world.nodes[2]
    before = victim.roster.my_advert.incarnation
    forged = sign_gone(victim.peer, before, FakeSigner(world.nodes[7].peer), RUN)
    for by in (victim.peer, world.nodes[5].peer):
        inject(world, 7, Talk(0, 10, 0, b"", (msgspec.structs.replace(forged, by=by),)))
    inject(world, 7, Talk(0, 10, 0, b"", (Gone(victim.peer, before, world.nodes[7].peer),)))
    world.run(3 * DOUBT_S)
    assert victim.roster.my_advert.incarnation == before
    assert not lost(world, 2)


def test_of_one_liar_few_accusations_are_heard_in_a_minute() -> None:
    world = crowd(13, 8)
    world.run(10.0)
    liar = world.nodes[7]
    victims = [node for node in living(world) if node is not liar]
    for _ in range(4):
        for victim in victims:
            incarnation = victim.roster.my_advert.incarnation
            word = sign_gone(victim.peer, incarnation, FakeSigner(liar.peer), RUN)
            inject(world, 7, Talk(0, 10, 0, b"", (word,)))
        world.run(2.0)
    world.run(2 * DOUBT_S)
    assert not any(lost(world, victim.machine) for victim in victims)
    assert world.agreed()


def test_invented_members_are_asked_for_and_never_seen() -> None:
    world = crowd(14, 8)
    world.run(10.0)
    ear = Ear(world)
    rows = b"".join(random.Random(1).randbytes(8) + (3_600_000_000).to_bytes(4) for _ in range(99))
    inject(world, 5, Talk(0, 200, 0, rows))
    world.run(10.0)
    assert any(isinstance(one, WantAdverts) for one in ear.heard)
    assert world.agreed()
    spoken = b"".join(one.here for one in ear.heard[1:] if isinstance(one, Talk))
    assert rows[:8] not in spoken.replace(rows, b""), "nobody passes on what nobody proved"


# --- who is refused


def test_a_banned_member_counts_no_more_wherever_it_is_and_again_when_it_may() -> None:
    world = crowd(15, 8)
    world.run(5.0)
    one = world.nodes[1]
    far = next(p for p in one.roster.live() if p not in one.roster.neighbours())
    near = one.roster.neighbours()[0]
    world.feed(one, Bans({far: "floods", near: "floods"}))
    assert not {far, near} & set(one.roster.live())
    assert sum(isinstance(said, PeerLost) for _, said in one.log) == 2
    world.run(30.0)
    assert not {far, near} & set(one.roster.live())
    world.feed(one, Bans({}))
    settle(world, 30.0)


def test_two_daemons_with_one_key_are_found_out_though_no_peer_meets_both() -> None:
    world = crowd(16, 8)
    world.run(10.0)
    world.add(8, identity=3, config=SMALL)
    far = next(n for n in living(world) if world.nodes[3].peer not in n.roster.neighbours())
    world.introduce(8, far.machine)
    world.run(10.0)
    told = [said for node in living(world) for _, said in node.said(DuplicateIdentity)]
    assert told
