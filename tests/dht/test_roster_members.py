"""Members of a crowd by slot: proofs, doubts, accusers, and slots that are used again."""

import msgspec
import pytest

from dugnad.dht.advert import Advert
from dugnad.dht.messages import Gone
from dugnad.dht.records import RecordError
from dugnad.dht.roster_members import (
    ACCUSATIONS_MAX,
    ACCUSED_S,
    GONE_KEPT_S,
    INCARNATION_MAX,
    MEMBERS_MAX,
    Members,
)
from dugnad.dht.roster_orders import Orders
from dugnad.dht.roster_rumours import ORDER_BITS, ORDER_MASK, rumour
from dugnad.dht.roster_wants import ANSWER_S, Wants, tags_of

from .roster_world import peer_id  # noqa: TID252  the tests are no installed package


def advert(number: int, incarnation: int = 5, seq: int = 1, **more: object) -> Advert:
    plain = Advert(peer=peer_id(number), boot=1, incarnation=incarnation, seq=seq)
    return msgspec.structs.replace(plain, **more)


def table() -> Members:
    return Members(peer_id(0))


def test_the_newest_advert_of_a_member_counts() -> None:
    members = table()
    slot = members.proven(advert(1))
    assert members.proven(advert(1, seq=3)) == slot
    assert members.proven(advert(1, seq=2)) == slot
    member = members.get(slot)
    assert member is not None
    assert (member.advert.seq, member.order) == (3, 10)


def test_a_higher_incarnation_undoes_a_loss_and_a_newer_seq_does_not() -> None:
    members = table()
    slot = members.proven(advert(1))
    assert slot is not None
    members.end(slot, Gone(peer_id(1), 5, peer_id(2)), 10.0, 4.0)
    members.proven(advert(1, seq=9))
    member = members.get(slot)
    assert member is not None
    assert member.order == 11
    assert (member.stands(13.9), member.stands(14.0)) == (True, False)
    assert members.settled(14.0) == [slot]
    members.proven(advert(1, incarnation=6))
    assert member.order == 12
    assert member.stands(99.0)


def test_of_one_accuser_only_so_many_accusations_are_heard_in_a_minute() -> None:
    members = table()
    members.proven(advert(1))
    heard = [members.may_accuse(peer_id(1), 100.0 + n) for n in range(ACCUSATIONS_MAX + 3)]
    assert heard == [True] * ACCUSATIONS_MAX + [False] * 3
    assert members.may_accuse(peer_id(1), 100.0 + ACCUSED_S)
    assert not members.may_accuse(peer_id(2), 0.0), "who never proved itself accuses nobody"


def test_members_long_gone_give_their_slots_back() -> None:
    members = table()
    slot = members.proven(advert(1))
    assert slot is not None
    members.end(slot, Gone(peer_id(1), 5, peer_id(1)), 10.0, 0.0)
    assert members.sweep(10.0 + GONE_KEPT_S - 1) == []
    assert members.sweep(10.0 + GONE_KEPT_S, used={slot}) == []
    assert members.sweep(10.0 + GONE_KEPT_S) == [slot]
    assert members.of(peer_id(1)) is None
    assert members.proven(advert(2)) == slot


def test_there_is_an_end_to_members_and_to_incarnations() -> None:
    members = table()
    assert members.proven(advert(1, incarnation=INCARNATION_MAX + 1)) is None
    for number in range(1, MEMBERS_MAX + 1):
        assert members.proven(advert(number)) is not None
    assert members.proven(advert(MEMBERS_MAX + 1)) is None
    assert members.proven(advert(1, incarnation=6)) is not None, "but one that is known goes on"


def test_two_keys_that_start_alike_do_not_pass_for_one_another() -> None:
    members = table()
    members.proven(advert(1))
    twin = type(peer_id(1))(peer_id(1)[:8] + bytes(24))
    assert members.proven(msgspec.structs.replace(advert(1), peer=twin)) is None
    assert members.of(twin) is None
    with pytest.raises(RecordError, match="start alike"):
        members.slots.of(twin)


def test_orders_grow_with_their_slots_and_show_the_live_in_turn() -> None:
    orders = Orders()
    orders.reach(100)
    for slot, order in ((3, 2), (50, 5), (100, 8)):
        orders.table[slot] = order
    orders.count = 2
    assert orders.live() == [rumour(3, 2), rumour(100, 8)]
    assert [code >> ORDER_BITS for code in orders.shown(1)] == [3]
    assert [code & ORDER_MASK for code in orders.shown(1)] == [8]
    orders.forget(100)
    assert (orders.of(100), orders.of(10_000), orders.count) == (0, 0, 1)


def test_one_request_at_a_time_goes_to_a_neighbour_and_none_for_what_another_was_asked() -> None:
    wants = Wants()
    tags = [bytes([n]) * 8 for n in range(70)]
    for tag in tags:
        wants.want(1, tag, news=True)
    first = tags_of(wants.request(1, 0.0))
    assert first == tags[:64]
    assert wants.request(1, 1.0) == b""
    wants.want(2, tags[0], news=False)
    wants.want(2, tags[69], news=False)
    assert tags_of(wants.request(2, 1.0)) == [tags[69]]
    assert set(wants.answered(1)) == set(tags[:64])
    assert tags_of(wants.request(1, 2.0)) == tags[64:69], "70 is under way from the other"
    wants.keep({1}, 2.0 + ANSWER_S)
    assert list(wants.deadlines()) == []
