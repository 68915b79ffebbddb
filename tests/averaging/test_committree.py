"""The lineage of a set of commits: order-free, the lineage's own choice, and nobody's alone."""

import itertools
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dugnad.averaging.committree import LATE, CommitTree, Start, row_of, start_of, tell
from dugnad.averaging.formats import CommitRecord
from dugnad.averaging.lineage import Lineage
from dugnad.averaging.node import Node

from .exchange_makers import (  # noqa: TID252  a helper of these tests
    INTERVAL_MS,
    RULES,
    A,
    B,
    C,
    D,
    chain,
    commit,
    contribution,
    grow,
    listing,
    named,
)
from .join_makers import branch, join_of  # noqa: TID252

PEOPLE = (A, B, C, D)


def commits_of(lineage: Lineage) -> dict[bytes, CommitRecord]:
    return {d: node.record for d, node in lineage.nodes.items() if node.record is not None}


def told(commits: dict[bytes, CommitRecord]) -> tuple[Start, tuple[bytes, ...], dict[bytes, str]]:
    return tell(RULES, commits)


@st.composite
def forests(draw: st.DrawFn) -> Lineage:
    """Up to sixteen commits, each on any node before it, with any home and some makers."""
    lineage = Lineage(RULES)
    nodes = [lineage.genesis]
    for n in range(draw(st.integers(1, 16))):
        parent = nodes[draw(st.integers(max(len(nodes) - 4, 0), len(nodes) - 1))]
        makers = draw(st.sets(st.sampled_from(PEOPLE), min_size=1))
        home = draw(st.sampled_from(PEOPLE))
        nodes.append(
            grow(lineage, parent, makers, home, time_ms=parent.time_ms + INTERVAL_MS + 10 * n)
        )
    return lineage


def expected(lineage: Lineage) -> Node:
    """The choice as said in words, by brute force and with the lineage's own comparison."""
    above: dict[bytes, list[Node]] = {d: [] for d in lineage.nodes}
    for node in lineage.nodes.values():
        for older in itertools.islice(lineage.ancestors(node), 1, None):
            above[older.digest].append(node)

    def home(node: Node) -> bytes | None:
        return node.record.header.home if node.record is not None else None

    confirmed = [
        node
        for digest, node in lineage.nodes.items()
        if node.record is None or any(home(one) != home(node) for one in above[digest])
    ]
    names = {node.digest for node in confirmed}
    newest = [n for n in confirmed if not names & {one.digest for one in above[n.digest]}]
    settled = lineage.best(newest)
    tails = [node for node in (settled, *above[settled.digest]) if not above[node.digest]]
    return lineage.best(tails)


@settings(max_examples=60)
@given(forests(), st.randoms(use_true_random=False))
def test_the_lineage_of_a_set_is_order_free_and_the_lineages_own_choice(
    lineage: Lineage, rng: random.Random
) -> None:
    commits = commits_of(lineage)
    start, lines, refused = told(commits)
    assert (start.version, refused) == (0, {})
    assert (lines[-1] if lines else start.digest) == expected(lineage).digest
    mixed = list(commits.items())
    rng.shuffle(mixed)
    assert told(dict(mixed)) == (start, lines, refused)


def test_a_tail_of_one_home_alone_outweighs_nothing_that_another_built_upon() -> None:
    lineage = Lineage(RULES)
    trunk = chain(lineage, [A, B, C], 2)[-1]
    honest = grow(lineage, grow(lineage, trunk, [B], B), [C], C)
    lie = trunk
    for _ in range(4):
        lie = grow(lineage, lie, [A, B, C, D], A)
    assert lineage.better(lie, honest)
    assert told(commits_of(lineage))[1][-1] == honest.digest
    other = grow(lineage, lie, [B], B)  # once somebody else builds on it, the weight decides
    assert told(commits_of(lineage))[1][-1] == other.digest


def test_who_trains_alone_has_a_lineage_all_the_same() -> None:
    lineage = Lineage(RULES)
    newest = chain(lineage, [A], 5)[-1]
    assert told(commits_of(lineage))[1][-1] == newest.digest
    assert told({})[1] == ()


def test_a_set_whose_first_versions_were_forgotten_begins_where_it_does() -> None:
    lineage = Lineage(RULES)
    nodes = chain(lineage, [A, B], 6)
    newest = grow(lineage, nodes[-1], [B], B)
    fork = grow(lineage, nodes[4], [A], B)
    whole = commits_of(lineage)
    late = {d: one for d, one in whole.items() if one.header.version > 2}
    start, lines, refused = told(late)
    assert start == Start(2, nodes[2].digest)
    assert lines[-1] == newest.digest
    assert lines == told(whole)[1][2:]
    assert refused == {}
    assert fork.digest not in lines


def test_what_is_not_linked_to_the_heavier_part_is_named() -> None:
    lineage = Lineage(RULES)
    nodes = chain(lineage, [A, B], 8)
    rest = commits_of(lineage)
    del rest[nodes[3].digest]
    start, lines, refused = told(rest)
    assert start == Start(3, nodes[3].digest)
    assert lines == tuple(node.digest for node in nodes[4:])
    assert set(refused) == {nodes[1].digest, nodes[2].digest}
    assert all("not linked" in reason for reason in refused.values())


FAULTS = {
    "replayed": ({"seq": 1}, "already listed"),
    "stale": ({"base": 0}, "stale"),
    "made after it": ({"base": 9}, "not older"),
}


@pytest.mark.parametrize("whole", [True, False], ids=["from version 0", "from version 1"])
@pytest.mark.parametrize(("changes", "reason"), FAULTS.values(), ids=FAULTS.keys())
def test_a_commit_that_cannot_follow_is_refused_with_the_reason(
    changes: dict[str, object], reason: str, whole: bool
) -> None:
    lineage = Lineage(RULES)
    nodes = chain(lineage, [A, B], 3)
    made = msgspec.structs.replace(contribution(A, 4, 3), **changes)
    one = msgspec.structs.replace(listing(contribution(A, 4, 3)), contribution=made)
    record = commit(lineage, nodes[-1], [one], B)
    tree = CommitTree(RULES, Start(0, nodes[0].digest) if whole else Start(1, nodes[1].digest))
    for digest, good in commits_of(lineage).items():
        if good.header.version > tree.start.version:
            assert tree.add(digest, good) == ""
    assert reason in tree.add(b"d" * 32, record)


def test_wrong_tables_are_refused_where_they_can_be_recomputed() -> None:
    lineage = Lineage(RULES)
    (_, node) = chain(lineage, [A, B], 1)
    record = commit(lineage, node, [listing(contribution(A, 2, 1))], B, members_root=b"x" * 32)
    tree = CommitTree(RULES, Start(0, lineage.genesis.digest))
    assert node.record is not None
    assert tree.add(node.digest, node.record) == ""
    assert "already" in tree.add(node.digest, node.record)
    assert "member table" in tree.add(b"d" * 32, record)


def test_a_tree_keeps_the_newest_versions_and_says_what_comes_too_late() -> None:
    lineage = Lineage(RULES)
    nodes = chain(lineage, [A, B], 9)
    late = grow(lineage, nodes[3], [B], B)
    commits = commits_of(lineage)
    tree = CommitTree(RULES, Start(0, nodes[0].digest), kept=2)
    for node in nodes[1:]:
        assert tree.add(node.digest, commits[node.digest]) == ""
    kept = [node.version for node in nodes[1:] if tree.get(node.digest).seqs]  # type: ignore[union-attr]
    assert kept == [7, 8, 9]
    assert tree.add(late.digest, commits[late.digest]) == LATE
    fresh = grow(lineage, nodes[8], [B], B)
    assert tree.add(fresh.digest, fresh.record) == ""  # type: ignore[arg-type]
    assert tree.chain()[:8] == tuple(node.digest for node in nodes[1:9])


def test_a_join_is_part_of_the_lineage_and_cannot_be_made_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dugnad.averaging.committree.COST_MAX", 0)  # inputs are forgotten at once
    lineage = Lineage(RULES)
    trunk = branch(lineage, lineage.genesis, [A, B, C], 2)[-1]
    ours, theirs = branch(lineage, trunk, [A, B], 5), branch(lineage, trunk, [C], 5)
    made = join_of(lineage, ours[-1], theirs[-1], B)
    joined = lineage.add(made, named(made))
    after = branch(lineage, joined, [A, B], 3)[-1]
    commits = commits_of(lineage)
    start, lines, refused = told(commits)
    assert (lines[-1], refused) == (after.digest, {})
    assert joined.digest in lines
    assert not {node.digest for node in theirs} & set(lines)
    assert told(dict(reversed(commits.items()))) == (start, lines, refused)
    tree = CommitTree(RULES, start, kept=1)
    for digest, one in sorted(commits.items(), key=lambda row: (row[1].header.version, row[0])):
        assert tree.add(digest, one) == ""
    again = commit(
        lineage,
        after,
        made.inputs,
        B,
        kind="join",
        other=theirs[-1].digest,
        alpha_bits=made.header.alpha_bits,
        eta_bits=made.header.eta_bits,
        mu_bits=made.header.mu_bits,
        codec="float16",
    )
    assert "joins what its lineage lists already" in tree.add(b"d" * 32, again)


def test_the_start_is_version_0_for_an_empty_set() -> None:
    assert start_of(RULES, []) == Start(0, Lineage(RULES).genesis.digest)
    record = commit(Lineage(RULES), Lineage(RULES).genesis, [listing(contribution(A, 1, 0))], A)
    assert start_of(RULES, [row_of(b"d" * 32, record)]).version == 0
