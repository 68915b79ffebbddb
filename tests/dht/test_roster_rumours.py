"""Rumours of a crowd as bytes: what comes back, sizes told beforehand, and what is refused."""

import hashlib

import pytest

from dugnad.dht.ids import PeerId
from dugnad.dht.records import RecordError, encode
from dugnad.dht.roster_rumours import (
    RUMOURS_MAX,
    CrowdMessage,
    Full,
    Greet,
    Rumours,
    Slots,
    Sync,
    TablePart,
    decode_crowd,
    encode_crowd,
    rumour,
    size_of,
)

INCARNATION = 300_000_000


def named(count: int) -> Slots:
    slots = Slots()
    for number in range(count):
        assert slots.of(PeerId(hashlib.sha256(b"%d" % number).digest())) == number
    return slots


def codes(count: int, odd: int = 3) -> tuple[int, ...]:
    """Rumours of which each third says that somebody is gone, live ones first as on the wire."""
    orders = [2 * INCARNATION + (one % odd == 0) for one in range(count)]
    found = [rumour(one, order) for one, order in enumerate(orders)]
    return tuple(sorted(found, key=lambda code: code & 1))


MESSAGES: list[CrowdMessage] = [
    Rumours(()),
    Rumours(codes(1)),
    Rumours(codes(9)),
    Rumours(codes(100)),
    Rumours(codes(RUMOURS_MAX)),
    Greet(2 * INCARNATION, wants_table=True),
    Greet(2 * INCARNATION, wants_table=False),
    TablePart(codes(RUMOURS_MAX, odd=RUMOURS_MAX), last=True),
    TablePart((), last=False),
    Sync(codes(32)),
    Full(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: type(one).__name__)
def test_a_message_comes_back_and_its_size_is_known_without_encoding(message: CrowdMessage) -> None:
    slots = named(RUMOURS_MAX)
    data = encode_crowd(message, slots)
    assert decode_crowd(data, slots) == message
    assert len(data) == size_of(message)


def test_a_peer_that_is_gone_and_was_never_named_is_left_out() -> None:
    data = encode_crowd(Rumours(codes(9)), named(9))
    assert len(decode_crowd(data, named(1)).codes) == 7  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ((9, 0, b"", b""), "not a valid"),
        ((0, 0, bytes(35), b""), "cut short"),
        ((0, 0, b"", bytes(13)), "cut short"),
        ((0, 0, bytes(36), b""), "order of one that is gone"),
        ((0, 0, bytes(35) + b"\1", b""), "order of one that is gone"),
        ((0, 0, b"", bytes(12)), "order of a live one"),
        ((0, 0, bytes(36), bytes(12 * RUMOURS_MAX)), "more than"),
        ((0, 0, bytes(37 * RUMOURS_MAX), b""), "not a valid"),
        ("text", "not a valid"),
    ],
)
def test_bytes_that_are_no_message_are_refused_with_the_reason(body: object, reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        decode_crowd(encode(body), named(0))


def test_two_keys_that_start_alike_are_not_mixed_up() -> None:
    slots = named(1)
    with pytest.raises(RecordError, match="start alike"):
        slots.of(PeerId(slots.peer(0)[:8] + bytes(24)))
