"""Multiaddrs: the addresses of libp2p, as text (`/ip4/1.2.3.4/tcp/4001`) and as bytes.

Only the parts that peers of a swarm use are known. Written here because links and the command line
must read addresses without loading a library, and a wrong address needs a reason, not a traceback.
"""

import ipaddress
from dataclasses import dataclass

from dugnad.dht.ids import PEER_PREFIX, PeerId, base58_decode, base58_encode

# name -> (code, bytes of the value; None = length before it, -1 = no value); the multiaddr table.
_TABLE: dict[str, tuple[int, int | None]] = {
    "ip4": (4, 4),
    "tcp": (6, 2),
    "ip6": (41, 16),
    "ip6zone": (42, None),
    "dns": (53, None),
    "dns4": (54, None),
    "dns6": (55, None),
    "udp": (273, 2),
    "p2p-circuit": (290, -1),
    "unix": (400, None),
    "p2p": (421, None),
    "tls": (448, -1),
    "quic": (460, -1),
    "quic-v1": (461, -1),
    "ws": (477, -1),
    "wss": (478, -1),
}
_NAMES = {code: name for name, (code, _) in _TABLE.items()}

# The longest useful address (a relay's with a DNS name and two peer ids) has about 400 characters.
ADDRESS_CHARS_MAX = 512
_PARTS_MAX = 12
_PORT_MAX = 65535


@dataclass(frozen=True, slots=True)
class Address:
    """A multiaddr as its parts, such as (("ip4", "1.2.3.4"), ("tcp", "4001")); "" is no value."""

    parts: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "".join(f"/{name}/{value}" if value else f"/{name}" for name, value in self.parts)

    def value(self, *names: str) -> str | None:
        """The value of the first part that has one of these names."""
        return next((value for name, value in self.parts if name in names), None)

    @property
    def peer(self) -> PeerId | None:
        """The peer that the address ends at, None if it does not say (or is not an Ed25519 id)."""
        for name, value in reversed(self.parts):
            if name == "p2p":
                raw = base58_decode(value)
                return PeerId(raw[len(PEER_PREFIX) :]) if raw.startswith(PEER_PREFIX) else None
        return None

    def without_peer(self) -> "Address":
        """The same place without the last `/p2p/<id>`."""
        if self.parts and self.parts[-1][0] == "p2p":
            return Address(self.parts[:-1])
        return self

    def with_host(self, host: str) -> "Address":
        """The same address at another IP address of the same family."""
        return Address((((self.parts[0][0]), host), *self.parts[1:]))

    @property
    def is_quic(self) -> bool:
        """Whether it is reached through QUIC."""
        return any(name in ("quic", "quic-v1") for name, _ in self.parts)

    def pack(self) -> bytes:
        """The binary form that the libp2p daemon wants."""
        return b"".join(_pack_part(name, value) for name, value in self.parts)


def parse_address(text: str) -> Address:
    """The address that `text` says; ValueError with the reason if it is none."""
    if len(text) > ADDRESS_CHARS_MAX:
        raise ValueError(f"an address of {len(text)} characters is too long")
    if not text.startswith("/"):
        raise ValueError(f"an address starts with a slash, like /ip4/192.0.2.1/tcp/4001: {text!r}")
    words = text.rstrip("/").split("/")[1:]
    parts: list[tuple[str, str]] = []
    while words:
        name = words.pop(0)
        if name not in _TABLE:
            raise ValueError(f"{name!r} is not a known part of an address")
        if name == "unix":
            parts.append((name, "/".join(words)))
            break
        size = _TABLE[name][1]
        if size != -1 and (not words or not words[0]):
            raise ValueError(f"the address ends after /{name}")
        parts.append((name, "" if size == -1 else _checked(name, words.pop(0))))
    if not parts or len(parts) > _PARTS_MAX:
        raise ValueError("the address is empty or has too many parts")
    return Address(tuple(parts))


def unpack_address(data: bytes) -> Address:
    """The address whose binary form `data` is; ValueError if it is none or holds unknown parts."""
    parts: list[tuple[str, str]] = []
    while data and len(parts) < _PARTS_MAX:
        code, data = read_varint(data)
        if code not in _NAMES:
            raise ValueError(f"unknown multiaddr code {code}")
        name = _NAMES[code]
        size = _TABLE[name][1]
        if size is None:
            size, data = read_varint(data)
        raw, data = data[: max(size, 0)], data[max(size, 0) :]
        if len(raw) != max(size, 0):
            raise ValueError("the address is cut short")
        parts.append((name, _unpack_value(name, raw)))
    return Address(tuple(parts))


def varint(number: int) -> bytes:
    """The unsigned LEB128 form of `number`, as in protobuf and multiaddr."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def read_varint(data: bytes) -> tuple[int, bytes]:
    """The varint at the start of `data`, and the rest; ValueError if cut or over 9 bytes long."""
    number = 0
    for position, byte in enumerate(data[:9]):
        number |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return number, data[position + 1 :]
    raise ValueError("a number is cut short or too long")


def _checked(name: str, value: str) -> str:
    try:
        if name == "ip4":
            return str(ipaddress.IPv4Address(value))
        if name == "ip6":
            return str(ipaddress.IPv6Address(value))
    except ipaddress.AddressValueError:
        raise ValueError(f"{value!r} is not an address for /{name}") from None
    if name in ("tcp", "udp") and not (value.isascii() and value.isdigit() and len(value) <= 5):
        raise ValueError(f"{value!r} is not a port")
    if name in ("tcp", "udp") and int(value) > _PORT_MAX:
        raise ValueError(f"port {value} is above {_PORT_MAX}")
    if name == "p2p" and not base58_decode(value):
        raise ValueError("the peer id is empty")
    return value


def _pack_part(name: str, value: str) -> bytes:
    code, size = _TABLE[name]
    if size == -1:
        return varint(code)
    if name in ("tcp", "udp"):
        return varint(code) + int(value).to_bytes(2, "big")
    if name in ("ip4", "ip6"):
        return varint(code) + ipaddress.ip_address(value).packed
    raw = base58_decode(value) if name == "p2p" else value.encode()
    if name == "unix":
        raw = b"/" + raw
    return varint(code) + varint(len(raw)) + raw


def _unpack_value(name: str, raw: bytes) -> str:
    if name in ("tcp", "udp"):
        return str(int.from_bytes(raw, "big"))
    if name in ("ip4", "ip6"):
        return str(ipaddress.ip_address(raw))
    if name == "p2p":
        return base58_encode(raw)
    return raw.decode("utf-8", "strict").removeprefix("/" if name == "unix" else "")
