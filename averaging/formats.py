"""What travels and what is kept: contributions, inputs, commit headers, witness acks, and the
control messages of the exchange (DESIGN.md, rules 3 to 6).

Every record is a frozen msgspec struct encoded as a msgpack array, so that equal records have
equal bytes. Signatures cover ``dugnad.dht.records.framed(domain, run, body)`` where ``body`` is the
record encoded with an empty signature. Digests are SHA-256 over the same bytes, so a second valid
signature cannot give a commit a second name.
"""

from __future__ import annotations

import hashlib
import math
from typing import Annotated, Final, TypeVar

import msgspec

from dugnad.averaging.orders import ORDERS_BYTES_MAX
from dugnad.averaging.passing import PeerClaims as PeerClaims
from dugnad.averaging.statements import STATEMENT_BYTES_MAX
from dugnad.averaging.trial import Answer as Answer
from dugnad.averaging.trial import Challenge as Challenge
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.records import RecordError, Signer, Verifier, decode, encode, framed

FORMAT: Final = 2
"""Version of the records below; a reader refuses any other."""

DIGEST_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
NO_DIGEST: Final = b"\x00" * DIGEST_BYTES
"""Stands where a root is reserved and nothing is published yet (trace roots, ``other``)."""

# Bounds of what a foreign record may hold. Named here, in one place.
PIECES_MAX: Final = 4096
"""Pieces of units in one contribution: a fast machine finishes about one a second, and a
contribution that waited an hour must still fit."""
INPUTS_MAX: Final = 1024
"""Inputs of one commit: a full mesh is 64 peers; aggregates keep larger swarms below this."""
JOIN_INPUTS_MAX: Final = 4096
"""Inputs of one join: an hour of six peers that went on apart at six seconds a version."""
COEFFICIENTS_MAX: Final = 4096
"""Tensor groups of one fragment."""
HEADER_BYTES_MAX: Final = 1024
"""DESIGN.md rule 5: a header is at most 1 KB, so that it can be flooded."""
COMMITS_PER_REPLY_MAX: Final = 32
"""Commits in one answer to :class:`WantCommits`; more are asked for again."""
MESSAGE_BYTES_MAX: Final = 4 << 20
"""One control message: 32 commits with their inputs and pieces of a 64-peer swarm."""
NUMBER_MAX: Final = (1 << 62) - 1
"""Any count or time in a record: room for a sum in 64 bits."""
ACKS_MAX: Final = 64
"""Witness acks sent along with one commit."""
REFUSAL_CHARS_MAX: Final = 200
"""Why an input was not counted, in a sentence."""
CLAIMS_MAX: Final = 64
"""Units claimed in one message; a peer holds fewer than that by claim."""
SCORES_MAX: Final = 16
"""Scores of held-out units in one message: 16 signatures are 2 ms of checking."""
SCORE_BYTES_MAX: Final = 256
PREPARED_MAX: Final = 4
"""Statements about prepared units in one message."""
PREPARED_BYTES_MAX: Final = 1280
"""Thirty-two hashes of 34 bytes, a key, a signature."""
"""One score: a key, a digest, a signature and five numbers."""
FRAGMENTS_MAX: Final = 4096
"""Fragments of one model."""

DOMAIN_CONTRIBUTION: Final = "contribution/1"
DOMAIN_HEADER: Final = "commit/1"
DOMAIN_ACK: Final = "witness/1"
DOMAIN_INPUT: Final = "input/1"
DOMAIN_GENESIS: Final = "genesis/1"


class UnitPiece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Sequences [start, stop) of work unit (epoch, index)."""

    epoch: int
    index: int
    start: int
    stop: int


class Contribution(msgspec.Struct, frozen=True, array_like=True):
    """One learner's compressed pseudo-gradient of one fragment, without the tensor itself.

    ``tokens`` are those trained since the maker's last counted hand-in of this fragment and equal
    the sequences in ``pieces`` times the run's sequence length. ``speed_class`` c stands for about
    2^(c/2) tokens a second. ``eligible`` says that the maker can be home.
    """

    peer: bytes
    fragment: int
    seq: int
    base: int
    base_digest: bytes
    tokens: int
    steps: int
    speed_class: int
    eligible: bool
    codec: str
    payload_root: bytes
    payload_bytes: int
    pieces_root: bytes
    trace_root: bytes = NO_DIGEST
    signature: bytes = b""


class Input(msgspec.Struct, frozen=True, array_like=True):
    """A contribution as a commit lists it: the maker's record, its units, and what became of it.

    ``clip`` in [0, 1] is the share that was counted; ``coefficients`` (one per tensor group) are
    what the vector was multiplied with in the sum. ``refusal`` is empty for a counted input.
    """

    contribution: Contribution
    pieces: tuple[UnitPiece, ...]
    clip: float
    coefficients: tuple[float, ...]
    refusal: str = ""


class Header(msgspec.Struct, frozen=True, array_like=True):
    """A commit's header (DESIGN.md rule 5); the payload and the inputs are named by their roots."""

    format: int
    run: bytes
    kind: str
    fragment: int
    version: int
    parent: bytes
    home: bytes
    boot: int
    time_ms: int
    members_root: bytes
    inputs_root: bytes
    inputs_count: int
    tokens_total: int
    eta_bits: int
    mu_bits: int
    codec: str
    payload_root: bytes
    payload_bytes: int
    theta_root: bytes
    momentum_root: bytes
    seqs_root: bytes
    other: bytes = NO_DIGEST
    alpha_bits: int = 0
    signature: bytes = b""


class Ack(msgspec.Struct, frozen=True, array_like=True):
    """A member's word that it holds the payload of a commit and computed the same roots."""

    peer: bytes
    fragment: int
    version: int
    digest: bytes
    signature: bytes = b""


class Member(msgspec.Struct, frozen=True, array_like=True):
    """One row of a commit's member table: who contributed lately, how fast, may it be home."""

    peer: bytes
    speed_class: int
    eligible: bool
    version: int


class SeqRow(msgspec.Struct, frozen=True, array_like=True):
    """One row of the last-seq table: the newest contribution of a peer that a lineage lists."""

    peer: bytes
    seq: int
    time_ms: int


class CommitRecord(msgspec.Struct, frozen=True, array_like=True):
    """A header with its inputs and the acks known for it: what peers hand each other."""

    header: Header
    inputs: tuple[Input, ...]
    acks: tuple[Ack, ...] = ()


class Checkpoint(msgspec.Struct, frozen=True, array_like=True):
    """What somebody without the history needs to go on from a head: its commit and its tables."""

    commit: CommitRecord
    members: tuple[Member, ...]
    seqs: tuple[SeqRow, ...]


# Control messages of the exchange. Tags are short because they are sent often.


class Announce(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """A commit, flooded; the payload is pulled from whoever has it."""

    commit: CommitRecord


class Witness(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """A member's ack, flooded."""

    ack: Ack


class HeadRow(msgspec.Struct, frozen=True, array_like=True):
    """Fragment, version and digest of one head."""

    fragment: int
    version: int
    digest: bytes


class Heads(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """The sender's heads; ``reply`` asks for the receiver's in return."""

    rows: tuple[HeadRow, ...]
    reply: bool = False


class WantCommits(msgspec.Struct, frozen=True, array_like=True, tag="g"):
    """Ask for the chain that ends in ``digest``, down to any of ``known`` (exclusive)."""

    fragment: int
    digest: bytes
    known: tuple[bytes, ...]


class Commits(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Answer: oldest first. ``checkpoint`` is set when the chain does not reach what was known."""

    fragment: int
    commits: tuple[CommitRecord, ...]
    checkpoint: Checkpoint | None = None


class Claims(msgspec.Struct, frozen=True, array_like=True, tag="u"):
    """The sender takes these work units, (epoch, index), out of the computed order."""

    units: tuple[tuple[int, int], ...]


class Word(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """The newest orders of the organiser that the sender holds, as :mod:`dugnad.averaging.orders`
    writes them."""

    data: Annotated[bytes, msgspec.Meta(max_length=ORDERS_BYTES_MAX)]


class Told(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """A statement that the sender has just made, as :mod:`dugnad.averaging.statements` reads it;
    whoever is not reached finds it by comparing sets."""

    data: Annotated[bytes, msgspec.Meta(max_length=STATEMENT_BYTES_MAX)]


class Scores(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """Signed scores of held-out units; whoever evaluates knows their form."""

    rows: Annotated[
        tuple[Annotated[bytes, msgspec.Meta(max_length=SCORE_BYTES_MAX)], ...],
        msgspec.Meta(max_length=SCORES_MAX),
    ]


class Prepares(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """Signed statements about prepared units; whoever prepares knows their form."""

    rows: Annotated[
        tuple[Annotated[bytes, msgspec.Meta(max_length=PREPARED_BYTES_MAX)], ...],
        msgspec.Meta(max_length=PREPARED_MAX),
    ]


Message = (
    Announce
    | Witness
    | Heads
    | WantCommits
    | Commits
    | Claims
    | Word
    | Challenge
    | Answer
    | Told
    | Scores
    | Prepares
    | PeerClaims
)

_Signed = TypeVar("_Signed", Contribution, Header, Ack)

_DOMAINS: Final = {
    Contribution: DOMAIN_CONTRIBUTION,
    Header: DOMAIN_HEADER,
    Ack: DOMAIN_ACK,
}


def signed_bytes(record: Contribution | Header | Ack, run: RunId) -> bytes:
    """The bytes that ``record``'s signature covers."""
    body = encode(msgspec.structs.replace(record, signature=b""))
    return framed(_DOMAINS[type(record)], run, body)


def sign_record(record: _Signed, run: RunId, signer: Signer) -> _Signed:
    """Return ``record`` with the signature of ``signer``."""
    return msgspec.structs.replace(record, signature=signer.sign(signed_bytes(record, run)))


def maker(record: Contribution | Header | Ack) -> PeerId:
    """Whose key must have signed ``record``."""
    return PeerId(record.home if isinstance(record, Header) else record.peer)


def signature_holds(record: Contribution | Header | Ack, run: RunId, verify: Verifier) -> bool:
    """Whether ``record`` is signed by its maker for this run."""
    if len(record.signature) != SIGNATURE_BYTES:
        return False
    return verify(maker(record), signed_bytes(record, run), record.signature)


def header_digest(header: Header, run: RunId) -> bytes:
    """The name of a commit: SHA-256 over the signed bytes of its header."""
    return hashlib.sha256(signed_bytes(header, run)).digest()


def genesis_digest(run: RunId, fragment: int, theta_root: bytes) -> bytes:
    """The name of version 0 of a fragment, which no commit made."""
    body = encode((fragment, theta_root))
    return hashlib.sha256(framed(DOMAIN_GENESIS, run, body)).digest()


def list_root(domain: str, run: RunId, rows: tuple[msgspec.Struct, ...]) -> bytes:
    """Root of an ordered list of rows: SHA-256 over the hashes of the encoded rows."""
    total = hashlib.sha256(framed(domain, run, encode(len(rows))))
    for row in rows:
        total.update(hashlib.sha256(encode(row)).digest())
    return total.digest()


def pieces_root(run: RunId, pieces: tuple[UnitPiece, ...]) -> bytes:
    """Root of the unit pieces of a contribution."""
    return list_root("pieces/1", run, pieces)


def inputs_root(run: RunId, inputs: tuple[Input, ...]) -> bytes:
    """Root of a commit's inputs, in their order."""
    return list_root(DOMAIN_INPUT, run, inputs)


def members_root(run: RunId, members: tuple[Member, ...]) -> bytes:
    """Root of a member table, rows ascending by peer."""
    return list_root("members/1", run, members)


def seqs_root(run: RunId, rows: tuple[SeqRow, ...]) -> bytes:
    """Root of a last-seq table, rows ascending by peer."""
    return list_root("seqs/1", run, rows)


def decode_message(data: bytes) -> Message:
    """Decode one control message; raises :class:`RecordError` with the reason."""
    message: Message = decode(data, Message, MESSAGE_BYTES_MAX)  # type: ignore[arg-type]
    reason = message_fault(message)
    if reason:
        raise RecordError(reason)
    return message


def decode_commit(data: bytes) -> CommitRecord:
    """Decode one commit record; raises :class:`RecordError` with the reason."""
    commit = decode(data, CommitRecord, MESSAGE_BYTES_MAX)
    reason = commit_fault(commit)
    if reason:
        raise RecordError(reason)
    return commit


def message_fault(message: Message) -> str:
    """Why a decoded message breaks a bound, or '' when it does not."""
    match message:
        case Announce(commit):
            return commit_fault(commit)
        case Witness(ack):
            return ack_fault(ack)
        case Heads(rows):
            if len(rows) > FRAGMENTS_MAX:
                return "too many heads"
            bad = [r for r in rows if not _named(r.fragment, r.digest) or not _small(r.version)]
            return "a head with a number or digest out of range" if bad else ""
        case WantCommits(fragment, digest, known):
            if len(known) > COMMITS_PER_REPLY_MAX:
                return "too many known digests"
            named = _named(fragment, digest) and all(len(d) == DIGEST_BYTES for d in known)
            return "" if named else "a wish with a number or digest out of range"
        case Challenge() | Answer() | Told() | Scores() | Prepares() | PeerClaims():
            return ""  # bounded by their types; what they are worth is judged where they are used
        case Word():
            return ""  # its size was checked with its type, the rest is for who knows the organiser
        case Claims(units):
            if len(units) > CLAIMS_MAX:
                return "too many claims"
            return "" if all(map(_small, sum(units, ()))) else "a claim with a number out of range"
        case Commits(fragment, commits, checkpoint):
            if len(commits) > COMMITS_PER_REPLY_MAX or not _small(fragment):
                return "too many commits, or a fragment out of range"
            faults = [commit_fault(c) for c in commits]
            if checkpoint is not None:
                faults.append(commit_fault(checkpoint.commit))
                if max(len(checkpoint.members), len(checkpoint.seqs)) > INPUTS_MAX * 64:
                    return "too many rows in a checkpoint"
            return next((fault for fault in faults if fault), "")


def _small(number: int) -> bool:
    return 0 <= number <= NUMBER_MAX


def _named(fragment: int, digest: bytes) -> bool:
    return 0 <= fragment < FRAGMENTS_MAX and len(digest) == DIGEST_BYTES


def ack_fault(ack: Ack) -> str:
    """Why an ack is malformed, or ''."""
    if len(ack.peer) != DIGEST_BYTES or len(ack.digest) != DIGEST_BYTES:
        return "an ack with a key or digest of the wrong length"
    fine = _named(ack.fragment, ack.digest) and _small(ack.version)
    return "" if fine else "an ack with a number out of range"


def commit_fault(commit: CommitRecord) -> str:
    """Why a commit record is malformed (sizes and ranges, not truth), or ''."""
    header = commit.header
    if header.format != FORMAT:
        return f"commit format {header.format}, this version reads {FORMAT}"
    if len(encode(header)) > HEADER_BYTES_MAX:
        return "a header over 1 KB"
    roots = (
        header.run,
        header.parent,
        header.home,
        header.members_root,
        header.inputs_root,
        header.payload_root,
        header.theta_root,
        header.momentum_root,
        header.seqs_root,
        header.other,
    )
    if any(len(root) != DIGEST_BYTES for root in roots):
        return "a header with a root of the wrong length"
    numbers = (header.fragment, header.tokens_total, header.time_ms, header.boot, header.version)
    bits = (header.eta_bits, header.mu_bits, header.alpha_bits)
    if header.version < 1 or not all(map(_small, (*numbers, header.payload_bytes, *bits))):
        return "a header with a number out of range"
    inputs_max = JOIN_INPUTS_MAX if header.other != NO_DIGEST else INPUTS_MAX
    if len(commit.inputs) > inputs_max or len(commit.inputs) != header.inputs_count:
        return "a commit whose inputs are not as many as its header says"
    if len(commit.acks) > ACKS_MAX:
        return "a commit with too many acks"
    faults = [input_fault(one) for one in commit.inputs]
    return next((fault for fault in faults if fault), "")


def input_fault(one: Input) -> str:
    """Why an input is malformed, or ''."""
    if not 0.0 <= one.clip <= 1.0 or not all(map(math.isfinite, one.coefficients)):
        return "an input with a clip factor outside [0, 1] or a coefficient that is no number"
    if len(one.refusal) > REFUSAL_CHARS_MAX:
        return "an input with a refusal that is too long"
    if len(one.coefficients) > COEFFICIENTS_MAX:
        return "an input with too many coefficients"
    return contribution_fault(one.contribution, one.pieces)


def contribution_fault(contribution: Contribution, pieces: tuple[UnitPiece, ...]) -> str:
    """Why a contribution is malformed, or ''."""
    c = contribution
    digests = (c.peer, c.base_digest, c.payload_root, c.pieces_root, c.trace_root)
    if any(len(one) != DIGEST_BYTES for one in digests):
        return "a contribution with a key or root of the wrong length"
    numbers = (c.fragment, c.seq, c.base, c.tokens, c.steps, c.payload_bytes)
    if not all(0 <= number <= NUMBER_MAX for number in numbers):
        return "a contribution with a number out of range"
    if not -64 <= c.speed_class <= 128:
        return "a contribution with a speed class out of range"
    if len(pieces) > PIECES_MAX:
        return "a contribution with too many unit pieces"
    numbered = all(_small(p.epoch) and _small(p.index) and _small(p.stop) for p in pieces)
    if not numbered or any(not 0 <= p.start < p.stop for p in pieces):
        return "a contribution with an impossible unit piece"
    return ""
