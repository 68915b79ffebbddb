"""Which protocol versions go together, and what the roster says where they do not."""

import msgspec
import pytest

from dugnad.dht.messages import Hello, decode_message, encode_message
from dugnad.dht.protocol import OLDEST, PROTOCOL, Mismatch, Spoken, agree, spoken_by
from dugnad.dht.roster import RosterConfig, State

from .roster_cases import hello_of  # noqa: TID252  the tests are no installed package
from .roster_world import RUN, World, peer_id  # noqa: TID252  the world is no installed package


@pytest.mark.parametrize(
    ("ours", "theirs", "version"),
    [
        (Spoken(3, 4), Spoken(3, 4), 4),
        (Spoken(3, 4), Spoken(2, 3), 3),
        (Spoken(3, 4), Spoken(4, 5), 4),
        (Spoken(1, 1), Spoken(1, 2), 1),
    ],
)
def test_peers_with_a_common_version_speak_the_newest_of_them(
    ours: Spoken, theirs: Spoken, version: int
) -> None:
    assert agree(ours, theirs, "a", "b") == agree(theirs, ours, "b", "a") == version


def test_of_peers_two_versions_apart_the_older_one_is_told_to_update() -> None:
    ours, theirs = Spoken(3, 4), Spoken(1, 1)
    said = "peer old speaks protocol 1, peer new 3 to 4: update dugnad on old"
    assert agree(ours, theirs, "new", "old") == Mismatch(said, mine=False)
    assert agree(theirs, ours, "old", "new") == Mismatch(said, mine=True)


def test_this_release_speaks_at_most_the_version_before_its_own() -> None:
    assert 1 <= OLDEST <= PROTOCOL <= OLDEST + 1


def test_a_hello_that_names_no_oldest_version_or_a_wrong_one_speaks_only_its_own() -> None:
    assert spoken_by(2, 0) == spoken_by(2, 3) == spoken_by(2, 2) == Spoken(2, 2)
    assert spoken_by(2, 1) == Spoken(1, 2)


def test_a_hello_of_the_first_layout_is_understood_and_so_is_a_longer_one() -> None:
    hello = hello_of(1)
    rows = msgspec.msgpack.decode(encode_message(hello))
    for data in (rows[:-1], [*rows, "of a later release"]):
        read = decode_message(msgspec.msgpack.encode(data))
        assert isinstance(read, Hello)
        assert read.protocol == hello.protocol


def world_of(*spoken: Spoken) -> World:
    world = World(1)
    for number, one in enumerate(spoken):
        world.add(number, config=RosterConfig(RUN, "world", protocol=one.newest, oldest=one.oldest))
    for number in range(1, len(spoken)):
        world.introduce(number, 0)
    world.run(6.0)
    return world


def test_peers_one_version_apart_hear_each_other() -> None:
    world = world_of(Spoken(3, 4), Spoken(2, 3), Spoken(4, 5))
    live = {n: world.nodes[n].roster.live() for n in range(3)}
    assert live[0] == tuple(sorted((peer_id(1), peer_id(2))))
    assert live[1] == live[2] == (peer_id(0),), "2 to 3 and 4 to 5 have no version in common"
    assert world.nodes[0].roster.state(peer_id(1)).state is State.LIVE, "nor is its teller refused"


def test_an_older_and_a_newer_peer_both_say_which_of_them_is_to_be_updated() -> None:
    world = world_of(Spoken(3, 4), Spoken(1, 1))
    for number in (0, 1):
        state = world.nodes[number].roster.state(peer_id(1 - number))
        assert state.state is State.REFUSED
        assert "speaks protocol 1, peer" in state.reason
        assert "3 to 4: update dugnad on" in state.reason
