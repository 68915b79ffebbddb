"""What a restarted daemon knows of the versions below its heads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from dugnad.averaging.formats import Checkpoint, CommitRecord
from dugnad.averaging.lineage import Lineage
from dugnad.averaging.node import Node
from dugnad.peer.pastheads import ROOT_EVERY, ROOTS_KEPT, keep_root, past_of
from dugnad.peer.store import Store

from ..averaging.exchange_makers import (  # noqa: TID252  the tests are no installed package
    RULES,
    RUN,
    A,
    chain,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store.open(tmp_path / "state.sqlite", RUN)
    yield made
    made.close()


@pytest.fixture(scope="module")
def nodes() -> list[Node]:
    return chain(Lineage(RULES), [A], 2 * ROOT_EVERY + 20)


def point(node: Node) -> Checkpoint:
    made = Lineage(RULES).checkpoint(node)
    assert made is not None
    return made


def rows(nodes: list[Node]) -> list[tuple[bytes, CommitRecord]]:
    return [(node.digest, node.record) for node in nodes if node.record is not None]


def test_a_whole_store_gives_the_past_from_version_0(store: Store, nodes: list[Node]) -> None:
    store.add_commits(rows(nodes[:31]))
    past = past_of(store, RUN, point(nodes[30]), nodes[30].digest)
    assert past.root is None
    assert [digest for digest, _ in past.records] == [node.digest for node in nodes[1:31]]


def test_where_the_first_versions_are_gone_the_past_stands_on_a_root(
    store: Store, nodes: list[Node]
) -> None:
    for node in nodes[10:]:
        keep_root(store, 0, point(node))
    store.add_commits(rows(nodes[5:]))
    past = past_of(store, RUN, point(nodes[-1]), nodes[-1].digest)
    assert past.root is not None
    assert past.root[1] == nodes[10].digest
    assert past.records[0][0] == nodes[11].digest
    lineage = Lineage(RULES)
    lineage.add_checkpoint(*past.root)
    for digest, record in past.records:
        lineage.add(record, digest)
    assert lineage.nodes[nodes[-1].digest].seqs == nodes[-1].seqs


def test_a_root_on_a_branch_that_lost_is_passed_over(store: Store, nodes: list[Node]) -> None:
    commit = point(nodes[10]).commit
    elsewhere = msgspec.structs.replace(commit.header, boot=9)
    keep_root(store, 0, Checkpoint(CommitRecord(elsewhere, commit.inputs), (), ()))
    for node in nodes[11:]:
        keep_root(store, 0, point(node))
    store.add_commits(rows(nodes[5:]))
    past = past_of(store, RUN, point(nodes[-1]), nodes[-1].digest)
    assert past.root is not None
    assert past.root[0].commit.header.version == 10 + ROOT_EVERY


def test_without_commits_or_a_root_there_is_no_past(store: Store, nodes: list[Node]) -> None:
    assert past_of(store, RUN, point(nodes[-1]), nodes[-1].digest).records == ()
    store.add_commits(rows(nodes[5:]))
    assert past_of(store, RUN, point(nodes[-1]), nodes[-1].digest).records == ()


def test_roots_are_few(store: Store, nodes: list[Node]) -> None:
    commit = point(nodes[10]).commit
    for number in range(1, 2 * ROOTS_KEPT + 2):
        header = msgspec.structs.replace(commit.header, version=number * ROOT_EVERY)
        keep_root(store, 0, Checkpoint(CommitRecord(header, commit.inputs), (), ()))
    kept = store.kept("roots/0")
    assert kept is not None
    assert len(msgspec.msgpack.decode(kept)) == ROOTS_KEPT
