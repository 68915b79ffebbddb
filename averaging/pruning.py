"""Which commits of a fragment are forgotten when memory is full.

A lineage reaches far back where that is cheap, so that a side that went on alone for an hour still
finds the fork it left at (rule 11): 600 versions at an interval of six seconds. Where commits are
large, fewer are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final, Protocol

from dugnad.averaging.formats import Input

NODES_MAX: Final = 2048
"""Commits kept in memory per fragment, of all branches; older ones live in the store."""
VERSIONS_KEPT: Final = 1024
"""Versions below the head that are kept where they are cheap: an hour and a half at six seconds."""
VERSIONS_SURE: Final = 128
"""Versions below the head that are kept on its chain whatever they cost."""
COST_MAX: Final = 1 << 18
"""What the commits of a fragment may cost, in units of about 128 bytes: 32 MB. A swarm of 64 peers
comes to about 250 versions, one of 16 to about 1000."""
RECENT_VERSIONS: Final = 32
"""Versions below the head whose commits are forgotten last: forks that may still win."""
INPUT_COST: Final = 8
"""An input costs so many units, and one more for each of its pieces; a row of a table costs one."""


class Kept(Protocol):
    """What is asked of a node."""

    @property
    def digest(self) -> bytes:
        """Its name."""
        ...

    @property
    def version(self) -> int:
        """Its version."""
        ...

    @property
    def cost(self) -> int:
        """What it costs, as :func:`node_cost` counts."""
        ...


def node_cost(rows: int, inputs: Iterable[Input]) -> int:
    """What a commit with so many rows in its tables and these inputs costs in memory."""
    return 1 + rows + sum(INPUT_COST + len(one.pieces) for one in inputs)


def doomed(
    nodes: Iterable[Kept], head: Kept, chain: Collection[bytes], stays: Collection[bytes]
) -> list[bytes]:
    """Digests to forget: what lies far below ``head``, then what memory cannot hold.

    ``chain`` are the head's known ancestors. What lies on no chain goes before what does, old
    before recent: anybody can sign any number of headers. ``stays`` are never forgotten.
    """
    low = head.version - VERSIONS_KEPT
    left = [one for one in nodes if one.version >= low or one.digest in stays]
    gone = [one.digest for one in nodes if one.version < low and one.digest not in stays]
    count, cost = len(left), sum(one.cost for one in left)
    if count <= NODES_MAX and cost <= COST_MAX:
        return sorted(gone)
    for one in _by_use(left, head, chain):
        if count <= NODES_MAX and cost <= COST_MAX:
            break
        sure = one.digest in chain and one.version >= head.version - VERSIONS_SURE
        if one.digest not in stays and not sure:
            gone.append(one.digest)
            count, cost = count - 1, cost - one.cost
    return sorted(gone)


def _by_use(nodes: Iterable[Kept], head: Kept, chain: Collection[bytes]) -> Sequence[Kept]:
    """The least useful first."""
    recent = head.version - RECENT_VERSIONS
    return sorted(
        nodes, key=lambda n: (n.digest in chain, n.version >= recent, n.version, n.digest)
    )
