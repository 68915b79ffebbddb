"""Who is here, as an observer sees it: by answers, and by who is named in them."""

from dugnad.dht.advert import Advert
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId
from dugnad.peer.sightings import (
    ASK_S,
    GIVE_UP_S,
    HERE_S,
    PEERS_MAX,
    Came,
    Known,
    Named,
    Sightings,
    Silent,
    Tick,
    Told,
    Went,
)

A, B, C = (Identity.ephemeral(bytes([n]) * 32).peer for n in (1, 2, 3))


def advert(peer: PeerId, seq: int = 1, name: str = "") -> Advert:
    places = ("/ip4/1.2.3.4/tcp/1",) if peer == A else ()
    return Advert(peer=peer, boot=1, incarnation=1, seq=seq, name=name, addresses=places)


def test_who_answers_and_whom_it_names_are_here() -> None:
    seen = Sightings()
    assert seen.handle(Known(A), 0.0) == []
    assert seen.handle(Named((advert(C),)), 0.0) == []
    assert seen.handle(Told(A, (advert(A), advert(B))), 1.0) == [Came(A), Came(B)]
    assert seen.here() == sorted([A, B])
    assert seen.answering() == [A]
    assert seen.handle(Told(A, (advert(A), advert(B))), 2.0) == []


def test_a_killed_peer_is_gone_when_it_is_silent_and_nobody_names_it() -> None:
    seen = Sightings()
    seen.handle(Told(A, (advert(A), advert(B))), 1.0)
    seen.handle(Told(B, (advert(B), advert(A))), 1.0)
    assert seen.handle(Silent(B, "the connection ended"), 2.0) == []  # A may still see it
    assert seen.handle(Told(A, (advert(A),)), 3.0) == [Went(B, False, "the connection ended")]
    assert seen.handle(Told(B, (advert(B),)), 4.0) == [Came(B)]


def test_who_said_good_bye_has_left() -> None:
    seen = Sightings()
    seen.handle(Told(A, (advert(A), advert(B))), 1.0)
    assert seen.handle(Told(A, (advert(A),), (B,)), 2.0) == [Went(B, True, "")]


def test_the_last_words_of_a_silent_peer_hold_nobody_here() -> None:
    seen = Sightings()
    seen.handle(Told(A, (advert(A), advert(B))), 1.0)
    gone = seen.handle(Silent(A, "no route"), 2.0)
    assert gone == [Went(A, False, "no route"), Went(B, False, "no peer names it any more")]


def test_answers_count_for_a_time_only() -> None:
    seen = Sightings()
    seen.handle(Told(A, (advert(A),)), 1.0)
    assert seen.handle(Tick(), HERE_S) == []
    assert seen.handle(Tick(), HERE_S + 1.0) == [Went(A, False, "no peer names it any more")]


def test_of_two_adverts_the_newer_is_shown() -> None:
    seen = Sightings()
    seen.handle(Named((advert(A, 2, "new"), advert(A, 1, "old"))), 0.0)
    found = seen.peers[A].advert
    assert found is not None
    assert found.name == "new"


def test_peers_are_asked_in_turn_and_silent_ones_ever_less() -> None:
    seen = Sightings()
    for peer in (A, B, C):
        seen.handle(Known(peer), 0.0)
    first = seen.due(0.0, 2)
    assert len(first) == 2
    (third,) = seen.due(0.0, 2)
    assert {*first, third} == {A, B, C}
    assert seen.due(ASK_S - 0.1, 3) == []
    seen.handle(Silent(A, "x"), 1.0)
    assert seen.due(ASK_S, 3) == sorted([B, C])
    assert seen.due(1.0 + 2 * ASK_S, 1) == [A]
    assert A in seen.due(GIVE_UP_S + 10.0, 3)  # nobody else is here
    seen.handle(Told(B, (advert(B),)), GIVE_UP_S + 11.0)
    assert A not in seen.due(GIVE_UP_S + 80.0, 3)


def test_who_takes_no_connections_is_not_asked() -> None:
    seen = Sightings()
    seen.handle(Told(A, (advert(A), advert(B))), 1.0)
    assert seen.due(10.0, 3) == [A]


def test_made_up_keys_push_out_only_who_is_gone() -> None:
    seen = Sightings()
    seen.handle(Told(A, (advert(A),)), 1.0)
    for n in range(PEERS_MAX + 5):
        seen.handle(Known(PeerId(n.to_bytes(32, "big"))), 2.0)
    assert len(seen.peers) == PEERS_MAX
    assert seen.here() == [A]
