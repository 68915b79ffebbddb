"""Scores: what an evaluator says of one held-out unit under one set of agreed parameters.

A *round* is a version that every fragment has reached: the agreed parameters of all fragments at
exactly that version, named by the digest over their commits (`basis`). So two evaluators of a round
score the same bits, and their losses can be compared.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from dugnad.averaging.formats import DIGEST_BYTES, NUMBER_MAX, SCORE_BYTES_MAX
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

ROUND_VERSIONS: Final = 8
"""Every eighth version is evaluated: at the usual intervals one in two minutes, far more often than
a curve needs, and seldom enough for a board that scores a few hundred tokens a second."""
UNIT_SEQUENCES: Final = 32
"""Sequences of a held-out unit: seconds of forward passes on a slow board."""
UNITS_MAX: Final = 64
"""Held-out units of a run; where more text is held out they are spread evenly over it."""
LOSS_MAX: Final = 100.0
"""Nats a token; a uniform guess over all bytes is 5.5."""

_DOMAIN: Final = "score/1"
_BASIS_DOMAIN: Final = "score-basis/1"

Count = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class Score(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`loss` is the sum over `tokens`, in nats; `total` what the run had merged by that round, in
    tokens, as its maker's lineage says."""

    peer: Key
    version: Count
    basis: Digest
    unit: Count
    loss: float
    tokens: Count
    total: Count
    signature: Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES)] = b""

    @property
    def per_token(self) -> float:
        """Nats a token."""
        return self.loss / self.tokens


def signed(score: Score, run: RunId, signer: Signer) -> bytes:
    """The score with its maker's signature, for the wire."""
    signature = signer.sign(_bytes(score, run))
    return encode(msgspec.structs.replace(score, signature=signature))


def read_score(data: bytes, run: RunId, verifier: Verifier) -> Score:
    """The score in foreign bytes; RecordError unless it is in range and signed by its maker."""
    score = decode(data, Score, SCORE_BYTES_MAX)
    if not math.isfinite(score.loss) or not score.tokens:
        raise RecordError("a score that is no number of nats over some tokens")
    if not 0.0 <= score.per_token <= LOSS_MAX:
        raise RecordError(f"a loss of {score.per_token:.3g} nats a token")
    if not verifier(PeerId(score.peer), _bytes(score, run), score.signature):
        raise RecordError("a score that its maker did not sign")
    return score


def basis_of(digests: Sequence[bytes], run: RunId) -> bytes:
    """The name of the agreed parameters after these commits, one for each fragment in order."""
    return hashlib.sha256(framed(_BASIS_DOMAIN, run, b"".join(digests))).digest()


def _bytes(score: Score, run: RunId) -> bytes:
    return framed(_DOMAIN, run, encode(msgspec.structs.replace(score, signature=b"")))


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The held-out sequences [first, first + count) of `context` tokens, cut into units."""

    first: int
    count: int
    context: int

    @property
    def units(self) -> int:
        """How many units there are, at least one."""
        return max(1, min(UNITS_MAX, self.count // UNIT_SEQUENCES))

    def sequences(self, unit: int) -> list[int]:
        """The sequences of a unit by their numbers in the data; the last unit of a small text may
        have fewer than UNIT_SEQUENCES."""
        size = min(UNIT_SEQUENCES, self.count)
        start = unit * (self.count - size) // max(1, self.units - 1) if self.units > 1 else 0
        return list(range(self.first + start, self.first + start + size))

    @property
    def tokens(self) -> int:
        """Of a unit."""
        return min(UNIT_SEQUENCES, self.count) * self.context
