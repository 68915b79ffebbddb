"""Messages on the control stream between two peers, and the one place where their bytes are judged.

Each side sends `Hello` first. Afterwards every message is one frame of at most `MESSAGE_BYTES_MAX`
bytes. The stream proves who the sender is; only adverts carry a signature, since they are passed
on.
"""

from typing import Annotated, Final, Literal

import msgspec

from dugnad.dht.advert import ADVERT_BYTES_MAX, Advert, Count, clean_text
from dugnad.dht.ids import KEY_BYTES, RUN_BYTES, PeerId, RunId
from dugnad.dht.records import (
    SIGNATURE_BYTES,
    RecordError,
    Signer,
    Verifier,
    encode,
    framed,
)

CONTROL_PROTOCOL: Final = "/dugnad/control/1"
"""Name of the control stream in the transport."""
PEERS_KNOWN_MAX: Final = 64  # everybody of a full mesh
MESSAGE_BYTES_MAX: Final = PEERS_KNOWN_MAX * (ADVERT_BYTES_MAX + 8) + 64
REASON_CHARS_MAX: Final = 200
TAG_BYTES: Final = 8
"""In a crowd a peer is named by the start of its key; who needs all of it asks for its advert."""
TALK_ROW_BYTES: Final = TAG_BYTES + 4
TALK_ROWS_MAX: Final = 1024
TALK_GONE_MAX: Final = 256
"""Signed losses of one message: 36 kB, 25 ms of checking."""
_SOFTWARE_CHARS_MAX: Final = 32

RefusalCode = Literal[
    "run", "protocol", "admission", "full", "flood", "garbage", "duplicate", "leaving", "advert"
]
WallMs = Count
_Peer = Annotated[PeerId, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
_Run = Annotated[RunId, msgspec.Meta(min_length=RUN_BYTES, max_length=RUN_BYTES)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The first message of each side; the advert is opaque so that any protocol can be named."""

    run: _Run
    protocol: Count
    software: Annotated[str, msgspec.Meta(max_length=_SOFTWARE_CHARS_MAX)]
    boot: Count
    incarnation: Count
    advert: Annotated[bytes, msgspec.Meta(max_length=ADVERT_BYTES_MAX)]
    wall_ms: WallMs
    oldest: Count = 0
    """The oldest protocol version that the sender speaks; 0 (not said): only `protocol`."""


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Heartbeat, each second; answered at once by `Pong` with the same number."""

    number: Count
    wall_ms: WallMs


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Answer to a ping, with the answerer's wall clock."""

    number: Count
    wall_ms: WallMs


class AdvertUpdate(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The sender's own advert changed."""

    advert: Advert


class PeersKnown(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The sender holds live control streams with these peers; `complete`: with nobody else."""

    adverts: Annotated[tuple[Advert, ...], msgspec.Meta(max_length=PEERS_KNOWN_MAX)]
    complete: bool = False


class LostNotice(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """`by` cannot reach `peer`, last known in this incarnation. Who does reach it answers
    `AliveNotice`.
    """

    peer: _Peer
    incarnation: Count
    by: _Peer


class AliveNotice(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The sender is this peer (a refutation, with a higher incarnation), or hears it now."""

    advert: Advert


class WhoSees(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The sender still cannot reach `peer` itself; who does answers `AliveNotice`. Nobody is
    accused.
    """

    peer: _Peer


class Leaving(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """`peer` (the sender, or one the sender heard it from) leaves on purpose."""

    peer: _Peer
    incarnation: Count


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Last message before the stream is closed: why its sender will have none of it."""

    code: RefusalCode
    reason: Annotated[str, msgspec.Meta(max_length=REASON_CHARS_MAX)]


class Gone(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`by` says that `peer`, in this incarnation, is gone: `peer` itself, or who looked for it."""

    peer: _Peer
    incarnation: Count
    by: _Peer
    signature: Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES)] = b""


RUMOURS, GREET, TABLE, SYNC, FULL, SPARE = range(6)
"""Kinds of `Talk`, named as the messages of `roster_rumours`."""


class Talk(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """What neighbours in a crowd tell each other: rumours, tables, comparisons.

    `kind` and `number` as in `roster_rumours`; `here` are rows of a key's first 8 bytes and an
    order, 4 bytes; `members` is how many live members the sender knows, itself included.
    """

    kind: Annotated[int, msgspec.Meta(ge=RUMOURS, le=SPARE)]
    members: Count
    number: Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)] = 0
    here: Annotated[bytes, msgspec.Meta(max_length=TALK_ROWS_MAX * TALK_ROW_BYTES)] = b""
    gone: Annotated[tuple[Gone, ...], msgspec.Meta(max_length=TALK_GONE_MAX)] = ()


class WantAdverts(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """The sender has no advert for these rumours of the reader: starts of keys, 8 bytes each."""

    tags: Annotated[bytes, msgspec.Meta(max_length=PEERS_KNOWN_MAX * TAG_BYTES)]


class Adverts(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """The answer: those that the sender has."""

    adverts: Annotated[tuple[Advert, ...], msgspec.Meta(max_length=PEERS_KNOWN_MAX)]


Message = (
    Hello
    | Ping
    | Pong
    | AdvertUpdate
    | PeersKnown
    | LostNotice
    | AliveNotice
    | WhoSees
    | Leaving
    | Refused
    | Talk
    | WantAdverts
    | Adverts
)

_DECODER: Final = msgspec.msgpack.Decoder(Message)


def encode_message(message: Message) -> bytes:
    """The bytes of one frame; they fit `MESSAGE_BYTES_MAX` when each advert fits its own limit."""
    return encode(message)


def decode_message(data: bytes) -> Message:
    """The message in one frame. RecordError with the reason on anything else, never another
    exception.
    """
    if len(data) > MESSAGE_BYTES_MAX:
        raise RecordError(
            f"a control message of {len(data)} bytes, at most {MESSAGE_BYTES_MAX} are allowed"
        )
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise RecordError(f"not a control message: {error}") from None


def refused(code: RefusalCode, reason: str) -> Refused:
    """A refusal whose reason is shortened and made harmless to print."""
    return Refused(code, clean_text(reason, REASON_CHARS_MAX))


def sign_gone(peer: PeerId, incarnation: int, signer: Signer, run: RunId) -> Gone:
    """The signer's word that a peer is gone; of itself: that it leaves."""
    bare = Gone(peer, incarnation, signer.peer)
    return msgspec.structs.replace(bare, signature=signer.sign(framed("gone", run, encode(bare))))


def gone_holds(gone: Gone, run: RunId, verifier: Verifier) -> bool:
    """Whether `by` signed exactly this word, for this run."""
    bare = msgspec.structs.replace(gone, signature=b"")
    return verifier(gone.by, framed("gone", run, encode(bare)), gone.signature)
