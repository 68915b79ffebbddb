"""Credit at the end of a run: under its last head nothing stays provisional."""

import dataclasses

from dugnad.averaging.credit import CreditFold, CreditRules
from dugnad.averaging.formats import CommitRecord
from dugnad.averaging.lineage import Lineage

from .exchange_makers import (  # noqa: TID252  a helper of these tests
    RULES,
    RUN,
    SEQUENCE_TOKENS,
    A,
    B,
    commit,
    contribution,
    listing,
    named,
)

CREDIT = CreditRules(
    RUN,
    fragments=1,
    sequence_tokens=SEQUENCE_TOKENS,
    unit_sequences=8,
    epoch_sequences=64,
    horizon=4,
)


def two_versions() -> list[tuple[bytes, CommitRecord]]:
    """A lineage of two versions, each with eight sequences of A."""
    lineage = Lineage(RULES)
    head, chain = lineage.genesis, []
    for version in (1, 2):
        record = commit(lineage, head, [listing(contribution(A, version, version - 1))], B)
        head = lineage.add(record, named(record))
        chain.append((named(record), record))
    return chain


def settled(budget: int) -> int:
    """Settled tokens of that lineage in a run of that budget."""
    fold = CreditFold(dataclasses.replace(CREDIT, token_budget=budget))
    fold.follow(0, two_versions())
    assert fold.settled(0) in (0, 2)
    return fold.board().tokens


def test_under_the_last_head_everything_is_settled() -> None:
    assert settled(0) == settled(10_000) == 0, "the run goes on: four versions are provisional"
    assert settled(16 * SEQUENCE_TOKENS) == 8 * SEQUENCE_TOKENS, "one unit, trained twice"


def test_a_last_head_that_another_one_replaces_settles_nothing() -> None:
    first = two_versions()
    fold = CreditFold(dataclasses.replace(CREDIT, token_budget=16 * SEQUENCE_TOKENS))
    fold.follow(0, first)
    assert fold.settled(0) == 2
    fold.undo(first[-1][0])
    assert fold.settled(0) == 0
