"""One commit with the tables of its lineage after it.

*Members* (who contributed in the last n versions, how fast, may it be home) and *last seqs* (the
newest contribution of each peer that the lineage lists) are named by root in the commit's header.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from dugnad.averaging.formats import (
    DIGEST_BYTES,
    NUMBER_MAX,
    Checkpoint,
    CommitRecord,
    Input,
    Member,
    SeqRow,
)
from dugnad.averaging.pruning import node_cost

ROWS_MAX: Final = 1 << 16
"""Rows of a checkpoint's table: every key that contributed in a week."""


@dataclass(slots=True)
class Node:
    """One commit (or version 0) with the state of its lineage after it."""

    digest: bytes
    version: int
    parent: bytes
    time_ms: int
    tokens_total: int
    members: tuple[Member, ...]
    seqs: dict[bytes, SeqRow]
    record: CommitRecord | None = None
    witnesses: set[bytes] = field(default_factory=set)
    listed: dict[tuple[bytes, int], Input] = field(default_factory=dict)
    weights: dict[bytes, int] = field(default_factory=dict)
    """Tokens of this commit per peer, capped by the peer's class."""
    member_keys: frozenset[bytes] = field(init=False)
    cost: int = field(init=False)
    """What it takes of memory (:mod:`dugnad.averaging.pruning`)."""

    def __post_init__(self) -> None:
        """Derive the set of members, and the cost."""
        self.member_keys = frozenset(row.peer for row in self.members)
        rows = len(self.members) + len(self.seqs)
        self.cost = node_cost(rows, self.record.inputs if self.record is not None else ())

    def member(self, peer: bytes) -> bool:
        """Whether ``peer`` is a member after this commit."""
        return peer in self.member_keys


def seq_rows(node: Node) -> tuple[SeqRow, ...]:
    """The last-seq table of a node, ascending by peer."""
    return tuple(node.seqs[peer] for peer in sorted(node.seqs))


def rows_fault(point: Checkpoint) -> str:
    """Why the tables of a checkpoint are not ones that a lineage could have, or ''."""
    for rows in (point.members, point.seqs):
        peers = [row.peer for row in rows]
        if len(peers) > ROWS_MAX or peers != sorted(set(peers)):
            return "a table of it is too long or not ascending"
        if any(len(peer) != DIGEST_BYTES for peer in peers):
            return "a table of it names a key of the wrong length"
    if not all(0 <= row.seq <= NUMBER_MAX and row.time_ms >= 0 for row in point.seqs):
        return "a last seq of it is out of range"
    if not all(0 < row.version <= point.commit.header.version for row in point.members):
        return "a member of it contributed at an impossible version"
    return ""
