"""Asking for a chain of commits, and answering: what the asker names, how far the answer goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from dugnad.averaging.formats import (
    COMMITS_PER_REPLY_MAX,
    MESSAGE_BYTES_MAX,
    Checkpoint,
    CommitRecord,
    Commits,
)
from dugnad.averaging.lineage import Lineage
from dugnad.averaging.node import Node
from dugnad.averaging.pruning import VERSIONS_KEPT
from dugnad.dht.records import encode

TIPS_NAMED: Final = 8
"""Ends of branches named when a chain is asked for; more are a flood."""
NEWEST_NAMED: Final = 10
"""Ancestors of the head named one by one; below them the steps grow."""
STEP_GROWTH: Final = 1.6
"""1 024 versions are crossed in 13 steps, and a fork is met at most 1.6 times as deep as it is."""
CHAIN_MAX: Final = 4 * COMMITS_PER_REPLY_MAX
"""Further behind than this on the same lineage, a checkpoint is cheaper than the chain."""
REPLY_BYTES_MAX: Final = MESSAGE_BYTES_MAX // 2
"""Commits in one answer; a single one is less (``home.COMMIT_PIECES_MAX``)."""


def named(lineage: Lineage, head: Node, above: Sequence[bytes] = ()) -> tuple[bytes, ...]:
    """What to name as known when a chain is asked for: ``above``, the ends of branches, and the
    head's ancestors, ever further apart."""
    inner = {node.parent for node in lineage.nodes.values()}
    ends = sorted(
        ((n.version, d) for d, n in lineage.nodes.items() if d not in inner), reverse=True
    )
    known = [*above, *(digest for _, digest in ends[:TIPS_NAMED])]
    chain = [node.digest for node in lineage.ancestors(head)]
    known += chain[:NEWEST_NAMED]
    at, step = float(NEWEST_NAMED), 1.0
    while at < len(chain):
        known.append(chain[int(at)])
        step *= STEP_GROWTH
        at += step
    first = list(dict.fromkeys(known))[: COMMITS_PER_REPLY_MAX - 1]
    return tuple(dict.fromkeys([*first, chain[-1]]))


def answer(
    lineage: Lineage,
    node: Node,
    known: Sequence[bytes],
    record_of: Callable[[Node], CommitRecord],
) -> Commits:
    """The chain that ends in ``node``, oldest first, above what is known; as much as fits.

    On top of a checkpoint when it does not reach what is known, or when the asker is only behind
    and too far. Whoever stands on another branch gets all of it: forks are weighed and joined by
    what lies on them.
    """
    chain, connected = lineage.chain(node, known)
    below = {one.digest for one in lineage.ancestors(node)}
    elsewhere = any(digest not in below for digest in known)
    point: Checkpoint | None = None
    if not connected or len(chain) > (VERSIONS_KEPT if elsewhere else CHAIN_MAX):
        chain = chain[-COMMITS_PER_REPLY_MAX // 2 :]
        point = lineage.checkpoint(chain[0]) if chain else None
        if point is not None:
            point = Checkpoint(record_of(chain[0]), point.members, point.seqs)
    records: list[CommitRecord] = []
    size = len(encode(point)) if point is not None else 0
    for one in chain[:COMMITS_PER_REPLY_MAX]:
        record = record_of(one)
        size += len(encode(record))
        if records and size > REPLY_BYTES_MAX:
            break  # the asker asks again above the last one
        records.append(record)
    return Commits(lineage.rules.fragment, tuple(records), point)
