"""Control messages: small, and nothing foreign gets past the decoder."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dugnad.dht.advert import ADVERT_BYTES_MAX, Advert
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.messages import (
    MESSAGE_BYTES_MAX,
    PEERS_KNOWN_MAX,
    AdvertUpdate,
    AliveNotice,
    Hello,
    Leaving,
    LostNotice,
    Message,
    PeersKnown,
    Ping,
    Pong,
    Refused,
    WhoSees,
    decode_message,
    encode_message,
    refused,
)
from dugnad.dht.records import RecordError

PEER = PeerId(bytes(32))
ADVERT = Advert(peer=PEER, boot=1, signature=bytes(64))
MESSAGES: list[Message] = [
    Hello(RunId(bytes(32)), 1, "dugnad 0.1", 5, 6, b"advert", 7),
    Ping(1, 2),
    Pong(1, 2),
    AdvertUpdate(ADVERT),
    PeersKnown((ADVERT,), complete=True),
    LostNotice(PEER, 3, PEER),
    AliveNotice(ADVERT),
    WhoSees(PEER),
    Leaving(PEER, 3),
    Refused("run", "another run"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_each_message_survives_the_wire(message: Message) -> None:
    assert decode_message(encode_message(message)) == message


def test_a_full_exchange_of_the_longest_adverts_fits_a_frame() -> None:
    spare = ADVERT_BYTES_MAX - len(msgspec.msgpack.encode(ADVERT))
    parts = [f"/dns4/{'x' * (spare // 6)}{n}" for n in range(5)]
    longest = msgspec.structs.replace(ADVERT, addresses=tuple(parts))
    assert ADVERT_BYTES_MAX - 200 < len(msgspec.msgpack.encode(longest)) <= ADVERT_BYTES_MAX
    message = PeersKnown((longest,) * PEERS_KNOWN_MAX)
    assert len(encode_message(message)) <= MESSAGE_BYTES_MAX
    assert decode_message(encode_message(message)) == message


def test_too_many_adverts_too_long_frames_and_unknown_tags_are_refused() -> None:
    with pytest.raises(RecordError):
        decode_message(encode_message(PeersKnown((ADVERT,) * (PEERS_KNOWN_MAX + 1))))
    with pytest.raises(RecordError, match="at most"):
        decode_message(bytes(MESSAGE_BYTES_MAX + 1))
    with pytest.raises(RecordError):
        decode_message(msgspec.msgpack.encode([99, 1]))
    with pytest.raises(RecordError):
        decode_message(encode_message(Ping(-1, 0)))


@given(st.binary(max_size=300))
def test_random_bytes_are_a_message_or_a_record_error(data: bytes) -> None:
    try:
        decode_message(data)
    except RecordError:
        return


@given(st.integers(0, len(MESSAGES) - 1), st.integers(0, 400), st.integers(0, 255))
def test_a_damaged_message_is_a_message_or_a_record_error(which: int, at: int, value: int) -> None:
    data = bytearray(encode_message(MESSAGES[which]))
    data[at % len(data)] = value
    try:
        decode_message(bytes(data))
    except RecordError:
        return


def test_a_refusal_made_from_foreign_text_is_printable_and_short() -> None:
    message = refused("garbage", "\x1b[2J" + "x" * 1000)
    assert message.reason.isprintable()
    assert len(message.reason) <= 200
