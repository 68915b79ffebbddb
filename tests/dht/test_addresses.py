"""Multiaddrs: both forms, and reasons for wrong ones."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dugnad.dht.addresses import parse_address, read_varint, unpack_address, varint
from dugnad.dht.ids import PeerId, peer_text

PEER = PeerId(bytes(range(32)))
GOOD = [
    "/ip4/192.0.2.1/tcp/4001",
    "/ip6/2001:db8::1/udp/4001/quic-v1",
    f"/dns4/peer.example/tcp/4001/p2p/{peer_text(PEER)}",
    f"/ip4/192.0.2.1/tcp/1/p2p/{peer_text(PEER)}/p2p-circuit/p2p/{peer_text(PeerId(bytes(32)))}",
    "/unix/run/user/1000/dugnad/p2pd.sock",
    "/ip4/1.2.3.4/tcp/443/tls/ws",
]


@pytest.mark.parametrize("text", GOOD)
def test_text_and_binary_forms_come_back(text: str) -> None:
    address = parse_address(text)
    assert str(address) == text
    assert unpack_address(address.pack()) == address


def test_the_binary_form_is_libp2ps() -> None:
    assert parse_address("/ip4/127.0.0.1/tcp/4001").pack().hex() == "047f000001060fa1"
    assert parse_address(
        "/ip4/1.2.3.4/udp/1/quic-v1"
    ).pack().hex() == "0401020304910200 01cd03".replace(" ", "")


def test_the_peer_is_the_last_one_named() -> None:
    assert parse_address(GOOD[2]).peer == PEER
    assert parse_address(GOOD[3]).peer == PeerId(bytes(32))
    assert parse_address(GOOD[0]).peer is None
    assert str(parse_address(GOOD[2]).without_peer()) == "/dns4/peer.example/tcp/4001"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "starts with a slash"),
        ("1.2.3.4:80", "starts with a slash"),
        ("/", "empty"),
        ("/ip4/1.2.3/tcp/1", "not an address for /ip4"),
        ("/ip6/1.2.3.4/tcp/1", "not an address for /ip6"),
        ("/ip4/1.2.3.4/tcp", "ends after /tcp"),
        ("/ip4/1.2.3.4/tcp/", "ends after /tcp"),
        ("/ip4/1.2.3.4/tcp/65536", "above 65535"),
        ("/ip4/1.2.3.4/tcp/-1", "not a port"),
        ("/ip4/1.2.3.4/tcp/٣", "not a port"),
        ("/ip4/1.2.3.4/sctp/1", "not a known part"),
        ("/ip4/1.2.3.4/tcp/1/p2p/0", "cannot occur"),
        ("/ws" * 13, "too many parts"),
        ("/" + "x" * 600, "too long"),
    ],
)
def test_a_wrong_address_is_refused_with_its_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_address(text)


@given(st.text(max_size=60), st.binary(max_size=60))
def test_foreign_addresses_raise_nothing_but_value_errors(text: str, data: bytes) -> None:
    with contextlib.suppress(ValueError):
        parse_address("/" + text)
    with contextlib.suppress(ValueError):
        unpack_address(data)


@given(st.integers(0, 2**60), st.binary(max_size=4))
def test_varints_come_back(number: int, rest: bytes) -> None:
    assert read_varint(varint(number) + rest) == (number, rest)
