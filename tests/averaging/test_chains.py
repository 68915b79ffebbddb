"""Asking for chains and answering: a fork is found however far back, in bounded messages."""

import pytest

from dugnad.averaging.chains import CHAIN_MAX, answer, named
from dugnad.averaging.formats import COMMITS_PER_REPLY_MAX, CommitRecord
from dugnad.averaging.lineage import Lineage
from dugnad.averaging.node import Node
from dugnad.averaging.pruning import VERSIONS_KEPT

from .exchange_makers import RULES, A, B  # noqa: TID252  a helper of these tests
from .exchange_makers import chain as chain_of  # noqa: TID252  the same
from .join_makers import branch  # noqa: TID252  the same


@pytest.fixture
def lineage() -> Lineage:
    return Lineage(RULES)


def record(node: Node) -> CommitRecord:
    assert node.record is not None
    return node.record


def told(lineage: Lineage, nodes: list[Node]) -> Lineage:
    """A lineage that knows only these."""
    other = Lineage(lineage.rules)
    for node in nodes:
        if node.record is not None:
            other.add(node.record, node.digest)
    return other


def test_named_are_the_newest_one_by_one_and_older_ones_ever_further_apart(
    lineage: Lineage,
) -> None:
    nodes = chain_of(lineage, [A], 700)
    known = named(lineage, nodes[-1])
    assert len(known) <= COMMITS_PER_REPLY_MAX
    versions = [node.version for one in known if (node := lineage.get(one)) is not None]
    assert versions[:10] == list(range(700, 690, -1))
    assert versions[-1] == 0
    for deep in range(11, 700):  # the newest named one below a fork lies at most so deep
        below = max(version for version in versions if version <= 700 - deep)
        assert 700 - below <= 1.7 * deep + 2


def test_a_branch_of_an_hour_is_fetched_whole_from_where_the_asker_left_it(
    lineage: Lineage,
) -> None:
    trunk = chain_of(lineage, [A, B], 20)
    mine, theirs = branch(lineage, trunk[-1], [A], 600), branch(lineage, trunk[-1], [B], 600)
    asker, server = told(lineage, [*trunk, *mine]), told(lineage, [*trunk, *theirs])
    head, last, rounds = mine[-1], b"", 0
    while asker.get(theirs[-1].digest) is None:
        known = named(asker, head, (last,) if last else ())
        reply = answer(server, theirs[-1], known, record)
        assert reply.checkpoint is None
        for one in reply.commits:
            digest = next(node.digest for node in [*trunk, *theirs] if node.record == one)
            asker.add(one, digest)
            last = digest
        rounds += 1
        assert rounds < 40
    assert asker.fork_point(head, asker.nodes[theirs[-1].digest]) is not None


def test_who_is_only_behind_and_far_gets_a_checkpoint(lineage: Lineage) -> None:
    nodes = chain_of(lineage, [A], CHAIN_MAX + 20)
    reply = answer(lineage, nodes[-1], (nodes[5].digest,), record)
    assert reply.checkpoint is not None
    assert reply.commits[-1] == nodes[-1].record
    near = answer(lineage, nodes[-1], (nodes[30].digest,), record)
    assert near.checkpoint is None


def test_a_branch_that_left_beyond_what_is_kept_is_a_checkpoint(lineage: Lineage) -> None:
    nodes = chain_of(lineage, [A], VERSIONS_KEPT + 5)
    reply = answer(lineage, nodes[-1], (b"x" * 32, nodes[1].digest), record)
    assert reply.checkpoint is not None
