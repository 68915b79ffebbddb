"""The control protocol of p2pd, compared with the library's own encoding of it."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dugnad.dht import control
from dugnad.dht.addresses import parse_address, read_varint
from dugnad.dht.book import load_hivemind
from dugnad.dht.ids import PEER_PREFIX, PeerId

PEER = PeerId(bytes(range(32)))
PLACE = parse_address("/ip4/127.0.0.1/tcp/4001")


@pytest.fixture(scope="module")
def schema() -> Any:  # Any: generated protobuf classes carry no types
    """The protobuf classes that hivemind generated from p2pd's schema."""
    import importlib

    load_hivemind()
    return importlib.import_module("hivemind.proto.p2pd_pb2")


def body(message: bytes) -> bytes:
    size, rest = read_varint(message)
    assert size == len(rest)
    return rest


@pytest.mark.slow
def test_requests_are_what_the_schema_says(schema: Any) -> None:
    parse = schema.Request.FromString
    connect = parse(body(control.connect(PEER, [PLACE, PLACE], 7))).connect
    assert (connect.peer, connect.timeout) == (PEER_PREFIX + PEER, 7)
    assert list(connect.addrs) == [PLACE.pack()] * 2
    opened = parse(body(control.open_stream(PEER, "/x/1", 3))).streamOpen
    assert (opened.peer, list(opened.proto), opened.timeout) == (PEER_PREFIX + PEER, ["/x/1"], 3)
    listener = parse_address("/unix/tmp/s.sock")
    handler = parse(body(control.handle_streams(listener, "/x/1"))).streamHandler
    assert (handler.addr, list(handler.proto)) == (listener.pack(), ["/x/1"])
    assert parse(body(control.disconnect(PEER))).disconnect.peer == PEER_PREFIX + PEER
    kinds = (control.identify, "IDENTIFY"), (control.persist, "PERSISTENT_CONN_UPGRADE")
    for make, name in (*kinds, (control.list_peers, "LIST_PEERS")):
        assert parse(body(make())).type == schema.Request.Type.Value(name)


@pytest.mark.slow
def test_responses_of_the_schema_are_understood(schema: Any) -> None:
    ok = schema.Response.Type.Value("OK")
    response = schema.Response(type=ok)
    response.identify.id = PEER_PREFIX + PEER
    response.identify.addrs.append(PLACE.pack())
    response.identify.addrs.append(b"\xff\xff\x03")  # a transport that we do not know
    response.streamInfo.peer = b"\x12\x20" + bytes(32)  # an RSA key: not one of ours
    response.streamInfo.addr = PLACE.pack()
    response.streamInfo.proto = "/x/1"
    response.peers.add(id=PEER_PREFIX + PEER, addrs=[PLACE.pack()])
    answer = control.parse_response(response.SerializeToString())
    assert answer.identity == control.RemotePeer(PEER, (PLACE,))
    assert answer.stream == control.RemotePeer(None, (PLACE,), "/x/1")
    assert answer.peers == (control.RemotePeer(PEER, (PLACE,)),)


@pytest.mark.slow
def test_an_error_of_p2pd_is_raised_with_its_words(schema: Any) -> None:
    response = schema.Response(type=schema.Response.Type.Value("ERROR"))
    response.error.msg = "failed to dial"
    with pytest.raises(control.ControlError, match="failed to dial"):
        control.parse_response(response.SerializeToString())


@given(st.binary(max_size=80))
def test_garbage_raises_nothing_but_control_errors(data: bytes) -> None:
    with contextlib.suppress(control.ControlError):
        control.parse_response(data)
