"""The board of a set: the same bytes in whatever order, and only what hangs together counts."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dugnad.averaging.board import board_json
from dugnad.averaging.committree import Start, tell
from dugnad.averaging.coverage import CreditRules
from dugnad.averaging.credit import CreditFold
from dugnad.averaging.formats import CommitRecord
from dugnad.averaging.lineage import Lineage
from dugnad.averaging.setboard import board_of, fold_from

from .exchange_makers import (  # noqa: TID252  a helper of these tests
    INTERVAL_MS,
    RULES,
    RUN,
    SEQUENCE_TOKENS,
    A,
    B,
    C,
    chain,
    grow,
)

CREDIT = CreditRules(RUN, 1, SEQUENCE_TOKENS, unit_sequences=16, epoch_sequences=64, horizon=2)


def commits_of(lineage: Lineage) -> dict[bytes, CommitRecord]:
    return {d: node.record for d, node in lineage.nodes.items() if node.record is not None}


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=12), st.integers())
def test_equal_sets_have_boards_of_equal_bytes(choices: list[tuple[int, int]], seed: int) -> None:
    lineage = Lineage(RULES)
    nodes = [lineage.genesis]
    for n, (back, home) in enumerate(choices):
        parent = nodes[max(len(nodes) - 1 - back, 0)]
        time_ms = parent.time_ms + INTERVAL_MS + n
        nodes.append(grow(lineage, parent, [A, B], (A, B, C)[home], time_ms=time_ms))
    commits = list(commits_of(lineage).items())
    expected = board_json(board_of(CREDIT, [RULES], dict(commits)))
    random.Random(seed).shuffle(commits)
    assert board_json(board_of(CREDIT, [RULES], dict(commits))) == expected


def test_the_board_is_that_of_the_lineage_that_the_set_tells() -> None:
    lineage = Lineage(RULES)
    nodes = chain(lineage, [A, B], 5)
    grow(lineage, nodes[2], [C], C)
    commits = commits_of(lineage)
    _, lines, _ = tell(RULES, commits)
    fold = CreditFold(CREDIT)
    fold.follow(0, [(name, commits[name]) for name in lines])
    assert board_of(CREDIT, [RULES], commits) == fold.board()
    assert board_of(CREDIT, [RULES], {}).receipts == 0


@pytest.mark.parametrize("kept", [False, True])
def test_a_fold_from_later_knows_what_came_before_only_by_a_base(kept: bool) -> None:
    lineage = Lineage(RULES)
    nodes = chain(lineage, [A, B], 40)
    commits = commits_of(lineage)
    whole = CreditFold(CREDIT)
    rows = [(node.digest, commits[node.digest]) for node in nodes[1:]]
    for at in range(0, len(rows), 8):
        whole.follow(0, rows[at : at + 8])
    base = whole.snapshot()
    version = base.fragments[0].version
    assert version > 0
    later = fold_from(CREDIT, [Start(version, nodes[version].digest)], base if kept else None)
    for at in range(version, len(rows), 8):
        later.follow(0, rows[at : at + 8])
    assert (later.board() == whole.board()) is kept
