"""The roster, alone in an in-memory world: what it refuses, and what it bounds."""

import hashlib

import msgspec
import pytest

from dugnad.dht.advert import decode_advert
from dugnad.dht.ids import RunId
from dugnad.dht.messages import AdvertUpdate, AliveNotice, Ping
from dugnad.dht.protocol import PROTOCOL
from dugnad.dht.roster import MESH_MAX, RosterConfig, State
from dugnad.dht.roster_events import (
    Bans,
    CloseStream,
    Dial,
    DialFailed,
    GarbageIn,
    Known,
    MessageIn,
    PeerLost,
    PeerUp,
    StreamDown,
    StreamUp,
    Timer,
)
from dugnad.dht.roster_table import PEERS_MAX, STREAMS_PER_PEER_MAX

from .roster_cases import connect, hello_of, lone_roster, losses, only, refusals  # noqa: TID252  the tests are no installed package
from .roster_world import (  # noqa: TID252  the world is no installed package
    RUN,
    WALL_START_MS,
    World,
    mesh,
    peer_id,
)


def test_a_peer_of_another_run_is_refused_and_both_see_why() -> None:
    world = World(1)
    world.add(0)
    world.add(1, config=RosterConfig(RunId(hashlib.sha256(b"other").digest()), "world 1"))
    world.introduce(1, 0)
    world.run(5.0)
    for name in (0, 1):
        state = world.nodes[name].roster.state(peer_id(1 - name))
        assert state.state is State.REFUSED
        assert "another run" in state.reason


def test_a_peer_two_protocols_on_is_refused_by_number() -> None:
    world = World(1)
    world.add(0)
    world.add(1, config=RosterConfig(RUN, "world 2", protocol=PROTOCOL + 2, oldest=PROTOCOL + 1))
    world.introduce(1, 0)
    world.run(5.0)
    for name in (0, 1):
        state = world.nodes[name].roster.state(peer_id(1 - name))
        assert state.state is State.REFUSED
        assert "protocol" in state.reason


def test_only_admitted_peers_are_served() -> None:
    roster = lone_roster(RosterConfig(RUN, "test", admitted=frozenset({peer_id(1)})))
    actions = roster.handle(StreamUp(peer_id(2), 1, outgoing=False), 0.0)
    assert refusals(actions)[0].code == "admission"
    assert only(CloseStream, actions)
    assert only(PeerUp, connect(roster, 1, 2, 0.0))
    assert roster.handle(Known(peer_id(3), ("/ip4/10.0.0.3/tcp/1",)), 0.0) == []


def test_a_flooding_peer_is_closed_with_a_reason_and_not_served_for_a_while() -> None:
    roster = lone_roster()
    connect(roster, 1, 1, 0.0)
    answers = 0
    for number in range(1000):
        actions = roster.handle(MessageIn(peer_id(1), 1, Ping(number, 0)), 0.001 * number)
        answers += 1
        if refusals(actions):
            break
    assert answers < 300
    assert refusals(actions)[0].code == "flood"
    assert only(PeerLost, actions)
    again = roster.handle(StreamUp(peer_id(1), 2, outgoing=False), 10.0)
    assert refusals(again)[0].code == "flood"
    assert only(PeerUp, connect(roster, 1, 3, 70.0))


def test_usual_traffic_is_no_flood() -> None:
    world = mesh(1, 8)
    world.run(5.0)
    assert not losses(world)


def test_garbage_a_second_hello_and_a_message_before_hello_end_the_connection() -> None:
    for event in (
        GarbageIn(peer_id(1), 1, "not a control message"),
        MessageIn(peer_id(1), 1, hello_of(1)),
    ):
        roster = lone_roster()
        connect(roster, 1, 1, 0.0)
        assert refusals(roster.handle(event, 1.0))[0].code == "garbage"
        assert roster.live() == ()
    roster = lone_roster()
    roster.handle(StreamUp(peer_id(1), 1, outgoing=False), 0.0)
    assert refusals(roster.handle(MessageIn(peer_id(1), 1, Ping(1, 1)), 0.1))[0].code == "garbage"


def test_a_hello_with_a_forged_or_foreign_advert_is_refused() -> None:
    for hello in (
        hello_of(2),
        msgspec.structs.replace(hello_of(1), boot=6),
        msgspec.structs.replace(hello_of(1), advert=b"\xc1"),
        msgspec.structs.replace(hello_of(1), advert=hello_of(1).advert[:-1] + b"\x00"),
    ):
        roster = lone_roster()
        roster.handle(StreamUp(peer_id(1), 1, outgoing=False), 0.0)
        actions = roster.handle(MessageIn(peer_id(1), 1, hello), 0.1)
        assert refusals(actions)[0].code == "advert"
        assert not only(PeerUp, actions)


def test_an_advert_update_that_is_not_signed_by_its_peer_ends_the_connection() -> None:
    roster = lone_roster()
    connect(roster, 1, 1, 0.0)
    known = roster.advert(peer_id(1))
    assert known is not None
    forged = msgspec.structs.replace(known, seq=99, tokens_per_s=1e9)
    actions = roster.handle(MessageIn(peer_id(1), 1, AdvertUpdate(forged)), 1.0)
    assert refusals(actions)[0].code == "advert"


def test_a_stream_without_a_hello_is_closed() -> None:
    roster = lone_roster()
    roster.handle(StreamUp(peer_id(1), 1, outgoing=False), 0.0)
    assert roster.deadline == 5.0
    assert only(CloseStream, roster.handle(Timer(WALL_START_MS), 5.0))


def test_streams_per_peer_and_peers_with_streams_are_bounded() -> None:
    roster = lone_roster()
    connect(roster, 0, 0, 0.0)
    for stream in range(1, 9):
        closed = only(CloseStream, roster.handle(StreamUp(peer_id(0), stream, False), 0.0))
        assert [close.stream for close in closed] == ([stream - 2] if stream >= 3 else [])
    for number in range(1, MESH_MAX - 1):
        assert not refusals(roster.handle(StreamUp(peer_id(number), 10 + number, False), 0.0))
    refused = refusals(roster.handle(StreamUp(peer_id(MESH_MAX), 999, False), 0.0))
    assert "mesh is full" in refused[0].reason


@pytest.mark.slow
def test_the_table_is_bounded_and_a_flood_of_names_does_not_push_out_the_seed() -> None:
    roster = lone_roster()
    for number in range(PEERS_MAX + 50):
        roster.handle(Known(peer_id(number), ("/ip4/10.0.0.1/tcp/1",)), 0.001 * number)
    assert len(roster.known()) == PEERS_MAX
    assert peer_id(0) in roster.known()


def test_dials_under_way_are_bounded() -> None:
    roster = lone_roster()
    dials = 0
    for number in range(100):
        dials += len(
            only(Dial, roster.handle(Known(peer_id(number), ("/ip4/1.1.1.1/tcp/1",)), 0.0))
        )
    assert dials == 16


def test_a_stream_that_ends_before_its_hello_is_tried_again() -> None:
    roster = lone_roster()
    roster.handle(Known(peer_id(1), ("/ip4/10.0.0.1/tcp/1",)), 0.0)
    roster.handle(StreamUp(peer_id(1), 1, outgoing=True), 0.1)
    roster.handle(StreamDown(peer_id(1), 1, "reset"), 0.2)
    assert roster.deadline is not None
    assert only(Dial, roster.handle(Timer(WALL_START_MS), roster.deadline))


def test_events_for_forgotten_streams_are_harmless() -> None:
    roster = lone_roster()
    assert roster.handle(StreamDown(peer_id(1), 7, "end"), 0.0) == []
    assert roster.handle(MessageIn(peer_id(1), 7, Ping(1, 1)), 0.0) == []
    assert roster.handle(DialFailed(peer_id(1), "no"), 0.0) == []
    assert roster.state(peer_id(1)).state is State.UNKNOWN


# --- clocks and sameness


def test_a_banned_peer_is_closed_with_the_reason_and_served_again_when_the_ban_is_lifted() -> None:
    roster = lone_roster()
    connect(roster, 1, 1, 0.0)
    connect(roster, 2, 2, 0.0)
    actions = roster.handle(Bans({peer_id(1): "banned by the organiser: floods"}), 1.0)
    assert refusals(actions)[0].reason == "banned by the organiser: floods"
    assert [lost.peer for lost in only(PeerLost, actions)] == [peer_id(1)]
    assert roster.live() == (peer_id(2),)
    again = roster.handle(StreamUp(peer_id(1), 3, outgoing=False), 2.0)
    assert refusals(again)[0].reason == "banned by the organiser: floods"
    told = MessageIn(peer_id(2), 2, AliveNotice(decode_advert(hello_of(1).advert)))
    assert not refusals(roster.handle(told, 3.0)), "who still hears it may"
    assert roster.live() == (peer_id(2),)
    roster.handle(Bans({}), 4.0)
    assert only(PeerUp, connect(roster, 1, 4, 5.0))


def test_one_stream_too_many_takes_the_place_of_the_stalest_and_nobody_is_refused() -> None:
    # three streams of a pair at once made the pair refuse each other for a minute
    roster = lone_roster()
    for number in range(1, STREAMS_PER_PEER_MAX + 1):
        assert not refusals(connect(roster, 1, number, 0.1 * number))
    actions = roster.handle(StreamUp(peer_id(1), 99, outgoing=False), 1.0)
    assert not refusals(actions)
    assert [closed.stream for closed in only(CloseStream, actions)] == [1]
    assert roster.state(peer_id(1)).state is State.LIVE
