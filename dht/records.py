"""Signed records: the exact bytes that are signed, and typed decoding of foreign bytes.

Foreign bytes are judged here, once: `decode` either returns a value of the asked type or raises
`RecordError`, whatever the bytes are. The structs themselves belong to the modules that use them
(`msgspec.Struct, frozen=True, array_like=True` keeps them small).

Every signature is made over `framed(domain, run, body)`: the domain says what kind of statement
it is and the run where it holds, so a signature is never carried over to another kind or run.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from dugnad.dht.ids import KEY_BYTES, RUN_BYTES, PeerId, RunId

T = TypeVar("T")

SIGNATURE_BYTES = 64
NO_RUN = RunId(bytes(RUN_BYTES))
"""Stands in `framed` for statements that belong to no run, such as an address book entry."""

# First bytes of everything that dugnad signs, with the version of this framing.
SIGNING_TAG = b"dugnad signed 1\0"
_DOMAIN = re.compile(r"[a-z][a-z0-9 ./_-]{0,63}")

# Kinds of records in the program: a few dozen; a decoder is some kilobytes.
_DECODERS_MAX = 256
# A reason travels back to the sender and into logs, and may quote foreign text.
_REASON_CHARS_MAX = 200


class RecordError(ValueError):
    """Foreign bytes that are not what they should be. `reason` is safe to log and to send back."""

    def __init__(self, reason: str) -> None:
        self.reason = "".join(c if c.isprintable() else "?" for c in reason[:_REASON_CHARS_MAX])
        super().__init__(self.reason)


class Signer(Protocol):
    """Who can sign in a peer's name; `dugnad.dht.identity.Identity` is one."""

    @property
    def peer(self) -> PeerId:
        """The peer in whose name `sign` signs."""
        ...

    def sign(self, message: bytes) -> bytes:
        """The 64-byte Ed25519 signature of `message`."""
        ...


Verifier = Callable[[PeerId, bytes, bytes], bool]
"""(peer, message, signature) -> whether the peer signed exactly that message."""


def framed(domain: str, run: RunId, body: bytes) -> bytes:
    """The exact bytes that are signed: tag, domain, run and body, with one way to read them.

    `domain` is a constant of the program, such as "advert"; a malformed one is our own error.
    """
    assert _DOMAIN.fullmatch(domain), f"malformed signing domain {domain!r}"
    assert len(run) == RUN_BYTES, "a run id has 32 bytes"
    return SIGNING_TAG + domain.encode("ascii") + b"\0" + run + body


def verify_ed25519(peer: PeerId, message: bytes, signature: bytes) -> bool:
    """Whether `peer` signed `message`. Total: malformed keys and signatures are not valid."""
    if len(peer) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(peer).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def encode(obj: object) -> bytes:
    """The msgpack bytes of `obj`: the same bytes for equal values (map keys are sorted)."""
    return _ENCODER.encode(obj)


def decode(data: bytes, type: type[T], limit: int) -> T:
    """The value of `type` that `data` encodes; RecordError if it exceeds `limit` bytes or is wrong.

    Never raises anything else, however malformed the bytes are.
    """
    if len(data) > limit:
        raise RecordError(f"{len(data)} bytes, more than the allowed {limit}")
    try:
        value: T = _decoder(cast(Any, type)).decode(data)  # cast: lru_cache wants a Hashable
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise RecordError(f"not a valid {getattr(type, '__name__', 'message')}: {error}") from None
    return value


_ENCODER = msgspec.msgpack.Encoder(order="deterministic")


@functools.lru_cache(_DECODERS_MAX)
def _decoder(type: Any) -> Any:  # Any: msgspec's Decoder is generic over a type known at run time
    return msgspec.msgpack.Decoder(type)
