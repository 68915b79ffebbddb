"""Judges the exchange's messages: which signatures one carries, which of them hold, what is left.

Pure functions of bytes, so that long messages can be judged in a thread, and a bounded memory of
what was found good, since each commit arrives many times.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from dugnad.averaging.formats import (
    Ack,
    Announce,
    CommitRecord,
    Commits,
    Contribution,
    Header,
    Message,
    Witness,
    decode_message,
    maker,
    signature_holds,
)
from dugnad.dht.ids import RunId, short
from dugnad.dht.records import RecordError, Verifier, encode

CHECKED_MAX: Final = 1 << 15
"""Signatures remembered as good, 5 MB: each commit comes from every neighbour and with each answer,
and 64 peers × 8 fragments × 32 commits are half of this.
"""

Signed = Header | Contribution | Ack
Named = tuple[bytes, Signed]
"""A signed record and a digest that names it together with its signature."""


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """A decoded message and its signed records, each named by a digest that covers the signature.

    `must` have to hold, or the message is refused; of `acks` those that fail are left out.
    """

    message: Message
    must: tuple[Named, ...]
    acks: tuple[Named, ...]


def parse_message(data: bytes, run: RunId) -> ParsedMessage:
    """RecordError for anything that is not a message of this run."""
    message = decode_message(data)
    commits = _commits(message)
    if any(commit.header.run != run for commit in commits):
        raise RecordError("a commit of another run")
    must: list[Signed] = [message.ack] if isinstance(message, Witness) else []
    for commit in commits:
        must.append(commit.header)
        must.extend(one.contribution for one in commit.inputs)
    acks = [ack for commit in commits for ack in commit.acks]
    return ParsedMessage(
        message,
        tuple((_name(record), record) for record in must),
        tuple((_name(ack), ack) for ack in acks),
    )


def _commits(message: Message) -> list[CommitRecord]:
    match message:
        case Announce(commit):
            return [commit]
        case Commits(commits=commits, checkpoint=checkpoint):
            return [*commits, *([checkpoint.commit] if checkpoint is not None else [])]
        case _:
            return []


def _name(record: Signed) -> bytes:
    """Names a record with its signature, for `CheckedRecords`."""
    return hashlib.sha256(type(record).__name__.encode() + encode(record)).digest()


def without_acks(message: Message, bad: set[bytes]) -> Message:
    """The message without the acks named in `bad`."""
    if not bad:
        return message

    def cleaned(commit: CommitRecord) -> CommitRecord:
        acks = tuple(ack for ack in commit.acks if _name(ack) not in bad)
        return msgspec.structs.replace(commit, acks=acks)

    match message:
        case Announce(commit):
            return Announce(cleaned(commit))
        case Commits(fragment, commits, checkpoint):
            if checkpoint is not None:
                checkpoint = msgspec.structs.replace(checkpoint, commit=cleaned(checkpoint.commit))
            return Commits(fragment, tuple(map(cleaned, commits)), checkpoint)
        case _:
            return message


class CheckedRecords:
    """Names of records whose signatures were found good; the least recently used are forgotten."""

    def __init__(self) -> None:
        self._names: OrderedDict[bytes, None] = OrderedDict()

    def add(self, names: Sequence[bytes]) -> None:
        """Remembers names of good records."""
        for name in names:
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > CHECKED_MAX:
            self._names.popitem(last=False)

    def unknown(self, records: Sequence[Named]) -> list[Named]:
        """Those of `records` that are still to be checked."""
        for name, _ in records:
            if name in self._names:
                self._names.move_to_end(name)
        return [(name, record) for name, record in records if name not in self._names]


def check_signatures(
    must: Sequence[Named],
    acks: Sequence[Named],
    run: RunId,
    verify: Verifier,
) -> list[bytes]:
    """Names of the records whose signature holds. RecordError at the first of `must` that fails."""
    for _, record in must:
        if not signature_holds(record, run, verify):
            kind = type(record).__name__.lower()
            raise RecordError(f"the {kind} of {short(maker(record))} is not signed by it")
    return [
        *(name for name, _ in must),
        *(name for name, ack in acks if signature_holds(ack, run, verify)),
    ]
