"""The organiser's word: who may say it, what replaces what, and what a core does about it."""

import hashlib

import msgspec
import pytest

from dugnad.averaging.orders import (
    BANS_MAX,
    NOTHING,
    ORDERS_BYTES_MAX,
    REASON_CHARS_MAX,
    Ban,
    OrderError,
    Orders,
    banned,
    judge,
    read_orders,
    sign_orders,
    stopped,
    unbanned,
)
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.records import RecordError, encode

ORGANISER = Identity.ephemeral(b"o" * 32)
OTHER = Identity.ephemeral(b"x" * 32)
RUN = RunId(hashlib.sha256(b"a run").digest())
PEER = PeerId(b"p" * 32)


def test_orders_that_the_organiser_signed_are_read_as_they_were_written() -> None:
    orders = sign_orders(banned(stopped(NOTHING, "done", 5), PEER, "floods", 5), RUN, ORGANISER)
    assert orders.number == 6
    assert read_orders(encode(orders), RUN, ORGANISER.peer) == orders
    assert orders.stop == "done"
    assert orders.ban_of(PEER) == "floods"
    assert orders.ban_of(b"q" * 32) is None


def test_orders_of_somebody_else_another_run_or_with_a_changed_word_are_refused() -> None:
    good = sign_orders(stopped(NOTHING, "done", 5), RUN, ORGANISER)
    for forged in (
        sign_orders(good, RUN, OTHER),
        sign_orders(good, RunId(b"r" * 32), ORGANISER),
        msgspec.structs.replace(good, stop="else"),
        msgspec.structs.replace(good, number=good.number + 1),
    ):
        with pytest.raises(RecordError, match="not signed by the organiser"):
            read_orders(encode(forged), RUN, ORGANISER.peer)


@pytest.mark.parametrize(
    ("orders", "why"),
    [
        (Orders(), "without a number"),
        (Orders(1, "a\nb"), "control"),
        (Orders(1, "", (Ban(PEER, "x"), Ban(PEER, "y"))), "not in order"),
        (Orders(1, "", (Ban(PEER, ""),)), "without a reason"),
    ],
)
def test_malformed_orders_are_refused_even_when_signed(orders: Orders, why: str) -> None:
    with pytest.raises(RecordError, match=why):
        read_orders(encode(sign_orders(orders, RUN, ORGANISER)), RUN, ORGANISER.peer)


def test_anything_else_is_refused_within_its_bound() -> None:
    for data in (b"", b"\xc1", bytes(ORDERS_BYTES_MAX + 1), encode([1, "", [], b"", 2])):
        with pytest.raises(RecordError):
            read_orders(data, RUN, ORGANISER.peer)


def test_only_a_higher_number_replaces_what_is_held() -> None:
    first, second = Orders(1, "a"), Orders(2, "b")
    assert judge(first, second) == ""
    assert "newer" in judge(second, first)
    assert "already" in judge(first, first)
    assert "two orders" in judge(first, Orders(1, "c"))


def test_numbers_rise_even_when_the_clock_stands_still() -> None:
    orders = stopped(NOTHING, "a", 100)
    for _ in range(3):
        after = banned(orders, PEER, "b", 0)
        assert after.number == orders.number + 1
        assert after.stop == "a", "a ban leaves the stop as it is"
        orders = after


def test_a_ban_is_lifted_once() -> None:
    orders = unbanned(banned(NOTHING, PEER, "b", 1), PEER, 1)
    assert orders.bans == ()
    with pytest.raises(OrderError, match="not banned"):
        unbanned(orders, PEER, 1)


def test_the_largest_record_fits_and_one_ban_more_is_refused() -> None:
    orders = stopped(NOTHING, "\U0001f600" * REASON_CHARS_MAX, 1 << 61)
    for number in range(BANS_MAX):
        peer = PeerId(hashlib.sha256(bytes([number])).digest())
        orders = banned(orders, peer, "\U0001f600" * REASON_CHARS_MAX, 0)
    data = encode(sign_orders(orders, RUN, ORGANISER))
    assert read_orders(data, RUN, ORGANISER.peer).bans == orders.bans
    with pytest.raises(OrderError, match="already"):
        banned(orders, PEER, "one more", 0)


@pytest.mark.parametrize("reason", ["", "  ", "x" * (REASON_CHARS_MAX + 1), "a\u202eb"])
def test_a_reason_that_nobody_could_read_is_refused(reason: str) -> None:
    with pytest.raises(OrderError):
        stopped(NOTHING, reason, 1)
