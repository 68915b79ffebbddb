"""Rumours: what members of a crowd tell each other about members, and their bytes.

A crowd is a swarm too large for a full mesh. Its core (`roster_crowd`) names peers by *slots*,
small numbers that mean something only inside one process; here slots become peer ids and back, at
the edge. A rumour is one integer, `slot << 32 | order`; the order is twice the incarnation, plus
one if the peer is gone, so of two rumours about one peer the greater is the newer.
"""

import struct
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from dugnad.dht.ids import KEY_BYTES, PeerId
from dugnad.dht.records import RecordError, decode, encode

SLOTS_MAX: Final = 1 << 16
"""Peers that one process ever names: five times the largest crowd that was rehearsed."""
ORDER_BITS: Final = 32
ORDER_MASK: Final = (1 << ORDER_BITS) - 1
RUMOURS_MAX: Final = 1024
"""Rumours of one message: 37 kB at most, 30 ms of a 10 Mbit/s line; a table takes several."""
TAG_BYTES: Final = 8
"""Who is gone is named by the start of its key: the reader knows the peer, or need not care."""

_HERE: Final = struct.Struct(f"!{KEY_BYTES}sI")
_GONE: Final = struct.Struct(f"!{TAG_BYTES}sI")
_CHUNK_MAX: Final = RUMOURS_MAX * _HERE.size
_Blob = Annotated[bytes, msgspec.Meta(max_length=_CHUNK_MAX)]
MESSAGE_BYTES_MAX: Final = 2 * _CHUNK_MAX + 64

# --- messages, as the core sees them


@dataclass(frozen=True, slots=True)
class Rumours:
    """News since the last message on this stream; without any it is a heartbeat."""

    codes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Greet:
    """First message of each side: our order, and whether we still need the whole table."""

    order: int
    wants_table: bool


@dataclass(frozen=True, slots=True)
class TablePart:
    """A part of all that the sender knows; `last`: with this the table is whole."""

    codes: tuple[int, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class Sync:
    """Some live members, as the sender knows them; the reader answers with what it knows better."""

    codes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Full:
    """The sender has neighbours enough: find another. Last message of the stream."""


@dataclass(frozen=True, slots=True)
class Spare:
    """The sender needs this stream no longer; whoever does not need it either ends it."""


CrowdMessage = Rumours | Greet | TablePart | Sync | Full | Spare


def rumour(slot: int, order: int) -> int:
    """The rumour that a slot is in this order."""
    return slot << ORDER_BITS | order


class Slots:
    """Names of peers inside one process; given anew once they were given back."""

    def __init__(self) -> None:
        self._slots: dict[bytes, int] = {}
        self._peers: list[PeerId] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._slots)

    def of(self, peer: PeerId) -> int:
        """The peer's slot, a new one if need be; RecordError when all are given."""
        slot = self._slots.get(peer[:TAG_BYTES])
        if slot is None:
            if self._free:
                slot = self._free.pop()
                self._peers[slot] = peer
            elif len(self._peers) < SLOTS_MAX:
                slot = len(self._peers)
                self._peers.append(peer)
            else:
                raise RecordError(f"more than {SLOTS_MAX} peers were named")
            self._slots[peer[:TAG_BYTES]] = slot
        elif self._peers[slot] != peer:
            raise RecordError("two peers whose keys start alike")
        return slot

    def tagged(self, tag: bytes) -> int | None:
        """The slot of the peer whose key starts so; None if it was never named."""
        return self._slots.get(tag)

    def peer(self, slot: int) -> PeerId:
        """Whose slot this is."""
        return self._peers[slot]

    def free(self, slot: int) -> None:
        """Gives a slot back: the next new peer may have it."""
        del self._slots[self._peers[slot][:TAG_BYTES]]
        self._free.append(slot)


# --- bytes


class _Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Every message of a crowd; `kind` says which, unused fields are empty."""

    kind: Annotated[int, msgspec.Meta(ge=0, le=5)]
    number: Annotated[int, msgspec.Meta(ge=0, le=ORDER_MASK)] = 0
    here: _Blob = b""
    gone: _Blob = b""


_KINDS: Final = {Rumours: 0, Greet: 1, TablePart: 2, Sync: 3, Full: 4, Spare: 5}
_EMPTY: Final = len(encode(_Wire(0)))


def encode_crowd(message: CrowdMessage, slots: Slots) -> bytes:
    """The bytes of one message."""
    number, codes = 0, tuple[int, ...]()
    match message:
        case Greet(order, wants_table):
            number = order & ~1 | wants_table  # who greets is here: its order is even
        case TablePart(codes, last):
            number = int(last)
        case Rumours(codes) | Sync(codes):
            pass
        case Full() | Spare():
            pass
    here, gone = bytearray(), bytearray()
    for code in codes:
        peer, order = slots.peer(code >> ORDER_BITS), code & ORDER_MASK
        if order & 1:
            gone += _GONE.pack(peer[:TAG_BYTES], order)
        else:
            here += _HERE.pack(peer, order)
    return encode(_Wire(_KINDS[type(message)], number, bytes(here), bytes(gone)))


def decode_crowd(data: bytes, slots: Slots) -> CrowdMessage:
    """The message in one frame; RecordError with the reason on anything else."""
    wire = decode(data, _Wire, MESSAGE_BYTES_MAX)
    if len(wire.here) % _HERE.size or len(wire.gone) % _GONE.size:
        raise RecordError("a list of rumours is cut short")
    if len(wire.here) // _HERE.size + len(wire.gone) // _GONE.size > RUMOURS_MAX:
        raise RecordError(f"more than {RUMOURS_MAX} rumours in one message")
    codes = []
    for peer, order in _HERE.iter_unpack(wire.here):
        if order & 1 or not order:
            raise RecordError("a live peer with the order of one that is gone")
        codes.append(rumour(slots.of(PeerId(peer)), order))
    for tag, order in _GONE.iter_unpack(wire.gone):
        slot = slots.tagged(tag)
        if not order & 1:
            raise RecordError("a peer that is gone with the order of a live one")
        if slot is not None:
            codes.append(rumour(slot, order))
    match wire.kind:
        case 0:
            return Rumours(tuple(codes))
        case 1:
            return Greet(wire.number & ~1, bool(wire.number & 1))
        case 2:
            return TablePart(tuple(codes), bool(wire.number))
        case 3:
            return Sync(tuple(codes))
        case 4:
            return Full()
        case _:
            return Spare()


def size_of(message: CrowdMessage) -> int:
    """Bytes of the message on the wire (without the frame's length), not encoding it."""
    if type(message) is Full or type(message) is Spare:
        return _EMPTY
    if type(message) is Greet:
        return _EMPTY + _int_size(message.order) - 1
    codes = message.codes  # type: ignore[union-attr]  # all others have them
    if not codes:
        return _EMPTY
    gone = 0
    for code in codes:  # plain: this is asked for each message of a rehearsal
        gone += code & 1
    blobs = ((len(codes) - gone) * _HERE.size, gone * _GONE.size)
    return _EMPTY + sum(size + (size > 255) + 2 * (size > 65535) for size in blobs)


def _int_size(number: int) -> int:
    if number < 128:
        return 1
    return 2 if number < 256 else 3 if number < 65536 else 5
