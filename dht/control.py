"""The control protocol of the libp2p daemon (p2pd): requests out, responses in.

Each request is one protobuf message on a fresh connection to the daemon's Unix socket. The few
messages that we need are written out here by field number: a library would be loaded for five of
them, and what comes back is decoded within bounds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dugnad.dht.addresses import Address, read_varint, unpack_address, varint
from dugnad.dht.ids import KEY_BYTES, PEER_PREFIX, PeerId

# Request types and field numbers: learning-at-home/go-libp2p-daemon, pb/p2pd.proto.
_IDENTIFY, _CONNECT, _STREAM_OPEN, _STREAM_HANDLER = 0, 1, 2, 3
_LIST_PEERS, _DISCONNECT, _PERSISTENT = 5, 7, 9
_TYPE, _CONNECT_FIELD, _OPEN_FIELD, _HANDLER_FIELD, _DISCONNECT_FIELD = 1, 2, 3, 4, 7
_WIRE_VARINT, _WIRE_BYTES = 0, 2
_WIRE_SIZES = {1: 8, 5: 4}

# LIST_PEERS of 4096 connections takes about 300 KB; anything longer is not p2pd speaking.
RESPONSE_BYTES_MAX = 1 << 20


class ControlError(Exception):
    """The daemon answered with an error (`reason`), or with something that is not an answer."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class RemotePeer:
    """A peer as the daemon names it: `peer` is None when its key is not Ed25519."""

    peer: PeerId | None
    addresses: tuple[Address, ...]
    protocol: str = ""


@dataclass(frozen=True, slots=True)
class Response:
    """What the daemon answered: the field that belongs to the request is filled."""

    identity: RemotePeer | None = None
    stream: RemotePeer | None = None
    peers: tuple[RemotePeer, ...] = field(default=())


def identify() -> bytes:
    """Asks who the daemon is and where it listens."""
    return _request(_IDENTIFY)


def persist() -> bytes:
    """Makes the connection persistent: the daemon ends when the last persistent one closes."""
    return _request(_PERSISTENT)


def list_peers() -> bytes:
    """Asks for the open connections."""
    return _request(_LIST_PEERS)


def connect(peer: PeerId, addresses: Sequence[Address], timeout_s: int) -> bytes:
    """Connects to `peer` at one of the addresses."""
    body = _bytes(1, PEER_PREFIX + peer)
    body += b"".join(_bytes(2, address.pack()) for address in addresses)
    return _request(_CONNECT, _bytes(_CONNECT_FIELD, body + _varint(3, timeout_s)))


def disconnect(peer: PeerId) -> bytes:
    """Closes the connections to `peer`."""
    return _request(_DISCONNECT, _bytes(_DISCONNECT_FIELD, _bytes(1, PEER_PREFIX + peer)))


def open_stream(peer: PeerId, protocol: str, timeout_s: int) -> bytes:
    """Opens a stream; after the response the connection carries the stream's bytes."""
    body = _bytes(1, PEER_PREFIX + peer) + _bytes(2, protocol.encode()) + _varint(3, timeout_s)
    return _request(_STREAM_OPEN, _bytes(_OPEN_FIELD, body))


def handle_streams(listener: Address, protocol: str) -> bytes:
    """Asks the daemon to hand incoming streams of `protocol` to the Unix socket `listener`."""
    body = _bytes(1, listener.pack()) + _bytes(2, protocol.encode()) + _varint(3, 0)
    return _request(_STREAM_HANDLER, _bytes(_HANDLER_FIELD, body))


def parse_response(data: bytes) -> Response:
    """The daemon's answer; ControlError if it is an error or malformed."""
    identity, stream, peers, failed, reason = None, None, [], False, "no reason given"
    for number, value in _fields(data):
        if number == _TYPE:
            failed = value != 0
        elif not isinstance(value, bytes):
            continue
        elif number == 2:
            reason = _message(value)
        elif number == 3:
            stream = parse_stream_info(value)
        elif number == 4:
            identity = _remote(value)
        elif number == 6:
            peers.append(_remote(value))
    if failed:
        raise ControlError(reason)
    return Response(identity, stream, tuple(peers))


def parse_stream_info(data: bytes) -> RemotePeer:
    """Who is at the other end of a new stream; ControlError if malformed."""
    return _remote(data)


def _message(data: bytes) -> str:
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            return value.decode("utf-8", "replace")
    return "no reason given"


def _remote(data: bytes) -> RemotePeer:
    """PeerInfo, IdentifyResponse and StreamInfo alike: 1 = peer, 2 = addresses, 3 = protocol."""
    peer, addresses, protocol = None, [], ""
    for number, value in _fields(data):
        if not isinstance(value, bytes):
            continue
        if number == 1:
            peer = _ed25519(value)
        elif number == 2:
            try:
                addresses.append(unpack_address(value))
            except ValueError:
                continue  # a transport that we do not know, such as WebRTC: of no use to us
        elif number == 3:
            protocol = value.decode("utf-8", "replace")
    return RemotePeer(peer, tuple(addresses), protocol)


def _ed25519(raw: bytes) -> PeerId | None:
    if raw.startswith(PEER_PREFIX) and len(raw) == len(PEER_PREFIX) + KEY_BYTES:
        return PeerId(raw[len(PEER_PREFIX) :])
    return None


def _request(kind: int, body: bytes = b"") -> bytes:
    message = _varint(_TYPE, kind) + body
    return varint(len(message)) + message


def _bytes(number: int, value: bytes) -> bytes:
    return varint(number << 3 | _WIRE_BYTES) + varint(len(value)) + value


def _varint(number: int, value: int) -> bytes:
    return varint(number << 3 | _WIRE_VARINT) + varint(value)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protobuf message: integers as int, everything with a length as bytes."""
    try:
        while data:
            tag, data = read_varint(data)
            number, wire = tag >> 3, tag & 7
            if wire == _WIRE_VARINT:
                integer, data = read_varint(data)
                yield number, integer
                continue
            if wire == _WIRE_BYTES:
                size, data = read_varint(data)
            elif wire in _WIRE_SIZES:
                size = _WIRE_SIZES[wire]
            else:
                raise ValueError(f"wire type {wire}")
            if size > len(data):
                raise ValueError("a field is cut short")
            yield number, data[:size]
            data = data[size:]
    except ValueError as error:
        raise ControlError(f"malformed answer of p2pd: {error}") from None
