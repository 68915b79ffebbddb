"""The advert: what a peer says about itself, measured on its own machine and signed with its key.

Adverts travel in the hello of each control stream, between peers (peer exchange) and through the
address book. Whoever receives one judges it once with `advert_fault` and `verify_advert`; after
that its shape is trusted, never its intent. A newer advert of a peer replaces an older one: `order`
says which is newer.
"""

import math
import re
import unicodedata
from typing import Annotated, Final, Literal

import msgspec

from dugnad.dht.ids import KEY_BYTES, PeerId, RunId, name_of
from dugnad.dht.records import (
    SIGNATURE_BYTES,
    RecordError,
    Signer,
    Verifier,
    decode,
    encode,
    framed,
    verify_ed25519,
)

ADVERT_BYTES_MAX: Final = 1024
"""Sixty-four adverts then fit a frame of 64 KiB, and a gossip of adverts stays far below 1 % of a
link.
"""
ADDRESSES_MAX: Final = 8
ADDRESS_CHARS_MAX: Final = 192  # a relayed multiaddr with two peer ids has about 160
NAME_CHARS_MAX: Final = 32
ROWS_MAX: Final = 8  # devices, dtypes, roles: more do not fit 1 KiB anyway
SLOW_BYTES_PER_S: Final = 125_000
"""What an unknown line counts as: 1 Mbit/s, the slowest line a volunteer is likely to have."""

_DOMAIN: Final = "advert"
_INT_MAX: Final = (
    2**62
)  # far above any sum of bytes or milliseconds, and still an int64 after one addition
_MARKS_MAX: Final = (
    2  # combining characters in a row: enough for every living script, too few to tower
)
_ADDRESS: Final = re.compile(r"(/[A-Za-z0-9._:%-]+)+")

Count = Annotated[int, msgspec.Meta(ge=0, le=_INT_MAX)]
Amount = Annotated[float, msgspec.Meta(ge=0)]
Word = Annotated[str, msgspec.Meta(max_length=16)]
Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Address = Annotated[str, msgspec.Meta(min_length=1, max_length=ADDRESS_CHARS_MAX)]
Reachable = Literal["direct", "relayed", "outbound", "unknown"]


class Device(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Some equal devices of one machine, as their driver calls them."""

    kind: Word
    name: Annotated[str, msgspec.Meta(max_length=48)]
    count: Count = 1
    memory_bytes: Count = 0


class Speed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Measured matrix multiplication in one number format. "Supported" is not "fast"."""

    dtype: Word
    flops_per_s: Amount


class Advert(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True
):
    """A peer's signed description of itself; zero and empty mean unknown.

    `boot` is drawn anew at each start of the daemon; `incarnation` rises at each start (it begins
    at the wall clock in seconds) and whenever the peer refutes a false loss; `seq` rises with each
    signature.
    """

    peer: Annotated[PeerId, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    boot: Count
    incarnation: Count = 0
    seq: Count = 0
    at_ms: Count = 0
    name: Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)] = ""
    software: Annotated[str, msgspec.Meta(max_length=32)] = ""
    protocol: Count = 0
    devices: Annotated[tuple[Device, ...], msgspec.Meta(max_length=ROWS_MAX)] = ()
    memory_bytes: Count = 0
    speeds: Annotated[tuple[Speed, ...], msgspec.Meta(max_length=ROWS_MAX)] = ()
    tokens_per_s: Amount = 0.0
    speed_class: Annotated[int, msgspec.Meta(ge=-128, le=128)] = 0
    up_bytes_per_s: Count = 0
    down_bytes_per_s: Count = 0
    reachable: Reachable = "unknown"
    can_home: bool = False
    roles: Annotated[tuple[Word, ...], msgspec.Meta(max_length=ROWS_MAX)] = ()
    region: Annotated[str, msgspec.Meta(max_length=32)] = ""
    leaving_ms: Count = 0
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=ADDRESSES_MAX)] = ()
    signature: Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES)] = b""

    @property
    def order(self) -> tuple[int, int]:
        """Which of two adverts of one peer is newer: the greater."""
        return (self.incarnation, self.seq)

    @property
    def label(self) -> str:
        """The name to show: what its owner wrote, made harmless, or three words from the key."""
        return clean_text(self.name, NAME_CHARS_MAX) or name_of(self.peer)

    @property
    def up_assumed(self) -> int:
        """Bytes a second this peer can send: measured, or slow while unknown."""
        return self.up_bytes_per_s or SLOW_BYTES_PER_S

    @property
    def down_assumed(self) -> int:
        """Bytes a second this peer can receive: measured, or slow while unknown."""
        return self.down_bytes_per_s or SLOW_BYTES_PER_S


def advert_fault(advert: Advert) -> str | None:
    """Why this advert cannot be accepted, or None. The signature is `verify_advert`'s matter."""
    amounts = (advert.tokens_per_s, *(speed.flops_per_s for speed in advert.speeds))
    if not all(math.isfinite(amount) for amount in amounts):
        return "a speed is not a finite number"
    for address in advert.addresses:
        if not _ADDRESS.fullmatch(address):
            return "an address is not a multiaddr"
    if len(set(advert.addresses)) != len(advert.addresses):
        return "an address is listed twice"
    size = len(encode(advert))
    if size > ADVERT_BYTES_MAX:
        return f"the advert has {size} bytes, at most {ADVERT_BYTES_MAX} are allowed"
    return None


def fitted(advert: Advert) -> Advert:
    """The same advert made to fit `ADVERT_BYTES_MAX` with a signature: the last addresses go first.

    Addresses are ordered best first; after them devices and speeds are shortened in the same way.
    """
    spare = ADVERT_BYTES_MAX - SIGNATURE_BYTES - 3
    bare = msgspec.structs.replace(advert, signature=b"")
    while len(encode(bare)) > spare and len(bare.addresses) > 1:
        bare = msgspec.structs.replace(bare, addresses=bare.addresses[:-1])
    while len(encode(bare)) > spare and (bare.devices or bare.speeds):
        bare = msgspec.structs.replace(bare, devices=bare.devices[:-1], speeds=bare.speeds[:-1])
    return bare


def sign_advert(advert: Advert, signer: Signer, run: RunId) -> Advert:
    """The advert signed by its own peer for this run; ValueError when it would be refused by
    others.
    """
    if advert.peer != signer.peer:
        raise ValueError("an advert is signed by the peer it describes")
    # Through the wire form and back: an int in a float field would be signed as other bytes than
    # are checked.
    bare = decode(_body(advert), Advert, 2 * ADVERT_BYTES_MAX)
    signature = signer.sign(framed(_DOMAIN, run, _body(bare)))
    signed = msgspec.structs.replace(bare, signature=signature)
    fault = advert_fault(signed)
    if fault is not None:
        raise ValueError(fault)
    return signed


def verify_advert(advert: Advert, run: RunId, verifier: Verifier = verify_ed25519) -> bool:
    """Whether the peer it describes signed exactly this advert for this run."""
    return verifier(advert.peer, framed(_DOMAIN, run, _body(advert)), advert.signature)


def decode_advert(data: bytes) -> Advert:
    """The advert in `data`, well-formed but not yet verified; RecordError with the reason
    otherwise.
    """
    advert = decode(data, Advert, ADVERT_BYTES_MAX)
    fault = advert_fault(advert)
    if fault is not None:
        raise RecordError(fault)
    return advert


def clean_text(text: str, limit: int) -> str:
    """Foreign text made fit to print: no control, bidi, invisible or private characters, spaces
    single.

    At most `limit` characters and `_MARKS_MAX` combining marks in a row. It may still look like
    another name.
    """
    kept: list[str] = []
    marks = 0
    for character in unicodedata.normalize("NFC", text[: 4 * limit]):
        category = unicodedata.category(character)
        marks = marks + 1 if category.startswith("M") else 0
        if category.startswith("Z") or character in "\t\n\r":
            kept.append(" ")
        elif not category.startswith("C") and marks <= _MARKS_MAX:
            kept.append(character)
    return " ".join("".join(kept).split())[:limit].rstrip()


def _body(advert: Advert) -> bytes:
    return encode(msgspec.structs.replace(advert, signature=b""))
