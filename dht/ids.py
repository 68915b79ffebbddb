"""Names of things that are keys or hashes: peers and runs, as bytes, as text and as words.

A peer *is* its Ed25519 public key. The text form is the libp2p peer id of that key (`12D3KooW…`),
which contains the whole key, so a signature can be checked from the name alone. This module imports
nothing heavy: the command line uses it for every line it prints.
"""

import base64
import binascii
import hashlib
from typing import NewType

from dugnad.dht.words import WORDS

PeerId = NewType("PeerId", bytes)
"""The 32 raw bytes of an Ed25519 public key."""

RunId = NewType("RunId", bytes)
"""The 32-byte SHA-256 of a run's encoded manifest."""

KEY_BYTES = 32
RUN_BYTES = 32

# multihash "identity" (0x00), 36 bytes long (0x24), holding a libp2p PublicKey protobuf: field 1
# KeyType = Ed25519 (08 01), field 2 Data = 32 bytes (12 20). From the libp2p peer-id specification.
PEER_PREFIX = bytes.fromhex("002408011220")

# A peer id has 52 characters; anything far longer is not worth the quadratic base58 arithmetic.
PEER_TEXT_MAX = 64
RUN_TEXT_LENGTH = 52

_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_DIGIT = {letter: value for value, letter in enumerate(_ALPHABET)}
_NAME_TAG = b"dugnad name 1\0"


def peer_text(peer: PeerId) -> str:
    """The libp2p text form of a peer, 52 characters that start with `12D3KooW`."""
    return base58_encode(PEER_PREFIX + peer)


def parse_peer(text: str) -> PeerId:
    """The peer that `text` names; ValueError with the reason when it names none."""
    if len(text) > PEER_TEXT_MAX:
        raise ValueError(f"a peer id has 52 characters, this has {len(text)}")
    raw = base58_decode(text)
    if not raw.startswith(PEER_PREFIX):
        raise ValueError("not the id of an Ed25519 key (those start with 12D3KooW)")
    if len(raw) != len(PEER_PREFIX) + KEY_BYTES:
        raise ValueError("the peer id is cut short or has characters too many")
    return PeerId(raw[len(PEER_PREFIX) :])


def short(peer: PeerId) -> str:
    """The last six characters of the text form: enough to tell peers apart in a log line."""
    return peer_text(peer)[-6:]


def name_of(peer: PeerId) -> str:
    """Three words from the key, the default name of a peer: a label, not an identity (24 bits)."""
    digest = hashlib.sha256(_NAME_TAG + peer).digest()
    return "-".join(WORDS[digest[position]] for position in range(3))


def run_text(run: RunId) -> str:
    """The text form of a run: 52 lower-case base32 characters without padding."""
    return base64.b32encode(run).decode("ascii").rstrip("=").lower()


def parse_run(text: str) -> RunId:
    """The run that `text` names; ValueError with the reason when it names none."""
    if len(text) != RUN_TEXT_LENGTH:
        raise ValueError(f"a run id has {RUN_TEXT_LENGTH} characters, this has {len(text)}")
    try:
        raw = base64.b32decode(text.upper() + "====")
    except (binascii.Error, ValueError):
        raise ValueError("a run id consists of the letters a to z and the digits 2 to 7") from None
    run = RunId(raw)
    if run_text(run) != text.lower():
        raise ValueError("the last character of the run id is impossible")
    return run


def base58_encode(raw: bytes) -> str:
    """The base58 text of `raw` (Bitcoin's alphabet, as libp2p uses it)."""
    number, letters = int.from_bytes(raw, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        letters = _ALPHABET[digit] + letters
    return "1" * (len(raw) - len(raw.lstrip(b"\0"))) + letters


def base58_decode(text: str) -> bytes:
    """The bytes of a base58 text of at most a few hundred characters; ValueError if malformed."""
    number = 0
    for letter in text:
        if letter not in _DIGIT:
            raise ValueError(f"{letter!r} cannot occur in a peer id")
        number = number * 58 + _DIGIT[letter]
    zeros = len(text) - len(text.lstrip("1"))
    return b"\0" * zeros + number.to_bytes((number.bit_length() + 7) // 8, "big")
