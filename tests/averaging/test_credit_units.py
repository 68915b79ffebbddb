"""How many units are listed, settled, and done twice."""

from dugnad.averaging.creditchain import UNDO_MAX
from dugnad.averaging.formats import UnitPiece

from .test_credit import (  # noqa: TID252  the world is no installed package
    PEERS,
    RULES,
    Chain,
    fill,
    folded,
    listing,
    owned,
)


def test_a_unit_is_settled_with_the_commit_that_completed_it() -> None:
    chain = Chain(0)
    first, second = owned(0)[:2]
    chain.add(PEERS[0], [listing(PEERS[1], 0, [UnitPiece(0, first, 0, RULES.unit_size(first))])])
    fill(chain, RULES.horizon - 1)
    fold = folded(chain)
    assert (fold.units_covered, fold.units_settled, fold.twice_tokens) == (1, 0, 0)
    again = listing(PEERS[2], 0, [UnitPiece(0, first, 0, 2), UnitPiece(0, second, 0, 4)])
    digest, commit = chain.add(PEERS[0], [again])
    fold.apply(commit, digest)
    assert (fold.units_covered, fold.units_settled, fold.twice_tokens) == (2, 1, 20)
    fold.follow(0, fill(chain, UNDO_MAX + 1).commits)
    assert (fold.units_covered, fold.units_settled, fold.twice_tokens) == (2, 2, 20)
