"""Makers of contributions, commits and cores for the exchange tests; nothing here decides."""

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from dugnad.averaging import events as ev
from dugnad.averaging.exchange import Exchange
from dugnad.averaging.formats import (
    FORMAT,
    NO_DIGEST,
    Ack,
    CommitRecord,
    Contribution,
    Header,
    HeadRow,
    Input,
    UnitPiece,
    header_digest,
    inputs_root,
    members_root,
    pieces_root,
    seqs_root,
)
from dugnad.averaging.lineage import Lineage, LineageRules
from dugnad.averaging.node import Node, seq_rows
from dugnad.averaging.view import ExchangeSettings
from dugnad.dht.ids import PeerId, RunId

RUN = RunId(hashlib.sha256(b"a run").digest())
SEQUENCE_TOKENS = 16
START_MS = 1_000_000
"""When version 0 was made, by the wall clock."""
INTERVAL_S = 4.0
INTERVAL_MS = 4000
CLASS = 12
"""2^6 = 64 tokens a second: 256 an interval, 384 with slack."""
ETA, MU = 0x3F333333, 0x3F000000

A, B, C, D = sorted(PeerId(hashlib.sha256(name).digest()) for name in (b"a", b"b", b"c", b"d"))

RULES = LineageRules(
    run=RUN,
    fragment=0,
    staleness=2,
    horizon=4,
    member_versions=8,
    merge_floor_ms=500,
    genesis_theta_root=b"\x07" * 32,
    genesis_time_ms=START_MS,
    sequence_tokens=SEQUENCE_TOKENS,
)

_T = TypeVar("_T")
_numbers = iter(range(1 << 30))


def root(text: str) -> bytes:
    """A digest that differs for each text."""
    return hashlib.sha256(text.encode()).digest()


def work(sequences: int, index: int = 0) -> tuple[UnitPiece, ...]:
    """Unit pieces with that many sequences."""
    return (UnitPiece(0, index, 0, sequences),)


def contribution(
    peer: bytes, seq: int, base: int, *, sequences: int = 8, **changes: object
) -> Contribution:
    """A well-formed contribution with ``work(sequences)`` behind it."""
    made = Contribution(
        peer=peer,
        fragment=0,
        seq=seq,
        base=base,
        base_digest=root("base"),
        tokens=sequences * SEQUENCE_TOKENS,
        steps=sequences,
        speed_class=CLASS,
        eligible=True,
        codec="int8",
        payload_root=root("payload"),
        payload_bytes=100,
        pieces_root=pieces_root(RUN, work(sequences)),
        signature=b"s" * 64,
    )
    return msgspec.structs.replace(made, **changes)


def listing(made: Contribution, clip: float = 1.0, refusal: str = "") -> Input:
    """The contribution as a commit lists it."""
    sequences = made.tokens // SEQUENCE_TOKENS
    return Input(made, work(sequences), clip, (0.5,), refusal)


def draft(parent: Node, inputs: Sequence[Input], home: bytes, **changes: object) -> CommitRecord:
    """A commit on ``parent`` whose tables are not filled in."""
    header = Header(
        format=FORMAT,
        run=RUN,
        kind="merge",
        fragment=0,
        version=parent.version + 1,
        parent=parent.digest,
        home=home,
        boot=0,
        time_ms=parent.time_ms + INTERVAL_MS,
        members_root=NO_DIGEST,
        inputs_root=inputs_root(RUN, tuple(inputs)),
        inputs_count=len(inputs),
        tokens_total=0,
        eta_bits=ETA,
        mu_bits=MU,
        codec="int8",
        payload_root=root(f"payload {next(_numbers)}"),
        payload_bytes=100,
        theta_root=root("theta"),
        momentum_root=root("momentum"),
        seqs_root=NO_DIGEST,
        signature=b"h" * 64,
    )
    return CommitRecord(msgspec.structs.replace(header, **changes), tuple(inputs))


def commit(
    lineage: Lineage, parent: Node, inputs: Sequence[Input], home: bytes, **changes: object
) -> CommitRecord:
    """A valid commit on ``parent``, unless ``changes`` make it another."""
    record = draft(parent, inputs, home, **changes)
    node = lineage.child(record, b"", parent)
    tables: dict[str, object] = {
        "members_root": members_root(RUN, node.members),
        "seqs_root": seqs_root(RUN, seq_rows(node)),
        "tokens_total": node.tokens_total,
    }
    header = msgspec.structs.replace(record.header, **(tables | changes))
    return CommitRecord(header, record.inputs)


def named(record: CommitRecord) -> bytes:
    """The digest of a commit."""
    return header_digest(record.header, RUN)


def grow(lineage: Lineage, parent: Node, makers: Iterable[bytes], home: bytes, **c: object) -> Node:
    """Add a valid commit that lists one contribution of each maker, made on ``parent``."""
    inputs = [listing(contribution(m, parent.version + 1, parent.version)) for m in sorted(makers)]
    record = commit(lineage, parent, inputs, home, **c)
    assert lineage.judge(record, record.header.time_ms) == ""
    return lineage.add(record, named(record))


def chain(lineage: Lineage, makers: Sequence[bytes], length: int) -> list[Node]:
    """Version 0 and ``length`` commits on it, each listing all makers, the first as home."""
    nodes = [lineage.genesis]
    for _ in range(length):
        nodes.append(grow(lineage, nodes[-1], makers, makers[0]))
    return nodes


def ack(peer: bytes, record: CommitRecord) -> Ack:
    """A witness ack (the signature is the shell's business)."""
    return Ack(peer, 0, record.header.version, named(record), b"a" * 64)


def settings(me: PeerId, **changes: object) -> ExchangeSettings:
    """The settings of a peer of this run."""
    made = ExchangeSettings(me=me, lineage=RULES, eta_bits=ETA, mu_bits=MU, can_home=True, boot=0)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


class Peer:
    """One core with a clock that only tests move; the wall clock agrees with the headers'."""

    def __init__(self, me: PeerId, live: Iterable[PeerId] = (), *, learner: bool = True) -> None:
        self.core = Exchange(settings(me))
        self.now = 0.0
        self.actions: list[ev.Action] = []
        self.tell(ev.Pace(INTERVAL_S, START_MS / 1000.0))
        for peer in live:
            self.tell(ev.PeerUp(peer))
        if learner:
            self.tell(ev.LearnerState(True))

    def tell(self, event: ev.Event, after: float = 0.0) -> list[ev.Action]:
        """Feed an event ``after`` seconds; returns what the core asks for."""
        self.now += after
        self.actions = self.core.handle(event, self.now)
        return self.actions

    def wait(self, seconds: float) -> list[ev.Action]:
        """Let the clock run, timers going off when the core asked for it; all actions of it."""
        end, found = self.now + seconds, []
        while self.core.deadline is not None and self.core.deadline <= end:
            self.now = max(self.now, self.core.deadline)
            found += self.tell(ev.Timer())
        self.now = end
        return found + self.tell(ev.Timer())

    def hear(self, record: CommitRecord, sender: PeerId) -> list[ev.Action]:
        """A commit, its anchors at once, and a witness of each member but the home."""
        found = self.tell(ev.CommitIn(sender, record))
        found += self.tell(ev.Obtained(named(record)))
        node = self.core.view.lineage.get(named(record))
        assert node is not None
        for row in node.members:
            if row.peer not in (record.header.home, self.core.view.me):
                found += self.tell(ev.AckIn(ack(row.peer, record)))
        return found

    def advance(
        self, makers: Iterable[PeerId], home: PeerId, *, wait: float = INTERVAL_S
    ) -> CommitRecord:
        """An interval passes and the next version, listing all makers, becomes the head."""
        self.wait(wait)
        making = self.core.contributor.making
        if making is not None:  # the learner had done nothing yet
            self.tell(ev.HandedIn(making, None, ()))
        view = self.core.view
        seq = view.head.version + 1
        inputs = [listing(contribution(m, seq, view.head.version)) for m in sorted(makers)]
        record = commit(view.lineage, view.head, inputs, home, time_ms=view.wall_ms)
        self.hear(record, next(iter(view.live)))
        assert self.core.head.digest == named(record)
        return record

    def hand_in(self, sequences: int = 8) -> Contribution:
        """Answer the hand-in that is under way with progress."""
        seq = self.core.contributor.making
        assert seq is not None
        head = self.core.head
        made = contribution(self.core.view.me, seq, head.version, sequences=sequences)
        made = msgspec.structs.replace(made, base_digest=head.digest)
        self.tell(ev.HandedIn(seq, made, work(sequences)))
        return made

    def row(self, record: CommitRecord) -> HeadRow:
        """How a peer names a commit as its head."""
        return HeadRow(0, record.header.version, named(record))


def only(actions: Iterable[ev.Action], kind: type[_T]) -> list[_T]:
    """The actions of one kind."""
    return [one for one in actions if isinstance(one, kind)]


def merged(parent: Node, inputs: Iterable[Input]) -> ev.Merged:
    """What a worker answers to a merge of these inputs."""
    return ev.Merged(
        parent.digest,
        tuple(inputs),
        "int8",
        root(f"payload {next(_numbers)}"),
        100,
        root("theta"),
        root("momentum"),
    )
