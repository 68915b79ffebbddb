"""Prepared units: the tokens of a work unit as one block, named by its SHA-256, and the signed
statements by which preparers say which block a unit is.

A statement is of a *batch*: BATCH_UNITS units that follow each other on the line of all units
(`unitplan`), so that one signature is worth many of them.
"""

import hashlib
import os
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec

from dugnad.averaging.formats import DIGEST_BYTES, NUMBER_MAX, PREPARED_BYTES_MAX
from dugnad.dht.ids import KEY_BYTES, PeerId, RunId
from dugnad.dht.records import (
    SIGNATURE_BYTES,
    RecordError,
    Signer,
    Verifier,
    decode,
    encode,
    framed,
)
from dugnad.peer.unitplan import UnitPlan

BATCH_UNITS: Final = 32
"""Units of a statement: 1.2 KB, a thirtieth of a signature and of a message each."""
BLOCK_BYTES_MAX: Final = 8 << 20
"""What one peer may send another at once (`transferwire`); units with more are not prepared."""
_DOMAIN: Final = "prepared/1"

Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class Prepared(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Its maker says: the units of this batch, in order, have the blocks with these SHA-256."""

    peer: Key
    batch: Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX // BATCH_UNITS)]
    digests: Annotated[
        tuple[Digest, ...], msgspec.Meta(min_length=BATCH_UNITS, max_length=BATCH_UNITS)
    ]
    signature: Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES)] = b""


def signed(said: Prepared, run: RunId, signer: Signer) -> bytes:
    """The statement with its maker's signature, for the wire."""
    return encode(msgspec.structs.replace(said, signature=signer.sign(_bytes(said, run))))


def read_prepared(data: bytes, run: RunId, verifier: Verifier) -> Prepared:
    """The statement in foreign bytes; RecordError unless it is in range and signed by its maker."""
    said = decode(data, Prepared, PREPARED_BYTES_MAX)
    if not verifier(PeerId(said.peer), _bytes(said, run), said.signature):
        raise RecordError("a statement about prepared units that its maker did not sign")
    return said


def _bytes(said: Prepared, run: RunId) -> bytes:
    return framed(_DOMAIN, run, encode(msgspec.structs.replace(said, signature=b"")))


def units_of(batch: int) -> range:
    """Positions of the units of a batch."""
    return range(batch * BATCH_UNITS, (batch + 1) * BATCH_UNITS)


def tokenise(text: bytes) -> bytes:
    """The tokens of raw text, one byte each, as a block holds them. The tokenizer of every run is
    this one today (`manifest.DATA_KINDS`); another kind of data has its place here."""
    return text


def block_of(text: int, plan: UnitPlan, position: int, context: int) -> bytes:
    """The block of a unit: its sequences of context + 1 tokens, in the unit's order.

    `text` is the open file of the text; it is read and not mapped, since the pages of a map are
    counted as this process's memory. OSError when the disk fails.
    """
    numbers = plan.sequences_of(*plan.unit(position))
    rows = (os.pread(text, context + 1, number * context) for number in numbers)
    return b"".join(tokenise(row) for row in rows)


def block_bytes(plan: UnitPlan, position: int, context: int) -> int:
    """Size of the block of a unit."""
    return plan.size_of(*plan.unit(position)) * (context + 1)


def tokens_in(plan: UnitPlan, positions: Iterable[int], context: int) -> int:
    """Tokens to train on in these units."""
    return sum(plan.size_of(*plan.unit(one)) for one in positions) * context


def name_of_block(block: bytes) -> bytes:
    """Its SHA-256."""
    return hashlib.sha256(block).digest()
