"""A head that comes back with its past knows its forks again (DESIGN.md rule 11)."""

import pytest

from dugnad.averaging.exchange import Exchange
from dugnad.averaging.formats import Checkpoint, CommitRecord, SeqRow
from dugnad.averaging.history import History
from dugnad.averaging.joinplan import plan
from dugnad.averaging.lineage import Lineage
from dugnad.averaging.node import Node

from .exchange_makers import RULES, A, B, C, D, settings  # noqa: TID252  a helper of these tests
from .join_makers import branch  # noqa: TID252  the same


@pytest.fixture
def lineage() -> Lineage:
    return Lineage(RULES)


def point_of(lineage: Lineage, node: Node) -> Checkpoint:
    point = lineage.checkpoint(node)
    assert point is not None
    return point


def rows(nodes: list[Node]) -> tuple[tuple[bytes, CommitRecord], ...]:
    return tuple((node.digest, node.record) for node in nodes if node.record is not None)


def test_a_past_from_version_0_is_the_same_again(lineage: Lineage) -> None:
    nodes = branch(lineage, lineage.genesis, [A, B], 12)
    core = Exchange(settings(D))
    assert core.resume(point_of(lineage, nodes[-1]), nodes[-1].digest, History(rows(nodes))) == ""
    assert core.head.digest == nodes[-1].digest
    again = core.view.lineage
    assert set(again.nodes) == set(lineage.nodes)
    assert all(again.nodes[one.digest].seqs == one.seqs for one in nodes)
    assert all(again.nodes[one.digest].weights == one.weights for one in nodes)


def test_a_past_above_a_root_reaches_down_to_it(lineage: Lineage) -> None:
    nodes = branch(lineage, lineage.genesis, [A, B], 12)
    root = (point_of(lineage, nodes[4]), nodes[4].digest)
    core = Exchange(settings(D))
    past = History(rows(nodes[5:]), root)
    assert core.resume(point_of(lineage, nodes[-1]), nodes[-1].digest, past) == ""
    assert core.view.lineage.oldest_known(core.head) == 5


def test_who_restarted_while_it_was_alone_can_still_be_joined(lineage: Lineage) -> None:
    fork = branch(lineage, lineage.genesis, [A, B, C, D], 2)[-1]
    mine, theirs = branch(lineage, fork, [D], 9), branch(lineage, fork, [A, B, C], 9)
    trunk = [*lineage.ancestors(fork)][::-1][1:]
    core = Exchange(settings(D))
    core.resume(point_of(lineage, mine[-1]), mine[-1].digest, History(rows([*trunk, *mine])))
    for digest, record in rows(theirs):
        assert core.view.lineage.judge(record, record.header.time_ms) == ""
        core.view.lineage.add(record, digest)
    made = plan(core.view.lineage, core.view.lineage.nodes[theirs[-1].digest], core.head)
    assert made is not None
    assert len(made.inputs) == 9


def test_a_past_that_does_not_fit_is_left_out_and_said(lineage: Lineage) -> None:
    nodes = branch(lineage, lineage.genesis, [A, B], 12)
    point, digest = point_of(lineage, nodes[-1]), nodes[-1].digest
    visitor = SeqRow(b"\xff" * 32, 1, nodes[4].time_ms)
    tables = point_of(lineage, nodes[4])
    root = Checkpoint(tables.commit, tables.members, (*tables.seqs, visitor))
    cases = (
        (History(rows(nodes[3:])), "does not stand on the one before"),
        (History(rows(nodes[:-1])), "does not end in the head"),
        (History(rows(nodes[5:]), (root, nodes[4].digest)), "do not lead to those of the head"),
    )
    for past, reason in cases:
        core = Exchange(settings(D))
        assert reason in core.resume(point, digest, past)
        assert set(core.view.lineage.nodes) == {core.view.lineage.genesis.digest, digest}
        assert core.head.seqs == nodes[-1].seqs
