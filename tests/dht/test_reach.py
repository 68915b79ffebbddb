"""Which addresses are tried and which are given to others."""

import socket

import pytest

from dugnad.dht.addresses import parse_address
from dugnad.dht.ids import PeerId, peer_text
from dugnad.dht.p2pd import SubstrateError
from dugnad.dht.reach import (
    ADDRESSES_PER_PEER_MAX,
    by_preference,
    free_port,
    is_loopback,
    on_interfaces,
    places_of,
    probe_all,
)

PEER = PeerId(bytes(32))
TCP = "/ip4/192.0.2.1/tcp/4001"
QUIC = "/ip4/192.0.2.1/udp/4001/quic-v1"
RELAYED = f"/ip4/192.0.2.9/tcp/1/p2p/{peer_text(PeerId(b'r' * 32))}/p2p-circuit"


def test_tcp_is_tried_before_quic_and_relays_last() -> None:
    places = [parse_address(text) for text in (RELAYED, QUIC, TCP)]
    groups = by_preference(places)
    assert [[str(place) for place in group] for group in groups] == [[TCP], [QUIC], [RELAYED]]


def test_addresses_that_cannot_be_tried_come_with_reasons() -> None:
    stranger = f"{TCP}/p2p/{peer_text(PeerId(b's' * 32))}"
    places, reasons = places_of(PEER, [TCP, stranger, "nonsense"])
    assert [str(place) for place in places] == [TCP]
    assert dict(reasons).keys() == {stranger, "nonsense"}


def test_a_relayed_address_that_ends_at_the_peer_is_tried() -> None:
    text = f"{RELAYED}/p2p/{peer_text(PEER)}"
    assert [str(place) for place in places_of(PEER, [text])[0]] == [text]


def test_a_long_list_of_addresses_is_cut() -> None:
    many = [f"/ip4/192.0.2.1/tcp/{port}" for port in range(1, 100)]
    assert len(places_of(PEER, many)[0]) == ADDRESSES_PER_PEER_MAX


def test_only_unspecified_addresses_are_replaced() -> None:
    assert on_interfaces(parse_address(TCP)) == [parse_address(TCP)]
    spread = on_interfaces(parse_address("/ip4/0.0.0.0/tcp/7"))
    assert parse_address("/ip4/127.0.0.1/tcp/7") in spread
    assert all(place.value("tcp") == "7" for place in spread)
    assert is_loopback(parse_address("/ip4/127.0.0.1/tcp/7"))
    assert not is_loopback(parse_address(TCP))


@pytest.mark.slow
async def test_a_probe_tells_open_from_refused() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        good = parse_address(f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}")
        bad = parse_address("/ip4/127.0.0.1/tcp/1")
        unprobed = parse_address(QUIC)
        reached, failed = await probe_all([good, bad, unprobed], 1.0)
    assert reached == [good, unprobed]
    assert failed == [(str(bad), "connection refused (nobody listens there)")]


@pytest.mark.slow
def test_a_port_that_is_taken_for_udp_only_is_taken() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(SubstrateError, match=f"port {port} is already in use"):
            free_port(("127.0.0.1",), port)
    assert free_port(("127.0.0.1",), port) == port
    assert free_port(("127.0.0.1",), 0) > 0
