"""Makers of lineages that went on apart, and of joins; nothing here decides."""

from collections.abc import Sequence

from dugnad.averaging.formats import CommitRecord, Input
from dugnad.averaging.join import ETA_BITS, JOIN, MU_BITS
from dugnad.averaging.joinplan import plan
from dugnad.averaging.lineage import Lineage
from dugnad.averaging.node import Node

from .exchange_makers import commit, contribution, listing, named  # noqa: TID252  a helper, too


def made_on(node: Node, maker: bytes, seq: int, clip: float = 1.0) -> Input:
    """A contribution that was made on ``node``, as a commit lists it."""
    return listing(contribution(maker, seq, node.version, base_digest=node.digest), clip)


def add(lineage: Lineage, parent: Node, inputs: Sequence[Input], home: bytes, **c: object) -> Node:
    """A valid commit that lists these."""
    rows = sorted(inputs, key=lambda one: (one.contribution.peer, one.contribution.seq))
    record = commit(lineage, parent, rows, home, **c)
    assert lineage.judge(record, record.header.time_ms) == ""
    return lineage.add(record, named(record))


def branch(lineage: Lineage, parent: Node, makers: Sequence[bytes], length: int) -> list[Node]:
    """So many commits on ``parent``; each lists what all makers made on the one before."""
    nodes, parents = [], parent
    for _ in range(length):
        inputs = [made_on(parents, maker, parents.version + 1) for maker in makers]
        parents = add(lineage, parents, inputs, makers[0])
        nodes.append(parents)
    return nodes


def join_of(
    lineage: Lineage, head: Node, side: Node, home: bytes, **changes: object
) -> CommitRecord:
    """The planned join of ``side`` on ``head``, unless ``changes`` make it another."""
    made = plan(lineage, head, side)
    assert made is not None
    settled: dict[str, object] = {
        "kind": JOIN,
        "other": made.other,
        "alpha_bits": made.alpha_bits,
        "eta_bits": ETA_BITS,
        "mu_bits": MU_BITS,
        "codec": "float16",
    }
    return commit(lineage, head, made.inputs, home, **(settled | changes))
