"""A lineage's past, known again after a restart: without it a fork could not be found (rule 11).

A head comes back with its tables, what lies below it as commits alone. Their tables follow from
those of an older commit, the *root*, or from version 0, by the same steps as when they came.
"""

from __future__ import annotations

from dataclasses import dataclass

from dugnad.averaging.formats import Checkpoint, CommitRecord
from dugnad.averaging.lineage import Lineage


@dataclass(frozen=True, slots=True)
class History:
    """Commits below a head and up to it, oldest first, each on top of the one before.

    The first stands on ``root`` (a checkpoint and its digest), or on version 0.
    """

    records: tuple[tuple[bytes, CommitRecord], ...] = ()
    root: tuple[Checkpoint, bytes] | None = None


def recall(lineage: Lineage, point: Checkpoint, digest: bytes, history: History) -> str:
    """Let ``lineage`` know the head ``digest`` with its past; why the past cannot be, or ''.

    The head itself is known in either case, by its tables. Nothing is judged but that the tables
    which follow are the head's: the records were judged when they were adopted.
    """
    reason = _replay(lineage, digest, history)
    node = lineage.get(digest)
    if not reason and node is not None:
        point_of = lineage.checkpoint(node)
        if point_of is None or (point_of.members, point_of.seqs) != (point.members, point.seqs):
            reason = "its tables do not lead to those of the head"
    if reason:
        lineage.clear()
    lineage.add_checkpoint(point, digest)
    return reason


def _replay(lineage: Lineage, digest: bytes, history: History) -> str:
    if history.root is not None:
        root, name = history.root
        lineage.add_checkpoint(root, name)
    last = b""
    for last, record in history.records:
        if lineage.get(record.header.parent) is None:
            return "a commit of it does not stand on the one before"
        lineage.add(record, last)
    return "" if last == digest or not history.records else "it does not end in the head"
